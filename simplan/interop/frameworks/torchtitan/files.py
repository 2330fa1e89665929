"""Files of torchtitan: TOML of a job, and launch scripts that name such a file or a configuration of version 0.3."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simplan.document import MAX_DIGITS, has_absurd_number
from simplan.errors import Problem, SpecError, did_you_mean, file_error
from simplan.interop.allocator import allocator_settings
from simplan.interop.configuration import Configuration, Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks.shell import (
    TrainingCommand,
    Word,
    doubts,
    number_or_text,
    only_launch,
    own_line,
    read_launches,
    restored,
    written_file,
)
from simplan.interop.frameworks.torchtitan.python import read_function
from simplan.interop.frameworks.torchtitan.reading import configuration_of
from simplan.interop.frameworks.torchtitan.settings import RunSettings, facts
from simplan.interop.nccl import nccl_settings
from simplan.io import MAX_YAML_BYTES, is_file, read_text

_TOML_TITLE, _SCRIPT_TITLE = "job configuration of torchtitan", "launch script of torchtitan"
_SECTIONS = re.compile(
    r"^\s*\[\s*(training|parallelism|experimental|activation_checkpoint|model|optimizer|job)\s*\]\s*(?:#.*)?$", re.M
)
_MIN_SECTIONS = 2
_OF_TORCHTITAN = re.compile(
    r"torchtitan[./]|--job\.config[-_]file|\brun_train\.sh\b|--module[ =]\S+\s.*--config[ =]", re.S
)
_SECTION_LINE = re.compile(r"\s*\[([\w.\" -]+)\]\s*(#.*)?")
_KEY_LINE = re.compile(r"\s*([\w.-]+)\s*=")
_MAX_DEPTH = 8
_WRAPPER = "run_train.sh"
_RANKS_OF_WRAPPER = 8  # run_train.sh: NGPU=${NGPU:-"8"}
_CONFIG_FILE = "job.config_file"
_PARENTS = 5
_SUBCOMMAND = re.compile(r"([a-z][\w-]*):([a-z][\w-]*)")


def recognizes(file: ConfigFile) -> bool:
    """True for TOML with sections of torchtitan, and for scripts and command lines that start it."""
    sections = set(_SECTIONS.findall(file.text))
    if len(sections) >= (1 if file.path.suffix == ".toml" else _MIN_SECTIONS) and not _is_script(file):
        return True
    if file.path.suffix in (".yaml", ".yml", ".json", ".toml"):
        return False
    return bool(_OF_TORCHTITAN.search(file.text)) or (_is_script(file) and _calls_torchtitan(file))


def _calls_torchtitan(file: ConfigFile) -> bool:
    """True for a wrapper: a script that starts torchtitan by another script of its folder."""
    try:
        return next(_launches_of(file), None) is not None
    except SpecError:
        return False


def read(file: ConfigFile) -> Configuration:
    """Read a TOML file or a launch script.

    Raises:
        SpecError: The file is neither, or settings of it are refused or contradict each other.
    """
    if file.path.suffix == ".toml" or (_SECTIONS.search(file.text) and not _is_script(file)):
        return configuration_of(RunSettings.of(_TOML_TITLE, file.name, toml_settings(file.text, file.name)))
    if file.path.suffix == ".py":
        rule = "a Python file has several configurations, and no number of devices"
        fix = f"give a file with the command: torchrun ... --module {file.path.stem} --config NAME"
        raise file_error(file.name, rule, fix)
    return _read_script(file)


def _is_script(file: ConfigFile) -> bool:
    return file.text.startswith("#!") or file.path.suffix in (".sh", ".slurm", ".sbatch")


def toml_settings(text: str, file: str, *, with_lines: bool = True) -> tuple[Setting, ...]:
    """Settings of TOML by dotted keys.

    Raises:
        SpecError: The text is not TOML, nested too deeply, or has an absurd number.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        what = str(error).partition(" (at")[0]
        fix = "check quotes, and write out variables that a script fills in"
        raise file_error(file, f"this is not TOML: {what}", fix, int(line[1]) if line else None) from None
    except RecursionError:
        raise file_error(file, "the file is nested too deeply", "flatten it") from None
    except ValueError:  # of int(), from 4,301 digits on
        raise file_error(file, "the file has a number of many digits", f"use at most {MAX_DIGITS} digits") from None
    lines = _lines(text) if with_lines else {}
    return tuple(Setting(key, value, lines.get(key)) for key, value in _flat(data, file))


def _flat(data: Mapping[str, Any], file: str, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise file_error(file, "the file is nested too deeply", "flatten it")
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, file, f"{prefix}{name}.", depth + 1)
        elif has_absurd_number(value):
            raise file_error(file, f"{prefix}{name} has a number of many digits", f"use at most {MAX_DIGITS} digits")
        else:
            yield f"{prefix}{name}", value


