"""What simplan says about one plan: time, memory, and how sure it is. Plain data; ``predict`` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from simplan.job import Job
from simplan.plan.plan import StageAssignment
from simplan.program.action import Table, format_table
from simplan.program.program import MemoryCategory
from simplan.program.timeline import SpanKind, Split, Timeline
from simplan.units import GIB

__all__ = ["Prediction", "RankMemory", "Term"]

PREDICTION_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank at its worst instant.

    Attributes:
        rank: Global rank.
        by_category: Bytes by category when the sum of all is largest; context is not part of ``allocated_bytes``.
        allocated_bytes: By tensors.
        reserved_bytes: By the caching allocator: allocated, rounded and fragmented, as far as the device has room.
        device_bytes: On the device: reserved plus context.
        peak_action: The action during which the peak occurs, text form; empty for the time between steps.
        activations_in_flight: Most microbatches whose activations were alive at once, by stage.
        host_bytes: Most bytes in memory of the host, of what is offloaded; on a CPU they are device memory as well.
        short_bytes: What the caching allocator would reserve more on a larger device: here it has to give free blocks
            back to the driver and ask again, which takes time but is no failure.
    """

    rank: int
    by_category: dict[MemoryCategory, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    peak_action: str
    activations_in_flight: dict[int, int]
    host_bytes: int = 0
    short_bytes: int = 0

    @property
    def wanted_bytes(self) -> int:
        """On a device that is large enough for all that the caching allocator keeps."""
        return self.device_bytes + self.short_bytes


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that was priced, and where its price comes from.

    Attributes:
        name: E.g. ``block forward``, ``all_reduce over 2 ranks``.
        kind: What its time counts as in the split of a step.
        seconds: Time of one occurrence.
        count: Occurrences on a rank, mean over ranks.
        provenance: ``datasheet``, ``published``, ``calibrated`` or ``extrapolated``.
        relative_std: How sure: relative standard deviation of ``seconds``.
        formula: The formula with numbers filled in.
    """

    name: str
    kind: SpanKind
    seconds: float
    count: float
    provenance: str
    relative_std: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The answer to one scenario with a plan.

    Attributes:
        name: For people.
        job: What was asked.
        assignment: Which layers each stage holds.
        table: What every pipeline rank does in a step.
        step_time_s: Time of one optimizer step (Level 2).
        step_time_interval_s: Interval that should hold the truth in 9 of 10 cases, from the provenance of the costs.
        level1_step_time_s: The same from whole actions, without the overlap inside them.
        bubble_fraction: Share of the time from the first to the last computation of any rank (without the optimizer
            step) in which compute streams idle, mean over ranks.
        capacity_bytes: Memory of one device; None when the catalogue does not know.
        fits: Whether the worst rank's device bytes are within the capacity; None when that is unknown. The caching
            allocator's free blocks do not count: it gives them back before it fails (``RankMemory.short_bytes``).
        memory: Per rank.
        splits: Per rank, in the order of ``memory``.
        tokens_per_s_per_device: Throughput, padding of packed sequences included; 0 for a model of images that has no
            tokens.
        mfu: Model FLOPs utilization, causal attention counted half; None when the peak is unknown.
        mfu_full_attention: The same with full attention counted (PaLM, most papers).
        hfu: As ``mfu``, recomputed FLOPs counted.
        terms: What was priced and how.
        timeline: Spans of the step.
        assumptions: What the reader must know, in words.
        reference_s: What the executor's reference product took on the machine when it was calibrated.
    """

    name: str
    job: Job
    assignment: StageAssignment
    table: Table
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    level1_step_time_s: float
    bubble_fraction: float
    capacity_bytes: int | None
    fits: bool | None
    memory: tuple[RankMemory, ...]
    splits: tuple[Split, ...]
    tokens_per_s_per_device: float
    mfu: float | None
    mfu_full_attention: float | None
    hfu: float | None
    terms: tuple[Term, ...]
    timeline: Timeline
    assumptions: tuple[str, ...] = ()
    reference_s: float | None = None

    @property
    def worst_rank(self) -> int:
        """The rank that needs most device memory, the lowest where several need the same."""
        return max(self.memory, key=lambda m: (m.device_bytes, m.short_bytes, -m.rank)).rank

    @property
    def worst_memory(self) -> RankMemory:
        """Memory of the worst rank."""
        return next(m for m in self.memory if m.rank == self.worst_rank)

    @property
    def worst_host_bytes(self) -> int:
        """What is offloaded to the memory of one node, by all its ranks together, where it is most."""
        totals: dict[int, int] = {}
        for memory in self.memory:
            node = self.job.cluster.node_of(memory.rank)
            totals[node] = totals.get(node, 0) + memory.host_bytes
        return max(totals.values())

    @property
    def host_fits(self) -> bool | None:
        """Whether what is offloaded is within the memory of every node; None when that is unknown."""
        capacity = self.job.cluster.host_memory_bytes
        return None if capacity is None else self.worst_host_bytes <= capacity

    @property
    def samples_per_s_per_device(self) -> float:
        """Throughput in sequences or images."""
        return self.job.training.global_batch_size / self.step_time_s / self.job.cluster.num_devices

    @property
    def document_tokens_per_s_per_device(self) -> float:
        """Throughput in tokens of documents, padding left out."""
        model = self.job.model
        packs = model.packs
        return self.tokens_per_s_per_device * (model.document_share if packs is None else packs.document_share)

    def to_json(self, *, timeline: bool = True) -> dict[str, Any]:
        """The prediction as the JSON document the command line prints and files hold.

        Args:
            timeline: With the spans, which are most of it; else there are none.
        """
        worst, job = self.worst_memory, self.job
        return {
            "schema_version": PREDICTION_SCHEMA_VERSION,
            "kind": "prediction",
            "name": self.name,
            "inputs": {
                "model": job.model.model_dump(mode="json"),
                "cluster": job.cluster.model_dump(mode="json"),
                "training": job.training.model_dump(mode="json"),
                "plan": job.plan.model_dump(mode="json"),
                "software": job.software.title,
            },
            "stage_boundaries": list(self.assignment.boundaries),
            "num_microbatches": job.num_microbatches,
            "num_parameters": job.model.num_parameters,
            "num_trained_parameters": job.model.num_trained_parameters,
            "table": format_table(self.table),
            "step_time_s": self.step_time_s,
            "step_time_interval_s": list(self.step_time_interval_s),
            "level1_step_time_s": self.level1_step_time_s,
            "bubble_fraction": self.bubble_fraction,
            "reference_s": self.reference_s,
            "fits": self.fits,
            "capacity_gib": None if self.capacity_bytes is None else self.capacity_bytes / GIB,
            "peak_memory_gib": {
                "allocated": worst.allocated_bytes / GIB,
                "reserved": worst.reserved_bytes / GIB,
                "device": worst.device_bytes / GIB,
            },
            "reserve_short_gib": worst.short_bytes / GIB,
            "host_memory_gib": {
                "rank": max(memory.host_bytes for memory in self.memory) / GIB,
                "node": self.worst_host_bytes / GIB,
                "capacity": None if (host := job.cluster.host_memory_bytes) is None else host / GIB,
            },
            "host_fits": self.host_fits,
            "worst_rank": self.worst_rank,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "document_tokens_per_s_per_device": self.document_tokens_per_s_per_device,
            "samples_per_s_per_device": self.samples_per_s_per_device,
            "mfu": self.mfu,
            "mfu_full_attention": self.mfu_full_attention,
            "hfu": self.hfu,
            "ranks": [
                {
                    "rank": memory.rank,
                    "split": {
                        "compute": split.compute_s,
                        "recompute": split.recompute_s,
                        "exposed_communication": split.exposed_communication_s,
                        "wait": split.wait_s,
                        "host": split.host_s,
                        "optimizer": split.optimizer_s,
                    },
                    "memory_gib": {str(key): value / GIB for key, value in memory.by_category.items()},
                    "peak_memory_gib": {
                        "allocated": memory.allocated_bytes / GIB,
                        "reserved": memory.reserved_bytes / GIB,
                        "device": memory.device_bytes / GIB,
                    },
                    "reserve_short_gib": memory.short_bytes / GIB,
                    "host_memory_gib": memory.host_bytes / GIB,
                    "peak_action": memory.peak_action,
                    "activations_in_flight": {str(k): v for k, v in memory.activations_in_flight.items()},
                }
                for memory, split in zip(self.memory, self.splits, strict=True)
            ],
            "terms": to_jsonable_python(self.terms),
            "timeline": to_jsonable_python([*self.timeline.spans]) if timeline else [],
            "assumptions": list(self.assumptions),
        }
