"""Simulated step: a Program with cost estimates, what affects them, and times of its operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.model import CostModel
from simplan.cost.program_costs import ProgramCosts, estimate_program
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.predict.build import is_static, sharing_of
from simplan.predict.overlap_slowdown import apply_overlap_slowdown
from simplan.predict.stragglers import apply_stragglers, drop_slowest
from simplan.prediction import JitteredStep
from simplan.program.program import HostCalls, HostCopy, HostWait, Program
from simplan.program.timeline import LazySequence, Span, SpanKind, Timeline, Times
from simplan.sim.compiled import Durations, compile_program
from simplan.sim.engine import CoreUse, simulate

if TYPE_CHECKING:
    from simplan.network.background import BackgroundStep
    from simplan.predict.contention import Contention
    from simplan.sim.links import Progress

_OF_HOST = (HostWait, HostCalls, HostCopy)
ErrorSource = Literal["compute", "host", "communication"]
_Key = TypeVar("_Key", bound=Hashable)
NINE_IN_TEN = 1.645  # standard deviations of a normal distribution that cover 90%


class Engine(Protocol):
    """An engine with one Program, ready to run."""

    def times(self, durations_s: Durations) -> Times:
        """Returns start and end of every operation."""
        ...

    def step_times_s(self, durations_s: Sequence[Durations] | NDArray[np.float64]) -> Sequence[float]:
        """Returns the end of the last operation for each vector of durations, in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class _SimPy:
    """The reference engine."""

    program: Program
    sharing: CoreUse

    def times(self, durations_s: Durations) -> Times:
        return simulate(self.program, durations_s, self.sharing)

    def step_times_s(self, durations_s: Sequence[Durations] | NDArray[np.float64]) -> Sequence[float]:
        return [self.times(vector_s).step_time_s for vector_s in durations_s]


def engine_of(program: Program, sharing: CoreUse | None) -> Engine:
    """Returns SimPy for ranks that share cores, and the compiled engine for static Programs.

    Where both engines apply, their times are equal to the last bit.

    Args:
        sharing: Cores that operations share; None for no sharing.
    """
    return compile_program(program) if sharing is None else _SimPy(program, sharing)


class Effect(StrEnum):
    """Changes of the durations of a step once its costs are estimated, in the order in which they apply."""

    STRAGGLERS = "stragglers"
    DROPPED_GRADIENTS = "dropped gradients"
    OVERLAP_SLOWDOWN = "overlap slowdown"
    LINKS = "links"
    JITTER = "jitter"


EFFECTS = frozenset(Effect)


@dataclass(frozen=True, eq=False)
class StepContext:
    """Facts on which the effects on a step depend, besides its Program.

    Attributes:
        cluster, plan: Cluster and plan of the Program.
        server_shares: See ``Job.server_shares``.
        backup_workers: See ``TrainingSpec``; needs a Program of all ranks.
        background: Steps of background jobs on the same links.
        progress: Called with the number of ended and of all communications on shared links; None for no calls.
    """

    cluster: ClusterSpec
    plan: ParallelPlan
    server_shares: tuple[float, ...] = ()
    backup_workers: int = 0
    background: Sequence[BackgroundStep] = ()
    progress: Progress | None = None

    @classmethod
    def of(cls, job: Job, background: Sequence[BackgroundStep] = (), progress: Progress | None = None) -> StepContext:
        """Context of a step of a job."""
        return cls(job.cluster, job.plan, job.server_shares, job.training.backup_workers, background, progress)


