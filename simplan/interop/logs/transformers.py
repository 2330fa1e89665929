"""Logs of the Hugging Face Trainer: ``trainer_state.json``, results in JSON, and what it prints.

``speed_metrics`` divides the whole run by its steps (transformers 5, trainer_utils.py): warm-up, evaluation and
checkpoints are inside. ``train_steps_per_second`` has three decimals, so the runtime and the number of steps are
preferred.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simplan.errors import SpecError, file_error
from simplan.interop.logs.reading import LogReading, number

_TITLE = "the Hugging Face Trainer"
_CONTAINS = "the time of the Trainer is that of the whole run: warm-up, evaluation and checkpoints are inside"
_METRIC = re.compile(
    r"train_(runtime|samples_per_second|steps_per_second)['\"]?\s{0,40}[:=]\s{0,9}['\"]?(\d[\d.:]{0,40})"
)
_GLOBAL_STEP = re.compile(r"global_step['\"]?\s{0,9}[=:]\s{0,9}(\d{1,12})\b")
_BAR = re.compile(r"\|\s{0,20}(\d{1,12})/(\d{1,12})\s{0,9}\[((?:\d{1,6}:)?\d{1,3}:\d\d)<")
_TOTAL = re.compile(r"Total optimization steps\s{0,40}=\s{0,9}([\d,]{1,15})")
_BATCH = re.compile(r"Total train batch size \(w\. parallel, distributed & accumulation\)\s{0,40}=\s{0,9}([\d,]{1,12})")


def is_state(data: Mapping[str, Any]) -> bool:
    """True for the JSON of ``trainer_state.json`` or ``all_results.json``."""
    return isinstance(data.get("log_history"), list) or "train_runtime" in data


def read_state(data: Mapping[str, Any], file: str) -> LogReading:
    """Read ``trainer_state.json``, ``train_results.json`` or ``all_results.json``.

    Raises:
        SpecError: The file has no times, because the run had not ended, or does not say how many steps were made.
    """
    history = [entry for entry in data.get("log_history") or [] if isinstance(entry, dict)]
    ended = next((entry for entry in reversed(history) if "train_runtime" in entry), data)
    runtime_s, steps_per_s = (_number(ended.get(f"train_{name}")) for name in ("runtime", "steps_per_second"))
    steps = _number(ended.get("step")) or _number(data.get("global_step"))
    found = _reading("`train_runtime`", runtime_s, steps, steps_per_s)
    if found is None:
        raise _without_times(file, runtime_s)
    return found


def read(text: str) -> LogReading | None:
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
        found = _reading("`train_runtime`", runtime_s, steps, number(metrics.get("steps_per_second", "")))
        return None if found is None else _with_batch(found, text)
    if "Running training" not in text and "'loss'" not in text:
        return None  # any program may draw a progress bar
    done, _, seconds = max(bars, default=(0, 0, 0.0))
    if not done or not seconds:
        return None
    found = _reading("the last progress bar", seconds, float(done), 0.0)
    return None if found is None else _with_batch(found, text)


def _with_batch(found: LogReading, text: str) -> LogReading:
    sizes = {int(number(size)) for size in _BATCH.findall(text)}
    if len(sizes) != 1 or not min(sizes):
        return found
    others = {**found.others, "global_batch_size": sizes.pop()}
    return LogReading(found.title, found.lines, others=others, notes=found.notes)


def _reading(lines: str, runtime_s: float, steps: float, steps_per_s: float) -> LogReading | None:
    """Reading of one time, from the runtime and the number of steps, else from steps per second."""
    if runtime_s > 0 and steps >= 1:
        words = f"{lines} over {steps:,.0f} steps"
        return LogReading(_TITLE, words, others={"step_time_s": runtime_s / steps}, notes=(_CONTAINS,))
    if steps_per_s <= 0:
        return None
    rounded = f"`train_steps_per_second` has three decimals, so the time is known to {0.05 / steps_per_s:.2g} %"
    others = {"step_time_s": 1 / steps_per_s}
    return LogReading(_TITLE, "`train_steps_per_second`", others=others, notes=(_CONTAINS, rounded))


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
