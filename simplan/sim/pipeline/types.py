"""Names for the arrays of a pipeline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Flags", "Floats", "Ints", "Longs", "Places", "Steps"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Steps = tuple[Bytes, Ints, Ints]
"""Slots, stages and microbatches of events."""
Places = tuple[Ints, Ints, Ints]
"""``rank_of``, ``sends_over`` and ``gets_over`` of a ``PipelineTable``."""
