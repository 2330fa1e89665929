"""Memory that is used again: fresh pages cost more than what is computed in them."""

from __future__ import annotations

import math
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["scratch"]

_MOST_BYTES = 64 * 2**20


class _Kept(local):
    """What a thread has kept, by use."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}


_kept = _Kept()


def scratch(use: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array of any content, valid until the same thread asks for the same use again.

    Args:
        use: Names it.
        shape, dtype: What it is.
    """
    size = math.prod(shape)
    found = _kept.arrays.get(use)
    if found is None or len(found) < size:
        found = np.empty(size, dtype)
        if found.nbytes <= _MOST_BYTES:
            _kept.arrays[use] = found
    return found[:size].reshape(shape)
