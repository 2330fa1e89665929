"""Arguments of Megatron-LM in a launch script, a command line, or the YAML of its functional tests, as settings.

Values that the file does not tell, and arguments under a condition that nobody can decide, are kept apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.interop.allocator import VARIABLES, allocator_settings
from simplan.interop.configuration import Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks import tables
from simplan.interop.frameworks.shell import (
    TrainingCommand,
    Value,
    Word,
    missing_script,
    number_or_text,
    only_launch,
    own_line,
    read_launches,
    read_script,
    recipe_script,
    written_file,
)
from simplan.interop.nccl import nccl_settings

_SIGNS = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "model-parallel-size")
_SIGN = re.compile(rf"(?m)--(?:\w+-)*({'|'.join(_SIGNS)})\b")
_MIN_SIGNS = 3
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
_NAMES = re.compile(r"(?i)megatron|mcore|pretrain_(gpt|bert|t5)\b")
_MODEL_ARGS = "MODEL_ARGS"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of one training.

    Attributes:
        settings: Arguments that are certain, by their names of today; of a repeated one the last.
        unsure: Arguments that are not, each with the reason as a predicate.
        extra: Words that may hold any number of arguments, such as ``"$@"``.
        program: Name of the script that is run; empty if the file does not say.
        launcher: Settings of the launcher that tell the number of devices.
        num_devices: Devices; None if the file does not say.
        ranks_per_node: Setting with the ranks on each of several nodes; None if the file does not say.
        missing: Scripts that are sourced and not there, as settings.
        files: Files that the script writes itself.
    """

    settings: tuple[Setting, ...]
    unsure: tuple[tuple[Setting, str], ...] = ()
    extra: tuple[Setting, ...] = ()
    program: str = ""
    launcher: tuple[Setting, ...] = ()
    num_devices: int | None = None
    ranks_per_node: Setting | None = None
    missing: tuple[Setting, ...] = ()
    files: Mapping[str, Value] = field(default_factory=dict)


def recognizes(file: ConfigFile) -> bool:
    """True for text with three arguments of every Megatron-LM script, and for a shell script that names Megatron."""
    if file.yaml is not None:
        return isinstance(file.yaml.data.get(_MODEL_ARGS), dict)
    if len(set(_SIGN.findall(file.text))) >= _MIN_SIGNS:
        return True
    is_script = file.text.startswith("#!") or file.path.suffix in _SUFFIXES
    return is_script and (_NAMES.search(file.text) is not None or _calls_a_training(file))


def _calls_a_training(file: ConfigFile) -> bool:
    """True for a wrapper: a script that calls another one of its folder with the arguments."""
    try:
        return any(_trains(launch) for launch in read_launches(file.text, file.name, file.folder))
    except SpecError:
        return False


def read_arguments(file: ConfigFile) -> Arguments:
    """Arguments of a file.

    Raises:
        SpecError: The file is no script, or starts no training, or several.
    """
    if file.yaml is not None and isinstance(file.yaml.data.get(_MODEL_ARGS), dict):
        return _yaml_arguments(file)
    script = read_script(file.text, file.name, file.folder)
    launches = [launch for launch in script.launches if _trains(launch)]
    if not launches and script.missing:
        raise missing_script(file.name, script.missing[0])
    if not launches and (recipe := recipe_script(script.launches, file.name)) is not None:
        raise recipe
    if not launches:
        for called in script.unclear:
            if _has_signs(called.words):
                rule = f"starts {called.words[0].text}, which {called.words[0].unknown}"
                fix = f"name a file with the line: bash {file.name.rpartition('/')[2]} ARGUMENTS"
                raise SpecError(Problem(field="", rule=rule, fix=fix, line=called.line), file=file.name)
        rule = "starts no training: no command has arguments of Megatron-LM such as --num-layers"
        fix = "name the script that calls torchrun pretrain_gpt.py ..., or write its arguments into a file"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=file.name)
    launch = only_launch(launches, file.name)
    sourced = tuple(
        Setting(f"source {variable.name}", True, variable.line) for variable in script.missing if variable.is_sourced
    )
    return replace(_sorted(launch), missing=sourced)


