"""zb-1p and zb-2p: schedules found for given stage times within a memory limit (Qi et al. 2024, section 3.1)."""

from __future__ import annotations

from itertools import product

from simplan.program.action import Table
from simplan.program.schedules.bubble import longest_span_s
from simplan.program.schedules.shape import PipelineShape
from simplan.program.schedules.zero_bubble import zb_h1, zb_h2
from simplan.program.schedules.zero_bubble_search import Tactics, build, is_later

__all__ = ["zb_1p", "zb_2p"]


def zb_1p(shape: PipelineShape) -> Table:
    """The best order found for the stage times that keeps at most p microbatches on every rank, 1F1B's memory.

    A microbatch counts in full from F to I, and from I to W by what stays of it.

    Args:
        shape: The pipeline and its stage times; one stage a rank.
    """
    return _best(shape, shape.num_ranks, zb_h1(shape))


def zb_2p(shape: PipelineShape) -> Table:
    """The best order found for the stage times that keeps at most 2p microbatches on every rank, twice 1F1B's memory.

    Almost no idle time, where W is no more than F and I, a step has some 4p microbatches or more, and half of a
    microbatch's activations is gone after I, as the paper assumes. The paper's optimizer with and without a
    synchronization of all ranks runs the same table.

    Args:
        shape: The pipeline and its stage times; one stage a rank.
    """
    return _best(shape, 2 * shape.num_ranks, zb_h2(shape))


def _best(shape: PipelineShape, memory_limit: int, handcrafted: Table) -> Table:
    """The handcrafted table, which is within memory, or the shortest that tactics give where that is shorter."""
    table, span_s = handcrafted, longest_span_s(handcrafted, shape.stage_times)
    for choices in product((False, True), repeat=3):
        built = build(shape, memory_limit, Tactics(*choices))
        if is_later(span_s, built.longest_span_s):
            table, span_s = built.table(), built.longest_span_s
    return table
