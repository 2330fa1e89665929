"""When the last rank of a pipeline is through, for many plans that share a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.sim.pipeline.jit import compiled
from simplan.sim.pipeline.slots import Slot
from simplan.sim.pipeline.table import PipelineTable

__all__ = ["PipelineTimes", "pipeline_times"]

_Array = NDArray[np.float64]

_ROWS = ("forward", "backward", "backward_last", "input", "weight", "weight_last")
_ROW = np.zeros(len(Slot), np.int64)  # by slot, its row of durations
_WAY = np.full(len(Slot), 2, np.int64)  # and 0 for what makes activations, 1 for what makes their gradients
for _slot in Slot:
    _kind = _slot.name.split("_")[0].lower()
    _last = "_last" if _slot.name.endswith(("LAST", "ONLY")) else ""
    _ROW[_slot] = _ROWS.index(_kind + _last) if _kind in _ROWS else -1
    _WAY[_slot] = {"forward": 0, "backward": 1, "input": 1}.get(_kind, 2)
_UNSHARD, _REDUCE, _NARROW = int(Slot.UNSHARD), int(Slot.REDUCE_GRAD), int(Slot.REDUCE_GRAD_NARROW)


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """How long everything takes, seconds, the last axis of every array being the plan.

    Attributes:
        compute_s: ``(6, stages, plans)``: F; B; the B that completes the gradients of its stage; I; W; the W that does.
            Each with all its exchanges, and with the reductions of data parallelism that it waits for.
        send_s: ``(2, stages, plans)``: results of F, and of B or I, on their way to the next rank.
        gather_s: ``(stages, units, plans)``: FSDP's all-gathers, issued at UNSHARD. Each waits for the computation
            before UNSHARD and for the rank's collectives of the same group before it. Units that a stage does not have
            take no time.
        copy_s: Their copies out, one by one, before the first computation after UNSHARD.
        reduce_copy_s: ``(stages, plans)``: REDUCE_GRAD up to its first collective of the group that gathers use.
        reduce_s: ``(stages, plans)``: The rest of REDUCE_GRAD; all of it where there is no such collective.
        tied_s: ``(plans,)``: All-reduce of a weight that the first and the last stage share, before their ranks update;
            0 for none.
        update_s: ``(ranks, plans)``: OPTIM, which waits for all that the rank has sent.
        after_s: ``(ranks, plans)``: What follows it (ZeRO-1's broadcasts).
    """

    compute_s: _Array
    send_s: _Array
    gather_s: _Array
    copy_s: _Array
    reduce_copy_s: _Array
    reduce_s: _Array
    tied_s: _Array
    update_s: _Array
    after_s: _Array

    @classmethod
    def zeros(cls, num_stages: int, num_ranks: int, num_plans: int, num_units: int = 0) -> PipelineTimes:
        """Arrays to fill in; whatever is left takes no time."""
        k = num_plans
        return cls(
            compute_s=np.zeros((len(_ROWS), num_stages, k)),
            send_s=np.zeros((2, num_stages, k)),
            gather_s=np.zeros((num_stages, num_units, k)),
            copy_s=np.zeros((num_stages, num_units, k)),
            reduce_copy_s=np.zeros((num_stages, k)),
            reduce_s=np.zeros((num_stages, k)),
            tied_s=np.zeros(k),
            update_s=np.zeros((num_ranks, k)),
            after_s=np.zeros((num_ranks, k)),
        )

    @property
    def of_events(self) -> tuple[_Array, ...]:
        """What events take, as the walk wants it."""
        return self.compute_s, self.send_s, self.gather_s, self.copy_s, self.reduce_copy_s, self.reduce_s

    @property
    def forward_s(self) -> _Array:
        """``(stages, plans)``, F; as the following, a part of ``compute_s`` or ``send_s`` to write to."""
        return self.compute_s[0]

    @property
    def backward_s(self) -> _Array:
        """B but for the last of its stage."""
        return self.compute_s[1]

    @property
    def backward_last_s(self) -> _Array:
        """The last B of its stage."""
        return self.compute_s[2]

    @property
    def input_s(self) -> _Array:
        """I."""
        return self.compute_s[3]

    @property
    def weight_s(self) -> _Array:
        """W but for the last of its stage."""
        return self.compute_s[4]

    @property
    def weight_last_s(self) -> _Array:
        """The last W of its stage."""
        return self.compute_s[5]

    @property
    def send_forward_s(self) -> _Array:
        """``(stages - 1, plans)``: by boundary between stage b and b + 1, the message forward."""
        return self.send_s[0, :-1]

    @property
    def send_backward_s(self) -> _Array:
        """The message back over the same boundary."""
        return self.send_s[1, 1:]


def pipeline_times(table: PipelineTable, times: PipelineTimes) -> _Array:
    """Step times of plans that share a table, ``(plans,)``, seconds.

    As ``simplan.sim.engine`` has it for the Program of the table. A message starts when both ends are there: each when
    the rank's computation before it in its row has ended, and the messages before it between the two ranks, in either
    direction, and on its stream.

    Args:
        table: What all ranks do.
        times: How long it takes.
    """
    p, s, k = table.num_ranks, table.num_stages, len(times.tied_s)
    state = _State(
        clock_s=np.zeros((p, k)),
        pair_s=np.zeros((table.num_pairs, k)),
        stream_s=np.zeros((4, p, k) if table.two_peers else (4, 0, k)),
        arrival_s=np.zeros((2 * s * table.depth, k)),
        shard_s=np.zeros((p, k)),
        gathered_s=np.zeros(times.gather_s.shape),
        is_gathering=np.zeros(s, np.bool_),
    )
    for first, length, repeats, shift in table.segments.tolist():
        for number in range(repeats):
            _walk(table.events(first, length), number * shift, table.depth, table.places, state, times.of_events)
    return _finish(table, times, state)


class _State(NamedTuple):
    """How far everything is; the last axis is the plan.

    Attributes:
        clock_s: By rank, the end of its last computation.
        pair_s: By pair of ranks, the end of the last message between them.
        stream_s: By way and end (F sent, F received, B sent, B received) and rank, the end of its last message, where
            that is not the last one of a pair.
        arrival_s: Ends of messages that have not been used, ``depth`` for each way and receiving stage.
        shard_s: By rank, the end of its last all-gather.
        gathered_s: By stage and unit, the end of its last all-gather.
        is_gathering: By stage, whether nobody has waited for these yet.
    """

    clock_s: _Array
    pair_s: _Array
    stream_s: _Array
    arrival_s: _Array
    shard_s: _Array
    gathered_s: _Array
    is_gathering: NDArray[np.bool_]


@compiled
def _walk(events, offset, depth, places, state, costs):  # type: ignore[no-untyped-def]
    """Goes through events once, with microbatches that are higher by ``offset``."""
    slots, stages, microbatches = events
    rank_of, sends_over, gets_over = places
    clock, pair, stream, arrival, shard, gathered, is_gathering = state
    compute_s, send_s, gather_s, copy_s, reduce_copy_s, reduce_s = costs
    num_stages, num_plans = compute_s.shape[1:]
    has_streams = stream.shape[1] > 0
    for e in range(len(slots)):
        slot, s = slots[e], stages[e]
        r = rank_of[s]
        if slot < _UNSHARD:
            way, row = _WAY[slot], _ROW[slot]
            j = (microbatches[e] + offset) & (depth - 1)
            gets = gets_over[way, s] >= 0
            a = (way * num_stages + s) * depth + j
            if is_gathering[s]:
                is_gathering[s] = False
                if gets:
                    for k in range(num_plans):
                        clock[r, k] = max(clock[r, k], arrival[a, k])
                for u in range(gathered.shape[1]):
                    for k in range(num_plans):
                        clock[r, k] = max(clock[r, k], gathered[s, u, k]) + copy_s[s, u, k]
            if gets:
                for k in range(num_plans):
                    clock[r, k] = max(clock[r, k], arrival[a, k]) + compute_s[row, s, k]
            else:
                for k in range(num_plans):
                    clock[r, k] += compute_s[row, s, k]
            over = sends_over[way, s]
            if over < 0:
                continue
            target = s + 1 if way == 0 else s - 1
            q = rank_of[target]
            b = (way * num_stages + target) * depth + j
            if has_streams:
                for k in range(num_plans):
                    pair[over, k] = max(pair[over, k], stream[2 * way, r, k], stream[2 * way + 1, q, k])
            for k in range(num_plans):
                arrival[b, k] = max(clock[r, k], clock[q, k], pair[over, k]) + send_s[way, s, k]
                pair[over, k] = arrival[b, k]
            if has_streams:
                for k in range(num_plans):
                    stream[2 * way, r, k] = stream[2 * way + 1, q, k] = pair[over, k]
        elif slot == _UNSHARD:
            is_gathering[s] = True
            for u in range(gathered.shape[1]):
                for k in range(num_plans):
                    shard[r, k] = max(shard[r, k], clock[r, k]) + gather_s[s, u, k]
                    gathered[s, u, k] = shard[r, k]
        elif slot == _REDUCE or slot == _NARROW:
            for k in range(num_plans):
                clock[r, k] = max(clock[r, k] + reduce_copy_s[s, k], shard[r, k]) + reduce_s[s, k]


def _finish(table: PipelineTable, times: PipelineTimes, state: _State) -> _Array:
    """OPTIM and what follows: it waits for the rank's messages, which in the end are all those of its pairs."""
    ready_s = state.clock_s
    for boundary in range(table.num_stages - 1):
        pair = table.sends_over[0, boundary]
        if pair >= 0:
            for rank in table.rank_of[boundary : boundary + 2]:
                ready_s[rank] = np.maximum(ready_s[rank], state.pair_s[pair])
    first, last = table.rank_of[[0, -1]]
    if first != last:
        met_s = np.maximum(ready_s[first], ready_s[last]) + times.tied_s
        for rank in (first, last):
            ready_s[rank] = np.where(times.tied_s > 0, met_s, ready_s[rank])
    step_s: _Array = (ready_s + times.update_s + times.after_s).max(axis=0)
    return step_s
