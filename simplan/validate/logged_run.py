"""A run as its log tells it: step times or throughput, memory peaks, and the shares of a profiled step."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from simplan.base import Count, Line, Natural, NonNegative, Positive, Spec
from simplan.document import parse_yaml
from simplan.errors import Problem, SpecError
from simplan.io import MAX_YAML_BYTES, parse_json
from simplan.problems import in_file_order, parse_model, validate
from simplan.runs.measurement import Measurement
from simplan.runs.recording import RECORDING_KIND, Recording
from simplan.units import GIB, counted
from simplan.validate.logged_memory import COLUMNS, Peaks
from simplan.validate.steady import SteadySteps, steady_steps


def _as_tuple(value: Any) -> Any:
    """Turn one number into a tuple of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


_OneOrMore = Annotated[tuple[Positive, ...], Field(min_length=1), BeforeValidator(_as_tuple)]
"""One number, or one per step or rank."""


class GpuTime(Spec):
    """Time of one GPU or CPU rank in a step, from a trace; the parts sum to the step, except for hidden communication.

    Attributes:
        compute_s: Kernels and copies other than communication, in seconds per step; on a CPU, all but exposed
            communication.
        exposed_communication_s: Communication kernels during which nothing computes, in seconds per step.
        hidden_communication_s: Communication kernels that overlap compute, in seconds per step.
        idle_s: No kernel runs, in seconds per step; None on a CPU, where Python between operators is compute.
        rank: Global rank of the trace; None if the trace does not name it.
    """

    compute_s: NonNegative
    exposed_communication_s: NonNegative
    hidden_communication_s: NonNegative
    idle_s: NonNegative | None = None
    rank: Natural | None = None


class LoggedRun(Spec):
    """A run as logged. One of the first four fields gives the step time; the others are optional.

    Attributes:
        step_times_s: Times of consecutive steps in seconds.
        step_time_s: Step time in seconds, for a log with one number only.
        tokens_per_s_per_device: Throughput of one device, one number or one per step. The batch of the predicted job
            gives the step time.
        samples_per_s: Throughput of all devices in sequences (or images) per second, one number or one per step.
        peak_allocated_gib: Peak of tensors in GiB (``torch.cuda.max_memory_allocated``).
        peak_reserved_gib: Peak of the caching allocator in GiB (``torch.cuda.max_memory_reserved``).
        peak_device_gib: Peak on the device in GiB (``nvidia-smi``).
        global_batch_size, seq_len: Sequences per step and tokens of a sequence, if the log has them; must be those of
            the predicted job.
        gpu_time: Time of one GPU or CPU rank in a step, from a trace.
        step_numbers: Numbers of the steps in the log; None for 1, 2, 3 and so on.
        interruptions: Step number -> what the log says before that step (``checkpoint``, ``evaluation``).
        program: Program that wrote the log (``Megatron-LM``); None for values that a person wrote.
        source: Program that wrote the log, and the lines that were read; None for values that a person wrote.
        notes: Remarks on what the numbers of the log contain, and on lines that were left out.
        recording: Recording of a user's loop (``executor.record``) that the values are of; None for a log.
    """

    schema_version: Literal[1] = 1
    step_times_s: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    step_time_s: Positive | None = None
    tokens_per_s_per_device: _OneOrMore | None = None
    samples_per_s: _OneOrMore | None = None
    peak_allocated_gib: _OneOrMore | None = None
    peak_reserved_gib: _OneOrMore | None = None
    peak_device_gib: _OneOrMore | None = None
    global_batch_size: Count | None = None
    seq_len: Count | None = None
    gpu_time: GpuTime | None = None
    step_numbers: tuple[Natural, ...] | None = None
    interruptions: dict[int, Line] = Field(default_factory=dict)
    program: Line | None = None
    source: Line | None = None
    notes: tuple[Line, ...] = ()
    recording: Recording | None = None

    @classmethod
    def of_recording(cls, recording: Recording) -> LoggedRun:
        """Times and peaks of a recording."""
        facts, ranks = recording.environment, recording.ranks
        device = facts.get("device") or "an unknown device"
        peaks: dict[str, Any] = {
            f"peak_{column}_gib": tuple(peak_bytes / GIB for peak_bytes in peaks_bytes if peak_bytes)
            for column in COLUMNS
            if all(peaks_bytes := [getattr(rank.peak_memory, f"{column}_bytes") for rank in ranks])
        }
        numbers = range(recording.first_step, recording.first_step + len(recording.step_times_s))
        return cls(
            step_times_s=recording.step_times_s,
            step_numbers=tuple(numbers),
            global_batch_size=recording.samples_per_step,
            source=f"recording of {counted(len(ranks), 'rank')} on {device}, torch {facts.get('torch', 'unknown')}",
            recording=recording,
            **peaks,
        )

    @property
    def peaks(self) -> Peaks:
        """Logged peaks by column."""
        by_column = {column: getattr(self, f"peak_{column}_gib") for column in COLUMNS}
        return {column: peaks for column, peaks in by_column.items() if peaks is not None}

    @property
    def has_time(self) -> bool:
        """True if a field gives the step time."""
        times = (self.step_times_s, self.step_time_s, self.tokens_per_s_per_device, self.samples_per_s)
        return any(field is not None for field in times)

    @property
    def relative_times(self) -> tuple[float, ...]:
        """Times of consecutive steps, in seconds or in a unit that the batch of the job turns into seconds."""
        if self.step_times_s is not None:
            return self.step_times_s
        if self.step_time_s is not None:
            return (self.step_time_s,)
        rates = self.tokens_per_s_per_device or self.samples_per_s or ()
        return tuple(1 / rate for rate in rates)

    @cached_property
    def steady(self) -> SteadySteps:
        """Choice of the steady steps; only with a time."""
        return steady_steps(self.relative_times)

    def number_of(self, index: int) -> int:
        """Number of a step in the log."""
        return index + 1 if self.step_numbers is None else self.step_numbers[index]


