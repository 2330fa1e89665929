"""Arithmetic and wording for rules: divisors, and lists of choices."""

from __future__ import annotations

from collections.abc import Iterable


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
