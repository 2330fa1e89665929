"""A calculator for printed formulas, which knows nothing of what made them."""

from __future__ import annotations

import re

_UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01,
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
    **{f"{prefix}{unit}": factor for unit in ("B/s", "FLOP/s", "FLOP") for prefix, factor in
       (("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15))},
}  # fmt: skip
_REMARK = re.compile(r"\((?=[^\W\d_])[^()]*\)")  # begins with a letter
_NUMBER = re.compile(rf"([0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)(?: ({'|'.join(_UNITS)})(?![A-Za-z/]))?")


def value_of(formula: str) -> float:
    """Returns the value of a formula, without its words and its remarks in parentheses."""
    text = formula
    while (without := _REMARK.sub("", text)) != text:
        text = without
    text = re.sub(r"(?<=[0-9]) \(", " x (", text)
    text = _NUMBER.sub(lambda match: f"({float(match[1].replace(',', '')) * _UNITS.get(match[2] or '', 1)!r})", text)
    text = re.sub(r"\bx\b", "*", text)
    text = re.sub(r"(?<![0-9.])[A-Za-z_][\w-]*", "", text)
    return float(eval(text))
