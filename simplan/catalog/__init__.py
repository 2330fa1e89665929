"""The catalog: devices, links, clusters, models, software, failures and more by name, every value with its source.

The data files are in the folder of this module: one file per kind, and for software one per profile. A file is parsed
once, when an entry of its kind is first requested. A name that is not in the catalog raises a ``SpecError`` that names
the nearest, or a ``NotModelledError`` if it is known but not modeled yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from simplan.base import MAX_GBIT, MIN_GBIT
from simplan.catalog.entries import check_entry, check_file, entry_of, file_of, mapping, texts, validated, yaml_error
from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.cluster.machine import THIS_MACHINE, this_machine
from simplan.cluster.topology import TOPOLOGIES, AnyTopology
from simplan.documentation import documentation
from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.model.model import ModelSpec
from simplan.problems import render_value
from simplan.software.rates import KernelRates, MemorySpread
from simplan.software.software import SoftwareSpec

__all__ = [
    "Kind",
    "NodeEntry",
    "canonical_name",
    "cluster",
    "device",
    "kernel_fields",
    "kernel_rates",
    "link",
    "make_cluster",
    "model",
    "model_fields",
    "names",
    "network_link",
    "network_of_node",
    "node",
    "published_parameters",
    "reliability",
    "software",
    "spot_zone",
    "topology",
    "topology_fields",
    "topology_source",
    "unmeasured_link",
]

Kind = Literal["devices", "links", "clusters", "topologies", "models", "software", "reliability", "spot_zones"]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_LISTED = 24
_OF_KERNELS = ("rates", "reserve_fraction", "compiled_reserve_fraction")
"""Fields of a software profile that ``rates_of`` takes from another profile; shares of memory only where neither this
profile nor one between the two says another."""
_ABOUT = ("description", "fitted_on", "source", "sources")
"""Fields of an entry that are no keys of a scenario."""
_MAX_SHOWN = 60
_NETWORK = re.compile(r"([a-z]+)-([0-9]+(?:\.[0-9]+)?)gbit")


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """Composition of one node of a cluster.

    Attributes:
        id: Catalog name of the cluster, or ``inline``.
        intra_link: Link between the devices; None when the device names none.
        inter_link: Link between nodes; None when unknown.
        host_memory_bytes: Host memory of the node; None when unknown.
        host_memory_bandwidth_bytes_per_s: Bandwidth of host memory; None when unknown.
        nics_per_node: Network cards of the node that ``inter_link`` stands for; None when unknown.
    """

    id: str
    device: DeviceSpec
    devices_per_node: int
    intra_link: LinkSpec | None
    inter_link: LinkSpec | None
    source: str = field(default="", compare=False)
    host_memory_bytes: int | None = None
    host_memory_bandwidth_bytes_per_s: float | None = None
    nics_per_node: int | None = None


def names(kind: Kind) -> tuple[str, ...]:
    """All names of one kind, in catalog order, each followed by its aliases."""
    aliases: dict[str, str] = _parsed(kind).get("aliases", {})
    listed = tuple(
        name for entry in _parsed(kind)[kind] for name in (entry, *(key for key in aliases if aliases[key] == entry))
    )
    if kind == "links":
        links = _parsed("links")
        return (*listed, *(f"{network}-{gbit}gbit" for network in links["networks"] for gbit in links["gbit_per_s"]))
    return (*listed, THIS_MACHINE) if kind == "clusters" else listed


def is_name(kind: Kind, name: str) -> bool:
    """True for a name of the catalog, such as those of ``names`` and networks of any rate."""
    return name in names(kind) or (kind == "links" and _network_of(name) is not None)


def spellings() -> dict[str, Any]:
    """Table of the names that people type, by kind (``simplan.catalog.spelling``)."""
    return _parsed("spellings")


def canonical_name(kind: Kind, name: str) -> str:
    """Name of the entry that ``name`` is an alias of; ``name`` itself for any other name."""
    aliases: dict[str, str] = _parsed(kind).get("aliases", {})
    return aliases.get(name, name)


@cache
def device(name: str) -> DeviceSpec:
    """A device."""
    entry = _entry("devices", name)
    with entry_of("devices", "devices", name):
        implied = kernel_fields(entry.get("architecture", "other"))
    sources = _sources("devices", entry["sources"]) | implied["sources"]
    return validated(DeviceSpec, {"id": name, **entry, **implied, "sources": sources}, "devices", ("devices", name))


def kernel_fields(architecture: str) -> dict[str, Any]:
    """Fields of a device that its architecture implies: ``kernels``, and their ``sources``."""
    known = ("other", *_parsed("kernels")["architectures"])
    if architecture not in known:
        fix = did_you_mean(architecture, known)
        raise SpecError(Problem(field="architecture", value=architecture, rule="is not in the catalog", fix=fix))
    return {"kernels": kernel_rates(architecture).model_dump(), "sources": _kernel_sources(architecture)}


def has_kernel_rates(architecture: str) -> bool:
    """True for an architecture with kernel efficiencies of its own, published or fitted."""
    written = _parsed("kernels")["architectures"].get(architecture, {})
    return architecture in _parsed("kernels_fitted")["architectures"] or any(key != "sources" for key in written)


@cache
def kernel_rates(architecture: str, *, textbook: bool = False) -> KernelRates:
    """Kernel efficiencies of an architecture; general values for one that is not in the catalog.

    With ``textbook``, the priors that a fit starts from, without fitted values (``kernels_fitted.yaml``).
    """
    entry = dict(_parsed("kernels")["architectures"].get(architecture, {}))
    entry.pop("sources", None)
    if not textbook:
        fitted = _parsed("kernels_fitted")
        fitted_rates = dict(fitted["architectures"].get(architecture, {}))
        attention = dict(entry.get("attention", {}))
        for name, sustained in fitted_rates.pop("attention", {}).items():
            attention[name] = attention[name] | {"sustained": sustained}
        entry |= fitted["all"] | fitted_rates | {"attention": attention}
    return validated(KernelRates, entry, "kernels", ("architectures", architecture))


@cache
def link(name: str, *, textbook: bool = False) -> LinkSpec:
    """A link.

    ``network-<n>gbit`` is a network of n Gbit/s per device, ``efa-<n>gbit`` one with AWS's EFA transport,
    and ``sharp-<n>gbit`` one whose switches reduce.
    ``tcp-<n>gbit`` is one Ethernet card of a node; the link has the rate of a node with one device
    (``network_of_node``).

    With ``textbook``, the priors that a fit starts from, without fitted values (``links_fitted.yaml``).
    """
    network = _network_of(name)
    if network is not None and not MIN_GBIT <= network[1] <= MAX_GBIT:
        rule = f"must have a rate of {MIN_GBIT:g} to {MAX_GBIT:,.0f} Gbit/s"
        shown = name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
        raise SpecError(Problem(field="link", value=shown, rule=rule, fix=f"such as {network[0]}-100gbit"))
    if network is not None:
        return network_link(network[1], network[0], textbook=textbook)
    return _link(name, name, _entry("links", name), textbook=textbook)


def _network_of(name: str) -> tuple[str, float] | None:
    """Kind and Gbit/s of a network's name, such as ``tcp-10gbit``; None for other names."""
    match = _NETWORK.fullmatch(name)
    if match is None or match[1] not in _parsed("links")["networks"] or float(match[2]) <= 0:
        return None
    return match[1], float(match[2])


