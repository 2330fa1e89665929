"""NeMo: configurations of 1.x (``model`` and ``trainer``, as its launcher has them) and of 2.0 (dumps of NeMo-Run).

Keys, defaults and meanings of 1.x: NVIDIA/NeMo at 8cfedd7, nemo/collections/nlp/models/language_modeling
(megatron_gpt_model.py, megatron_base_model.py); NVIDIA/NeMo-Framework-Launcher at 26e42fa, launcher_scripts/conf. Of
2.0: NVIDIA/NeMo at 8cfedd7, nemo/lightning/pytorch (strategies/megatron_strategy.py, plugins/mixed_precision.py) and
nemo/collections/llm/gpt/model, with Megatron Core's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from simplan import catalog
from simplan.document import parse_yaml
from simplan.interop.configuration import Configuration, Match, Reading
from simplan.interop.formats import ConfigFile, Format
from simplan.interop.frameworks import megatron_core as core

_TITLE = "NeMo configuration"
_ORIGIN = "the default of NeMo"
_PRECISIONS = {
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
_CLASSES = re.compile(r"(?P<family>[A-Za-z]+?)(?P<version>[\d.]*)Config(?P<size>[\dx]+(?:P\d+)?[MB])(?P<active>_A\d+B)?")

_NO_EFFECT_1X = (
    "defaults", "hydra.", "run.", "exp_manager.", "s3_checkpointing.", "env_vars.", "name", "restore_from_path",
    "trainer.accelerator", "trainer.logger", "trainer.enable_", "trainer.use_distributed_sampler", "trainer.max_",
    "trainer.log_", "trainer.val_check", "trainer.limit_", "trainer.benchmark", "trainer.num_sanity", "trainer.strategy",
    "trainer.replace_sampler_ddp", "trainer.profiler", "trainer.check_val", "trainer.accumulate_grad_batches",
    "model.name", "model.seed", "model.init_method_std", "model.use_scaled_init_method", "model.layernorm_epsilon",
    "model.layernorm_zero_centered_gamma", "model.do_layer_norm_weight_decay", "model.make_vocab_size_divisible_by",
    "model.pre_process", "model.post_process", "model.persist_layer_norm", "model.headscale",
    "model.normalize_attention_scores", "model.rotary_", "model.scale_positional_embedding", "model.attention_type",
    "model.tokenizer.", "model.native_amp_", "model.hysteresis", "model.fp16_lm_cross_entropy", "model.moe_aux_loss_coeff",
    "model.moe_z_loss_coeff", "model.moe_router_load_balancing_type", "model.moe_input_jitter_eps",
    "model.grad_allreduce_chunk_size_mb", "model.grad_div_ar_fusion", "model.gradient_as_bucket_view", "model.onnx_safe",
    "model.bias_activation_fusion", "model.bias_dropout_add_fusion", "model.masked_softmax_fusion",
    "model.get_attention_mask_from_fusion", "model.apex_transformer_log_level", "model.resume_from_checkpoint", "model.restore_from_", "model.skip_train", "model.reset_lr",
    "model.use_cpu_initialization", "model.sync_batch_comm", "model.fp8_margin", "model.fp8_interval", "model.fp8_amax_",
    "model.fp8_e4m3", "model.fp8_hybrid", "model.fp8_wgrad", "model.fp8_map", "model.reduce_amax", "model.use_emha",
    "model.gc_interval", "model.nsys_profile.", "model.dist_ckpt_", "model.data.", "model.optim.lr", "model.optim.weight_",
    "model.optim.betas", "model.optim.eps", "model.optim.sched", "model.optim.lock_timeout", "model.optim.contiguous_",
    "model.megatron_timer_kwargs.", "model.enable_megatron_timers", "model.apply_query_key_layer_scaling",
    "model.openai_gelu", "model.ffn_dropout", "model.use_te_rng_tracker", "model.seq_len_interpolation_factor",
    "model.deteministic_mode", "model.validation_param_sync_overlap", "model.fsdp_", "model.batch_p2p_comm", "model.precision",
    "model.nccl_communicator_config_path", "model.use_tp_pp_dp_mapping", "model.tp_comm_overlap_", "model.transformer_block_type",
    "model.ub_tp_comm_overlap_cfg", "model.wgrad_deferral_limit", "model.moe_grouped_gemm", "model.peft.",
    "model.cpu_offloading_", "model.activations_checkpoint_", "model.target", "model.nemo_version",
    "model.apply_rope_fusion", "model.optim.name", "model.mcore_", "model.transformer_engine", "model.use_flash_attention",
    "model.num_micro_batches_with_partial_activation_checkpoints", "model.megatron_amp_O2",
)  # fmt: skip
"""Keys, or their beginnings, that are read with others or change neither time nor memory."""

_NOT_MODELED_1X: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "model.ub_tp_comm_overlap": ((True,), "tensor-parallel collectives are taken to overlap with GEMMs"),
    "model.optim.overlap_grad_sync": ((True,), "gradient reductions are taken to overlap with backward"),
    "model.optim.overlap_param_sync": ((True,), "parameter all-gathers are taken to overlap with forward"),
    "model.overlap_p2p_comm": ((True, None), "an interleaved schedule is taken to prefetch its receives"),
    "model.fp8_params": ((False, None), "weights are counted in 16 bits next to those in FP8"),
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
_REFUSED_1X = {
    "model.fsdp": "sharded parameters are not modeled yet for NeMo 1.x",
    "model.cpu_offloading": "offloading to the host is not modeled yet for NeMo 1.x",
    "model.pipeline_model_parallel_split_rank": "an encoder and a decoder on separate stages are not modeled yet",
}


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
        return _read_2(Reading.of("NeMo 2.0 configuration", file.name, settings))
    return _read_1(Reading.of("NeMo 1.x configuration", file.name, settings))


def _read_1(reading: Reading) -> Configuration:
    """Configuration of NeMo 1.x."""
    words = core.Words("model.", "model.", "model.ddp.", "model.optim.", "model.", "model.")
    for key, why in _REFUSED_1X.items():
        if reading.value(key):
            reading.refuse(key, why)
    if "model.encoder.num_layers" in reading or "model.bert_binary_head" in reading:
        rule = "only decoders (GPT, Llama, Mixtral ...) are read from NeMo's configurations"
        reading.refuse("model", rule, "name a scenario with family t5 or bert")
        return reading.finish()
    _put_software(reading)
    experts = reading.value("model.num_moe_experts") is not None
    degrees = core.read_parallel(reading, words, experts=experts)
    names = ("activations_checkpoint_granularity", "activations_checkpoint_method", "activations_checkpoint_num_layers")
    core.read_recompute(reading, "model.", names=(*names, "activations_checkpoint_modules"))
    _put_optimizer(reading, degrees)
    _put_precision(reading)
    _put_model(reading, experts=experts)
    _put_devices(reading, degrees, "model.")
    for key, (values, why) in _NOT_MODELED_1X.items():
        value = reading.value(key)
        if key in reading and value not in values and _matters(key, reading, degrees):
            reading.not_modeled(key, why)
        reading.no_effect(key)
    core.no_effect(reading, _NO_EFFECT_1X)
    return reading.finish()


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
    origin = key if key in reading else f"{_ORIGIN}: fused_adam"
    core.put_sharding(reading, int(name in _SHARDED), origin)
    reading.put("training.optimizer", "adamw", origin)
    clip = "trainer.gradient_clip_val"
    if reading.value(clip):
        reading.not_modeled(clip, core.CLIPPING)
    dtype, wide = "model.optim.grad_sync_dtype", ("fp32", 32, "float32")
    if reading.value(dtype) in ("bf16", "fp16", "bfloat16", "float16"):
        reading.put("plan.grad_dtype", {"b": "bf16", "f": "fp16"}[str(reading.value(dtype))[0]], dtype)
    elif dtype in reading and reading.value(dtype) not in wide:
        reading.refuse(dtype, "is not modeled yet", "only bf16, fp16 and fp32 are")
    bucket, world = "model.optim.bucket_cap_mb", _world(reading)
    size, group = reading.value(bucket), degrees["tp"] * degrees["pp"] * degrees["cp"]
    if name == "distributed_fused_adam" and type(size) is int and world is not None and world // group > 1:
        reading.put("plan.bucket_bytes", size * 2**20, bucket)
    reading.no_effect(bucket, clip)


def _put_precision(reading: Reading) -> None:
    key, fp8 = "trainer.precision", "model.fp8"
    value = reading.value(key, reading.value("model.precision", 32))
    precision = _PRECISIONS.get(value) if isinstance(value, str | int) else None
    if precision is None:
        reading.refuse(key, "is not known", f"use {', '.join(map(str, _PRECISIONS))}")
        return
    if core.truth(reading, fp8):
        reading.put("training.precision", "fp8", fp8)
        reading.put("training.fp8_recipe", "delayed", "Transformer Engine's delayed scaling is NeMo 1.x's only recipe")
        return
    reading.no_effect(fp8)
    said = next((each for each in (key, "model.precision") if each in reading), _ORIGIN)
    reading.put("training.precision", precision, said)


def _put_model(reading: Reading, *, experts: bool) -> None:
    activation, positions = reading.value("model.activation", "gelu"), reading.value("model.position_embedding_type")
    norm = reading.value("model.normalization", "layernorm")
    kind = _POSITIONS.get(str(positions or "learned_absolute").lower())
    plain = str(activation).removeprefix("fast-")
    if plain not in (*_GATES, *_PLAIN):
        reading.refuse("model.activation", "is not known", f"use {', '.join((*_GATES, *_PLAIN))}")
    if kind is None:
        reading.refuse("model.position_embedding_type", "is not modeled yet", f"only {', '.join(_POSITIONS)} are")
    keys = {
        "num_hidden_layers": "model.num_layers",
        "hidden_size": "model.hidden_size",
        "num_attention_heads": "model.num_attention_heads",
        "num_key_value_heads": "model.num_query_groups",
        "head_dim": "model.kv_channels",
    }
    more: dict[str, tuple[Any, str]] = {}
    if experts:
        keys |= core.expert_keys(reading, "model.")
        capacity = "model.moe_expert_capacity_factor"
        if (factor := reading.value(capacity)) is not None:
            more |= {"capacity_factor": (factor, capacity), "drop_tokens": (True, capacity)}
        reading.no_effect("model.moe_pad_expert_input_to_capacity")
    else:
        keys["intermediate_size"] = "model.ffn_hidden_size"
    hidden = reading.value("model.hidden_size")
    if reading.value("model.ffn_hidden_size") is None and isinstance(hidden, int):
        more["moe_intermediate_size" if experts else "intermediate_size"] = (4 * hidden, f"{_ORIGIN}: 4 x hidden_size")
    window = reading.value("model.window_size")
    if isinstance(window, list) and window and type(window[0]) is int and window[0] > 0:
        more["sliding_window"] = (window[0], "model.window_size")
    reading.no_effect("model.window_size")
    if reading.value("model.qkv_bias") and plain in _GATES:
        more["qkv_bias"] = (True, "model.qkv_bias")
    reading.no_effect("model.qkv_bias")
    length = next((key for key in ("model.encoder_seq_length", "model.seq_length", "model.data.seq_length") if key in reading), "")
    if length:
        more["seq_len"] = (reading.value(length), length)
    else:
        reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")
    gated = plain in _GATES
    if not gated and not experts and kind == "learned" and reading.value("model.max_position_embeddings"):
        keys["max_position_embeddings"] = "model.max_position_embeddings"
    reading.no_effect("model.max_position_embeddings")
    _put_vocabulary(reading, more)
    if gated or not experts:
        core.put_model(
            reading,
            core.ModelForm(
                gated=gated,
                positions=kind or "learned",
                biases=core.truth(reading, "model.bias", default=True),
                tied=core.truth(reading, "model.share_embeddings_and_output_weights", default=True),
                layer_norm="rms" not in str(norm),
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
            ),
            _ORIGIN,
        )
    else:
        reading.refuse("model.activation", "is not modeled yet for experts", f"only {', '.join(_GATES)} are")
    falcon = "falcon" in str(reading.value("model.name"))  # the customization is of its blocks alone
    for key, left in _BLOCK_OPTIONS.items():
        if reading.value(key, "pre_ln") != "pre_ln" and (falcon or "customization" not in key) and reading.value(key):
            reading.not_modeled(key, left)
        reading.no_effect(key)
    for key in ("model.hidden_dropout", "model.attention_dropout"):
        if bool(reading.value(key, 0.1)) is not (not gated):
            reading.not_modeled(key, f"the profile has {'no dropout' if gated else 'dropout'} in this family")
        reading.no_effect(key)


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


def _put_devices(reading: Reading, degrees: Mapping[str, int], batch: str) -> None:
    """Put the number of devices, and ask for the cluster."""
    world = _world(reading)
    device = "trainer.devices"
    core.check_world(reading, degrees, world, device, batch)
    if world is None:
        reading.no_effect(device, "trainer.num_nodes")
        reading.ask("cluster", what="does not say how many devices there are", fix="add --cluster dgx-h100 --num-nodes 4")
        return
    reading.put("cluster.num_devices", world, device)
    reading.no_effect("trainer.num_nodes")
    reading.ask(
        "cluster.preset",
        "cluster.device",
        what=f"does not say which cluster its {world:,} devices are in",
        fix="add --cluster dgx-h100, or another of `simplan show clusters`",
    )


# NeMo 2.0: Megatron Core's names, under other sections.
_WORDS_2 = core.Words("model.config.", "trainer.strategy.", "trainer.strategy.ddp.", "optim.config.", "data.", "model.config.")
_NO_EFFECT_2 = (
    "_target_", "_partial_", "_factory_", "log.", "resume", "tokenizer", "data.", "model._target_", "model.tokenizer",
    "model.optim", "model.config.", "optim._target_", "optim.lr_scheduler.", "optim.config.", "optim.no_weight_decay_cond",
    "optim.scale_lr_cond", "trainer._target_", "trainer.accelerator", "trainer.accumulate_grad_batches", "trainer.limit_",
    "trainer.callbacks", "trainer.enable_", "trainer.log_", "trainer.logger", "trainer.max_", "trainer.use_distributed_sampler",
    "trainer.val_check_interval", "trainer.num_sanity", "trainer.plugins._target_", "trainer.plugins.params_dtype",
    "trainer.plugins.pipeline_dtype", "trainer.plugins.autocast_", "trainer.plugins.fp8_amax_", "trainer.plugins.fp8_margin",
    "trainer.plugins.precision", "trainer.plugins.fp8_wgrad", "trainer.plugins.reuse_grad_buf", "trainer.plugins.fp16_",
    "trainer.plugins.num_layers_at_", "trainer.strategy._target_", "trainer.strategy.ckpt_", "trainer.strategy.ddp.",
    "trainer.strategy.gradient_as_bucket_view", "trainer.strategy.pipeline_dtype", "trainer.strategy.use_te_rng_tracker",
    "trainer.strategy.save_ckpt_format", "trainer.strategy.progress_interval", "trainer.strategy.replace_progress_bar",
    "trainer.strategy.ddp", "trainer.strategy.fsdp", "trainer.strategy.lazy_init", "peft",
)  # fmt: skip


def _read_2(reading: Reading) -> Configuration:
    """Configuration of NeMo 2.0."""
    reading.put("software", "nemo", "NeMo 2.0 is Megatron Core under Lightning")
    preset = _put_named_model(reading)
    experts = "x" in preset or "-a" in preset or preset.startswith(("deepseek", "gpt-oss", "olmoe"))
    degrees = core.read_parallel(reading, _WORDS_2, experts=experts)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    core.read_recompute(reading, _WORDS_2.recompute, names=names)
    core.read_data_parallel(reading, _WORDS_2, default=True, origin="the recipes of NeMo 2.0 have the distributed optimizer")
    plugins = "trainer.plugins."
    fp8, recipe = reading.value(f"{plugins}fp8"), reading.value(f"{plugins}fp8_recipe", "delayed")
    said = f"{plugins}precision" if f"{plugins}precision" in reading else "trainer.precision"
    value = reading.value(said, "bf16-mixed")
    precision = _PRECISIONS.get(value) if isinstance(value, str | int) else None
    if precision is None:
        reading.refuse(said, "is not known", f"use {', '.join(map(str, _PRECISIONS))}")
    elif fp8 is None:
        reading.put("training.precision", precision, said if said in reading else _ORIGIN)
        reading.no_effect(f"{plugins}fp8", f"{plugins}fp8_recipe", f"{plugins}fp8_param_gather", f"{plugins}fp8_params")
    elif recipe == "mxfp8":
        reading.put("training.precision", "mxfp8", f"{plugins}fp8_recipe")
    elif recipe in ("tensorwise", "delayed", "blockwise"):
        reading.put("training.precision", "fp8", f"{plugins}fp8")
        reading.put("training.fp8_recipe", recipe, f"{plugins}fp8_recipe")
    else:
        reading.refuse(f"{plugins}fp8_recipe", "is not modeled yet", "only tensorwise, delayed, blockwise and mxfp8 are")
    if fp8 is not None:
        for key in (f"{plugins}fp8_param_gather", f"{plugins}fp8_params"):
            if reading.value(key):
                reading.not_modeled(key, _NOT_MODELED_1X["model.fp8_params"][1])
        if reading.value(f"{plugins}first_last_layers_bf16"):
            reading.not_modeled(f"{plugins}first_last_layers_bf16", "all blocks are counted in FP8")
    grads = f"{plugins}grad_reduce_in_fp32"
    core.grad_dtype(reading, precision or "bf16", reading.value(grads), grads)
    optimizer = "optim.config.optimizer"
    if reading.value(optimizer, "adam") not in core.OPTIMIZERS:
        reading.refuse(optimizer, "is not modeled yet", f"only {' and '.join(core.OPTIMIZERS)} are")
    else:
        name = "adamw" if reading.value(optimizer, "adam") == "adam" else "sgd_momentum"
        reading.put("training.optimizer", name, optimizer if optimizer in reading else "the default of Megatron Core")
    if reading.value("optim.config.clip_grad", 1.0):
        reading.not_modeled("optim.config.clip_grad", core.CLIPPING)
    if "data.seq_length" in reading:
        reading.put("model.seq_len", reading.value("data.seq_length"), "data.seq_length")
    else:
        reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")
    if reading.value("model.config.enable_cuda_graph"):
        reading.not_modeled("model.config.enable_cuda_graph", _NOT_MODELED_1X["model.enable_cuda_graph"][1])
    _put_devices(reading, degrees, "data.")
    for key in [*reading.settings]:
        if key.startswith("model.config.") and key.removeprefix("model.config.") in _SIZES_2:
            reading.refuse(key, "changes the model that its class names", "write the model into a scenario")
    reading.no_effect(f"{plugins}first_last_layers_bf16", grads, optimizer, "trainer.precision")
    core.no_effect(reading, _NO_EFFECT_2)
    return reading.finish()


_SIZES_2 = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_moe_experts")


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



FORMAT = Format("nemo", _TITLE, _recognizes, read)
