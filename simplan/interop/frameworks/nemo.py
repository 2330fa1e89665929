"""NeMo: configurations of 1.x (``model`` and ``trainer``, as its launcher has them) and of 2.0 (dumps of NeMo-Run).

NeMo 2.0 has Megatron Core's names, under other sections. Keys, defaults and meanings: NVIDIA/NeMo at 8cfedd7,
nemo/collections/nlp/models/language_modeling (megatron_gpt_model.py, megatron_base_model.py), nemo/lightning/pytorch
(strategies/megatron_strategy.py, plugins/mixed_precision.py) and nemo/collections/llm/gpt/model;
NVIDIA/NeMo-Framework-Launcher at 26e42fa, launcher_scripts/conf. Options without an effect: ``tables/nemo.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simplan import catalog
from simplan.document import parse_yaml
from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks import names_without_effect, tables
from simplan.interop.frameworks.bridge.words import PRECISIONS as FP8_PRECISIONS

_ORIGIN = "the default of NeMo"
_PRECISIONS: Mapping[str | int, str] = {
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys((16, "16", "16-mixed", "fp16", "fp16-mixed"), "fp16"),
    **dict.fromkeys((32, "32", "32-true", "fp32"), "fp32"),
}
_SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
_WHOLE = ("fused_adam", "adamw", "adam", "megatron_fused_adam")
_LLAMA_3 = re.compile(r"meta-llama/(Meta-)?Llama-3(\.\d)?-\d+B(-Instruct)?")
_LLAMA_3_VOCABULARY = 128256
_POSITIONS: Mapping[str, core.Positions] = {
    "learned_absolute": "learned", "learned_parameters": "learned", "rope": "rope", "alibi": "alibi", "kerple": "alibi",
    "none": "none",
}  # fmt: skip
_GATES = ("swiglu", "geglu", "reglu")
_PLAIN = ("gelu", "fast-gelu", "relu", "squared-relu", "squaredrelu", "openai-gelu", "openai_gelu")
_CLASSES = re.compile(
    r"(?P<family>[A-Za-z]+?)(?P<version>[\d.]*)Config(?P<size>[\dx]+(?:P\d+)?[MB])(?P<active>_A\d+B)?"
)
_WORDS_OF_2 = core.Words(
    "model.config.", "trainer.strategy.", "trainer.strategy.ddp.", "optim.config.", "data.", "model.config."
)
_SECTIONS = {
    "model.": "model.config.",
    "ddp.": "trainer.strategy.ddp.",
    "optimizer.": "optim.config.",
    "mixed_precision.": "trainer.plugins.",
}
"""Sections of Megatron Bridge -> sections of NeMo 2.0 with the same keys."""
_SIZES_OF_2 = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_moe_experts",
)  # fmt: skip


def _recognizes(file: ConfigFile) -> bool:
    document = file.yaml
    if document is None:
        return False
    data = document.data
    if str(data.get("_target_", "")).startswith("nemo.") or "nemo.lightning.pytorch" in file.text:
        return True
    model = data.get("model")
    return isinstance(model, dict) and isinstance(data.get("trainer"), dict) and "tensor_model_parallel_size" in model


def _read(file: ConfigFile) -> Configuration:
    """Configuration of a NeMo file.

    Raises:
        SpecError: The file is no YAML, or its settings contradict each other; ``NotModelledError`` for other jobs.
    """
    document = file.yaml or parse_yaml(file.text, file.name)
    settings = core.interpolated(core.flattened(document), prefix="training.")
    keys = {setting.key for setting in settings}
    if any(key.startswith("trainer.strategy.") for key in keys) and "model.micro_batch_size" not in keys:
        return _read_version_2(Reading.of("NeMo 2.0 configuration", file.name, settings))
    return _read_version_1(Reading.of("NeMo 1.x configuration", file.name, settings))


def _read_version_1(reading: Reading) -> Configuration:
    """Configuration of NeMo 1.x.

    Raises:
        SpecError: Settings contradict each other; ``NotModelledError`` for other jobs.
    """
    words = core.Words("model.", "model.", "model.ddp.", "model.optim.", "model.", "model.")
    table = tables("nemo")["version_1"]
    core.refuse(reading, table)
    if "model.encoder.num_layers" in reading or "model.bert_binary_head" in reading:
        rule = "only decoders (GPT, Llama, Mixtral ...) are read from NeMo's configurations"
        reading.refuse("model", rule, "name a scenario with family t5 or bert")
        return reading.finish(is_whole=False)
    _put_software(reading)
    experts = reading.value("model.num_moe_experts") is not None
    degrees = core.read_parallel(reading, words, experts=experts)
    core.read_placement(reading, "model.use_tp_pp_dp_mapping")
    names = ("activations_checkpoint_granularity", "activations_checkpoint_method", "activations_checkpoint_num_layers")
    core.read_recompute(reading, "model.", names=(*names, "activations_checkpoint_modules"))
    _put_optimizer(reading, degrees)
    _put_precision(reading)
    _put_model(reading, experts=experts)
    _put_adapters(reading)
    _put_devices(reading, degrees, "model.")
    core.sort_rest(reading, table, names_without_effect("nemo_1"), degrees)
    return reading.finish()


_LORA_MODULES = {
    "attention_qkv": ("linear_qkv",),
    "attention_dense": ("linear_proj",),
    "mlp_fc1": ("linear_fc1",),
    "mlp_fc2": ("linear_fc2",),
    **core.LORA_TARGETS,
}
"""``lora_tuning.target_modules`` -> modules of Megatron Core; NeMo 1.23, collections/nlp/parts/peft_config.py."""
_LORA_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "variant": ("nemo", "adapts single projections of a fused matmul"),
    "layer_selection": ("", "adapts some of the blocks"),
    "weight_tying": (False, "gives all blocks one adapter"),
}
"""Options of ``lora_tuning`` -> usual value, and what another one does; NeMo 1.23, parts/peft_config.py."""


def _put_adapters(reading: Reading) -> None:
    """Put LoRA of ``model.peft``, whose sections for other schemes have no effect with it."""
    key, section = "model.peft.peft_scheme", "model.peft.lora_tuning."
    scheme = str(reading.value(key) or "none").lower()
    if scheme == "lora":
        targets = reading.value(f"{section}target_modules")
        words = targets if isinstance(targets, list) else ["attention_qkv"]
        core.put_adapters(
            reading,
            key=key,
            rank=(reading.whole(f"{section}adapter_dim", 32), f"{section}adapter_dim"),
            modules=[module for word in words for module in _LORA_MODULES.get(str(word), (word,))],
            modules_key=f"{section}target_modules" if targets is not None else "NeMo's default: attention_qkv",
        )
        for name, (usual, left) in _LORA_OPTIONS.items():
            if reading.value(f"{section}{name}") not in (None, usual):
                reading.refuse(f"{section}{name}", f"{left}, which is not modeled yet", "remove it")
        if reading.value(f"{section}adapter_dropout") not in (None, 0):
            what = "adapters have no dropout, and save no mask for it"
            reading.not_modeled(f"{section}adapter_dropout", what)
    elif scheme != "none":
        reading.refuse(key, "is not modeled yet", "use lora, or none")
    reading.no_effect(*names_without_effect("nemo_1_adapters"))


def _put_software(reading: Reading) -> None:
    """Put the profile: with Megatron Core, Transformer Engine or flash attention it is of 2024, else of 2022."""
    signs = ("model.mcore_gpt", "model.transformer_engine", "model.use_flash_attention")
    modern = next((key for key in signs if reading.value(key)), "layers are NeMo's own, as of 2022")
    preset = "nemo" if modern in reading else "nemo-2022"
    multiple = reading.whole("model.make_vocab_size_divisible_by", 128)
    software: dict[str, Any] = {} if multiple == 128 else {"vocab_multiple": multiple}
    if preset == "nemo" and reading.truth("model.enable_cuda_graph"):
        software["cuda_graphs"] = True
    reading.put("software", {"preset": preset, **software} if software else preset, modern)


def _put_optimizer(reading: Reading, degrees: Mapping[str, int]) -> None:
    key = "model.optim.name"
    name = reading.value(key, "fused_adam")
    if name not in (*_SHARDED, *_WHOLE):
        reading.refuse(key, "is not modeled yet", f"only {', '.join((*_SHARDED, *_WHOLE))} are")
        return
    origin = key if key in reading else f"{_ORIGIN}: fused_adam"
    core.put_sharding(reading, int(name in _SHARDED), origin)
    reading.put("training.optimizer", "adamw", origin)
    core.read_clipping(reading, "trainer.gradient_clip_val", default=0)
    dtype, wide = "model.optim.grad_sync_dtype", ("fp32", 32, "float32")
    if reading.value(dtype) in ("bf16", "fp16", "bfloat16", "float16"):
        reading.put("plan.grad_dtype", {"b": "bf16", "f": "fp16"}[str(reading.value(dtype))[0]], dtype)
    elif dtype in reading and reading.value(dtype) not in wide:
        reading.refuse(dtype, "is not modeled yet", "only bf16, fp16 and fp32 are")
    bucket, world = "model.optim.bucket_cap_mb", _world(reading)
    size, group = reading.value(bucket), degrees["tp"] * degrees["pp"] * degrees["cp"]
    if name == "distributed_fused_adam" and type(size) is int and world is not None and world // group > 1:
        reading.put("plan.bucket_bytes", size * 2**20, bucket)
    reading.no_effect(bucket)


def _put_precision(reading: Reading) -> None:
    key, fp8 = "trainer.precision", "model.fp8"
    value = reading.value(key, reading.value("model.precision", 32))
    precision = _PRECISIONS.get(value) if isinstance(value, str | int) else None
    if precision is None:
        reading.refuse(key, "is not known", f"use {', '.join(map(str, _PRECISIONS))}")
        return
    if reading.truth(fp8):
        reading.put("training.precision", "fp8", fp8)
        reading.put("training.fp8_recipe", "delayed", "Transformer Engine's delayed scaling is NeMo 1.x's only recipe")
        return
    reading.no_effect(fp8)
    said = next((candidate for candidate in (key, "model.precision") if candidate in reading), _ORIGIN)
    reading.put("training.precision", precision, said)


def _put_model(reading: Reading, *, experts: bool) -> None:
    activation, positions = reading.value("model.activation", "gelu"), reading.value("model.position_embedding_type")
    kind = _POSITIONS.get(str(positions or "learned_absolute").lower())
    plain = str(activation).removeprefix("fast-")
    gated = plain in _GATES
    if plain not in (*_GATES, *_PLAIN):
        reading.refuse("model.activation", "is not known", f"use {', '.join((*_GATES, *_PLAIN))}")
    elif experts and not gated:
        reading.refuse("model.activation", "is not modeled yet for experts", f"only {', '.join(_GATES)} are")
    if kind is None:
        reading.refuse("model.position_embedding_type", "is not modeled yet", f"only {', '.join(_POSITIONS)} are")
    keys, more = _sizes(reading, experts=experts, gated=gated)
    if not gated and not experts and kind == "learned" and reading.value("model.max_position_embeddings"):
        keys["max_position_embeddings"] = "model.max_position_embeddings"
    reading.no_effect("model.max_position_embeddings", "model.qkv_bias", "model.window_size")
    core.put_model(
        reading,
        gated=gated or experts,
        moe=experts,
        positions=kind or "learned",
        layer_norm="rms" not in str(reading.value("model.normalization", "layernorm")),
        gate_key="model.activation",
        bias_key="model.bias",
        keys=keys,
        more=more,
        origin=_ORIGIN,
    )
    falcon = "falcon" in str(reading.value("model.name"))  # the customization is of its blocks alone
    for key, left in _BLOCK_OPTIONS.items():
        if reading.value(key) not in (None, False, "pre_ln") and (falcon or "customization" not in key):
            reading.not_modeled(key, left)


def _sizes(reading: Reading, *, experts: bool, gated: bool) -> tuple[dict[str, str], dict[str, tuple[Any, str]]]:
    """Fields of the model -> keys; and further fields with their values and keys."""
    keys = {
        "num_hidden_layers": "model.num_layers",
        "hidden_size": "model.hidden_size",
        "num_attention_heads": "model.num_attention_heads",
        "num_key_value_heads": "model.num_query_groups",
        "head_dim": "model.kv_channels",
    }
    more = core.window(reading, "model.window_size")
    width, hidden = "intermediate_size", reading.value("model.hidden_size")
    if experts:
        has_expert_size = reading.value("model.moe_ffn_hidden_size") is not None
        keys |= {
            "num_experts": "model.num_moe_experts",
            "top_k": "model.moe_router_topk",
            "moe_intermediate_size": "model.moe_ffn_hidden_size" if has_expert_size else "model.ffn_hidden_size",
            **({"intermediate_size": "model.ffn_hidden_size"} if has_expert_size else {}),
            "shared_expert_intermediate_size": "model.moe_shared_expert_intermediate_size",
            "shared_expert_gate": "model.moe_shared_expert_gate",
        }
        more |= core.capacity(reading, "model.moe_expert_capacity_factor")
        reading.no_effect("model.moe_pad_expert_input_to_capacity")
        width = "moe_intermediate_size"
    else:
        keys[width] = "model.ffn_hidden_size"
    if reading.value("model.ffn_hidden_size") is None and isinstance(hidden, int):
        more[width] = (4 * hidden, f"{_ORIGIN}: 4 x hidden_size")
    if reading.value("model.qkv_bias") and gated:
        more["qkv_bias"] = (True, "model.qkv_bias")
    lengths = ("model.encoder_seq_length", "model.seq_length", "model.data.seq_length")
    length = next((key for key in lengths if key in reading), None)
    if length is not None:
        more["seq_len"] = (reading.value(length), length)
    else:
        core.put_length(reading)
    _put_vocabulary(reading, more)
    return keys, more


_BLOCK_OPTIONS = {
    "model.mcore_customization_config.parallel_attention": "attention and MLP follow each other",
    "model.mcore_customization_config.new_decoder_architecture": "blocks have one norm each",
    "model.transformer_block_type": "norms come before attention and MLP",
}


def _put_vocabulary(reading: Reading, more: dict[str, tuple[Any, str]]) -> None:
    """The vocabulary, from its size in the file or from the name of the tokenizer; else it is asked for."""
    key, name = "model.override_vocab_size", "model.tokenizer.type"
    tokenizer = str(reading.value(name))
    if reading.value(key) is not None:
        more["vocab_size"] = (reading.value(key), key)
    elif _LLAMA_3.fullmatch(tokenizer):
        more["vocab_size"] = (_LLAMA_3_VOCABULARY, name)
    elif tokenizer in tables("nemo")["vocabularies"]:
        more["vocab_size"] = (tables("nemo")["vocabularies"][tokenizer], name)
    else:
        what = "does not say how many tokens the vocabulary has"
        reading.ask("model.vocab_size", "model.preset", what=what, fix="add --set model.vocab_size=32000")


def _world(reading: Reading) -> int | None:
    """Devices of all nodes; None if one of the numbers is no whole number."""
    nodes, devices = reading.value("trainer.num_nodes", 1), reading.value("trainer.devices")
    devices = len(devices) if isinstance(devices, list) else devices
    if type(nodes) is int and type(devices) is int and min(nodes, devices) > 0:
        return nodes * devices
    return None


def _put_devices(reading: Reading, degrees: Mapping[str, int], batch: str) -> None:
    """Put the number of devices, and ask for the cluster."""
    world = _world(reading)
    device = "trainer.devices"
    core.check_world(reading, degrees, world, device, batch)
    if world is None:
        reading.no_effect(device, "trainer.num_nodes")
        reading.ask(
            "cluster", what="does not say how many devices there are", fix="add --cluster dgx-h100 --num-nodes 4"
        )
        return
    reading.put("cluster.num_devices", world, device)
    setting, per_node = reading.settings.get(device), reading.peek(device)
    per_node = len(per_node) if isinstance(per_node, list) else per_node
    if setting is not None and per_node != world:
        reading.ranks_per_node = Setting(device, per_node, setting.line)
    reading.no_effect("trainer.num_nodes")
    reading.ask(
        "cluster.preset",
        "cluster.device",
        what=f"does not say which cluster its {world:,} devices are in",
        fix="add --cluster dgx-h100, or another of `simplan show clusters`",
    )


def _read_version_2(reading: Reading) -> Configuration:
    """Configuration of NeMo 2.0.

    Raises:
        SpecError: Settings contradict each other; ``NotModelledError`` for other jobs.
    """
    graphs = core.has_graphs(reading, "model.config.")
    software = {"preset": "nemo", "cuda_graphs": True} if graphs else "nemo"
    reading.put("software", software, "NeMo 2.0 is Megatron Core under Lightning")
    core.read_adapters(reading, "peft.")
    preset = _put_named_model(reading)
    experts = bool(preset) and "num_experts" in catalog.model_fields(preset)
    degrees = core.read_parallel(reading, _WORDS_OF_2, experts=experts)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    core.read_recompute(reading, _WORDS_OF_2.recompute, names=names)
    origin = "the recipes of NeMo 2.0 have the distributed optimizer"
    core.read_data_parallel(reading, _WORDS_OF_2, default=True, origin=origin)
    if reading.value("trainer.strategy.fsdp") is not None:
        reading.refuse("trainer.strategy.fsdp", "sharded parameters are not modeled yet for NeMo")
    _put_precision_of_2(reading)
    core.read_optimizer(reading, "optim.config.", core.ORIGIN)
    core.put_length(reading, "data.seq_length")
    _put_devices(reading, degrees, "data.")
    for key in (f"model.config.{size}" for size in _SIZES_OF_2):
        if key in reading:
            reading.refuse(key, "changes the model that its class names", "write the model into a scenario")
    _put_rest(reading, degrees)
    return reading.finish()


def _put_precision_of_2(reading: Reading) -> None:
    """Put the precision of GEMMs and gradients."""
    plugins = "trainer.plugins."
    said = f"{plugins}precision" if f"{plugins}precision" in reading else "trainer.precision"
    value = reading.value(said, "bf16-mixed")
    precision = _PRECISIONS.get(value) if isinstance(value, str | int) else None
    fp8, recipe = f"{plugins}fp8", f"{plugins}fp8_recipe"
    name = str(reading.value(recipe, "delayed"))
    if precision is None:
        reading.refuse(said, "is not known", f"use {', '.join(map(str, _PRECISIONS))}")
    elif reading.value(fp8) is None:
        reading.put("training.precision", precision, said if said in reading else _ORIGIN)
    elif name not in FP8_PRECISIONS:
        reading.refuse(recipe, "is not modeled yet", f"only {', '.join(FP8_PRECISIONS)} are")
    else:
        low, scaling = FP8_PRECISIONS[name]
        reading.put("training.precision", low, fp8)
        if scaling is not None:
            reading.put("training.fp8_recipe", scaling, recipe if recipe in reading else _ORIGIN)
        for key in (f"{plugins}fp8_param_gather", f"{plugins}fp8_params"):
            if reading.value(key):
                reading.not_modeled(key, core.WIDE_WEIGHTS)
    grads = f"{plugins}grad_reduce_in_fp32"
    core.grad_dtype(reading, precision or "bf16", reading.value(grads), grads)


def _put_rest(reading: Reading, degrees: dict[str, int]) -> None:
    """Note what the prediction leaves out, and what has no effect."""

    def moved(key: str) -> str:
        section = next((prefix for prefix in _SECTIONS if key.startswith(prefix)), "")
        return _SECTIONS.get(section, "") + key.removeprefix(section)

    known = [moved(key) for key in names_without_effect("bridge") if key.startswith(tuple(_SECTIONS))]
    not_modeled = {moved(key): why for key, why in tables("bridge")["not_modeled"].items()}
    names = [*names_without_effect("nemo_2"), *known]
    core.sort_rest(reading, {"not_modeled": not_modeled}, names, degrees)


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


FORMAT = Format("nemo", "NeMo configuration", _recognizes, _read)
