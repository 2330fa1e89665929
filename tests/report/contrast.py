"""How well two colors are told apart: WCAG 2.2."""

from __future__ import annotations

from collections.abc import Sequence


def channels(colour: str) -> list[float]:
    """Red, green and blue of #rrggbb, 0 to 255."""
    return [float(int(colour[i : i + 2], 16)) for i in (1, 3, 5)]


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    """Contrast ratio, from 1 to 21."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(values: Sequence[float]) -> float:
    linear = [v / 255 / 12.92 if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
