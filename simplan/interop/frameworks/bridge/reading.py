"""Megatron Bridge: YAML of its ConfigContainer, as recipes take it for overrides and as checkpoints have it.

Keys, defaults and meanings: NVIDIA-NeMo/Megatron-Bridge at 067f987, src/megatron/bridge/training (config.py,
mixed_precision.py, comm_overlap.py), models/gpt_provider.py and peft; below them Megatron Core's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from simplan import catalog
from simplan.document import parse_yaml
from simplan.interop.configuration import Configuration, Reading, Setting, SettingMapping
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks import names_without_effect, tables
from simplan.interop.frameworks.bridge.export import BUCKET_ELEMENTS, export, settings
from simplan.interop.frameworks.bridge.words import (
    DISPATCHERS,
    EXPERT_MATCHES,
    LATENT_MATCHES,
    MODEL_MATCHES,
    PRECISIONS,
    RECIPES,
    WORDS,
    blocks_of_layout,
)

_SECTIONS = (
    "model", "train", "optimizer", "scheduler", "ddp", "dataset", "checkpoint", "logger", "mixed_precision", "dist",
)  # fmt: skip
_RECIPE = "the recipes of Megatron Bridge have it"
_NAMED = re.compile(r"(?P<model>.+?)_(?:pretrain|sft|finetune|peft|cpt|lora|dora)(?:_.*)?")
_SIZES = tuple(f"model.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads"))


def _recognizes(file: ConfigFile) -> bool:
    document = file.yaml
    if document is None:
        return False
    data: Mapping[str, Any] = document.data
    if str(data.get("_target_", "")).startswith("megatron.bridge.") or "ConfigContainer" in data:
        return True
    recipe = data.get("recipe")
    if isinstance(recipe, dict) and str(recipe.get("_target_", "")).startswith("megatron.bridge."):
        return True
    train, model = data.get("train"), data.get("model")
    signs = isinstance(train, dict) and bool({"train_iters", "global_batch_size", "micro_batch_size"} & set(train))
    known = [section for section in _SECTIONS if isinstance(data.get(section), dict)]
    return signs and len(known) >= 2 and isinstance(model, dict | None) and "cluster" not in data


def read(file: ConfigFile) -> Configuration:
    """Configuration of a file with ConfigContainer's sections.

    Raises:
        SpecError: The file is no YAML, or its settings contradict each other; ``NotModelledError`` for other jobs.
    """
    document = file.yaml or parse_yaml(file.text, file.name)
    top = "ConfigContainer."
    settings = [
        Setting(setting.key.removeprefix(top), setting.value, setting.line)
        for setting in core.interpolated(core.flattened(document))
    ]
    reading = Reading.of("Megatron Bridge configuration", file.name, settings)
    matrix = next((key for key in reading.settings if key.startswith("perf_matrix.")), None)
    if matrix is not None:
        rule = "is one of several plans for different devices, which the launcher of Megatron Bridge 0.1 chose from"
        reading.refuse(matrix, rule, "write the settings of one plan under model and train")
        return reading.finish(is_whole=False)
    core.refuse(reading, tables("bridge"))
    whole = all(reading.value(key) for key in _SIZES)
    experts = reading.value("model.num_moe_experts") is not None
    named = None if whole else _put_recipe(reading)
    if named is not None:
        experts = "num_experts" in catalog.model_fields(named)
    degrees = _put_plan(reading, experts=experts or not whole, whole=whole)
    _put_precision(reading)
    _put_software(reading, experts=experts or not whole)
    core.read_optimizer(reading, "optimizer.", f"{core.ORIGIN}: Adam with decoupled weight decay")
    bucket = reading.value("ddp.bucket_size")
    if type(bucket) is int and bucket != BUCKET_ELEMENTS:
        reading.put("plan.bucket_bytes", bucket * 4, "ddp.bucket_size")
    lengths = ("dataset.seq_length", "dataset.sequence_length", "model.seq_length")
    core.put_length(reading, *lengths)
    reading.no_effect(*lengths)
    if whole:
        _put_model(reading, experts=experts)
    else:
        _put_changes(reading)
    core.read_adapters(reading, "peft.")
    reading.ask("cluster", what="does not say how many devices there are", fix="add --cluster dgx-h100 --num-nodes 4")
    core.sort_rest(reading, tables("bridge"), names_without_effect("bridge"), degrees)
    return reading.finish()


def _put_recipe(reading: Reading) -> str | None:
    """Put the model that the file's recipe names, if the catalog has it; else it is asked for."""
    key = next((candidate for candidate in ("recipe._target_", "recipe") if candidate in reading), "recipe")
    name = str(reading.value(key) or "").rpartition(".")[2]
    match = _NAMED.fullmatch(name)
    wanted = re.sub(r"[^a-z0-9]", "", (match["model"] if match is not None else name).lower())
    for model in catalog.names("models"):
        if wanted and re.sub(r"[^a-z0-9]", "", model) == wanted:
            reading.put("model.preset", model, key)
            return model
    what = "changes settings of a recipe that it does not name, or the catalog does not have"
    reading.ask("model", what=what, fix="add --model llama3-8b, or another of `simplan show models`")
    return None