def _lines(text: str) -> dict[str, int]:
    """Lines of keys, which tomllib does not give; of a key inside of a multi-line value, the first one counts."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _SECTION_LINE.fullmatch(line):
            section = match[1].strip().replace('"', "") + "."
        elif match := _KEY_LINE.match(line):
            lines.setdefault(section + match[1], number)
    return lines


def _read_script(file: ConfigFile) -> Configuration:
    launch = _launch_of(file)
    words = _with_environment(launch)
    settings, unknown = arguments(words)
    by_key = {setting.key: setting for setting in settings}
    named: Mapping[str, Any] | None = None
    name = ""
    if _CONFIG_FILE in by_key:
        path = by_key.pop(_CONFIG_FILE)
        if path.key in unknown and not written_file(str(path.value), launch.files):
            raise _problem(file, path, unknown[path.key], "write the path of the TOML file, or give simplan that file")
        settings = (*_included(replace(file, written=launch.files), path), *by_key.values())
    else:
        name, named = _named(file, by_key, unknown)
        settings = tuple(by_key.values())
    problems = [
        _problem_of(setting, unknown[setting.key], "write its value")
        for setting in by_key.values()
        if setting.key in unknown and facts().aliases.get(setting.key, setting.key) in facts().defaults
    ]
    if problems:
        raise SpecError(problems, file=file.name)
    settings = (*settings, *nccl_settings(launch.environment), *allocator_settings(launch.environment))
    run = RunSettings.of(_SCRIPT_TITLE, file.name, settings, named, name)
    run.reading.ranks_per_node = launch.node_setting
    return configuration_of(run, *_ranks(launch))


def _launches_of(file: ConfigFile) -> Iterator[TrainingCommand]:
    """Commands that start torchtitan."""
    for launch in read_launches(file.text, file.name, file.folder, wrappers=frozenset({_WRAPPER})):
        texts = [word.text.partition("=")[0].replace("-", "_") for word in launch.arguments]
        is_named = "__module" in texts and "__config" in texts
        has_file = f"__{_CONFIG_FILE}" in texts
        if is_named or has_file or "torchtitan" in launch.program.text or _is_wrapper(launch):
            yield launch


def _launch_of(file: ConfigFile) -> TrainingCommand:
    """The first command that starts torchtitan."""
    if launches := [*_launches_of(file)]:
        return only_launch(launches, file.name)
    rule = "no command of it starts torchtitan"
    fix = "keep the line with torchrun and --job.config_file, or with --module and --config"
    raise file_error(file.name, rule, fix)


def _is_wrapper(launch: TrainingCommand) -> bool:
    return launch.program.text.rpartition("/")[2] == _WRAPPER


def _with_environment(launch: TrainingCommand) -> list[Word]:
    """Arguments, after those that torchtitan's run_train.sh takes from variables."""
    if not _is_wrapper(launch):
        return list(launch.arguments)
    line, words = launch.program.line, []
    environment = launch.environment
    options = {"CONFIG_FILE": "--job.config_file", "MODULE": "--module", "CONFIG": "--config"}
    for variable, option in options.items():
        if variable in environment:
            words += [Word(option, line), environment[variable]]
    return [*words, *launch.arguments]


def _ranks(launch: TrainingCommand) -> tuple[int | None, str]:
    """Number of ranks that the launcher starts, and the setting that says it."""
    if _is_wrapper(launch):
        ranks = launch.environment.get("NGPU")
        if ranks is None:
            return _RANKS_OF_WRAPPER, f"the default of {_WRAPPER}"
        return (int(ranks.text), "NGPU") if ranks.text.isdecimal() and int(ranks.text) else (None, "")
    return launch.num_devices, " and ".join(setting.key for setting in launch.launcher)


def arguments(words: Sequence[Word]) -> tuple[tuple[Setting, ...], dict[str, str]]:
    """Settings of a command line, and of those whose value is not known, the reason."""
    settings: list[Setting] = []
    unknown: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.text.startswith("--"):
            if match := _SUBCOMMAND.fullmatch(word.text):
                section = match[1].replace("-", "_")
                settings.append(Setting(f"{section}.mode", match[2].replace("-", "_"), own_line(word.line)))
            elif not word.unknown:  # "$@" and the like are no setting
                settings.append(Setting(word.text, True, own_line(word.line)))
            continue
        key, joined, value = word.text.partition("=")
        values = [replaced for replaced in [value] if joined]
        reasons = [word]
        while not joined and position < len(words) and not words[position].text.startswith("--"):
            following = words[position]
            if _SUBCOMMAND.fullmatch(following.text) or following.text in ("$@", "$*", "${@}"):
                break
            values.append(following.text)
            reasons.append(following)
            position += 1
        setting = _setting(key.removeprefix("--").replace("-", "_"), values, own_line(word.line))
        settings.append(setting)
        condition = next((reason.condition for reason in reasons if reason.condition is not None), None)
        why = next((reason.unknown for reason in reasons if reason.unknown), "")
        if condition is not None:
            why = f"depends on the condition of line {condition}"
        if why:
            unknown[setting.key] = why
        else:
            unknown.pop(setting.key, None)
    return tuple(settings), unknown


