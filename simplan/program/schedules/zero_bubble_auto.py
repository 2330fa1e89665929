"""zb-1p and zb-2p: schedules built for given stage times within a memory limit (Qi et al. 2024, section 3.1)."""

from __future__ import annotations

from itertools import product

from simplan.program.action import Table
from simplan.program.schedules.bubble import longest_span_s
from simplan.program.schedules.shape import PipelineShape
from simplan.program.schedules.zero_bubble import zb_h1, zb_h2
from simplan.program.schedules.zero_bubble_search import Tactics, build, is_later

__all__ = ["zb_1p", "zb_2p"]


def zb_1p(shape: PipelineShape) -> Table:
    """Best order found for the stage times that holds at most p microbatches per rank, the memory of 1F1B.

    A microbatch counts in full from F to I, and by the fraction of its activations that its W needs from I to W.

    Args:
        shape: The pipeline and its stage times; one stage per rank.
    """
    return _best(shape, shape.num_ranks, zb_h1(shape))


def zb_2p(shape: PipelineShape) -> Table:
    """Best order found for the stage times that holds at most 2p microbatches per rank, twice the memory of 1F1B.

    Idle time is near zero under three conditions, which the paper assumes: W is at most F and I, a step has about 4p
    microbatches or more, and half of a microbatch's activations is freed after I. The paper's optimizer with and
    without a synchronization of all ranks runs the same table.

    Args:
        shape: The pipeline and its stage times; one stage per rank.
    """
    return _best(shape, 2 * shape.num_ranks, zb_h2(shape))


def _best(shape: PipelineShape, memory_limit: int, handcrafted: Table) -> Table:
    """Returns the handcrafted table, which is within memory, or a shorter one built with any tactics."""
    table, span_s = handcrafted, longest_span_s(handcrafted, shape.stage_times)
    for choices in product((False, True), repeat=3):
        built = build(shape, memory_limit, Tactics(*choices))
        if is_later(span_s, built.longest_span_s):
            table, span_s = built.table(), built.longest_span_s
    return table
