"""Scenarios after a choice by name: of a model, nodes, a framework or a network; and after a change of their numbers.

Names are those of the catalog, or what people type (``simplan.scenario.names``). Functions take and return scenarios as
plain data, and never change their arguments.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from app.fitting import (
    Document,
    cluster_size,
    fitted,
    is_above_one,
    is_count,
    model_of,
    num_devices,
    section,
    with_value,
)
from simplan import catalog
from simplan.catalog.spelling import find
from simplan.cluster.machine import THIS_MACHINE, machine_memory_bytes, max_ranks, num_cores
from simplan.document import parse_yaml
from simplan.model.families import FAMILIES
from simplan.scenario.names import LARGEST_NODE, says_numbers, with_catalog_names
from simplan.training import PREFERENCE_TASKS
from simplan.wording import divisors

_SIZES = ("num_nodes", "num_devices", "devices_per_node")
_NETWORK = ("inter_link", "inter_link_gbit_per_device", "inter_link_gbit_per_node", "nics_per_node", "nic_gbit")
_LOCAL_FLOP = 1e12
"""FLOPs of a step that CPU cores take in seconds."""
_EXAMPLE = "ddp"
"""Scenario of ``simplan demo`` for this machine."""


def with_model(document: Document, text: str) -> Document:
    """The scenario with another model; the rank of adapters stays if the model can have them.

    Raises:
        SpecError: The name stands for no model, or for several.
    """
    name = _named({"model": {"preset": text}})["model"]["preset"]
    family = catalog.model_fields(name)["family"]
    rank = section(document, "model").get("lora_rank")
    keeps = rank is not None and "lora_rank" in FAMILIES[family].fields
    changed = document | {"model": {"preset": name} | ({"lora_rank": rank} if keeps else {})}
    return changed if keeps else with_adapters(changed, None)


def with_adapters(document: Document, rank: Any) -> Document:
    """The scenario that trains adapters of a rank; all weights for None and 0."""
    model = {key: value for key, value in section(document, "model").items() if key != "lora_rank"}
    training = dict(section(document, "training"))
    of_preferences = training.get("task") in PREFERENCE_TASKS
    if rank:
        task = training["task"] if of_preferences else "lora"
        return document | {"model": model | {"lora_rank": rank}, "training": training | {"task": task}}
    model.pop("lora_targets", None)
    training.pop("base_weights", None)
    training.pop("preference", None)  # its reference may be the model without adapters
    if training.get("task") == "lora":
        del training["task"]
    return document | {"model": model, "training": training}


def with_framework(document: Document, text: str) -> tuple[Document, list[str]]:
    """The scenario with another framework and the options that both have; and the options left out, in words.

    Raises:
        SpecError: The name stands for no framework, or for several.
    """
    name = _named({"software": text})["software"]
    profile = catalog.software(name)
    options = {key: value for key, value in section(document, "software").items() if key != "preset"}
    lost = [key for key in options if key not in profile.options]
    kept = {key: value for key, value in options.items() if key not in lost}
    changed = document | {"software": {"preset": name, **kept}}
    return without_defaults(changed), [f"{name} has no option {key}" for key in lost]


def without_defaults(document: Document) -> Document:
    """The scenario without values that a framework or a topology has by itself; one with its own values is a name."""
    changed, software = dict(document), document.get("software")
    if isinstance(software, dict) and software.get("preset", "torch") in catalog.names("software"):
        profile = catalog.software(software.get("preset", "torch"))
        changed["software"] = _short({"preset": profile.id, **software}, profile.model_dump())
    topology = section(document, "cluster").get("topology")
    if isinstance(topology, dict) and topology.get("preset") in catalog.names("topologies"):
        defaults = catalog.topology(topology["preset"]).model_dump()
        changed["cluster"] = document["cluster"] | {"topology": _short(topology, defaults)}
    return changed


def _short(mapping: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any] | str:
    kept = {key: value for key, value in mapping.items() if key == "preset" or value != defaults.get(key)}
    return kept if len(kept) > 1 else str(mapping["preset"])


def with_link(document: Document, text: str, key: str) -> Document:
    """The scenario with another link.

    Args:
        key: ``intra_link`` between the devices of a node, or ``inter_link`` between nodes.

    Raises:
        SpecError: The name stands for no link, or for several.
    """
    lost = _NETWORK if key in _NETWORK else ()
    others = {name: value for name, value in section(document, "cluster").items() if name not in lost}
    return document | {"cluster": _named({"cluster": others | {key: text}})["cluster"]}


def open_links(document: Document) -> tuple[str, ...]:
    """Keys of the links that the scenario names, or that the catalog does not know for the nodes of a device.

    A link that joins nothing, such as the network of a single node, is left out unless its name is wrong.
    """
    cluster, size = section(document, "cluster"), cluster_size(document)
    joined = {"intra_link": size.devices_per_node, "inter_link": size.num_nodes}
    keys = [
        key
        for key, number in joined.items()
        if key in cluster and (number != 1 or not catalog.is_name("links", str(cluster[key])))
    ]
    device = cluster.get("device")
    if _is_of_devices(cluster) and isinstance(device, str) and catalog.is_name("devices", device):
        if is_above_one(size.devices_per_node) and catalog.device(device).intra_link is None:
            keys.append("intra_link")
        if is_above_one(size.num_nodes) and not set(_NETWORK) & cluster.keys():
            keys.append("inter_link")
    return tuple(dict.fromkeys(keys))


def kind_of(document: Document) -> str:
    """Name of the nodes or of the device of a cluster; empty for one that no single name describes."""
    cluster = section(document, "cluster")
    names = [cluster[key] for key in ("preset", "device", "nodes") if key in cluster]
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""


def with_kind(document: Document, text: str) -> tuple[Document, list[str]]:
    """The scenario on other nodes, or on nodes of a device, and what else changes, in words.

    Numbers of nodes and devices stay unless the name says them. A device alone has the link that the catalog knows for
    it, as with ``--device``; its network, which the catalog does not know, is the one that the nodes before had.

    Raises:
        SpecError: The name stands for no nodes and no device, or for several.
    """
    before = section(document, "cluster")
    lost = ("preset", "device", "nodes", "intra_link", *(_SIZES if says_numbers(text) else ("devices_per_node",)))
    kept = {key: value for key, value in before.items() if key not in lost}
    key = "device" if catalog.is_name("devices", text) else "preset"
    cluster = _named({"cluster": {key: text, **kept}})["cluster"]
    changed = document | {"cluster": cluster}
    if cluster.get("preset") == THIS_MACHINE:
        return _here(changed)
    if "device" not in cluster:
        if "device" in before:  # whose network was needed; these nodes have one
            changed["cluster"] = {key: value for key, value in cluster.items() if key not in _NETWORK}
        return changed, []
    size = cluster_size(document)
    if "devices_per_node" not in cluster and "num_nodes" in cluster:
        cluster["devices_per_node"] = size.devices_per_node or LARGEST_NODE
    elif not {"devices_per_node", "num_nodes"} & cluster.keys():
        cluster.setdefault("num_devices", size.num_devices or 1)
    spelled = "num_devices" if "num_devices" in cluster else "num_nodes"
    changed = with_size(changed, cluster[spelled], spelled)
    network, nodes = _network_of(before), cluster_size(changed).num_nodes
    if network and not set(_NETWORK) & cluster.keys() and nodes is not None and nodes > 1:
        changed["cluster"] = section(changed, "cluster") | {"inter_link": network}
        return changed, [f"the network between nodes is {network}, as before"]
    return changed, []


def with_size(document: Document, value: Any, key: str) -> Document:
    """The scenario with another number of nodes or devices, without the numbers that follow from the others.

    Args:
        value: The number; None removes it.
        key: ``num_nodes``, ``num_devices``, or ``devices_per_node``, which leaves the number of nodes.
    """
    nodes = cluster_size(document).num_nodes
    cluster = dict(section(with_value(document, ("cluster", key), value), "cluster"))
    if value is not None and key != "devices_per_node":
        cluster.pop("num_devices" if key == "num_nodes" else "num_nodes", None)
    elif is_count(value) and is_count(nodes) and "num_devices" in cluster:
        cluster["num_devices"] = nodes * value
    usual = cluster_size({"cluster": {"preset": cluster.get("preset")}}).devices_per_node
    if _is_of_devices(cluster):
        cluster |= _devices_per_node(cluster, key)
    elif usual is not None and cluster.get("devices_per_node") == usual:
        del cluster["devices_per_node"]
    changed = document | {"cluster": cluster}
    if _is_of_devices(cluster) and num_devices(changed) == 1:
        changed["cluster"] = {key: value for key, value in cluster.items() if key not in _SIZES} | {"num_devices": 1}
    return changed


def _is_of_devices(cluster: dict[str, Any]) -> bool:
    return "device" in cluster and "preset" not in cluster


def _devices_per_node(cluster: dict[str, Any], key: str) -> dict[str, Any]:
    """Devices per node of a cluster that names a device: all in one node up to the largest of today's nodes."""
    per_node, devices = cluster.get("devices_per_node"), cluster.get("num_devices")
    if key == "num_devices" and is_count(devices):
        usual = per_node if is_count(per_node) and per_node > 1 else LARGEST_NODE
        return {"devices_per_node": min(devices, usual)}
    return {"devices_per_node": 1 if per_node is None else per_node}


