"""Uploaded files: small, read as data by simplan's readers, and never stored.

All functions raise a SpecError for a file that is too large, no UTF-8 text, or of another kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.fitting import document_text, mended, num_devices, section
from simplan.accuracy.run import ReadFile
from simplan.catalog.spelling import find
from simplan.document import parse_yaml
from simplan.documentation import documentation
from simplan.errors import Problem, SpecError
from simplan.interop.configuration import Configuration
from simplan.interop.formats import ConfigFile, read_configuration
from simplan.interop.frameworks.shell import read_script
from simplan.interop.huggingface import model_fields_from_config
from simplan.interop.logs.formats import KNOWN_LOGS, is_log, parse_run
from simplan.interop.others import framework_that_is_not_read
from simplan.io import MAX_YAML_BYTES, parse_json
from simplan.model.captured.file import captured_of, is_captured, packed
from simplan.problems import render_value
from simplan.runs.measurement import Measurement
from simplan.scenario import parse_scenario, parse_search, read_source
from simplan.scenario.names import unknown_source
from simplan.scenario.published.reading import parse_published
from simplan.scenario.source import known_files
from simplan.validate.logged_run import LoggedRun
from simplan.validate.prediction_file import parse_prediction

MAX_BYTES = 32 * 2**20
MAX_MODEL_BYTES = 2 * 2**20
CONFIG_SUFFIXES = ["yaml", "yml", "json", "toml", "sh", "sbatch", "slurm", "txt", "py"]
"""Files that scenarios and configurations of frameworks are in."""
_MAX_CHARS = 80
_OWN_MODEL = "own model"
_PASTED = "pasted"
_NAMES_OF_PASTED = (_PASTED, f"{_PASTED}.sh", f"{_PASTED}.toml")
"""Names that pasted text may have as a file: readers of scripts and of TOML look at the suffix where text is short."""
_SECTIONS = ("model", "cluster", "training", "software")
_MEASURED = {*LoggedRun.model_fields, "traceEvents", "log_history", "segments", "device_traces", "kind"}
"""Keys at the top of measurements, traces and memory snapshots."""
_NUMBERS_OF_DEVICES = {"num_devices", "num_nodes"}
_USUAL_LENGTH = 4096
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


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


def own_model_fields(name: str, content: bytes, seq_len: int) -> dict[str, Any]:
    """A file of a model as the section ``model`` of a scenario: of ``simplan capture``, or of Hugging Face.

    Args:
        name: Name of the file.
        content: Captured model, or ``config.json``.
        seq_len: Tokens of a sequence for a ``config.json``; a captured model has its own.
    """
    kind = "the config.json of a Hugging Face model, or a file of simplan capture"
    data = parse_json(text_of(name, content, MAX_MODEL_BYTES, kind=kind), name)
    if is_captured(data):
        captured = captured_of(data, name)
        return {"name": captured.name[:_MAX_CHARS], "captured": packed(captured)}
    return _config_fields(name, data, seq_len)


def _config_fields(name: str, config: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    title = config.get("_name_or_path")
    title = title[:_MAX_CHARS] if isinstance(title, str) and title else _OWN_MODEL
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
    return (text, ()) if configuration is None else _completed(file, configuration, current)


def _completed(
    file: ConfigFile, configuration: Configuration, current: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """A framework's file as text of a scenario, with values of the session for what it does not say, and its notes."""
    overrides: dict[str, Any] = {}
    for missing in configuration.missing:
        section, _, key = missing.keys[0].partition(".")
        values, said = current.get(section), configuration.document.data.get(section, {})
        if isinstance(values, dict):
            values = {"microbatch_size": 1, **values} if section == "plan" else values
            chosen = {key: values[key]} if key in values and key != "preset" else values
            overrides |= {f"{section}.{name}": value for name, value in chosen.items() if name not in said}
    if _NUMBERS_OF_DEVICES & configuration.document.data.get("cluster", {}).keys():
        overrides = {
            key: overrides[key] for key in overrides if key not in ("cluster.num_nodes", "cluster.num_devices")
        }
    source = read_source(file, overrides)
    source.scenario()
    kept = (f"from the scenario in the sidebar: {', '.join(overrides)}",) if overrides else ()
    return source.text(Path(), f"Read from {file.name} ({configuration.title})"), (*kept, *source.notes)


@dataclass(frozen=True, slots=True)
class Recognized:
    """Pasted or dropped content, by its kind.

    Attributes:
        title: Its kind in words.
        document: Scenario, or search, as plain data; None for a log, a trace or a measurement.
        notes: Sentences of its reader.
        configuration: Framework's file; None for the rest.
        file: Name of the file, also of pasted text, by which readers of measurements know its kind.
        assumed_devices: Number of devices of the session, for a framework's file that does not say it; else None.
    """

    title: str
    document: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    configuration: Configuration | None = None
    file: str = _PASTED
    assumed_devices: int | None = None

    @property
    def batch_follows_devices(self) -> bool:
        """True for a framework's file with sequences per data-parallel rank, and without a global batch."""
        return (
            self.configuration is not None
            and self.configuration.num_microbatches is not None
            and "training.global_batch_size" not in self.configuration.names
        )


def recognized_for(name: str, content: bytes, document: str) -> Recognized:
    """``recognized`` as a task of a worker, since traces are large: the scenario of the session is JSON text."""
    return recognized(name, content, json.loads(document))