def _trains(launch: TrainingCommand) -> bool:
    return _has_signs(launch.arguments)


def _has_signs(words: Iterable[Word]) -> bool:
    return len(set(_SIGN.findall(" ".join(word.text for word in words)))) >= _MIN_SIGNS


@dataclass(slots=True)
class _Argument:
    """An argument with its words."""

    key: str
    line: int
    value: str | None = None
    words: list[Word] = field(default_factory=list)
    reason: str = ""


def _sorted(launch: TrainingCommand) -> Arguments:
    """Arguments of a command; an argument has all words up to the next that begins with ``--``."""
    table = tables("megatron")
    arguments: list[_Argument] = []
    extra: list[Setting] = []
    for word in launch.arguments:
        if word.text.startswith("--") and len(word.text) > len("--"):
            key, joined, value = word.text.partition("=")
            reason = "" if written_file(value, launch.files) else word.doubt
            arguments.append(_Argument(key, word.line, value if joined else None, reason=reason))
        elif not arguments or (word.unknown and (arguments[-1].key in table["flags"] or arguments[-1].words)):
            extra.append(Setting(word.text, True, own_line(word.line)))
        else:
            arguments[-1].words.append(word)
            if not written_file(word.text, launch.files):
                arguments[-1].reason = arguments[-1].reason or word.doubt
    last = {table["older_names"].get(argument.key, argument.key): argument for argument in arguments}
    certain, unsure = [], []
    for key, argument in last.items():
        older = argument.key if argument.key != key else ""
        setting = Setting(key, _value(argument), own_line(argument.line), older)
        if argument.reason:
            unsure.append((setting, argument.reason))
        else:
            certain.append(setting)
    certain += [*nccl_settings(launch.environment), *allocator_settings(launch.environment)]
    program = PurePath(launch.program.text).as_posix()
    devices = launch.num_devices, launch.node_setting
    return Arguments(
        tuple(certain), tuple(unsure), tuple(extra), program, launch.launcher, *devices, files=launch.files
    )


def _value(argument: _Argument) -> Any:
    values = [_unquoted(text) for text in ([] if argument.value is None else [argument.value])]
    values += [_unquoted(word.text) for word in argument.words]
    return True if not values else values[0] if len(values) == 1 else values


def _unquoted(text: str) -> int | float | str:
    return number_or_text(text.strip().strip("'\""))


def _yaml_arguments(file: ConfigFile) -> Arguments:
    """``MODEL_ARGS`` of a test's model_config.yaml: name -> value, of which true stands for a flag."""
    assert file.yaml is not None
    certain: list[Setting] = []
    unsure: list[tuple[Setting, str]] = []
    variables = file.yaml.data.get("ENV_VARS")
    known = {name: str(value) for name, value in variables.items()} if isinstance(variables, dict) else {}
    certain += [
        Setting(name, known[name], file.yaml.place(("ENV_VARS", name))[0]) for name in VARIABLES if name in known
    ]
    for key, content in file.yaml.data[_MODEL_ARGS].items():
        value, line = content, file.yaml.place((_MODEL_ARGS, key))[0]
        if value is False or value is None:
            continue
        if isinstance(value, str):
            value = _unquoted(_substituted(value, known))
        today = tables("megatron")["older_names"].get(str(key), str(key))
        setting = Setting(today, value, line, str(key) if today != str(key) else "")
        if isinstance(value, str) and ("${" in value or "$(" in value):
            unsure.append((setting, "is not set in the file"))
        else:
            certain.append(setting)
    return Arguments(tuple(certain), tuple(unsure))


def _substituted(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: known.get(match[1], match[0]), text)


def hyphenated(settings: Iterable[Setting]) -> Iterator[tuple[Setting, Setting]]:
    """Arguments with underscores, each with its name with hyphens."""
    for setting in settings:
        if "_" in setting.key:
            yield setting, replace(setting, key=setting.key.replace("_", "-"))


def is_above(value: Any, limit: int) -> bool:
    """True for a number above a limit."""
    return isinstance(value, int | float) and value > limit
