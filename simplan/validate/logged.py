"""Comparison of a prediction with the log of any framework.

A log has step times or a throughput, and perhaps a memory peak, but no timeline. So the error is known and its location
is not: only large and uncertain parts of the predicted step can be reported.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, takewhile
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from simplan.base import Positive, Spec
from simplan.document import parse_yaml
from simplan.errors import Problem, SpecError
from simplan.io import MAX_YAML_BYTES, parse_json
from simplan.problems import in_file_order, parse_model, validate
from simplan.program.timeline import SpanKind, Timeline
from simplan.runs.measurement import Measurement
from simplan.units import GIB, format_time
from simplan.validate.activity import ActivityShare, Piece, pieces_of, predicted_activity, stream_words
from simplan.validate.attribution import critical_pieces
from simplan.validate.measured import predicted_timeline
from simplan.validate.rows import ComparisonRow, compared, relative_spread

_KINDS = {
    ActivityShare.COMPUTE: SpanKind.COMPUTE,
    ActivityShare.RECOMPUTE: SpanKind.RECOMPUTE,
    ActivityShare.EXPOSED_COMMUNICATION: SpanKind.COMMUNICATION,
    ActivityShare.OPTIMIZER: SpanKind.OPTIMIZER,
    ActivityShare.HOST: SpanKind.HOST,
}
_OWN_WORDS = {
    ActivityShare.RECOMPUTE: "recomputation",
    ActivityShare.HOST: "the host",
}  # names regardless of the action
_WARMUP = 1.5  # times the median
_MILLISECONDS = (300, 3000)  # times the predicted step: the log may be in milliseconds
_SAME_JOB = 0.02  # a throughput and a step time of one job agree within the digits of a log


def _as_tuple(value: Any) -> Any:
    """Turn one number into a tuple of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Peaks = Annotated[tuple[Positive, ...], Field(min_length=1), BeforeValidator(_as_tuple)]
"""Peaks in GiB: one number for the peak-memory rank, or one per rank."""


class LoggedRun(Spec):
    """A run as logged. One field must give the step time; the others are optional.

    Attributes:
        step_times_s: Times of steps in seconds, preferably after warm-up; see ``warmup_steps``. None if not logged.
        step_time_s: Step time in seconds, for a log with one number only.
        tokens_per_s_per_device: Throughput of one device. If it is the only field, the batch of the predicted job gives
            the step time.
        peak_allocated_gib: Peak of tensors in GiB (``torch.cuda.max_memory_allocated``).
        peak_reserved_gib: Peak of the caching allocator in GiB (``torch.cuda.max_memory_reserved``).
        peak_device_gib: Peak on the device in GiB (``nvidia-smi``).
    """

    schema_version: Literal[1] = 1
    step_times_s: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    step_time_s: Positive | None = None
    tokens_per_s_per_device: Positive | None = None
    peak_allocated_gib: _Peaks | None = None
    peak_reserved_gib: _Peaks | None = None
    peak_device_gib: _Peaks | None = None

    @property
    def peaks(self) -> Peaks:
        """Logged peaks by column."""
        found = {column: getattr(self, f"peak_{column}_gib") for column in COLUMNS}
        return {column: peaks for column, peaks in found.items() if peaks is not None}

    @property
    def warmup_steps(self) -> int:
        """Number of initial steps much slower than the median: compilation, the first batches."""
        times_s = self.step_times_s or ()
        most_s = _WARMUP * statistics.median(times_s) if times_s else 0.0
        return sum(1 for _ in takewhile(lambda time_s: time_s > most_s, times_s))

    @property
    def steady_steps_s(self) -> tuple[float, ...]:
        """Step times without the warm-up steps."""
        return (self.step_times_s or ())[self.warmup_steps :]


@dataclass(frozen=True, slots=True)
class UncertainTerm:
    """A part of the predicted critical path, with its uncertainty.

    Attributes:
        part: Name of the part, e.g. ``backward``.
        share: Share of the step that the part belongs to.
        predicted_s: Seconds on the critical path.
        relative_std: Relative standard deviation of the cost estimates of its kind, weighted by time.
        times_as_long: Slowdown of this part that would explain the whole error; None if no positive time would.
        hidden_s: Seconds of hidden communication, on the rank with the most; 0 for compute.
    """

    part: str
    share: ActivityShare
    predicted_s: float
    relative_std: float
    times_as_long: float | None
    hidden_s: float = 0.0

    @property
    def std_s(self) -> float:
        """Standard deviation in seconds."""
        return self.predicted_s * self.relative_std


