"""Schedules with a full backward: naive, GPipe and 1F1B with one stage per rank, interleaved 1F1B with several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise, product

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD


def gpipe(shape: PipelineShape) -> Table:
    """All forwards, then all backwards, both in microbatch order (Huang et al. 2019).

    Bubble fraction (p-1)/(m+p-1); m microbatches in flight on every stage.
    """
    assert shape.virtual_stages == 1, shape
    order = [*product((_F, _B), range(shape.num_microbatches))]
    return tuple(tuple(Action(rank, *each) for each in order) for rank in range(shape.num_ranks))


def naive(shape: PipelineShape) -> Table:
    """Completes forward and backward of a microbatch before the next one starts; all ranks except one are idle.

    Bubble fraction (p-1)/p; one microbatch in flight.
    """
    assert shape.virtual_stages == 1, shape
    order = [(kind, microbatch) for microbatch in range(shape.num_microbatches) for kind in (_F, _B)]
    return tuple(tuple(Action(rank, *each) for each in order) for rank in range(shape.num_ranks))


def one_f_one_b(shape: PipelineShape) -> Table:
    """Runs warm-up forwards to fill the pipeline, then one forward and one backward in turn, then remaining backwards.

    Bubble fraction (p-1)/(m+p-1) as for GPipe, but at most p-r microbatches in flight on stage r. Also called
    PipeDream-Flush (Narayanan et al. 2021).
    """
    assert shape.virtual_stages == 1, shape
    p, microbatches = shape.num_ranks, range(shape.num_microbatches)
    return tuple(
        _row([Action(rank, _F, i) for i in microbatches], [Action(rank, _B, i) for i in microbatches], p - 1 - rank)
        for rank in range(p)
    )


def interleaved_1f1b(shape: PipelineShape) -> Table:
    """1F1B with v smaller stages per rank, stage s on rank s mod p, visited in turn by rounds of microbatches.

    Bubble fraction (p-1)/(vm+p-1) for m a multiple of p, but 2(p-1-r) + (v-1)p + 1 stage inputs in flight on rank r.

    Microbatches form max(1, m // p) rounds. A rank runs a whole round through its first stage, then through its next
    one, and so on; backward runs the same rounds through the stages from the last to the first. If the number of rounds
    does not divide m, the first rounds have one microbatch more than the others. torch rejects such m; for all others
    it has the same order, as Megatron-LM has (Narayanan et al. 2021, section 2.2).
    """
    p, v = shape.num_ranks, shape.virtual_stages
    rounds = _rounds(shape)
    table = []
    for rank in range(p):
        stages = [rank + p * i for i in range(v)]
        forwards = list(_passes(_F, rounds, stages))
        backwards = list(_passes(_B, rounds, stages[::-1]))
        # the last stage of the pipeline has its first microbatch after v - 1 stages of the first round; each hop away
        # from its rank takes one forward there and one backward back
        table.append(_row(forwards, backwards, (v - 1) * len(rounds[0]) + 2 * (p - 1 - rank)))
    return tuple(table)


def _row(forwards: list[Action], backwards: list[Action], num_warmup: int) -> tuple[Action, ...]:
    """Returns warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    row = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        row += (forward, backward)
    return tuple(row + backwards[len(forwards) - num_warmup :])


def _rounds(shape: PipelineShape) -> list[range]:
    """Returns the microbatches of each round: as even as possible, longer rounds first."""
    m = shape.num_microbatches
    num_rounds = max(1, m // shape.num_ranks)
    sizes = (m // num_rounds + (index < m % num_rounds) for index in range(num_rounds))
    return [range(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]


def _passes(kind: ActionKind, rounds: list[range], stages: list[int]) -> Iterator[Action]:
    return (Action(stage, kind, microbatch) for one in rounds for stage in stages for microbatch in one)
