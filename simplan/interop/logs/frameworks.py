"""Logs of training frameworks in text: Megatron-LM, torchtitan, NeMo, DeepSpeed and the Hugging Face Trainer.

Megatron-LM, and programs with its iteration lines (Megatron Bridge, Megatron-DeepSpeed, GPT-NeoX, Primus):
``training_log`` prints the mean time of the iterations since the previous line, and ``report_memory`` allocated and
reserved bytes in units of 1024 x 1024, which it calls MB (NVIDIA/Megatron-LM, megatron/training/training.py and
utils.py). Megatron Bridge adds a line ``Step Time``.

torchtitan divides tokens by the size of the non-data-parallel mesh, so ``tps`` (``wps`` before November 2024) is per
device. ``memory`` is ``reserved_bytes.all.peak``, which is reset at every line (torchtitan 0.3, components/metrics.py).

NeMo: ``train_step_timing in s`` in progress bars (NeMo 1) or in lines (NeMo 2), in seconds. Without it, bars of NeMo 1
have the steps of an epoch and their time (NVIDIA/NeMo-Framework-Launcher, issue 55, 2023). ``max_memory_allocated``
and ``max_memory_reserved`` are bytes. ``peak_memory_usage`` does not say which of both it is.

DeepSpeed's throughput timer runs from the forward of a step to the end of its update, so it leaves out the time between
steps; time stamps of its lines do not. Its samples are those of all devices, and ``CurrSamplesPerSec`` is of one step.
All GB are 1024^3 bytes, and peaks are of allocated memory; ``Max_CA`` is of reserved memory, in whole GiB (DeepSpeed
0.19.8, utils/timer.py and runtime/utils.py). Reports before the first step are those of the set-up, and do not count.

``speed_metrics`` of the Trainer divides the whole run by its steps (transformers 5, trainer_utils.py): warm-up,
evaluation and checkpoints are inside. ``train_steps_per_second`` has three decimals, so the runtime and the number of
steps are preferred.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from simplan.errors import SpecError, file_error
from simplan.interop.logs.reading import LoggedStep, LogReading, each_once, lines_with, number, typical
from simplan.units import GIB, counted

_ITERATION = re.compile(
    r"iteration\s{0,20}=?\s{0,20}(\d{1,12})\s{0,20}/\s{0,20}\d{1,12}\s{0,20}\|(?:(?!\biteration[\s=])[^\x00]){0,300}?"
    r"elapsed[\s_]{1,20}time[\s_]{1,20}per[\s_]{1,20}iteration[\s_]{0,20}\(?(ms|s)\)?\s{0,20}[:=]\s{0,20}(\d[\d.]{0,40})"
)
_STEP_TIME = re.compile(r"Step Time\s{0,9}:\s{0,9}(\d[\d.]{0,40})\s{0,9}s\s{1,9}GPU utilization")
_MEGATRON_MEMORY = re.compile(
    r"\[Rank (\d{1,7})\][^\n|]{0,80}memory \((MB|GB)\)[^\n]{0,80}?\bmax allocated: (\d[\d.]*)"
    r"(?:[^\n]{0,80}?\bmax (?:reserved|cached): (\d[\d.]*))?"
)
_AFTER_ITERATION = {
    "global_batch_size": re.compile(r"global[\s_]{1,20}batch[\s_]{1,20}size\s{0,20}[:=]\s{0,20}(\d{1,9})"),
    "seq_len": re.compile(r"actual\s{1,20}seqlen\s{0,20}:\s{0,20}(\d{1,9})"),
    "samples_per_s": re.compile(r"samples\s{1,20}per\s{1,20}second\s{0,20}:\s{0,20}(\d[\d.]*)"),
    "tokens_per_s_per_device": re.compile(
        r"(?:tokens per gpu per second \(tgs\)|tokens/sec/GPU|\(Tok/s/GPU\)|\(tokens/s/GPU\))\s*:\s*(\d[\d.]*)", re.I
    ),
}
_ITERATION_WORD = re.compile(r"\biteration[\s=]")
_MAX_LINE = 800  # characters of a line of Megatron-LM up to the time, with white space, and after it
_MIB_PER_GIB = 1024.0

_TORCHTITAN_STEP = re.compile(
    r"(?<!validate )\bstep:\s{0,20}(\d{1,12})\b[^\n]{0,300}?"
    r"(?:\bm?memory:\s{0,20}(\d[\d.]{0,20})\s{0,9}GiB[^\n]{0,80}?)?\b(?:tps|wps):\s{0,20}(\d[\d,.]*)"
)
_TORCHTITAN_SIZES = {
    "global_batch_size": re.compile(r"\bglobal batch size (\d{1,9})\b"),
    "seq_len": re.compile(r"\bsequence length (\d{1,9})\b"),
}

_NEMO_TIMING = re.compile(r"train_step_timing in s\s*[:=]\s*(\d[\d.]*(?:e[+-]?\d{1,3})?)")
_NEMO_NUMBERS = (
    re.compile(r"\biteration\s+(\d{1,12})\s*/"),
    re.compile(r"\|\s*(\d{1,12})/(?:\d{1,12}|\?)\s*\["),
    re.compile(r"global_step\s*[:=]\s*(\d[\d.]*(?:e[+-]?\d{1,2})?)"),
)
_NEMO_PEAKS = {
    "peak_allocated_gib": re.compile(r"max_memory_allocated\s*[:=]\s*(\d[\d.]*)"),
    "peak_reserved_gib": re.compile(r"max_memory_reserved\s*[:=]\s*(\d[\d.]*)"),
}
_NEMO_BATCH = re.compile(r"global_batch_size\s*[:=]\s*(\d{1,9})\b")
_NEMO_TOKENS = re.compile(r"tokens_per_sec_per_gpu\s*[:=]\s*(\d[\d.]*(?:e[+-]?\d{1,2})?)")
_NEMO_UNSAID = "peak_memory_usage"

_TIMER = re.compile(
    r"(?:global_step=|\b\d{1,9}/)(\d{1,12}), (?:RunningAvgSamplesPerSec=(\d[\d.]*), Curr)?SamplesPerSec=(\d[\d.]*)"
)
_PIPELINE = re.compile(r"\bsteps?:\s*(\d{1,12})\b[^\n]{0,200}?\biter time \(s\): (\d[\d.]*) samples/sec: (\d[\d.]*)")
_DEEPSPEED_PEAKS = {
    "peak_allocated_gib": re.compile(r"\bMaxMemAllocated=(\d[\d.]*)GB|\bMax_MA (\d[\d.]*) GB"),
    "peak_reserved_gib": re.compile(r"\bMax_CA (\d[\d.]*) GB"),
}
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\]")
_FEWEST = 3  # steps of which a median is better than the running mean

_TRAINER = "the Hugging Face Trainer"
_TRAINER_CONTAINS = "the time of the Trainer is that of the whole run: warm-up, evaluation and checkpoints are inside"
_METRIC = re.compile(
    r"train_(runtime|samples_per_second|steps_per_second)['\"]?\s{0,40}[:=]\s{0,9}['\"]?(\d[\d.:]{0,40})"
)
_GLOBAL_STEP = re.compile(r"global_step['\"]?\s{0,9}[=:]\s{0,9}(\d{1,12})\b")
_BAR = re.compile(r"\|\s{0,20}(\d{1,12})/(\d{1,12})\s{0,9}\[((?:\d{1,6}:)?\d{1,3}:\d\d)<")
_TOTAL = re.compile(r"Total optimization steps\s{0,40}=\s{0,9}([\d,]{1,15})")
_TRAINER_BATCH = re.compile(
    r"Total train batch size \(w\. parallel, distributed & accumulation\)\s{0,40}=\s{0,9}([\d,]{1,12})"
)


def _read_megatron(text: str) -> LogReading | None:
    """Read iteration lines and memory reports; None if there are none."""
    candidates = (_ITERATION.match(text, at.start(), at.start() + _MAX_LINE) for at in _ITERATION_WORD.finditer(text))
    matches = [match for match in candidates if match is not None]
    scales = {"ms": 1e-3, "s": 1.0}
    steps = each_once([LoggedStep(int(m[1]), number(m[3]) * scales[m[2]], m.start(), m.end()) for m in matches])
    is_bridge = _STEP_TIME.search(text) is not None
    lines = "`elapsed time per iteration`"
    notes: tuple[str, ...] = ()
    if not steps and is_bridge:
        printed = enumerate(_STEP_TIME.finditer(text), 1)
        steps = each_once([LoggedStep(place, number(m[1]), m.start(), m.end()) for place, m in printed])
        lines, notes = "`Step Time`", ("the log has step times to 10 ms only",)
    peaks = _megatron_peaks(text)
    if not steps and not peaks:
        return None
    if not steps:
        lines = "memory reports"
    title = "Megatron Bridge" if is_bridge else "Megatron-LM"
    following = [*(step.start for step in steps[1:]), len(text)]
    rows = [_after(text[step.end : min(following[at], step.end + _MAX_LINE)]) for at, step in enumerate(steps)]
    batch = next((row["global_batch_size"] for row in reversed(rows) if "global_batch_size" in row), None)
    kept = [index for index, row in enumerate(rows) if row.get("global_batch_size", batch) == batch]
    if len(kept) < len(steps):
        notes += (f"{counted(len(steps) - len(kept), 'line')} with a smaller batch left out: the batch ramps up",)
    others = _common([rows[index] for index in kept])
    return LogReading(title, lines, "step_times_s", [steps[index] for index in kept], {**peaks, **others}, notes)


def _after(line: str) -> dict[str, float]:
    """Batch, sequence length and throughput in the line of a step."""
    return {name: number(match[1]) for name, pattern in _AFTER_ITERATION.items() if (match := pattern.search(line))}


def _common(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Sizes that all lines have, and typical throughputs."""
    fields: dict[str, Any] = {}
    for name in _AFTER_ITERATION:
        values = [row[name] for row in rows if row.get(name, 0.0) > 0]
        if not values:
            continue
        if name in ("global_batch_size", "seq_len"):
            fields |= {name: int(values[0])} if len({*values}) == 1 else {}
        elif (rate := typical(values)) is not None:
            fields[name] = (rate,)
    return fields


