"""Reader of measured runs: the output of ``simplan run``, or figures of a log written by hand."""

from __future__ import annotations

from typing import Any

from simplan.document import parse_yaml
from simplan.errors import Problem, SpecError
from simplan.io import MAX_YAML_BYTES, parse_json
from simplan.problems import in_file_order, parse_model, validate
from simplan.runs.measurement import Measurement
from simplan.validate.logged import LoggedRun

__all__ = ["YAML_SUFFIXES", "parse_measured"]

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
