"""Launch scripts of the Hugging Face stack: ``accelerate launch``, ``torchrun``, ``deepspeed`` and others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from simplan.document import Document, whole_number
from simplan.errors import SpecError
from simplan.interop.configuration import Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks.hugging_face.keys import flattened, named_document
from simplan.interop.frameworks.hugging_face.preference import OF_PROGRAMS
from simplan.interop.frameworks.shell import (
    TrainingCommand,
    Value,
    Word,
    number_or_text,
    own_line,
    read_launches,
    written_file,
)

SIGNS = ("per_device_train_batch_size", "gradient_accumulation_steps", "deepspeed", "fsdp")
"""Arguments of the Trainer that other frameworks' scripts do not have."""
_MODEL = "model_name_or_path"
_WITH_MODEL = (
    "bf16", "fp16", "do_train", "learning_rate", "num_train_epochs", "max_steps", "optim", "lr_scheduler_type",
    "gradient_checkpointing", "block_size", "max_length", "max_seq_length", "model_max_length", "use_peft", "use_lora",
)  # fmt: skip
"""Arguments of a training next to the name of a model, which programs that convert or generate have as well."""
_OTHERS = ("num_layers", "micro_batch_size", "tensor_model_parallel_size")
"""Arguments of Megatron-LM, which is launched by torchrun and deepspeed as well."""
_OWN_PROGRAMS = frozenset(("llamafactory-cli", "axolotl", "trl"))
_OWN_MODULES = (
    "axolotl.cli.train",
    "trl.scripts.sft",
    "trl.scripts.dpo",
    "trl.scripts.kto",
    "trl.scripts.reward",
    "llamafactory.launcher",
)
_OF_FACTORY = re.compile(r"(^|/)(src/train|train_bash|llamafactory/launcher)\.py$")
"""Programs of LLaMA-Factory, which like its command take a file and ``name=value``; train_bash.py till May 2024."""
_CONFIG_FILES = (".yaml", ".yml", ".json")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
_OF_TRL = re.compile(r"trl[./]scripts[./]\w+(\.py)?$")
_SFT = re.compile(r"(^|[_.-])sft([_.-]|$)")
"""Names of programs for supervised fine-tuning: sft.py, run_sft.py, trl.scripts.sft."""
_PREFERENCES = re.compile(
    r"(^|[_.-])(dpo|grpo|gspo|kto|orpo|cpo|tpo|ppo|mpo|sdpo|rloo|bco|nash_md|xpo|prm|reward|reward_modeling|papo|"
    r"gkd|gold|minillm|sdft|ssd|distill|distillation)([_.-]|$)"
)
"""Names of programs of TRL and others with a second model or generated text: dpo.py, grpo_agent.py, sdft.py."""
_SENSES = re.compile(r"(^|[_.-])(vlm?|vision|images?|clip|whisper|speech|audio|dreambooth|controlnet)([_.-]|$)")
_NO_TRAINING = re.compile(r"(^|[_.-])(generat\w*|infer\w*|eval\w*|chat|serve|convert\w*|merge\w*|export\w*)([_.-]|$)")
_OF_NODES = ("srun", "mpirun", "mpiexec", "mpiexec.hydra", "salloc")
"""Launchers whose options say nothing but where processes run."""
_FLAG = re.compile(r"--?[A-Za-z]")


def launches_of(file: ConfigFile) -> list[TrainingCommand]:
    """Commands of a script that start a training of the Hugging Face stack, maybe by another script of its folder.

    Programs that no launcher starts count if there are no others.
    """
    try:
        launches = read_launches(file.text, file.name, file.folder, wrappers=_OWN_PROGRAMS)
    except SpecError:
        return []
    ours = [launch for launch in launches if _is_ours(launch) or engine_file(launch, file) is not None]
    launched = [launch for launch in ours if launch.launchers or launch.program.text in _OWN_PROGRAMS]
    return launched or ours


def engine_file(launch: TrainingCommand, file: ConfigFile) -> tuple[str, Document] | None:
    """DeepSpeed's file of a program with arguments of its own: ``deepspeed x.py --deepspeed_config ds.json``.

    None if it is not there, or the arguments are those of the Trainer or of Megatron-LM.
    """
    arguments = dict(arguments_of(launch.arguments, launch.files))
    setting = arguments.get("deepspeed_config")
    if setting is None or not isinstance(setting.value, str) or arguments.keys() & {*_OTHERS} or _signs(arguments):
        return None
    return named_document(setting.value, replace(file, written=launch.files))


def _is_ours(launch: TrainingCommand) -> bool:
    if launch.program.text in _OWN_MODULES:
        return True
    if launch.program.text in _OWN_PROGRAMS:
        first = launch.arguments[0].text if launch.arguments else ""
        return first in ("train", "sft") or _PREFERENCES.search(first) is not None
    if len(launch.arguments) == 1 and re.fullmatch(r"[^-].*\.json", launch.arguments[0].text):
        return launch.program.text.endswith(".py")  # run_clm.py args.json: HfArgumentParser reads it
    if _OF_FACTORY.search(launch.program.text) and config_files(launch):
        return True
    arguments = dict(arguments_of(launch.arguments, launch.files))
    if arguments.keys() & {*_OTHERS}:
        return False
    reads_config = any(option.key in ("--config_file", "--config-file") for option in launch.options)
    trains_model = _MODEL in arguments and not arguments.keys().isdisjoint(_WITH_MODEL)
    trains_model = trains_model and _NO_TRAINING.search(launch.program.text.rpartition("/")[2]) is None
    return bool(_signs(arguments)) or trains_model or ("accelerate" in launch.launchers and reads_config)


