"""Rehearsal of one rank beside its prediction: memory, and the step with measured compute, modeled communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from simplan.cost.program_costs import ProgramCosts
from simplan.plan.plan import RankMapping
from simplan.predict.simulated import Effect, Simulated, affected_costs, interval_s, moved_durations_s, timeline
from simplan.prediction import MemoryKind, Prediction, RankMemory
from simplan.program.action import Action, ActionKind
from simplan.program.program import Communication, HostCopy, MemoryCategory, Op, Program, Stream
from simplan.program.timeline import Split, split_of_rank
from simplan.runs.measurement import Rehearsal
from simplan.sim.memory import memory_peak

_UNMEASURED = frozenset({Effect.OVERLAP_SLOWDOWN, Effect.LINKS})
"""Effects that a rehearsal of one rank does not have in its times."""


@dataclass(frozen=True, slots=True)
class KindTime:
    """Compute time of one kind of action of one stage, mean over microbatches.

    Attributes:
        predicted_s: Predicted seconds without communication.
        measured_s: Measured seconds on the rehearsed rank: mean over microbatches of medians over steps.
        relative_std: Relative standard deviation over steps of the mean over microbatches.
    """

    kind: ActionKind
    stage: int
    predicted_s: float
    measured_s: float
    relative_std: float

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds; 1 if no time is predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Step of a job, simulated with the measured compute of the rehearsed rank.

    Attributes:
        step_time_interval_s: 90% interval, from the spread of measured parts and the uncertainty of modeled parts.
        split: Time split of the rehearsed rank's step.
        kinds: Predicted and measured compute, by kind of action and stage.
        measured_share: Fraction of the compute of all ranks that belongs to ranks at the rehearsed pipeline rank. The
            remaining compute is predicted, and scaled like the rehearsed rank's.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    split: Split
    kinds: tuple[KindTime, ...]
    measured_share: float


def rehearsal_step(prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal) -> Rehearsed:
    """Simulate the step again with measured compute.

    Ranks with the same pipeline coordinate do the same work, so they get the measured times too. Layers of an action
    keep their fractions of its time, so that communication overlaps as predicted.
    """
    assert rehearsal.actions, "a rehearsal without a device has no times"
    kinds = _kinds(prediction, simulated, rehearsal)
    alone, measured_share = _with_measured_times(prediction, simulated, rehearsal, kinds)
    program, engine = simulated.program, simulated.engine
    measured_costs = affected_costs(
        program, alone, simulated.context, engine, simulated.sharing, _UNMEASURED
    ).program_costs
    times = engine.times(measured_costs.durations_s)
    moved_s = engine.step_times_s(moved_durations_s(program, measured_costs))
    spans = timeline(program, times).by_rank()[program.stands_for[rehearsal.rank]]
    return Rehearsed(
        step_time_s=times.step_time_s,
        step_time_interval_s=interval_s(times.step_time_s, moved_s),
        split=split_of_rank(spans, times.step_time_s),
        kinds=tuple(kinds.values()),
        measured_share=measured_share,
    )


_Key = tuple[ActionKind, int]


def _kinds(prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal) -> dict[_Key, KindTime]:
    """Predicted and measured compute, in the order of the rank's row."""
    predicted_s: dict[Action, float] = defaultdict(float)
    stands_for = simulated.program.stands_for[rehearsal.rank]
    for op in simulated.program.ops:
        if op.rank == stands_for and _computes(op, prediction):
            predicted_s[op.action] += _computing_s(op, simulated.alone)
    actions: dict[_Key, list[Action]] = defaultdict(list)
    seconds = {Action.parse(measured.action): measured for measured in rehearsal.actions}
    for action in seconds:
        actions[action.kind, action.stage].append(action)
    kinds = {}
    for (kind, stage), some in actions.items():
        by_step = [fmean(step) for step in zip(*(seconds[action].seconds for action in some), strict=True)]
        measured_s = fmean(seconds[action].median_s for action in some)
        kinds[kind, stage] = KindTime(
            kind,
            stage,
            predicted_s=fmean(predicted_s[action] for action in some),
            measured_s=measured_s,
            relative_std=pstdev(by_step) / measured_s if measured_s > 0 else 0.0,
        )
    return kinds


def _with_measured_times(
    prediction: Prediction, simulated: Simulated, rehearsal: Rehearsal, kinds: Mapping[_Key, KindTime]
) -> tuple[ProgramCosts, float]:
    """Estimates with measured compute, and the fraction of compute of ranks at the rehearsed pipeline rank."""
    mapping = RankMapping.of(prediction.job.plan)
    place = mapping.place(rehearsal.rank).pp
    of_kind = _ratios_by_kind(kinds)
    program, program_costs = simulated.program, simulated.alone
    durations_s, deviations_s = program_costs.durations_s.copy(), program_costs.deviations_s.copy()
    measured_s = total_s = 0.0
    for index, op in enumerate(program.ops):
        if not _computes(op, prediction):
            continue
        predicted_s = _computing_s(op, program_costs)
        key = op.action.kind, op.action.stage
        here = mapping.place(op.rank).pp == place and key in kinds
        ratio = kinds[key].ratio if here else of_kind.get(op.action.kind, 1.0)
        computing_s = predicted_s * ratio
        durations_s[index] += computing_s - predicted_s
        deviations_s[index] *= ratio
        if here:
            deviations_s[index] = kinds[key].relative_std * computing_s
            measured_s += computing_s
        total_s += computing_s
    measured_costs = replace(program_costs, durations_s=durations_s, deviations_s=deviations_s)
    return measured_costs, measured_s / total_s if total_s else 0.0


def _ratios_by_kind(kinds: Mapping[_Key, KindTime]) -> dict[ActionKind, float]:
    """Measured over predicted seconds by kind, summed over stages of the rehearsed rank."""
    measured_s: dict[ActionKind, float] = defaultdict(float)
    predicted_s: dict[ActionKind, float] = defaultdict(float)
    for (kind, _), time in kinds.items():
        measured_s[kind] += time.measured_s
        predicted_s[kind] += time.predicted_s
    return {kind: measured_s[kind] / predicted_s[kind] for kind in measured_s if predicted_s[kind] > 0}


def _computes(op: Op, prediction: Prediction) -> bool:
    """True if an operation's work is inside the span that a rank measures for its action.

    On a CPU, one thread does all work in order. On other devices, copies for data-parallel collectives overlap compute.
    """
    return op.meeting is None and (op.stream is Stream.COMPUTE or prediction.job.cluster.device.kind == "cpu")


def _computing_s(op: Op, program_costs: ProgramCosts) -> float:
    """Seconds of an operation without communication."""
    return sum(
        program_costs.by_work[part].cost_estimate.seconds
        for part in op.work
        if not isinstance(part, Communication | HostCopy)
    )


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
