"""torchtune: YAML configurations of its recipes, which name components of Python.

A configuration is for one device or for several; ``tune run`` says how many, and the recipe. Recipes of several devices
shard every block by FSDP2 (torchtune/training/_distributed.py, ``shard_model``). Where torchtune's own modules are not
modeled (Gemma, tensor and context parallelism), the profile is ``torch``, whose operators they run.

Sources: ``tables/torchtune.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simplan.document import parse_yaml
from simplan.interop.configuration import Configuration, Reading
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks import tables
from simplan.interop.frameworks.hugging_face.keys import flattened, is_one_of
from simplan.interop.frameworks.model_names import preset_of

_TITLE = "torchtune configuration"
_MODEL, _OPTIMIZER, _LOSS = "model._component_", "optimizer._component_", "loss._component_"
_GROUP_SIZE = 256
"""Inputs per scale of the quantizer by default."""
_RECIPES = "recipes of several devices shard by FSDP2"
_PRECISIONS = {"bf16": "bf16", "fp32": "fp32"}


def _recognizes(file: ConfigFile) -> bool:
    return file.yaml is not None and "_component_: torchtune." in file.text


def _read(file: ConfigFile) -> Configuration:
    """Configuration of a recipe.

    Raises:
        SpecError: The file is no YAML, or its settings contradict each other; ``NotModelledError`` for other jobs.
    """
    document = file.yaml or parse_yaml(file.text, file.name)
    # a profiler's cpu is what it traces, and no device
    settings = [setting for key, setting in flattened(document) if not key.startswith("profiler.")]
    reading = Reading.of(_TITLE, file.name, settings)
    if _OPTIMIZER not in reading and "training.optimizer._component_" not in reading:
        reading.refuse("model" if _MODEL not in reading else _MODEL, "is of a recipe that trains nothing")
        return reading.finish(is_whole=False)
    loss = str(reading.peek(_LOSS, ""))
    if ".rlhf." in loss or ".grpo." in loss or _OPTIMIZER not in reading:
        rule = "belongs to preference training or reinforcement learning, which is not read from torchtune yet"
        reading.refuse(_LOSS if _LOSS in reading else "training.loss._component_", rule, "use a recipe of finetuning")
        return reading.finish(is_whole=False)
    _note(reading)
    _read_model(reading)
    adapts = _read_adapters(reading)
    _read_training(reading, adapts=adapts)
    _read_fake_quantization(reading)
    _read_plan(reading)
    preset, why = _profile(reading)
    reading.put("software.preset", preset, why)
    _read_types_and_loss(reading, adapts=adapts, preset=preset)
    if reading.truth("compile"):
        reading.put("software.compiled", True, "compile")
    _sort_rest(reading)
    return reading.finish()


def _table(name: str) -> Mapping[str, Any]:
    words: Mapping[str, Any] = tables("torchtune")[name]
    return words


def _note(reading: Reading) -> None:
    """Note or refuse settings that have other values than those that change nothing."""
    for key, (same, why) in _table("not_modeled").items():
        if key in reading and not is_one_of(reading.value(key), same):
            reading.not_modeled(key, why)
    for key, (same, rule) in _table("refused").items():
        if key in reading and not is_one_of(reading.value(key), same):
            reading.refuse(key, rule, "remove it")


def _profile(reading: Reading) -> tuple[str, str]:
    """Profile of a recipe, and why it is that one."""
    for key in ("tensor_parallel_dim", "context_parallel_dim"):
        if reading.peek(key) not in (None, 1):
            return "torch", f"torchtune's own modules with {key} are not modeled"
    if _builder(reading).startswith("gemma"):
        return "torch", "torchtune's own modules of Gemma are not modeled"
    return "torchtune", "a recipe of torchtune"


def _read_types_and_loss(reading: Reading, *, adapts: bool, preset: str) -> None:
    if reading.written("training.precision") == "bf16":
        if preset == "torch" and adapts:
            reading.not_modeled("dtype", "adapters of 16 bits; here adapters and their states are FP32")
        else:
            reading.put("training.pure_bf16", True, "dtype")
    if not str(reading.peek(_LOSS, "")).endswith(("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")):
        return
    if preset == "torchtune" and "head" not in (reading.written("model.lora_targets") or ()):
        reading.put("software.loss", "chunked", _LOSS)
    else:
        what = "logits exist chunk by chunk, of which FP32 softmaxes stay; here all logits lie together"
        reading.not_modeled(_LOSS, what)


def _builder(reading: Reading) -> str:
    """Name of the function that builds the model, without the words for adapters."""
    return re.sub(r"^q?lora_", "", str(reading.peek(_MODEL)).rpartition(".")[2])


def _read_fake_quantization(reading: Reading) -> None:
    """Read simulated quantization (torchtune/training/quantization.py)."""
    key = "quantizer._component_"
    if key not in reading:
        return
    size = reading.whole("quantizer.groupsize", _GROUP_SIZE)
    if str(reading.value(key)).rpartition(".")[2] != "Int8DynActInt4WeightQATQuantizer":
        rule = "simulates another quantization, or trains nothing, which is not modeled"
        reading.refuse(key, rule, "use Int8DynActInt4WeightQATQuantizer, or remove it")
    else:
        form = {"weights": "intx_int4", "activations": "int8", "group_size": size}
        reading.put("training.fake_quantization", form, key)


def _read_model(reading: Reading) -> None:
    reading.value(_MODEL)
    builder = _builder(reading)
    preset = preset_of(_table("models").get(builder, builder))
    if preset is not None:
        reading.put("model.preset", preset, _MODEL)
    else:
        what = f"names the model {builder}, whose shapes are not in the catalog"
        fix = "add --model with its config.json or its capture, or with a name of `simplan show models`"
        reading.ask("model.preset", "model.hf_config", "model.file", what=what, fix=fix)
    for key in ("tokenizer.max_seq_len", "dataset.max_seq_len"):
        if key in reading:
            reading.put("model.seq_len", reading.whole(key), key)
            if not reading.peek("dataset.packed"):
                reading.not_modeled(key, "shorter sequences are padded to the longest of their batch only")
            return
    what = "does not say how long sequences are (tokenizer.max_seq_len)"
    reading.ask("model.seq_len", what=what, fix="add --seq-len 4096")


def _read_adapters(reading: Reading) -> bool:
    """Read adapters and the weights below them; False if all weights are trained."""
    key = "model.lora_rank"
    builder = str(reading.peek(_MODEL)).rpartition(".")[2]
    if key not in reading:
        if builder.startswith(("lora_", "qlora_")):
            reading.refuse(_MODEL, "trains adapters, and no setting says their rank", "add lora_rank: 8")
        return False
    reading.put("training.task", "lora", key)
    reading.put("model.lora_rank", reading.whole(key), key)
    of_attention, named = _table("attention"), reading.value("model.lora_attn_modules", [])
    words = named if isinstance(named, list) else [named]
    if wrong := [str(word) for word in words if word not in of_attention]:
        reading.refuse("model.lora_attn_modules", f"names {', '.join(wrong)}", f"use {', '.join(of_attention)}")
    targets = [of_attention[word] for word in words if word in of_attention]
    of_mlp = [*_table("mlp")]
    targets += of_mlp if reading.truth("model.apply_lora_to_mlp") else []
    targets += ["head"] if reading.truth("model.apply_lora_to_output") else []
    reading.put("model.lora_targets", targets, "model.lora_attn_modules")
    dropout = reading.value("model.lora_dropout", 0.0)
    if isinstance(dropout, int | float) and dropout > 0:
        reading.put("model.lora_dropout", float(dropout), "model.lora_dropout")
    if reading.truth("model.use_dora"):
        reading.put("model.lora_dora", True, "model.use_dora")
    quantized = builder.startswith("qlora_")
    if reading.truth("model.quantize_base") or quantized:
        where = _MODEL if quantized else "model.quantize_base"
        weights = {"format": "nf4", "library": "torchao", "double_quantization": True}
        reading.put("training.base_weights", weights, where)
        if _builder(reading).startswith("qwen") and not {*of_attention.values(), *of_mlp} <= {*targets}:
            reading.not_modeled(where, "matrices without an adapter stay in 16 bits; here all are quantized")
    return True


def _read_training(reading: Reading, *, adapts: bool) -> None:
    dtype = reading.word("dtype", "fp32")
    precision = _PRECISIONS.get(str(dtype))
    if precision is None:
        reading.refuse("dtype", "is none of torchtune's types of training", "use bf16 or fp32")
    else:
        reading.put("training.precision", precision, "dtype" if "dtype" in reading else "the default of torchtune")
    if not adapts:
        reading.put("training.task", "sft", "a recipe of finetuning")
    reading.put("plan.microbatch_size", reading.whole("batch_size"), "batch_size")
    steps = "gradient_accumulation_steps"
    reading.put("num_microbatches", reading.whole(steps), steps if steps in reading else "the default of torchtune")
    word, known = str(reading.value(_OPTIMIZER)), _table("optimizers")
    if word in known:
        reading.put("training.optimizer", known[word], _OPTIMIZER)
    else:
        reading.refuse(_OPTIMIZER, "is an optimizer that is not read", f"use {' or '.join(known)}")
    if word.startswith("torch.optim.") and not reading.truth("optimizer.fused"):
        where = "optimizer.fused" if "optimizer.fused" in reading else "the default of torch.optim"
        reading.put("training.fused_optimizer", False, where)
    if reading.truth("optimizer_in_bwd"):
        reading.put("training.optimizer_in_backward", True, "optimizer_in_bwd")
    clip = reading.value("clip_grad_norm")
    if isinstance(clip, int | float) and not isinstance(clip, bool) and clip > 0:
        reading.put("training.clip_grad_norm", float(clip), "clip_grad_norm")


def _read_plan(reading: Reading) -> None:
    key = "enable_activation_checkpointing"
    recompute = "full" if reading.truth(key) else "none"
    reading.put("plan.recompute", recompute, key if key in reading else "the default of torchtune")
    if reading.truth("enable_activation_offloading"):
        reading.put("plan.offload_activations", True, "enable_activation_offloading")
    reading.put("plan.zero_stage", 3, _RECIPES)
    replicas = reading.value("data_parallel_replicate_dim", 1)
    if isinstance(replicas, int) and replicas != 1:
        reading.put("plan.dp_replicate", replicas, "data_parallel_replicate_dim")
    else:
        reading.put("plan.dp_replicate", 1, _RECIPES)
    shards = reading.value("data_parallel_shard_dim", -1)
    if isinstance(shards, int) and shards > 0:
        reading.put("plan.dp_shard", shards, "data_parallel_shard_dim")
    if (degree := reading.whole("tensor_parallel_dim")) > 1:
        reading.put("plan.tp", degree, "tensor_parallel_dim")
    if (degree := reading.whole("context_parallel_dim")) > 1:
        reading.put("plan.cp", degree, "context_parallel_dim")
    for offload in ("fsdp_cpu_offload", "fsdp.cpu_offload"):
        if reading.truth(offload):
            reading.put("plan.offload_optimizer", True, offload)


def _sort_rest(reading: Reading) -> None:
    sections = tuple(f"{name}." for name in _table("no_effect_sections"))
    reading.no_effect(*str(_table("no_effect")).split(), *(key for key in reading.settings if key.startswith(sections)))
    what = "does not say on how many devices it runs, which `tune run --nproc_per_node` does"
    reading.ask("cluster", what=what, fix="add --cluster dgx-h100 --num-devices 8")


FORMAT = Format("torchtune", _TITLE, _recognizes, _read)
