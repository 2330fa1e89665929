"""Settings of NeMo 1.x.

Keys, defaults and meanings: NVIDIA/NeMo at 8cfedd7, nemo/collections/nlp/models/language_modeling
(megatron_gpt_model.py, megatron_base_model.py); NVIDIA/NeMo-Framework-Launcher at 26e42fa, launcher_scripts/conf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from simplan.interop.configuration import Configuration, Reading
from simplan.interop.frameworks import megatron_core as core

ORIGIN = "the default of NeMo"
PRECISIONS: Mapping[str | int, str] = {
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys((16, "16", "16-mixed", "fp16", "fp16-mixed"), "fp16"),
    **dict.fromkeys((32, "32", "32-true", "fp32"), "fp32"),
}
_SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
_WHOLE = ("fused_adam", "adamw", "adam", "megatron_fused_adam")
_VOCABULARIES: Mapping[str, int] = {
    "GPT2BPETokenizer": 50257,
    "tiiuae/falcon-7b": 65024,
    "bigcode/starcoder2-tokenizer": 49152,
    "mistralai/Mistral-7B-v0.1": 32000,
    "mistralai/Mixtral-8x7B-v0.1": 32000,
    "mistral-community/Mixtral-8x22B-v0.1": 32000,
    "mistralai/Mistral-Nemo-Base-2407": 131072,
    "mistralai/Mistral-Large-Instruct-2407": 32768,
}
"""Tokens of a tokenizer, without padding; of the published config.json of each model."""
_LLAMA_3 = re.compile(r"meta-llama/(Meta-)?Llama-3(\.\d)?-\d+B(-Instruct)?")
_LLAMA_3_VOCABULARY = 128256
_POSITIONS: Mapping[str, Literal["learned", "rope", "alibi", "none"]] = {
    "learned_absolute": "learned",
    "learned_parameters": "learned",
    "rope": "rope",
    "alibi": "alibi",
    "kerple": "alibi",
    "none": "none",
}
_GATES = ("swiglu", "geglu", "reglu")
_PLAIN = ("gelu", "fast-gelu", "relu", "squared-relu", "squaredrelu", "openai-gelu", "openai_gelu")

_NO_EFFECT = (
    "defaults", "hydra.", "run.", "exp_manager.", "s3_checkpointing.", "env_vars.", "name", "restore_from_path",
    "trainer.accelerator", "trainer.logger", "trainer.enable_", "trainer.use_distributed_sampler", "trainer.max_",
    "trainer.log_", "trainer.val_check", "trainer.limit_", "trainer.benchmark", "trainer.num_sanity",
    "trainer.strategy", "trainer.replace_sampler_ddp", "trainer.profiler", "trainer.check_val",
    "trainer.accumulate_grad_batches", "model.name", "model.seed", "model.init_method_std",
    "model.use_scaled_init_method", "model.layernorm_epsilon", "model.layernorm_zero_centered_gamma",
    "model.do_layer_norm_weight_decay", "model.make_vocab_size_divisible_by", "model.pre_process",
    "model.post_process", "model.persist_layer_norm", "model.headscale", "model.normalize_attention_scores",
    "model.rotary_", "model.scale_positional_embedding", "model.attention_type", "model.tokenizer.",
    "model.native_amp_", "model.hysteresis", "model.fp16_lm_cross_entropy", "model.moe_aux_loss_coeff",
    "model.moe_z_loss_coeff", "model.moe_router_load_balancing_type", "model.moe_input_jitter_eps",
    "model.grad_allreduce_chunk_size_mb", "model.grad_div_ar_fusion", "model.gradient_as_bucket_view",
    "model.onnx_safe", "model.bias_activation_fusion", "model.bias_dropout_add_fusion", "model.masked_softmax_fusion",
    "model.get_attention_mask_from_fusion", "model.apex_transformer_log_level", "model.resume_from_checkpoint",
    "model.restore_from_", "model.skip_train", "model.reset_lr", "model.use_cpu_initialization",
    "model.sync_batch_comm", "model.fp8_margin", "model.fp8_interval", "model.fp8_amax_", "model.fp8_e4m3",
    "model.fp8_hybrid", "model.fp8_wgrad", "model.fp8_map", "model.reduce_amax", "model.use_emha",
    "model.gc_interval", "model.nsys_profile.", "model.dist_ckpt_", "model.data.", "model.optim.lr",
    "model.optim.weight_", "model.optim.betas", "model.optim.eps", "model.optim.sched", "model.optim.lock_timeout",
    "model.optim.contiguous_", "model.megatron_timer_kwargs.", "model.enable_megatron_timers",
    "model.apply_query_key_layer_scaling", "model.openai_gelu", "model.ffn_dropout", "model.use_te_rng_tracker",
    "model.seq_len_interpolation_factor", "model.deteministic_mode", "model.validation_param_sync_overlap",
    "model.fsdp_", "model.batch_p2p_comm", "model.precision", "model.nccl_communicator_config_path",
    "model.tp_comm_overlap_", "model.transformer_block_type",
    "model.ub_tp_comm_overlap_cfg", "model.wgrad_deferral_limit", "model.moe_grouped_gemm",
    "model.cpu_offloading_", "model.activations_checkpoint_", "model.target", "model.nemo_version",
    "model.apply_rope_fusion", "model.optim.name", "model.mcore_", "model.transformer_engine",
    "model.use_flash_attention", "model.num_micro_batches_with_partial_activation_checkpoints",
    "model.megatron_amp_O2",
)  # fmt: skip
"""Keys, or their beginnings, that are read with others or change neither time nor memory."""

_NOT_MODELED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "model.ub_tp_comm_overlap": ((True,), "tensor-parallel collectives are taken to overlap with GEMMs"),
    "model.optim.overlap_grad_sync": ((True,), "gradient reductions are taken to overlap with backward"),
    "model.optim.overlap_param_sync": ((True,), "parameter all-gathers are taken to overlap with forward"),
    "model.overlap_p2p_comm": ((True, None), "an interleaved schedule is taken to prefetch its receives"),
    "model.fp8_params": ((False, None), core.WIDE_WEIGHTS),
    "model.rampup_batch_size": ((None,), "the batch is that at the end of the ramp"),
    "model.gradient_accumulation_fusion": ((True,), "GEMMs are taken to add to the stored gradients"),
    "model.cross_entropy_loss_fusion": ((True,), "the loss is taken to be one kernel"),
    "model.defer_embedding_wgrad_compute": ((False,), "the head's weight gradients are computed in backward"),
    "model.enable_cuda_graph": ((False,), "kernels are launched one by one"),
    "model.sharp": ((False,), "switches reduce nothing"),
    "model.optim.nccl_ub": ((False,), "NCCL's buffers are not registered"),
    "model.deterministic_mode": ((False,), "kernels are the fastest ones"),
    "model.fp32_residual_connection": ((False,), "the residual stream has 16 bits"),
    "model.megatron_amp_O2": ((True,), "weights have 16 bits next to FP32 master copies"),
    "model.activations_checkpoint_layers_per_pipeline": ((None, 0), "all stages recompute the same number of blocks"),
    "model.num_micro_batches_with_partial_activation_checkpoints": ((None, 0), "all microbatches recompute the same"),
    "model.moe_token_dispatcher_type": (("alltoall",), "tokens come to experts by all-to-all"),
    "model.optim.dtype": (("fp32", 32), "optimizer states have 32 bits"),
}
"""Key -> values with which the prediction is about the same thing, and what is left out with others."""

_VIRTUAL = "model.virtual_pipeline_model_parallel_size"
_REFUSED = {
    "model.fsdp": "sharded parameters are not modeled yet for NeMo 1.x",
    "model.cpu_offloading": "offloading to the host is not modeled yet for NeMo 1.x",
    "model.adapter_tuning.type": "bottleneck adapters are not modeled yet",
    "model.virtual_prompt_style": "prompt tuning is not modeled yet",
    "model.pipeline_model_parallel_split_rank": "an encoder and a decoder on separate stages are not modeled yet",
}


def read_version_1(reading: Reading) -> Configuration:
    """Configuration of NeMo 1.x.

    Raises:
        SpecError: Settings contradict each other; ``NotModelledError`` for other jobs.
    """
    words = core.Words("model.", "model.", "model.ddp.", "model.optim.", "model.", "model.")
    for key, why in _REFUSED.items():
        if reading.value(key):
            reading.refuse(key, why)
    if "model.encoder.num_layers" in reading or "model.bert_binary_head" in reading:
        rule = "only decoders (GPT, Llama, Mixtral ...) are read from NeMo's configurations"
        reading.refuse("model", rule, "name a scenario with family t5 or bert")
        return reading.finish()
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
    put_devices(reading, degrees, "model.")
    for key, (values, why) in _NOT_MODELED.items():
        value = reading.value(key)
        if key in reading and value not in values and _matters(key, reading, degrees):
            reading.not_modeled(key, why)
        reading.no_effect(key)
    core.no_effect(reading, _NO_EFFECT)
    return reading.finish()


_LORA_MODULES = {
    "attention_qkv": ("linear_qkv",),
    "attention_dense": ("linear_proj",),
    "mlp_fc1": ("linear_fc1",),
    "mlp_fc2": ("linear_fc2",),
    **core.LORA_TARGETS,
}
"""``lora_tuning.target_modules`` -> modules of Megatron Core; NeMo 1.23, collections/nlp/parts/peft_config.py."""


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
            rank=(core.whole(reading, f"{section}adapter_dim", 32), f"{section}adapter_dim"),
            modules=[module for word in words for module in _LORA_MODULES.get(str(word), (word,))],
            modules_key=f"{section}target_modules" if targets is not None else "NeMo's default: attention_qkv",
        )
    elif scheme != "none":
        reading.refuse(key, "is not modeled yet", "use lora, or none")
    for setting in (setting for setting in reading.settings if setting.startswith("model.peft.")):
        reading.no_effect(setting)


def _matters(key: str, reading: Reading, degrees: Mapping[str, int]) -> bool:
    """False for overlaps of communication that the plan does not have."""
    if key == "model.ub_tp_comm_overlap":
        return degrees["tp"] > 1
    return key != "model.overlap_p2p_comm" or core.whole(reading, _VIRTUAL) > 1


def _put_software(reading: Reading) -> None:
    """Put the profile: with Megatron Core, Transformer Engine or flash attention it is of 2024, else of 2022."""
    signs = ("model.mcore_gpt", "model.transformer_engine", "model.use_flash_attention")
    modern = next((key for key in signs if reading.value(key)), "layers are NeMo's own, as of 2022")
    preset = "nemo" if modern in reading else "nemo-2022"
    multiple = core.whole(reading, "model.make_vocab_size_divisible_by", 128)
    software = preset if multiple == 128 else {"preset": preset, "vocab_multiple": multiple}
    reading.put("software", software, modern)


def _put_optimizer(reading: Reading, degrees: Mapping[str, int]) -> None:
    key = "model.optim.name"
    name = reading.value(key, "fused_adam")
    if name not in (*_SHARDED, *_WHOLE):
        reading.refuse(key, "is not modeled yet", f"only {', '.join((*_SHARDED, *_WHOLE))} are")
        return
    origin = key if key in reading else f"{ORIGIN}: fused_adam"
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
    precision = PRECISIONS.get(value) if isinstance(value, str | int) else None
    if precision is None:
        reading.refuse(key, "is not known", f"use {', '.join(map(str, PRECISIONS))}")
        return
    if core.truth(reading, fp8):
        reading.put("training.precision", "fp8", fp8)
        reading.put("training.fp8_recipe", "delayed", "Transformer Engine's delayed scaling is NeMo 1.x's only recipe")
        return
    reading.no_effect(fp8)
    said = next((each for each in (key, "model.precision") if each in reading), ORIGIN)
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
    form = core.ModelForm(
        gated=gated or experts,
        positions=kind or "learned",
        biases=core.truth(reading, "model.bias", default=True),
        tied=core.truth(reading, "model.share_embeddings_and_output_weights", default=True),
        layer_norm="rms" not in str(reading.value("model.normalization", "layernorm")),
        moe=experts,
        keys=keys,
        more=more,
        why={
            "gated": "model.activation",
            "positions": "model.position_embedding_type",
            "biases": "model.bias",
            "layer_norm": "model.normalization",
            "tied": "model.share_embeddings_and_output_weights",
        },
    )
    core.put_model(reading, form, ORIGIN)
    falcon = "falcon" in str(reading.value("model.name"))  # the customization is of its blocks alone
    for key, left in _BLOCK_OPTIONS.items():
        if reading.value(key) not in (None, False, "pre_ln") and (falcon or "customization" not in key):
            reading.not_modeled(key, left)
        reading.no_effect(key)


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
        keys |= core.expert_keys(reading, "model.")
        more |= core.capacity(reading, "model.moe_expert_capacity_factor")
        reading.no_effect("model.moe_pad_expert_input_to_capacity")
        width = "moe_intermediate_size"
    else:
        keys[width] = "model.ffn_hidden_size"
    if reading.value("model.ffn_hidden_size") is None and isinstance(hidden, int):
        more[width] = (4 * hidden, f"{ORIGIN}: 4 x hidden_size")
    if reading.value("model.qkv_bias") and gated:
        more["qkv_bias"] = (True, "model.qkv_bias")
    length = next((key for key in _LENGTHS if key in reading), None)
    if length is not None:
        more["seq_len"] = (reading.value(length), length)
    else:
        reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")
    _put_vocabulary(reading, more)
    return keys, more


_LENGTHS = ("model.encoder_seq_length", "model.seq_length", "model.data.seq_length")
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
    elif tokenizer in _VOCABULARIES:
        more["vocab_size"] = (_VOCABULARIES[tokenizer], name)
    else:
        what = "does not say how many tokens the vocabulary has"
        reading.ask("model.vocab_size", "model.preset", what=what, fix="add --set model.vocab_size=32000")


def _world(reading: Reading) -> int | None:
    nodes, devices = reading.value("trainer.num_nodes", 1), reading.value("trainer.devices")
    if isinstance(devices, list):
        devices = len(devices)
    return core.world_size(nodes, devices)


def put_devices(reading: Reading, degrees: Mapping[str, int], batch: str) -> None:
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
    reading.no_effect("trainer.num_nodes")
    reading.ask(
        "cluster.preset",
        "cluster.device",
        what=f"does not say which cluster its {world:,} devices are in",
        fix="add --cluster dgx-h100, or another of `simplan show clusters`",
    )
