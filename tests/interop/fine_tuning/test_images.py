"""axolotl's and LLaMA-Factory's files of models of images and text, next to a capture with its images."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.io import write_model
from simplan.model.captured.adapters import targets_of
from simplan.model.captured.facts import CapturedModel
from simplan.model.model import ModelSpec
from simplan.scenario.source import scenario_from
from tests.support.image_models import image_config

pytest.importorskip("transformers")

_LENGTH = 32
_AXOLOTL = f"""
base_model: llava-hf/llava-1.5-7b-hf
processor_type: AutoProcessor
image_size: 512
skip_prepare_dataset: true
remove_unused_columns: false
sequence_len: {_LENGTH}
micro_batch_size: 1
gradient_accumulation_steps: 1
optimizer: adamw_bnb_8bit
bf16: true
gradient_checkpointing: true
"""
_LORA = "adapter: lora\nlora_r: 4\n"
_FACTORY = f"""
model_name_or_path: llava-hf/llava-1.5-7b-hf
image_max_pixels: 262144
video_max_pixels: 16384
stage: sft
template: llava
cutoff_len: {_LENGTH}
per_device_train_batch_size: 1
gradient_accumulation_steps: 1
bf16: true
"""
_DECODER = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A capture with an image, and one of texts alone."""
    from executor.capture.capture import model_from_module
    from executor.capture.hugging_face import module_of_config
    from executor.capture.images import Images, batch_with_images

    module, config = module_of_config(image_config("llava"))
    folder = tmp_path_factory.mktemp("captures")
    batch, images = batch_with_images(module, config, _LENGTH, Images(1))
    seeing = model_from_module(module, batch, precisions=("bf16", "autocast"), name="llava")
    texts = tuple(tensor for tensor in seeing.inputs if tensor.name != "pixel_values")
    files = {"with images": folder / "vlm.json", "of texts": folder / "texts.json"}
    write_model(files["with images"], seeing.model_copy(update={"images": images}))
    write_model(files["of texts"], seeing.model_copy(update={"inputs": texts}))
    return files


def _read(folder: Path, text: str, capture: Path | None) -> ModelSpec:
    file = folder / "file.yml"
    file.write_text(text)
    keys = {"cluster.device": "rtx-4090", "cluster.num_devices": 1}
    return scenario_from(file, keys if capture is None else {**keys, "model.file": str(capture)}).job.model


def _frozen(model: ModelSpec) -> set[str]:
    """First words of the paths of frozen parameters, and the others with a star."""
    names = {
        (parameter.name if not path or parameter.in_root else f"{path}.{parameter.name}", parameter.frozen)
        for path, layer in zip(_captured(model).modules, model.layers, strict=True)
        for parameter in layer.parameters
    }
    parts = {"vision_tower", "multi_modal_projector", "language_model", "lm_head"}
    return {part for part in parts if all(frozen for name, frozen in names if part in name.split("."))}


def _captured(model: ModelSpec) -> CapturedModel:
    assert model.captured is not None
    return model.captured


@pytest.mark.parametrize(
    ("text", "frozen"),
    [
        (_AXOLOTL, set()),
        (f"{_AXOLOTL}freeze_mm_modules: true", {"vision_tower", "multi_modal_projector"}),
        (f"{_AXOLOTL}unfrozen_parameters: ['^lm_head.*', '^model.multi_modal.*']", {"vision_tower", "language_model"}),
        (f"{_FACTORY}finetuning_type: full", {"vision_tower", "multi_modal_projector"}),
        (
            f"{_FACTORY}finetuning_type: full\nfreeze_vision_tower: false\nfreeze_language_model: true",
            {"multi_modal_projector", "language_model", "lm_head"},
        ),
    ],
)
def test_frozen_parts_are_those_of_the_tool(
    tmp_path: Path, captures: dict[str, Path], text: str, frozen: set[str]
) -> None:
    assert _frozen(_read(tmp_path, text, captures["with images"])) == frozen


@pytest.mark.parametrize(
    ("text", "adapted"),
    [
        (f"{_AXOLOTL}{_LORA}lora_target_modules: '{_DECODER}'", {"language_model"}),
        (f"{_AXOLOTL}{_LORA}lora_target_modules: [q_proj]", {"language_model", "vision_tower"}),
        (f"{_AXOLOTL}{_LORA}lora_target_linear: true", {"language_model", "vision_tower", "multi_modal_projector"}),
        (f"{_AXOLOTL}{_LORA}lora_target_linear: true\nfreeze_mm_modules: true", {"language_model"}),
        (f"{_FACTORY}lora_target: all", {"language_model"}),
        (f"{_FACTORY}lora_target: all\nfreeze_vision_tower: false", {"language_model", "vision_tower"}),
    ],
)
def test_adapters_are_where_the_tool_puts_them(
    tmp_path: Path, captures: dict[str, Path], text: str, adapted: set[str]
) -> None:
    model = _read(tmp_path, text, captures["with images"])
    paths = {path for of_target in targets_of(_captured(model), model.lora_targets).values() for path in of_target}
    assert {path.split(".")[1] for path in paths} == adapted


@pytest.mark.parametrize(
    ("text", "capture", "said"),
    [
        (_AXOLOTL, "", r"file.yml:3: processor_type = .*no capture with images is given; .*--images 1 .*--model vlm"),
        (_AXOLOTL, "of texts", "processor_type = .*, and llava is captured with texts alone"),
        (
            _FACTORY.replace("262144", "1024"), "with images",
            "image_max_pixels = 1024: is less than 56 x 56, the pixels of an image of llava; capture it with --image-s",
        ),
        (
            f"{_AXOLOTL}{_LORA}lora_target_modules: [fc1]\nfreeze_mm_modules: true", "with images",
            r"lora_target_modules = \[.*: has adapters in frozen parts alone",
        ),
        (f"{_AXOLOTL}{_LORA}lora_target_modules: '(q_proj'", "with images", r"is no linear layer of llava"),
    ],
)  # fmt: skip
def test_files_that_need_another_capture(
    tmp_path: Path, captures: dict[str, Path], text: str, capture: str, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        _read(tmp_path, text, captures.get(capture))
