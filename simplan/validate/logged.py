"""Comparison of a prediction with the log of any framework.

A log has step times or a throughput, and perhaps a memory peak, but no timeline. So the error is known and its location
is not. Large and uncertain parts of the predicted step are reported, and changes of the job that would explain the
error (``simplan.validate.hypotheses``).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from simplan import catalog
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.program.timeline import SpanKind, Timeline
from simplan.runs.recording import Recording
from simplan.units import counted, format_time
from simplan.validate.activity import ActivityShare, Piece, pieces_of, predicted_activity, stream_words
from simplan.validate.attribution import critical_pieces
from simplan.validate.hypotheses import Hypothesis, MeasuredTotals, hypotheses, job_of_prediction
from simplan.validate.logged_memory import MemoryTerm, in_memory_interval, memory_notes, memory_rows, memory_terms
from simplan.validate.logged_run import LoggedRun
from simplan.validate.measured import predicted_timeline
from simplan.validate.recorded.details import RecordedDetails, is_of_other_device, recorded_details, refuse_other_job
from simplan.validate.rows import ComparisonRow, compared, relative_spread
from simplan.validate.steady import OUTLIER_RATIO, WARMUP_RATIO

_KINDS = {
    ActivityShare.COMPUTE: SpanKind.COMPUTE,
    ActivityShare.RECOMPUTE: SpanKind.RECOMPUTE,
    ActivityShare.EXPOSED_COMMUNICATION: SpanKind.COMMUNICATION,
    ActivityShare.OPTIMIZER: SpanKind.OPTIMIZER,
    ActivityShare.HOST: SpanKind.HOST,
}
_MILLISECONDS = (300, 3000)  # times the predicted step: the log may be in milliseconds
_SAME_JOB = 0.02  # a throughput and a step time of one job agree within the digits of a log
_MAX_NAMED = 8
_PROFILES_OF: dict[str, tuple[str, ...]] = {
    "Megatron-LM": ("megatron",),
    "Megatron Bridge": ("megatron-bridge", "megatron-core", "nemo"),
    "NeMo": ("nemo", "megatron"),
    "torchtitan": ("torchtitan",),
    "DeepSpeed": ("deepspeed", "megatron-deepspeed", "transformers", "accelerate"),
    "the Hugging Face Trainer": ("transformers", "accelerate", "deepspeed"),
}
"""Program that writes a log -> beginnings of the profiles that its runs are predicted with, the usual one first."""
_TRACE_CONTRADICTS = "changes of a part that moved the other way in the trace are left out"
_WAITS = (
    "kernels of a collective or P2P receive wait for late ranks, so exposed communication contains waits and bubbles"
)


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
        rows: Step time, then parts of a profiled step, then memory.
        interval_s: Predicted 90% interval of the step time, in seconds.
        interval_holds: True if the measured step time is inside the interval; None if the log has no times.
        difference_s: Predicted minus measured step time; None if the log has no times.
        parts: Parts of the predicted critical path, largest uncertainty in seconds first; empty if the log has no
            times.
        notes: Notes for the reader: the lines that were used, what was left out, and what a log cannot show.
        hypotheses: Changes of the job that bring the prediction closer to the log, likeliest first; None if none were
            tried, because the log agrees with the prediction or the job cannot be predicted again.
        memory_terms: Categories that could explain a measured peak outside of its interval, largest first.
        num_steps: Steps that count for the step time.
        source: Program that wrote the log, and the lines that were read; None for values that a person wrote.
        other_framework: Sentence, if the log is of another framework than the predicted job; empty otherwise.
    """

    rows: tuple[ComparisonRow, ...]
    interval_s: tuple[float, float]
    interval_holds: bool | None
    difference_s: float | None
    parts: tuple[UncertainTerm, ...]
    notes: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...] | None = None
    memory_terms: tuple[MemoryTerm, ...] = ()
    num_steps: int = 0
    source: str | None = None
    other_framework: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        document = asdict(self)
        for part, written in zip(self.parts, document["parts"], strict=True):
            written["std_s"] = part.std_s
        return {"schema_version": 1, "kind": "logged_comparison", **document}


