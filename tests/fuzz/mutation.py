"""Seeded damage to documents: values, keys and text, as a hand, a disk or a merge would do it."""

from __future__ import annotations

import copy
import json
import random
from functools import lru_cache
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 1000, 10**6, 10**9, 10**12, 10**30, -(2**63), 0.5, -0.0, 1e-9, 5e-324, 1e-30,
    1e9, 1e30, 1.7e308, float("nan"), float("inf"), -float("inf"), "", " ", "0", "1e9", "80GB", "bf16", "fp8", "none",
    "full", "1f1b", "zb-v", "torch", "megatron-lm", "this-machine", "h100-sxm-80gb", "../../etc/passwd", "/dev/zero",
    "\n", "a\nb", "\x07", "\x1b[8m", "é" * 300, "{}", "[", [], {}, [0], [1, 2], [[]], {"a": 1},  [None],
    {"preset": "dgx-h100"},
)  # fmt: skip
"""Wrong types, edges of ranges, and words that mean something elsewhere."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml, reading takes longer than a command
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_TEXTS = (
    "", "-", ":", "- ", "#", "'", '"', "{", "}", "[", "]", ",", "\t", "\n", "  ", "---\n", "...", "&a", "*a", "!!str ",
    "!!python/object ", "<<", "~", "|", ">", "%", "@", "\x00", "\x07", "\xff", "é", "0x1f", "9" * 50, "1e999", ".nan",
)  # fmt: skip


class Mutator:
    """Makes damaged copies; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def changed(self, document: Any) -> Any:
        """A copy with one to three values replaced, removed, doubled or moved."""
        document = copy.deepcopy(document)
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            places = list(_places(document))
            if not places:
                return self._value()
            holder, key = self._random.choice(places)
            self._change(holder, key, places)
        return document

    def _change(self, holder: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
        how = self._random.random()
        if how < 0.65:
            holder[key] = self._near(holder[key]) if self._random.random() < 0.5 else self._value()
        elif how < 0.8:
            del holder[key]
        elif how < 0.9:
            other, at = self._random.choice(places)
            holder[key] = copy.deepcopy(other[at])
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[self._random.choice(("x", "", "tp", "preset", f"{key}s", f"{key}_"))] = copy.deepcopy(holder[key])

    def _value(self) -> Any:
        """A copy: changes to it must reach no later input, and it must never hold itself."""
        return copy.deepcopy(self._random.choice(VALUES))

    def _near(self, value: Any) -> Any:
        """A value of the same type that is a little or a lot off."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)[: self._random.randrange(8)]
        return self._random.choice((value + 1, value - 1, value * 2, value * 1000, -value, value / 3, float(value)))

    def damaged(self, text: str) -> str:
        """A text with some of it replaced, removed or repeated."""
        for _ in range(self._random.choice((1, 1, 2, 5))):
            start = self._random.randrange(len(text) + 1)
            end = min(len(text), start + self._random.choice((0, 1, 2, 10, 200)))
            text = text[:start] + self._random.choice((*_TEXTS, text[start:end] * 2)) + text[end:]
        return text

    def bytes(self, data: bytes) -> bytes:
        """Data with some of it flipped, removed or repeated."""
        for _ in range(self._random.choice((1, 1, 2, 5))):
            start = self._random.randrange(len(data) + 1)
            end = min(len(data), start + self._random.choice((0, 1, 2, 10, 200)))
            data = (
                data[:start]
                + self._random.choice((b"", self._random.randbytes(end - start), data[start:end] * 2))
                + data[end:]
            )
        return data

    def yaml(self, text: str) -> str:
        """A damaged YAML file, mostly still YAML."""
        if self._random.random() < 0.25:
            return self.damaged(text)
        return yaml_text(self.changed(_document(text)))

    def json(self, text: str) -> str:
        """A damaged JSON file, mostly still JSON."""
        if self._random.random() < 0.15:
            return self.damaged(text)
        return json.dumps(self.changed(_json_document(text)))

    def choice(self, of: tuple[Any, ...]) -> Any:
        """One of some values."""
        return self._random.choice(of)


def yaml_text(document: Any) -> str:
    """A document as YAML."""
    text: str = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text


@lru_cache(maxsize=256)
def _document(text: str) -> Any:
    """Content of a YAML file that is damaged many times."""
    return yaml.load(text, Loader=_LOADER)


@lru_cache(maxsize=64)
def _json_document(text: str) -> Any:
    return json.loads(text)


def _places(document: Any) -> Any:
    """Every place of the document as ``(holder, key)``; of long lists, the first and the last."""
    if isinstance(document, dict):
        for key in list(document):
            yield document, key
            yield from _places(document[key])
    elif isinstance(document, list):
        for index in sorted({*range(min(4, len(document))), *range(max(0, len(document) - 1), len(document))}):
            yield document, index
            yield from _places(document[index])


class Whole(Mutator):
    """Makes copies without damage."""

    def changed(self, document: Any) -> Any:
        """The document."""
        return document

    def damaged(self, text: str) -> str:
        """The text."""
        return text

    def bytes(self, data: bytes) -> bytes:
        """The data."""
        return data
