"""Truncated simulation: a few microbatches are simulated, and longer steps are extrapolated.

The rows of an action table are periodic: between fill and drain, each further microbatch adds the same actions to every
rank. In an interleaved schedule, the period is a round with one microbatch per pipeline rank. Two steps are simulated
that differ by one period.

The step time is a longest path. With every further period it grows by the largest mean cycle weight of the pipeline,
once the path follows that cycle. Two cycles are considered. One is the cycle of the simulated steps, which is their
difference. The other is the compute stream of each rank, which is busy for the compute time of a period. A path that
stays on one rank for all further periods is a lower bound of the step, so the larger of both is used. Without a
pipeline, each microbatch adds as much as the last.

Memory of a rank grows by the same bytes with every period, where it grows at all: activations of GPipe, and sent
tensors that are not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simplan.cost.calibration.format import Calibration
from simplan.cost.model import CostModel
from simplan.cost.program_costs import ProgramCosts
from simplan.job import Job
from simplan.plan.plan import StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.build import assign_layers, balances_unequal_stages, cost_model, expands_for_links, table_of
from simplan.predict.memory import RankPeaks, device_memory, rank_memory, rank_peaks
from simplan.predict.simulated import InnerSteps, Simulated, StepContext, simulate_program
from simplan.prediction import RankMemory
from simplan.program.action import ActionKind, Table
from simplan.program.folding import Folding
from simplan.program.lowering.lower import Lowerer, Lowering
from simplan.program.program import Program, Stream
from simplan.program.timeline import COMPUTING, Split, Times, split_of_times
from simplan.sim.compiled import CompiledProgram, compile_program

if TYPE_CHECKING:
    from simplan.network.background import BackgroundStep
    from simplan.network.load import Network
    from simplan.predict.asynchronous import AsynchronousStep
    from simplan.sim.links import Progress

_Floats = NDArray[np.float64]
_Growing = TypeVar("_Growing", int, float, _Floats)
_MAX_PASSES = 30_000
"""Maximum simulated in full by ``predict``: microbatches x pipeline ranks, or x layers if layers have collectives."""
_MAX_PASSES_OF_RANKS = 60_000
"""Maximum of the same, summed over ranks of a stage that are not folded."""
_FEWEST = 12
"""Minimum number of simulated microbatches of a pipeline, needed to find the longest path of short pipelines."""
_MAX_REBALANCES = 16
"""Attempts to find numbers of blocks with which stages on unequal devices fit their memory."""
_Vectors = Callable[[Program, ProgramCosts], list[_Floats]]


class Extent(NamedTuple):
    """Simulated extent of a step.

    Attributes:
        simulated: Microbatches of the longer simulated step.
        period: Difference in microbatches to the shorter simulated step; 0 if the full step is simulated.
        whole: Microbatches of the full step.
    """

    simulated: int
    period: int
    whole: int

    @property
    def num_periods(self) -> int:
        """Number of extrapolated periods."""
        return (self.whole - self.simulated) // self.period if self.period else 0


def extent_of(job: Job) -> Extent:
    """Extent of a step that has to be simulated.

    A pipeline of p ranks fills within p microbatches, drains within the last p, and needs two more in between. An
    interleaved one needs three rounds, since the first may differ. Custom schedules and schedules that depend on stage
    times change with the number of microbatches, so they are simulated in full. So are steps with jitter, flapping
    links or background jobs, in which no microbatch is like another, and steps beside an outer step.
    """
    plan, cluster, whole = job.plan, job.cluster, job.num_microbatches
    flaps = any(slow.period_s is not None for slow in cluster.slow_links)
    overlaps_steps = (
        plan.replication is not None and plan.replication.steps_beside
    )  # communication that may outlast fewer
    if cluster.jitter is not None or flaps or cluster.background_jobs or overlaps_steps:
        return Extent(whole, 0, whole)
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if plan.pp == 1:
        simulated, period = 3, 1
    elif facts is None or facts.needs_times or plan.offload_activations:
        simulated, period = whole, 1
    elif plan.schedule == "interleaved_1f1b":
        simulated, period = max(3, -(-_FEWEST // plan.pp)) * plan.pp + whole % plan.pp, plan.pp
    else:
        simulated, period = max(_FEWEST, (4 if facts.placement == "v" else 2) * plan.pp + 2), 1
    return Extent(simulated, period, whole) if simulated + period < whole else Extent(whole, 0, whole)


def predicted_extent(job: Job, folding: Folding) -> Extent:
    """Extent of a step that ``predict`` simulates: the full step, or ``extent_of`` if that is too long."""
    plan, whole = job.plan, job.num_microbatches
    is_layer_by_layer = plan.is_layer_by_layer or expands_for_links(job)
    passes = whole * (job.model.num_blocks + 2 if is_layer_by_layer else plan.pp)
    fits = passes <= _MAX_PASSES and passes * len(folding.ranks) <= _MAX_PASSES_OF_RANKS * plan.pp
    if job.cluster.cores_per_node is not None or fits:
        return Extent(whole, 0, whole)
    return extent_of(job)


@dataclass(frozen=True, eq=False)
class TruncatedStep:
    """One optimizer step of a job, in full or truncated.

    Attributes:
        job: Job that violates no rule.
        calibration: Timings of the device; None if not calibrated.
        level: Level of the Program: 1 for actions, 2 for kernels.
        folding: Folding of ranks; None for all ranks.
        expand_all: See ``Lowering``.
        background, progress: See ``StepContext``.
        is_inner: True for a step without the outer step of replicas that train alone.

    Replicas that train alone (``Replication.has_rounds``) have steps of two kinds: those with an outer step, or beside
    one, which are the Program here, and ``inner`` ones. All quantities are then means over the steps of a round.
    """

    job: Job
    extent: Extent
    calibration: Calibration | None = None
    level: int = 2
    folding: Folding | None = None
    expand_all: bool = False
    background: Sequence[BackgroundStep] = ()
    progress: Progress | None = None
    is_inner: bool = False

    @cached_property
    def inner(self) -> TruncatedStep | None:
        """A step without an outer step; None if there is none, or if replicas meet in every step."""
        if not self._has_outer_step or not self._num_inner:
            return None
        step = replace(self, is_inner=True)
        vars(step).update(cost=self.cost, assignment=self.assignment, tables=self.tables, _balanced=None)
        return step

    @cached_property
    def asynchronous(self) -> AsynchronousStep | None:
        """Steps of workers that do not wait for all others; None for other replicas."""
        replication = self.job.plan.replication
        if replication is None or not replication.has_workers:
            return None
        from simplan.predict.asynchronous import AsynchronousStep  # only where needed

        return AsynchronousStep(self.job, self.cost, self.simulated, self.extent.num_periods)

    @property
    def _has_outer_step(self) -> bool:
        replication = self.job.plan.replication
        return replication is not None and replication.has_rounds and not self.is_inner

    @property
    def _num_inner(self) -> int:
        """Steps of a round that are ``inner`` ones."""
        replication = self.job.plan.replication
        assert replication is not None
        return replication.inner_steps - replication.outer_steps * max(1, replication.steps_beside)

    def _mean(self, of_outer: _Growing, of_inner: _Growing) -> _Growing:
        """Mean over the steps of a round, from values of the Program with an outer step and of an inner step."""
        replication = self.job.plan.replication
        assert replication is not None
        total = replication.outer_steps * of_outer + self._num_inner * of_inner
        return total / replication.inner_steps  # type: ignore[return-value]

    @property
    def full(self) -> Simulated:
        """The simulated step with the shorter one, and with the other steps of its round."""
        longer, *shorter = self.simulated
        if shorter:
            longer = replace(longer, shorter=shorter[0], num_periods=self.extent.num_periods)
        if not self._has_outer_step:
            return longer
        replication = self.job.plan.replication
        assert replication is not None
        num_rounds = replication.outer_steps
        inner = None if self.inner is None else self.inner.full
        return replace(
            longer, inner=InnerSteps(inner, self._num_inner / num_rounds, replication.inner_steps / num_rounds)
        )

    @cached_property
    def cost(self) -> CostModel:
        """Cost model of the job."""
        return cost_model(self.job, self.calibration)

    @cached_property
    def assignment(self) -> StageAssignment:
        """Layers of each stage; those of unequal devices are balanced within their memory, where that is possible."""
        return assign_layers(self.job, self.cost) if self._balanced is None else self._balanced.assignment

    @cached_property
    def _balanced(self) -> TruncatedStep | None:
        """The step with layers balanced over unequal devices within their memory; None for other steps."""
        if not balances_unequal_stages(self.job):
            return None
        num_blocks, num_last = self.job.model.num_blocks, self.job.model.num_last_layers
        step = self._with(assign_layers(self.job, self.cost))
        most = [num_blocks] * step.assignment.num_stages
        for _ in range(_MAX_REBALANCES):
            over, blocks = step._over_memory(), step.assignment.stage_layers(num_last)
            most = [
                min(limit, max(1, number - max(1, math.ceil(number * over[stage])))) if stage in over else limit
                for stage, (limit, number) in enumerate(zip(most, blocks, strict=True))
            ]
            if not over or sum(most) < num_blocks:
                break
            assignment = assign_layers(self.job, self.cost, most)
            if assignment == step.assignment:  # as all further attempts
                break
            step = self._with(assignment)
        return step

    def _with(self, assignment: StageAssignment) -> TruncatedStep:
        step = replace(self)
        vars(step).update(cost=self.cost, assignment=assignment, _balanced=None)
        return step

    def _over_memory(self) -> dict[int, float]:
        """By stage of a rank that does not fit its device, the fraction of its tensors for which there is no memory."""
        width = self.job.plan.num_devices // self.job.plan.pp
        over: dict[int, float] = {}
        for rank, peaks in self.peaks().items():
            memory = device_memory(peaks, self.job, self.calibration, rank=rank)
            if memory.capacity_bytes is not None and memory.needed_bytes > memory.capacity_bytes:
                least_bytes = memory.measurable_bytes("device")
                lacking = (least_bytes - memory.capacity_bytes) / least_bytes
                for stage in {action.stage for action in self.tables[0][rank // width]}:
                    over[stage] = max(over.get(stage, 0.0), lacking)
        return over

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Action tables of the longer simulated step and, if truncated, of the shorter one."""
        if self._balanced is not None:
            return self._balanced.tables
        job, extent = self.job, self.extent
        sizes = (extent.simulated, extent.simulated - extent.period) if extent.period else (extent.simulated,)
        return tuple(table_of(job, self.assignment, self.cost, size) for size in sizes)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Programs of the action tables."""
        if self._balanced is not None:
            return self._balanced.programs
        job = self.job
        expand_all = self.expand_all or expands_for_links(job)
        how = Lowering(self.level, self.folding, expand_all, host_waits=job.cluster.device.kind == "cpu")
        lowerer = Lowerer(job, self.assignment, self.tables[0], how)
        lowered = lowerer.round_of if self._has_outer_step else lowerer.program
        return tuple(lowered(table) for table in self.tables)

    @cached_property
    def simulated(self) -> tuple[Simulated, ...]:
        """Programs with cost estimates and simulated times."""
        context = StepContext.of(self.job, self.background, self.progress)
        return tuple(simulate_program(program, self.cost, context) for program in self.programs)

    def _extrapolated(self, longer: _Growing, shorter: _Growing) -> _Growing:
        """Value of the full step from values of both simulated steps; it grows by the same amount with every period."""
        return longer + self.extent.num_periods * (longer - shorter)

    def seconds(self, others: _Vectors = lambda *_: [], *, steps_overlap: bool = False) -> _Floats:
        """Step times in seconds, ``(1 + num_others,)``: with estimated durations, then with other durations.

        Args:
            others: Makes further vectors of durations, the same number for each Program.
            steps_overlap: True if no rank waits for others at the end of a step: the step time is then the time of the
                busiest rank. False: the step lasts from the first start to the last end.
        """
        if self.asynchronous is not None:
            return self.asynchronous.seconds(others)
        step_s = self._seconds(others, steps_overlap=steps_overlap)
        if not self._has_outer_step:
            return step_s
        nothing = np.zeros_like(step_s)
        return self._mean(step_s, nothing if self.inner is None else self.inner.seconds(others))

    def own_seconds(self) -> float:
        """Seconds of the Program with an outer step, which is one step or the steps beside it."""
        return float(self._seconds(lambda *_: [], steps_overlap=False)[0])

    def _seconds(self, others: _Vectors, *, steps_overlap: bool) -> _Floats:
        """Seconds of the Program; see ``seconds``."""
        vectors = [
            np.array([simulated.program_costs.durations_s, *others(simulated.program, simulated.program_costs)])
            for simulated in self.simulated
        ]
        longer, *shorter = (
            _step_times_s(simulated, vector, steps_overlap=steps_overlap)
            for simulated, vector in zip(self.simulated, vectors, strict=True)
        )
        if not shorter:
            return longer
        step_s = self._extrapolated(longer, shorter[0])
        if self.job.plan.pp > 1:
            through_ranks_s = self._extrapolated(*map(_through_ranks_s, self.simulated, vectors))
            step_s = np.maximum(step_s, through_ranks_s.max(axis=0))
        return np.asarray(step_s)

    def peaks(self) -> dict[int, RankPeaks]:
        """Tensor bytes of every simulated rank."""
        program, *shorter = self.programs
        peaks = {rank: rank_peaks(program, rank) for rank in program.ranks}
        for rank, more in peaks.items() if shorter else ():
            less = rank_peaks(shorter[0], rank)
            passes, update = map(self._extrapolated, more[2:4], less[2:4])
            peaks[rank] = more._replace(passes=passes, update=update)
        return peaks

    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of every rank of the job."""
        job, program = self.job, self.programs[0]
        memory = rank_memory(program, job, self.calibration)
        if len(self.programs) > 1:
            shorter, peaks = rank_memory(self.programs[1], job, self.calibration), self.peaks()
            for rank, more in memory.items():
                memory[rank] = self._grown(more, shorter[rank], peaks[rank])
        ranks = [replace(memory[other], rank=rank) for rank, other in enumerate(program.stands_for)]
        if self.asynchronous is not None:
            host_bytes = self.asynchronous.with_servers([of_rank.host_bytes for of_rank in ranks])
            ranks = [replace(of_rank, host_bytes=size) for of_rank, size in zip(ranks, host_bytes, strict=True)]
        return tuple(ranks)

    def _grown(self, more: RankMemory, less: RankMemory, peaks: RankPeaks) -> RankMemory:
        """Memory of a rank in the full step, from both simulated steps and the peaks of the full step."""
        grown = self._extrapolated
        return replace(
            device_memory(peaks, self.job, self.calibration, rank=more.rank),
            rank=more.rank,
            by_category={key: grown(size, less.by_category[key]) for key, size in more.by_category.items()},
            peak_action=more.peak_action,
            activations_in_flight={
                stage: grown(number, less.activations_in_flight[stage])
                for stage, number in more.activations_in_flight.items()
            },
            host_bytes=grown(more.host_bytes, less.host_bytes),
        )

    def splits(self, step_time_s: float) -> dict[int, Split]:
        """Time split of every simulated rank, of a full step that takes ``step_time_s`` seconds."""
        longer, *shorter = (_splits_of_ranks(step.program, step.times) for step in self.simulated)
        if not shorter and not self._has_outer_step and self.asynchronous is None:
            return longer
        inner = None if not self._has_outer_step or self.inner is None else self.inner.splits(step_time_s)
        splits = {}
        for rank, split in longer.items():
            parts = {name: seconds for name, seconds in asdict(split).items() if name != "wait_s"}
            if shorter:
                parts = {
                    name: self._extrapolated(seconds, getattr(shorter[0][rank], name))
                    for name, seconds in parts.items()
                }
            if self._has_outer_step:
                parts = {
                    name: self._mean(seconds, 0.0 if inner is None else getattr(inner[rank], name))
                    for name, seconds in parts.items()
                }
            # workers compute beside each other all the time here, and wait for each other's updates in fact
            fits = min(1.0, step_time_s / sum(parts.values())) if self.asynchronous is not None else 1.0
            parts = {name: fits * seconds for name, seconds in parts.items()}
            splits[rank] = Split(**parts, wait_s=max(0.0, step_time_s - sum(parts.values())))
        return splits

    def network(
        self, step_time_s: float, uncontended_s: float, without_background_s: float | None = None
    ) -> Network | None:
        """Load of the links in the full step; None for a cluster without a topology.

        Args:
            step_time_s: Seconds of the full step.
            uncontended_s: Seconds of the full step if communications took as long as alone.
            without_background_s: Seconds of the full step if no other job used the links; None without other jobs.
        """
        steps = [(step.contention, step.times.step_time_s) for step in self.simulated if step.contention is not None]
        if not steps:
            return None
        from simplan.predict.contention import network_of

        num_own = len(steps)
        inner = self.inner if self._has_outer_step else None
        for simulated in () if inner is None else inner.simulated:
            assert simulated.contention is not None
            steps.append((simulated.contention, simulated.times.step_time_s))

        def full(longer: _Floats, *shorter: _Floats) -> _Floats:
            return self._extrapolated(longer, shorter[0]) if shorter else longer

        def extrapolated(*sums: _Floats) -> _Floats:
            of_steps = full(*sums[:num_own])
            if not self._has_outer_step:
                return of_steps
            return self._mean(of_steps, full(*sums[num_own:]) if inner is not None else np.zeros_like(of_steps))

        return network_of(steps, extrapolated, step_time_s, uncontended_s, without_background_s)

    def idle_fraction(self) -> float:
        """Bubble fraction: idle fraction between the first and the last compute of any rank, mean over ranks.

        The optimizer step is excluded, as in the closed forms.
        """
        busy_s, total_s = self._busy_and_total_s()
        return max(0.0, 1.0 - busy_s / len(self.programs[0].stands_for) / total_s)  # not -1e-16 by rounding

    def _busy_and_total_s(self) -> tuple[float, float]:
        """See the function of this name; of the full step, in the mean of a round."""
        longer, *shorter = (_busy_and_total_s(step.program, step.times) for step in self.simulated)
        busy_s, total_s = map(self._extrapolated, longer, shorter[0]) if shorter else longer
        if not self._has_outer_step:
            return busy_s, total_s
        inner_busy_s, inner_total_s = (0.0, 0.0) if self.inner is None else self.inner._busy_and_total_s()
        return self._mean(busy_s, inner_busy_s), self._mean(total_s, inner_total_s)


