"""Modules and batches of the architectures that the installed transformers knows, from a ``config.json``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simplan.errors import Problem, SpecError

_PIXELS, _FEATURES, _WAVE, _TOKENS = "pixel_values", "input_features", "input_values", "input_ids"
_WAVE_SAMPLES = 16_000  # of sound: one second
_BINS = "input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins"
_USUAL_BINS = 80  # frequencies of a spectrogram
_SIZES = frozenset({"image_grid_thw", "pixel_attention_mask", "aspect_ratio_ids", "image_embeds_position_mask"})
"""Arguments of models whose images differ in size: operators follow from their values, or each image has its own."""
_SIZED = frozenset({"pixtral", "llava_next", "llava_onevision", "llava_next_video"})
"""Models of such images with other arguments, and their part that sees."""
_USED_BY = (
    "AutoModelForImageTextToText", "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
)  # fmt: skip
"""Purposes of an architecture without ``architectures`` in its configuration, the first that it has."""


def module_of_config(data: dict[str, Any], device: str = "meta") -> tuple[nn.Module, Any]:
    """The module of a configuration, and the configuration as transformers reads it.

    Args:
        data: Content of a ``config.json``.
        device: Device of the weights.

    Raises:
        SpecError: transformers does not know the architecture, or does not accept the configuration.
    """
    import transformers

    word = data.get("model_type")
    known = transformers.CONFIG_MAPPING
    if word not in known:
        rule = f"is no model_type of transformers {transformers.__version__}"
        fix = "install a version that has it, or capture your module: simplan capture MODULE:FACTORY"
        raise SpecError(Problem(field="model_type", value=str(word), rule=rule, fix=fix))
    try:
        config = known[word].from_dict(data)
        config.use_cache = False  # of keys and values, which training has no use for
        with torch.device(device):
            return _class_of(transformers, config)(config), config
    except Exception as error:
        said = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        rule, fix = f"transformers cannot build the model ({said})", "check the keys of the configuration"
        raise SpecError(Problem(field="model_type", value=str(word), rule=rule, fix=fix)) from error


def _class_of(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    for name in config.architectures or ():
        model_class: Callable[[Any], nn.Module] | None = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    for auto in _USED_BY:
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            chosen: Any = mapping[type(config)]
            first: Callable[[Any], nn.Module] = chosen[0] if isinstance(chosen, tuple) else chosen
            return first
    base: Callable[[Any], nn.Module] = transformers.AutoModel._model_mapping[type(config)]
    return base


def batch_of(module: nn.Module, config: Any, seq_len: int, *, sees: bool = True) -> Callable[[int], dict[str, Tensor]]:
    """Function that makes the arguments of forward for a number of samples.

    Args:
        module, config: See ``module_of_config``.
        seq_len: Tokens of a sample.
        sees: Whether a model of texts and images has an image with each text, if all of its images have one size.
    """

    def batch(number: int) -> dict[str, Tensor]:
        return dict(_arguments(module, config, seq_len, number, sees=sees))

    return batch


def _takes_images(accepted: Mapping[str, Any], config: Any) -> bool:
    """True for a model of images, and for one of texts and images of one size; with others, texts are alone."""
    vision = getattr(config, "vision_config", None)
    is_sized = not _SIZED.isdisjoint((config.model_type, getattr(vision, "model_type", ""))) or _SIZES & accepted.keys()
    sees = _TOKENS not in accepted or "pixel_mask" in accepted or vision is not None
    return _PIXELS in accepted and sees and not is_sized


def _arguments(
    module: nn.Module, config: Any, seq_len: int, number: int, *, sees: bool
) -> Iterator[tuple[str, Tensor]]:
    accepted = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", _TOKENS)
    text = getattr(config, "get_text_config", lambda: config)()
    vocabulary = getattr(text, "vocab_size", None) or 2
    has_images = (sees or _TOKENS not in accepted) and _takes_images(accepted, config)
    if has_images:
        yield _PIXELS, _images(config, number)
    elif main in (_FEATURES, _WAVE):
        yield main, torch.zeros(number, *_sound(main, config, seq_len))
    if _TOKENS in accepted:
        tokens = torch.full((number, seq_len), vocabulary - 1)
        yield _TOKENS, tokens
        if has_images and "token_type_ids" in accepted:
            yield "token_type_ids", torch.zeros_like(tokens)
        if "labels" in accepted:
            yield "labels", tokens.clone()
    elif "decoder_input_ids" in accepted:
        length = min(seq_len, getattr(config, "max_target_positions", None) or seq_len)
        tokens = torch.full((number, length), vocabulary - 1)
        yield "decoder_input_ids", tokens
        if "labels" in accepted:
            yield "labels", tokens.clone()


def _images(config: Any, number: int) -> Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(vision, "num_frames", None)  # of a video
    return torch.zeros(number, *((frames,) if frames else ()), getattr(vision, "num_channels", 3), height, width)


def _sound(main: str, config: Any, seq_len: int) -> tuple[int, ...]:
    """Shape of a sample of sound: of a wave, or of a spectrogram, which has frequencies first in Whisper's kind."""
    parts = config, getattr(config, "encoder_config", None)
    bins = next((number for part in parts for key in _BINS if (number := getattr(part, key, None))), None)
    if main == _WAVE:
        channels = getattr(config, "audio_channels", None)
        return (config.max_length, bins) if bins else (*((channels,) if channels else ()), _WAVE_SAMPLES)
    positions = getattr(config, "max_source_positions", None)
    length = 2 * positions if positions else seq_len
    shape = length, bins or _USUAL_BINS
    return shape[::-1] if positions and hasattr(config, "num_mel_bins") else shape