def _megatron_peaks(text: str) -> dict[str, Any]:
    """Peaks of the rank that needs most, over all reports."""
    peaks = {"peak_allocated_gib": 0.0, "peak_reserved_gib": 0.0}
    bounds = lines_with(text, " max allocated: ")
    for m in (m for start, end in bounds for m in _MEGATRON_MEMORY.finditer(text, start, end)):
        for name, peak in zip(peaks, (m[3], m[4] or "0"), strict=True):
            peaks[name] = max(peaks[name], number(peak) / (_MIB_PER_GIB if m[2] == "MB" else 1.0))
    return _known(peaks)


def _read_torchtitan(text: str) -> LogReading | None:
    """Read the lines of steps; None if there are none."""
    bounds = sorted({*lines_with(text, "tps:"), *lines_with(text, "wps:")})
    matches = [m for start, end in bounds if (m := _TORCHTITAN_STEP.search(text, start, end)) is not None]
    steps = _steps(matches, value=3)
    if not steps:
        return None
    others = _known({"peak_reserved_gib": max((number(m[2]) for m in matches if m[2]), default=0.0)})
    for name, pattern in _TORCHTITAN_SIZES.items():
        if size := pattern.search(text):
            others[name] = max(1, int(size[1]))
    return LogReading("torchtitan", "`tps`", "tokens_per_s_per_device", steps, others)


