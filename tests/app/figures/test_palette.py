"""Colors as people see them who miss one kind of cone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest

from app.figures.style import MEMORY, PLANS, SPLIT
from simplan.program.program import MemoryCategory
from simplan.report.drawings.drawing_svg import COLOURS

SEEN = {
    "all three": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Linear RGB as it is seen: Machado, Oliveira and Fernandes 2009, table 1, severity 1.0."""
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = (0.95047, 1.0, 1.08883)
GIVEN = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER, MemoryCategory.ACTIVATIONS)
"""Their colors are those of the Ultra-Scale Playbook; two of them are alike to who sees no red."""


def _lab(colour: str, seen: str) -> np.ndarray:
    """CIELAB of sRGB."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array(XYZ) @ np.clip(np.array(SEEN[seen]) @ linear, 1e-3, 1) / np.array(WHITE))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _apart(colours: Iterable[tuple[str, str]], seen: str) -> float:
    """Distance of the two that are most alike; about 2 can just be told apart side by side."""
    return min(float(np.linalg.norm(_lab(first, seen) - _lab(other, seen))) for first, other in colours)


@pytest.mark.parametrize("seen", SEEN)
def test_colours_are_told_apart(seen: str) -> None:
    for colours in (set(COLOURS.values()), set(SPLIT.values()), set(PLANS)):
        assert _apart(combinations(colours, 2), seen) > 14
    rest = {colour for category, colour in MEMORY.items() if category not in GIVEN}
    assert _apart(combinations(rest, 2), seen) > 10
    assert _apart([(other, MEMORY[named]) for other in rest for named in GIVEN], seen) > 9
    assert _apart(combinations([MEMORY[named] for named in GIVEN], 2), seen) > 4
