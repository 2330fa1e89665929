"""Launch scripts of the Hugging Face stack: ``accelerate launch``, ``torchrun``, ``deepspeed`` and others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from simplan.document import Document, whole_number
from simplan.errors import SpecError
from simplan.interop.configuration import Setting
from simplan.interop.frameworks.hugging_face.keys import flattened
from simplan.interop.frameworks.shell import TrainingCommand, Word, number_or_text, read_launches

SIGNS = ("per_device_train_batch_size", "model_name_or_path", "gradient_accumulation_steps", "deepspeed", "fsdp")
"""Arguments of the Trainer that other frameworks' scripts do not have."""
_OTHERS = ("num_layers", "micro_batch_size", "tensor_model_parallel_size")
"""Arguments of Megatron-LM, which is launched by torchrun and deepspeed as well."""
_OWN_PROGRAMS = frozenset(("llamafactory-cli", "axolotl", "trl"))
_OWN_MODULES = ("axolotl.cli.train", "trl.scripts.sft", "llamafactory.launcher")
_CONFIG_FILES = (".yaml", ".yml", ".json")
_SFT = re.compile(r"(^|[_.-])sft([_.-]|$)")
"""Names of programs for supervised fine-tuning: sft.py, run_sft.py, trl.scripts.sft."""
_FLAG = re.compile(r"--?[A-Za-z]")


@lru_cache(maxsize=8)
def launch_of(text: str, file: str) -> TrainingCommand | None:
    """The first command of a script that starts a training of the Hugging Face stack; None if there is none."""
    try:
        launches = read_launches(text, file, wrappers=_OWN_PROGRAMS)
    except SpecError:
        return None
    return next((launch for launch in launches if _is_ours(launch)), None)


def _is_ours(launch: TrainingCommand) -> bool:
    if launch.program.text in (*_OWN_PROGRAMS, *_OWN_MODULES):
        return True
    if len(launch.arguments) == 1 and re.fullmatch(r"[^-].*\.json", launch.arguments[0].text):
        return launch.program.text.endswith(".py")  # run_clm.py args.json: HfArgumentParser reads it
    names = {name for name, _ in arguments_of(launch.arguments)}
    if names & {*_OTHERS}:
        return False
    reads_config = any(option.key in ("--config_file", "--config-file") for option in launch.options)
    return bool(names & {*SIGNS}) or ("accelerate" in launch.launchers and reads_config)


def arguments_of(words: Iterable[Word]) -> list[tuple[str, Setting]]:
    """Arguments of a command by their names without dashes; those whose value is not known have the value None.

    An argument without a value is true; several values are a list.
    """
    found: list[tuple[str, Setting]] = []
    values: list[Word] = []

    def close(name: Word | None) -> None:
        if name is None:
            return
        key, equals, value = name.text.partition("=")
        given = [value] if equals else [each.text for each in values]
        data = [_value(text) for text in given]
        known = not name.unknown and not any(each.unknown for each in values)
        setting = Setting(
            key, (True if not data else data[0] if len(data) == 1 else data) if known else None, name.line
        )
        plain_key = key.lstrip("-").replace("-", "_")
        if isinstance(setting.value, dict):  # JSON in an argument
            inside = flattened(Document(setting.value, {}))
            found.extend((f"{plain_key}.{k}", Setting(f"{key}.{k}", v.value, name.line)) for k, v in inside)
        else:
            found.append((plain_key, setting))

    current: Word | None = None
    for word in words:
        if _FLAG.match(word.text):
            close(current)
            current, values = word, []
        elif current is not None and "=" not in current.text:
            values.append(word)
    close(current)
    return found


def _value(text: str) -> Any:
    """Value of an argument: JSON in brackets, a flag, a number or text."""
    stripped = text.strip()
    if stripped[:1] in ("{", "[") and stripped[-1:] in ("}", "]"):
        try:
            return json.loads(stripped, parse_int=whole_number)
        except (ValueError, RecursionError):
            return text
    if stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    return number_or_text(stripped)


def config_files(launch: TrainingCommand) -> list[str]:
    """Files with arguments that a command names: ``--config FILE``, or FILE without an option."""
    named = [str(setting.value) for name, setting in arguments_of(launch.arguments) if name == "config"]
    loose = []
    for position, word in enumerate(launch.arguments):
        before = launch.arguments[position - 1].text if position else ""
        if word.text.endswith(_CONFIG_FILES) and not word.text.startswith("-") and not _FLAG.match(before):
            loose.append(word.text)
    return named + loose


def options_of(launch: TrainingCommand) -> list[tuple[str, Setting]]:
    """Options of the launcher by their names, with the launcher before the option in the reading."""
    name = launch.launchers[-1] if launch.launchers else "launcher"
    return [
        (
            option.key.lstrip("-").replace("-", "_"),
            Setting(f"{name} {option.key}", True if option.value == "" else option.value, option.line),
        )
        for option in launch.options
    ]


def sft_of(launch: TrainingCommand) -> str:
    """Words on a program for supervised fine-tuning (TRL's ``sft.py``); empty for another program."""
    program = launch.program.text.rpartition("/")[2]
    first = launch.arguments[0].text if launch.arguments else ""
    is_sft = _SFT.search(program) is not None or (program == "trl" and first == "sft")
    return f"{program} fine-tunes, in line {launch.program.line}" if is_sft else ""


def is_trl(launch: TrainingCommand) -> bool:
    """True for TRL's own script for supervised fine-tuning: ``trl sft``, ``trl/scripts/sft.py``."""
    program = launch.program.text
    is_command = program.rpartition("/")[2] == "trl" and bool(sft_of(launch))
    return is_command or program == "trl.scripts.sft" or program.endswith("trl/scripts/sft.py")


def included_devices(launch: TrainingCommand) -> tuple[int, str] | None:
    """Devices of DeepSpeed's ``--include localhost:0,1@other:0,1``, and the option."""
    for name, setting in options_of(launch):
        if name == "include" and isinstance(setting.value, str):
            hosts = [host.partition(":")[2] for host in setting.value.split("@")]
            if all(hosts):
                return sum(len(ids.split(",")) for ids in hosts), setting.key
    return None
