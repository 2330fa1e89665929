"""A long step from a shorter one: enough microbatches are simulated, and the rest is extrapolated.

The rows of a pipeline are periodic: between the fill and the drain each further microbatch (of an interleaved schedule,
each round of as many as there are pipeline ranks) adds the same actions to every rank. Two steps are simulated that
differ by one period. The time of a step is a longest path, so with every further period it grows by the largest mean
weight of a cycle of the pipeline, once the path runs along that cycle. Two cycles are looked at: the one of the
simulated steps, which is their difference, and the compute stream of each rank, which is busy with a period for as long
as its computation takes. The path that stays on a rank for all further periods bounds the step from below; so the
larger one of both is taken. Without a pipeline each microbatch adds as much as the last.

Memory of a rank grows by the same bytes with every period, where it grows: activations of GPipe, tensors that were sent
and are not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.base import CostModel
from simplan.cost.calibration.format import Calibration
from simplan.cost.pricing import Pricing
from simplan.job import Job
from simplan.plan.plan import StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.build import assign_layers, cost_model, table_of
from simplan.predict.memory import RankPeaks, device_memory, rank_memory, rank_peaks
from simplan.predict.simulated import Simulated, simulate_program
from simplan.prediction import RankMemory
from simplan.program.action import ActionKind, Table
from simplan.program.folding import Folding
from simplan.program.lowering.lower import Lowerer, Lowering
from simplan.program.program import Program, Stream
from simplan.program.timeline import COMPUTING, Split, split_of_times
from simplan.sim.compiled import CompiledProgram, compile_program
from simplan.sim.engine import Times

__all__ = ["Extent", "TruncatedStep", "extent_of", "predicted_extent"]

_Floats = NDArray[np.float64]
_MAX_PASSES = 30_000
"""Microbatches x pipeline ranks, or x layers where each has collectives of its own, that ``predict`` simulates."""
_FEWEST = 12
"""Microbatches that are simulated of a pipeline, at least: of short ones a few more tell which path is the longest."""
_Vectors = Callable[[Program, Pricing], list[_Floats]]


class Extent(NamedTuple):
    """How much of a step is simulated.

    Attributes:
        simulated: Microbatches of the longer simulated step.
        period: How many fewer the shorter one has; 0 where the whole step is simulated.
        whole: Microbatches of the step.
    """

    simulated: int
    period: int
    whole: int

    @property
    def num_periods(self) -> int:
        """Periods that are extrapolated."""
        return (self.whole - self.simulated) // self.period if self.period else 0


def extent_of(job: Job) -> Extent:
    """How much of a step has to be simulated.

    A pipeline of p ranks is filled after p microbatches, drained within the last p, and has two more between; of an
    interleaved one three rounds, of which the first may differ. Schedules that are found from the times of stages, and
    the user's own, are different with every number of microbatches.
    """
    plan, whole = job.plan, job.num_microbatches
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


def predicted_extent(job: Job) -> Extent:
    """How much of a step ``predict`` simulates: all of it, but of a very long one what ``extent_of`` says."""
    plan, whole = job.plan, job.num_microbatches
    passes = whole * (job.model.num_blocks + 2 if plan.is_layer_by_layer else plan.pp)
    if job.cluster.cores_per_node is not None or passes <= _MAX_PASSES:
        return Extent(whole, 0, whole)
    return extent_of(job)


@dataclass(frozen=True, eq=False)
class TruncatedStep:
    """One optimizer step of a job, whole or truncated.

    Attributes:
        job: What is asked; it keeps the rules.
        extent: How much of the step is simulated.
        calibration: Timings of the device, if there are any.
        level: Of the Program.
        folding: Which ranks are written out.
        expand_all: As of ``Lowering``.
    """

    job: Job
    extent: Extent
    calibration: Calibration | None = None
    level: int = 2
    folding: Folding | None = None
    expand_all: bool = False

    @cached_property
    def cost(self) -> CostModel:
        """Prices."""
        return cost_model(self.job, self.calibration)

    @cached_property
    def assignment(self) -> StageAssignment:
        """Which layers each stage holds."""
        return assign_layers(self.job, self.cost)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """What pipeline ranks do in the longer simulated step, and in the shorter one where the step is truncated."""
        job, extent = self.job, self.extent
        sizes = (extent.simulated, extent.simulated - extent.period) if extent.period else (extent.simulated,)
        return tuple(table_of(job, self.assignment, self.cost, size) for size in sizes)

    def at_level1(self) -> TruncatedStep:
        """The same step of whole actions, without the overlap inside them."""
        found = replace(self, level=1)
        vars(found).update(cost=self.cost, assignment=self.assignment, tables=self.tables)  # the same at both levels
        return found

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The Programs of the tables."""
        job = self.job
        how = Lowering(self.level, self.folding, self.expand_all, host_waits=job.cluster.device.kind == "cpu")
        lowerer = Lowerer(job, self.assignment, self.tables[0], how)
        return tuple(lowerer.program(table) for table in self.tables)

    @cached_property
    def simulated(self) -> tuple[Simulated, ...]:
        """The same, priced and simulated."""
        return tuple(simulate_program(program, self.cost, self.job.cluster) for program in self.programs)

    def seconds(self, others: _Vectors = lambda *_: [], *, steps_overlap: bool = False) -> _Floats:
        """Times of the step, ``(1 + num_others,)`` seconds: with the durations as priced, and with others.

        Args:
            others: Makes vectors of durations, as many for every Program.
            steps_overlap: No rank waits for others at the end of a step, so that a step takes as long as the busiest
                rank is at it; else from the first start to the last end.
        """
        vectors = [np.array([each.pricing.durations_s, *others(each.program, each.pricing)]) for each in self.simulated]
        longer, *shorter = (
            _step_times_s(each, vector, steps_overlap=steps_overlap)
            for each, vector in zip(self.simulated, vectors, strict=True)
        )
        if not shorter:
            return longer
        periods = self.extent.num_periods
        found = longer + periods * (longer - shorter[0])
        if self.job.plan.pp > 1:
            ours, theirs = map(_through_ranks_s, self.simulated, vectors)
            found = np.maximum(found, (ours + periods * (ours - theirs)).max(axis=0))
        return np.asarray(found)

    def peaks(self) -> dict[int, RankPeaks]:
        """Bytes of every rank that is simulated."""
        program, *shorter = self.programs
        found = {}
        for rank in program.ranks:
            peaks = rank_peaks(program, rank)
            if shorter:
                fewer, periods = rank_peaks(shorter[0], rank), self.extent.num_periods
                peaks = peaks._replace(
                    passes=peaks.passes + periods * (peaks.passes - fewer.passes),
                    update=peaks.update + periods * (peaks.update - fewer.update),
                )
            found[rank] = peaks
        return found

    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of every rank of the job."""
        job, program = self.job, self.programs[0]
        memory = rank_memory(program, job, self.calibration)
        if len(self.programs) == 1:
            return memory
        fewer = rank_memory(self.programs[1], job, self.calibration)
        peaks, periods = self.peaks(), self.extent.num_periods
        found = []
        for more, less in zip(memory, fewer, strict=True):
            grown = device_memory(peaks[program.stands_for[more.rank]], job, self.calibration)
            found.append(
                replace(
                    grown,
                    rank=more.rank,
                    by_category={
                        category: size + periods * (size - less.by_category[category])
                        for category, size in more.by_category.items()
                    },
                    peak_action=more.peak_action,
                    activations_in_flight={
                        stage: number + periods * (number - less.activations_in_flight[stage])
                        for stage, number in more.activations_in_flight.items()
                    },
                    host_bytes=more.host_bytes + periods * (more.host_bytes - less.host_bytes),
                )
            )
        return tuple(found)

    def splits(self, step_time_s: float) -> dict[int, Split]:
        """Where the step of every rank that is simulated went.

        Args:
            step_time_s: Time of the whole step.
        """
        longer, *shorter = (_splits_of_ranks(step.program, step.times) for step in self.simulated)
        if not shorter:
            return longer
        found = {}
        for rank, split in longer.items():
            parts = {
                name: seconds + self.extent.num_periods * (seconds - getattr(shorter[0][rank], name))
                for name, seconds in asdict(split).items()
                if name != "wait_s"
            }
            found[rank] = Split(**parts, wait_s=max(0.0, step_time_s - sum(parts.values())))
        return found

    def idle_fraction(self) -> float:
        """Share of time without computation, from the first to the last one of any rank, mean over ranks.

        The optimizer step is left out, as in the closed forms.
        """
        (longer_busy_s, longer_s), *shorter = (_busy_and_total_s(step.program, step.times) for step in self.simulated)
        busy_s, total_s = longer_busy_s, longer_s
        for fewer_busy_s, fewer_s in shorter:
            busy_s += self.extent.num_periods * (longer_busy_s - fewer_busy_s)
            total_s += self.extent.num_periods * (longer_s - fewer_s)
        return 1.0 - busy_s / len(self.programs[0].ranks) / total_s


def _splits_of_ranks(program: Program, times: Times) -> dict[int, Split]:
    on_compute, ran = program.on_stream(Stream.COMPUTE), times.end_s > times.start_s
    found = {}
    for rank, indices in program.rank_indices.items():
        own = indices[ran[indices]]
        found[rank] = split_of_times(
            program.columns.kind[own], on_compute[own], times.start_s[own], times.end_s[own], times.step_time_s
        )
    return found


def _busy_and_total_s(program: Program, times: Times) -> tuple[float, float]:
    """Seconds that all ranks compute, and from the first to the last computation of any of them."""
    computes = program.on_stream(Stream.COMPUTE) & program.of_kind(*COMPUTING) & (times.end_s > times.start_s)
    start_s, end_s = times.start_s[computes], times.end_s[computes]
    return float((end_s - start_s).sum()), float(end_s.max() - start_s.min())


def _step_times_s(step: Simulated, vectors_s: _Floats, *, steps_overlap: bool) -> _Floats:
    """``(num_vectors,)`` Times of a simulated step."""
    if not steps_overlap:
        return np.array([step.times.step_time_s, *step.engine.step_times_s(vectors_s[1:])])
    start_s, end_s = compile_program(step.program).spans(vectors_s)
    computing = step.program.on_stream(Stream.COMPUTE) & (vectors_s[0] > 0)
    busy = [indices[computing[indices]] for indices in step.program.rank_indices.values()]
    longest_s = [end_s[:, own].max(axis=1) - start_s[:, own].min(axis=1) for own in busy if len(own)]
    return np.asarray(np.max(longest_s, axis=0))


def _through_ranks_s(step: Simulated, vectors_s: _Floats) -> _Floats:
    """``(num_ranks, num_vectors)`` The longest path of the step through the last forward of each rank."""
    compiled = step.engine if isinstance(step.engine, CompiledProgram) else compile_program(step.program)
    operations = [_last_forward(step.program, rank) for rank in step.program.ranks]
    starts_s, _ = compiled.spans(vectors_s)
    tails_s = np.array([compiled.tails_s(vector_s) for vector_s in vectors_s])
    return np.asarray((starts_s + tails_s)[:, operations].T)


def _last_forward(program: Program, rank: int) -> int:
    """The first computation of the last forward of a rank."""
    indices = program.rank_indices[rank]
    forward = program.of_action(ActionKind.FORWARD)[indices] & program.on_stream(Stream.COMPUTE)[indices]
    c = program.columns
    last = indices[np.flatnonzero(forward)[-1]]
    same = forward & (c.stage[indices] == c.stage[last]) & (c.microbatch[indices] == c.microbatch[last])
    return int(indices[np.flatnonzero(same)[0]])