@dataclass(frozen=True, slots=True)
class LoggedComparison:
    """A prediction compared with a log.

    Attributes:
        rows: Step time, then memory.
        interval_s: Predicted 90% interval of the step time, in seconds.
        interval_holds: True if the measured step time is inside the interval.
        difference_s: Predicted minus measured step time.
        parts: Parts of the predicted critical path, largest uncertainty in seconds first.
        notes: Notes for the reader, including what a log cannot show.
    """

    rows: tuple[ComparisonRow, ...]
    interval_s: tuple[float, float]
    interval_holds: bool
    difference_s: float
    parts: tuple[UncertainTerm, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        document = asdict(self)
        for part, written in zip(self.parts, document["parts"], strict=True):
            written["std_s"] = part.std_s
        return {"schema_version": 1, "kind": "logged_comparison", **document}


def compare_logged(prediction: Mapping[str, Any], logged: LoggedRun) -> LoggedComparison:
    """Compare a prediction with a log; the caller must know that both are for the same job.

    Raises:
        SpecError: No field gives the step time, two fields contradict each other, or a peak is impossible for the job.
    """
    predicted_s = prediction["step_time_s"]
    measured_s = _step_time_s(prediction, logged)
    low_s, high_s = prediction["step_time_interval_s"]
    return LoggedComparison(
        rows=(
            compared("step time", predicted_s, measured_s, "s", relative_spread(logged.steady_steps_s)),
            *memory_rows(prediction, logged.peaks),
        ),
        interval_s=(low_s, high_s),
        interval_holds=low_s <= measured_s <= high_s,
        difference_s=predicted_s - measured_s,
        parts=_unsure_parts(prediction, measured_s - predicted_s),
        notes=tuple(_notes(prediction, logged, measured_s)),
    )


def _step_time_s(prediction: Mapping[str, Any], logged: LoggedRun) -> float:
    """Measured step time, from the most direct field."""
    if logged.step_times_s is not None and logged.step_time_s is not None:
        raise SpecError(Problem(field="step_time_s", rule="says the same as step_times_s", fix="keep one of them"))
    told_s = logged.step_time_s if logged.step_times_s is None else statistics.median(logged.steady_steps_s)
    tokens_per_s = logged.tokens_per_s_per_device
    if tokens_per_s is None:
        if told_s is None:
            fix = "write step_times_s: [2.41, 2.39, ...], step_time_s or tokens_per_s_per_device"
            raise SpecError(Problem(field="step_times_s", rule="is missing, and nothing else tells a time", fix=fix))
        return told_s
    if not prediction["tokens_per_s_per_device"]:
        rule, fix = "is for models of tokens, and the predicted one has none", "write step_times_s"
        raise SpecError(Problem(field="tokens_per_s_per_device", value=f"{tokens_per_s:g}", rule=rule, fix=fix))
    follows_s = prediction["step_time_s"] * prediction["tokens_per_s_per_device"] / tokens_per_s
    if told_s is not None and abs(follows_s / told_s - 1) > _SAME_JOB:
        rule = (
            f"is a step of {format_time(follows_s)} in the predicted job, and the log has steps of "
            f"{format_time(told_s)}: another batch, sequence length or number of devices was run, or it is the "
            "throughput of all devices"
        )
        fix = "predict the job that was run, or remove one of the two"
        raise SpecError(Problem(field="tokens_per_s_per_device", value=f"{tokens_per_s:g}", rule=rule, fix=fix))
    return float(follows_s) if told_s is None else told_s


def _unsure_parts(prediction: Mapping[str, Any], longer_s: float) -> tuple[UncertainTerm, ...]:
    """Parts of the critical path with a cost estimate, most uncertain first; the measured step is longer by seconds."""
    timeline = predicted_timeline(prediction)
    activity = predicted_activity(timeline)
    rows = {rank: pieces_of(busy, timeline.step_time_s) for rank, busy in activity.items()}
    hidden_s = _hidden_s(timeline, rows)
    on_path_s = dict.fromkeys(((ActivityShare.EXPOSED_COMMUNICATION, part) for part in hidden_s), 0.0)
    for piece in critical_pieces(rows, timeline.step_time_s):
        key = piece.share, _OWN_WORDS.get(piece.share, piece.part)
        on_path_s[key] = on_path_s.get(key, 0.0) + piece.duration_s
    stds = _relative_stds(prediction)
    terms = (
        UncertainTerm(
            part=part,
            share=share,
            predicted_s=seconds,
            relative_std=stds.get(_KINDS[share], 0.0),
            times_as_long=1 + longer_s / seconds if seconds and seconds + longer_s > 0 else None,
            hidden_s=hidden_s.get(part, 0.0) if share is ActivityShare.EXPOSED_COMMUNICATION else 0.0,
        )
        for (share, part), seconds in on_path_s.items()
        if share in _KINDS
    )
    told = (part for part in terms if part.predicted_s or part.hidden_s)
    return tuple(sorted(told, key=lambda part: (-part.std_s, -part.hidden_s)))


def _hidden_s(timeline: Timeline, rows: Mapping[int, Sequence[Piece]]) -> dict[str, float]:
    """Hidden communication seconds by name, on the rank with the most."""
    beside_s: dict[tuple[str, int], float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind is SpanKind.COMMUNICATION:
            beside_s[stream_words(span.stream), span.rank] += span.end_s - span.start_s
    for rank, pieces in rows.items():
        for piece in pieces:
            if piece.share is ActivityShare.EXPOSED_COMMUNICATION:
                beside_s[piece.part, rank] -= piece.duration_s
    longest_s: dict[str, float] = {}
    for (part, _), seconds in beside_s.items():
        longest_s[part] = max(longest_s.get(part, 0.0), seconds)
    return longest_s


def _relative_stds(prediction: Mapping[str, Any]) -> dict[SpanKind, float]:
    """Relative standard deviation of the cost estimates by kind; errors of a kind are fully correlated."""
    time_s: dict[SpanKind, float] = defaultdict(float)
    deviation_s: dict[SpanKind, float] = defaultdict(float)
    for term in prediction["terms"]:
        kind, seconds = SpanKind(term["kind"]), term["seconds"] * term["count"]
        time_s[kind] += seconds
        deviation_s[kind] += seconds * term["relative_std"]
    return {kind: deviation_s[kind] / total_s for kind, total_s in time_s.items() if total_s > 0}


def _notes(prediction: Mapping[str, Any], logged: LoggedRun, measured_s: float) -> Iterator[str]:
    ratio = measured_s / prediction["step_time_s"]
    if _MILLISECONDS[0] <= ratio <= _MILLISECONDS[1]:
        yield f"the measured step time is {ratio:,.0f} times the predicted one: if the log is in ms, write seconds"
    if number := logged.warmup_steps:
        first = "the first step is" if number == 1 else f"the first {number} steps are"
        yield f"{first} left out as warm-up: more than {_WARMUP:g} times the median"
    yield from memory_notes(prediction, logged.peaks)
    yield (
        "a log has no timeline: which part made the difference, whether actions and collectives were those predicted "
        "and what was left unexplained only `simplan run` can say, which records them"
    )
    yield "that the log is of the predicted job cannot be checked"


COLUMNS = ("allocated", "reserved", "device")
"""Memory columns; each includes the previous one."""

_ROUNDED = 1.01  # figures of one log agree within their digits
_UNITS = (("GB", 1e9), ("MiB", 2**20), ("MB", 1e6), ("bytes", 1))


Peaks = Mapping[str, tuple[float, ...]]
"""Logged peaks in GiB by column: one number for the peak-memory rank, or one per rank."""


def memory_rows(prediction: Mapping[str, Any], told: Peaks) -> Iterator[ComparisonRow]:
    """Yield peaks of the measured peak-memory rank; if only one number is logged, of the predicted one.

    Raises:
        SpecError: A peak exceeds the device memory or a column that includes it, or the ranks differ from the predicted
            ranks.
    """
    problems = [*_too_large(told, prediction["capacity_gib"]), *_contradictions(told)]
    ranks = prediction["ranks"]
    rows = []
    for column, peaks in told.items():
        predicted = {rank["rank"]: rank["peak_memory_gib"][column] for rank in ranks}
        if len(peaks) == 1:
            rows.append(compared(f"peak memory, {column}", max(predicted.values()), peaks[0], "GiB", None))
        elif len(peaks) == len(predicted):
            measured_gib, rank = max((value, -rank) for rank, value in enumerate(peaks))
            rows.append(compared(f"peak memory, {column}, rank {-rank}", predicted[-rank], measured_gib, "GiB", None))
        else:
            rule = f"has {len(peaks)} numbers, and the predicted job has {len(predicted)} ranks"
            fix = "give one number, of the rank that needs most, or one for each rank"
            problems.append(Problem(field=_field(column), rule=rule, fix=fix))
    if problems:
        raise SpecError(problems)
    yield from rows


def memory_notes(prediction: Mapping[str, Any], told: Peaks) -> Iterator[str]:
    """Yield notes on the peaks."""
    if not told:
        yield "peak memory is not compared: peak_allocated_gib, peak_reserved_gib or peak_device_gib would tell it"
    least_gib = min(rank["memory_gib"].get("parameters", 0.0) for rank in prediction["ranks"])
    for column, peaks in told.items():
        if max(peaks) < least_gib:
            yield (
                f"{_field(column)} = {max(peaks):g} is less than the {least_gib:.3g} GiB of parameters alone of any "
                "predicted rank: another job was run, or the number is in another unit"
            )


def _too_large(told: Peaks, capacity_gib: float | None) -> Iterator[Problem]:
    for column, peaks in told.items():
        if capacity_gib is not None and max(peaks) > capacity_gib:
            given = max(peaks)
            fix = next(
                (
                    f"if it is in {unit}, write {given * size / GIB:.4g}"
                    for unit, size in _UNITS
                    if given * size / GIB <= capacity_gib
                ),
                "write what one device held",
            )
            rule = f"is more than the {capacity_gib:.4g} GiB of a device of the predicted job"
            yield Problem(field=_field(column), value=f"{given:g}", rule=rule, fix=fix)


def _contradictions(told: Peaks) -> Iterator[Problem]:
    for (inner, part), (outer, whole) in combinations(told.items(), 2):
        if max(part) > _ROUNDED * max(whole):
            rule = f"is more than {_field(outer)} = {max(whole):g}, of which it is a part"
            yield Problem(field=_field(inner), value=f"{max(part):g}", rule=rule, fix="see which number is which")


def _field(column: str) -> str:
    return f"peak_{column}_gib"


YAML_SUFFIXES = (".yaml", ".yml")
_TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".log")
_WHICH_MEMORY = (
    "peak_reserved_gib (what torch's allocator holds), peak_allocated_gib (tensors) or peak_device_gib (nvidia-smi)"
)
_OTHER_WORDS = {
    "step_times_s": "step_times steps times_s",
    "step_time_s": "step_time iteration_time iteration_time_s seconds_per_step time_per_step_s",
    "step_time_s, in seconds": "step_time_ms iteration_time_ms elapsed_time_per_iteration_ms step_times_ms",
    "tokens_per_s_per_device": "tps tgs tokens_per_second_per_gpu tokens_per_s_per_gpu tokens_per_gpu_per_second",
    "tokens_per_s_per_device, a device's share": "tokens_per_s tokens_per_second throughput",
    _WHICH_MEMORY: "peak_memory_gib peak_memory memory memory_gib max_memory_gib memory_kind",
    "peak_reserved_gib": "max_memory_reserved reserved_gib",
    "peak_allocated_gib": "max_memory_allocated allocated_gib",
    f"{_WHICH_MEMORY}; a GiB is 1.0737 GB": "peak_memory_gb memory_gb peak_allocated_gb peak_reserved_gb",
}


def parse_measured(text: str, file: str) -> Measurement | LoggedRun:
    """Parse a measurement, or a logged run if the text contains no job.

    Args:
        text: JSON; YAML if the file name ends in .yaml or .yml.
        file: File name, also used in errors.

    Raises:
        SpecError: The text is neither.
    """
    if file.lower().endswith(_TEXT_SUFFIXES):
        rule, fix = "is neither YAML nor JSON", "write YAML: step_times_s: [2.41, 2.39, ...]"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=file)
    if file.lower().endswith(YAML_SUFFIXES):
        if len(text) > MAX_YAML_BYTES:
            raise SpecError(Problem(field="", rule="is too large for YAML", fix="give it as JSON"), file=file)
        document = parse_yaml(text, file)
        data, lines = document.data, document.lines
        if not isinstance(data, dict):
            rule, fix = "must be a mapping (key: value)", "write step_times_s: [2.41, 2.39, ...]"
            raise SpecError(Problem(field="", rule=rule, fix=fix), file=file)
    else:
        data, lines = parse_json(text, file), {}
    _refuse_other_files(data, file)
    if "job" in data:
        return parse_model(Measurement, data, lines, file)
    logged, problems = validate(LoggedRun, data, lines, elsewhere=_where())
    if logged is None:
        raise SpecError(sorted(problems, key=in_file_order), file=file)
    return logged


def _where() -> dict[str, str]:
    return {word: key for key, words in _OTHER_WORDS.items() for word in words.split()}


def _refuse_other_files(data: dict[str, Any], file: str) -> None:
    """Raise a specific error for files that are likely given by mistake."""
    if data.get("kind") == "prediction":
        rule, fix = "is a prediction", "give the measurement.json of a run as the second file"
    elif "runs" in data and "meta" in data:
        rule, fix = "holds published runs", "`simplan accuracy` predicts them and compares"
    elif "model" in data and "cluster" in data:
        rule, fix = "is a scenario", "give the measurement.json of a run, or what its log says (step_times_s: [...])"
    else:
        return
    raise SpecError(Problem(field="", rule=rule, fix=fix), file=file)
