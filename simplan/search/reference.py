"""Numbers of candidates as ``predict`` makes them, one Program each: slow, for whatever can be predicted."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.cost.base import CostModel
from simplan.predict import cost_model, folding_of, rank_memory, simulate_program
from simplan.predict.build import assign_layers, expands_all
from simplan.predict.stage_times import stage_times
from simplan.program.lower import Lowering, lower
from simplan.program.program import LayerWork, Phase, Program
from simplan.program.table import plan_table
from simplan.search.candidate import Candidate
from simplan.search.question import Question
from simplan.spec.layer import LayerSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import num_microbatches
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

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """Device memory of the worst rank, as ``Prediction`` has it; nothing is simulated."""
        return [self._device_bytes(candidate) for candidate in candidates]

    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Forward and backward of all microbatches on the pipeline rank that has most of it.

        A rank computes one thing at a time, and cores that it shares or communication beside it only slow it down, so
        no step is shorter. Recomputation, scaling and the optimizer are left out.
        """
        return [self._least_time_s(candidate) for candidate in candidates]

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Step times at Level 2, as ``Prediction`` has them."""
        return [self._step_time_s(candidate) for candidate in candidates]

    def _device_bytes(self, candidate: Candidate) -> int:
        if candidate not in self._bytes:
            question = self._question
            program = self._program(candidate.plan())
            memory = rank_memory(program, question.cluster, question.software, question.calibration)
            self._bytes[candidate] = max(rank.device_bytes for rank in memory)
        return self._bytes[candidate]

    def _step_time_s(self, candidate: Candidate) -> float:
        if candidate not in self._seconds:
            plan = candidate.plan()
            simulated = simulate_program(self._program(plan), self._cost(plan), self._question.cluster)
            self._seconds[candidate] = simulated.times.step_time_s
        return self._seconds[candidate]

    def _least_time_s(self, candidate: Candidate) -> float:
        same = _same_compute(candidate)
        if same not in self._least_s:
            plan, model = same.plan(), self._question.model
            cost = self._cost(plan)
            assignment = assign_layers(model, plan, cost)
            layers = model.layers_of(plan.shard)
            seconds = {layer.key: _compute_s(cost, layer, plan) for layer in set(layers)}
            of_rank = [0.0] * plan.pp
            facts = SCHEDULE_FACTS.get(plan.schedule)
            for stage in range(plan.num_stages):
                turn, place = divmod(stage, plan.pp)
                back = facts is not None and facts.placement == "v" and turn % 2
                rank = plan.pp - 1 - place if back else place
                of_rank[rank] += sum(seconds[layers[index].key] for index in assignment.layer_range(stage))
            self._least_s[same] = num_microbatches(self._question.training, plan) * max(of_rank)
        return self._least_s[same]

    def _cost(self, plan: ParallelPlan) -> CostModel:
        asked = self._question
        return cost_model(asked.cluster, asked.training, plan, asked.software, asked.calibration)

    def _program(self, plan: ParallelPlan) -> Program:
        """At Level 2, as ``predict`` makes it."""
        asked = self._question
        model, training, software, cluster = asked.model, asked.training, asked.software, asked.cluster
        cost = self._cost(plan)
        microbatches = num_microbatches(training, plan)
        assignment = assign_layers(model, plan, cost)
        facts = SCHEDULE_FACTS.get(plan.schedule)
        timed = facts is not None and facts.needs_times
        found = stage_times(model, training, plan, software, assignment, cost) if timed else ()
        table = plan_table(plan, microbatches, *found)
        folding = folding_of(model, plan, cluster)
        expand_all = expands_all(model, plan, microbatches, folding)
        how = Lowering(2, folding, expand_all, host_waits=cluster.device.kind == "cpu")
        return lower(model, training, plan, software, assignment, table, how)


def _same_compute(candidate: Candidate) -> Candidate:
    """One candidate for all that compute the same forwards and backwards: most differ in what is sharded."""
    return candidate._replace(recompute="none", reshard_after_forward=True)


def _compute_s(cost: CostModel, layer: LayerSpec, plan: ParallelPlan) -> float:
    """Forward and backward of a layer, whole or in two parts, whichever is shorter."""

    def seconds(phase: Phase) -> float:
        return cost.compute(LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters)).seconds

    backward_s = seconds(Phase.BACKWARD)
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if facts is not None and facts.splits_backward:
        backward_s = min(backward_s, seconds(Phase.BACKWARD_INPUT) + seconds(Phase.BACKWARD_WEIGHT))
    return seconds(Phase.FORWARD) + backward_s
