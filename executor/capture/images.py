"""Images of a batch for a model of images and texts: what the processors of transformers make of them.

The layout follows from the arguments of ``forward`` and from the configuration of the tower. How many tokens of the
text an image takes is what the model's own ``get_image_features`` gives for it. Sizes are those after the processor's
resizing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.capture.capture import fake_module, given_batch
from executor.capture.trace import Tracer, as_on_gpus
from executor.capture.values import Values
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.model.captured.facts import CapturedImages

PIXELS = "pixel_values"
_SHUFFLES = "downsample_ratio", "downsample_factor", "pixel_shuffle_ratio", "scale_factor"
"""Keys of models that merge neighboring patches by shuffling pixels: their processors cut a large image into tiles, and
add the whole image as one more (InternVL, Llama 4, Idefics3, SmolVLM, LFM2-VL, Aya Vision, Command A Vision)."""
_NAFLEX_TILE = 512  # pixels, Lfm2VlImageProcessor.tile_size
_USUAL_SOFT_TOKENS = 280  # Gemma4ImageProcessor.max_soft_tokens
_OTHER_LAYOUTS = frozenset({"target_sizes", "image_patches", "image_pixel_values", "high_res_pixel_values"})
"""Arguments of layouts that are not made here."""
_SIZE, _IMAGES = "--image-size", "--images"

Size = tuple[int, int]
"""Height and width, pixels."""


class Images(NamedTuple):
    """Images of each sample.

    Attributes:
        number: Images.
        size: Size of each; None for that of the tower.
    """

    number: int
    size: Size | None = None


class _Layout(NamedTuple):
    """Pixels of images, and what says where they belong.

    Attributes:
        make: Gives arguments for a number of samples and the length of each.
        size: Size of an image.
    """

    make: Callable[[int, int], dict[str, Tensor]]
    size: Size


def batch_with_images(
    module: nn.Module, config: Any, seq_len: int, images: Images
) -> tuple[Callable[[int], dict[str, Tensor]], CapturedImages]:
    """Function that makes the arguments of forward for a number of samples, and the images of each.

    Args:
        module, config: See ``executor.capture.hugging_face.module_of_config``.
        seq_len: Tokens of a sample, those that stand for images among them.

    Raises:
        SpecError: The model takes no such images, or a sample is too short for them.
        NotModelledError: The images have a layout that is not made here.
    """
    accepted = inspect.signature(module.forward).parameters
    layout = _layout(module, accepted, config, images)
    tokens = _tokens(module, layout, images.number)
    needed = images.number * (tokens + 1) + 1
    if needed > seq_len:
        rule = f"is less than {images.number} images of {tokens:,} tokens need"
        raise _wrong("--seq-len", seq_len, rule, f"use at least {needed:,}, or smaller images ({_SIZE})")

    def batch(number: int) -> dict[str, Tensor]:
        marks = torch.zeros(number, seq_len, dtype=torch.int64)
        for image in range(images.number):
            first = image * (tokens + 1) + 1  # a word between two images
            marks[:, first : first + tokens] = 1
        ids = torch.where(marks == 1, _placeholder(config), _word(config))
        kinds = {key: marks.clone() for key in _KINDS_OF_TOKENS if key in accepted}
        return {"input_ids": ids, "labels": ids.clone(), **kinds, **layout.make(number, seq_len)}

    height, width = layout.size
    return batch, CapturedImages(number=images.number, height=height, width=width, tokens=tokens)


_KINDS_OF_TOKENS = "mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"
"""Arguments that mark the tokens of images."""


def _layout(module: nn.Module, accepted: Mapping[str, Any], config: Any, images: Images) -> _Layout:
    vision = getattr(config, "vision_config", None)
    if PIXELS not in accepted or vision is None or "input_ids" not in accepted:
        raise _wrong(
            _IMAGES, images.number, f"is for models of images and texts, and {config.model_type} is none", "remove it"
        )
    if other := _OTHER_LAYOUTS & accepted.keys():
        what = f"images of {config.model_type}, which have {sorted(other)[0]},"
        raise NotModelledError(
            Problem(
                field=_IMAGES,
                value=str(images.number),
                rule=f"{what} are not modeled yet",
                fix="give a batch of your own: simplan capture MODULE:FACTORY --inputs MODULE:FUNCTION",
            )
        )
    if "image_grid_thw" in accepted:
        return _grid(module, accepted, config, vision, images)
    if "image_position_ids" in accepted:
        return _positions(config, vision, images)
    if "spatial_shapes" in accepted:
        return _naflex(config, vision, images)
    if "aspect_ratio_ids" in accepted:
        return _aspects(config, vision, images)
    if "pixel_attention_mask" in accepted:
        return _masked(config, vision, images)
    if "image_sizes" in accepted and getattr(config, "image_grid_pinpoints", None):
        return _pinpoints(config, vision, images)
    if "image_sizes" in accepted and getattr(vision, "model_type", "") == "pixtral":
        return _sized(config, vision, images)
    return _fixed(config, vision, images)


def _wrong(field: str, value: object, rule: str, fix: str) -> SpecError:
    return SpecError(Problem(field=field, value=str(value), rule=rule, fix=fix))


def _square(value: Any) -> int:
    """Side of what a configuration gives as a number, or as height and width."""
    if isinstance(value, Mapping):
        value = value.get("height") or value.get("shortest_edge")
    return int(value[0] if isinstance(value, list | tuple) else value)


def _channels(vision: Any) -> int:
    return next((number for key in ("in_channels", "num_channels") if (number := getattr(vision, key, None))), 3)


def _size_of(config: Any, images: Images, unit: int, usual: Size | None = None) -> Size:
    """Size of images of which both sides are multiples of a unit."""
    size = images.size or usual
    if size is None:
        rule = f"is missing: images of {config.model_type} differ in size"
        raise SpecError(
            Problem(field=_SIZE, rule=rule, fix=f"give the size after resizing, e.g. {_SIZE} {unit * 16}x{unit * 16}")
        )
    nearest = tuple(max(unit, round(side / unit) * unit) for side in size)
    if nearest != size:
        rule = f"has sides that are no multiples of {unit}, to which the processor of {config.model_type} resizes"
        raise _wrong(_SIZE, f"{size[0]}x{size[1]}", rule, f"use {nearest[0]}x{nearest[1]}")
    return size


def _convolves(module: nn.Module) -> bool:
    """True for a tower that embeds patches as images, and not as vectors."""
    weights = (weight for name, weight in module.named_parameters() if _EMBEDS_PATCHES.search(name))
    return next((weight.dim() == 4 for weight in weights), False)


_EMBEDS_PATCHES = re.compile(r"patch_embed\w*\.(\w+\.)?weight$")


def _grid(module: nn.Module, accepted: Mapping[str, Any], config: Any, vision: Any, images: Images) -> _Layout:
    """Patches of all images in one list, and the rows and columns of each (Qwen-VL, GLM-V, Kimi-VL)."""
    patch, depth = _square(vision.patch_size), getattr(vision, "temporal_patch_size", None)
    merge = _square(getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_kernel_size", None) or 1)
    size = _size_of(config, images, patch * merge)
    rows, columns = size[0] // patch, size[1] // patch
    shape: tuple[int, ...] = (_channels(vision), patch, patch)
    if depth is not None or not _convolves(module):
        shape = (_channels(vision) * (depth or 1) * patch * patch,)

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = samples * images.number
        inputs = {
            PIXELS: torch.ones(number * rows * columns, *shape),
            "image_grid_thw": torch.tensor([[1, rows, columns]] * number),
        }
        return inputs | (
            {"image_merge_sizes": torch.ones(number, dtype=torch.int64)} if "image_merge_sizes" in accepted else {}
        )

    return _Layout(make, size)


def _positions(config: Any, vision: Any, images: Images) -> _Layout:
    """Patches of each image up to a largest number, and the place of each (Gemma 4)."""
    patch, pool = _square(vision.patch_size), vision.pooling_kernel_size
    unit = patch * pool
    max_tokens = getattr(vision, "num_soft_tokens", None) or _USUAL_SOFT_TOKENS
    side = int(max_tokens**0.5)
    size = _size_of(config, images, unit, (unit * side, unit * side))
    merged = getattr(vision, "model_patch_size", None)  # of a model without a tower, whose patches are merged
    width = merged or patch
    rows, columns, padded = size[0] // width, size[1] // width, max_tokens * (unit // width) ** 2
    if rows * columns > padded:
        rule = f"has {rows * columns // (unit // width) ** 2} tokens, of at most {max_tokens}"
        raise _wrong(_SIZE, f"{size[0]}x{size[1]}", rule, f"use {unit * side}x{unit * side}")

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = samples * images.number
        places = torch.full((padded, 2), -1)
        places[: rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return {
            PIXELS: torch.ones(number, padded, _channels(vision) * width * width),
            "image_position_ids": places.repeat(number, 1, 1),
        }

    return _Layout(make, size)


def _tiles(config: Any, images: Images, tile: int, usual: Size | None) -> tuple[Size, int]:
    """Size of an image, and tiles that its processor makes of it."""
    shuffles = any(getattr(config, key, None) for key in _SHUFFLES) or any(
        getattr(config.vision_config, key, None) for key in _SHUFFLES
    )
    size = images.size or usual or (tile, tile)
    if size == (tile, tile):
        return size, 1
    if not shuffles:
        rule = f"is not the size of the tower, to which the processor of {config.model_type} resizes every image"
        raise _wrong(_SIZE, f"{size[0]}x{size[1]}", rule, f"use {tile}x{tile}, or remove it")
    size = _size_of(config, images, tile)
    return size, size[0] // tile * (size[1] // tile) + 1


def _fixed(config: Any, vision: Any, images: Images) -> _Layout:
    """Images, or tiles of them, of the size of the tower (LLaVA, Gemma 3, InternVL, Llama 4)."""
    tile = _square(getattr(vision, "image_size", None) or 224)
    size, tiles = _tiles(config, images, tile, None)

    def make(samples: int, length: int) -> dict[str, Tensor]:
        return {PIXELS: torch.ones(samples * images.number * tiles, _channels(vision), tile, tile)}

    return _Layout(make, size)


def _masked(config: Any, vision: Any, images: Images) -> _Layout:
    """Images of each sample, or their tiles, and masks of their pixels (Idefics, SmolVLM)."""
    tile = _square(vision.image_size)
    if getattr(config, "scale_factor", None):
        size, tiles = _tiles(config, images, tile, None)
        shape = tile, tile
    else:
        size, tiles = _size_of(config, images, _square(vision.patch_size)), 1
        shape = size

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = images.number * tiles
        return {
            PIXELS: torch.ones(samples, number, _channels(vision), *shape),
            "pixel_attention_mask": torch.ones(samples, number, *shape, dtype=torch.bool),
        }

    return _Layout(make, size)


def _naflex(config: Any, vision: Any, images: Images) -> _Layout:
    """Patches of each image or tile up to a largest number, their rows and columns, and masks (LFM2-VL)."""
    patch, unit = (
        _square(vision.patch_size),
        _square(vision.patch_size) * int(getattr(config, "downsample_factor", 1) or 1),
    )
    size = _size_of(config, images, unit)
    max_patches = (_NAFLEX_TILE // patch) ** 2
    rows, columns, tiles = size[0] // patch, size[1] // patch, 1
    if rows * columns > max_patches:
        size, tiles = _tiles(config, images, _NAFLEX_TILE, None)
        rows = columns = _NAFLEX_TILE // patch

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = samples * images.number * tiles
        mask = torch.zeros(number, max_patches, dtype=torch.int32)
        mask[:, : rows * columns] = 1
        return {
            PIXELS: torch.ones(number, max_patches, _channels(vision) * patch * patch),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, columns]] * number),
        }

    return _Layout(make, size)


def _aspects(config: Any, vision: Any, images: Images) -> _Layout:
    """Tiles of each image, padded to the largest number, and its aspect ratio (Llama 3.2 Vision)."""
    tile, max_tiles = _square(vision.image_size), vision.max_num_tiles
    size = _size_of(config, images, tile, (tile, tile))
    ratio, ratios = [size[0] // tile, size[1] // tile], [[*aspect] for aspect in vision.supported_aspect_ratios]
    if ratio not in ratios:
        known = ", ".join(f"{tile * rows}x{tile * columns}" for rows, columns in ratios)
        raise _wrong(
            _SIZE, f"{size[0]}x{size[1]}", f"has more than {max_tiles} tiles of {tile} x {tile}", f"use one of {known}"
        )
    tiles = ratio[0] * ratio[1]

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = images.number
        there = torch.zeros(samples, number, max_tiles, dtype=torch.int64)
        there[..., :tiles] = 1
        return {
            PIXELS: torch.ones(samples, number, max_tiles, _channels(vision), tile, tile),
            "aspect_ratio_ids": torch.full((samples, number), ratios.index(ratio) + 1),
            "aspect_ratio_mask": there,
            "cross_attention_mask": there[:, None].repeat(1, length, 1, 1),
        }

    return _Layout(make, size)


def _pinpoints(config: Any, vision: Any, images: Images) -> _Layout:
    """The whole image and its tiles, whose number follows from its size (LLaVA-NeXT, LLaVA-OneVision)."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    tile = _square(vision.image_size)
    size = _size_of(config, images, 1)
    tiles = image_size_to_num_patches(list(size), config.image_grid_pinpoints, tile)

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = samples * images.number
        return {
            PIXELS: torch.ones(number, tiles, _channels(vision), tile, tile),
            "image_sizes": torch.tensor([[*size]] * number),
        }

    return _Layout(make, size)


