"""When the last rank of a pipeline is through, for many plans that share a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simplan.sim.jit import jit
from simplan.sim.pipeline.steady import repeat
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.types import Floats, Longs, Places, Steps
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


def pipeline_times(
    table: PipelineTable, times: PipelineTimes, *, blocking_sends: bool = False, received_ahead: bool = False
) -> Floats:
    """Step times of plans that share a table, ``(plans,)``, seconds.

    As ``simplan.sim.engine`` has it for the Program of the table. A message starts when both ends are there: each when
    the rank's computation before it in its row has ended, and the messages before it between the two ranks, in either
    direction, and on its stream.

    Args:
        table: What all ranks do.
        times: How long it takes.
        blocking_sends: A rank waits for each of its sends before it goes on.
        received_ahead: Receives are posted long before, so that a message waits for its sender only, and for those
            before it from the same rank on the same way.
    """
    events, sizes = (table.slot, table.stage, table.microbatch), (table.num_pairs, table.depth, int(table.two_peers))
    ends = times.tied_s, times.update_s, times.after_s
    how = blocking_sends, received_ahead
    return _walked(events, table.segments, table.live, sizes, table.places, times.of_events, ends, how)


@jit
def _walked(
    events: Steps,
    segments: Longs,
    live: Longs,
    sizes: tuple[int, int, int],
    places: Places,
    costs: tuple[Floats, ...],
    ends: tuple[Floats, Floats, Floats],
    how: tuple[bool, bool],
) -> Floats:
    """All segments of a step; ``sizes`` are pairs of ranks, depth, and whether there are two peers."""
    slots, stages, microbatches = events
    blocking_sends, received_ahead = how
    num_pairs, depth, two_peers = sizes
    num_stages, num_units, k = costs[2].shape
    p = ends[1].shape[0]
    state = State(
        np.zeros((p, k)),
        np.zeros((4 * num_pairs, k)),
        np.zeros((4, p * two_peers, k)),
        np.zeros((2 * num_stages * depth, k)),
        np.zeros((p, k)),
        np.zeros((num_stages, num_units, k)),
        np.zeros(num_stages, np.bool_),
    )
    begin = 0
    for number in range(len(segments)):
        first, length, repeats, shift = segments[number]
        end = begin
        while end < len(live) and live[end, 0] == number:
            end += 1
        part = slice(first, first + length)
        repeat(
            (slots[part], stages[part], microbatches[part]),
            repeats, shift, live[begin:end, 1:], depth, places, state, costs, blocking_sends, received_ahead,
        )  # fmt: skip
        begin = end
    return _finished(places, state, ends[0], ends[1], ends[2])


@jit
def _finished(places: Places, state: State, tied_s: Floats, update_s: Floats, after_s: Floats) -> Floats:
    """OPTIM and what follows: it waits for the rank's messages, which in the end are all those of its pairs."""
    rank_of, sends_over, _ = places
    ready_s, pair_s = state.clock_s, state.pair_s
    num_ranks, num_plans = ready_s.shape
    for boundary in range(len(rank_of) - 1):
        pair = sends_over[0, boundary]
        if pair >= 0:
            for stage in range(boundary, boundary + 2):
                rank = rank_of[stage]
                for k in range(num_plans):
                    ready_s[rank, k] = max(ready_s[rank, k], pair_s[4 * pair : 4 * pair + 4, k].max())
    first, last = rank_of[0], rank_of[-1]
    step_s = np.zeros(num_plans)
    for k in range(num_plans):
        if first != last and tied_s[k] > 0:
            ready_s[first, k] = ready_s[last, k] = max(ready_s[first, k], ready_s[last, k]) + tied_s[k]
        for rank in range(num_ranks):
            step_s[k] = max(step_s[k], ready_s[rank, k] + update_s[rank, k] + after_s[rank, k])
    return step_s