def _splits_of_ranks(program: Program, times: Times) -> dict[int, Split]:
    on_compute, ran = program.on_stream(Stream.COMPUTE), times.end_s > times.start_s
    splits = {}
    for rank, indices in program.rank_indices.items():
        ops = indices[ran[indices]]
        splits[rank] = split_of_times(
            program.columns.kind[ops], on_compute[ops], times.start_s[ops], times.end_s[ops], times.step_time_s
        )
    return splits


def _busy_and_total_s(program: Program, times: Times) -> tuple[float, float]:
    """Compute seconds summed over all ranks of the job, and seconds from the first to the last compute of any rank."""
    computes = program.on_stream(Stream.COMPUTE) & program.of_kind(*COMPUTING) & (times.end_s > times.start_s)
    start_s, end_s = times.start_s[computes], times.end_s[computes]
    represented = program.num_represented[program.columns.rank[computes]]
    return float(((end_s - start_s) * represented).sum()), float(end_s.max() - start_s.min())


def _step_times_s(step: Simulated, vectors_s: _Floats, *, steps_overlap: bool) -> _Floats:
    """``(num_vectors,)`` Step times of a simulated step."""
    if not steps_overlap:
        return np.array([step.times.step_time_s, *step.engine.step_times_s(vectors_s[1:])])
    start_s, end_s = compile_program(step.program).spans(vectors_s)
    computing = step.program.on_stream(Stream.COMPUTE) & (vectors_s[0] > 0)
    busy = [indices[computing[indices]] for indices in step.program.rank_indices.values()]
    longest_s = [end_s[:, ops].max(axis=1) - start_s[:, ops].min(axis=1) for ops in busy if len(ops)]
    return np.asarray(np.max(longest_s, axis=0))


def _through_ranks_s(step: Simulated, vectors_s: _Floats) -> _Floats:
    """``(num_ranks, num_vectors)`` The longest path of the step through the last forward of each rank."""
    compiled = step.engine if isinstance(step.engine, CompiledProgram) else compile_program(step.program)
    operations = [_last_forward(step.program, rank) for rank in step.program.ranks]
    starts_s, _ = compiled.spans(vectors_s)
    tails_s = np.array([compiled.tails_s(vector_s) for vector_s in vectors_s])
    return np.asarray((starts_s + tails_s)[:, operations].T)


def _last_forward(program: Program, rank: int) -> int:
    """Index of the first compute operation of the last forward of a rank."""
    indices = program.rank_indices[rank]
    forward = program.of_action(ActionKind.FORWARD, indices=indices) & program.on_stream(
        Stream.COMPUTE, indices=indices
    )
    c = program.columns
    last = indices[np.flatnonzero(forward)[-1]]
    same = forward & (c.stage[indices] == c.stage[last]) & (c.microbatch[indices] == c.microbatch[last])
    return int(indices[np.flatnonzero(same)[0]])