def _sized(config: Any, vision: Any, images: Images) -> _Layout:
    """Images of any size, and the size of each (Pixtral, Mistral 3)."""
    unit = _square(vision.patch_size) * int(getattr(config, "spatial_merge_size", 1) or 1)
    size = _size_of(config, images, unit)

    def make(samples: int, length: int) -> dict[str, Tensor]:
        number = samples * images.number
        return {
            PIXELS: torch.ones(number, _channels(vision), *size),
            "image_sizes": torch.tensor([[*size]] * number),
        }

    return _Layout(make, size)


def _tokens(module: nn.Module, layout: _Layout, number: int) -> int:
    """Tokens of a text that stand for an image: rows of its features; 1 for a model that attends to images apart."""
    batch = layout.make(1, 1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake: Any = fake_module(module, torch.float32)
        owner = next((part for part in (fake.base_model, fake) if hasattr(part, "get_image_features")), None)
        if owner is None:
            return 1
        accepted = inspect.signature(owner.get_image_features).parameters
        inputs = given_batch({key: batch[key] for key in batch if key in accepted}, torch.float32, has_values=True)
        with as_on_gpus(), Tracer(fake, inputs, Values()):
            output = owner.get_image_features(**inputs)
    pooled = getattr(output, "pooler_output", None)
    output = pooled if pooled is not None else getattr(output, "last_hidden_state", output)
    parts = output if isinstance(output, list | tuple) else [output]
    rows: int = sum(part.numel() // part.shape[-1] for part in parts)
    return rows // number


def _placeholder(config: Any) -> int:
    keys = "image_token_id", "image_token_index"
    token_id = next((value for key in keys if (value := getattr(config, key, None)) is not None), None)
    if token_id is None:
        what = f"a model whose configuration has no token of images ({' or '.join(keys)})"
        raise NotModelledError(
            Problem(
                field="model_type",
                value=config.model_type,
                rule=f"is {what}, which is not modeled yet",
                fix="capture it with texts alone: --images 0",
            )
        )
    return int(token_id)


def _word(config: Any) -> int:
    """A token that stands for nothing but text."""
    text = config.get_text_config()
    special = {
        value
        for part in (config, text)
        for key, value in vars(part).items()
        if isinstance(value, int) and "token" in key
    }
    vocabulary = int(text.vocab_size)
    token: int = next(number for number in range(vocabulary - 1, -1, -1) if number not in special)
    return token