def _network_of(cluster: dict[str, Any]) -> str:
    """Name of the network between the nodes of a preset; empty if unknown."""
    preset = cluster.get("preset")
    if not isinstance(preset, str) or preset not in catalog.names("clusters") or preset == THIS_MACHINE:
        return ""
    link = catalog.node(preset).inter_link
    return link.id if link is not None and catalog.is_name("links", link.id) else ""


def _here(document: Document) -> tuple[Document, list[str]]:
    """The scenario on the cores of this machine; with a small example if a step would take long."""
    text = resources.files("simplan").joinpath("data", "demo", f"{_EXAMPLE}.yaml").read_text(encoding="utf-8")
    example = parse_yaml(text, _EXAMPLE).data
    most = max_ranks(num_cores(), machine_memory_bytes())
    ranks = max(size for size in divisors(example["training"]["global_batch_size"]) if size <= min(num_cores(), most))
    changed = document | {"cluster": {"preset": THIS_MACHINE, "num_devices": ranks}}
    words = [f"{ranks} process{'es' * (ranks > 1)}, at most one per core of this machine"]
    model, batch = model_of(document), section(document, "training").get("global_batch_size")
    if model is not None and is_count(batch) and 6 * model.num_parameters * model.seq_len * batch <= _LOCAL_FLOP:
        return changed, words
    changed = {key: value for key, value in changed.items() if key not in ("name", "plan", "search", "expect")}
    changed |= {
        "model": {"name": "example", **example["model"]},
        "training": example["training"],
        "software": example["software"],
        "plan": example["plan"] | {"dp_replicate": ranks},
    }
    words.append("model, training and plan are a small example, whose step takes seconds; Back returns to yours")
    return fitted(changed), words


def _named(document: Document) -> Document:
    """Sections with the names of the catalog.

    Raises:
        SpecError: A name stands for no entry, or for several; it says what it may stand for.
    """
    named: Document = with_catalog_names(document)[0]
    cluster = section(named, "cluster")
    if "preset" in section(named, "model"):
        catalog.model_fields(named["model"]["preset"])
    if "software" in named:
        catalog.software(named["software"])
    for key in ("intra_link", "inter_link"):
        if isinstance(cluster.get(key), str):
            catalog.link(cluster[key])
    nodes = cluster.get("preset", THIS_MACHINE)
    if nodes != THIS_MACHINE:
        is_of_devices = find("devices", nodes).candidates and not find("clusters", nodes).candidates
        (catalog.device if is_of_devices else catalog.node)(nodes)
    return named