YAML_SUFFIXES = (".yaml", ".yml")
_WHICH_MEMORY = (
    "peak_reserved_gib (what torch's allocator holds), peak_allocated_gib (tensors) or peak_device_gib (nvidia-smi)"
)
_OTHER_WORDS = {
    "step_times_s": "step_times steps times_s",
    "step_time_s": "step_time iteration_time iteration_time_s seconds_per_step time_per_step_s",
    "step_time_s, in seconds": "step_time_ms iteration_time_ms elapsed_time_per_iteration_ms step_times_ms",
    "tokens_per_s_per_device": "tps tgs tokens_per_second_per_gpu tokens_per_s_per_gpu tokens_per_gpu_per_second",
    "tokens_per_s_per_device, a device's share": "tokens_per_s tokens_per_second throughput",
    "samples_per_s": "samples_per_second samples_per_sec train_samples_per_second sequences_per_s",
    "step_time_s or tokens_per_s_per_device, since frameworks count FLOPs differently": "mfu hfu tflops",
    _WHICH_MEMORY: "peak_memory_gib peak_memory memory memory_gib max_memory_gib memory_kind",
    "peak_reserved_gib": "max_memory_reserved reserved_gib",
    "peak_allocated_gib": "max_memory_allocated allocated_gib",
    f"{_WHICH_MEMORY}; a GiB is 1.0737 GB": "peak_memory_gb memory_gb peak_allocated_gb peak_reserved_gb",
}


def parse_measured(text: str, file: str) -> Measurement | LoggedRun:
    """Parse a measurement, a recording, or values of a log that a person wrote, if the text contains no job.

    Args:
        text: JSON; YAML if the file name ends in .yaml or .yml.
        file: File name, also used in errors.

    Raises:
        SpecError: The text is none of them.
    """
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
    if data.get("kind") == RECORDING_KIND:
        return LoggedRun.of_recording(parse_model(Recording, data, lines, file))
    if "job" in data:
        return parse_model(Measurement, data, lines, file)
    logged, problems = validate(LoggedRun, data, lines, elsewhere=_where())
    if logged is None:
        raise SpecError(sorted(problems, key=in_file_order), file=file)
    numbers = logged.step_numbers
    if numbers is not None and len(numbers) != len(logged.relative_times):
        rule, fix = f"must have one number per step, {len(logged.relative_times)}", "remove step_numbers"
        raise SpecError(Problem(field="step_numbers", rule=rule, fix=fix), file=file)
    return logged


def _where() -> dict[str, str]:
    return {word: key for key, words in _OTHER_WORDS.items() for word in words.split()}


def _refuse_other_files(data: dict[str, Any], file: str) -> None:
    """Raise a specific error for files that are likely given by mistake."""
    if data.get("kind") == "prediction":
        rule = "is a prediction"
        fix = (
            "`simplan report FIRST.json SECOND.json` compares two predictions, and `simplan explain FIRST.yaml "
            "SECOND.yaml` their scenarios term by term; for a run, give its log or measurement.json"
        )
    elif "runs" in data and "meta" in data:
        rule, fix = "holds published runs", "`simplan accuracy` predicts them and compares"
    elif "model" in data and "cluster" in data:
        rule, fix = "is a scenario", "give the log of a run, or its measurement.json"
    else:
        return
    raise SpecError(Problem(field="", rule=rule, fix=fix), file=file)
