"""Measurements of a job and rehearsals of one rank. The executor writes them, ``compare`` reads them."""

from __future__ import annotations

import statistics
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from simplan.base import MAX_DEVICES, Count, Natural, Positive, Spec
from simplan.errors import ProgramError
from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, ActionKind
from simplan.program.program import MemoryCategory
from simplan.program.timeline import SpanKind
from simplan.runs.checkpoint import CheckpointTiming
from simplan.runs.faults import RunTimes
from simplan.runs.run_spec import RunSpec
from simplan.units import format_time

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


def _action(text: str) -> str:
    """Checks the text form of an action.

    Raises:
        ValueError: It is none.
    """
    try:
        Action.parse(text)
    except ProgramError as error:
        raise ValueError(str(error)) from None
    return text


_Action = Annotated[str, AfterValidator(_action)]
_Rank = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
_Seconds = Annotated[float, Field(ge=-1e9, le=1e9)]
"""A time on the common clock of the ranks; clocks that are aligned may put a start just before 0."""
_TRANSFERS = (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B, ActionKind.OPTIM)
_MAX_NAMED = 4  # peers of a slow rank


class PeakMemory(Spec):
    """Peak memory by three counters, in bytes; None where the device or the run has no value.

    Attributes:
        allocated_bytes: Bytes of tensors (CUDA allocator statistics; on the CPU, the profiler's allocation trace).
        reserved_bytes: Bytes of the caching allocator; None on the CPU, which has none.
        device_bytes: Bytes on the device as reported by the driver; on the CPU, the peak resident set of the process.
    """

    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    device_bytes: Count | None = None


class MeasuredSpan(Spec):
    """A measured action, or a part of one, without waits for communication.

    Attributes:
        action: Text form, e.g. ``0F1``; OPTIM and REDUCE_GRAD included.
        kind: Category of its time in the breakdown of the step.
        start_s: Start, in seconds from the common start of the step (clocks aligned over ranks).
        end_s: End on the same clock, in seconds.
    """

    action: _Action
    kind: SpanKind
    start_s: _Seconds
    end_s: _Seconds


class MeasuredCollective(Spec):
    """A collective, P2P transfer or host copy, in issue order.

    Attributes:
        kind: A kind of collective, ``send`` or ``recv``, or a copy between the device and its host.
        action: Action during which it was issued (``0SEND_F1``; for a DDP bucket the backward that it overlaps).
        ranks: Global ranks of the group (root first for a broadcast), or (source, destination); for a copy, the rank.
        num_bytes: Size in bytes as in ``simplan.model.layer.CollectiveKind``.
        start_s: Time of issue, in seconds.
        end_s: Time at which its completion was observed, in seconds; None if it was not observed.
    """

    kind: IssuedKind
    action: _Action
    ranks: tuple[_Rank, ...]
    num_bytes: Natural
    start_s: _Seconds
    end_s: _Seconds | None = None

    @model_validator(mode="after")
    def _transfer_belongs_to_its_action(self) -> Self:
        if self.kind in ("send", "recv") and Action.parse(self.action).kind not in _TRANSFERS:
            raise ValueError(f"a {self.kind} belongs to an action SEND, RECV or OPTIM, and {self.action} is none")
        return self


class RankMeasurement(Spec):
    """Measurement of one rank.

    Attributes:
        peak_memory: Peak over the whole run.
        actions: Actions of the representative step (the step with the median step time), in issue order.
        collectives: Communication of the same step, in issue order.
        reruns: Recomputation inside the actions, one span per block or attention core. None if it was not timed: in
            compiled blocks it is a part of their backward.
        step_times_s: The rank's own time of each steady step, in seconds.
        node: Host name and address of the rank's node; empty for a run on one node.
        is_dropped: True if the representative step dropped the gradients of this rank: its actions end with the step,
            and it has no collectives.
    """

    rank: _Rank
    peak_memory: PeakMemory
    actions: tuple[MeasuredSpan, ...]
    collectives: tuple[MeasuredCollective, ...]
    reruns: tuple[MeasuredSpan, ...] | None = None
    step_times_s: tuple[Positive, ...] = ()
    node: str = ""
    is_dropped: bool = False