def compare_logged(prediction: Mapping[str, Any], logged: LoggedRun, job: Job | None = None) -> LoggedComparison:
    """Compare a prediction with a log; the caller must know that both are for the same job.

    Args:
        prediction: JSON document of the prediction.
        logged: The log.
        job: Job of the prediction; None to take it from the document.

    Raises:
        SpecError: No field gives a step time or a peak, two fields contradict each other, the log has another batch, or
            a peak is impossible for the job.
    """
    _same_batch(prediction, logged)
    details = None
    if logged.recording is not None:
        job = job_of_prediction(prediction) if job is None else job
        logged, details = _of_recording(prediction, logged, logged.recording, job)
    predicted_s = prediction["step_time_s"]
    low_s, high_s = prediction["step_time_interval_s"]
    memory = tuple(memory_rows(prediction, logged.peaks))
    times_s = _step_times_s(prediction, logged)
    measured_s = statistics.median(times_s) if times_s else None
    gpu_rows = tuple(_gpu_rows(prediction, logged))
    rows = [*gpu_rows, *memory]
    if measured_s is not None:
        rows = [compared("step time", predicted_s, measured_s, "s", relative_spread(times_s)), *rows]
    if details is not None:
        rows += [*_throughput(prediction, logged, measured_s), *details.rows]
    holds = None if measured_s is None else low_s <= measured_s <= high_s
    longer_s = {row.name.partition(",")[0]: row.measured - row.predicted for row in gpu_rows}
    tried, tried_notes = _hypotheses(prediction, logged, MeasuredTotals(measured_s, longer_s=longer_s), holds, job)
    return LoggedComparison(
        rows=tuple(rows),
        interval_s=(low_s, high_s),
        interval_holds=holds,
        difference_s=None if measured_s is None else predicted_s - measured_s,
        parts=() if measured_s is None else _unsure_parts(prediction, measured_s - predicted_s),
        notes=(*_notes(prediction, logged, measured_s, details), *tried_notes),
        hypotheses=tried,
        memory_terms=memory_terms(prediction, logged.peaks),
        num_steps=len(times_s),
        source=logged.source,
        other_framework=_other_framework(prediction, logged),
    )


def _of_recording(
    prediction: Mapping[str, Any], logged: LoggedRun, recording: Recording, job: Job | None
) -> tuple[LoggedRun, RecordedDetails]:
    """The run without what another device makes different, and what its recording tells besides."""
    refuse_other_job(prediction, recording)
    if is_of_other_device(prediction, recording):
        keys = ("step_times_s", "step_numbers", "peak_reserved_gib", "peak_device_gib")
        logged = logged.model_copy(update=dict.fromkeys(keys))
    return logged, recorded_details(prediction, recording, job)


def _throughput(prediction: Mapping[str, Any], logged: LoggedRun, measured_s: float | None) -> Iterator[ComparisonRow]:
    number = logged.global_batch_size
    if number is not None and measured_s is not None:
        yield compared("throughput", number / prediction["step_time_s"], number / measured_s, "samples/s", None)


def _same_batch(prediction: Mapping[str, Any], logged: LoggedRun) -> None:
    problems = []
    for section, name in (("training", "global_batch_size"), ("model", "seq_len")):
        predicted, logged_value = prediction["inputs"][section].get(name), getattr(logged, name)
        if logged_value is not None and predicted is not None and logged_value != predicted:
            rule = f"is in the log, and the predicted job has {predicted}"
            fix = f"predict the job that was run ({section}.{name}: {logged_value})"
            problems.append(Problem(field=name, value=str(logged_value), rule=rule, fix=fix))
    if problems:
        raise SpecError(problems)


def _other_framework(prediction: Mapping[str, Any], logged: LoggedRun) -> str:
    """Sentence on a log of another framework than the predicted job; empty for the same, or for an unknown one."""
    profiles = _PROFILES_OF.get(logged.program or "", ())
    software = str(prediction["inputs"].get("software", "")).partition(",")[0]
    if not profiles or not catalog.is_name("software", software) or software.startswith(profiles):
        return ""
    return (
        f"the log is of {logged.program}, and the predicted job has software: {software}; it may be another job: "
        "predict the one that was run, from its launch script or configuration"
    )


