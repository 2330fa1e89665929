"""The sections of a scenario file, read one by one, their problems collected.

A model, a cluster and a device are each a preset with overrides, or given inline::

    model: {preset: gpt2-124m, seq_len: 512, num_hidden_layers: 4}
    cluster: {preset: dgx-h100, num_devices: 12}
    cluster: {preset: this-machine, num_devices: 2}
    cluster: {preset: this-machine, num_devices: 4, num_nodes: 2, inter_link_gbit_per_device: 10}
    cluster:
      device: {preset: a100-sxm-80gb, memory_bytes: 60_000_000_000}
      devices_per_node: 4
      intra_link: pcie4
      inter_link_gbit_per_device: 100
      num_nodes: 2

The network is InfiniBand or RoCE of so many Gbit/s per device, unless ``inter_link`` names another, e.g. efa-400gbit;
between machines like this one it is Ethernet with TCP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from simplan.document import Document
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.interop.huggingface import model_fields_from_config
from simplan.io import read_json
from simplan.problems import find_place, in_file_order, render_value, validate
from simplan.scenario.documents import draw_documents
from simplan.scenario.expectation import Expectation
from simplan.spec import catalogue
from simplan.spec.base import Count, Positive, Spec
from simplan.spec.hardware import ClusterSpec, DeviceSpec, HostBytes, LinkSpec
from simplan.spec.machine import THIS_MACHINE, this_machine
from simplan.spec.model import ModelSpec
from simplan.spec.software import SoftwareSpec

__all__ = ["Sections", "read_cluster", "read_expectations", "read_model", "read_software"]

Model = TypeVar("Model", bound=BaseModel)
Found = TypeVar("Found")
_Path = tuple[str | int, ...]
_MAX_NAME = 1000
_MAX_EXPECTATIONS = 1000


class Sections:
    """Reads parts of one document and collects what is wrong with them.

    Args:
        document: The file's data and places.
        file: Its name.
    """

    def __init__(self, document: Document, file: str) -> None:
        self.file = file
        self._lines = document.lines
        self._problems: list[Problem] = []
        self._all_unmodelled = True

    def read(self, model: type[Model], data: Any, path: _Path) -> Model | None:
        """Data as a spec; None, with the problems kept, when it is not one."""
        result, problems = validate(model, data, self._lines, prefix=path)
        self._keep(problems, modelled=True)
        return result

    def refuse(self, path: _Path, rule: str, *, value: Any = None, fix: str = "") -> None:
        """Keeps one problem."""
        self._keep([self._problem(path, rule, value, fix)], modelled=True)

    def not_modelled(self, path: _Path, rule: str, *, value: Any = None, fix: str = "") -> None:
        """Keeps the refusal of an option that is not modelled yet."""
        self._keep([self._problem(path, rule, value, fix)], modelled=False)

    def look_up(self, path: _Path, find: Callable[[Any], Found], name: Any) -> Found | None:
        """``find(name)``; None, with its problems kept under ``path``, when it raises."""
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            self.refuse(path, "must be a name", value=name, fix="write one word")
            return None
        try:
            return find(name)
        except SpecError as error:
            self.keep(error, path)
            return None

    def keep(self, error: SpecError, path: _Path) -> None:
        """Keeps the problems of an error, as problems of the field at ``path``."""
        field, place = _dotted(path), find_place(self._lines, path)
        problems = [replace(problem, field=field).at(*place) for problem in error.problems]
        self._keep(problems, modelled=not isinstance(error, NotModelledError))

    def is_mapping(self, data: Any, path: _Path, example: str) -> bool:
        """Whether the data is a mapping; if not, says what to write."""
        if not isinstance(data, dict):
            self.refuse(path, "must be a mapping (key: value)", value=data, fix=f"write {example}")
        return isinstance(data, dict)

    def raise_problems(self) -> None:
        """Raises what was kept, in the order of the file.

        Raises:
            SpecError: There were problems; a NotModelledError when all are options that are not modelled yet.
        """
        if self._problems:
            ordered = sorted(dict.fromkeys(self._problems), key=in_file_order)
            raise (NotModelledError if self._all_unmodelled else SpecError)(ordered, file=self.file)

    def _keep(self, problems: tuple[Problem, ...] | list[Problem], *, modelled: bool) -> None:
        self._problems.extend(problems)
        if problems and modelled:
            self._all_unmodelled = False

    def _problem(self, path: _Path, rule: str, value: Any, fix: str) -> Problem:
        shown = None if value is None else render_value(value)
        return Problem(field=_dotted(path), value=shown, rule=rule, fix=fix).at(*find_place(self._lines, path))


def _dotted(path: _Path) -> str:
    return ".".join(str(part) for part in path)


def read_model(sections: Sections, data: Any) -> ModelSpec | None:
    """The section ``model``: ``preset`` or ``hf_config`` with overrides, or inline."""
    if not sections.is_mapping(data, ("model",), "{preset: gpt2-124m}"):
        return None
    given = dict(data)
    fields: dict[str, Any] | None = {}
    if "preset" in given and "hf_config" in given:
        sections.refuse(("model", "hf_config"), "cannot go with preset", fix="keep one of the two")
        return None
    if "preset" in given:
        fields = sections.look_up(("model", "preset"), catalogue.model_fields, given.pop("preset"))
    elif "hf_config" in given:
        fields = _hf_fields(sections, given.pop("hf_config"), given.get("seq_len"))
    if fields is None:
        return None
    return _complete_model(sections, {**fields, **given})


def _hf_fields(sections: Sections, name: Any, seq_len: Any) -> dict[str, Any] | None:
    def read(name: str) -> dict[str, Any]:
        path = Path(sections.file).parent / name
        try:
            config = read_json(path)
            length = seq_len if isinstance(seq_len, int) else None
            return model_fields_from_config(config, name=path.parent.name or path.stem, seq_len=length)
        except SpecError as error:
            shown = render_value(name)
            raise type(error)([Problem(field="", value=shown, rule=p.sentence()) for p in error.problems]) from None

    return sections.look_up(("model", "hf_config"), read, name)


def _complete_model(sections: Sections, fields: dict[str, Any]) -> ModelSpec | None:
    hidden: Any = fields.get("hidden_size")
    heads: Any = fields.get("num_attention_heads")
    known = isinstance(hidden, int) and isinstance(heads, int) and "head_dim" not in fields
    if known and min(hidden, heads) > 0 and hidden % heads:
        sections.refuse(
            ("model", "num_attention_heads"),
            f"must divide hidden_size = {hidden}",
            value=heads,
            fix=f"use {_nearest_divisor(hidden, heads)}, or give head_dim",
        )
        return None
    if isinstance(fields.get("document_lengths"), dict):
        drawn = draw_documents(sections, fields["document_lengths"], fields.get("seq_len"))
        if drawn is None:
            return None
        fields = fields | drawn
    return sections.read(ModelSpec, fields, ("model",))


def _nearest_divisor(number: int, value: int) -> int:
    below = next(d for d in range(min(value, number, 10**6), 0, -1) if number % d == 0)
    return next((d for d in range(value, min(2 * value - below, number) + 1) if number % d == 0), below)


class _Cluster(Spec):
    """The section ``cluster`` as written; ``device`` and the links are a name or a mapping."""

    preset: Any = None
    device: Any = None
    devices_per_node: Count | None = None
    intra_link: Any = None
    inter_link: Any = None
    inter_link_gbit_per_device: Positive | None = None
    host_memory_bytes: HostBytes | None = None
    num_nodes: Count | None = None
    num_devices: Count | None = None


def read_cluster(sections: Sections, data: Any) -> ClusterSpec | None:
    """The section ``cluster``: ``preset`` with overrides, or inline."""
    if not sections.is_mapping(data, ("cluster",), "{preset: dgx-h100}"):
        return None
    section = sections.read(_Cluster, data, ("cluster",))
    if section is None:
        return None
    if section.preset == THIS_MACHINE:
        return _this_machine(sections, section)
    entry: catalogue.NodeEntry | None = None
    if section.preset is not None:
        entry = sections.look_up(("cluster", "preset"), catalogue.node, section.preset)
        if entry is None:
            return None
    elif section.device is None or section.devices_per_node is None:
        key = "device" if section.device is None else "devices_per_node"
        fix = "give preset, or device and devices_per_node"
        sections.refuse(("cluster", key), "is missing", fix=fix)
        return None
    device = entry.device if entry else None
    if section.device is not None:
        device = _device(sections, section, device)
    if device is None:
        return None
    intra_link, found = _intra_link(sections, section, device, entry)
    inter_link, found_between = _inter_link(sections, section, entry)
    per_node = section.devices_per_node or (entry.devices_per_node if entry else 0)
    num_devices = _num_devices(sections, section, per_node)
    if not found or not found_between or num_devices is None:
        return None
    node = catalogue.NodeEntry(
        id=entry.id if entry else "inline",
        device=device,
        devices_per_node=per_node,
        intra_link=intra_link,
        inter_link=inter_link,
        source=entry.source if entry else "the scenario",
        host_memory_bytes=section.host_memory_bytes or (entry.host_memory_bytes if entry else None),
    )
    return catalogue.make_cluster(node, num_devices)


def _this_machine(sections: Sections, section: _Cluster) -> ClusterSpec | None:
    """CPU ranks of this machine, or its accelerators when the section names a device."""
    num_nodes = section.num_nodes or 1
    of_one = ("devices_per_node", "host_memory_bytes")
    for key in of_one if num_nodes > 1 else (*of_one, "inter_link", "inter_link_gbit_per_device"):
        if getattr(section, key) is not None:
            rule = "has no meaning for this-machine" + ("" if num_nodes > 1 else ", which is one node")
            sections.refuse(("cluster", key), rule, fix="remove it")
            return None
    if section.device is not None:
        if num_nodes > 1:
            rule = "this-machine with a device of its own is one node"
            sections.refuse(("cluster", "num_nodes"), rule, value=num_nodes, fix="use 1, or a preset of many nodes")
            return None
        return _accelerators_here(sections, section)
    try:
        if num_nodes > 1:
            cluster = _machines_like_this(sections, section, num_nodes)
        else:
            cluster = catalogue.cluster(THIS_MACHINE, section.num_devices)
    except SpecError as error:
        sections.keep(error, ("cluster", "num_devices"))
        return None
    if cluster is None:
        return None
    link, found = _intra_link(sections, section, cluster.device, None)
    return cluster.model_copy(update={"intra_link": link}) if found else None


def _machines_like_this(sections: Sections, section: _Cluster, num_nodes: int) -> ClusterSpec | None:
    """Several nodes like this one, joined by Ethernet."""
    ranks = section.num_devices or num_nodes
    if ranks % num_nodes:
        rule = f"must be a multiple of num_nodes = {num_nodes}, as all nodes run as many ranks"
        fix = f"use {ranks - ranks % num_nodes or num_nodes} or {ranks - ranks % num_nodes + num_nodes}"
        sections.refuse(("cluster", "num_devices"), rule, value=ranks, fix=fix)
        return None
    if section.inter_link is None and section.inter_link_gbit_per_device is None:
        rule = "is needed to join several nodes"
        sections.refuse(("cluster", "inter_link_gbit_per_device"), rule, fix="give the Gbit/s of each rank")
        return None
    inter_link, found = _inter_link(sections, section, None, "tcp")
    if not found:
        return None
    return this_machine(ranks, catalogue.link("loopback"), num_nodes=num_nodes, inter_link=inter_link)


def _accelerators_here(sections: Sections, section: _Cluster) -> ClusterSpec | None:
    device = _device(sections, section, None)
    if device is None:
        return None
    link, found = _intra_link(sections, section, device, None)
    num_devices = section.num_devices or 1
    if not found:
        return None
    node = catalogue.NodeEntry(THIS_MACHINE, device, num_devices, link, None, "named in the scenario")
    return catalogue.make_cluster(node, num_devices)


def _device(sections: Sections, section: _Cluster, default: DeviceSpec | None) -> DeviceSpec | None:
    """A device by name, or a mapping: overrides of its ``preset`` (of the cluster's device when it has none)."""
    path: _Path = ("cluster", "device")
    data = section.device
    if not isinstance(data, dict):
        return sections.look_up(path, catalogue.device, data)
    overrides = {key: value for key, value in data.items() if key != "preset"}
    if "preset" in data:
        default = sections.look_up((*path, "preset"), catalogue.device, data["preset"])
        if default is None:
            return None
    base: dict[str, Any] = default.model_dump() if default else {"id": "inline"}
    sources = {**base.get("sources", {}), **dict.fromkeys(overrides, "the scenario")}
    device = sections.read(DeviceSpec, {**base, "sources": sources, **overrides}, path)
    if device is not None and device.host_link is not None:
        found = sections.look_up((*path, "host_link"), catalogue.link, device.host_link)
        return None if found is None else device
    return device


def _intra_link(
    sections: Sections, section: _Cluster, device: DeviceSpec, entry: catalogue.NodeEntry | None
) -> tuple[LinkSpec | None, bool]:
    """``(link, found)``: what joins devices of a node; found is False when its description is wrong."""
    if section.intra_link is not None:
        link = _link(sections, ("cluster", "intra_link"), section.intra_link)
        return link, link is not None
    if entry is not None and section.device is None:
        return entry.intra_link, True
    if device.intra_link is None:
        return None, True
    link = sections.look_up(("cluster", "device"), catalogue.link, device.intra_link)
    return link, link is not None


def _inter_link(
    sections: Sections, section: _Cluster, entry: catalogue.NodeEntry | None, kind: str = "network"
) -> tuple[LinkSpec | None, bool]:
    """The same of what joins nodes; ``kind`` is the network of so many Gbit/s."""
    gbit = section.inter_link_gbit_per_device
    if section.inter_link is not None:
        if gbit is not None:
            rule = "is given twice, with inter_link_gbit_per_device"
            sections.refuse(("cluster", "inter_link"), rule, value=section.inter_link, fix="give one of the two")
            return None, False
        link = _link(sections, ("cluster", "inter_link"), section.inter_link)
        return link, link is not None
    if gbit is not None:
        return catalogue.network_link(gbit, kind), True
    return entry.inter_link if entry else None, True


def _link(sections: Sections, path: _Path, data: Any) -> LinkSpec | None:
    """A link by name, or a mapping."""
    if not isinstance(data, dict):
        return sections.look_up(path, catalogue.link, data)
    return sections.read(LinkSpec, {"id": "inline", **catalogue.unmeasured_link(), **data}, path)


def _num_devices(sections: Sections, section: _Cluster, per_node: int) -> int | None:
    """Devices of the job: as given, or full nodes, one without either."""
    nodes, devices = section.num_nodes, section.num_devices
    if nodes is None or devices is None:
        return devices or per_node * (nodes or 1)
    if -(-devices // per_node) != nodes:
        rule = f"needs {-(-devices // per_node)} nodes of {per_node}, and num_nodes = {nodes}"
        sections.refuse(("cluster", "num_devices"), rule, value=devices, fix="give one of the two")
        return None
    return devices


def read_software(sections: Sections, data: Any) -> SoftwareSpec | None:
    """The section ``software``: a name in the catalogue, or ``preset`` with its options."""
    if not isinstance(data, dict):
        return sections.look_up(("software",), catalogue.software, data)
    chosen = {key: value for key, value in data.items() if key != "preset"}
    profile = sections.look_up(("software", "preset"), catalogue.software, data.get("preset", "torch"))
    if profile is None:
        return None
    for key in chosen.keys() - set(profile.options):
        known = f"its options are {', '.join(profile.options)}" if profile.options else "it has no options"
        sections.refuse(("software", key), f"is no option of {profile.id}", value=chosen[key], fix=known)
        return None
    return sections.read(SoftwareSpec, {**profile.model_dump(), **chosen}, ("software",))


def read_expectations(sections: Sections, data: Any) -> tuple[Expectation, ...]:
    """The section ``expect``: a list of expectations."""
    if data is None or not isinstance(data, list | tuple):
        example = "a list: - {metric: step_time_s, max: 1.5}"
        sections.refuse(("expect",), "must be a list", value=data, fix=f"write {example}")
        return ()
    if len(data) > _MAX_EXPECTATIONS:
        sections.refuse(
            ("expect",), f"has {len(data):,} entries, more than {_MAX_EXPECTATIONS:,}", fix="use several files"
        )
        return ()
    found = [sections.read(Expectation, item, ("expect", index)) for index, item in enumerate(data)]
    return tuple(expectation for expectation in found if expectation is not None)
