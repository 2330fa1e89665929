"""Uploaded files: small, read as data by simplan's readers, and never stored.

All functions raise a SpecError for a file that is too large, no UTF-8 text, or of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplan.accuracy.reading import ReadFile, parse_published
from simplan.document import parse_yaml
from simplan.documentation import documentation
from simplan.errors import Problem, SpecError
from simplan.interop.formats import ConfigFile, read_configuration
from simplan.interop.huggingface import model_fields_from_config
from simplan.interop.logs.formats import parse_run
from simplan.io import MAX_YAML_BYTES, parse_json
from simplan.runs.measurement import Measurement
from simplan.scenario import parse_scenario, parse_search, read_source
from simplan.validate.logged_run import LoggedRun
from simplan.validate.prediction_file import parse_prediction

MAX_BYTES = 32 * 2**20
MAX_CONFIG_BYTES = 2 * 2**20
CONFIG_SUFFIXES = ["yaml", "yml", "json", "toml", "sh", "sbatch", "slurm", "txt", "py"]
"""Files that scenarios and configurations of frameworks are in."""
_MAX_CHARS = 80


def text_of(name: str, content: bytes, max_bytes: int = MAX_BYTES, *, kind: str = "a file that simplan wrote") -> str:
    """Text of a file of a kind."""
    try:
        return _small(name, content, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        problem = Problem(field=name, rule="is not UTF-8 text", fix=f"drop {kind}")
        raise SpecError(problem, file=name) from None


def _small(name: str, content: bytes, max_bytes: int) -> bytes:
    if len(content) > max_bytes:
        raise SpecError(Problem(field="", rule=f"is larger than {max_bytes // 2**20} MiB"), file=name)
    return content


def config_fields(name: str, content: bytes, seq_len: int) -> dict[str, Any]:
    """A Hugging Face ``config.json`` as the section ``model`` of a scenario, for sequences of ``seq_len`` tokens."""
    config = parse_json(text_of(name, content, MAX_CONFIG_BYTES, kind="the config.json of a Hugging Face model"), name)
    title = config.get("_name_or_path")
    title = title[:_MAX_CHARS] if isinstance(title, str) and title else "own model"
    return model_fields_from_config(config, name=title, seq_len=seq_len)


def as_scenario(name: str, content: bytes, current: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Text of a scenario, and sentences on what a framework's file says; a scenario file as it is.

    Args:
        name: Name of the file.
        content: Scenario, launch script or configuration of a framework.
        current: Scenario of the session, whose values stand in for what the file does not say.
    """
    text = text_of(name, content, MAX_YAML_BYTES, kind="a scenario file, or the configuration of a framework")
    file = ConfigFile(Path(name), text, reads_others=False)
    configuration = read_configuration(file)
    if configuration is None:
        return text, ()
    overrides: dict[str, Any] = {}
    for missing in configuration.missing:
        section, _, key = missing.keys[0].partition(".")
        values, said = current.get(section), configuration.document.data.get(section, {})
        if isinstance(values, dict):
            chosen = {key: values[key]} if key in values and key != "preset" else values
            overrides |= {f"{section}.{name}": value for name, value in chosen.items() if name not in said}
    if {"num_devices", "num_nodes"} & configuration.document.data.get("cluster", {}).keys():
        overrides = {
            key: overrides[key] for key in overrides if key not in ("cluster.num_nodes", "cluster.num_devices")
        }
    source = read_source(file, overrides)
    source.scenario()
    kept = (f"from the scenario in the sidebar: {', '.join(overrides)}",) if overrides else ()
    return source.text(Path(), f"Read from {name} ({configuration.title})"), (*kept, *source.notes)


def checked_scenario_data(name: str, content: bytes) -> dict[str, Any]:
    """A scenario as plain data; an error has the lines of its problems."""
    text = text_of(name, content, MAX_YAML_BYTES, kind="a scenario file in YAML")
    data = parse_yaml(text, name).data
    if not isinstance(data, dict):
        rule, fix = "must be a mapping (key: value)", "write model: {...} and so on"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=name)
    if "search" in data and "plan" not in data:
        parse_search(text, name)
    else:
        parse_scenario(text)
    return data


def published_of(name: str, content: bytes) -> ReadFile:
    """A file of published runs."""
    read = parse_published(text_of(name, content, MAX_YAML_BYTES), name)
    if not read.runs:
        problem = Problem(field="runs", rule="is missing", fix=f"see {documentation('reference/published-runs')}")
        raise SpecError(problem, file=name)
    return read


def prediction_of(name: str, content: bytes) -> dict[str, Any]:
    """The document of a prediction."""
    return parse_prediction(text_of(name, content), name)


def measured_of(name: str, content: bytes) -> Measurement | LoggedRun:
    """A measurement, a log, a trace, or the values of a log."""
    return parse_run(_small(name, content, MAX_BYTES), name)
