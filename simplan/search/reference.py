"""Numbers of candidates as ``predict`` makes them, one Program each: slow, for whatever can be predicted."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.cost.base import CostModel
from simplan.predict import cost_model, folding_of, rank_memory, simulate_program
from simplan.predict.build import assign_layers, expands_all, stages_and_table
from simplan.program.lower import Lowering, lower
from simplan.program.program import LayerWork, Phase, Program
from simplan.search.candidate import Candidate
from simplan.search.question import Question
from simplan.spec.layer import LayerSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.recompute import recomputation, recompute_of
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["ReferenceEvaluator"]


class ReferenceEvaluator:
    """One Program a candidate, in the SimPy engine; see ``Evaluator``. What it finds it remembers.

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._bytes: dict[Candidate, int] = {}
        self._seconds: dict[Candidate, float] = {}
        self._least_s: dict[Candidate, float] = {}

    def least_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [0] * len(candidates)

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """Device memory of the worst rank, with all that the caching allocator would like; nothing is simulated.

        Equal to that of ``Prediction`` where it fits; one that is short of reserve is slower than its prediction says.
        """
        return [self._device_bytes(candidate) for candidate in candidates]

    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """What a pipeline rank computes for all microbatches, and what it waits for before and after it.

        A rank computes one thing at a time, and cores that it shares or communication beside it only slow it down, so
        no step is shorter. Communication, scaling and the optimizer are left out.
        """
        return [self._least_time_s(candidate) for candidate in candidates]

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Step times at Level 2, as ``Prediction`` has them."""
        return [self._step_time_s(candidate) for candidate in candidates]

    def _device_bytes(self, candidate: Candidate) -> int:
        if candidate not in self._bytes:
            question = self._question
            plan = candidate.plan()
            program = self._program(plan)
            memory = rank_memory(program, question.job(plan), question.calibration)
            self._bytes[candidate] = max(rank.wanted_bytes for rank in memory)
        return self._bytes[candidate]

    def _step_time_s(self, candidate: Candidate) -> float:
        if candidate not in self._seconds:
            plan = candidate.plan()
            simulated = simulate_program(self._program(plan), self._cost(plan), self._question.cluster)
            self._seconds[candidate] = simulated.times.step_time_s
        return self._seconds[candidate]

    def _least_time_s(self, candidate: Candidate) -> float:
        same = candidate._replace(reshard_after_forward=True)  # computes the same
        if same not in self._least_s:
            plan = same.plan()
            num = self._question.job(plan).num_microbatches
            self._least_s[same] = _least_time_s(self._question, plan, self._cost(plan), num)
        return self._least_s[same]

    def _cost(self, plan: ParallelPlan) -> CostModel:
        return cost_model(self._question.job(plan), self._question.calibration)

    def _program(self, plan: ParallelPlan) -> Program:
        """At Level 2, as ``predict`` makes it."""
        job = self._question.job(plan)
        assignment, table = stages_and_table(job, self._cost(plan))
        folding = folding_of(job)
        how = Lowering(2, folding, expands_all(job, folding), host_waits=job.cluster.device.kind == "cpu")
        return lower(job, assignment, table, how)


def _least_time_s(question: Question, plan: ParallelPlan, cost: CostModel, num_microbatches: int) -> float:
    """Over pipeline ranks, the most of: forward of one microbatch before it, all its work, backward after it.

    A rank begins with a forward of a microbatch that came through all stages before its first; and it ends, unless
    backwards are split, with a backward that still has to go back through them.
    """
    model, software = question.model, question.software
    layers = software.layers_of(model, plan)
    assignment = assign_layers(question.job(plan), cost)
    facts = SCHEDULE_FACTS.get(plan.schedule)
    splits = facts is not None and facts.splits_backward
    seconds: dict[tuple[LayerSpec, tuple[int, ...]], tuple[float, float]] = {}
    stages = []
    for stage in range(plan.num_stages):
        forward_s = backward_s = 0.0
        for index in assignment.layer_range(stage):
            mode = recompute_of(layers[index], plan, assignment.place(index))
            key = layers[index], tuple(recomputation(layers[index], mode, index - 1, plan.recompute_modules).kernels)
            if key not in seconds:
                seconds[key] = _layer_s(cost, *key, plan, splits=splits)
            forward_s += seconds[key][0]
            backward_s += seconds[key][1]
        stages.append((forward_s, backward_s))
    work_s = [0.0] * plan.pp
    for stage, parts_s in enumerate(stages):
        turn, place = divmod(stage, plan.pp)
        back = facts is not None and facts.placement == "v" and turn % 2
        work_s[plan.pp - 1 - place if back else place] += num_microbatches * sum(parts_s)
    most_s = before_s = 0.0
    for rank, of_rank_s in enumerate(work_s):
        most_s = max(most_s, before_s + of_rank_s)
        before_s += stages[rank][0] + (0.0 if splits else stages[rank][1])
    return most_s


def _layer_s(
    cost: CostModel, layer: LayerSpec, again: tuple[int, ...], plan: ParallelPlan, *, splits: bool
) -> tuple[float, float]:
    """Forward of a layer, and its backward with what is computed again; in two parts if that is shorter."""

    def seconds(phase: Phase, kernels: tuple[int, ...] | None = None) -> float:
        return cost.compute(LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters, kernels)).seconds

    backward_s = seconds(Phase.BACKWARD)
    if splits:
        backward_s = min(backward_s, seconds(Phase.BACKWARD_INPUT) + seconds(Phase.BACKWARD_WEIGHT))
    if again:
        backward_s += seconds(Phase.RECOMPUTE, again)
    return seconds(Phase.FORWARD), backward_s
