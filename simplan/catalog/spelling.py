"""Names of the catalog's entries as people type them.

``Llama 3 70B``, ``meta-llama/Meta-Llama-3-70B-Instruct``, ``4090``, ``NVIDIA A100-SXM4-80GB``, ``2x8 H100``. A name is
split into words: runs of letters, and numbers with their unit. It stands for the entry with the same words, in any
order. Words that say nothing (vendors, how weights were trained) are ignored, and some words of an entry may be left
out (``spellings.yaml``). A name that fits several entries equally well stands for none of them.

>>> find("models", "meta-llama/Meta-Llama-3-70B-Instruct").name
'llama3-70b'
>>> find("devices", "A100 80GB").candidates
('a100-sxm-80gb', 'a100-pcie-80gb')
>>> find_nodes("2x8 H100")
NamedNodes(preset='dgx-h100', device='', num_nodes=2, devices_per_node=8, num_devices=None)
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from simplan import catalog
from simplan.catalog import Kind
from simplan.units import GIB

_MAX_LENGTH = 200
_WORD = re.compile(
    r"""v\d+(?:\.\d+)*  # version
      | \d+x\d+(?:\.\d+)?b(?![a-z0-9])  # experts and their size
      | sxm\d? | hbm\d?e? | nvl\d*
      | \d+(?:\.\d+)?(?:gbit|gib|gb|[bmw])(?![a-z0-9]) | (?:16|[2-9]\d|\d{3})g(?![a-z0-9])
      | \d+(?:\.\d+)*
      | [a-z]+?(?=v\d) | [a-z]+
    """,
    re.VERBOSE,
)
_GIGABYTES = re.compile(r"(\d\d+)g(?:ib)?\b")
_SPACED_UNIT = re.compile(r"(?<=\d) +(?=(?:gbit|gib|gb|b|m)\b)")
_VERSION, _DATE = re.compile(r"v\d+\.\d+"), re.compile(r"\d{4}")
_PARAMETERS, _MEMORY = re.compile(r"(\d+(?:\.\d+)?)([bm])"), re.compile(r"(\d+)gb")
_TOLERANCE = 0.1
"""Largest relative difference of a size in a name from the entry's, such as that of GB and GiB."""
_PLURAL = re.compile(r"(?<=\d)s\b")  # of cards; a V100S is another
_OF_HARDWARE = ("devices", "clusters")
_OF_NODES = frozenset(("hgx", "node", "nodes", "server", "servers"))
"""Words after which a number is that of nodes: ``2x HGX H100``."""
_COUNTED = tuple(
    re.compile(
        text.replace("N", r"(?P<nodes>\d{1,7})").replace("D", r"(?P<devices>\d{1,7})").replace("R", "(?P<rest>.+?)")
    )
    for text in (
        r"N nodes? ?(?:of|with|x|\*)? ?D ?[x*]? ?R",
        r"N ?[x*] ?D(?: ?[x*] ?| )R",
        r"D ?[x*] ?R",
        r"D R",
        r"R ?[x*] ?D",
    )
)
"""Numbers of nodes and devices before or after a name."""
_SINGULAR = {"topologies": "topology", "software": "framework", "spot_zones": "spot zone"}
_PLURALS = {"software": "frameworks", "spot_zones": "spot zones"}
_MAX_LISTED = 12
UNKNOWN = "is not in the catalog"
"""Rule for a name that stands for nothing."""


