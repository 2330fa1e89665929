"""Arithmetic and wording for rules: divisors, lists of choices, and text that is safe to print."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")


def visible(text: str) -> str:
    r"""Text of the user's as a terminal may show it: characters that cannot be seen are written out.

    Names and values of files and command lines could move the cursor, hide text, set a title or reverse the order of
    what is read. Line ends and tabs stay.

    >>> print(visible(chr(27) + "[31mred " + chr(0x202E) + "exe.gpj"))
    \x1b[31mred \u202eexe.gpj
    """
    return _UNUSUAL.sub(lambda found: found[0] if found[0].isprintable() else repr(found[0])[1:-1], text)


def nearest_divisors(number: int, value: int) -> list[int]:
    """Divisors of ``number`` next to ``value``: the largest up to it and the smallest above it, if any."""
    found = divisors(number)
    below = [d for d in found if d <= value]
    above = [d for d in found if d > value]
    return [*below[-1:], *above[:1]]


def divisors(number: int) -> list[int]:
    """All divisors, ascending; above 10**10, only those that are powers of two."""
    if number > 10**10:
        return [2**k for k in range(40) if number % 2**k == 0]
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def either(choices: Iterable[object]) -> str:
    """Choices as text: ``a``, ``a or b``, ``a, b or c``."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