@dataclass(frozen=True, slots=True)
class AffectedCosts:
    """Cost estimates of a step with effects on them; attributes as in ``Simulated``."""

    alone: ProgramCosts
    program_costs: ProgramCosts
    contention: Contention | None = None
    jitter: JitteredStep | None = None
    factors: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class InnerSteps:
    """Steps of a round without the outer step that the others have.

    Attributes:
        step: One of them; None if there are none.
        num_steps: Their number for each outer step.
        round_steps: Steps of a round for each outer step.
    """

    step: Simulated | None
    num_steps: float
    round_steps: float

    def mean(self, of_outer: float, of_inner: float) -> float:
        """Mean over the steps of a round, from values of the Program with an outer step and of an inner step."""
        return (of_outer + self.num_steps * of_inner) / self.round_steps


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated step.

    Attributes:
        context: What its effects depend on.
        alone: Cost estimates without the overlap slowdown.
        program_costs: Cost estimates with the overlap slowdown, and with contention on links.
        engine: Simulator, to run the Program again with other durations.
        sharing: Shared cores of operations; None if ranks do not share cores.
        contention: Load of links; None for a cluster without a topology, and at Level 1.
        jitter: Times of steps with jitter; None for a cluster without jitter, and at Level 1.
        factors: ``(num_ops,)`` Factors of the durations in this step by jitter; None without.
        shorter: Of a truncated step, the shorter simulated one; None if all microbatches are simulated.
        num_periods: Differences of this step and the shorter one that the full step is longer than this one.
        inner: Of a step with an outer step of replicas that train alone, the other steps of its round.
    """

    program: Program
    context: StepContext
    alone: ProgramCosts
    program_costs: ProgramCosts
    times: Times
    engine: Engine
    sharing: CoreUse | None
    contention: Contention | None = None
    jitter: JitteredStep | None = None
    factors: NDArray[np.float64] | None = None
    shorter: Simulated | None = None
    num_periods: int = 0
    inner: InnerSteps | None = None

    def of_full_step(self, quantities: Callable[[Simulated], Mapping[_Key, float]]) -> dict[_Key, float]:
        """Returns quantities of the full step from those of the simulated ones, which grow equally in every period.

        In a round, they are the mean of its steps.
        """
        values = dict(quantities(self))
        if self.shorter is not None:
            fewer = quantities(self.shorter)
            values = {key: value + self.num_periods * (value - fewer.get(key, 0)) for key, value in values.items()}
        if self.inner is None:
            return values
        others = {} if self.inner.step is None else self.inner.step.of_full_step(quantities)
        keys = dict.fromkeys([*values, *others])
        return {key: self.inner.mean(values.get(key, 0), others.get(key, 0)) for key in keys}


def simulate_program(program: Program, cost: CostModel, context: StepContext) -> Simulated:
    """Estimate costs of a checked Program, and simulate it."""
    sharing = sharing_of(program, context.cluster, cost)
    engine = engine_of(program, sharing)
    replication, effects = context.plan.replication, EFFECTS
    if replication is not None and replication.has_workers:  # which meet on links at other times than in one step
        effects -= {Effect.LINKS, Effect.JITTER}
    affected = affected_costs(program, estimate_program(program, cost), context, engine, sharing, effects)
    return Simulated(
        program,
        context,
        affected.alone,
        affected.program_costs,
        engine.times(affected.program_costs.durations_s),
        engine,
        sharing,
        affected.contention,
        affected.jitter,
        affected.factors,
    )


def affected_costs(
    program: Program,
    estimated: ProgramCosts,
    context: StepContext,
    engine: Engine,
    sharing: CoreUse | None,
    effects: Collection[Effect] = EFFECTS,
) -> AffectedCosts:
    """Cost estimates with the effects that the context has, one after the other.

    Links and jitter take part at Level 2.

    Args:
        program, estimated: A Program, and its cost estimates.
        engine, sharing: See ``Simulated``.
        effects: Effects that take part.
    """
    cluster, plan, alone, replicas = context.cluster, context.plan, estimated, None
    if Effect.STRAGGLERS in effects and cluster.stragglers:
        alone = apply_stragglers(program, alone, cluster, plan)
    if Effect.DROPPED_GRADIENTS in effects and context.backup_workers:
        alone, replicas = drop_slowest(program, alone, plan, context.backup_workers, engine.times)
    program_costs = alone
    if Effect.OVERLAP_SLOWDOWN in effects:
        program_costs = apply_overlap_slowdown(program, alone, engine.times)
    contention = jitter = factors = None
    if Effect.LINKS in effects and program.level == 2 and not is_static(cluster):
        from simplan.predict.contention import apply_contention  # imports numba

        program_costs, contention = apply_contention(
            program,
            program_costs,
            cluster,
            plan,
            context.server_shares,
            sharing,
            context.background,
            context.progress,
        )
    if Effect.JITTER in effects and program.level == 2 and cluster.jitter is not None:
        from simplan.predict.jitter import apply_jitter  # imports numba

        program_costs, jitter, factors = apply_jitter(program, program_costs, cluster.jitter, replicas)
    return AffectedCosts(alone, program_costs, contention, jitter, factors)


def moved_durations_s(
    program: Program, program_costs: ProgramCosts, sources: Collection[ErrorSource] | None = None
) -> list[NDArray[np.float64]]:
    """Durations of all operations with one source of error shifted by one standard deviation.

    The sources are compute, communication and host. Errors within a source are fully correlated; the sources are
    independent.

    Args:
        program, program_costs: A Program, and its cost estimates.
        sources: Sources that are shifted; None for those that the Program has.

    Returns:
        One vector per source with longer durations, then one per source with shorter ones. Both shifts use the same
        factor, so durations stay positive. A transfer gets shorter only so far that the 90% interval, with a power of
        the factor, ends at the datasheet bandwidth.
    """
    durations_s, deviations_s = program_costs.durations_s, program_costs.deviations_s
    longer_s = durations_s + deviations_s
    shorter_s = np.divide(durations_s**2, longer_s, out=np.zeros_like(longer_s), where=longer_s > 0)
    least_s = np.minimum(program_costs.least_s, durations_s)
    shorter_s = np.maximum(shorter_s, durations_s ** (1 - 1 / NINE_IN_TEN) * least_s ** (1 / NINE_IN_TEN))
    ops_of_source = sources_of_error(program)
    names = error_sources(program) if sources is None else sources
    return [np.where(ops_of_source[name], moved_s, durations_s) for moved_s in (longer_s, shorter_s) for name in names]


def sources_of_error(program: Program) -> dict[ErrorSource, NDArray[np.bool_]]:
    """By source of error, ``(num_ops,)`` True for its operations; errors within a source are fully correlated."""
    communications = program.of_kind(SpanKind.COMMUNICATION)
    by_host = np.array([bool(work) and all(isinstance(part, _OF_HOST) for part in work) for work in program.works])
    host = by_host[program.columns.work] & ~communications
    return {"compute": ~communications & ~host, "host": host, "communication": communications}


def error_sources(program: Program) -> tuple[ErrorSource, ...]:
    """Sources of error that a Program has."""
    return tuple(name for name, ops in sources_of_error(program).items() if ops.any())


def interval_s(step_time_s: float, moved_s: Sequence[float]) -> tuple[float, float]:
    """90% interval of the step time.

    Hidden communication lengthens the step when it takes longer, and never shortens it. So each side has its own
    shifted step times. Errors are in logarithms.

    Args:
        step_time_s: Step time.
        moved_s: Step time with each vector of ``moved_durations_s``, in the same order.
    """
    sources = len(moved_s) // 2
    up, down = (
        NINE_IN_TEN * math.hypot(*(math.log(side_s / step_time_s) for side_s in side))
        for side in (moved_s[:sources], moved_s[sources:])
    )
    return step_time_s * math.exp(-down), step_time_s * math.exp(up)


def timeline(program: Program, times: Times) -> Timeline:
    """Returns the spans of a simulated step, created on access; operations that took no time are omitted."""
    ran = np.flatnonzero(times.end_s > times.start_s)
    spans = LazySequence(ran, partial(_span, program, times))
    return Timeline(spans, len(program.ranks), times.step_time_s, program.columns.rank[ran])


def _span(program: Program, times: Times, index: int) -> Span:
    op = program.op(index)
    num_bytes, peer = 0, None
    communication = op.communication
    if communication is not None:
        num_bytes = sum(part.num_bytes for part in op.communications)
        if communication.kind is CollectiveKind.SEND:
            peer = next((rank for rank in communication.ranks if rank != op.rank), None)
    start_s, end_s = float(times.start_s[index]), float(times.end_s[index])
    return Span(op.rank, op.stream, op.name, str(op.action), op.kind, start_s, end_s, num_bytes, peer)
