"""A prediction beside the rehearsal of one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from simplan.predict.rehearsed import Rehearsed, rehearsed_step
from simplan.predict.simulated import Simulated
from simplan.prediction import Prediction
from simplan.program.program import MemoryCategory, Program
from simplan.runs.rehearsal import Rehearsal
from simplan.sim.memory import memory_peak

__all__ = ["MemoryRow", "RehearsalComparison", "compare_rehearsal"]

_COLUMNS = ("allocated", "reserved", "device")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one column or one category.

    Attributes:
        name: ``allocated`` (by tensors), ``reserved``, ``device``, or a category of memory.
        predicted_bytes, measured_bytes: At the peak.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def signed_error(self) -> float | None:
        """(predicted - measured) / measured; None where nothing was measured."""
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes if self.measured_bytes else None


@dataclass(frozen=True, slots=True)
class RehearsalComparison:
    """Predicted beside measured, for one rank.

    Attributes:
        rank: Which.
        fake: It ran on tensors without data.
        peaks: By column, as far as the device tells.
        categories: What was held at the worst moment; the two moments need not be the same action.
        predicted_action, measured_action: During which the peaks were; empty for between two steps.
        predicted_step_time_s: Of the whole job, from the catalogue or the calibration alone.
        rehearsed: The step with measured computing; None without a device.
        notes: What to know when reading.
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
    """Lines up a prediction with the rehearsal of one of its ranks.

    Args:
        prediction: Of the job that was rehearsed.
        simulated: The step behind it.
        rehearsal: Of one rank.
    """
    categories, action = (
        _tensors(simulated.program, rehearsal.rank) if rehearsal.fake else _of_rank(prediction, rehearsal)
    )
    measured = rehearsal.peak_by_category
    shown = [c for c in MemoryCategory if c is not MemoryCategory.CONTEXT and (categories.get(c) or measured.get(c))]
    return RehearsalComparison(
        rank=rehearsal.rank,
        fake=rehearsal.fake,
        peaks=tuple(_peaks(prediction, rehearsal, categories)),
        categories=tuple(MemoryRow(str(c), categories.get(c, 0), measured.get(c, 0)) for c in shown),
        predicted_action=action,
        measured_action=rehearsal.peak_action,
        predicted_step_time_s=prediction.step_time_s,
        rehearsed=None if rehearsal.fake else rehearsed_step(prediction, simulated, rehearsal),
        notes=tuple(_notes(prediction, rehearsal)),
    )


def _tensors(program: Program, rank: int) -> tuple[dict[MemoryCategory, int], str]:
    """What is predicted for tensors without data.

    All of them are in one place, those on the host among them; and DDP keeps its first buckets.
    """
    together = replace(program, one_memory=True, rebuild_bytes=dict.fromkeys(program.ranks, 0))
    peak = memory_peak(together, program.stands_for[rank])
    return peak.by_category, peak.action


def _of_rank(prediction: Prediction, rehearsal: Rehearsal) -> tuple[dict[MemoryCategory, int], str]:
    memory = next(m for m in prediction.memory if m.rank == rehearsal.rank)
    return memory.by_category, memory.peak_action


def _peaks(prediction: Prediction, rehearsal: Rehearsal, categories: dict[MemoryCategory, int]) -> Iterator[MemoryRow]:
    memory = next(m for m in prediction.memory if m.rank == rehearsal.rank)
    tensors = sum(value for category, value in categories.items() if category is not MemoryCategory.CONTEXT)
    for column in _COLUMNS:
        measured = getattr(rehearsal.peak_memory, f"{column}_bytes")
        if measured is not None:
            predicted = tensors if rehearsal.fake else getattr(memory, f"{column}_bytes")
            yield MemoryRow(column, predicted, measured)


def _notes(prediction: Prediction, rehearsal: Rehearsal) -> Iterator[str]:
    plan = prediction.job.plan
    if rehearsal.fake:
        yield "tensors had no data: bytes are those that torch asks its allocator for, and no time was measured"
        if plan.offload_optimizer or plan.offload_activations:
            yield "what is offloaded counts as well"
        return
    device, named = str(rehearsal.environment.get("device")), prediction.job.cluster.device.id
    if prediction.job.cluster.device.kind == "gpu" and named.split("-")[0].lower() not in device.lower().split():
        yield f"measured on {device}, predicted for {named}"
    if plan.num_devices > 1:
        yield "no peer existed: communication is modelled, and computing was measured without any beside it"
    if plan.pp > 1:
        yield "other stages compute as predicted, scaled as the same kinds of actions of the rehearsed rank had to be"
