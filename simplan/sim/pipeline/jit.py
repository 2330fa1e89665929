"""Compilation, with types that survive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["Bytes", "Flags", "Floats", "Ints", "Longs", "Places", "Steps", "compiled"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Steps = tuple[Bytes, Ints, Ints]
"""Slots, stages and microbatches of events."""
Places = tuple[Ints, Ints, Ints]
"""``rank_of``, ``sends_over`` and ``gets_over`` of a ``PipelineTable``."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """The function in machine code, which is kept on disk beside it, and compiled again when it has changed."""
    return cast(_Function, njit(cache=True, nogil=True)(function))