def _signs(arguments: Mapping[str, Setting]) -> set[str]:
    """Arguments of the Trainer; ``--deepspeed`` without a file is one of any program that DeepSpeed starts."""
    signs = arguments.keys() & {*SIGNS}
    return signs - {"deepspeed"} if "deepspeed" in signs and arguments["deepspeed"].value is True else signs


def refused_program(launch: TrainingCommand) -> tuple[str, str] | None:
    """Rule and fix for a program that trains something else than a language model on text; None for another."""
    program = launch.program.text.rpartition("/")[2].removesuffix(".py")
    first = launch.arguments[0].text if launch.arguments and program == "trl" else program
    if _PREFERENCES.search(first) and preference_of(launch) is None:
        rule = "belongs to reinforcement learning, distillation or another loss, which is not modeled yet"
        return rule, "predict an update of its policy as sft"
    return ("belongs to a model of images or sound, which is not modeled yet", "") if _SENSES.search(program) else None


def arguments_of(words: Iterable[Word], files: Mapping[str, Value]) -> list[tuple[str, Setting]]:
    """Arguments of a command by their names without dashes; those whose value is not known have the value None.

    An argument without a value is true; several values are a list. The name of a file that the script writes is known.
    """
    settings: list[tuple[str, Setting]] = []
    values: list[Word] = []

    def close(name: Word | None) -> None:
        if name is None:
            return
        key, equals, value = name.text.partition("=")
        texts = [value] if equals else [word.text for word in values]
        data = [_value(text) for text in texts]
        known = all(written_file(text, files) for text in texts) if texts else not name.unknown
        known = known or not any(word.unknown for word in (name, *values))
        setting = Setting(
            key, (True if not data else data[0] if len(data) == 1 else data) if known else None, own_line(name.line)
        )
        plain_key = key.lstrip("-").replace("-", "_")
        if isinstance(setting.value, dict):  # JSON in an argument
            inside = flattened(Document(setting.value, {}))
            settings.extend((f"{plain_key}.{k}", Setting(f"{key}.{k}", v.value, setting.line)) for k, v in inside)
        else:
            settings.append((plain_key, setting))

    current: Word | None = None
    for word in words:
        if _FLAG.match(word.text):
            close(current)
            current, values = word, []
        elif current is not None and "=" not in current.text and word.text not in ("$@", "$*"):
            values.append(word)
    close(current)
    return settings


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
    settings = arguments_of(launch.arguments, launch.files)
    named = [str(setting.value) for name, setting in settings if name == "config" and setting.value is not None]
    loose = []
    for position, word in enumerate(launch.arguments):
        before = launch.arguments[position - 1].text if position else ""
        if word.text.endswith(_CONFIG_FILES) and not word.text.startswith("-") and not _FLAG.match(before):
            loose.append(word.text)
    return named + loose


def overrides_of(launch: TrainingCommand) -> list[tuple[str, Setting]]:
    """Arguments ``name=value``, which replace those of a file of arguments: LLaMA-Factory, hparams/parser.py."""
    found: list[tuple[str, Setting]] = []
    for word in launch.arguments:
        if _FLAG.match(word.text):
            break
        if _OVERRIDE.fullmatch(word.text):
            key, _, text = word.text.partition("=")
            found.append((key, Setting(key, None if word.unknown else _value(text), own_line(word.line))))
    return found


def options_of(launch: TrainingCommand) -> list[tuple[str, Setting]]:
    """Options of the launcher by their names, with the launcher before the option in the reading."""
    name = launch.launchers[-1] if launch.launchers else "launcher"
    if name in _OF_NODES:
        return []
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
    return f"{program} fine-tunes, in line {launch.line}" if is_sft else ""


def preference_of(launch: TrainingCommand) -> tuple[str, str] | None:
    """Task of a program of preference training (TRL's ``dpo.py``), and words on it; None for another program."""
    program = launch.program.text.rpartition("/")[2]
    first = launch.arguments[0].text if launch.arguments else ""
    name = first if program == "trl" else program.removesuffix(".py").rpartition(".")[2].removeprefix("run_")
    task = OF_PROGRAMS.get(name)
    return None if task is None else (task, f"{program} trains on preferences, in line {launch.line}")


def is_trl(launch: TrainingCommand) -> bool:
    """True for TRL's own scripts: ``trl sft``, ``trl dpo``, ``trl/scripts/sft.py``."""
    program = launch.program.text
    is_known = bool(sft_of(launch)) or preference_of(launch) is not None
    return is_known and (program.rpartition("/")[2] == "trl" or _OF_TRL.search(program) is not None)
