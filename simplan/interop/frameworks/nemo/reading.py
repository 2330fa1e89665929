"""NeMo: configurations of 1.x (``model`` and ``trainer``, as its launcher has them) and of 2.0 (dumps of NeMo-Run)."""

from __future__ import annotations

from simplan.document import parse_yaml
from simplan.interop.configuration import Configuration, Reading
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks.nemo.version_1 import read_version_1
from simplan.interop.frameworks.nemo.version_2 import read_version_2


def _recognizes(file: ConfigFile) -> bool:
    document = file.yaml
    if document is None:
        return False
    data = document.data
    if str(data.get("_target_", "")).startswith("nemo.") or "nemo.lightning.pytorch" in file.text:
        return True
    model = data.get("model")
    return isinstance(model, dict) and isinstance(data.get("trainer"), dict) and "tensor_model_parallel_size" in model


def read(file: ConfigFile) -> Configuration:
    """Configuration of a NeMo file.

    Raises:
        SpecError: The file is no YAML, or its settings contradict each other; ``NotModelledError`` for other jobs.
    """
    document = file.yaml or parse_yaml(file.text, file.name)
    settings = core.interpolated(core.flattened(document), prefix="training.")
    keys = {setting.key for setting in settings}
    if any(key.startswith("trainer.strategy.") for key in keys) and "model.micro_batch_size" not in keys:
        return read_version_2(Reading.of("NeMo 2.0 configuration", file.name, settings))
    return read_version_1(Reading.of("NeMo 1.x configuration", file.name, settings))


FORMAT = Format("nemo", "NeMo configuration", _recognizes, read)