def recognized(name: str, content: bytes, current: Mapping[str, Any]) -> Recognized:
    """Content of any kind that pages know, read as ``simplan import`` and ``simplan compare`` read a file of it.

    Args:
        name: Name of the file; empty for pasted text.
        content: Launch script or configuration of a framework, scenario, ``config.json`` of Hugging Face, name of a
            model, log, trace or measurement.
        current: Scenario of the session, whose values stand in for what the content does not say.

    Raises:
        SpecError: It is something else, or of a known kind and wrong.
    """
    try:
        text = _small(name, content, MAX_BYTES).decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return _measured(name, content)
    if len(text) > MAX_YAML_BYTES:
        return _measured(name, content)
    if not name and "\n" not in text:
        if model := find("models", text).name:
            return _with_model(f"model {model}", {"preset": model}, current)
        if _ON_HUB.fullmatch(text) or find("models", text).candidates:
            raise unknown_source(text, has_files=False)
    if not text.startswith("{") and is_log(text):  # it may repeat the command that wrote it
        return _measured(name or _PASTED, content)
    refused = None
    for file in (
        ConfigFile(Path(file_name), text, reads_others=False) for file_name in ((name,) if name else _NAMES_OF_PASTED)
    ):
        try:
            configuration = read_configuration(file)
            if configuration is not None:
                return _of_framework(name, file, configuration, current)
        except SpecError as error:  # perhaps another kind of file
            refused = refused or error
    if refused is not None:
        raise refused
    return _of_no_framework(name, content, ConfigFile(Path(name or _PASTED), text, reads_others=False), current)


def _of_framework(name: str, file: ConfigFile, configuration: Configuration, current: Mapping[str, Any]) -> Recognized:
    """A framework's file; for arguments see ``recognized``."""
    written, notes = _completed(file, configuration, current)
    document = _unnamed(parse_yaml(written, file.name).data, name)
    says_devices = bool(_NUMBERS_OF_DEVICES & configuration.document.data.get("cluster", {}).keys())
    assumed = None if says_devices else num_devices(document)
    return Recognized(configuration.title, document, notes, configuration, assumed_devices=assumed)


def _of_no_framework(name: str, content: bytes, file: ConfigFile, current: Mapping[str, Any]) -> Recognized:
    """A scenario, a config.json or a log; for arguments see ``recognized``."""
    data = file.yaml.data if file.yaml is not None else file.json or {}
    if {"model", "cluster"} <= data.keys():
        return Recognized("scenario", checked_scenario_data(file.name, content))
    if "model_type" in data and "model" not in data:
        length = section(dict(current), "model").get("seq_len")
        fields = own_model_fields(file.name, content, length if isinstance(length, int) else _USUAL_LENGTH)
        note = f"sequences of {fields['seq_len']:,} tokens, as before" if "seq_len" in fields else ""
        return _with_model("config.json of Hugging Face", fields, current, note)
    if is_captured(data):
        return _with_model("captured model", own_model_fields(file.name, content, _USUAL_LENGTH), current)
    if data.keys() & {*_SECTIONS, "plan"}:
        others = [key for key in (*_SECTIONS, *(() if "search" in data else ("plan",))) if key not in data]
        document = {**{key: current[key] for key in others if key in current}, **data}
        document, changes = (document, []) if data.keys() & {"plan", "search"} else mended(document)
        data = checked_scenario_data(file.name, document_text(document).encode())
        notes = (f"from the scenario in the sidebar: {', '.join(others)}", *changes)
        return Recognized("a part of a scenario", _unnamed(data, name), notes)
    if data.keys() & _MEASURED:
        return _measured(name or f"{_PASTED}.yaml", content)
    if not name and _is_script(file):
        file = ConfigFile(Path(f"{_PASTED}.sh"), file.text, reads_others=False)
    if file.path.suffix or framework_that_is_not_read(file) is not None:
        read_source(file)  # raises the error on such a file
    rule = f"is nothing that simplan knows; it looked for {known_files()}, a log of {KNOWN_LOGS}, the name of a model"
    text = render_value(file.text[:_MAX_CHARS].partition("\n")[0])
    raise SpecError(Problem(field="", value=text, rule=rule))


def _measured(name: str, content: bytes) -> Recognized:
    measured = measured_of(name or _PASTED, content)
    title = measured.source if isinstance(measured, LoggedRun) else None
    return Recognized(title or "measurement", file=name or _PASTED)


def _with_model(title: str, fields: dict[str, Any], current: Mapping[str, Any], *notes: str) -> Recognized:
    """The scenario of the session with another model, and with a plan that this model can have."""
    document, changes = mended({**current, "model": fields})
    return Recognized(title, document, (*filter(None, notes), *changes))


def _unnamed(data: dict[str, Any], name: str) -> dict[str, Any]:
    """A scenario without the name of a file that was none, and whose model has a name."""
    model = data["model"]
    named = {} if not isinstance(model, dict) or {"preset", "name"} & model.keys() else {"name": _OWN_MODEL}
    shown = data if name else {key: value for key, value in data.items() if key != "name"}
    return {**shown, "model": {**named, **model}} if named else shown


def _is_script(file: ConfigFile) -> bool:
    """True for text that starts programs as a shell script does."""
    try:
        return file.text.startswith("#!") or bool(read_script(file.text, file.name, None).launches)
    except SpecError:
        return False


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