def _put_plan(reading: Reading, *, experts: bool, whole: bool) -> dict[str, int]:
    """Put the plan; of a recipe's overrides, the degrees that only the recipe says are asked for."""
    if not whole:
        for name, option in (("tensor", "--tp"), ("pipeline", "--pp")):
            key = f"model.{name}_model_parallel_size"
            if key not in reading:
                what = f"leaves {name} parallelism to its recipe"
                reading.ask(f"plan.{option[2:]}", what=what, fix=f"add {option} 1, or what the recipe has")
        for key, path, option in (
            ("train.global_batch_size", "training.global_batch_size", "--global-batch-size 128"),
            ("train.micro_batch_size", "plan.microbatch_size", "--microbatch-size 1"),
        ):
            if key not in reading:
                reading.ask(path, what=f"leaves {key} to its recipe", fix=f"add {option}, or what the recipe has")
    degrees = core.read_parallel(reading, WORDS, experts=experts, is_whole=whole)
    core.read_placement(reading, "dist.use_tp_pp_dp_mapping")
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    core.read_recompute(reading, WORDS.recompute, names=names)
    stages = degrees["pp"] * reading.whole("model.virtual_pipeline_model_parallel_size")
    _put_stages(reading, stages)
    origin = f"the distributed optimizer: {_RECIPE}"
    fsdp = ("dist.use_megatron_fsdp",)  # sets the same key of ddp
    core.read_data_parallel(reading, WORDS, default=True, origin=origin, fsdp_keys=fsdp)
    if reading.value("model.cpu_offloading") and reading.value("model.cpu_offloading_activations", True):
        reading.put("plan.offload_activations", True, "model.cpu_offloading")
        if (layers := reading.value("model.cpu_offloading_num_layers")) is not None:
            reading.put("plan.offload_layers", layers, "model.cpu_offloading_num_layers")
    return degrees