def _read_nemo(text: str) -> LogReading | None:
    """Read the lines with step timings; None if there are none."""
    steps: list[LoggedStep] = []
    others: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    tokens = []
    for start, end in lines_with(text, "train_step_timing in s"):
        line = text[start:end]
        if timing := _NEMO_TIMING.search(line):
            place = next((match for pattern in _NEMO_NUMBERS if (match := pattern.search(line))), None)
            step = len(steps) + 1 if place is None else int(number(place[1]))
            steps.append(LoggedStep(step, number(timing[1]), start, end))
            for field, pattern in _NEMO_PEAKS.items():
                if match := pattern.search(line):
                    peaks[field] = max(peaks.get(field, 0.0), number(match[1]) / GIB)
            if match := _NEMO_BATCH.search(line):
                others["global_batch_size"] = max(1, int(match[1]))
            if match := _NEMO_TOKENS.search(line):
                tokens.append(number(match[1]))
    kept = each_once(steps)
    if not kept:
        return _nemo_bars(text)
    if (rate := typical(tokens)) is not None:
        others["tokens_per_s_per_device"] = (rate,)
    others |= _known(peaks)
    notes: tuple[str, ...] = ()
    if _NEMO_UNSAID in text:
        notes = (f"{_NEMO_UNSAID} is left out: the log does not say if it is of tensors or of the allocator",)
    return LogReading("NeMo", "`train_step_timing in s`", "step_times_s", kept, others, notes)


def _nemo_bars(text: str) -> LogReading | None:
    """Read progress bars of NeMo 1 without step timings, by the time and the steps between two bars of an epoch."""
    lines = lines_with(text, "reduced_train_loss=")
    bars = [(int(m[1]), _seconds(m[3])) for start, end in lines if (m := _BAR.search(text, start, end)) is not None]
    ahead = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise([(0, 0.0), *bars])]
    pairs = [pair for pair in (ahead[1:] or ahead) if min(pair) >= 0]  # the first bar has the set-up in it
    steps, seconds = (sum(values) for values in zip(*pairs, strict=True)) if pairs else (0, 0)
    if not steps or not seconds:
        return None
    words = f"the times of progress bars over {steps:,} steps"
    contains = "progress bars have whole seconds, and validation and checkpoints are inside"
    return LogReading("NeMo", words, others={"step_time_s": seconds / steps}, notes=(contains,))


