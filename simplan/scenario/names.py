"""Names that a scenario spells in another way than the catalog: ``Llama 3 70B``, ``4090``, ``2x8 H100``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simplan import catalog
from simplan.catalog.spelling import NamedNodes, find, find_nodes, refusal
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.problems import render_value
from simplan.units import counted

LARGEST_NODE = 8
"""Devices of a node of today's machines."""
_OF_CLUSTER: dict[str, catalog.Kind] = {"intra_link": "links", "inter_link": "links", "topology": "topologies"}
_MAX_FILES = 1000
_Say = Callable[[str], None]


def with_catalog_names(document: Any) -> tuple[Any, tuple[str, ...]]:
    """Document with the names of the catalog, and a sentence for each name that it spells in another way.

    A name that stands for no entry, or for several, stays: where its section is read, it is refused.

    Raises:
        SpecError: The name of a cluster says another number of nodes or devices than the cluster.
    """
    if not isinstance(document, dict):
        return document, ()
    sentences: list[str] = []
    changed, say = dict(document), sentences.append
    if isinstance(document.get("model"), dict):
        changed["model"] = _with_name(document["model"], "preset", "models", say)
    if isinstance(document.get("software"), dict):
        changed["software"] = _with_name(document["software"], "preset", "software", say)
    changed = _with_name(changed, "software", "software", say)
    if isinstance(document.get("cluster"), dict):
        changed["cluster"] = _cluster(document["cluster"], say)
    return changed, tuple(dict.fromkeys(sentences))


def overrides_with_catalog_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of keys, with the names of the catalog."""
    sections: dict[str, Any] = {"model": {}, "cluster": {}}
    others: dict[str, Any] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if name and "." not in name and section in sections:
            sections[section][name] = value
        else:
            others[key] = value
    software = {key: others[key] for key in others if key == "software"}
    renamed, _ = with_catalog_names(sections | software)
    named = {f"{section}.{key}": value for section in sections for key, value in renamed[section].items()}
    named |= others | {key: renamed[key] for key in software}
    return {key: named[key] for key in (*(key for key in overrides if key in named), *named)}


def says_numbers(name: Any) -> bool:
    """True for the name of a cluster that says how many nodes or devices there are."""
    nodes = find_nodes(name) if isinstance(name, str) else None
    return isinstance(nodes, NamedNodes) and {nodes.num_nodes, nodes.num_devices} != {None}


def model_named(source: str) -> str:
    """Model of the catalog that a word in place of a file stands for; empty for any other word."""
    if source in catalog.names("models"):
        return source
    return "" if looks_like_path(source) else find("models", source).name


def looks_like_path(source: str) -> bool:
    """True for a word that is no name of a model, on the Hugging Face Hub or elsewhere, such as ``runs/fsdp.yaml``."""
    path = Path(source)
    has_suffix = path.suffix[1:].isalpha()
    is_in_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return has_suffix or is_in_folder or source[:1] in ("/", ".", "~") or len(path.parts) > len(Path("a/b").parts)


def unknown_source(source: str, *, has_files: bool = True) -> SpecError:
    """Error about a word that names neither a file nor a model.

    Args:
        has_files: False for a word that can name no file, such as one that was pasted: no file is suggested.
    """
    try:
        catalog.model_fields(source)
    except NotModelledError as error:
        return error
    except SpecError:
        rule, fix = refusal("models", source)
    instead = "`simplan show models` lists the models"
    if len(find("models", source).candidates) < 2:
        files: list[str] = []
        rule = "is neither a file nor a model of the catalog"
        if has_files:
            candidates = (
                entry for pattern in ("*.yaml", "*.yml") for entry in sorted(Path().glob(pattern))[:_MAX_FILES]
            )
            files = [entry.name for entry in candidates]
        else:
            rule, instead = "is no model of the catalog", "give its config.json"
        near = did_you_mean(source, [*files, *catalog.names("models")])
        fix = fix or near or did_you_mean(source.rpartition("/")[2], catalog.names("models"))
    return SpecError(Problem(field="", rule=rule, fix=fix or instead), file=source)


def _with_name(section: dict[str, Any], key: str, kind: catalog.Kind, say: _Say) -> dict[str, Any]:
    """Section with the catalog's name under a key."""
    text = section.get(key)
    if not isinstance(text, str) or catalog.is_name(kind, text):
        return section
    match = find(kind, text)
    if not match.name:
        return section
    say(f"{text}: {match.words}")
    return section | {key: match.name}


