"""Numbers of many plans at once: layers priced once, stages put together from them, whole pipelines in machine code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from simplan.predict.brief import beside_messages_s
from simplan.program.complete import Unshard
from simplan.program.uncollected import uncollected
from simplan.search import pipelined, single
from simplan.search.candidate import Candidate
from simplan.search.mesh import is_even
from simplan.search.numbers import Kept, Numbers, split_key
from simplan.search.passes import Passes
from simplan.search.pipelined import Pipelined
from simplan.search.question import Question
from simplan.search.upkeep import Upkeep
from simplan.sim.memory import whole_blocks
from simplan.sim.pipeline.table import PipelineTable, Tables
from simplan.spec.layer_style import LayerStyle
from simplan.spec.optimizer import LAYERWISE
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["FastEvaluator", "covers_job"]

_Number = TypeVar("_Number", int, float)

_SCHEDULES = frozenset({"none", "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-h2", "zb-v"})
_STAGES = {
    name: (SCHEDULE_FACTS[name].placement, SCHEDULE_FACTS[name].splits_backward) for name in _SCHEDULES - {"none"}
}


def covers_job(question: Question) -> bool:
    """Whether a ``FastEvaluator`` knows all about a job: devices of their own, all weights trained, usual sends."""
    cluster, software = question.cluster, question.software
    return (
        cluster.cores_per_node is None
        and cluster.device.kind != "cpu"
        and question.training.clip_grad_norm is None
        and question.training.optimizer not in LAYERWISE
        and question.training.fused_optimizer is not False
        and software.holds_sends
        and software.equal_stages == "no"
        and not software.synchronous_schedules
        and software.tp_overlap == "none"
        and software.expert_dispatch == "copies"
        and not software.expert_overlap
        and not software.fused_experts
        and software.copies_units
        and not software.lists_of_shards
        and software.live_elements is None
        and not (question.model.lora_rank or question.model.mtp_num_layers)
        and software.gradient_as_bucket_view
        and software.preallocated_receives
        and not software.splits_sends
        and not software.reduces_each_microbatch
        and not software.scales_loss
        and all(low.weights == "microbatch" for low in software.low_precision.values())
        and software.rebuilds_buckets
        and software.waits_for_gradients == "backward"
        and software.waits_for_batch == "none"
        and software.optimizer_shards == "parameters"
        and software.layers == LayerStyle()
        and not (software.flat_updates or software.reserve_fraction)
        and not any(state.widened_bytes or state.placeholder for state in software.state_bytes.values())
    )


class FastEvaluator:
    """An ``Evaluator`` for devices that do not share cores, equal to ``predict`` up to rounding.

    Args:
        question: The job.
    """

    def __init__(self, question: Question) -> None:
        cluster, software = question.cluster, question.software
        self._question = question
        self._numbers = Numbers(question.model, cluster, question.training, software)
        self._has_experts = question.model.num_experts > 0
        self._context_bytes = int(software.context_bytes.get(cluster.device.kind, 0))
        self._plans, self._passes, self._upkeeps, self._uneven = Kept(50_000), Kept(5_000), Kept(5_000), Kept(2_500)
        self._tables = Tables()

    def covers(self, c: Candidate) -> bool:
        """Whether it knows a plan: all ranks of a stage do the same, and the schedule is not found from times."""
        apart = c.ep > 1 or (c.tp > 1 and self._has_experts)
        if apart or c.recompute_layers or c.schedule not in _SCHEDULES or not is_even(c, self._numbers.cluster):
            return False
        if not c.shards_parameters:
            return c.grad_sync == "step"
        return not self._is_uneven(c)

    def _is_uneven(self, c: Candidate) -> bool:
        """Whether ranks have unequal parts of gradients that are summed over tensor-parallel ranks."""

        def find() -> bool:
            parameters = (p for spec in self._numbers.layers(c).specs for p in spec.parameters)
            return any(p.partial_gradient and p.shape[0] % (c.dp_shard * c.cp) for p in parameters)

        return self._uneven.get((*split_key(c), c.dp_shard), find)

    def least_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [0] * len(candidates)

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [self._on_device(allocated) for allocated in self.allocated_bytes(candidates)]

    def allocated_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """What the worst rank allocates."""
        return self._each(candidates, single.peak_bytes, pipelined.peaks_bytes)

    @uncollected()
    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``; without a pipeline it is the step time itself but for what messages take of devices."""
        found = []
        for c in candidates:
            if c.pp > 1:
                plan = self._pipelined(c)
                found.append(plan.passes.least_s + plan.upkeep.least_update_s)
            else:
                found.append(single.step_time_s(self._numbers, c))
        return found

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``; a step whose messages take part of the device is written out, which takes longer."""
        return self._each(candidates, self._alone_s, pipelined.step_times_s)

    def _alone_s(self, numbers: Numbers, c: Candidate) -> float:
        if c.dp * c.cp == 1 or not numbers.taken_share:
            return single.step_time_s(numbers, c)
        asked = self._question
        more_s = beside_messages_s(asked.job(c.plan()))
        return single.step_time_s(numbers, c) + more_s

    @uncollected()
    def _each(
        self,
        candidates: Sequence[Candidate],
        alone: Callable[[Numbers, Candidate], _Number],
        together: Callable[[PipelineTable, Sequence[Pipelined]], list[_Number]],
    ) -> list[_Number]:
        """Numbers of plans without a pipeline one by one, of others by the table that they share."""
        found: list[Any] = [0] * len(candidates)
        by_table: dict[object, list[tuple[int, Pipelined]]] = defaultdict(list)
        for place, c in enumerate(candidates):
            if c.pp > 1:
                plan = self._pipelined(c)
                by_table[plan.table].append((place, plan))
            else:
                found[place] = alone(self._numbers, c)
        for plans in by_table.values():
            table = self._tables.get(*plans[0][1].table)
            for (place, _), number in zip(plans, together(table, [plan for _, plan in plans]), strict=True):
                found[place] = number
        return found

    def _pipelined(self, c: Candidate) -> Pipelined:
        return self._plans.get(c, lambda: self._put_together(c))

    def _put_together(self, c: Candidate) -> Pipelined:
        """Other plans, that differ from this one in other things, share one half of it or the other."""
        replicas, zero_stage, split = c[:2], c.zero_stage, c[4:11]  # from tp to virtual_stages
        dp, (placement, splits) = replicas[0] * replicas[1], _STAGES[c.schedule]
        has_shards = replicas[1] * c.cp > 1
        sharded = has_shards and zero_stage >= 2
        mesh = None if sharded or splits or dp * c.cp == 1 else replicas  # DDP reduces beside the last backward
        way = (split, placement, splits, c.microbatch_size, c.recompute, c.recompute_modules, sharded, dp, mesh)
        passes = self._passes.get(way, lambda: Passes(self._numbers, c))
        mesh_way = (replicas, split, splits, passes.layout.number, sharded, has_shards and zero_stage == 1)
        upkeep = self._upkeeps.get(mesh_way, lambda: Upkeep(self._numbers, c, passes.layout))
        m = self._numbers.num_microbatches(c)
        return Pipelined(passes, upkeep, (c.schedule, c.pp, m, c.virtual_stages, _unshard(c)))

    def _on_device(self, allocated_bytes: int) -> int:
        return whole_blocks(allocated_bytes) + self._context_bytes


def _unshard(c: Candidate) -> Unshard:
    """As ``unshard_of`` a plan."""
    if not c.shards_parameters:
        return "none"
    return "window" if c.zero_stage == 3 and c.reshard_after_forward else "once"
