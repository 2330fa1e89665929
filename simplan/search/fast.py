"""Numbers of many plans at once: layers priced once, stages put together from them, whole pipelines in machine code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from simplan.search import pipelined, single
from simplan.search.candidate import Candidate
from simplan.search.column import Column
from simplan.search.layers import Way
from simplan.search.mesh import is_even
from simplan.search.numbers import Kept, Numbers, mesh_key, split_key
from simplan.search.question import Question
from simplan.sim.pipeline.table import PipelineTable, Tables
from simplan.spec.layer_style import LayerStyle
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["FastEvaluator", "covers_job"]

_BLOCK_BYTES = 2 * 1024**2  # as ``predict`` has it
_SCHEDULES = frozenset({"none", "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-h2", "zb-v"})


def covers_job(question: Question) -> bool:
    """Whether a ``FastEvaluator`` knows all about a job: devices of their own, all weights trained, usual sends."""
    cluster, software = question.cluster, question.software
    return (
        cluster.cores_per_node is None
        and cluster.device.kind != "cpu"
        and software.holds_sends
        and not software.synchronous_schedules
        and software.tp_overlap == "none"
        and not question.model.lora_rank
        and software.gradient_as_bucket_view
        and software.preallocated_receives
        and software.rebuilds_buckets
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
        self._numbers = Numbers(question.model, cluster, question.training, software)
        self._context_bytes = int(software.context_bytes.get(cluster.device.kind, 0))
        self._columns, self._uneven = Kept(5_000), Kept(5_000)
        self._tables = Tables()

    def covers(self, c: Candidate) -> bool:
        """Whether it knows a plan: all ranks of a stage do the same, and the schedule is not found from times."""
        if c.ep > 1 or c.schedule not in _SCHEDULES or not is_even(c, self._numbers.cluster):
            return False
        return not c.shards_parameters or not self._is_uneven(c)

    def _is_uneven(self, c: Candidate) -> bool:
        """Whether ranks have unequal parts of gradients that are summed over tensor-parallel ranks."""

        def find() -> bool:
            parameters = (p for spec in self._numbers.layers(c).specs for p in spec.parameters)
            return any(p.partial_gradient and p.shape[0] % (c.dp_shard * c.cp) for p in parameters)

        return self._uneven.get((*split_key(c), c.dp_shard), find)

    def device_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """See ``Evaluator``."""
        return [self._on_device(allocated) for allocated in self.allocated_bytes(candidates)]

    def allocated_bytes(self, candidates: Sequence[Candidate]) -> list[int]:
        """What the worst rank allocates."""
        found = [0] * len(candidates)
        for table, places in self._by_table(candidates):
            some = [candidates[place] for place in places]
            if table is None:
                peaks = [single.peak_bytes(self._numbers, c) for c in some]
            else:
                peaks = pipelined.peaks_bytes(table, [self._column(c) for c in some])
            for place, peak in zip(places, peaks, strict=True):
                found[place] = peak
        return found

    def least_time_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``; without a pipeline it is the step time itself."""
        numbers = self._numbers
        return [
            self._column(c).least_time_s(numbers.num_microbatches(c)) if c.pp > 1 else single.step_time_s(numbers, c)
            for c in candidates
        ]

    def step_times_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """See ``Evaluator``."""
        found = [0.0] * len(candidates)
        for table, places in self._by_table(candidates):
            some = [candidates[place] for place in places]
            if table is None:
                times = [single.step_time_s(self._numbers, c) for c in some]
            else:
                times = pipelined.step_times_s(table, [self._column(c) for c in some])
            for place, seconds in zip(places, times, strict=True):
                found[place] = seconds
        return found

    def _column(self, c: Candidate) -> Column:
        facts = SCHEDULE_FACTS[c.schedule]
        sharding = c.shards_parameters, c.shards_optimizer_only, self._numbers.num_microbatches(c) > 1
        key = (Way.of(c), mesh_key(c), c.virtual_stages, facts.placement, facts.splits_backward, sharding)
        return self._columns.get(key, lambda: Column(self._numbers, c))

    def _by_table(self, candidates: Sequence[Candidate]) -> list[tuple[PipelineTable | None, list[int]]]:
        """Plans that share a table, as places in the list; ``None`` without a pipeline."""
        grouped: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for place, c in enumerate(candidates):
            key = (c.schedule, c.pp, self._numbers.num_microbatches(c), c.virtual_stages, _unshard(c))
            grouped[key if c.pp > 1 else ()].append(place)
        return [(self._tables.get(*key) if key else None, places) for key, places in grouped.items()]  # type: ignore[arg-type]

    def _on_device(self, allocated_bytes: int) -> int:
        return -(-allocated_bytes // _BLOCK_BYTES) * _BLOCK_BYTES + self._context_bytes


def _unshard(c: Candidate) -> str:
    """As ``unshard_of`` a plan."""
    if c.pp == 1 or not c.shards_parameters:
        return "none"
    return "window" if c.zero_stage == 3 and c.reshard_after_forward else "once"