def _setting(key: str, values: list[str], line: int | None) -> Setting:
    section, dot, name = key.rpartition(".")
    if not values and name.startswith("no_"):
        return Setting(f"{section}{dot}{name.removeprefix('no_')}", value=False, line=line)
    if not values:
        return Setting(key, value=True, line=line)
    if name.endswith("fqns_per_model_part"):
        return Setting(key, [value.split(",") for value in values], line)
    return Setting(key, _value(values[0]) if len(values) == 1 else [_value(value) for value in values], line)


def _value(text: str) -> Any:
    """Value of an argument: a flag, None, a number or text."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    return words[text.lower()] if text.lower() in words else number_or_text(text)


def _included(file: ConfigFile, path: Setting) -> Iterable[Setting]:
    """Settings of the TOML file that a script names, or writes itself."""
    if (written := written_file(str(path.value), file.written)) is not None:
        return _written(file, path, *written)
    source = _found(file, str(path.value))
    if source is None:
        rule = f"is neither in the folder of the script nor in the {_PARENTS} folders above it"
        if not file.reads_others:
            rule = "names a file, which an upload cannot bring along"
        raise _problem(file, path, rule, "put it there, or give simplan that file")
    return toml_settings(read_text(source, MAX_YAML_BYTES), str(source), with_lines=False)


def _written(file: ConfigFile, path: Setting, text: str, unknown: Mapping[str, Word]) -> Iterable[Setting]:
    """Settings of a TOML file that the script writes itself."""
    settings = toml_settings(text, str(path.value), with_lines=False)
    known = (setting for setting in settings if facts().aliases.get(setting.key, setting.key) in facts().defaults)
    if problems := doubts(str(path.value), known, unknown):
        raise SpecError(problems, file=file.name)
    return [replace(setting, value=restored(setting.value, unknown)) for setting in settings]


def _found(file: ConfigFile, *names: str) -> Path | None:
    """The first file of some names in the folder of the script, or in one above it; None too if none may be read."""
    if file.folder is None:
        return None
    folder = file.folder.resolve()
    paths = (base / name for base in [folder, *folder.parents[:_PARENTS]] for name in names)
    return next((path for path in paths if is_file(path)), None)


def _named(file: ConfigFile, by_key: dict[str, Setting], unknown: Mapping[str, str]) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of the configuration that a command of version 0.3 names."""
    missing = [key for key in ("module", "config") if key not in by_key]
    if missing:
        rule = f"the command has no --{missing[0]}, and no --{_CONFIG_FILE} either"
        raise file_error(file.name, rule, "add what the script gets from outside")
    module, config = by_key["module"], by_key["config"]
    for setting in (module, config):
        if setting.key in unknown:
            raise _problem(file, setting, unknown[setting.key], "write its value")
    name = str(module.value).removeprefix("torchtitan.models.").removesuffix(".config_registry")
    by_key["module"] = Setting("module", name, module.line)
    if name in facts().other_models:
        raise _problem(file, module, f"is {facts().other_models[name]}, which is not modeled yet", "")
    known = facts().configurations.get("llama3" if name == "torchft.llama3" else name)
    if known is None:
        return _own(file, by_key, name)
    named = str(config.value)  # the shell may give a list of words
    if named in facts().other_configurations:
        raise _problem(file, config, f"has {facts().other_configurations[named]}, which is not modeled yet", "")
    if named not in known:
        rule = f"is no configuration of {name} in torchtitan 0.3"
        raise _problem(file, config, rule, did_you_mean(named, known))
    return named, known[named]


def _own(file: ConfigFile, by_key: dict[str, Setting], name: str) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of a configuration in a Python file of the user's."""
    base = name.replace(".", "/")
    source = _found(file, f"{base}.py", f"{base}/config_registry.py") if re.fullmatch(r"[\w.]+", name) else None
    if source is None:
        rule = "is neither a module of torchtitan 0.3 that simplan knows nor a Python file near the script"
        raise _problem(file, by_key["module"], rule, did_you_mean(name, facts().configurations))
    config = str(by_key["config"].value)
    model, settings = read_function(read_text(source, MAX_YAML_BYTES), str(source), config, name)
    if not model:
        raise _problem(file, by_key["config"], "has no model of torchtitan that simplan knows", "")
    by_key["module"] = Setting("module", model, by_key["module"].line)
    read = {facts().aliases.get(setting.key, setting.key): setting.value for setting in settings}
    by_key |= {key: Setting(key, value) for key, value in read.items() if key not in {*facts().defaults, *by_key}}
    return config, {key: value for key, value in read.items() if key in facts().defaults}


def _problem(file: ConfigFile, setting: Setting, rule: str, fix: str) -> SpecError:
    return SpecError(_problem_of(setting, rule, fix), file=file.name)


def _problem_of(setting: Setting, rule: str, fix: str) -> Problem:
    return Problem(field=f"--{setting.key}", value=str(setting.value), rule=rule, fix=fix, line=setting.line)
