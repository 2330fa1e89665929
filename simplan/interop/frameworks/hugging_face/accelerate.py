"""YAML configuration of ``accelerate launch``: DDP, FSDP, DeepSpeed."""

from __future__ import annotations

from simplan.errors import file_error
from simplan.interop.configuration import Configuration
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks.hugging_face.keys import document_of, flattened
from simplan.interop.frameworks.hugging_face.trainer import read_run
from simplan.interop.frameworks.hugging_face.writing import accelerate_options, export_accelerate

_TITLE = "Accelerate configuration"
_SIGNS = ("compute_environment", "num_processes", "fsdp_config", "deepspeed_config", "num_machines", "mixed_precision")


def _recognizes(file: ConfigFile) -> bool:
    document = document_of(file)
    if document is None:
        return False
    return "distributed_type" in document.data and any(sign in document.data for sign in _SIGNS)


def _read(file: ConfigFile) -> Configuration:
    document = document_of(file)
    if document is None:
        raise file_error(file.name, "this is no configuration of Accelerate: it is no YAML mapping", "check its colons")
    return read_run(_TITLE, file, accelerate=[*flattened(document)])


FORMAT = Format(
    name="accelerate",
    title=_TITLE,
    recognizes=_recognizes,
    read=_read,
    settings=accelerate_options,
    export=export_accelerate,
)
