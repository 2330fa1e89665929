"""Comparison of a prediction with a measurement: signed errors, spread of repeats, and unexplained time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind
from simplan.program.program import Program
from simplan.program.timeline import Span, Timeline
from simplan.runs.measurement import Measurement
from simplan.units import GIB, counted
from simplan.validate.activity import UNEXPLAINED, ActivityShare
from simplan.validate.attribution import RankSplit, TermDifference, attribute
from simplan.validate.measured import measured_timeline, predicted_timeline, times_recomputation
from simplan.validate.rows import ComparisonRow, compared, relative_spread
from simplan.validate.structure import TIMED_KINDS, issued_as_predicted, ran_as_predicted

__all__ = ["AT_THIS_SPEED", "Comparison", "compare"]

AT_THIS_SPEED = "step time, computing as fast as in the run"
"""Name of the row with predicted compute rescaled to the compute speed of the run (reference matmul)."""

_COMPUTING = (ActivityShare.COMPUTE, ActivityShare.RECOMPUTE, ActivityShare.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction compared with a measurement of the same job.

    Attributes:
        rows: Step time, then memory, then the parts of the step.
        structure_equal: True if every rank ran exactly the predicted actions, and issued exactly the predicted
            communication of Level 2 (kind, group, bytes), both in order.
        interval_holds: True if the measured step time is inside the predicted 90% interval.
        unexplained_s: Seconds on the measured critical path without recorded activity or known wait.
        notes: Notes for the reader.
        terms: Terms of both critical paths; their differences sum to the step-time difference.
        splits: Time split of each rank; per rank, the differences sum to the step-time difference.
        slowdown: Time of the reference matmul in the run over its time in the calibration; None if either did not time
            it.
    """

    rows: tuple[ComparisonRow, ...]
    structure_equal: bool
    interval_holds: bool
    unexplained_s: float
    notes: tuple[str, ...]
    terms: tuple[TermDifference, ...] = ()
    splits: tuple[RankSplit, ...] = ()
    slowdown: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        return {"schema_version": 1, "kind": "comparison", **asdict(self)}


def compare(
    prediction: Prediction | Mapping[str, Any], measurement: Measurement, program: Program | None = None
) -> Comparison:
    """Compare a prediction with a measurement.

    Args:
        prediction: A prediction, or its JSON document.
        measurement: A run of the same job.
        program: Program of the prediction; None to lower it here.

    Raises:
        SpecError: The jobs differ, or the measurement has no steady step.
    """
    if isinstance(prediction, Prediction):
        predicted, prediction = prediction.timeline, prediction.to_json(timeline=False)
    else:
        predicted = predicted_timeline(prediction)
    _same_job(prediction, measurement)
    measured = measured_timeline(measurement)
    rows = [compared("step time", prediction["step_time_s"], measurement.step_time_s, "s", measurement.spread)]
    terms, splits = attribute(predicted, measurement)
    calibrated_s, slowdown = prediction.get("reference_s"), None
    if calibrated_s is not None and measurement.reference_s is not None:
        slowdown = float(measurement.reference_s / calibrated_s)
        computing_s = sum(term.predicted_s for term in terms if term.share in _COMPUTING)
        predicted_s = prediction["step_time_s"] + (slowdown - 1) * computing_s
        rows.append(compared(AT_THIS_SPEED, predicted_s, measurement.step_time_s, "s", measurement.spread))
    rows += _memory_rows(prediction, measurement)
    expected, found = _action_times(predicted), _action_times(measured)
    for key in sorted(expected.keys() & found.keys(), key=lambda key: (TIMED_KINDS.index(key[1]), key[0])):
        means_s = statistics.fmean(expected[key]), statistics.fmean(found[key])
        rows.append(compared(f"{key[1].value} of stage {key[0]}", *means_s, "s", relative_spread(found[key])))
    unexplained_s = sum(term.measured_s for term in terms if term.part == UNEXPLAINED)
    low_s, high_s = prediction["step_time_interval_s"]
    notes = ["parts of the step are those of the representative step, the one with the median step time"]
    notes += [
        f"the steps that are kept of the part on {counted(part.num_nodes, 'node')} with "
        f"{counted(part.plan.num_devices, 'rank')} ({part.end_step - part.first_step}) are not compared: {part.ended}"
        for part in measurement.earlier
    ]
    if splits and not times_recomputation(measurement):
        notes.append("compute contains recomputation, on both sides: the run did not time it apart")
    notes += _beyond_the_device(prediction, measurement)
    if not measurement.complete:
        notes.append(f"the run ended early: {measurement.failure}")
    return Comparison(
        rows=tuple(rows),
        structure_equal=ran_as_predicted(measurement) and issued_as_predicted(measurement, program),
        interval_holds=low_s <= measurement.step_time_s <= high_s,
        unexplained_s=unexplained_s,
        notes=tuple(notes),
        terms=terms,
        splits=splits,
        slowdown=slowdown,
    )


