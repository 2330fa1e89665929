"""Time and memory of a step without all that ``predict`` says besides: for hundreds of plans, however long their steps.

Few microbatches are written out and simulated; the others do the same again. Without a pipeline a step is then longer
by as much for each of them; what they add to a pipeline is in ``simplan.predict.pipeline_rest``. Both agree with
``predict``, but for pipelines whose ranks wait for messages (by up to half a percent on published runs; short ones are
written out) or gather parameters beside the first forward. Where neither holds all microbatches are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.base import CostModel
from simplan.cost.pricing import Pricing, price_program
from simplan.predict.build import cost_model, folding_of, stages_and_table
from simplan.predict.evaluate import rank_memory, within_device
from simplan.predict.simulated import interval_s, moved_durations_s
from simplan.prediction import RankMemory
from simplan.program.batches import Waits, waits_for
from simplan.program.lower import Lowering, lower
from simplan.program.program import Program, Stream, Work
from simplan.program.table import plan_table
from simplan.program.uncollected import uncollected
from simplan.sim.memory import whole_blocks
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import check_plan, num_microbatches
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Brief", "Term", "brief_bytes", "brief_terms", "predict_brief"]

_Floats = NDArray[np.float64]
_FEW = 4
_MOST_WRITTEN_OUT = (
    2048  # microbatches x ranks of a pipeline whose ranks wait for messages, which a table knows less of
)
_FILLS = 2  # so many times as many microbatches as ranks fill every schedule that does not keep all of them
_ROUNDS = 3  # the first round through an interleaved pipeline may differ from the others
_KEEPS_ALL = ("gpipe", "naive")
_MOVED = 1e-7  # by so much of itself a price is moved: the longest path stays the longest
_APART = 1e-4
_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly, without repeats
_LEAST_TIMES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """The numbers of a prediction.

    Attributes:
        step_time_s, step_time_interval_s: As of ``Prediction``.
        allocated_bytes, reserved_bytes, device_bytes: Peaks of the rank that has most of each.
        fits: Whether the device bytes are within the capacity; None where that is unknown.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    fits: bool | None