def network_of_node(name: str, devices_per_node: int, nics_per_node: int = 1) -> LinkSpec | None:
    """Link that cards of a node are for each of its devices; None if the name is no link of one card per node.

    Args:
        name: ``tcp-<n>gbit``.
    """
    network = _network_of(name)
    if network is None or not MIN_GBIT <= network[1] <= MAX_GBIT:  # ``link`` tells the rule
        return None
    if not _parsed("links")["networks"][network[0]].get("per_node"):
        return None
    shared = network_link(network[1] * nics_per_node / devices_per_node, network[0])
    return shared.model_copy(update={"id": name})


def network_link(gbit_per_device: float, kind: str = "network", *, textbook: bool = False) -> LinkSpec:
    """The network between nodes.

    Args:
        gbit_per_device: Bandwidth of one device's share in one direction, Gbit/s (1e9 bit/s).
        kind: ``network`` for InfiniBand and RoCE, ``sharp`` for InfiniBand whose switches reduce, or ``efa``.
    """
    entry = {"bytes_per_s": gbit_per_device * 1e9 / 8, **_parsed("links")["networks"][kind]}
    entry.pop("per_node", None)
    return _link(f"{kind}-{gbit_per_device:g}gbit", entry.pop("fitted_as", kind), entry, textbook=textbook)


