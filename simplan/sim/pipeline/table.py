"""A complete Level 1 table as arrays, made without an object per action."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import Action, ActionKind, Table
from simplan.program.complete import Unshard
from simplan.sim.pipeline.events import complete
from simplan.sim.pipeline.orders import compute_order
from simplan.sim.pipeline.sharding import NONE, ONCE, WINDOW
from simplan.sim.pipeline.slots import Slot, kind_of

__all__ = ["PipelineTable", "compiled_table"]

_UNSHARD = {"none": NONE, "once": ONCE, "window": WINDOW}


@dataclass(frozen=True, slots=True, eq=False)
class PipelineTable:
    """Everything that all ranks do in a step, in an order in which nothing stands before what it waits for.

    Attributes:
        num_ranks, num_stages, num_microbatches: Of the pipeline.
        rank_of: By stage, its rank.
        pair_of: By boundary between stage b and b + 1, the pair of ranks that talk over it, or -1 on one rank.
        num_pairs: Pairs of ranks that exchange messages.
        slot, stage, microbatch: Of every event.
        depth: A power of two, no smaller than the results that wait for a neighbouring stage at once.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of: NDArray[np.int32]
    pair_of: NDArray[np.int32]
    num_pairs: int
    slot: NDArray[np.uint8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    depth: int

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        arrays = (self.rank_of, self.pair_of, self.slot, self.stage, self.microbatch)
        return sum(array.nbytes for array in arrays)

    def actions(self) -> Table:
        """The same as ``simplan.program.table.plan_table`` gives."""
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for number, s, j in zip(self.slot.tolist(), self.stage.tolist(), self.microbatch.tolist(), strict=True):
            kind, row = kind_of(number), rows[self.rank_of[s]]
            row.append(Action(s, kind, j if kind.per_microbatch else None))
            forward = kind is ActionKind.FORWARD
            if not forward and not Slot.BACKWARD <= number < Slot.WEIGHT:
                continue
            target = s + 1 if forward else s - 1
            if 0 <= target < self.num_stages and self.pair_of[min(s, target)] >= 0:
                row.append(Action(s, ActionKind.SEND_F if forward else ActionKind.SEND_B, j))
                receive = ActionKind.RECV_F if forward else ActionKind.RECV_B
                rows[self.rank_of[target]].append(Action(target, receive, j))
        return tuple(tuple(row) for row in rows)


_MOST_BYTES = 128 * 2**20
_known: OrderedDict[tuple[str, int, int, int, Unshard], PipelineTable] = OrderedDict()


def compiled_table(schedule: str, pp: int, m: int, v: int, unshard: Unshard) -> PipelineTable:
    """The table of a pipeline; those that were used last are kept, up to 128 MiB.

    Args:
        schedule: One of ``COMPILED_SCHEDULES``.
        pp, m, v: Pipeline ranks, microbatches of a step, stages of a rank.
        unshard: Which stages are gathered when.
    """
    key = (schedule, pp, m, v, unshard)
    table = _known.get(key)
    if table is None:
        table = _known[key] = _table(schedule, pp, m, v, unshard)
        held = sum(other.num_bytes for other in _known.values())
        while held > _MOST_BYTES and len(_known) > 1:
            held -= _known.popitem(last=False)[1].num_bytes
    _known.move_to_end(key)
    return table


def _table(schedule: str, pp: int, m: int, v: int, unshard: Unshard) -> PipelineTable:
    order = compute_order(schedule, pp, m, v)
    events = complete(order, _UNSHARD[unshard], m)
    rank_of = order.rank_of.tolist()
    pairs: dict[frozenset[int], int] = {}
    pair_of = [
        -1 if one == other else pairs.setdefault(frozenset((one, other)), len(pairs))
        for one, other in zip(rank_of, rank_of[1:], strict=False)
    ]
    return PipelineTable(
        num_ranks=pp,
        num_stages=pp * v,
        num_microbatches=m,
        rank_of=order.rank_of,
        pair_of=np.array(pair_of, np.int32),
        num_pairs=len(pairs),
        slot=events.slot,
        stage=events.stage,
        microbatch=events.microbatch,
        depth=1 << (events.most_waiting - 1).bit_length(),
    )
