"""What words mean: simplan's own definitions, as help beside numbers."""

from __future__ import annotations

from functools import cache

from simplan.cli.definitions import definitions

__all__ = ["meaning"]


@cache
def _definitions() -> dict[str, str]:
    return {row["name"]: row["definition"] + (f" ({row['unit']})" if row["unit"] else "") for row in definitions()}


def meaning(name: str) -> str:
    """The definition of a metric or of a word in reports, as ``simplan show metrics`` has it.

    >>> meaning("allocated")
    'memory held by tensors'
    """
    return _definitions()[name]