def _link(name: str, kind: str, entry: dict[str, Any], *, textbook: bool) -> LinkSpec:
    values = {"id": name, **entry, "sources": _sources("links", entry["sources"])}
    if not textbook:
        fitted = _parsed("links_fitted")["links"].get(kind, {})
        for key in (key for key in fitted if key in values["sources"]):
            start = entry.get(key)
            shown = f"{start:g}" if isinstance(start, int | float) else render_value(start)
            values["sources"][key] = f"fitted, from {shown} ({values['sources'][key]})"
        known = {key: entry[key] for key in ("relative_std",) if key in entry}
        values |= {**unmeasured_link(entry.get("library", "nccl")), **known, **fitted}
        if "launch_s" in values:
            values["sources"]["launch_s"] = "fitted, one value for all links of GPUs"
    return validated(LinkSpec, values, "links", ("links", kind))


def unmeasured_link(library: str = "nccl") -> dict[str, Any]:
    """Fields of a link that other links of its library determine: uncertainty of cost estimates, and launch time."""
    fitted = _parsed("links_fitted")
    fields = ("relative_std", "launch_s") if library == "nccl" else ("relative_std",)
    return {field: fitted[field] for field in fields}


def _kernel_sources(architecture: str) -> dict[str, str]:
    """Sources of kernel efficiencies; those without a source are assumptions."""
    textbook, kernels = kernel_rates(architecture, textbook=True), kernel_rates(architecture)
    entry = _parsed("kernels")["architectures"].get(architecture, {})
    sources = {f"kernels.{key}": source for key, source in _sources("kernels", entry.get("sources", {})).items()}
    for name in (name for name in KernelRates.model_fields if name != "inter_node_std"):
        before, now = getattr(textbook, name), getattr(kernels, name)
        if before != now and isinstance(before, float):
            key = f"kernels.{name}"
            sources[key] = f"fitted, from {before:g} ({sources.get(key, 'an assumption')})"
    return sources


def memory_bytes_of(device: str) -> int | None:
    """Memory of a device; None if unknown."""
    memory: int | None = _entry("devices", device).get("memory_bytes")
    return memory


def device_of(cluster: str) -> str:
    """Name of a cluster's device; empty for ``this-machine``."""
    return "" if cluster == THIS_MACHINE else str(_entry("clusters", cluster)["device"])


@cache
def node(name: str) -> NodeEntry:
    """Composition of one node of a catalog cluster (``this-machine`` is none: see ``cluster``)."""
    entry = _entry("clusters", name)
    with entry_of("clusters", "clusters", name):
        its_device = device(entry["device"])
    node_entry = NodeEntry(
        id=name,
        device=its_device,
        devices_per_node=entry["devices_per_node"],
        intra_link=None if its_device.intra_link is None else link(its_device.intra_link),
        inter_link=network_link(
            entry["nics_per_node"] * entry["nic_gbit"] / entry["devices_per_node"], entry.get("network", "network")
        ),
        nics_per_node=entry["nics_per_node"],
        source=_sources("clusters", {"": entry["source"]})[""],
        host_memory_bytes=entry["host_memory_bytes"],
        host_memory_bandwidth_bytes_per_s=entry["host_memory_bandwidth_bytes_per_s"],
    )
    with entry_of("clusters", "clusters", name):
        make_cluster(node_entry, node_entry.devices_per_node + 1)  # all fields count with a second node
    return node_entry


def cluster(name: str, num_devices: int | None = None) -> ClusterSpec:
    """A cluster; without ``num_devices`` one full node (for ``this-machine``, one rank per core).

    Raises:
        SpecError: No such cluster, or more ranks than this machine can run.
    """
    if name == THIS_MACHINE:
        return this_machine(num_devices, link("loopback"))
    entry = node(name)
    return make_cluster(entry, entry.devices_per_node if num_devices is None else num_devices)