def _same_job(prediction: Mapping[str, Any], measurement: Measurement) -> None:
    inputs, job = prediction["inputs"], measurement.job
    problems = [
        Problem(field=name, rule="differs between prediction and measurement", fix="predict the job that was run")
        for name, given, value in (
            ("model", inputs["model"], job.model.model_dump(mode="json")),
            ("training", inputs["training"], job.training.model_dump(mode="json")),
            ("plan", inputs["plan"], job.plan.model_dump(mode="json")),
            ("software", inputs["software"], job.software.title),
            ("stage_boundaries", prediction["stage_boundaries"], list(job.boundaries)),
            ("table", prediction["table"], [list(row) for row in job.table]),
        )
        if given != value
    ]
    if not measurement.step_times_s:
        problems.append(
            Problem(
                field="step_times_s",
                rule=f"holds no steady step ({measurement.failure or 'none was asked for'})",
                fix="measure again",
            )
        )
    if problems:
        raise SpecError(problems)


def _memory_rows(prediction: Mapping[str, Any], measurement: Measurement) -> Iterable[ComparisonRow]:
    """Yield peak memory of the measured peak-memory rank, by column."""
    for column in ("allocated", "reserved", "device"):
        known = [
            (value, rank.rank)
            for rank in measurement.ranks
            if (value := getattr(rank.peak_memory, f"{column}_bytes")) is not None
        ]
        if not known:
            continue
        value, rank = max(known)
        predicted = {r["rank"]: r["peak_memory_gib"][column] for r in prediction["ranks"]}[rank]
        yield compared(f"peak memory, {column}, rank {rank}", predicted, value / GIB, "GiB", None)


def _beyond_the_device(prediction: Mapping[str, Any], measurement: Measurement) -> Iterable[str]:
    """Yield a note if a measured peak exceeds the memory of the predicted device."""
    capacity_gib = prediction["capacity_gib"]
    found = {
        rank.rank: max(value for _, value in rank.peak_memory if value is not None) / GIB
        for rank in measurement.ranks
        if any(value is not None for _, value in rank.peak_memory)
    }
    rank = max(found, key=lambda each: found[each], default=0)
    if capacity_gib is not None and found and found[rank] > capacity_gib:
        yield (
            f"rank {rank} was measured to hold {found[rank]:.4g} GiB, and a device of the predicted job has "
            f"{capacity_gib:.4g}: another device was measured, or the file was changed"
        )


def _action_times(timeline: Timeline) -> dict[tuple[int, ActionKind], list[float]]:
    """(stage, kind) -> durations of its actions over ranks and microbatches.

    An action lasts from its first compute to the end of all its work, including gradient reduction, as the host sees
    it. The all-reduce of tied embeddings is excluded, since most of it is wait between the first and the last stage.
    """
    actions = {text: Action.parse(text) for text in {span.action for span in timeline.spans}}
    work: dict[tuple[int, Action], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        action = actions[span.action]
        if action.kind in TIMED_KINDS and span.stream != "tied":
            work[span.rank, action].append(span)
    found: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for (_, action), spans in work.items():
        duration_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
        found[action.stage, action.kind].append(duration_s)
    return found
