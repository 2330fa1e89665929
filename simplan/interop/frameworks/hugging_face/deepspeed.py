"""DeepSpeed's JSON configuration."""

from __future__ import annotations

from simplan.errors import file_error
from simplan.interop.configuration import Configuration, Reading
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks.hugging_face.keys import Keys, document_of, flattened
from simplan.interop.frameworks.hugging_face.run import TrainerRun
from simplan.interop.frameworks.hugging_face.writing import deepspeed_options, export_deepspeed

_TITLE = "DeepSpeed configuration"
_SIGNS = ("zero_optimization", "train_micro_batch_size_per_gpu")


def _recognizes(file: ConfigFile) -> bool:
    document = document_of(file)
    if document is None:
        return False
    keys = document.data.keys()
    has_batch = "train_batch_size" in keys and ("fp16" in keys or "bf16" in keys or "optimizer" in keys)
    return "model" not in keys and (any(sign in keys for sign in _SIGNS) or has_batch)


def _read(file: ConfigFile) -> Configuration:
    document = document_of(file)
    if document is None:
        raise file_error(file.name, "this is no DeepSpeed configuration: it is no JSON object", "check its braces")
    settings = [*flattened(document)]
    reading = Reading.of(_TITLE, file.name, [setting for _, setting in settings])
    none = Keys(reading)
    return TrainerRun(
        reading,
        none,
        none,
        Keys(reading, {key: setting.key for key, setting in settings}),
        reads_others=file.reads_others,
    ).configuration()


FORMAT = Format(
    name="deepspeed",
    title=_TITLE,
    recognizes=_recognizes,
    read=_read,
    settings=deepspeed_options,
    export=export_deepspeed,
)