def make_cluster(entry: NodeEntry, num_devices: int) -> ClusterSpec:
    """Cluster of equal nodes with ``num_devices`` devices.

    Raises:
        SpecError: There are too many devices.
    """
    fields = {
        "id": entry.id,
        "device": entry.device,
        "devices_per_node": entry.devices_per_node,
        "num_devices": num_devices,
        "intra_link": entry.intra_link if entry.devices_per_node > 1 else None,
        "inter_link": entry.inter_link if num_devices > entry.devices_per_node else None,
        "nics_per_node": entry.nics_per_node if num_devices > entry.devices_per_node else None,
        "host_link": None if entry.device.host_link is None else link(entry.device.host_link),
        "host_memory_bytes": entry.host_memory_bytes,
        "host_memory_bandwidth_bytes_per_s": entry.host_memory_bandwidth_bytes_per_s,
        "source": entry.source,
    }
    return ClusterSpec.from_fields(fields)


@cache
def topology(name: str) -> AnyTopology:
    """A network topology."""
    fields = topology_fields(name)
    if (kind := fields["kind"]) not in TOPOLOGIES:
        problem = Problem(
            field=f"topologies.{name}.kind",
            value=kind,
            rule="is not a known choice",
            fix=did_you_mean(kind, TOPOLOGIES),
        )
        raise SpecError(problem, file=file_of("topologies"))
    return validated(TOPOLOGIES[kind], fields, "topologies", ("topologies", name))


def topology_fields(name: str) -> dict[str, Any]:
    """Fields of a topology as a scenario would give them, to be overridden."""
    return {key: value for key, value in _entry("topologies", name).items() if key != "source"}


def topology_source(name: str) -> str:
    """Source of a topology."""
    return _sources("topologies", {"": _entry("topologies", name)["source"]})[""]


@cache
def model(name: str) -> ModelSpec:
    """A model at the sequence length of its pretraining."""
    return validated(ModelSpec, model_fields(name), "models", ("models", name))


def model_fields(name: str) -> dict[str, Any]:
    """Fields that the catalog states for a model, to be overridden before ``ModelSpec`` derives the others."""
    entry = dict(_entry("models", name))
    del entry["published_parameters"]
    source = _sources("models", {"": entry.pop("source")})[""]
    return {"name": name, **entry, "sources": {"model": source}}


def published_parameters(name: str) -> int:
    """Parameter count that the model's source states, perhaps rounded."""
    return int(_entry("models", name)["published_parameters"])


def reliability(name: str) -> dict[str, Any]:
    """Published failures as keys of a scenario's ``reliability``, to be overridden."""
    return {key: value for key, value in _entry("reliability", name).items() if key not in _ABOUT}


def spot_zone(name: str) -> dict[str, Any]:
    """Preemptions and waits of a zone as keys of a scenario's ``spot``: ``preemptions_per_h`` and ``wait_h``."""
    return {key: value for key, value in _entry("spot_zones", name).items() if key not in _ABOUT}


def about(kind: Literal["reliability", "spot_zones"], name: str) -> dict[str, Any]:
    """Description and sources of published failures or of a zone; for failures, ``fitted_on`` too."""
    entry = _entry(kind, name)
    sources = entry["sources"] if "sources" in entry else dict.fromkeys(spot_zone(name), entry["source"])
    said = {key: entry[key] for key in ("description", "fitted_on") if key in entry}
    return said | {"sources": _sources(kind, sources)}


@cache
def software(name: str, *, textbook: bool = False) -> SoftwareSpec:
    """A software profile.

    With ``textbook``, the priors that a fit starts from, without fitted values (``kernels_fitted.yaml``).
    """
    if name not in _software_names():
        _entry("software", name)  # raises
    file, entry = f"software/{name}", _software_entry(name)
    references = entry.pop("references")
    entry["rates"] = mapping(entry.get("rates", {}), file, "rates")
    fields = {"id": name, **entry, "sources": _expanded(entry["sources"], references)}
    rates_of = _profile_of(entry, "rates_of", file) if "rates_of" in entry else None
    fields["memory_spread"], fields["sources"]["memory_spread"] = _memory_spread(name, rates_of)
    fitted = {} if textbook else _parsed("kernels_fitted")["software"].get(name, {})
    if rates_of is not None:
        same = software(rates_of, textbook=textbook)
        taken = [field for field in _OF_KERNELS if field == "rates" or field not in entry]
        fields |= {field: getattr(same, field) for field in taken}
        fields["rates_of"] = same.rates_profile
        with entry_of(file, "rates"):
            fields["rates"] = same.rates.model_copy(update=entry["rates"] | fitted)
        inherited = {field: f"as {same.id}: {same.sources[field]}" for field in taken if field in same.sources}
        if entry["rates"]:
            inherited["rates"] = f"{fields['sources'].get('rates', '')}; otherwise {inherited['rates']}"
        fields["sources"] |= inherited
    elif fitted:
        fields["rates"] = entry["rates"] | fitted
        fields["sources"] = {"rates": ""} | fields["sources"]
        fields["sources"]["rates"] = f"{fields['sources']['rates']}; fitted on {fitted['fitted_on']}".removeprefix("; ")
    elif not entry["rates"]:
        del fields["rates"]
    return validated(SoftwareSpec, fields, file)


