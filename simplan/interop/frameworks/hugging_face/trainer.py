"""Arguments of the Hugging Face Trainer: launch scripts, JSON and YAML files, and folders of a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from simplan.errors import Problem, SpecError, file_error
from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks.hugging_face.keys import AUTO, Keys, document_of, flattened, named_document
from simplan.interop.frameworks.hugging_face.run import TrainerRun
from simplan.interop.frameworks.hugging_face.script import (
    arguments_of,
    config_files,
    included_devices,
    is_trl,
    launch_of,
    options_of,
    sft_of,
)
from simplan.interop.frameworks.hugging_face.writing import trainer_options
from simplan.interop.frameworks.shell import TrainingCommand
from simplan.interop.nccl import nccl_settings

Named = list[tuple[str, Setting]]
"""Settings with their keys within their file."""

_TITLE = "Hugging Face Trainer arguments"
_AXOLOTL_TITLE = "axolotl configuration"
_SIGNS = ("per_device_train_batch_size", "gradient_accumulation_steps", "model_name_or_path", "per_device_batch_size")
_AXOLOTL = {"micro_batch_size": "per_device_train_batch_size", "optimizer": "optim", "base_model": "model_name_or_path"}
"""Keys of axolotl that have another name in TrainingArguments."""
_AXOLOTL_SIGNS = ("base_model", "micro_batch_size", "sequence_len")


def _recognizes(file: ConfigFile) -> bool:
    document = document_of(file)
    if document is None:
        return launch_of(file.text, file.name) is not None
    keys = document.data.keys()
    return "model" not in keys and (sum(sign in keys for sign in _SIGNS) >= 2 or _is_axolotl(keys) or _SIGNS[0] in keys)


def _is_axolotl(keys: Iterable[str]) -> bool:
    return sum(sign in keys for sign in _AXOLOTL_SIGNS) >= 2


def _read(file: ConfigFile) -> Configuration:
    document = document_of(file)
    if document is not None:
        title, settings, names_launcher = _arguments([*flattened(document)])
        return read_run(title, file, trainer=settings, names_launcher=names_launcher)
    launch = launch_of(file.text, file.name)
    if launch is None:
        rule = "holds no arguments of the Trainer"
        fix = "give a launch script, TrainingArguments.to_json_string(), or YAML of these arguments"
        raise file_error(file.name, rule, fix)
    return _read_launch(launch, file)


def _arguments(settings: Named) -> tuple[str, Named, bool]:
    """Title, settings by names of TrainingArguments, and True if the tool that they are for launches DDP by itself."""
    keys = {key for key, _ in settings}
    if _is_axolotl(keys):
        names = _AXOLOTL if "adapter" in keys else {**_AXOLOTL, "lora_r": "lora_unused"}
        settings = [(key, _halved(key, setting)) for key, setting in settings]
        return _AXOLOTL_TITLE, [(names.get(key, key), setting) for key, setting in settings], True
    if "finetuning_type" in keys:
        return "LLaMA-Factory configuration", settings, True
    return _TITLE, settings, False


def _halved(key: str, setting: Setting) -> Setting:
    """``bf16: auto`` of axolotl as what it is on every device that has BF16."""
    return replace(setting, value=True) if key == "bf16" and setting.value == AUTO else setting


def _read_launch(launch: TrainingCommand, file: ConfigFile) -> Configuration:
    """Arguments of a command, with the files of arguments that it names."""
    settings: Named = []
    title = _TITLE
    for name in config_files(launch):
        found = named_document(name, file)
        if found is None:
            rule, fix = "is named by the command and is not next to it", "put it there"
            raise SpecError(Problem(field=name, rule=rule, fix=fix), file=file.name)
        title, own, _ = _arguments([*flattened(found[1], found[0])])
        settings += own
    settings += _arguments(arguments_of(launch.arguments))[1]
    settings += [(setting.key, setting) for setting in nccl_settings(launch.environment)]
    devices, per_node = launch.num_devices, launch.ranks_per_node
    key = launch.launcher[0].key if launch.launcher else ""
    options = options_of(launch)
    key = next((setting.key for _, setting in options if setting.key.endswith(f" {key}")), key)
    if (included := included_devices(launch)) is not None:
        devices, key = included
    elif not launch.launchers and launch.program.text.endswith(".py"):
        devices, per_node, key = 1, 1, f"python starts one process, in line {launch.program.line}"
    unknown = {name for name, setting in [*settings, *options] if setting.value is None}
    return read_run(
        f"{title}, launched by {launch.launchers[-1] if launch.launchers else launch.program.text}",
        file,
        trainer=settings,
        accelerate=options,
        num_devices=devices,
        ranks_per_node=per_node,
        devices_key=key,
        names_launcher=launch.launchers[-1:] != ("accelerate",),
        unknown=frozenset(unknown),
        is_trl=is_trl(launch),
        task=sft_of(launch),
    )


def read_run(
    title: str,
    file: ConfigFile,
    *,
    trainer: Sequence[tuple[str, Setting]] = (),
    accelerate: Sequence[tuple[str, Setting]] = (),
    num_devices: int | None = None,
    ranks_per_node: int | None = None,
    devices_key: str = "",
    names_launcher: bool = True,
    unknown: frozenset[str] = frozenset(),
    is_trl: bool = False,
    task: str = "",
) -> Configuration:
    """Read the arguments of a training with the files that they name.

    Args:
        trainer, accelerate: Settings of the training script, and of ``accelerate launch``.
        num_devices, ranks_per_node, devices_key, names_launcher, unknown, is_trl, task: As in ``TrainerRun``.

    Raises:
        SpecError: Settings are refused, contradict each other, or a file is wrong.
    """
    missing: list[str] = []

    def named(*candidates: tuple[str, Sequence[tuple[str, Setting]]]) -> Named:
        """Settings of the file that the first of the keys names."""
        for key, settings in candidates:
            setting = next((setting for name, setting in settings if name == key), None)
            if setting is not None and isinstance(setting.value, str) and setting.value:
                found = named_document(setting.value, file)
                missing.extend([] if found is not None else [setting.key])
                return [] if found is None else [*flattened(found[1], found[0])]
        return []

    accelerate = [*named(("config_file", accelerate)), *accelerate]
    deepspeed = named(
        ("deepspeed", trainer),
        ("deepspeed_config_file", accelerate),
        ("deepspeed_config.deepspeed_config_file", accelerate),
    )
    deepspeed += [(key.removeprefix("deepspeed."), setting) for key, setting in trainer if key.startswith("deepspeed.")]
    trainer = [*trainer]
    trainer += [(f"fsdp_config.{key}", setting) for key, setting in named(("fsdp_config", trainer))]
    reading = Reading.of(title, file.name, [setting for _, setting in [*trainer, *accelerate, *deepspeed]])

    def keys(settings: Sequence[tuple[str, Setting]]) -> Keys:
        return Keys(reading, {key: setting.key for key, setting in settings})

    run = TrainerRun(
        reading,
        keys(trainer),
        keys(accelerate),
        keys(deepspeed),
        num_devices=num_devices,
        ranks_per_node=ranks_per_node,
        devices_key=devices_key,
        names_launcher=names_launcher,
        unknown=unknown,
        missing=tuple(missing),
        loads_as_computed=title.startswith(_AXOLOTL_TITLE),
        is_trl=is_trl,
        task=task,
        reads_others=file.reads_others,
    )
    return run.configuration()


FORMAT = Format(name="trainer", title=_TITLE, recognizes=_recognizes, read=_read, settings=trainer_options)