def _read_deepspeed(text: str) -> LogReading | None:
    """Read the lines of both timers; None if there are none."""
    pipeline, timer = _matches(text, "iter time (s)", _PIPELINE), _matches(text, "SamplesPerSec=", _TIMER)
    trains_from = min((m.start() for m in (*pipeline[:1], *timer[:1])), default=len(text))
    peaks = {
        name: max((number(m[m.lastindex or 0]) for m in pattern.finditer(text, trains_from)), default=0.0)
        for name, pattern in _DEEPSPEED_PEAKS.items()
    }
    others = _known(peaks)
    if steps := _steps(pipeline, value=2):
        rate = typical([number(m[3]) for m in pipeline])
        others |= {} if rate is None else {"samples_per_s": (rate,)}
        return LogReading("DeepSpeed", "`iter time (s)`", "step_times_s", steps, others)
    return _timer(text, timer, others)


def _matches(text: str, literal: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Matches of a pattern in the lines that contain a text, one a line."""
    return [m for start, end in lines_with(text, literal) if (m := pattern.search(text, start, end)) is not None]


def _steps(matches: Iterable[re.Match[str]], value: int) -> tuple[LoggedStep, ...]:
    """Steps of matches with the number of the step in the first group, and the value in another."""
    return each_once([LoggedStep(int(m[1]), number(m[value]), m.start(), m.end()) for m in matches])


def _known(peaks: Mapping[str, float]) -> dict[str, Any]:
    """Peaks in GiB that a log has, one for the only rank."""
    return {name: (peak,) for name, peak in peaks.items() if peak > 0}


def _timer(text: str, matches: Sequence[re.Match[str]], others: dict[str, Any]) -> LogReading | None:
    steps = _steps(matches, value=3)
    if not steps:
        return None
    last = next(m for m in reversed(matches) if int(m[1]) in {step.number for step in steps})
    timed = () if last[2] is None else _between_lines(text, steps)
    if len(timed) >= _FEWEST:
        words = "DeepSpeed's timer leaves out the time between steps: the times of its lines are used in its place"
        return LogReading("DeepSpeed", "the times of the lines", "step_times_s", timed, others, (words,))
    notes = ["DeepSpeed's timer runs from the forward of a step to its update: time between steps is left out"]
    if last[2] is None:
        notes.append("`SamplesPerSec` is a running mean: the last one is used")
        notes.append("old versions of DeepSpeed count every microbatch as a step where gradients are accumulated")
    if last[2] is None or len(steps) < _FEWEST:
        rate = number(last[2] or last[3])
        lines = "`SamplesPerSec`" if last[2] is None else "`RunningAvgSamplesPerSec`"
        others |= {"samples_per_s": (rate,)} if rate > 0 else {}
        return LogReading("DeepSpeed", f"the last {lines}", others=others, notes=tuple(notes))
    return LogReading("DeepSpeed", "`CurrSamplesPerSec`", "samples_per_s", steps, others, tuple(notes))


def _between_lines(text: str, steps: Sequence[LoggedStep]) -> tuple[LoggedStep, ...]:
    """Seconds per step since the previous line, by the time stamps of the lines; empty unless all lines have one."""
    times = [_stamp(text, step) for step in steps]
    timed_steps = []
    for (before, start), (step, end) in pairwise(zip(steps, times, strict=True)):
        if start is None or end is None or end <= start or step.number <= before.number:
            return ()
        seconds = (end - start).total_seconds() / (step.number - before.number)
        timed_steps.append(LoggedStep(step.number, seconds, step.start, step.end))
    return tuple(timed_steps)


def _stamp(text: str, step: LoggedStep) -> datetime | None:
    """Time stamp in front of a step in its line; None without one."""
    stamps = _STAMP.findall(text, text.rfind("\n", 0, step.start) + 1, step.start)
    try:
        return datetime.strptime(stamps[-1], "%Y-%m-%d %H:%M:%S,%f") if stamps else None
    except ValueError:
        return None


def is_trainer_state(data: Mapping[str, Any]) -> bool:
    """True for the JSON of ``trainer_state.json`` or ``all_results.json``."""
    return isinstance(data.get("log_history"), list) or "train_runtime" in data


def read_trainer_state(data: Mapping[str, Any], file: str) -> LogReading:
    """Read ``trainer_state.json``, ``train_results.json`` or ``all_results.json``.

    Raises:
        SpecError: The file has no times, because the run had not ended, or does not say how many steps were made.
    """
    history = [entry for entry in data.get("log_history") or [] if isinstance(entry, dict)]
    ended = next((entry for entry in reversed(history) if "train_runtime" in entry), data)
    runtime_s, steps_per_s = (_number(ended.get(f"train_{name}")) for name in ("runtime", "steps_per_second"))
    steps = _number(ended.get("step")) or _number(data.get("global_step"))
    reading = _trainer_reading("`train_runtime`", runtime_s, steps, steps_per_s)
    if reading is None:
        raise _without_times(file, runtime_s)
    return reading


def _read_trainer(text: str) -> LogReading | None:
    """Read what the Trainer prints; None if it prints no times."""
    metrics = dict(_METRIC.findall(text))  # the last one of each
    bars = [(int(m[1]), int(m[2]), _seconds(m[3])) for m in _BAR.finditer(text)]
    whole = [(done, seconds) for done, total, seconds in bars if done == total]
    steps = next((number(m) for m in reversed(_GLOBAL_STEP.findall(text))), 0.0)
    steps = steps or next((number(m) for m in reversed(_TOTAL.findall(text))), 0.0)
    runtime_s = _seconds(metrics.get("runtime", ""))
    if "runtime" in metrics:
        if not steps:  # evaluation has bars of its own
            near = [done for done, seconds in whole if abs(seconds - runtime_s) <= 2 + 0.02 * runtime_s]
            steps = float(near[-1]) if near else 0.0
        reading = _trainer_reading("`train_runtime`", runtime_s, steps, number(metrics.get("steps_per_second", "")))
        return None if reading is None else _with_batch(reading, text)
    if "Running training" not in text and "'loss'" not in text:
        return None  # any program may draw a progress bar
    done, _, seconds = max(bars, default=(0, 0, 0.0))
    if not done or not seconds:
        return None
    reading = _trainer_reading("the last progress bar", seconds, float(done), 0.0)
    return None if reading is None else _with_batch(reading, text)


def _with_batch(reading: LogReading, text: str) -> LogReading:
    sizes = {int(number(size)) for size in _TRAINER_BATCH.findall(text)}
    if len(sizes) != 1 or not min(sizes):
        return reading
    others = {**reading.others, "global_batch_size": sizes.pop()}
    return LogReading(reading.title, reading.lines, others=others, notes=reading.notes)


def _trainer_reading(lines: str, runtime_s: float, steps: float, steps_per_s: float) -> LogReading | None:
    """Reading of one time, from the runtime and the number of steps, else from steps per second."""
    if runtime_s > 0 and steps >= 1:
        words = f"{lines} over {steps:,.0f} steps"
        return LogReading(_TRAINER, words, others={"step_time_s": runtime_s / steps}, notes=(_TRAINER_CONTAINS,))
    if steps_per_s <= 0:
        return None
    rounded = f"`train_steps_per_second` has three decimals, so the time is known to {0.05 / steps_per_s:.2g} %"
    others = {"step_time_s": 1 / steps_per_s}
    return LogReading(_TRAINER, "`train_steps_per_second`", others=others, notes=(_TRAINER_CONTAINS, rounded))


def _number(value: Any) -> float:
    """Number of a JSON value; newer versions of the Trainer write text."""
    if isinstance(value, str):
        return number(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value < 1e18 else 0.0


def _seconds(text: str) -> float:
    """Seconds of ``1:20:35`` or ``4835.17``.

    >>> _seconds("1:20:35"), _seconds("0:03:45.80"), _seconds("225.8")
    (4835.0, 225.8, 225.8)
    """
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + number(part)
    return seconds


def _without_times(file: str, runtime_s: float) -> SpecError:
    rule = "has no train_runtime: the run had not ended, and log_history has no times of steps"
    if runtime_s > 0:  # huggingface/transformers pull request 11818
        rule = (
            "has neither a number of steps nor train_steps_per_second, and train_samples_per_second of versions before "
            "4.7 counts steps"
        )
    return file_error(file, rule, "give the printed log, or write step_time_s into a YAML file")


READERS = (_read_megatron, _read_torchtitan, _read_nemo, _read_deepspeed, _read_trainer)
"""Readers of text, those whose times are of single steps and of whole steps first; each gives None for other logs."""