def _step_times_s(prediction: Mapping[str, Any], logged: LoggedRun) -> tuple[float, ...]:
    """Times of the steady steps in seconds, from the most direct field; empty if the log has peaks only."""
    if logged.step_times_s is not None and logged.step_time_s is not None:
        raise SpecError(Problem(field="step_time_s", rule="says the same as step_times_s", fix="keep one of them"))
    if not logged.has_time:
        if logged.peaks:
            return ()
        fix = "write step_times_s: [2.41, 2.39, ...], step_time_s or tokens_per_s_per_device"
        raise SpecError(Problem(field="step_times_s", rule="is missing, and nothing else tells a time", fix=fix))
    steady = [logged.relative_times[index] for index in logged.steady.indices]
    told_s = None if logged.step_times_s is None and logged.step_time_s is None else statistics.median(steady)
    amounts = dict(_amounts(prediction, logged))
    for field, amount in amounts.items():
        rate = statistics.median(getattr(logged, field))
        follows_s = amount / rate
        if told_s is not None and abs(follows_s / told_s - 1) > _SAME_JOB:
            rule = (
                f"is a step of {format_time(follows_s)} in the predicted job, and the log has steps of "
                f"{format_time(told_s)}: another batch, sequence length or number of devices was run, or it is the "
                f"throughput of {'all devices' if field == 'tokens_per_s_per_device' else 'one device'}"
            )
            fix = "predict the job that was run" + ("" if logged.source else ", or remove one of the two")
            raise SpecError(Problem(field=field, value=f"{rate:g}", rule=rule, fix=fix))
    scale = 1.0 if told_s is not None else next(iter(amounts.values()))
    return tuple(scale * time for time in steady)


def _amounts(prediction: Mapping[str, Any], logged: LoggedRun) -> Iterator[tuple[str, float]]:
    """Yield fields of throughput, with what a step of the predicted job processes in their unit."""
    step_s = prediction["step_time_s"]
    if logged.tokens_per_s_per_device is not None:
        if not prediction["tokens_per_s_per_device"]:
            rule, fix = "is for models of tokens, and the predicted one has none", "write step_times_s"
            value = f"{logged.tokens_per_s_per_device[0]:g}"
            raise SpecError(Problem(field="tokens_per_s_per_device", value=value, rule=rule, fix=fix))
        yield "tokens_per_s_per_device", step_s * prediction["tokens_per_s_per_device"]
    if logged.samples_per_s is not None:
        yield "samples_per_s", float(prediction["inputs"]["training"]["global_batch_size"])


_BUSY = ("compute", "recompute", "optimizer")
_COMMUNICATION = ("exposed_communication", "wait")  # a communication kernel runs while it waits for a late rank


def _gpu_rows(prediction: Mapping[str, Any], logged: LoggedRun) -> Iterator[ComparisonRow]:
    """Yield parts of a profiled step, compared with those of the same rank, or the mean over ranks.

    Predicted waits (bubbles, late ranks) count as exposed communication.
    """
    gpu_time = logged.gpu_time
    if gpu_time is None:
        return
    ranks = [rank for rank in prediction["ranks"] if gpu_time.rank is None or rank["rank"] == gpu_time.rank]
    if not ranks:
        rule, fix = f"is none of the {len(prediction['ranks'])} ranks of the prediction", "predict the job that was run"
        raise SpecError(Problem(field="gpu_time.rank", value=str(gpu_time.rank), rule=rule, fix=fix))

    def predicted_s(*names: str) -> float:
        return statistics.fmean(sum(rank.get("split", {}).get(name, 0.0) for name in names) for rank in ranks)

    whose = "" if gpu_time.rank is None else f", rank {gpu_time.rank}"
    busy = _BUSY if gpu_time.idle_s is not None else (*_BUSY, "host")
    yield compared(f"compute{whose}", predicted_s(*busy), gpu_time.compute_s, "s", None)
    exposed_s = predicted_s(*_COMMUNICATION)
    yield compared(f"exposed communication{whose}", exposed_s, gpu_time.exposed_communication_s, "s", None)
    if gpu_time.idle_s is not None:
        yield compared(f"idle{whose}", predicted_s("host"), gpu_time.idle_s, "s", None)


def _hypotheses(
    prediction: Mapping[str, Any], logged: LoggedRun, measured: MeasuredTotals, holds: bool | None, job: Job | None
) -> tuple[tuple[Hypothesis, ...] | None, tuple[str, ...]]:
    """Hypotheses and notes on them, if the log lies outside of an interval."""
    peaks = {column: max(tried) for column, tried in logged.peaks.items()}
    outside = [column for column, peak in peaks.items() if not in_memory_interval(prediction, column, peak)]
    if holds is not False and not outside:
        return None, ()
    column = next(iter(outside or peaks), None)
    if column is not None:
        measured = replace(measured, column=column, peak_gib=peaks[column])
    job = job_of_prediction(prediction) if job is None else job
    tried = None if job is None else hypotheses(job, prediction["step_time_s"], measured)
    if tried is None:
        return None, (f"no hypotheses are tried: {_why_not_again(job)}",)
    return tried, (_TRACE_CONTRADICTS,) if measured.longer_s else ()