def _cluster(section: dict[str, Any], say: _Say, *, is_group: bool = False) -> dict[str, Any]:
    """Section ``cluster``, or a group of its nodes."""
    for key, kind in _OF_CLUSTER.items():
        if isinstance(section.get(key), dict):
            section = section | {key: _with_name(section[key], "preset", kind, say)}
        section = _with_name(section, key, kind, say)
    device = section.get("device")
    if isinstance(device, dict):
        section = section | {"device": _with_name(device, "preset", "devices", say)}
    elif isinstance(device, str) and not catalog.is_name("devices", device):
        section = _with_nodes(section, "device", find_nodes(device, "devices"), say, is_group=is_group)
    preset = section.get("preset")
    if isinstance(preset, str) and not catalog.is_name("clusters", preset):
        section = _with_nodes(section, "preset", find_nodes(preset), say, is_group=is_group)
    for key in ("nodes", "background"):
        if isinstance(section.get(key), list):
            section = section | {key: [_listed(key, group, say) for group in section[key]]}
    return section


def _listed(key: str, entry: Any, say: _Say) -> Any:
    """A group of nodes, or a background job."""
    if key == "nodes" and isinstance(entry, dict):
        return _cluster(entry, say, is_group=True)
    if isinstance(entry, dict) and isinstance(entry.get("job"), dict):
        job, sentences = with_catalog_names(entry["job"])
        for sentence in sentences:
            say(sentence)
        return entry | {"job": job}
    return entry


def _with_nodes(section: dict[str, Any], key: str, nodes: Any, say: _Say, *, is_group: bool) -> dict[str, Any]:
    """Section with the nodes that a name stands for, in place of the name."""
    if not isinstance(nodes, NamedNodes):
        return section
    text, others = section[key], {name: value for name, value in section.items() if name != key}
    fields: dict[str, Any] = {"preset": nodes.preset} if nodes.preset else {"device": nodes.device}
    numbers = _numbers(others, nodes, is_group=is_group)
    for name, number in numbers.items():
        if others.get(name, number) != number:
            rule = f"is given twice: {render_value(text)} says {number}"
            shown, fix = render_value(others[name]), "give one of the two"
            raise SpecError(Problem(field=f"cluster.{name}", value=shown, rule=rule, fix=fix))
    words = [f"cluster {nodes.preset}" if nodes.preset else f"device {nodes.device}"]
    for name, number in numbers.items():
        of_node = name == "devices_per_node"
        words.append(f"{number} per node" if of_node else counted(number, name.removeprefix("num_").removesuffix("s")))
    say(f"{text}: {', '.join(words)}")
    return fields | others | numbers


def _numbers(others: dict[str, Any], nodes: NamedNodes, *, is_group: bool) -> dict[str, int]:
    """Numbers of nodes and devices that a name says; a single number is that of a node if the number of nodes is given.

    Args:
        others: Other keys of the cluster.
    """
    numbers: dict[str, int] = {}
    number, per_node = nodes.num_devices, nodes.devices_per_node
    if nodes.num_nodes is not None:
        numbers["num_nodes"] = nodes.num_nodes
    if number is not None and (is_group or {"num_nodes", "num_devices"} & others.keys()):
        per_node = number
    elif number is not None:
        numbers["num_devices"] = number
        in_full_nodes = number <= LARGEST_NODE or number % LARGEST_NODE == 0
        if nodes.device and in_full_nodes and "devices_per_node" not in others:
            per_node = min(number, LARGEST_NODE)
    usual = catalog.node(nodes.preset).devices_per_node if nodes.preset not in ("", THIS_MACHINE) else None
    return (
        numbers
        if per_node in (None, others.get("devices_per_node", usual))
        else numbers | {"devices_per_node": per_node}
    )
