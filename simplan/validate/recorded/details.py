"""Recording of a user's loop next to a prediction: what a log lacks, states and communication of every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.program.program import MemoryCategory
from simplan.runs.recording import Recording
from simplan.runs.run_spec import RunSpec
from simplan.units import GIB, counted, format_bytes
from simplan.validate.compare import predicted_communications
from simplan.validate.rows import ComparisonRow, compared

_STATES = (MemoryCategory.PARAMETERS, MemoryCategory.OPTIMIZER)
"""States that are constant over a step. Of gradients, a prediction has those of its peak, a recording of the update."""
_MAX_ACTIONS = 100_000
"""Actions of all ranks whose communication is listed."""
_FIRST_STEPS = (
    "allocated bytes of CPU ranks are those of the module, and what the first steps allocated; other tensors that were "
    "made before the recording are not counted"
)
_OF_RANKS = "communication: of one step, the mean over ranks"
_OTHER_LIBRARIES = (
    "device memory of CPU ranks is the resident set of the user's processes, with all libraries that they have loaded"
)


def refuse_other_job(prediction: Mapping[str, Any], recording: Recording) -> None:
    """Raise an error unless the recording can be of the predicted job.

    Raises:
        SpecError: It has another number of ranks, or nothing that another device has, too.
    """
    is_told = any(rank.peak_memory.allocated_bytes for rank in recording.ranks)
    if is_of_other_device(prediction, recording) and not is_told:
        rule = (
            f"was recorded on {recording.environment.get('device')}, and the predicted job runs on "
            f"{prediction['inputs']['cluster']['device']['id']}: only allocated bytes and communication compare"
        )
        fix = "give record(module=...), or predict the job on the recorded device"
        raise SpecError(Problem(field="", rule=rule, fix=fix))
    predicted, recorded = len(prediction["ranks"]), len(recording.ranks)
    if predicted != recorded:
        rule = f"were recorded, and the predicted job has {predicted}"
        raise SpecError(Problem(field="ranks", value=str(recorded), rule=rule, fix="predict the job that was run"))


def is_of_other_device(prediction: Mapping[str, Any], recording: Recording) -> bool:
    """True if CPU ranks are compared with devices of the catalog, or CUDA devices with a prediction for CPU cores."""
    kind: str = prediction["inputs"]["cluster"]["device"]["kind"]
    return recording.is_of_cpu != (kind == "cpu")


@dataclass(frozen=True, slots=True)
class RecordedDetails:
    """Rows and notes of a recording, besides its times and peaks.

    Attributes:
        rows: States of the rank that has most of them, then communication by kind and size of its group.
        notes: What is compared how, and what is not compared.
    """

    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]


def recorded_details(prediction: Mapping[str, Any], recording: Recording, job: Job | None) -> RecordedDetails:
    """Compare a recording with a prediction.

    Args:
        prediction: JSON document of the prediction.
        recording: Recording of the same number of ranks.
        job: Job of the prediction; None if it is unknown.
    """
    states, communication = tuple(_state_rows(prediction, recording)), _communication(prediction, recording, job)
    return RecordedDetails(
        rows=(*states, *communication.rows), notes=(*communication.notes, *_notes(prediction, recording))
    )


def _state_rows(prediction: Mapping[str, Any], recording: Recording) -> Iterator[ComparisonRow]:
    largest = max(recording.ranks, key=lambda rank: sum(rank.states_bytes.get(category, 0) for category in _STATES))
    memory_gib = next(rank["memory_gib"] for rank in prediction["ranks"] if rank["rank"] == largest.rank)
    for category in _STATES:
        if category in largest.states_bytes:
            name = f"{category.value.replace('_', ' ')}, rank {largest.rank}"
            yield compared(name, memory_gib.get(category, 0.0), largest.states_bytes[category] / GIB, "GiB", None)


def _communication(prediction: Mapping[str, Any], recording: Recording, job: Job | None) -> RecordedDetails:
    reason = ""
    if any(rank.collectives is None for rank in recording.ranks):
        reason = "no step was looked at"
    elif job is None:
        reason = "the prediction does not have the settings of its software"
    elif job.plan.num_devices * max(map(len, prediction["table"])) > _MAX_ACTIONS:
        reason = f"the predicted job has more than {_MAX_ACTIONS:,} actions"
    if reason or job is None:
        return RecordedDetails((), (f"communication is not compared: {reason}",))
    expected, recorded = _predicted(prediction, job), _recorded(recording)
    rows, notes = [], []
    for key in sorted(expected.keys() | recorded.keys()):
        sizes, num_ranks = (expected.get(key, []), recorded.get(key, [])), len(recording.ranks)
        predicted_gib, measured_gib = (sum(of_side) / GIB / num_ranks for of_side in sizes)
        rows.append(compared(_words(key), predicted_gib, measured_gib, "GiB", None))
        predicted, measured = (len(of_side) / num_ranks for of_side in sizes)
        if predicted != measured:
            notes.append(f"{_words(key)}: {measured:g} a step on a rank, and {predicted:g} are predicted")
    return RecordedDetails(tuple(rows), (*notes, *([_OF_RANKS] if rows else [])))


def _notes(prediction: Mapping[str, Any], recording: Recording) -> Iterator[str]:
    if is_of_other_device(prediction, recording):
        yield (
            "step time, throughput and device memory are not compared: recorded on "
            f"{recording.environment.get('device')}, predicted for {prediction['inputs']['cluster']['device']['id']}"
        )
    elif recording.is_of_cpu:
        yield _OTHER_LIBRARIES
    gradients = [rank.states_bytes.get(MemoryCategory.GRADIENTS) for rank in recording.ranks]
    if known := [gradient for gradient in gradients if gradient is not None]:
        yield (
            f"gradients are not compared: {format_bytes(max(known))} at an update on the rank with most, and a "
            "prediction has those at its peak"
        )
    if not recording.ranks[0].states_bytes:
        yield "parameters and optimizer states are not compared: record(module=..., optimizer=...) tells them"
    if recording.is_of_cpu:
        is_known = recording.ranks[0].peak_memory.allocated_bytes is not None
        yield _FIRST_STEPS if is_known else "allocated bytes are not compared: on a CPU, record(module=...) tells them"
    yield (
        "a recording has no actions: which part made the difference, the order of communication and what was left "
        "unexplained only `simplan run` can say; recorded steps contain data loading and logging"
    )
    yield "that the recording is of the predicted job cannot be checked, except by the numbers above"


_Key = tuple[str, int]
"""Kind of communication, and size of its group."""


def _recorded(recording: Recording) -> dict[_Key, list[int]]:
    """Bytes of every operation of all ranks."""
    return _by_key(
        (collective.kind, collective.ranks, collective.num_bytes)
        for rank in recording.ranks
        for collective in rank.collectives or ()
    )


def _predicted(prediction: Mapping[str, Any], job: Job) -> dict[_Key, list[int]]:
    spec = RunSpec(
        name=prediction["name"],
        model=job.model,
        training=job.training,
        plan=job.plan,
        software=job.software,
        boundaries=tuple(prediction["stage_boundaries"]),
        table=tuple(map(tuple, prediction["table"])),
    )
    issued = predicted_communications(spec)
    return _by_key((kind, ranks, num_bytes) for rank in issued.values() for kind, ranks, num_bytes, _ in rank)


def _by_key(issued: Iterable[tuple[str, tuple[int, ...], int]]) -> dict[_Key, list[int]]:
    sizes: dict[_Key, list[int]] = defaultdict(list)
    for kind, ranks, num_bytes in issued:
        if len(ranks) > 1:
            sizes[kind, len(ranks)].append(num_bytes)
    return sizes


def _words(key: _Key) -> str:
    kind, size = key
    words = kind.replace("_", "-")
    return words if kind in ("send", "recv") else f"{words} of {counted(size, 'rank')}"
