"""Comparison of a prediction with the rehearsal of one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from simplan.predict.rehearsal import Rehearsed, rehearsal_step
from simplan.predict.simulated import Simulated
from simplan.prediction import MemoryKind, Prediction, RankMemory
from simplan.program.program import MemoryCategory, Program
from simplan.runs.measurement import Rehearsal
from simplan.sim.memory import memory_peak

_COLUMNS: tuple[MemoryKind, ...] = ("allocated", "reserved", "device")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Predicted and measured bytes of one column or category.

    Attributes:
        name: ``allocated`` (tensors), ``reserved``, ``device``, or a memory category.
        predicted_bytes, measured_bytes: Bytes at the peak.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def signed_error(self) -> float | None:
        """(predicted - measured) / measured; None if the measured value is 0."""
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes if self.measured_bytes else None


@dataclass(frozen=True, slots=True)
class RehearsalComparison:
    """Prediction and rehearsal of one rank, compared.

    Attributes:
        rank: Rehearsed rank.
        fake: True if the rank ran on fake tensors (without data).
        peaks: Peaks by column, as far as the device reports them.
        categories: Memory by category at each peak; the predicted and measured peaks may be in different actions.
        predicted_action, measured_action: Action during the peak; empty for between two steps.
        predicted_step_time_s: Step time of the job, from the catalog or the calibration alone.
        rehearsed: Step simulated with measured compute; None for fake tensors.
        notes: Notes for the reader.
    """

    rank: int
    fake: bool
    peaks: tuple[MemoryRow, ...]
    categories: tuple[MemoryRow, ...]
    predicted_action: str
    measured_action: str
    predicted_step_time_s: float
    rehearsed: Rehearsed | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        document = asdict(self)
        for key in ("peaks", "categories"):
            for row, written in zip(getattr(self, key), document[key], strict=True):
                written["signed_error"] = row.signed_error
        return {"schema_version": 1, "kind": "rehearsal_comparison", **document}


def compare_rehearsal(prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal) -> RehearsalComparison:
    """Compare a prediction with the rehearsal of one of its ranks."""
    memory = next(memory for memory in prediction.memory if memory.rank == rehearsal.rank)
    categories, action = memory.by_category, memory.peak_action
    if rehearsal.fake:
        categories, action = _tensors(simulated.program, rehearsal.rank)
    measured = rehearsal.peak_by_category
    shown = [c for c in MemoryCategory if c is not MemoryCategory.CONTEXT and (categories.get(c) or measured.get(c))]
    return RehearsalComparison(
        rank=rehearsal.rank,
        fake=rehearsal.fake,
        peaks=tuple(_peaks(memory, rehearsal, categories)),
        categories=tuple(MemoryRow(str(c), categories.get(c, 0), measured.get(c, 0)) for c in shown),
        predicted_action=action,
        measured_action=rehearsal.peak_action,
        predicted_step_time_s=prediction.step_time_s,
        rehearsed=None if rehearsal.fake else rehearsal_step(prediction, simulated, rehearsal),
        notes=tuple(_notes(prediction, rehearsal)),
    )


def _tensors(program: Program, rank: int) -> tuple[dict[MemoryCategory, int], str]:
    """Predicted memory by category for fake tensors, and the action of its peak.

    Fake tensors share one memory, including offloaded ones, and DDP keeps its first buckets.
    """
    together = replace(program, one_memory=True, rebuild_bytes=dict.fromkeys(program.ranks, 0))
    peak = memory_peak(together, program.stands_for[rank])
    return peak.by_category, peak.action


def _peaks(memory: RankMemory, rehearsal: Rehearsal, categories: dict[MemoryCategory, int]) -> Iterator[MemoryRow]:
    tensors = sum(value for category, value in categories.items() if category is not MemoryCategory.CONTEXT)
    for column in _COLUMNS:
        measured = getattr(rehearsal.peak_memory, f"{column}_bytes")
        if measured is not None:
            predicted = tensors if rehearsal.fake else memory.measurable_bytes(column)
            yield MemoryRow(column, predicted, measured)


def _notes(prediction: Prediction, rehearsal: Rehearsal) -> Iterator[str]:
    plan = prediction.job.plan
    if prediction.job.model.captured is not None:
        yield (
            "of a captured module, activations are tensors that outlive the action that makes them; what is neither "
            "that nor a gradient of a weight counts as workspace"
        )
    if rehearsal.fake:
        yield "tensors had no data: bytes are those that torch asks its allocator for, and no time was measured"
        if plan.offload_optimizer or plan.offload_activations:
            yield "what is offloaded counts as well"
        return
    device, named = str(rehearsal.environment.get("device")), prediction.job.cluster.device.id
    if prediction.job.cluster.device.kind == "gpu" and named.split("-")[0].lower() not in device.lower().split():
        yield f"measured on {device}, predicted for {named}"
    if plan.num_devices > 1:
        yield "no peer existed: communication is modeled, and compute was measured without overlap"
    if plan.pp > 1:
        yield "other stages compute as predicted, scaled as the same kinds of actions of the rehearsed rank had to be"