class Term(NamedTuple):
    """A part of a step time.

    Attributes:
        work: What is done.
        seconds: Its price.
        times: How often the step waits for it: the derivative of the step time with respect to its price.
    """

    work: Work
    seconds: float
    times: float


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was written out: times by vector of durations, the plain ones first."""

    microbatches: int
    program: Program
    durations_s: _Floats
    spans_s: tuple[_Floats, _Floats]

    def times_s(self, *, overlap: bool) -> _Floats:
        """Step times; see ``predict_brief``."""
        start_s, end_s = self.spans_s
        if not overlap:
            return np.asarray(end_s.max(axis=1))
        longest_s = np.zeros(len(start_s))
        computing = [
            (op.rank, index)
            for index, op in enumerate(self.program.ops)
            if op.stream is Stream.COMPUTE and self.durations_s[0, index] > 0
        ]
        of_rank: dict[int, list[int]] = {}
        for rank, index in computing:
            of_rank.setdefault(rank, []).append(index)
        for indices in of_rank.values():
            longest_s = np.maximum(longest_s, end_s[:, indices].max(axis=1) - start_s[:, indices].min(axis=1))
        return longest_s


@uncollected()
def predict_brief(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    plan: ParallelPlan,
    software: SoftwareSpec,
    *,
    steps_overlap: bool = False,
) -> Brief:
    """Predicts time and memory of one optimizer step on devices of their own.

    Args:
        model, cluster, training, plan, software: What is asked.
        steps_overlap: No rank waits for others at the end of a step, so that a step takes as long as the busiest rank
            is at it; else from the first start to the last end.

    Raises:
        SpecError: As ``predict``.
    """
    job = _Job(model, cluster, training, plan, software, moved_durations_s)
    step, seconds, added = job.whole(steps_overlap=steps_overlap)
    memory = job.memory(step.program, added)
    step_time_s, *moved_s = (float(value) for value in seconds)
    device_bytes = max(rank.device_bytes for rank in memory)
    capacity = cluster.device.memory_bytes
    return Brief(
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s, cluster.device.kernels.interval_skew),
        allocated_bytes=max(rank.allocated_bytes for rank in memory),
        reserved_bytes=max(rank.reserved_bytes for rank in memory),
        device_bytes=device_bytes,
        fits=None if capacity is None else device_bytes <= capacity,
    )


@uncollected()
def brief_bytes(
    model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> int:
    """Device memory of the worst rank, with all that the caching allocator would like; nothing is timed.

    Args:
        model, cluster, training, plan, software: As of ``predict_brief``.
    """
    job = _Job(model, cluster, training, plan, software, moved_durations_s)
    few, many, _ = job.extent(steps_overlap=False)
    program, _ = job.program(few)
    added = job.added_bytes(program, few, many) if few < many else []
    return max(rank.wanted_bytes for rank in job.memory(program, added))


@uncollected()
def brief_terms(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    plan: ParallelPlan,
    software: SoftwareSpec,
    *,
    steps_overlap: bool = False,
) -> tuple[Term, ...]:
    """The step time as a sum: that of its longest path, which is linear in prices as long as it stays the longest.

    Where stages are alike several paths are as long, and a price may lengthen one of them and not shorten the others.
    So every price is first moved by less than one part in ten thousand, each by another, and one path is the longest.

    Args:
        model, cluster, training, plan, software, steps_overlap: As of ``predict_brief``.

    Returns:
        What the step waits for; prices, each so many times, add up to the step time, to one part in ten thousand.
    """
    pricings: list[Pricing] = []

    def moved(program: Program, pricing: Pricing) -> list[_Floats]:
        pricings.append(pricing)
        row_of = {work: row for row, work in enumerate(pricings[0].by_work)}
        seconds = np.zeros((len(row_of), len(program.ops)))
        for index, op in enumerate(program.ops):
            for work in op.work:
                seconds[row_of[work], index] += pricing.by_work[work].price.seconds
        apart_s = (1 + _APART * (np.arange(len(row_of)) * _GOLDEN % 1)) @ seconds
        return [apart_s, *(apart_s + _MOVED * seconds)]

    _, seconds, _ = _Job(model, cluster, training, plan, software, moved).whole(steps_overlap=steps_overlap)
    terms = (
        Term(work, term.price.seconds, float(moved_s - seconds[1]) / (_MOVED * term.price.seconds))
        for (work, term), moved_s in zip(pricings[0].by_work.items(), seconds[2:], strict=True)
        if term.price.seconds > 0
    )
    return tuple(term for term in terms if abs(term.times) > _LEAST_TIMES)


@dataclass(frozen=True, slots=True)
class _Job:
    """A question whose number of microbatches may be left open.

    Attributes:
        model, cluster, training, plan, software: What is asked.
        moved: Makes durations that are looked at beside the plain ones.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec
    moved: Callable[[Program, Pricing], list[_Floats]]

    def whole(self, *, steps_overlap: bool) -> tuple[_Step, _Floats, list[int]]:
        """All microbatches.

        Returns:
            A step that was written out, seconds of the whole one by vector of durations, and by rank the bytes that it
            needs more than the first; none where that is the whole.
        """
        few, many, waits = self.extent(steps_overlap=steps_overlap)
        step = self.step(few)
        seconds = step.times_s(overlap=steps_overlap)
        if few == many:
            return step, seconds, []
        if self.plan.pp == 1:
            less = self.step(few - 1)  # each further microbatch adds as much as the last
            added_s = (many - few) * (step.times_s(overlap=False) - less.times_s(overlap=False))
            return step, seconds + added_s, self.added_bytes(step.program, few, many, less.program)
        added_s = self.rest_of_pipeline(step, many, waits)
        return step, seconds + added_s, self.added_bytes(step.program, few, many)

    def extent(self, *, steps_overlap: bool) -> tuple[int, int, Waits]:
        """Microbatches to write out, how many there are, and what ranks of a pipeline wait for."""
        model, cluster, training, plan, software = self.model, self.cluster, self.training, self.plan, self.software
        assert cluster.cores_per_node is None, "ranks that share cores are simulated as a whole"
        if training.global_batch_size % (plan.dp * plan.microbatch_size):
            check_plan(model, cluster, training, plan, software)  # says so
        many = num_microbatches(training, plan)
        waits = waits_for(plan, software, many)
        clips = training.clip_grad_norm is not None
        few = _few(plan, many, steps_overlap=steps_overlap, waits=waits, clips=clips, pairs=software.expert_overlap)
        return (few if waits_for(plan, software, few) == waits else many), many, waits

    def step(self, microbatches: int) -> _Step:
        """A step of so many, written out and priced.

        Raises:
            SpecError: The plan breaks rules, or a price cannot be had.
        """
        from simplan.sim.compiled import compile_program

        program, cost = self.program(microbatches)
        pricing = price_program(program, cost)
        durations_s = np.array([pricing.durations_s, *self.moved(program, pricing)])
        return _Step(microbatches, program, durations_s, compile_program(program).spans(durations_s))

    def program(self, microbatches: int) -> tuple[Program, CostModel]:
        """What a step of so many does, and the prices of all of it.

        Raises:
            SpecError: The plan breaks rules.
        """
        model, cluster, plan, software = self.model, self.cluster, self.plan, self.software
        batch = microbatches * plan.dp * plan.microbatch_size
        training = self.training.model_copy(update={"global_batch_size": batch})
        check_plan(model, cluster, training, plan, software)
        cost = cost_model(cluster, self.training, plan, software, None)  # of all microbatches
        assignment, table = stages_and_table(model, training, plan, software, cost)
        how = Lowering(2, folding_of(model, plan, cluster, software, dealt_alike=True), expand_all=False)
        return lower(model, training, plan, software, assignment, table, how), cost

    def rest_of_pipeline(self, step: _Step, many: int, waits: Waits) -> _Floats:
        """Seconds which further microbatches add to a pipeline.

        Where messages go in batches all rounds but the first take as long.
        """
        from simplan.predict.pipeline_rest import added_s, round_s  # brings numba

        plan, program, few = self.plan, step.program, step.microbatches
        if waits == "batch":
            return (many - few) // plan.pp * round_s(program, step.spans_s[0], plan)
        return added_s(
            program,
            step.durations_s,
            step.spans_s,
            plan,
            few,
            many,
            blocking_sends=waits == "each",
            received_ahead=plan.schedule in self.software.receives_ahead,
        )

    def added_bytes(self, program: Program, few: int, many: int, less: Program | None = None) -> list[int]:
        """By rank that is written out, what it needs more with many microbatches than with the few of the program.

        Without a pipeline that follows from the program of one microbatch less, written out here where it is not given.
        """
        from simplan.predict.pipeline_rest import added_bytes  # brings numba

        plan = self.plan
        if plan.pp == 1:
            less = less or self.program(few - 1)[0]
            return [(many - few) * grown for grown in _resting_more(program, less)]
        grows = self.software.holds_sends or plan.schedule in _KEEPS_ALL
        added = added_bytes(program, plan_table(plan, many if grows else min(many, _FILLS * plan.pp)))
        if self.software.preallocated_receives:
            more, _ = self.program(few + 1)
            grown = _resting_more(more, program)
            added = [own + (many - few) * each for own, each in zip(added, grown, strict=True)]
        return added

    def memory(self, program: Program, added: list[int]) -> tuple[RankMemory, ...]:
        """Peaks of all ranks, with what some need more."""
        memory = rank_memory(program, self.cluster, self.software, None)
        if not added:
            return memory
        by_rank = dict(zip(program.ranks, added, strict=True))
        share = 1 + self.software.reserve_fraction
        return tuple(
            within_device(_with(rank, by_rank[other], share), self.cluster.device.memory_bytes)
            for rank, other in zip(memory, program.stands_for, strict=True)
        )