class ReplicaArrivals(Spec):
    """Arrivals of replicas in a step with backup workers.

    Attributes:
        step: Index in the run, warm-up steps included.
        kept: Ranks whose gradients the step used, in order of their arrival.
        arrived_s: Per rank, seconds from the beginning of the step to its complete gradients; of a rank whose gradients
            were dropped, to the end of its passes.
    """

    step: Natural
    kept: Annotated[tuple[_Rank, ...], Field(min_length=1)]
    arrived_s: tuple[_Seconds, ...]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Ranks whose gradients the step dropped, ascending."""
        return tuple(rank for rank in range(len(self.arrived_s)) if rank not in self.kept)


class LossPoint(Spec):
    """Loss of one step, and the cost of the training up to there.

    Attributes:
        num_samples: Samples of all ranks since the beginning of the training, those of the step included.
        seconds: Sum of the step times since the ranks started, that of the step included.
        loss: Mean cross-entropy over the step's targets on all ranks, in nats, before its update. No sample occurs
            twice, so it is the loss on samples that the model has not seen.
    """

    num_samples: Count
    seconds: Positive
    loss: float


class MeasuredUpdate(Spec):
    """Update of common parameters by one gradient of a worker that does not wait for all others.

    Attributes:
        staleness: Updates of other workers since this one pulled the parameters of the gradient.
        queued_s: Seconds for which it waited for its turn.
        held_s: Seconds for which the worker then waited for slower ones (SSP).
        steps_ahead: Steps by which the worker is ahead of the slowest when it goes on.
    """

    staleness: Natural
    queued_s: _Seconds
    held_s: _Seconds
    steps_ahead: Natural


class MeasuredWorkers(Spec):
    """Updates of workers that do not wait for all others, in the steady steps until the first worker is done.

    Attributes:
        num_updates: Updates, over all servers.
        staleness_mean, staleness_p90: Mean and 90 % quantile of their staleness.
        staleness_counts: Number of updates by staleness.
        queued_s, held_s: Means; see ``MeasuredUpdate``.
        most_ahead: Largest number of steps by which a worker was ahead of the slowest, in all steps.
        pushed_bytes: Bytes that a worker sent per step; 0 on shared memory.
    """

    num_updates: Count
    staleness_mean: Annotated[float, Field(ge=0)]
    staleness_p90: Natural
    staleness_counts: dict[int, Natural]
    queued_s: _Seconds
    held_s: _Seconds
    most_ahead: Natural
    pushed_bytes: Natural


class MeasuredRound(Spec):
    """A round of replicas that may leave and join (``Replication.min_replicas``).

    Attributes:
        end_step: Steps of the run that are done after it.
        replicas: Replicas whose parameters were averaged after it, ascending.
        seconds: Time of its steps, waits for other replicas included: the mean over those replicas.
    """

    end_step: Count
    replicas: Annotated[tuple[_Rank, ...], Field(min_length=1)]
    seconds: Positive


class SlowRank(Spec):
    """A rank whose compute takes longer than on its peers with equal work.

    Attributes:
        factor: Compute time over that of its peers.
        compared_with: Ranks of its peers.
        compute_s: Seconds of compute per step, without waits, median over the steady steps.
        others_compute_s: Seconds of compute per step on its peers, without waits.
    """

    rank: _Rank
    factor: Positive
    compared_with: Annotated[tuple[_Rank, ...], Field(min_length=1)]
    compute_s: _Seconds
    others_compute_s: _Seconds

    @property
    def sentence(self) -> str:
        """Sentence for the user: the rank, its factor, and its peers."""
        others = [f"rank {rank}" for rank in self.compared_with]
        among = others[0] if len(others) == 1 else f"{', '.join(others[:-1])} and {others[-1]}"
        if len(others) > _MAX_NAMED:
            among = f"{len(others)} others"
        same = "which has" if len(others) == 1 else "which have"
        return (
            f"rank {self.rank} needs {self.factor:.1f} times the compute time of {among}, {same} the same work: "
            f"{format_time(self.compute_s)} per step compared with {format_time(self.others_compute_s)}"
        )


class EarlierSegment(Spec):
    """A part of a run on another set of nodes, before nodes left or joined.

    Attributes:
        plan: Plan on the ranks of these nodes.
        first_step: Steps completed when the part began.
        end_step: Steps completed in the checkpoint from which the next part began; later steps of this part are
            repeated there.
        losses: Mean loss of every step between the two.
    """

    num_nodes: Count
    plan: ParallelPlan
    first_step: Natural
    end_step: Natural
    losses: tuple[float, ...] = ()
    ended: str


class Measurement(Spec):
    """A measured run; if nodes left or joined, its last part.

    Step times, losses and ranks belong to one plan, the plan of ``job``. ``earlier`` has the other parts.

    Attributes:
        complete: False if the run ended early; ``failure`` has the reason, and earlier steps are kept.
        step_times_s: Steady steps, in seconds: last rank's end minus first rank's start. With backup workers, of the
            ranks whose gradients the step used.
        warmup_step_times_s: Warm-up steps before them, in seconds; not counted.
        reference_s: Seconds of the executor's reference matmul between the steady steps, a measure of the machine's
            speed; None if it was not timed.
        losses: Mean loss of every step, warm-up included.
        loss_curve: The losses with samples and seconds; empty for ``training.data: random``, with nothing to learn.
        ranks: One entry per rank.
        first_step: Steps completed in the checkpoint from which the run, or its last part, began; 0 for a run from the
            beginning.
        earlier: Parts on other nodes, in order; empty unless nodes left or joined.
        checkpoints: Time of each checkpoint on rank 0, over all parts; a repeated step may occur twice.
        slow_ranks: Ranks that are slower than their peers, beyond the spread of their steps.
        arrivals: With backup workers, the arrivals in every step, warm-up included; else empty.
        notes: Further remarks for the reader, one sentence each.
        environment: Machine, versions, threads, backend.
        workers: Updates of workers that do not wait for all others; None for other runs. A step time is then that in
            which as many gradients are applied as there are workers.
        times: Time of a run with checkpoints over all parts, and where it went; None for other runs, and for one that
            ended before its first step or whose launcher was killed.
        rounds: Of replicas that may leave, every round; else empty. Steady steps are then those of undisturbed rounds
            with all replicas.
    """

    schema_version: Literal[2] = 2
    job: RunSpec
    complete: bool = True
    failure: str | None = None
    step_times_s: tuple[Positive, ...]
    warmup_step_times_s: tuple[Positive, ...] = ()
    reference_s: Positive | None = None
    losses: tuple[float, ...] = ()
    loss_curve: tuple[LossPoint, ...] = ()
    ranks: tuple[RankMeasurement, ...] = ()
    first_step: Natural = 0
    earlier: tuple[EarlierSegment, ...] = ()
    checkpoints: tuple[CheckpointTiming, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    arrivals: tuple[ReplicaArrivals, ...] = ()
    notes: tuple[str, ...] = ()
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
    workers: MeasuredWorkers | None = None
    times: RunTimes | None = None
    rounds: tuple[MeasuredRound, ...] = ()

    def undisturbed_rounds(self) -> dict[int, list[MeasuredRound]]:
        """By number of replicas, the rounds with the same replicas as the round before them.

        In other rounds a replica had left, which the others took time to notice, or joined.
        """
        rounds: dict[int, list[MeasuredRound]] = {}
        everyone = tuple(range(self.job.plan.dp_replicate))
        before = [everyone, *(earlier.replicas for earlier in self.rounds)]
        for replicas, measured in zip(before, self.rounds, strict=False):
            if replicas == measured.replicas and measured.end_step > self._num_warmup_steps:
                rounds.setdefault(len(replicas), []).append(measured)
        return rounds

    @property
    def _num_warmup_steps(self) -> int:
        """First steps that are not counted, detected or requested."""
        return self.job.num_all_steps - self.job.num_steps

    @property
    def step_time_s(self) -> float:
        """Median of the steady steps, in seconds; of replicas that train alone, of the mean steps of rounds."""
        return statistics.median(self._repeated_s)

    @property
    def spread(self) -> float:
        """Half the difference of the 90th and 10th percentile, relative to the median."""
        ordered = sorted(self._repeated_s)
        low = ordered[int(0.1 * (len(ordered) - 1))]
        high = ordered[-1 - int(0.1 * (len(ordered) - 1))]
        return (high - low) / 2 / self.step_time_s

    @property
    def _repeated_s(self) -> list[float]:
        """Times of what repeats: steps, or the mean steps of rounds, which have steps of two kinds."""
        times_s, length = self.step_times_s, self.job.round_steps
        return [statistics.fmean(times_s[first : first + length]) for first in range(0, len(times_s), length)]


class ActionTime(Spec):
    """Device time of one action.

    Attributes:
        action: Text form, e.g. ``0F1``.
        seconds: Seconds in each measured step, without the time of the fake process group that replaces communication.
    """

    action: str
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median seconds over the steps."""
        return statistics.median(self.seconds)


class Rehearsal(Spec):
    """Record of a rehearsal: one rank of a job, run alone.

    Attributes:
        fake: True for tensors without data: memory and collectives are recorded, but no times.
        peak_memory: Peak over the steps, as reported by the device if it reports memory.
        peak_by_category: Bytes by category at the rank's peak, from tracking every tensor.
        peak_action: Action during which the peak occurred.
        actions: Times in the order of the rank's row; empty for a fake rehearsal.
        collectives: Communication that the rank issued in the last step, in order; none of it was executed.
        environment: Machine, versions, device.
    """

    schema_version: Literal[2] = 2
    job: RunSpec
    rank: Natural
    fake: bool
    peak_memory: PeakMemory
    peak_by_category: dict[MemoryCategory, Natural]
    peak_action: str
    actions: tuple[ActionTime, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
