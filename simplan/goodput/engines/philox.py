"""Streams of ``draws`` in machine code. Importing this module imports numba, so import it lazily."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simplan.jit import jit

WORDS = 4
"""Words of a block."""
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_UNUSED_BITS, _UNIT = np.uint64(11), 2.0**-53


@jit
def uniform(seed: int, number: int, stream: int, index: int, block: NDArray[np.uint64]) -> float:
    """Number with an index of a stream of a run, uniform in [0, 1).

    Args:
        seed, number: Seed, and number of the run.
        stream: Number of the stream.
        index: Index of the number; to be asked in order.
        block: ``(WORDS,)`` Memory between two calls.
    """
    if index % WORDS == 0:  # numpy counts before it makes a block
        _make_block(np.uint64(seed), np.uint64(number), np.uint64(index // WORDS + 1), np.uint64(stream), block)
    return float(block[index % WORDS] >> _UNUSED_BITS) * _UNIT


@jit
def _make_block(key0: Any, key1: Any, count: Any, stream: Any, block: NDArray[np.uint64]) -> None:
    """Philox 4x64-10 of the counter (count, stream, 0, 0)."""
    word0, word1, word2, word3 = count, stream, np.uint64(0), np.uint64(0)
    for _ in range(_ROUNDS):
        high0, high1 = _high_product(_MULTIPLIERS[0], word0), _high_product(_MULTIPLIERS[1], word2)
        low0, low1 = _MULTIPLIERS[0] * word0, _MULTIPLIERS[1] * word2
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0, key1 = key0 + _WEYL[0], key1 + _WEYL[1]
    block[0], block[1], block[2], block[3] = word0, word1, word2, word3


@jit
def _high_product(one: Any, other: Any) -> Any:
    """Upper 64 bits of the product of two words."""
    one_low, one_high, low, high = one & _LOW, one >> _HALF, other & _LOW, other >> _HALF
    middle = one_high * low + ((one_low * low) >> _HALF)
    return one_high * high + (middle >> _HALF) + ((one_low * high + (middle & _LOW)) >> _HALF)
