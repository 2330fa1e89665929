"""Models of images and text: what axolotl's and LLaMA-Factory's settings say about them, next to a capture.

The number and the size of images are in the data, which no file has: a capture has them (``simplan capture --images``).
Sources: axolotl at 067b021, utils/freeze.py (``freeze_mm_modules``); LLaMA-Factory at ff6d4d1, hparams/model_args.py,
hparams/finetuning_args.py and model/model_utils/visual.py (which modules are a tower, a projector, a language model).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simplan.errors import SpecError
from simplan.interop.frameworks.hugging_face.keys import is_true, table, whole
from simplan.io import folder_of, is_file
from simplan.model.captured.adapters import parts_of
from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.file import read_captured

if TYPE_CHECKING:  # which calls this module
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_FREEZES = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
_FIX = (
    "capture it with its images (simplan capture config.json --images 1 --image-size 768x1024 --seq-len {length} -o "
    "vlm.json), and add --model vlm.json"
)


def capture_instead(run: TrainerRun) -> CapturedModel | None:
    """Capture that an override names; None for none, or for one that cannot be read, which its section reports."""
    file = run.instead.get("file")
    if file is None:
        return None
    paths = (Path(file), folder_of(run.reading.file) / file)
    try:
        return next((read_captured(path) for path in paths if is_file(path)), None)
    except SpecError:
        return None


def read_images(run: TrainerRun) -> None:
    """Read settings of images; refuse them without a capture that has images."""
    trainer, captured = run.trainer, run.captured
    keys = table("images")
    there = [key for key in keys if key in trainer]
    if not there:
        return
    if captured is None or not captured.sees:
        length = run.reading.written("model.seq_len") or 4096
        rule = "belongs to a model of images and text, and no capture with images is given"
        if captured is not None:
            rule = f"belongs to a model of images and text, and {captured.name} is captured with texts alone"
        trainer.refuse(there[0], rule, _FIX.format(length=length))
        trainer.no_effect(there[1:])
        return
    for key in there:
        if keys[key]:
            trainer.not_modeled(key, keys[key])
    trainer.no_effect(there)
    _check_size(run, captured)


def _check_size(run: TrainerRun, captured: CapturedModel) -> None:
    max_pixels, images = whole(run.trainer.value("image_max_pixels")), captured.images
    if max_pixels is not None and images is not None and images.height * images.width > max_pixels:
        rule = f"is less than {images.height} x {images.width}, the pixels of an image of {captured.name}"
        side = int(max_pixels**0.5) // 32 * 32
        run.trainer.refuse("image_max_pixels", rule, f"capture it with --image-size {side}x{side}")


def read_frozen_parts(run: TrainerRun) -> None:
    """Read which parts of a captured model of images are frozen; with adapters all are (``without_frozen``)."""
    if run.adapts or run.captured is None or not run.captured.sees or run.reading.written("model.frozen"):
        return
    frozen = _frozen(run)
    names = [name for _, names in frozen for name in names]
    if names:
        run.reading.put("model.frozen", names, " and ".join(key for key, _ in frozen))


def without_frozen(run: TrainerRun, paths: Sequence[str]) -> list[str]:
    """Linear layers of a captured model of images that may have adapters.

    LLaMA-Factory has none in parts that it freezes, or in projectors; axolotl freezes those of towers with
    ``freeze_mm_modules``.
    """
    captured = run.captured
    assert captured is not None, "paths of a captured model"
    if not captured.sees:
        return [*paths]
    names = [name for _, names in _frozen(run) for name in names]
    if run.is_factory:
        names += [*_modules(captured, "projector"), "patch_embed"]
    return [path for path in paths if not any(f".{name}." in f".{path}." for name in names)]


def _frozen(run: TrainerRun) -> list[tuple[str, list[str]]]:
    """Settings, or words on their default, and names of the modules that each freezes."""
    trainer, captured = run.trainer, run.captured
    assert captured is not None, "parts of a captured model"
    if run.is_axolotl:
        names = _modules(captured, "freeze_mm_modules") if trainer.is_true("freeze_mm_modules") else []
        return [(trainer.full("freeze_mm_modules"), names)] if names else []
    frozen = list[tuple[str, list[str]]]()
    if run.is_factory:
        for key, part in zip(_FREEZES, ("tower", "projector", "language_model"), strict=True):
            is_on = is_true(trainer.value(key)) if key in trainer else key != "freeze_language_model"
            where = trainer.full(key) if key in trainer else f"the default of LLaMA-Factory's {key}"
            if is_on and (names := _modules(captured, part)):
                frozen.append((where, names))
    return frozen


def _modules(captured: CapturedModel, part: str) -> list[str]:
    """Names of modules of a part (``tables/hugging_face.yaml``) that a capture has."""
    names: Sequence[str] = table("parts_of_images")[part]
    return [name for name, parts in parts_of(captured, names).items() if parts]
