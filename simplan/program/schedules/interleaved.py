"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2), in the order of Megatron-LM and torch's Interleaved1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(shape: PipelineShape) -> Table:
    """1F1B with v smaller stages per rank, stage s on rank s mod p, visited in turn by rounds of microbatches.

    Bubble fraction (p-1)/(vm+p-1) for m a multiple of p, but 2(p-1-r) + (v-1)p + 1 stage inputs in flight on rank r.

    Microbatches form max(1, m // p) rounds. A rank runs a whole round through its first stage, then through its next
    one, and so on; backward runs the same rounds through the stages from the last to the first. If the number of rounds
    does not divide m, the first rounds have one microbatch more than the others. torch rejects such m; for all others
    it has the same order.

    Args:
        shape: The pipeline.
    """
    return tuple(_row(rank, shape) for rank in range(shape.num_ranks))


def _row(rank: int, shape: PipelineShape) -> tuple[Action, ...]:
    p, v = shape.num_ranks, shape.virtual_stages
    rounds = _rounds(shape)
    local = range(v)
    forwards = list(_passes(ActionKind.FORWARD, rounds, [rank + p * i for i in local]))
    backwards = list(_passes(ActionKind.BACKWARD, rounds, [rank + p * i for i in reversed(local)]))
    # the last stage of the pipeline has its first microbatch after v - 1 stages of the first round; each hop away from
    # its rank takes one forward there and one backward back
    num_warmup = min((v - 1) * len(rounds[0]) + 2 * (p - 1 - rank), len(forwards))
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
