"""Compute actions of every rank as arrays: what the functions of ``simplan.program.schedules`` give as tuples.

All rows of a table are equally long. Kinds are 0 for F, 1 for B, 2 for I and 3 for W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.scratch import scratch
from simplan.sim.pipeline.types import Bytes, Ints

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
        period: Actions after which a row repeats itself in its middle, and how much higher its microbatches are then.
    """

    length: int
    kind: Bytes
    stage: Ints
    microbatch: Ints
    rank_of: Ints
    period: tuple[int, int]


def compute_order(schedule: str, p: int, m: int, v: int) -> Order:
    """Compute actions of a schedule, valid until the same thread asks for those of another one.

    Args:
        schedule: One of ``COMPILED_SCHEDULES``.
        p, m, v: Pipeline ranks, microbatches, stages of a rank.
    """
    assert schedule in COMPILED_SCHEDULES, schedule
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


@jit
def _naive(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
    for r in range(p):
        for j in range(m):
            kind[r, 2 * j], kind[r, 2 * j + 1] = F, B
            microbatch[r, 2 * j] = microbatch[r, 2 * j + 1] = j
        stage[r, :] = r


@jit
def _gpipe(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
    for r in range(p):
        for j in range(m):
            kind[r, j], kind[r, m + j] = F, B
            microbatch[r, j] = microbatch[r, m + j] = j
        stage[r, :] = r


@jit
def _one_f_one_b(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
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


@jit
def _interleaved(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
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


@jit
def _zb_h1(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
    for r in range(p):
        _split_row(m, p - r, r, kind[r], microbatch[r])
        stage[r, :] = r


@jit
def _zb_h2(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
    for r in range(p):
        _split_row(m, 2 * (p - r) - 1, 2 * r, kind[r], microbatch[r])
        stage[r, :] = r


@jit
def _split_row(m: int, warmup: int, lag: int, kind: Bytes, microbatch: Ints) -> None:
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


_DOWN, _UP = 0, 1
_PHASES = (
    [(F, _DOWN)],
    [(F, _UP), (F, _DOWN)],
    [(F, _UP), (I, _UP), (W, _UP)],
    [(F, _DOWN), (I, _DOWN), (W, _DOWN), (F, _UP), (I, _UP), (W, _UP)],
    [(I, _DOWN), (W, _DOWN), (F, _UP), (I, _UP), (W, _UP)],
    [(I, _DOWN), (I, _UP)],
    [(I, _DOWN), (W, _DOWN)],
    [(W, _UP)],
    [(W, _DOWN)],
)
_ZB_V = np.full((len(_PHASES), 6), -1, np.int64)  # twice the kind, plus one on the way up
for _number, _phase in enumerate(_PHASES):
    _ZB_V[_number, : len(_phase)] = [2 * kind + leg for kind, leg in _phase]


@jit
def _zb_v(p: int, m: int, v: int, kind: Bytes, stage: Ints, microbatch: Ints) -> None:
    full = max(m, 2 * p - 1)  # steps past the last microbatch are left out
    done = np.empty((4, 2), np.int32)
    for r in range(p):
        times = (2 * (p - r) - 1, r, p - r, full - (2 * p - 1 - r), p - 1 - r, r, p - r, r, r)
        done[:] = 0
        i = 0
        for phase in range(len(_ZB_V)):
            for _ in range(times[phase]):
                for step in _ZB_V[phase]:
                    if step < 0:
                        break
                    k, leg = step // 2, step % 2
                    if done[k, leg] < m:
                        kind[r, i], microbatch[r, i] = k, done[k, leg]
                        stage[r, i] = 2 * p - 1 - r if leg else r
                        i += 1
                    done[k, leg] += 1


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
