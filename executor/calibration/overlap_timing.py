"""Times how much matrix products and a collective slow each other down when they run at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from executor.calibration.timing import TIMED_DTYPES, Stopwatch, gathered, together
from simplan.cost.calibration import OverlapTiming, TimedDtype
from simplan.spec.layer import CollectiveKind
from simplan.units import MIB

__all__ = ["time_overlap"]

_COLLECTIVES = 4


def time_overlap(
    dtype: TimedDtype, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool], *, small: bool = False
) -> list[OverlapTiming]:
    """Products that last as long as a few all-reduces, each alone, then both at once.

    Args:
        dtype: Precision of the products.
        num_ranks: Ranks, which all do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
        small: A smaller message.
    """
    watch = Stopwatch(device)
    side = 4096 if device.type == "cuda" else 256
    buffer = torch.zeros((MIB if small else 16 * MIB) // 4, device=device)
    a, b = torch.randn(2, side, side, device=device).to(TIMED_DTYPES[dtype])

    def products(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b)

    def collectives() -> list[dist.Work]:
        works = [dist.all_reduce(buffer, async_op=True) for _ in range(_COLLECTIVES)]
        return [work for work in works if work is not None]

    def alone() -> None:
        for work in collectives():
            work.wait()

    products(1)
    alone()
    together()
    moving_s = watch(alone)
    product_s = min(watch(products, 1) for _ in range(5))
    num_products = int(statistics.median(gathered(max(1, round(moving_s / product_s)))))
    found: list[tuple[float, float, float, float]] = []
    while keep_going(len(found)):
        together()
        compute_s = watch(products, num_products)
        together()
        moving_s = watch(alone)
        together()
        found.append((compute_s, moving_s, *_both(watch, products, collectives, num_products)))
    compute = statistics.median(gathered(statistics.median(_slowdown(c, bc, bm) for c, m, bc, bm in found)))
    moving = statistics.median(gathered(statistics.median(_slowdown(m, bm, bc) for c, m, bc, bm in found)))
    return [
        OverlapTiming(
            kind=CollectiveKind.ALL_REDUCE,
            num_ranks=num_ranks,
            num_bytes=buffer.nbytes,
            compute_slowdown=max(1.0, compute),
            communication_slowdown=max(1.0, moving),
        )
    ]


def _both(
    watch: Stopwatch, products: Callable[[int], None], collectives: Callable[[], list[dist.Work]], num_products: int
) -> tuple[float, float]:
    """Seconds until the products are done and until the collectives are, begun together."""
    works: list[dist.Work] = []

    def begin() -> None:
        works.extend(collectives())

    def wait() -> None:
        for work in works:
            work.wait()

    return watch.beside(begin, partial(products, num_products), wait)


def _slowdown(alone_s: float, beside_s: float, other_beside_s: float) -> float:
    """Slowdown while the other runs: what of it is beyond the other's end is at full speed.

    With slowdown f, a time alone t and the other's end e < f t: beside = e + (t - e / f), so f = e / (t + e - beside).
    """
    if beside_s <= other_beside_s:
        return beside_s / alone_s
    left_s = alone_s + other_beside_s - beside_s
    return other_beside_s / left_s if left_s > 0 else beside_s / alone_s
