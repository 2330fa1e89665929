"""Compute actions of every rank as arrays: what the functions of ``simplan.program.schedules`` give as tuples.

All rows of a table are equally long. Kinds are 0 for F, 1 for B, 2 for I and 3 for W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.sim.pipeline.jit import compiled
from simplan.sim.pipeline.scratch import scratch

__all__ = ["COMPILED_SCHEDULES", "B", "F", "I", "Order", "W", "compute_order"]

F, B, I, W = 0, 1, 2, 3  # noqa: E741 - the field's letters


_PADDING = 72  # rows whose length is a power of two share few lines of the cache


class Order(NamedTuple):
    """Compute actions, ``(ranks, at least length)`` each, and where stages are.

    Attributes:
        length: Actions of every rank.
        kind: F, B, I or W.
        stage: Of the pipeline.
        microbatch: Of the step.
        rank_of: By stage, its rank.
        period: Actions after which a row repeats itself in its middle, and by how much its microbatches are higher then.
    """

    length: int
    kind: NDArray[np.uint8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    rank_of: NDArray[np.int32]
    period: tuple[int, int]


def compute_order(schedule: str, p: int, m: int, v: int) -> Order:
    """Compute actions of a schedule, valid until the same thread asks for those of another one.

    Args:
        schedule: One of ``COMPILED_SCHEDULES``.
        p, m, v: Pipeline ranks, microbatches, stages of a rank.
    """
    actions_per_microbatch, fill = COMPILED_SCHEDULES[schedule]
    length = actions_per_microbatch * v * m
    shape = (p, length + _PADDING)
    kind, stage = scratch("kind", shape, np.uint8), scratch("stage", shape, np.int32)
    microbatch = scratch("microbatch", shape, np.int32)
    fill(p, m, v, kind, stage, microbatch)
    stages = np.arange(p * v, dtype=np.int32)
    rank_of = np.minimum(stages, 2 * p - 1 - stages) if schedule == "zb-v" else stages % p
    return Order(length, kind, stage, microbatch, rank_of, _period(schedule, p, m, v))


def _period(schedule: str, p: int, m: int, v: int) -> tuple[int, int]:
    if schedule == "gpipe":
        return 1, 1
    if schedule == "interleaved_1f1b":
        num_rounds = max(1, m // p)
        size = m // num_rounds + (2 * (m % num_rounds) > num_rounds)  # of most rounds
        return 2 * v * size, size
    return COMPILED_SCHEDULES[schedule][0] * v, 1


@compiled
def _naive(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    for r in range(p):
        for j in range(m):
            kind[r, 2 * j], kind[r, 2 * j + 1] = F, B
            microbatch[r, 2 * j] = microbatch[r, 2 * j + 1] = j
        stage[r, :] = r


@compiled
def _gpipe(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    for r in range(p):
        for j in range(m):
            kind[r, j], kind[r, m + j] = F, B
            microbatch[r, j] = microbatch[r, m + j] = j
        stage[r, :] = r


@compiled
def _one_f_one_b(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    for r in range(p):
        warmup = min(p - r - 1, m)
        for j in range(warmup):
            kind[r, j], microbatch[r, j] = F, j
        i = warmup
        for j in range(m):
            if warmup + j < m:
                kind[r, i], microbatch[r, i] = F, warmup + j
                i += 1
            kind[r, i], microbatch[r, i] = B, j
            i += 1
        stage[r, :] = r


@compiled
def _interleaved(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    num_rounds = max(1, m // p)
    size, longer = m // num_rounds, m % num_rounds
    passes = v * m
    chunk = np.empty(passes, np.int32)  # of the n-th forward; of the n-th backward it is v - 1 less that
    order = np.empty(passes, np.int32)  # its microbatch
    n = first = 0
    for one in range(num_rounds):
        end = first + size + (1 if one < longer else 0)
        for c in range(v):
            for j in range(first, end):
                chunk[n], order[n] = c, j
                n += 1
        first = end
    first_round = size + (1 if longer else 0)
    for r in range(p):
        warmup = min((v - 1) * first_round + 2 * (p - 1 - r), passes)
        for n in range(warmup):
            kind[r, n], stage[r, n], microbatch[r, n] = F, r + p * chunk[n], order[n]
        i = warmup
        for n in range(passes):
            if warmup + n < passes:
                kind[r, i] = F
                stage[r, i], microbatch[r, i] = r + p * chunk[warmup + n], order[warmup + n]
                i += 1
            kind[r, i] = B
            stage[r, i], microbatch[r, i] = r + p * (v - 1 - chunk[n]), order[n]
            i += 1


@compiled
def _zb_h1(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    for r in range(p):
        _split_row(r, m, p - r, r, kind[r], microbatch[r])
        stage[r, :] = r


@compiled
def _zb_h2(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    for r in range(p):
        _split_row(r, m, 2 * (p - r) - 1, 2 * r, kind[r], microbatch[r])
        stage[r, :] = r


@compiled
def _split_row(r, m, warmup, lag, kind, microbatch):  # type: ignore[no-untyped-def]
    i = 0
    for j in range(min(warmup, m)):
        kind[i], microbatch[i] = F, j
        i += 1
    for j in range(m):
        kind[i], microbatch[i] = I, j
        i += 1
        if j >= lag:
            kind[i], microbatch[i] = W, j - lag
            i += 1
        if j + warmup < m:
            kind[i], microbatch[i] = F, j + warmup
            i += 1
    for j in range(max(0, m - lag), m):
        kind[i], microbatch[i] = W, j
        i += 1


@compiled
def _zb_v(p, m, v, kind, stage, microbatch):  # type: ignore[no-untyped-def]
    full = max(m, 2 * p - 1)
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        done = np.zeros((4, 2), np.int32)
        row = kind[r], stage[r], microbatch[r]
        i = 0
        for _ in range(2 * (p - r) - 1):
            i = _step(i, F, down, 0, m, done, row)
        for _ in range(r):
            i = _step(i, F, up, 1, m, done, row)
            i = _step(i, F, down, 0, m, done, row)
        for _ in range(p - r):
            for k in (F, I, W):
                i = _step(i, k, up, 1, m, done, row)
        for _ in range(full - (2 * p - 1 - r)):
            for k in (F, I, W):
                i = _step(i, k, down, 0, m, done, row)
            for k in (F, I, W):
                i = _step(i, k, up, 1, m, done, row)
        for _ in range(p - 1 - r):
            for k in (I, W):
                i = _step(i, k, down, 0, m, done, row)
            for k in (F, I, W):
                i = _step(i, k, up, 1, m, done, row)
        for _ in range(r):
            i = _step(i, I, down, 0, m, done, row)
            i = _step(i, I, up, 1, m, done, row)
        for _ in range(p - r):
            for k in (I, W):
                i = _step(i, k, down, 0, m, done, row)
        for _ in range(r):
            i = _step(i, W, up, 1, m, done, row)
        for _ in range(r):
            i = _step(i, W, down, 0, m, done, row)


@compiled
def _step(i, kind, stage, leg, m, done, row):  # type: ignore[no-untyped-def]
    """Writes the next microbatch's action of this kind and leg, if there is one; gives the next free place."""
    j = done[kind, leg]
    done[kind, leg] += 1
    if j >= m:
        return i
    row[0][i], row[1][i], row[2][i] = kind, stage, j
    return i + 1


COMPILED_SCHEDULES: Mapping[str, tuple[int, Callable[..., None]]] = MappingProxyType(
    {
        "none": (2, _naive),
        "naive": (2, _naive),
        "gpipe": (2, _gpipe),
        "1f1b": (2, _one_f_one_b),
        "interleaved_1f1b": (2, _interleaved),
        "zb-h1": (3, _zb_h1),
        "zb-h2": (3, _zb_h2),
        "zb-v": (3, _zb_v),
    }
)
"""By name: actions of a stage for one microbatch, and what writes them."""