@dataclass(frozen=True, slots=True)
class NameMatch:
    """Entry that a name stands for, or the entries that it may stand for.

    Attributes:
        kind: Kind of the entries.
        name: The entry; empty if the name stands for none, or for several.
        candidates: Entries of which the name has all words, in catalog order; empty with ``name``.
    """

    kind: Kind
    name: str = ""
    candidates: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The entry with its kind: ``model llama3-70b``."""
        return f"{_SINGULAR.get(self.kind, self.kind.removesuffix('s'))} {self.name}"


@dataclass(frozen=True, slots=True)
class NamedNodes:
    """Nodes that a name such as ``2x8 H100`` stands for; numbers are None if it has none.

    Attributes:
        preset: Cluster of the catalog; empty if the catalog has no such nodes.
        device: Device of nodes that the catalog does not have; else empty.
        devices_per_node: Only with ``num_nodes``.
        num_devices: Only without ``num_nodes``.
    """

    preset: str
    device: str = ""
    num_nodes: int | None = None
    devices_per_node: int | None = None
    num_devices: int | None = None


def find(kind: Kind, text: str) -> NameMatch:
    """Entry of a kind that a name stands for; a name of the catalog stands for itself."""
    if catalog.is_name(kind, text):
        return NameMatch(kind, text)
    plain = _plain(text)
    if len(plain) > _MAX_LENGTH:
        return NameMatch(kind)
    last = plain.rstrip("/").rpartition("/")[2]
    if kind != "models" or last == plain:
        return _found(kind, plain)
    on_hub = _table(kind)["on_hub"]
    if last in on_hub:
        return NameMatch(kind, "" if on_hub[last] == "none" else on_hub[last])
    of_last, whole = _found(kind, last), _found(kind, plain)  # ViT-B/16 is no name on the Hub
    return whole if whole.name and not of_last.name else of_last


def find_nodes(text: str, kind: Kind = "clusters") -> NamedNodes | NameMatch:
    """Nodes that a name of a cluster or device with numbers stands for; a match without a name if it stands for none.

    Args:
        kind: ``devices`` for a name of a device alone.

    >>> find_nodes("4x DGX H100").num_nodes, find_nodes("4x H100").num_devices, find_nodes("8x RTX 4090").device
    (4, 4, 'rtx-4090')
    """
    first = _nodes(text, kind)
    if isinstance(first, NamedNodes):
        return first
    plain, others = _plain(text), []
    for pattern in _COUNTED if len(plain) <= _MAX_LENGTH else ():
        counted = pattern.fullmatch(plain)
        if counted is None:
            continue
        numbers = {name: int(number) for name, number in counted.groupdict().items() if name != "rest"}
        for rest in dict.fromkeys((counted["rest"], _PLURAL.sub("", counted["rest"]))):
            match = _nodes(rest, kind, **numbers)
            if isinstance(match, NamedNodes):
                return match
            others.append(match)
    return next((match for match in (first, *others) if match.candidates), first)


def refusal(kind: Kind, text: str) -> tuple[str, str]:
    """Rule and fix for a name that is none of the catalog; an empty fix if nothing is near.

    >>> refusal("devices", "A100 80GB")
    ('may be several devices', 'name one of a100-sxm-80gb, a100-pcie-80gb')
    """
    match = find_nodes(text) if kind == "clusters" else find(kind, text)
    instead = "give device and devices_per_node in place of a preset (--device, --devices-per-node)"
    if isinstance(match, NamedNodes) and match.device:
        return UNKNOWN, f"{match.device} is a device: {instead}"
    near = (match.preset,) if isinstance(match, NamedNodes) else (match.name,) if match.name else match.candidates
    if len(near) < 2:
        return UNKNOWN, f"did you mean {near[0]}?" if near else ""
    several = _PLURALS.get(kind, kind) if isinstance(match, NamedNodes) else _PLURALS.get(match.kind, match.kind)
    listed = ", ".join(near[:_MAX_LISTED]) + (f" ... (`simplan show {kind}` lists all)" if near[_MAX_LISTED:] else "")
    is_device = kind == "clusters" and several == "devices"
    return f"may be several {several}", f"name one of {listed}" + (f"; {instead}" if is_device else "")


def known_as(kind: Kind, text: str, known: Iterable[str]) -> str:
    """The first of some words that are no entries which a name stands for; empty if there is none.

    >>> known_as("models", "google/gemma-7b-it", ["bloom", "gemma-7b"])
    'gemma-7b'
    """
    words = _words(kind, _plain(text).rstrip("/").rpartition("/")[2])
    telling = {word for word in words if word not in _table(kind)["ignored"]}
    return next((name for name in known if set(_words(kind, name)) in (set(words), telling)), "")


def words_of(text: str) -> tuple[str, ...]:
    """Words of a name.

    >>> words_of("Meta-Llama-3.1-8B"), words_of("A100-SXM4 80 GB"), words_of("Mixtral-8x7B-v0.1")
    (('meta', 'llama', '3.1', '8b'), ('a', '100', 'sxm4', '80gb'), ('mixtral', '8x7b', 'v0.1'))
    """
    plain = re.sub(r"(?<=v\d)_(?=\d)", ".", _plain(text))
    words = (word.removesuffix(".0") for word in _WORD.findall(_SPACED_UNIT.sub("", plain)))
    return tuple(_GIGABYTES.sub(r"\1gb", word) for word in words)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).replace("\N{MULTIPLICATION SIGN}", "x").lower().split())


def _nodes(text: str, kind: Kind, nodes: int | None = None, devices: int | None = None) -> NamedNodes | NameMatch:
    """Nodes of a cluster or device.

    Args:
        nodes: Number of nodes; None if the name does not say it.
        devices: Devices of a node, or of all nodes if the name does not say their number; for a name of nodes, nodes.
    """
    match = find(kind, text)
    words = _words(kind, text)
    if kind == "clusters" and match.name and nodes is None:
        is_of_nodes = _words(kind, match.name) <= words or _OF_NODES & words.keys()
        nodes, devices = (devices, None) if is_of_nodes else (None, devices)
    if kind == "clusters" and not match.name and not match.candidates:
        match = find("devices", text)
    if not match.name:
        return match
    presets = [match.name] if match.kind == "clusters" else []
    if kind == "clusters" and not presets:
        presets = [name for name in catalog.names(kind) if catalog.device_of(name) == match.name]
    preset, device = (presets[0], "") if presets else ("", match.name)
    return NamedNodes(preset, device, nodes, *((devices, None) if nodes is not None else (None, devices)))


@cache
def _table(kind: Kind) -> dict[str, Any]:
    """Table of a kind, with words as sets."""
    table = {"equal": {}, "on_hub": {}, "nearest": {}, "spellings": {}, **catalog.spellings()[kind]}
    return table | {key: frozenset(table.get(key, "").split()) for key in ("ignored", "unsaid")}


@cache
def _spellings(kind: Kind) -> tuple[tuple[Counter[str], str], ...]:
    """Words of all names of all entries, each with the name of the catalog."""
    others = ((other, name) for name, listed in _table(kind)["spellings"].items() for other in listed)
    return tuple((_words(kind, text), name) for text, name in (*((n, n) for n in catalog.names(kind)), *others))


def _words(kind: Kind, text: str) -> Counter[str]:
    equal = _table(kind)["equal"]
    return Counter(equal.get(word, word) for word in words_of(text))


def _found(kind: Kind, text: str) -> NameMatch:
    words = _words(kind, text)
    costs = ((_cost(kind, words, known, name), name) for known, name in _spellings(kind))
    fits = [(cost, name) for cost, name in costs if cost is not None]
    least = min((cost for cost, _ in fits), default=0)
    fitting = _entries(kind, [name for cost, name in fits if cost == least])
    if len(fitting) == 1:
        return NameMatch(kind, fitting[0])
    telling = Counter({word: number for word, number in words.items() if word not in _table(kind)["ignored"]})
    begun = [name for known, name in _spellings(kind) if telling and telling <= known]
    nearest = _table(kind)["nearest"].get("".join(filter(str.isalnum, text)))
    return NameMatch(kind, "", fitting or _entries(kind, [nearest, *begun] if nearest else begun))


def _entries(kind: Kind, names: list[str]) -> tuple[str, ...]:
    """The first name of each entry."""
    entries: dict[str, str] = {}
    for name in names:
        entries.setdefault(catalog.canonical_name(kind, name), name)
    return tuple(entries.values())


def _cost(kind: Kind, words: Counter[str], known: Counter[str], name: str) -> int | None:
    """Number of words by which a name differs from one of an entry; None if one of these tells them apart."""
    missing, more, table = known - words, words - known, _table(kind)
    unsaid = (word in table["unsaid"] or (kind in _OF_HARDWARE and _MEMORY.fullmatch(word)) for word in missing)
    if all(unsaid) and all(word in table["ignored"] or _says_nothing(kind, word, known, name) for word in more):
        return missing.total() + more.total()
    return None


def _says_nothing(kind: Kind, word: str, known: Counter[str], name: str) -> bool:
    """True for a word that follows from an entry: its size, or a word of its device.

    Args:
        known: Words of the entry's name to which the word is added.
    """
    if kind == "models" and _VERSION.fullmatch(word):  # of Mistral 7B each version has other shapes
        return not any(
            known < spelled and any(map(_VERSION.fullmatch, spelled - known)) for spelled, _ in _spellings(kind)
        )
    if kind == "models":
        size = _PARAMETERS.fullmatch(word)
        number = float(size[1]) * (1e9 if size[2] == "b" else 1e6) if size else 0
        agrees = _agree(number, catalog.published_parameters(name)) and not any(map(_PARAMETERS.fullmatch, known))
        return agrees or _DATE.fullmatch(word) is not None
    if kind not in _OF_HARDWARE:
        return False
    device = name if kind == "devices" else catalog.device_of(name)
    known = known | _words("devices", device)
    size = _MEMORY.fullmatch(word)
    if word in known or size is None or any(map(_MEMORY.fullmatch, known)):
        return word in known
    return _agree(float(size[1]), (catalog.memory_bytes_of(device) or 0) / GIB)


def _agree(number: float, other: float) -> bool:
    return abs(number - other) < _TOLERANCE * other