def _resting_more(program: Program, less: Program) -> list[int]:
    """By rank that is written out, what it holds between steps and the other program's does not."""
    held = [[sum(of.resting_bytes[rank].values()) for rank in of.ranks] for of in (program, less)]
    return [own - other for own, other in zip(*held, strict=True)]


def _few(plan: ParallelPlan, many: int, *, steps_overlap: bool, waits: Waits, clips: bool, pairs: bool) -> int:
    """Microbatches to write out: from so many on all others are like those between the first and the last.

    Where a forward is computed together with a backward, the first ones of every stage are not.
    """
    if plan.pp == 1:
        return min(many, 3)
    from simplan.predict.pipeline_rest import can_add

    if waits == "batch":
        return min(many, _ROUNDS * plan.pp)
    if waits == "each" and many * plan.pp <= _MOST_WRITTEN_OUT:
        return many
    few = max(_FEW, _ROUNDS * plan.pp) if pairs else _FEW
    known = can_add(plan, few) and not clips  # clipping, ranks wait for each other
    return min(many, few) if known and not steps_overlap else many


def _with(memory: RankMemory, more_bytes: int, reserved_share: float) -> RankMemory:
    """What a rank needs when its tensors need more, for each byte of which the allocator reserves a share.

    On a device of any size.
    """
    reserved = memory.reserved_bytes + memory.short_bytes + whole_blocks(int(more_bytes * (reserved_share - 1)))
    reserved += whole_blocks(memory.allocated_bytes + more_bytes) - whole_blocks(memory.allocated_bytes)
    return replace(
        memory,
        allocated_bytes=memory.allocated_bytes + more_bytes,
        reserved_bytes=reserved,
        device_bytes=memory.device_bytes + reserved - memory.reserved_bytes,
        short_bytes=0,
    )