def _put_stages(reading: Reading, num_stages: int) -> None:
    """Put the blocks of each stage, from a layout or from the numbers of the first and the last stage."""
    key = "model.pipeline_model_parallel_layout"
    layout = reading.value(key)
    if layout:
        blocks = blocks_of_layout(layout)
        if blocks is None:
            reading.refuse(key, "is not modeled yet", "only layouts of E, t, m and L in a text are: Et*3|t*4|t*3L")
        elif len(blocks) != num_stages:
            reading.contradiction(key, f"has {len(blocks)} stages, and the pipeline has {num_stages}")
        else:
            reading.put("plan.stage_layers", list(blocks), key)
        return
    ends = [f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    first, last = (reading.value(end) for end in ends)
    layers = reading.value("model.num_layers")
    if (first is None and last is None) or num_stages == 1:
        reading.no_effect(key, *ends)
        return
    numbers = [number for number in (first, last) if number is not None]
    others = num_stages - len(numbers)
    if any(type(number) is not int for number in (layers, *numbers)) or others < 1 or (layers - sum(numbers)) % others:
        said = next(end for end in ends if reading.value(end) is not None)
        reading.contradiction(said, "leaves blocks that the other stages cannot share equally")
        return
    if not reading.can_split(layers, num_stages, "model.pipeline_model_parallel_size"):
        return
    blocks_per_stage = (layers - sum(numbers)) // others
    blocks = (
        *([first] if first is not None else []),
        *[blocks_per_stage] * others,
        *([last] if last is not None else []),
    )
    reading.put("plan.stage_layers", list(blocks), ends[0] if first is not None else ends[1])


def _put_precision(reading: Reading) -> None:
    """Put the precision of GEMMs and gradients."""
    section = "mixed_precision"
    named = reading.value(section)
    if isinstance(named, str):
        name = named.replace("-", "_")
        if name not in RECIPES:
            reading.refuse(section, "is not modeled yet", f"only {', '.join(RECIPES)} are")
            return
        precision, recipe = RECIPES[name]
        reading.put("training.precision", precision, section)
        if recipe is not None:
            reading.put("training.fp8_recipe", recipe, section)
        return
    where = next(
        (
            section
            for section in ("mixed_precision.", "model.")
            if f"{section}bf16" in reading or f"{section}fp8" in reading
        ),
        "",
    )
    wide = next((name for name in ("fp16", "bf16", "fp32") if reading.value(f"{where}{name}")), None)
    if wide is None and not where:
        wide = "bf16"
    fp8, fp4 = reading.value(f"{where}fp8"), reading.value(f"{where}fp4")
    if fp4 is not None:
        reading.put("training.precision", "nvfp4", f"{where}fp4")
    elif fp8 is not None:
        key = f"{where}fp8_recipe"
        recipe = str(reading.value(key, "tensorwise"))
        if recipe not in PRECISIONS:
            reading.refuse(key, "is not modeled yet", f"only {', '.join(PRECISIONS)} are")
        else:
            precision, scaling = PRECISIONS[recipe]
            reading.put("training.precision", precision, f"{where}fp8")
            if scaling is not None:
                reading.put("training.fp8_recipe", scaling, key if key in reading else core.ORIGIN)
    else:
        said = f"{where}{wide or 'fp32'}"
        reading.put("training.precision", wide or "fp32", said if said in reading else f"{_RECIPE}: bf16_mixed")
    for name in ("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"):
        if name in reading:
            core.grad_dtype(reading, wide or "fp32", reading.truth(name), name)
            break


def _put_software(reading: Reading, *, experts: bool) -> None:
    """Put the profile with its options."""
    software: dict[str, Any] = {"preset": "megatron-bridge"}
    if _is_vocabulary_of_tokenizer(reading):
        software["vocab_multiple"] = reading.whole("model.make_vocab_size_divisible_by", 128)
    dispatcher = reading.word("model.moe_token_dispatcher_type")
    backend = reading.word("model.moe_flex_dispatcher_backend", "deepep")
    overlaps = ("comm_overlap.overlap_moe_expert_parallel_comm", "model.overlap_moe_expert_parallel_comm")
    if experts:
        kind = "deepep" if reading.value("model.moe_enable_deepep") else DISPATCHERS.get((dispatcher, backend))
        if dispatcher == "flex" and kind is None:
            reading.refuse("model.moe_flex_dispatcher_backend", "is not modeled yet", "only deepep and hybridep are")
        if kind is not None:
            software["expert_dispatch"] = kind
        elif dispatcher not in (None, "alltoall"):
            reading.not_modeled("model.moe_token_dispatcher_type", "tokens come to experts by all-to-all")
        if any(reading.value(key) for key in overlaps):
            software["expert_overlap"] = True
        if reading.truth("model.use_transformer_engine_op_fuser"):
            software["fused_experts"] = True
    for key in ("mixed_precision.fp8_dot_product_attention", "model.fp8_dot_product_attention"):
        if reading.value(key):
            software["fp8_dot_product_attention"] = True
    if core.has_graphs(reading, "model."):
        software["cuda_graphs"] = True
    if reading.truth("model.activation_func_fp8_input_store"):
        software["fp8_activation_input"] = True
    said = next((key for key in ("_target_", "recipe._target_", "recipe") if key in reading), "Megatron Bridge")
    reading.put("software", software if len(software) > 1 else "megatron-bridge", said)
    reading.no_effect(*overlaps, "model.use_transformer_engine_op_fuser", "mixed_precision.fp8_dot_product_attention")


def _is_vocabulary_of_tokenizer(reading: Reading) -> bool:
    """True if the vocabulary is the tokenizer's, which is padded; that of a model is not (``training/setup.py``)."""
    stated = reading.settings.get("model.vocab_size")
    from_model = stated is not None and stated.value is not None
    whole = all(key in reading for key in _SIZES)
    return reading.truth("tokenizer.use_tokenizer_vocab_size") or (whole and not from_model)


def _put_model(reading: Reading, *, experts: bool) -> None:
    """Put a model whose sizes the file has."""
    mla = reading.truth("model.multi_latent_attention")
    keys, more = _sizes(reading, experts=experts, mla=mla)
    more |= _attention(reading, mla=mla)
    tokenizer = "tokenizer.vocab_size"
    size = reading.value(tokenizer)
    if _is_vocabulary_of_tokenizer(reading) and type(size) is int:
        del keys["vocab_size"]
        added = int(reading.value("tokenizer.tokenizer_type") == "NullTokenizer")  # its token for the end of documents
        more["vocab_size"] = (size + added, tokenizer)
    elif reading.value("model.vocab_size") is None:
        what = "does not say how many tokens there are"
        reading.ask("model.vocab_size", what=what, fix="add --set model.vocab_size=128256")
    position = str(reading.value("model.position_embedding_type", "learned_absolute"))
    gated = reading.truth("model.gated_linear_unit")
    if experts and not gated:
        reading.refuse("model.gated_linear_unit", "is not modeled yet for experts", "only gated experts are")
    core.put_model(
        reading,
        gated=gated,
        moe=experts,
        mla=mla,
        positions="learned" if position == "learned_absolute" else "none" if position == "none" else "rope",
        layer_norm=str(reading.value("model.normalization", "LayerNorm")) != "RMSNorm",
        gate_key="model.gated_linear_unit",
        bias_key="model.add_bias_linear",
        keys=keys,
        more=more,
        origin=core.ORIGIN,
    )


def _put_changes(reading: Reading) -> None:
    """Put what overrides of a recipe change in its model."""
    for match in (*MODEL_MATCHES, *EXPERT_MATCHES, *LATENT_MATCHES):
        if reading.value(match.key) is not None:
            reading.put(match.path, reading.value(match.key), match.key)
    layers = reading.value("model.num_layers")
    if layers is not None:
        for name, (value, key) in core.dense_layers(reading, "model.moe_layer_freq", layers).items():
            reading.put(f"model.{name}", value, key)


def _sizes(reading: Reading, *, experts: bool, mla: bool) -> tuple[dict[str, str], dict[str, tuple[Any, str]]]:
    """Fields of the model -> keys; and further fields with their values and keys."""
    matches: Sequence[SettingMapping] = (
        *MODEL_MATCHES,
        *(EXPERT_MATCHES if experts else ()),
        *(LATENT_MATCHES if mla else ()),
    )
    keys = {match.path.partition(".")[2]: match.key for match in matches}
    if mla:
        keys = {name: key for name, key in keys.items() if name not in ("num_key_value_heads", "head_dim")}
    more: dict[str, tuple[Any, str]] = {}
    hidden, width = reading.value("model.hidden_size"), reading.value("model.ffn_hidden_size")
    if width is None and type(hidden) is int:
        width = 4 * hidden
        more["intermediate_size"] = (width, f"{core.ORIGIN}: 4 x hidden_size")
    if not experts:
        return keys, more
    more |= core.dense_layers(reading, "model.moe_layer_freq", reading.value("model.num_layers"))
    more |= core.capacity(reading, "model.moe_expert_capacity_factor")
    if reading.value("model.moe_ffn_hidden_size") is None:
        more["moe_intermediate_size"] = (width, f"{core.ORIGIN}: as ffn_hidden_size")
    if "num_dense_layers" not in more:
        keys.pop("intermediate_size")
        more.pop("intermediate_size", None)
    return keys, more


def _attention(reading: Reading, *, mla: bool) -> dict[str, tuple[Any, str]]:
    """Fields of attention with their values and keys."""
    more = {} if mla else core.window(reading, "model.window_size")
    skip = reading.value("model.window_attn_skip_freq")
    if more and type(skip) is int:
        more["sliding_window_pattern"] = (skip, "model.window_attn_skip_freq")
    for key, chosen, name, value in (
        ("model.softmax_type", "learnable", "attention_sinks", True),
        ("model.add_qkv_bias", True, "qkv_bias", True),
        ("model.qk_layernorm", True, "qk_norm", "head"),
    ):
        if reading.value(key) == chosen and not (mla and name == "qk_norm"):
            more[name] = (value, key)
    return more


FORMAT = Format("bridge", "Megatron Bridge configuration", _recognizes, read, settings, export, "megatron-bridge")
