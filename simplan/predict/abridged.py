"""A step of a few microbatches, written out and simulated, and what all the others add to it.

Without a pipeline each adds as much as the last; what they add to a pipeline is in ``simplan.predict.pipeline_rest``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.base import CostModel
from simplan.cost.pricing import Pricing, price_program
from simplan.job import Job
from simplan.predict.build import cost_model, folding_of, stages_and_table
from simplan.predict.evaluate import rank_memory, within_device
from simplan.predict.slowed import slowed
from simplan.prediction import RankMemory
from simplan.program.batches import Waits, waits_for
from simplan.program.lower import Lowering, lower
from simplan.program.program import Program, Stream
from simplan.program.table import plan_table
from simplan.sim.memory import whole_blocks
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import check_plan

__all__ = ["AbridgedStep"]

_Floats = NDArray[np.float64]
_FEW = 4
_MOST_WRITTEN_OUT = (
    2048  # microbatches x ranks of a pipeline whose ranks wait for messages, which a table knows less of
)
_FILLS = 2  # so many times as many microbatches as ranks fill every schedule that does not keep all of them
_ROUNDS = 3  # the first round through an interleaved pipeline may differ from the others
_KEEPS_ALL = ("gpipe", "naive")


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


class _Written(NamedTuple):
    """What of a step was written out.

    Attributes:
        few: Its microbatches.
        many: Those of the whole step.
        waits: What ranks of a pipeline wait for.
        program: What it does.
        cost: Prices of a step of all microbatches.
        less: The same with one microbatch less, where the others follow from that.
    """

    few: int
    many: int
    waits: Waits
    program: Program
    cost: CostModel
    less: Program | None


@dataclass(frozen=True, slots=True)
class AbridgedStep:
    """A question whose number of microbatches may be left open.

    Attributes:
        job: What is asked.
        moved: Makes durations that are looked at beside the plain ones.
    """

    job: Job
    moved: Callable[[Program, Pricing], list[_Floats]]

    def written(self, few: int, many: int, waits: Waits) -> _Written:
        """Programs of few microbatches: ``extent`` says of how many.

        Raises:
            SpecError: The plan breaks rules.
        """
        one_by_one = self.job.plan.pp == 1 and few < many  # each further microbatch adds as much as the last
        less = self.program(few - 1)[0] if one_by_one else None
        program, cost = self.program(few)
        return _Written(few, many, waits, program, cost, less)

    def whole(self, written: _Written, *, steps_overlap: bool) -> tuple[_Step, _Floats]:
        """A step that was written out, and seconds of one with all microbatches by vector of durations.

        Raises:
            SpecError: A price cannot be had.
        """
        few, many = written.few, written.many
        step = self.step(few, written.program, written.cost)
        seconds = step.times_s(overlap=steps_overlap)
        if few == many:
            return step, seconds
        if written.less is not None:
            less = self.step(few - 1, written.less, written.cost)
            return step, seconds + (many - few) * (step.times_s(overlap=False) - less.times_s(overlap=False))
        return step, seconds + self.rest_of_pipeline(step, many, written.waits)

    def extent(self, *, steps_overlap: bool) -> tuple[int, int, Waits]:
        """Microbatches to write out, how many there are, and what ranks of a pipeline wait for."""
        training, plan, software = self.job.training, self.job.plan, self.job.software
        assert self.job.cluster.cores_per_node is None, "ranks that share cores are simulated as a whole"
        if training.global_batch_size % (plan.dp * plan.microbatch_size):
            check_plan(self.job)  # says so
        many = self.job.num_microbatches
        waits = waits_for(plan, software, many)
        clips = training.clip_grad_norm is not None
        few = _few(plan, many, steps_overlap=steps_overlap, waits=waits, clips=clips, pairs=software.expert_overlap)
        return (few if waits_for(plan, software, few) == waits else many), many, waits

    def step(self, microbatches: int, program: Program, cost: CostModel) -> _Step:
        """The step of a program, priced and simulated."""
        from simplan.sim.compiled import compile_program

        compiled = compile_program(program)
        pricing = slowed(program, price_program(program, cost), compiled.times)
        durations_s = np.array([pricing.durations_s, *self.moved(program, pricing)])
        return _Step(microbatches, program, durations_s, compiled.spans(durations_s))

    def program(self, microbatches: int) -> tuple[Program, CostModel]:
        """What a step of so many does, and the prices of all of it.

        Raises:
            SpecError: The plan breaks rules.
        """
        batch = microbatches * self.job.plan.dp * self.job.plan.microbatch_size
        training = self.job.training.model_copy(update={"global_batch_size": batch})
        part = replace(self.job, training=training)
        check_plan(part)
        cost = cost_model(self.job, None)  # of all microbatches
        assignment, table = stages_and_table(part, cost)
        how = Lowering(2, folding_of(part, dealt_alike=True), expand_all=False)
        return lower(part, assignment, table, how), cost

    def rest_of_pipeline(self, step: _Step, many: int, waits: Waits) -> _Floats:
        """Seconds which further microbatches add to a pipeline.

        Where messages go in batches all rounds but the first take as long.
        """
        from simplan.predict.pipeline_rest import added_s, round_s  # brings numba

        plan, program, few = self.job.plan, step.program, step.microbatches
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
            received_ahead=plan.schedule in self.job.software.receives_ahead,
        )

    def added_bytes(self, written: _Written) -> list[int]:
        """By rank that is written out, what it needs more with all microbatches than with few; none where that is all.

        Without a pipeline that follows from the program of one microbatch less.
        """
        from simplan.predict.pipeline_rest import added_bytes  # brings numba

        plan, software, program = self.job.plan, self.job.software, written.program
        few, many = written.few, written.many
        if few == many:
            return []
        if written.less is not None:
            return [(many - few) * grown for grown in _resting_more(program, written.less)]
        grows = software.holds_sends or plan.schedule in _KEEPS_ALL
        added = added_bytes(program, plan_table(plan, many if grows else min(many, _FILLS * plan.pp)))
        if software.preallocated_receives:
            more, _ = self.program(few + 1)
            grown = _resting_more(more, program)
            added = [own + (many - few) * each for own, each in zip(added, grown, strict=True)]
        return added

    def memory(self, program: Program, added: list[int]) -> tuple[RankMemory, ...]:
        """Peaks of all ranks, with what some need more."""
        memory = rank_memory(program, self.job, None)
        if not added:
            return memory
        by_rank = dict(zip(program.ranks, added, strict=True))
        share = 1 + self.job.software.reserve_fraction
        return tuple(
            within_device(_with(rank, by_rank[other], share), self.job.cluster.device.memory_bytes)
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
