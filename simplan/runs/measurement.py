"""What running a job recorded. The executor writes it, ``compare`` reads it."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import Field

from simplan.base import Count, Spec
from simplan.plan.plan import ParallelPlan
from simplan.program.timeline import SpanKind
from simplan.runs.checkpoint import CheckpointTiming
from simplan.runs.run_spec import RunSpec

__all__ = [
    "EarlierPart",
    "IssuedKind",
    "MeasuredCollective",
    "MeasuredSpan",
    "Measurement",
    "PeakMemory",
    "RankMeasurement",
    "SlowRank",
]

IssuedKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "ring",
    "send",
    "recv",
    "to_host",
    "from_host",
]


class PeakMemory(Spec):
    """Peak memory in three columns, bytes; None where the device or the run does not tell.

    Attributes:
        allocated_bytes: By tensors (CUDA allocator statistics; on the CPU, the profiler's allocation trace).
        reserved_bytes: By the caching allocator; None on the CPU, which has none.
        device_bytes: On the device by the driver's account; on the CPU, the peak resident set of the process.
    """

    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    device_bytes: Count | None = None


class MeasuredSpan(Spec):
    """An action as it ran, or a part of one: waits for messages are outside of the span.

    Attributes:
        action: Text form, e.g. ``0F1``; OPTIM and REDUCE_GRAD included.
        kind: What its time counts as in the split of the step.
        start_s: Seconds from the common start of the step (clock aligned over ranks).
        end_s: End on the same clock.
    """

    action: str
    kind: SpanKind
    start_s: float
    end_s: float


class MeasuredCollective(Spec):
    """A collective or message as it was issued, in issue order.

    Attributes:
        kind: A kind of collective, ``send`` or ``recv``, or a copy between the device and its host.
        action: The action during which it was issued (``0SEND_F1``; for a DDP bucket the backward it overlaps).
        ranks: Global ranks of the group (of a broadcast the root first), or (source, destination); of a copy, the rank.
        num_bytes: As ``simplan.model.layer.CollectiveKind`` counts them.
        start_s: When it was issued.
        end_s: When its completion was seen; None when that was not observed.
    """

    kind: IssuedKind
    action: str
    ranks: tuple[int, ...]
    num_bytes: int
    start_s: float
    end_s: float | None = None


class RankMeasurement(Spec):
    """One rank.

    Attributes:
        rank: Global rank.
        peak_memory: Over the whole run.
        actions: Of the representative step (the one whose step time is the median), in issue order.
        collectives: Of the same step, in issue order.
        reruns: Forward that ran again inside of the actions, one span for each block or attention core; None where
            that was not timed: in compiled blocks, where it is a part of their backward.
        step_times_s: This rank's own time of each steady step.
    """

    rank: int
    peak_memory: PeakMemory
    actions: tuple[MeasuredSpan, ...]
    collectives: tuple[MeasuredCollective, ...]
    reruns: tuple[MeasuredSpan, ...] | None = None
    step_times_s: tuple[float, ...] = ()


class SlowRank(Spec):
    """A rank that computes for longer than others with the same to do.

    Attributes:
        rank: Which.
        factor: How many times as long.
        compared_with: The others.
        compute_s: Seconds of a step in which it computes, median over the steady steps; waits are left out.
        others_compute_s: The same of the others.
    """

    rank: int
    factor: float
    compared_with: tuple[int, ...]
    compute_s: float
    others_compute_s: float


class EarlierPart(Spec):
    """What a run did on other nodes, until some went or came.

    Attributes:
        num_nodes: Nodes it ran on.
        plan: On their ranks.
        first_step: Steps that were done when it began.
        end_step: Steps that were done in the checkpoint that the next part began with; what it did beyond is done
            again there.
        losses: Mean loss of every step between the two.
        ended: Why it ended.
    """

    num_nodes: Count
    plan: ParallelPlan
    first_step: int
    end_step: int
    losses: tuple[float, ...] = ()
    ended: str


class Measurement(Spec):
    """A measured run; of one whose nodes went or came, its last part.

    Step times, losses and ranks are those of one plan, which is that of ``job``. ``earlier`` tells of the others.

    Attributes:
        job: What was run.
        complete: False when the run ended early; ``failure`` says why and the steps before it are kept.
        step_times_s: Steady steps: last rank's end minus first rank's start.
        warmup_step_times_s: The steps before, not counted.
        reference_s: What the executor's reference product took between the steady steps: how fast the machine was.
        losses: Mean loss of every step, warm-up included.
        ranks: One entry per rank.
        first_step: Steps that the checkpoint had done with which the run began, or its last part; 0 for a run from the
            beginning.
        earlier: Parts on other nodes, in order; empty unless nodes went or came.
        checkpoints: What each took, as rank 0 has it, of all parts; a step that was done again may come again.
        slow_ranks: Ranks that are slower than their like, beyond the spread of their steps.
        notes: What a reader should know besides, one sentence each.
        environment: Machine, versions, threads, backend.
    """

    schema_version: Literal[1] = 1
    job: RunSpec
    complete: bool = True
    failure: str | None = None
    step_times_s: tuple[float, ...]
    warmup_step_times_s: tuple[float, ...] = ()
    reference_s: float | None = None
    losses: tuple[float, ...] = ()
    ranks: tuple[RankMeasurement, ...] = ()
    first_step: int = 0
    earlier: tuple[EarlierPart, ...] = ()
    checkpoints: tuple[CheckpointTiming, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    notes: tuple[str, ...] = ()
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)

    @property
    def step_time_s(self) -> float:
        """Median of the steady steps."""
        return statistics.median(self.step_times_s)

    @property
    def spread(self) -> float:
        """Half the distance of the 10th and 90th percentile, relative to the median."""
        ordered = sorted(self.step_times_s)
        low = ordered[int(0.1 * (len(ordered) - 1))]
        high = ordered[-1 - int(0.1 * (len(ordered) - 1))]
        return (high - low) / 2 / self.step_time_s