def _memory_spread(name: str, rates_of: str | None) -> tuple[dict[str, Any], str]:
    """Uncertainty of peak memory under a framework, and its source; also by the peaks of the profile of its rates."""
    fitted = _parsed("memory_fitted")
    owners = [fitted["software"][owner] for owner in (rates_of, name) if owner in fitted["software"]]
    spread = fitted["unfitted"].copy()
    for of_owner in owners:
        spread |= of_owner
    if not owners:
        return spread, "as of published peaks whose source and profile are left out"
    return spread, f"fitted on {' and '.join(of_owner['fitted_on'] for of_owner in owners)}"


def known() -> dict[str, Any]:
    """Fitted runs by what they ran on, and deviations where there are none (``simplan.cost.known``)."""
    return _parsed("known")


def unfitted_memory_spread() -> MemorySpread:
    """Uncertainty of peak memory under a framework without published peaks of its own."""
    return MemorySpread.model_validate(_parsed("memory_fitted")["unfitted"])


def has_compared_peaks(runtime: str) -> bool:
    """True for a runtime of software whose predicted peaks of memory were compared with measured ones."""
    return runtime in _parsed("memory_fitted")["runtimes"]


def _software_files() -> dict[str, Any]:
    """Software profiles, one per file, with torch first."""
    entries = {name: _software_entry(name) for name in _software_names()}
    references = {key: value for entry in entries.values() for key, value in entry.pop("references").items()}
    return {"software": entries, "references": references}


@cache
def _software_names() -> tuple[str, ...]:
    files = resources.files("simplan.catalog").joinpath("software").iterdir()
    names = (file.name.removesuffix(".yaml") for file in files)
    return tuple(sorted(names, key=lambda name: (name != "torch", name)))


_NOT_INHERITED = ("executable", "stands_for")
"""Fields that a profile says itself: who differs from what `simplan run` executes may not be executed as it, and is of
other versions."""
_NO_KEYS = {"id": "is the name of the file", "memory_spread": "is fitted by `make fit`"}
_BUCKETS = ("bucket_bytes", "first_bucket_bytes")


def _software_entry(name: str, *parents: str) -> dict[str, Any]:
    """Fields of a profile, merged over those of the profile named in ``like``."""
    file = f"software/{name}"
    written = {"references": {}, "sources": {}} | _parsed(file)
    written |= {key: texts(written[key], file, key) for key in ("references", "sources")}
    for key in (key for key in _NO_KEYS if key in written):
        raise SpecError(Problem(field=key, rule=_NO_KEYS[key], fix="remove it"), file=file_of(file))
    base = None if "like" not in written else _profile_of(written, "like", file)
    if base in (name, *parents):
        rule, fix = "is a profile that differs from this one itself", "name another one, or remove like"
        raise SpecError(Problem(field="like", value=base, rule=rule, fix=fix), file=file_of(file))
    written.pop("like", None)
    if base is None:
        entry = written
    else:
        inherited = _software_entry(base, name, *parents)
        dropped = {*_NOT_INHERITED, *(_BUCKETS if written.get("grad_overlap") is False else ())}
        dropped |= {*(_OF_KERNELS[1:] if "rates_of" in written else ())}
        sourced = {key.partition(".")[0] for key in written["sources"]}
        changed = {
            key for key in written if written[key] != inherited.get(key)
        }  # its source is about the other's value
        unsourced = dropped | (changed - sourced)
        kept = {key: text for key, text in inherited["sources"].items() if key.partition(".")[0] not in unsourced}
        inherited = {key: value for key, value in inherited.items() if key not in dropped} | {"sources": kept}
        nested = {key: inherited[key] | written[key] for key in ("references", "sources")}
        entry = inherited | written | nested
    _check_buckets(entry, written, file)
    return entry


