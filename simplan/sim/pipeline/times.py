"""When the last rank of a pipeline is through, for many plans that share a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simplan.sim.pipeline.steady import repeat
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.types import Floats
from simplan.sim.pipeline.walk import DURATIONS, State

__all__ = ["PipelineTimes", "pipeline_times"]


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

    compute_s: Floats
    send_s: Floats
    gather_s: Floats
    copy_s: Floats
    reduce_copy_s: Floats
    reduce_s: Floats
    tied_s: Floats
    update_s: Floats
    after_s: Floats

    @classmethod
    def zeros(cls, num_stages: int, num_ranks: int, num_plans: int, num_units: int = 0) -> PipelineTimes:
        """Arrays to fill in; whatever is left takes no time."""
        k = num_plans
        return cls(
            compute_s=np.zeros((len(DURATIONS), num_stages, k)),
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
    def of_events(self) -> tuple[Floats, ...]:
        """What events take, as the walk wants it."""
        return self.compute_s, self.send_s, self.gather_s, self.copy_s, self.reduce_copy_s, self.reduce_s

    @property
    def forward_s(self) -> Floats:
        """``(stages, plans)``, F; as the following, a part of ``compute_s`` or ``send_s`` to write to."""
        return np.asarray(self.compute_s[0])

    @property
    def backward_s(self) -> Floats:
        """B but for the last of its stage."""
        return np.asarray(self.compute_s[1])

    @property
    def backward_last_s(self) -> Floats:
        """The last B of its stage."""
        return np.asarray(self.compute_s[2])

    @property
    def input_s(self) -> Floats:
        """I."""
        return np.asarray(self.compute_s[3])

    @property
    def weight_s(self) -> Floats:
        """W but for the last of its stage."""
        return np.asarray(self.compute_s[4])

    @property
    def weight_last_s(self) -> Floats:
        """The last W of its stage."""
        return np.asarray(self.compute_s[5])

    @property
    def send_forward_s(self) -> Floats:
        """``(stages - 1, plans)``: by boundary between stage b and b + 1, the message forward."""
        return np.asarray(self.send_s[0, :-1])

    @property
    def send_backward_s(self) -> Floats:
        """The message back over the same boundary."""
        return np.asarray(self.send_s[1, 1:])


def pipeline_times(table: PipelineTable, times: PipelineTimes, *, blocking_sends: bool = False) -> Floats:
    """Step times of plans that share a table, ``(plans,)``, seconds.

    As ``simplan.sim.engine`` has it for the Program of the table. A message starts when both ends are there: each when
    the rank's computation before it in its row has ended, and the messages before it between the two ranks, in either
    direction, and on its stream.

    Args:
        table: What all ranks do.
        times: How long it takes.
        blocking_sends: A rank waits for each of its sends before it goes on.
    """
    p, s, k = table.num_ranks, table.num_stages, len(times.tied_s)
    state = State(
        clock_s=np.zeros((p, k)),
        pair_s=np.zeros((table.num_pairs, k)),
        stream_s=np.zeros((4, p, k) if table.two_peers else (4, 0, k)),
        arrival_s=np.zeros((2 * s * table.depth, k)),
        shard_s=np.zeros((p, k)),
        gathered_s=np.zeros(times.gather_s.shape),
        is_gathering=np.zeros(s, np.bool_),
    )
    for number, (first, length, repeats, shift) in enumerate(table.segments.tolist()):
        events, live = table.events(first, length), table.live[table.live[:, 0] == number, 1:]
        repeat(events, repeats, shift, live, table.depth, table.places, state, times.of_events, blocking_sends)
    return _finish(table, times, state)


def _finish(table: PipelineTable, times: PipelineTimes, state: State) -> Floats:
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
    step_s: Floats = (ready_s + times.update_s + times.after_s).max(axis=0)
    return step_s
