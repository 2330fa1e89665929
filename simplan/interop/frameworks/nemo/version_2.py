"""Settings of NeMo 2.0, as NeMo-Run writes them: Megatron Core's names, under other sections.

Keys, defaults and meanings: NVIDIA/NeMo at 8cfedd7, nemo/lightning/pytorch (strategies/megatron_strategy.py,
plugins/mixed_precision.py) and nemo/collections/llm/gpt/model.
"""

from __future__ import annotations

import re

from simplan import catalog
from simplan.interop.configuration import Configuration, Reading
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks.bridge.words import COMPARED, NO_EFFECT, PRECISIONS
from simplan.interop.frameworks.nemo.version_1 import ORIGIN, put_devices
from simplan.interop.frameworks.nemo.version_1 import PRECISIONS as WIDE_PRECISIONS

_CLASSES = re.compile(
    r"(?P<family>[A-Za-z]+?)(?P<version>[\d.]*)Config(?P<size>[\dx]+(?:P\d+)?[MB])(?P<active>_A\d+B)?"
)
_WORDS = core.Words(
    "model.config.", "trainer.strategy.", "trainer.strategy.ddp.", "optim.config.", "data.", "model.config."
)
_NO_EFFECT = (
    "_target_", "_partial_", "_factory_", "log.", "resume", "tokenizer", "data.", "model._target_", "model.tokenizer",
    "model.optim", "optim._target_", "optim.lr_scheduler.", "optim.no_weight_decay_cond", "optim.scale_lr_cond",
    "trainer._target_", "trainer.accelerator", "trainer.accumulate_grad_batches", "trainer.limit_",
    "trainer.callbacks", "trainer.enable_", "trainer.log_", "trainer.logger", "trainer.max_",
    "trainer.use_distributed_sampler", "trainer.val_check_interval", "trainer.num_sanity",
    "trainer.plugins.precision", "trainer.plugins.fp16_", "trainer.strategy._target_", "trainer.strategy.ckpt_",
    "trainer.strategy.gradient_as_bucket_view", "trainer.strategy.use_te_rng_tracker",
    "trainer.strategy.save_ckpt_format", "trainer.strategy.progress_interval",
    "trainer.strategy.replace_progress_bar", "trainer.strategy.ddp", "trainer.strategy.lazy_init",
    "trainer.strategy.pipeline_dtype",
)  # fmt: skip
_SECTIONS = {
    "model.": "model.config.",
    "ddp.": "trainer.strategy.ddp.",
    "optimizer.": "optim.config.",
    "mixed_precision.": "trainer.plugins.",
}
"""Sections of Megatron Bridge -> sections of NeMo 2.0 with the same keys."""


def read_version_2(reading: Reading) -> Configuration:
    """Configuration of NeMo 2.0.

    Raises:
        SpecError: Settings contradict each other; ``NotModelledError`` for other jobs.
    """
    reading.put("software", "nemo", "NeMo 2.0 is Megatron Core under Lightning")
    core.read_adapters(reading, "peft.")
    preset = _put_named_model(reading)
    experts = bool(preset) and "num_experts" in catalog.model_fields(preset)
    degrees = core.read_parallel(reading, _WORDS, experts=experts)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    core.read_recompute(reading, _WORDS.recompute, names=names)
    origin = "the recipes of NeMo 2.0 have the distributed optimizer"
    core.read_data_parallel(reading, _WORDS, default=True, origin=origin)
    if reading.value("trainer.strategy.fsdp") is not None:
        reading.refuse("trainer.strategy.fsdp", "sharded parameters are not modeled yet for NeMo")
    _put_precision(reading)
    optimizer = "optim.config.optimizer"
    name = str(reading.value(optimizer, "adam"))
    if name not in core.OPTIMIZERS:
        reading.refuse(optimizer, "is not modeled yet", f"only {' and '.join(core.OPTIMIZERS)} are")
    else:
        chosen = "adamw" if name == "adam" else core.OPTIMIZERS[name]
        reading.put("training.optimizer", chosen, optimizer if optimizer in reading else core.ORIGIN)
    core.read_clipping(reading, "optim.config.clip_grad")
    if "data.seq_length" in reading:
        reading.put("model.seq_len", reading.value("data.seq_length"), "data.seq_length")
    else:
        reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")
    put_devices(reading, degrees, "data.")
    for key in (f"model.config.{size}" for size in _SIZES):
        if key in reading:
            reading.refuse(key, "changes the model that its class names", "write the model into a scenario")
    _put_rest(reading, degrees)
    return reading.finish()


def _put_precision(reading: Reading) -> None:
    """Put the precision of GEMMs and gradients."""
    plugins = "trainer.plugins."
    said = f"{plugins}precision" if f"{plugins}precision" in reading else "trainer.precision"
    value = reading.value(said, "bf16-mixed")
    precision = WIDE_PRECISIONS.get(value) if isinstance(value, str | int) else None
    fp8, recipe = f"{plugins}fp8", f"{plugins}fp8_recipe"
    name = str(reading.value(recipe, "delayed"))
    if precision is None:
        reading.refuse(said, "is not known", f"use {', '.join(map(str, WIDE_PRECISIONS))}")
    elif reading.value(fp8) is None:
        reading.put("training.precision", precision, said if said in reading else ORIGIN)
    elif name not in PRECISIONS:
        reading.refuse(recipe, "is not modeled yet", f"only {', '.join(PRECISIONS)} are")
    else:
        low, scaling = PRECISIONS[name]
        reading.put("training.precision", low, fp8)
        if scaling is not None:
            reading.put("training.fp8_recipe", scaling, recipe if recipe in reading else ORIGIN)
        for key in (f"{plugins}fp8_param_gather", f"{plugins}fp8_params"):
            if reading.value(key):
                reading.not_modeled(key, core.WIDE_WEIGHTS)
    grads = f"{plugins}grad_reduce_in_fp32"
    core.grad_dtype(reading, precision or "bf16", reading.value(grads), grads)


def _put_rest(reading: Reading, degrees: dict[str, int]) -> None:
    """Note what the prediction leaves out, and what has no effect."""

    def moved(key: str) -> str:
        section = next((each for each in _SECTIONS if key.startswith(each)), "")
        return _SECTIONS.get(section, "") + key.removeprefix(section)

    core.compare(reading, {moved(key): each for key, each in COMPARED.items()}, degrees)
    known = [moved(key) for key in NO_EFFECT if key.startswith(tuple(_SECTIONS))]
    core.no_effect(reading, (*_NO_EFFECT, *known))


_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
)


def _put_named_model(reading: Reading) -> str:
    """Put the catalog's model of a class such as ``Llama31Config405B``; its name, empty if it is asked for."""
    key = "model.config._target_"
    name = str(reading.value(key, "")).rpartition(".")[2]
    match, known = _CLASSES.fullmatch(name), catalog.names("models")
    if match is not None:
        size = match["size"].replace("P", ".").lower() + (match["active"] or "").replace("_", "-").lower()
        wanted = _squeezed(f"{match['family']}{match['version']}-{size}")
        for model in known:
            if _squeezed(model) == wanted:
                reading.put("model.preset", model, key)
                return model
    reading.no_effect(key)
    what = f"names a model that the catalog does not have ({name})" if name else "does not name a model"
    reading.ask("model", what=what, fix="add --model llama3-8b, or another of `simplan show models`")
    return ""


def _squeezed(name: str) -> str:
    """Name without marks, and with sizes in the catalog's unit."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("500m", "0.5b").replace("600m", "0.6b"))
