"""Time and memory of a step without all that ``predict`` says besides: for hundreds of plans, however long their steps.

Few microbatches are written out and simulated; the others do the same again. Without a pipeline a step is then longer
by as much for each of them; what they add to a pipeline is in ``simplan.predict.pipeline_rest``. Both agree with
``predict``. Where neither holds all microbatches are written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simplan.cost.pricing import price_program
from simplan.predict.build import cost_model, folding_of, stages_and_table
from simplan.predict.evaluate import rank_memory
from simplan.predict.simulated import interval_s, moved_durations_s
from simplan.prediction import RankMemory
from simplan.program.lower import Lowering, lower
from simplan.program.program import Program, Stream
from simplan.program.uncollected import uncollected
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import check_plan, num_microbatches
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Brief", "predict_brief"]

_Floats = NDArray[np.float64]
_KEEPS_ALL = ("gpipe", "naive")  # schedules in which a rank keeps all microbatches


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


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was written out: times by vector of durations, the plain ones first."""

    microbatches: int
    program: Program
    durations_s: _Floats
    spans_s: tuple[_Floats, _Floats]
    memory: tuple[RankMemory, ...]

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
    assert cluster.cores_per_node is None, "ranks that share cores are simulated as a whole"
    job = _Job(model, cluster, training, plan, software)
    if training.global_batch_size % (plan.dp * plan.microbatch_size):
        check_plan(model, cluster, training, plan, software)
    many = num_microbatches(training, plan)
    waits = plan.schedule in software.synchronous_schedules
    grows = software.preallocated_receives or software.holds_sends or plan.schedule in _KEEPS_ALL
    few = _few(plan, many, grows=grows, steps_overlap=steps_overlap)
    step = job.step(few)
    seconds, memory = step.times_s(overlap=steps_overlap), step.memory
    if few < many:
        if plan.pp == 1 or grows:
            less = job.step(few - (plan.pp if plan.virtual_stages > 1 else 1))
            more = (many - few) / (few - less.microbatches)
            memory = tuple(_extended(a, b, more) for a, b in zip(less.memory, memory, strict=True))
        if plan.pp == 1:
            seconds = seconds + more * (seconds - less.times_s(overlap=steps_overlap))
        else:
            from simplan.predict.pipeline_rest import added_s  # brings numba

            seconds = seconds + added_s(
                step.program,
                step.durations_s,
                step.spans_s,
                plan,
                few,
                many,
                blocking_sends=waits,
            )
    step_time_s, *moved_s = (float(value) for value in seconds)
    device_bytes = max(rank.device_bytes for rank in memory)
    capacity = cluster.device.memory_bytes
    return Brief(
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s),
        allocated_bytes=max(rank.allocated_bytes for rank in memory),
        reserved_bytes=max(rank.reserved_bytes for rank in memory),
        device_bytes=device_bytes,
        fits=None if capacity is None else device_bytes <= capacity,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """A question whose number of microbatches is left open."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec

    def step(self, microbatches: int) -> _Step:
        """A step of so many, written out.

        Raises:
            SpecError: The plan breaks rules, or a price cannot be had.
        """
        from simplan.sim.compiled import compile_program

        model, cluster, plan, software = self.model, self.cluster, self.plan, self.software
        batch = microbatches * plan.dp * plan.microbatch_size
        training = self.training.model_copy(update={"global_batch_size": batch})
        check_plan(model, cluster, training, plan, software)
        cost = cost_model(cluster, training, plan, software, None)
        assignment, table = stages_and_table(model, training, plan, software, cost)
        how = Lowering(2, folding_of(model, plan, cluster, software, dealt_alike=True), expand_all=False)
        program = lower(model, training, plan, software, assignment, table, how)
        pricing = price_program(program, cost)
        durations_s = np.array([pricing.durations_s, *moved_durations_s(program, pricing)])
        spans_s = compile_program(program).spans(durations_s)
        return _Step(microbatches, program, durations_s, spans_s, rank_memory(program, cluster, software, None))


def _few(plan: ParallelPlan, many: int, *, grows: bool, steps_overlap: bool) -> int:
    """Microbatches to write out: so many that ranks hold as much as they ever do, and those whose memory grows more."""
    if plan.pp == 1:
        return min(many, 3)
    from simplan.predict.pipeline_rest import can_add

    if steps_overlap or not can_add(plan):
        return many
    if plan.virtual_stages > 1:
        return min(many, (3 if grows else 2) * plan.pp)
    return min(many, plan.pp + (2 if grows else 1))


def _extended(less: RankMemory, more: RankMemory, times: float) -> RankMemory:
    """What a rank needs with further microbatches, each of which adds as much."""
    return replace(
        more,
        **{
            name: round(getattr(more, name) + times * (getattr(more, name) - getattr(less, name)))
            for name in ("allocated_bytes", "reserved_bytes", "device_bytes")
        },
    )