def _check_buckets(entry: Mapping[str, Any], written: Mapping[str, Any], file: str) -> None:
    """Refuse sizes of buckets where gradients are reduced at once, and their lack where they are not."""
    overlaps, options = entry.get("grad_overlap", True), entry.get("options", ())
    may_overlap = overlaps is not False or (isinstance(options, list) and "grad_overlap" in options)
    for key in (key for key in _BUCKETS if key in written and not may_overlap):
        rule = "is about reducing gradients while backward runs, and grad_overlap = false reduces all of them after it"
        problem = Problem(
            field=key, value=render_value(written[key]), rule=rule, fix="remove it, or use grad_overlap: true"
        )
        raise SpecError(problem, file=file_of(file))
    for key in (key for key in _BUCKETS if key not in entry and may_overlap):
        rule = "is missing, and gradients are reduced while backward runs (grad_overlap)"
        raise SpecError(Problem(field=key, rule=rule, fix=f"add {key}: 26214400"), file=file_of(file))


def _profile_of(entry: Mapping[str, Any], key: str, file: str) -> str:
    """Name of a profile that another one names.

    Raises:
        SpecError: There is no such profile.
    """
    name, known = entry[key], _software_names()
    if name not in known:
        fix = did_you_mean(str(name), known)
        problem = Problem(field=key, value=render_value(name), rule="is no profile of the catalog", fix=fix)
        raise SpecError(problem, file=file_of(file))
    return str(name)


@cache
def _parsed(name: str) -> dict[str, Any]:
    """Parsed contents of a catalog file, or of all files of software."""
    if name == "software":
        return _software_files()
    text = resources.files("simplan.catalog").joinpath(*f"{name}.yaml".split("/")).read_text(encoding="utf-8")
    try:
        data: dict[str, Any] = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise yaml_error(text, name) from None
    if not isinstance(data, dict) or not all(isinstance(data.get(key, {}), dict) for key in (name, "references")):
        check_file(data, name)
    return data


_INSTEAD: dict[str, str] = {
    "devices": f"{documentation('how-to/devices')} says how to describe another",
    "clusters": "or give device and devices_per_node in place of a preset",
    "topologies": "or give its kind and values (`simplan show topology`)",
    "reliability": "or give device_mtbf_h in place of a preset",
    "spot_zones": "or give preemptions_per_h and wait_h in place of a zone",
}
"""Advice for an entry that does not exist, by kind."""


def _entry(kind: Kind, name: str) -> dict[str, Any]:
    data = _parsed(kind)
    singular = "topology" if kind == "topologies" else kind.removesuffix("s").replace("_", " ")
    own_name = canonical_name(kind, name)
    if own_name in data[kind]:
        return check_entry(kind, own_name, data[kind][own_name])
    from simplan.catalog.spelling import UNKNOWN, known_as, refusal

    missing: dict[str, str] = data.get("not_modelled", {})
    if (known := known_as(kind, name, missing)) != "":
        listed = f"modeled: {', '.join(data[kind])}"
        fix = listed if len(data[kind]) <= _MAX_LISTED else f"`simplan show {kind}` lists all"
        rule = f"{missing[known]} is not modeled yet"
        raise NotModelledError(Problem(field=singular, value=name, rule=rule, fix=fix))
    rule, fix = refusal(kind, name)
    fix = fix or did_you_mean(name, (*names(kind), *missing)) or f"`simplan show {kind}` lists them"
    if kind in _INSTEAD and "device and devices_per_node" not in fix and rule == UNKNOWN:
        fix += f"{' ' if fix.endswith('?') else '; '}{_INSTEAD[kind]}"
    raise SpecError(Problem(field=singular, value=name, rule=rule, fix=fix))


def _sources(kind: Kind | Literal["kernels"], sources: dict[str, str]) -> dict[str, str]:
    """Sources with the file's short references expanded: ``mamf: shape`` is a reference and a detail."""
    return _expanded(sources, _parsed(kind)["references"])


def _expanded(sources: Mapping[str, str], references: Mapping[str, str]) -> dict[str, str]:
    """Sources with short references expanded."""

    def expanded(source: str) -> str:
        name, colon, detail = source.partition(": ")
        return references.get(name, name) + colon + detail

    return {key: expanded(source) for key, source in sources.items()}
