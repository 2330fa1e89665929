"""Streams of ``draws`` in machine code. Importing this module imports numba, so import it lazily."""

from __future__ import annotations

from math import log1p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.draws import NUM_PURPOSES
from simplan.jit import jit

_WORDS = 4  # of one block
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_UNUSED_BITS, _UNIT = np.uint64(11), 2.0**-53


class Streams(NamedTuple):
    """Streams of one run: its key, the numbers that were drawn of each stream, and the block of the next ones."""

    key: NDArray[np.uint64]
    num_drawn: NDArray[np.int64]
    blocks: NDArray[np.uint64]


@jit
def streams(seed: int, number: int, num_sources: int) -> Streams:
    """Streams of a run at their start."""
    key = np.empty(2, np.uint64)
    key[0], key[1] = seed, number
    num_streams = NUM_PURPOSES * num_sources
    return Streams(key, np.zeros(num_streams, np.int64), np.empty((num_streams, _WORDS), np.uint64))


@jit
def uniform(streams: Streams, source: int, purpose: int) -> float:
    """Next number of a stream, uniform in [0, 1)."""
    stream = NUM_PURPOSES * source + purpose
    drawn = streams.num_drawn[stream]
    if drawn % _WORDS == 0:  # numpy counts before it makes a block
        _make_block(np.uint64(drawn // _WORDS + 1), np.uint64(stream), streams.key, streams.blocks[stream])
    streams.num_drawn[stream] = drawn + 1
    return float(streams.blocks[stream, drawn % _WORDS] >> _UNUSED_BITS) * _UNIT


@jit
def exponential(streams: Streams, source: int, purpose: int) -> float:
    """Next number of a stream, exponential with mean 1."""
    return -log1p(-uniform(streams, source, purpose))


@jit
def _make_block(count: Any, stream: Any, key: NDArray[np.uint64], block: NDArray[np.uint64]) -> None:
    """Philox 4x64-10 of the counter (count, stream, 0, 0)."""
    word0, word1, word2, word3 = count, stream, np.uint64(0), np.uint64(0)
    key0, key1 = key[0], key[1]
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
