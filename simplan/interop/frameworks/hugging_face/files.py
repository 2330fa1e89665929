"""Files of a training with the Hugging Face stack: what they are, and which others they name.

Arguments of the Trainer stand in launch scripts, Python code, JSON and YAML; ``accelerate launch`` has a YAML file of
its own (DDP, FSDP, DeepSpeed), and DeepSpeed a JSON file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simplan.document import Document
from simplan.errors import Problem, SpecError, file_error
from simplan.interop.allocator import allocator_settings
from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks.hugging_face import writing
from simplan.interop.frameworks.hugging_face.devices import devices_of_factory, included_devices, of_launcher
from simplan.interop.frameworks.hugging_face.keys import Keys, document_of, flattened, named_document, table
from simplan.interop.frameworks.hugging_face.python import has_training, read_python
from simplan.interop.frameworks.hugging_face.run import TrainerRun
from simplan.interop.frameworks.hugging_face.script import (
    arguments_of,
    config_files,
    engine_file,
    is_trl,
    launches_of,
    options_of,
    overrides_of,
    preference_of,
    refused_program,
    sft_of,
)
from simplan.interop.frameworks.hugging_face.tools import (
    AXOLOTL,
    FACTORY,
    TRL,
    renamed,
    split_of_tool,
    tool_of,
)
from simplan.interop.frameworks.shell import TrainingCommand, only_launch
from simplan.interop.nccl import nccl_settings

Named = Sequence[tuple[str, Setting]]
"""Settings with their keys within their file."""

_TRAINER = "Hugging Face Trainer arguments"
_ACCELERATE, _DEEPSPEED = "Accelerate configuration", "DeepSpeed configuration"
_TRAINER_SIGNS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "model_name_or_path", "per_device_batch_size",
)  # fmt: skip
_ACCELERATE_SIGNS = (
    "compute_environment", "num_processes", "fsdp_config", "deepspeed_config", "num_machines", "mixed_precision",
)  # fmt: skip
_DEEPSPEED_SIGNS = ("zero_optimization", "train_micro_batch_size_per_gpu")
_OF_DEEPSPEED = (
    "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps",
    "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "gradient_clipping", "steps_per_print",
    "zero_allow_untested_optimizer",
)  # fmt: skip
"""Sections and keys of which a DeepSpeed configuration has at least one."""


def _has_accelerate(file: ConfigFile) -> bool:
    keys = _document(file).data.keys()
    return "distributed_type" in keys and any(sign in keys for sign in _ACCELERATE_SIGNS)


def _has_deepspeed(file: ConfigFile) -> bool:
    keys = _document(file).data.keys()
    has_batch = "train_batch_size" in keys and ("fp16" in keys or "bf16" in keys or "optimizer" in keys)
    return "model" not in keys and (any(sign in keys for sign in _DEEPSPEED_SIGNS) or has_batch)


def _has_trainer(file: ConfigFile) -> bool:
    if has_training(file):
        return True
    if document_of(file) is None:
        return bool(launches_of(file))
    keys = _document(file).data.keys()
    signs = [sign for sign in _TRAINER_SIGNS if sign in keys]
    is_of_tool = tool_of(keys) == AXOLOTL or (tool_of(keys) == FACTORY and "stage" in keys)
    return "model" not in keys and (len(signs) >= 2 or is_of_tool or _TRAINER_SIGNS[0] in keys)


def _document(file: ConfigFile) -> Document:
    return document_of(file) or Document({}, {})


def _read_accelerate(file: ConfigFile) -> Configuration:
    document = document_of(file)
    if document is None:
        raise file_error(file.name, "this is no configuration of Accelerate: it is no YAML mapping", "check its colons")
    return _run(_ACCELERATE, file, accelerate=[*flattened(document)]).configuration()


def _read_deepspeed(file: ConfigFile) -> Configuration:
    document = document_of(file)
    if document is None:
        raise file_error(file.name, "this is no DeepSpeed configuration: it is no JSON object", "check its braces")
    return _run(_DEEPSPEED, file, deepspeed=[*flattened(document)]).configuration()


def _read_trainer(file: ConfigFile) -> Configuration:
    if file.path.suffix in (".py", ".ipynb"):
        return _read_code(file)
    document = document_of(file)
    if document is not None:
        tool, settings = _arguments([*flattened(document)])
        run = _run(_title(tool), file, trainer=settings, tool=tool)
        run.names_launcher = bool(tool)
        return run.configuration()
    launches = launches_of(file)
    if not launches:
        rule = "holds no arguments of the Trainer"
        fix = "give a launch script, TrainingArguments.to_json_string(), or YAML of these arguments"
        raise file_error(file.name, rule, fix)
    return _read_launch(only_launch(launches, file.name), file)


def _read_code(file: ConfigFile) -> Configuration:
    """Calls of Python code, which one process runs."""
    code = read_python(file)
    run = _run(f"Python code with {code.tool or 'Hugging Face libraries'}", file, trainer=code.settings, tool=code.tool)
    run.num_devices = run.ranks_per_node = 1
    run.devices_key = "Python code starts one process"
    run.is_trl, run.task, run.preference = code.is_trl, code.task, code.preference
    for refused in code.refused:
        run.reading.refuse(*refused)
    run.trainer.no_effect(table("python_no_effect"))
    return run.configuration()


def _arguments(settings: Named) -> tuple[str, Named]:
    """Tool that the settings are for (``tool_of``), and settings by names of TrainingArguments."""
    keys = frozenset(key for key, _ in settings)
    tool = tool_of(keys)
    return tool, [renamed(tool, key, setting, keys) for key, setting in settings]


def _title(tool: str) -> str:
    return f"{tool} configuration" if tool else _TRAINER


def _read_launch(launch: TrainingCommand, file: ConfigFile) -> Configuration:
    """Arguments of a command, with the files of arguments that it names."""
    launch, file = of_launcher(launch), replace(file, written=launch.files)
    settings: list[tuple[str, Setting]] = []
    tool = ""
    for name in config_files(launch):
        named = named_document(name, file)
        if named is None:
            rule, fix = "is named by the command and is not next to it", "put it there"
            raise SpecError(Problem(field=name, rule=rule, fix=fix), file=file.name)
        tool, launch_settings = _arguments([*flattened(named[1], named[0])])
        settings += launch_settings
        settings += overrides_of(launch)
    of_command, launch_settings = _arguments(arguments_of(launch.arguments, launch.files))
    tool, settings = tool or of_command, settings + list(launch_settings)
    variables = (*nccl_settings(launch.environment), *allocator_settings(launch.environment))
    settings += [(setting.key, setting) for setting in variables]
    options = options_of(launch)
    if launch.program.text in (TRL, AXOLOTL):
        settings, passed = split_of_tool(launch.program.text, settings)
        options = [*passed, *options]
    launched_by = launch.launchers[-1] if launch.launchers else launch.program.text
    of_engine = engine_file(launch, file)
    title = f"{_title(tool) if of_engine is None else _DEEPSPEED}, launched by {launched_by}"
    if of_engine is None:
        run = _run(title, file, trainer=settings, accelerate=options, tool=tool)
    else:
        deepspeed = [*flattened(of_engine[1], of_engine[0])]
        run = _run(title, file, accelerate=options, deepspeed=deepspeed, others=settings)
        run.reading.value("--deepspeed_config")
        run.reading.value("--deepspeed")
    run.num_devices, run.ranks_per_node = launch.num_devices, launch.ranks_per_node
    run.reading.ranks_per_node = launch.node_setting
    key = launch.launcher[0].key if launch.launcher else ""
    run.devices_key = next((setting.key for _, setting in options if setting.key.endswith(f" {key}")), key)
    if (included := included_devices(launch)) is not None:
        run.num_devices, run.devices_key = included
    elif launch.program.text == "llamafactory-cli":
        run.num_nodes, run.ranks_per_node, run.devices_key = devices_of_factory(launch)
        if run.num_nodes is not None and run.ranks_per_node is not None:
            run.num_devices = run.num_nodes * run.ranks_per_node
    elif not launch.launchers and launch.program.text.endswith(".py"):
        run.num_devices = run.ranks_per_node = 1
        run.devices_key = f"python starts one process, in line {launch.line}"
    run.names_launcher = launch.launchers[-1:] != ("accelerate",)
    run.unknown = frozenset(name for name, setting in [*settings, *options] if setting.value is None)
    run.is_trl, run.task, run.preference = is_trl(launch), sft_of(launch), preference_of(launch)
    if (refused := refused_program(launch)) is not None:
        first = f" {launch.arguments[0].text}" if launch.program.text == TRL else ""
        run.reading.refuse(launch.program.text + first, *refused)
    return run.configuration()


def _run(
    title: str,
    file: ConfigFile,
    *,
    trainer: Named = (),
    accelerate: Named = (),
    deepspeed: Named = (),
    others: Named = (),
    tool: str = "",
) -> TrainerRun:
    """The run of a file, with the files that its settings name.

    Args:
        tool: Tool that the settings of the training script are for (``tool_of``); empty for none.
        trainer, accelerate, deepspeed: Settings of the training script, of ``accelerate launch``, and of DeepSpeed.
        others: Arguments of a program of the user's own.

    Raises:
        SpecError: A file is wrong.
    """
    missing: list[str] = []
    there: list[str] = []

    def named(*candidates: tuple[str, Named]) -> Named:
        """Settings of the file that the first of the keys names."""
        for key, settings in candidates:
            setting = next((setting for name, setting in settings if name == key), None)
            if setting is not None and isinstance(setting.value, str) and setting.value:
                named = named_document(setting.value, file)
                (missing if named is None else there).append(setting.key)
                return [] if named is None else [*flattened(named[1], named[0])]
        return []

    accelerate = [*named(("config_file", accelerate)), *accelerate]
    of_file = named(
        ("deepspeed", trainer),
        ("deepspeed_config", trainer),
        ("deepspeed_config_file", accelerate),
        ("deepspeed_config.deepspeed_config_file", accelerate),
    )
    if of_file and not any(key.partition(".")[0] in _OF_DEEPSPEED for key, _ in of_file):
        name = of_file[0][1].key.partition(": ")[0]
        rule = "is named as the DeepSpeed configuration, and has none of its keys"
        fix = f"name a file with one of {', '.join(_OF_DEEPSPEED[:4])}"
        raise SpecError(Problem(field=name, rule=rule, fix=fix), file=file.name)
    deepspeed = [
        *deepspeed,
        *of_file,
        *((key.removeprefix("deepspeed."), setting) for key, setting in trainer if key.startswith("deepspeed.")),
    ]
    trainer = [*trainer, *((f"fsdp_config.{key}", setting) for key, setting in named(("fsdp_config", trainer)))]
    reading = Reading.of(title, file.name, [setting for _, setting in [*trainer, *accelerate, *deepspeed, *others]])
    for key in there:
        reading.value(key)

    def keys(settings: Named) -> Keys:
        last = {key: setting.key for key, setting in settings}
        for key, setting in settings:
            if setting.key != last[key]:
                reading.value(setting.key)  # a later one counts, as that of the command line after that of a file
        return Keys(reading, last)

    return TrainerRun(
        reading,
        keys(trainer),
        keys(accelerate),
        keys(deepspeed),
        missing=tuple(missing),
        tool=tool,
        reads_others=file.reads_others,
        instead=file.instead,
    )


FORMATS = (
    Format(
        "accelerate",
        _ACCELERATE,
        _has_accelerate,
        _read_accelerate,
        writing.accelerate_options,
        writing.export_accelerate,
        "accelerate",
    ),
    Format(
        "deepspeed",
        _DEEPSPEED,
        _has_deepspeed,
        _read_deepspeed,
        writing.deepspeed_options,
        writing.export_deepspeed,
        "deepspeed",
    ),
    Format("trainer", _TRAINER, _has_trainer, _read_trainer, writing.trainer_options),
)
