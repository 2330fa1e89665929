"""YAML parser with the location of every key: safe, bounded, and without recursion.

The text is read as a stream of parser events, and the data is built on an explicit stack. Limits on depth and on size
after alias expansion apply before anything is built. No tag can construct an object, and no nesting can overflow the
interpreter's stack. Scalars follow the YAML 1.2 core schema: ``1e9`` is a number, ``no`` is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import yaml

from simplan.errors import file_error

MAX_DEPTH = 40
MAX_NODES = 300_000
MAX_EXPANDED_CHARS = 16 * 1024 * 1024
MAX_DIGITS = 40
_CHECK = "check quotes, indentation and colons"
_WRITE_ONE = "write key: value, as in the files of the folder scenarios/"

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}

Path = tuple[str | int, ...]
"""Keys and indices from the root of a file to a value."""

Place = tuple[int, int]
"""Line and column in a file, both 1-based."""


def whole_number(text: str) -> int:
    """Whole number of a JSON file; raises a ValueError for more digits than any setting has."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:12]}... has more than {MAX_DIGITS} digits")
    return int(text)


def has_absurd_number(value: Any) -> bool:
    """True for a whole number of more digits than any setting has, and for a list or table with one."""
    if isinstance(value, list | dict):
        return any(map(has_absurd_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= 10**MAX_DIGITS


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a YAML or JSON file.

    Attributes:
        data: Plain data: dict, list, str, int, float, bool or None. Aliases of one anchor share one object.
        lines: Path of keys and indices -> location of the key (in a list, of the item). Paths inside an alias are not
            listed; ``place`` then returns the location of the alias.
    """

    data: Any
    lines: dict[Path, Place]

    def place(self, path: Path) -> Place | tuple[None, None]:
        """Location of a key, or of its nearest enclosing key in the file."""
        return find_place(self.lines, path)


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of ``common`` with the keys of ``own``, which win; mappings under one key are merged likewise.

    >>> merged({"plan": {"tp": 2, "pp": 4}, "name": "a"}, {"plan": {"tp": 8}})
    {'plan': {'tp': 8, 'pp': 4}, 'name': 'a'}
    """
    both = {key: merged(common[key], own[key]) for key in common.keys() & own.keys() if _are_mappings(common, own, key)}
    return {**common, **own, **both}


def _are_mappings(common: Mapping[str, Any], own: Mapping[str, Any], key: str) -> bool:
    return isinstance(common[key], Mapping) and isinstance(own[key], Mapping)


def find_place(lines: Mapping[Path, Place], path: Path) -> Place | tuple[None, None]:
    """Line and column of a key, or of its nearest enclosing key; ``(None, None)`` if there is none."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None, None


class _Anchored(NamedTuple):
    """Value of an anchor, with its size after alias expansion."""

    value: Any
    nodes: int
    chars: int


@dataclass(slots=True)
class _Open:
    """Mapping or list under construction; the sizes are those of the file before it."""

    value: dict[str, Any] | list[Any]
    path: Path
    anchor: str | None
    place: Place
    nodes_before: int
    chars_before: int
    key: str | None = None
    keys: dict[str, Place] = field(default_factory=dict)


def parse_yaml(text: str, file: str) -> Document:
    """Parse one YAML document; ``file`` is its name for errors.

    Raises:
        SpecError: The text is not YAML, contains no document or several, uses tags, duplicate or non-text keys, or
            exceeds a limit. The error names file, line and fix.
    """
    if not text.strip():
        raise file_error(file, "the file is empty", _WRITE_ONE)
    builder = _Builder(file)
    try:
        for event in _events(text):
            builder.feed(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part) or "it cannot be read"
        place = _place(mark) if mark is not None else (None, None)
        fix = "indent with spaces: this is a tab" if mark is not None and _is_tab(text, mark) else _CHECK
        raise file_error(file, f"this is not YAML: {what}", fix, *place) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else None
        raise file_error(file, f"this is not YAML: {error.reason or 'it cannot be read'}", _CHECK, line) from None
    return builder.document()


def _events(text: str) -> Iterator[Any]:
    loader = _LOADER(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


def _is_tab(text: str, mark: yaml.Mark) -> bool:
    line = "".join(text.split("\n")[mark.line : mark.line + 1])
    return line[mark.column :].startswith("\t")


def _place(mark: Any) -> Place:
    return mark.line + 1, mark.column + 1


class _Builder:
    """Builds data from parser events, and raises as soon as a limit is exceeded."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._stack: list[_Open] = []
        self._anchors: dict[str, _Anchored] = {}
        self._lines: dict[Path, Place] = {}
        self._documents: list[Any] = []
        self._nodes = 0
        self._chars = 0

    def document(self) -> Document:
        if not self._documents or self._documents[0] is None:
            raise file_error(self._file, "the file holds no data", _WRITE_ONE)
        return Document(self._documents[0], self._lines)

    def feed(self, event: Any) -> None:
        place = _place(event.start_mark)
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            self._refuse(place, f"the tag {tag} is not allowed: files hold plain data only", "remove the tag")
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, place)
        elif isinstance(event, yaml.MappingStartEvent):
            self._open({}, event.anchor, place)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._open([], event.anchor, place)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self._stack.pop()
            self._remember(done.anchor, done.value, done.nodes_before, done.chars_before)
            self._add(done.value, done.place)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(str(event.anchor), place)
        elif isinstance(event, yaml.DocumentStartEvent) and self._documents:
            self._refuse(place, "a second document starts here", "keep one document in a file, without ---")

    def _scalar(self, event: Any, place: Place) -> None:
        text: str = event.value
        if any("\ud800" <= c <= "\udfff" for c in text):
            self._refuse(place, "the text holds half a character (a lone surrogate)", "remove the escape")
        value = self._resolve(text, place) if event.implicit[0] else text
        self._grow(1, len(text), place)
        self._remember(event.anchor, value, self._nodes - 1, self._chars - len(text))
        self._add(value, place)

    def _remember(self, anchor: str | None, value: Any, nodes_before: int, chars_before: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = _Anchored(value, self._nodes - nodes_before, self._chars - chars_before)

    def _grow(self, nodes: int, chars: int, place: Place) -> None:
        self._nodes += nodes
        self._chars += chars
        if self._nodes > MAX_NODES or self._chars > MAX_EXPANDED_CHARS:
            limits = f"{MAX_NODES:,} values or {MAX_EXPANDED_CHARS // 2**20} MiB of text"
            fix = "make it smaller, without aliases that repeat each other"
            self._refuse(place, f"the file holds more than {limits}, aliases expanded", fix)

    def _resolve(self, text: str, place: Place) -> Any:
        """Convert a plain scalar by the YAML 1.2 core schema."""
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if not (text[0].isdigit() or text[0] in "+-."):
            return text
        is_int = _INT.fullmatch(text) is not None
        if not is_int and _FLOAT.fullmatch(text) is None:
            return text
        if len(text) > MAX_DIGITS:
            shown = f"{text[:12]}... ({len(text)} characters)"
            self._refuse(place, f"the number {shown} is absurd", f"use at most {MAX_DIGITS} digits")
        if not is_int:
            return float(text)
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))

    def _open(self, value: dict[str, Any] | list[Any], anchor: str | None, place: Place) -> None:
        if len(self._stack) >= MAX_DEPTH:
            self._refuse(place, f"the file is nested deeper than {MAX_DEPTH} levels", "flatten it")
        path = self._next_path(place)
        self._stack.append(_Open(value, path, anchor, place, self._nodes, self._chars))
        self._grow(1, 0, place)

    def _alias(self, anchor: str, place: Place) -> None:
        if any(level.anchor == anchor for level in self._stack):
            self._refuse(place, f"the alias *{anchor} lies inside of what it repeats", "write the value out")
        if anchor not in self._anchors:
            self._refuse(place, f"the alias *{anchor} repeats nothing above it", f"define &{anchor} first")
        anchored = self._anchors[anchor]
        self._grow(anchored.nodes, anchored.chars, place)
        self._add(anchored.value, place)

    def _next_path(self, place: Place) -> Path:
        """Path of the list or mapping that starts at ``place``."""
        if not self._stack:
            return ()
        level = self._stack[-1]
        if isinstance(level.value, list):
            return (*level.path, len(level.value))
        if level.key is None:
            self._refuse(place, "a key must be text, not a list or a mapping", "write key: value")
        return (*level.path, str(level.key))

    def _add(self, value: Any, place: Place) -> None:
        """Add a finished value: as key or value of a mapping, as item of a list, or as the whole file."""
        if not self._stack:
            self._documents.append(value)
            return
        level = self._stack[-1]
        if isinstance(level.value, list):
            self._lines[*level.path, len(level.value)] = place
            level.value.append(value)
        elif level.key is None:
            self._set_key(level, value, place)
        else:
            level.value[level.key] = value
            level.key = None

    def _set_key(self, level: _Open, key: Any, place: Place) -> None:
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)  # as JSON has it
        if not isinstance(key, str):
            shown = "null" if key is None else repr(key) if not isinstance(key, dict | list) else "a list or mapping"
            self._refuse(place, f"the key {shown} is not text", "write a word, or put it in quotes")
        if key in level.keys:
            first = level.keys[key][0]
            self._refuse(place, f"the key {key} is given twice, first in line {first}", "keep one of the two")
        level.keys[key] = place
        level.key = key
        self._lines[*level.path, key] = place

    def _refuse(self, place: Place, rule: str, fix: str) -> NoReturn:
        raise file_error(self._file, rule, fix, *place)
