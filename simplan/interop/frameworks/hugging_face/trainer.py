"""Arguments of the Hugging Face Trainer: launch scripts, JSON and YAML files, and folders of a training."""

from __future__ import annotations

from collections.abc import Iterable

from simplan.errors import Problem, SpecError, file_error
from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks.hugging_face.keys import Keys, document_of, flattened, named_document
from simplan.interop.frameworks.hugging_face.run import Run

_TITLE = "Hugging Face Trainer arguments"
_SIGNS = ("per_device_train_batch_size", "gradient_accumulation_steps", "model_name_or_path", "per_device_batch_size")
_AXOLOTL = {"micro_batch_size": "per_device_train_batch_size", "optimizer": "optim", "base_model": "model_name_or_path"}
"""Keys of axolotl that have another name in TrainingArguments."""
_AXOLOTL_SIGNS = ("base_model", "micro_batch_size", "sequence_len")


def _recognizes(file: ConfigFile) -> bool:
    document = document_of(file)
    if document is None:
        return False
    keys = document.data.keys()
    return "model" not in keys and (sum(sign in keys for sign in _SIGNS) >= 2 or _is_axolotl(keys) or _SIGNS[0] in keys)


def _is_axolotl(keys: Iterable[str]) -> bool:
    return sum(sign in keys for sign in _AXOLOTL_SIGNS) >= 2


def _read(file: ConfigFile) -> Configuration:
    document = document_of(file)
    if document is None:
        rule = "holds no arguments of the Trainer"
        fix = "give a launch script, TrainingArguments.to_json_string(), or YAML of these arguments"
        raise file_error(file.name, rule, fix)
    settings = [*flattened(document)]
    title, names_launcher = _TITLE, False
    if _is_axolotl(document.data.keys()):
        title, names_launcher = "axolotl configuration", True
        settings = [(_AXOLOTL.get(key, key), setting) for key, setting in settings]
    elif "finetuning_type" in document.data:
        title, names_launcher = "LLaMA-Factory configuration", True
    return read_run(title, file.name, trainer=settings, names_launcher=names_launcher)


Named = list[tuple[str, Setting]]
"""Settings with their keys within their file."""


def read_run(
    title: str,
    file: str,
    *,
    trainer: Named = (),  # type: ignore[assignment]
    accelerate: Named = (),  # type: ignore[assignment]
    num_devices: int | None = None,
    ranks_per_node: int | None = None,
    devices_key: str = "",
    names_launcher: bool = True,
) -> Configuration:
    """Read the arguments of a training with the files that they name.

    Raises:
        SpecError: Settings are refused, contradict each other, or a file is wrong.
    """
    trainer, accelerate = [*trainer], [*accelerate]
    by_key = {key: setting.value for key, setting in [*trainer, *accelerate]}
    launch = _named(by_key.get("config_file"), file) if accelerate else []
    accelerate = launch + accelerate
    in_launch = {key: setting.value for key, setting in launch}
    deepspeed = _named(
        by_key.get("deepspeed")
        or by_key.get("deepspeed_config_file")
        or in_launch.get("deepspeed_config.deepspeed_config_file"),
        file,
    )
    inline = [(key.removeprefix("deepspeed."), setting) for key, setting in trainer if key.startswith("deepspeed.")]
    deepspeed = deepspeed or inline
    of_fsdp = by_key.get("fsdp_config")
    if isinstance(of_fsdp, str):
        trainer += [(f"fsdp_config.{key}", setting) for key, setting in _named(of_fsdp, file)]
    reading = Reading.of(title, file, [setting for _, setting in [*trainer, *accelerate, *deepspeed]])
    keys = [Keys(reading, {key: setting.key for key, setting in each}) for each in (trainer, accelerate, deepspeed)]
    return Run(reading, *keys, num_devices, ranks_per_node, devices_key, names_launcher).configuration()


def _named(name: object, file: str) -> Named:
    """Settings of a file that another file names; empty if it is not there."""
    if not isinstance(name, str) or not name:
        return []
    found = named_document(name, file)
    return [] if found is None else [*flattened(found[1], found[0])]


FORMAT = Format(name="trainer", title=_TITLE, recognizes=_recognizes, read=_read)

__all__ = ["FORMAT", "Named", "Problem", "SpecError", "read_run"]