def _why_not_again(job: Job | None) -> str:
    """Reason why a job cannot be predicted again with one change each."""
    if job is None:
        return "the prediction does not have the settings of its software, so it cannot be predicted again"
    if job.cluster.cores_per_node is not None:
        return (
            "the prediction is of timings of this machine, which it does not contain, so it cannot be predicted again"
        )
    return (
        "predicted again without a calibration, the job takes another time: the prediction used one, which it does not "
        "contain, or another version of simplan made it"
    )


def _unsure_parts(prediction: Mapping[str, Any], longer_s: float) -> tuple[UncertainTerm, ...]:
    """Parts of the critical path with a cost estimate, most uncertain first; the measured step is longer by seconds."""
    timeline = predicted_timeline(prediction)
    activity = predicted_activity(timeline)
    rows = {rank: pieces_of(busy, timeline.step_time_s) for rank, busy in activity.items()}
    hidden_s = _hidden_s(timeline, rows)
    on_path_s = dict.fromkeys(((ActivityShare.EXPOSED_COMMUNICATION, part) for part in hidden_s), 0.0)
    for piece in critical_pieces(rows, timeline.step_time_s):
        key = piece.share, piece.part
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
    hidden_s: dict[tuple[str, int], float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind is SpanKind.COMMUNICATION:
            hidden_s[stream_words(span.stream), span.rank] += span.end_s - span.start_s
    for rank, pieces in rows.items():
        for piece in pieces:
            if piece.share is ActivityShare.EXPOSED_COMMUNICATION:
                hidden_s[piece.part, rank] -= piece.duration_s
    longest_s: dict[str, float] = {}
    for (part, _), seconds in hidden_s.items():
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


def _notes(
    prediction: Mapping[str, Any], logged: LoggedRun, measured_s: float | None, details: RecordedDetails | None
) -> Iterator[str]:
    if logged.source is not None:
        yield f"read: {logged.source}"
    if measured_s is not None:
        ratio = measured_s / prediction["step_time_s"]
        if _MILLISECONDS[0] <= ratio <= _MILLISECONDS[1]:
            yield f"the measured step time is {ratio:,.0f} times the predicted one: if the log is in ms, write seconds"
        yield from _left_out(logged)
    yield from logged.notes
    yield from memory_notes(prediction, logged.peaks)
    if measured_s is not None and prediction["reference_s"] is not None:
        yield (
            f"{'a log' if details is None else 'a recording'} does not say how fast the machine was: the prediction is "
            "not rescaled to its speed, as for a run"
        )
    if details is not None:
        yield from details.notes
        return
    if logged.gpu_time is not None:
        yield _WAITS
    else:
        yield (
            "a log has no timeline: which part made the difference, whether actions and collectives were those "
            "predicted and what was left unexplained only `simplan run` can say, which records them"
        )
    yield "that the log is of the predicted job cannot be checked"


def _left_out(logged: LoggedRun) -> Iterator[str]:
    """Yield which steps of the log do not count."""
    steady, number = logged.steady, len(logged.relative_times)
    if steady.num_warmup:
        first = "the first step is" if steady.num_warmup == 1 else f"the first {steady.num_warmup} steps are"
        last = logged.number_of(steady.num_warmup - 1)
        up_to = "" if last == steady.num_warmup else f" (up to step {last})"
        yield (
            f"{first} left out as warm-up{up_to}: more than {WARMUP_RATIO:g} times the median of the later half, and "
            "beyond its spread"
        )
    if steady.outliers:
        named = [_named_step(logged, index) for index in steady.outliers[:_MAX_NAMED]]
        more = len(steady.outliers) - len(named)
        rest = f" and {more} more" if more > 0 else ""
        noun = "step" if len(steady.outliers) == 1 else "steps"
        yield f"{noun} {', '.join(named)}{rest} left out: {OUTLIER_RATIO:g} times the median or more, or as much less"
    if number > 1:
        yield f"step time: median of {counted(len(steady.indices), 'steady step')}, of {number} in the log"


def _named_step(logged: LoggedRun, index: int) -> str:
    number = logged.number_of(index)
    cause = logged.interruptions.get(number)
    return f"{number} ({cause})" if cause else f"{number}"
