"""Megatron Bridge's keys and values beside simplan's, for reading and for writing.

Sources: see ``simplan.interop.frameworks.bridge.reading``; layouts of pipelines: NVIDIA/Megatron-LM, core_v0.16.0,
megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simplan.interop.configuration import Match
from simplan.interop.frameworks.megatron_core import Words

WORDS = Words("model.", "model.", "ddp.", "optimizer.", "train.", "model.")

MODEL_MATCHES = (
    Match("model.num_layers", "model.num_hidden_layers"),
    Match("model.hidden_size", "model.hidden_size"),
    Match("model.ffn_hidden_size", "model.intermediate_size"),
    Match("model.num_attention_heads", "model.num_attention_heads"),
    Match("model.num_query_groups", "model.num_key_value_heads"),
    Match("model.kv_channels", "model.head_dim"),
    Match("model.vocab_size", "model.vocab_size"),
    Match("model.mtp_num_layers", "model.mtp_num_layers"),
)
EXPERT_MATCHES = (
    Match("model.num_moe_experts", "model.num_experts"),
    Match("model.moe_router_topk", "model.top_k"),
    Match("model.moe_ffn_hidden_size", "model.moe_intermediate_size"),
    Match("model.moe_shared_expert_intermediate_size", "model.shared_expert_intermediate_size"),
    Match("model.moe_shared_expert_gate", "model.shared_expert_gate"),
)
LATENT_MATCHES = (
    Match("model.q_lora_rank", "model.q_lora_rank"),
    Match("model.kv_lora_rank", "model.kv_lora_rank"),
    Match("model.qk_head_dim", "model.qk_nope_head_dim"),
    Match("model.qk_pos_emb_head_dim", "model.qk_rope_head_dim"),
    Match("model.v_head_dim", "model.v_head_dim"),
)
PRECISIONS: Mapping[str, tuple[str, str | None]] = {
    "tensorwise": ("fp8", "tensorwise"),
    "delayed": ("fp8", "delayed"),
    "blockwise": ("fp8", "blockwise"),
    "mxfp8": ("mxfp8", None),
}
"""``fp8_recipe`` -> ``training.precision`` and ``training.fp8_recipe``."""
RECIPES: Mapping[str, tuple[str, str | None]] = {
    "bf16_mixed": ("bf16", None),
    "fp16_mixed": ("fp16", None),
    "bf16_with_fp8_delayed_scaling_mixed": ("fp8", "delayed"),
    "bf16_with_fp8_current_scaling_mixed": ("fp8", "tensorwise"),
    "bf16_with_fp8_subchannel_scaling_mixed": ("fp8", "blockwise"),
    "bf16_with_mxfp8_mixed": ("mxfp8", None),
    "bf16_with_nvfp4_mixed": ("nvfp4", None),
}
"""Name of a mixed precision -> ``training.precision`` and ``training.fp8_recipe``."""
DISPATCHERS: Mapping[tuple[Any, Any], str] = {("flex", "deepep"): "deepep", ("flex", "hybridep"): "hybridep"}
"""Token dispatcher and its backend -> ``software.expert_dispatch``."""
REFUSED = {
    "model.is_hybrid_model": "Mamba layers are not modeled yet",
    "model.mamba_num_heads": "Mamba layers are not modeled yet",
    "model.hybrid_override_pattern": "Mamba layers are not modeled yet",
    "model.hybrid_layer_pattern": "Mamba layers are not modeled yet",
    "model.experimental_attention_variant": "this attention is not modeled yet",
    "model.linear_attention_freq": "linear attention is not modeled yet",
    "model.heterogeneous_block_specs": "blocks of different shapes are not modeled yet",
    "model.moe_latent_size": "experts with a latent size are not modeled yet",
    "model.kd_config": "distillation, with a second model, is not modeled yet",
    "model.kd_config.logit_layers": "distillation, with a second model, is not modeled yet",
    "model.hierarchical_context_parallel_sizes": "hierarchical context parallelism is not modeled yet",
    "model.vision_config": "models of images and text are not modeled yet",
    "optimizer.optimizer_cpu_offload": "an optimizer on the host is not modeled yet for Megatron",
    "dist.use_torch_fsdp2": "torch's FSDP2 under Megatron Bridge is not modeled yet",
    "dataset.packed_sequence_specs": "packed sequences need their lengths, which this file does not have",
    "dataset.packed_sequence_size": "packed sequences need their lengths, which this file does not have",
}
"""Keys that, with a value other than null, false or 0, make it another job; and why."""

_OVERLAPPED = "are taken to overlap with"
COMPARED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "comm_overlap.tp_comm_overlap": ((True,), f"tensor-parallel collectives {_OVERLAPPED} GEMMs"),
    "model.tp_comm_overlap": ((True, None), f"tensor-parallel collectives {_OVERLAPPED} GEMMs"),
    "ddp.overlap_grad_reduce": ((True, None), f"gradient reductions {_OVERLAPPED} backward"),
    "ddp.overlap_param_gather": ((True, None), f"parameter all-gathers {_OVERLAPPED} forward"),
    "comm_overlap.overlap_grad_reduce": ((True, None), f"gradient reductions {_OVERLAPPED} backward"),
    "comm_overlap.overlap_param_gather": ((True, None), f"parameter all-gathers {_OVERLAPPED} forward"),
    "comm_overlap.delay_wgrad_compute": ((False, None), "weight gradients are computed in backward"),
    "comm_overlap.bucket_size": ((None, 40_000_000), "buckets are those of ddp"),
    "model.defer_embedding_wgrad_compute": ((False, None), "the head's weight gradients are computed in backward"),
    "model.cross_entropy_loss_fusion": ((True, None), "the loss is taken to be one kernel, in place of the logits"),
    "model.cross_entropy_fusion_impl": (
        ("te", None),
        "the loss is taken to be Transformer Engine's, in place of logits",
    ),
    "model.gradient_accumulation_fusion": ((True, None), "GEMMs are taken to add to the stored gradients"),
    "model.fp32_residual_connection": ((False, None), "the residual stream has 16 bits"),
    "model.enable_cuda_graph": ((False, None), "kernels are launched one by one"),
    "model.external_cuda_graph": ((False, None), "kernels are launched one by one"),
    "model.cuda_graph_impl": (("none", None), "kernels are launched one by one"),
    "model.deterministic_mode": ((False, None), "kernels are the fastest ones"),
    "model.first_last_layers_bf16": ((False, None), "all blocks are counted in the low precision"),
    "mixed_precision.first_last_layers_bf16": ((False, None), "all blocks are counted in the low precision"),
    "mixed_precision.fp8_multi_head_attention": ((False, None), "attention is in 16 bits"),
    "model.account_for_embedding_in_pipeline_split": ((False, None), "blocks are split as evenly as they can be"),
    "model.account_for_loss_in_pipeline_split": ((False, None), "blocks are split as evenly as they can be"),
    "model.qk_clip": ((False, None), "attention scores are not clipped"),
    "model.transformer_impl": (("transformer_engine", None), "layers are Transformer Engine's"),
    "model.cpu_offloading_weights": ((False, None), "weights stay on the device"),
    "model.fine_grained_activation_offloading": ((False, None), "activations of single modules stay on the device"),
    "model.moe_shared_expert_overlap": ((False, None), "shared experts follow the others"),
    "model.moe_pad_expert_input_to_capacity": ((True, None, False), ""),
    "optimizer.use_precision_aware_optimizer": ((False, None), "optimizer states have 32 bits"),
    "optimizer.overlap_param_gather_with_optimizer_step": ((False, None), "the step ends before the next begins"),
    "train.rampup_batch_size": ((None,), "the batch is that at the end of the ramp"),
    "ddp.nccl_ub": ((False, None), "NCCL's buffers are not registered"),
    "ddp.fsdp_double_buffer": ((False, None), "gathered parameters are freed and allocated again"),
    "ddp.keep_fp8_transpose_cache": ((False, None), "no second copies of weights in FP8 are kept"),
    "ddp.outer_dp_sharding_strategy": (("no_shard", None), "replicas do not share optimizer states"),
    "dist.use_sharp": ((False, None), "switches reduce nothing"),
}
"""Key -> values with which the prediction is about the same thing, and what is left out with others."""

_MODEL_NO_EFFECT = (
    "_target_", "activation_func", "apply_query_key", "apply_residual", "apply_rope_fusion", "async_tensor",
    "attention_backend", "attention_softmax_in_fp32", "autocast", "barrier", "batch_p2p", "bf16", "bias_",
    "calculate_per_token_loss", "clone_scatter", "config_logger_dir", "cp_comm_type", "cuda_graph_", "deallocate",
    "disable_", "distribute_saved", "embedding_init", "enable_autocast", "finalize_model", "flash_decode", "fp16",
    "fp4_", "fp8_", "fused_single_qkv", "generation_config", "glu_linear_offset", "grad_s", "hetereogenous",
    "hf_model", "high_freq", "inference_", "init_m", "layernorm_", "log_max", "logit_dtype", "low_freq",
    "make_vocab_size", "mamba_", "masked_softmax", "max_position", "memory_efficient", "microbatch_group",
    "min_offloaded", "mlp_chunks", "moe_apply", "moe_aux", "moe_deepep", "moe_enable", "moe_extended_tp", "moe_flex",
    "moe_grouped", "moe_hybridep", "moe_input", "moe_layer_", "moe_per_layer", "moe_permute", "moe_router",
    "moe_token", "moe_use_legacy", "moe_z_loss", "mrope", "mscale", "mtp_", "no_sync", "num_layers_at",
    "num_microbatches", "old_context", "output_layer", "overlap_moe", "overlap_p2p", "parallel_output", "param_sync",
    "params_dtype", "perform_init", "persist", "pipeline_dtype", "qk_clip_", "qk_l2_norm", "quant_recipe",
    "recompute_", "restore_modelopt", "rope_", "rotary_", "scale_factor", "scatter_embedding", "should_pad",
    "softmax_", "symmetric", "test_mode", "timers", "tp_comm_", "tp_only", "transformer_layer_spec", "use_cpu",
    "use_fused", "use_kitchen", "use_mamba", "use_ring", "use_te", "use_transformer_engine_full", "use_arbitrary",
    "variable_seq", "wgrad_deferral", "window_", "yarn_", "hidden_dropout", "attention_dropout", "cpu_offloading",
    "beta_", "cache_mla", "original_max", "add_qkv_bias", "qk_layernorm", "ffn_hidden_size", "moe_expert_capacity",
    "delay_wgrad", "dense_grouped", "virtual_pipeline", "batch_invariant", "fine_grained", "ep_overlap",
    "attention_output_gate", "no_rope_freq", "is_hybrid", "position_embedding",
)  # fmt: skip
NO_EFFECT = (
    "_target_", "checkpoint.", "logger.", "profiling.", "rng.", "scheduler.", "tokenizer.", "validation.", "dataset.",
    "rerun_state_machine.", "ft.", "straggler.", "nvrx_straggler.", "inprocess_restart.", "tensor_inspect.",
    "env_vars.", "run.", "recipe.", "cluster_config.", "peft.", "comm_overlap._target_",
    "comm_overlap.tp_comm_overlap_cfg", "comm_overlap.tp_comm_bootstrap", "comm_overlap.wgrad", "comm_overlap.align",
    "comm_overlap.defer", "comm_overlap.overlap_param_gather_with", "comm_overlap.data_parallel_size",
    *(f"train.{name}" for name in (
        "_target_", "check_", "decrease_batch", "empty_unused", "eval_", "exit_", "manual_gc", "skip_train",
        "train_iters", "train_samples", "train_sync", "micro_batch", "global_batch", "num_epochs",
    )),
    *(f"dist.{name}" for name in (
        "_target_", "align_grad", "distributed_", "enable_megatron_core", "external_gpu", "high_priority",
        "lazy_init", "local_rank", "nccl_comm", "sharp_enabled", "use_gloo", "use_decentralized", "eval_context",
    )),
    *(f"mixed_precision.{name}" for name in (
        "_target_", "autocast", "bf16", "fp16", "fp32", "fp8", "fp4", "grad_reduce", "hysteresis", "initial_loss",
        "loss_scale", "min_loss", "num_layers_at", "params_dtype", "pipeline_dtype", "reuse_grad", "dtype",
    )),
    *(f"optimizer.{name}" for name in (
        "_target_", "adam_", "apply_wd", "barrier", "bf16", "config_logger", "decoupled", "exp_avg", "fp16",
        "fp8_recipe", "hysteresis", "initial_loss", "log_num", "loss_scale", "lr", "main_", "min_l", "finetune_lr",
        "muon_", "optimizer", "overlap_cpu", "overlap_param_gather", "params_dtype", "pin_cpu", "reuse_grad",
        "sgd_momentum", "store_param", "timers", "use_distributed", "use_torch", "weight_decay",
    )),
    *(f"ddp.{name}" for name in (
        "_target_", "align", "average", "check", "fp8", "gradient", "preserve", "pad_buckets", "suggested", "reuse",
        "disable", "delay", "grad_reduce", "fsdp_", "reduce_scatter", "megatron_fsdp", "num_distributed", "use_d",
        "use_m", "use_custom", "data_parallel", "bucket_size",
    )),
    *(f"model.{name}" for name in _MODEL_NO_EFFECT),
)  # fmt: skip
"""Keys, or their beginnings, that are read with others or change neither time nor memory."""

_MAX_LAYOUT = 10_000
_REPEATED = re.compile(r"\(([Etm L|]*)\)\*?(\d{1,4})|([EtmL|])\*(\d{1,4})")


def blocks_of_layout(layout: Any) -> tuple[int, ...] | None:
    """Blocks of each stage of a layout: ``Et*3|(t*4|)*6t*4L``; None for other layouts.

    >>> blocks_of_layout("Et|(tt|)*3mL")
    (1, 2, 2, 2, 0)
    """
    if not isinstance(layout, str):
        return None
    text = layout.replace(" ", "").replace(",", "")
    for _ in range(20):
        longer = _REPEATED.sub(lambda found: (found[1] or found[3] or "") * int(found[2] or found[4]), text, count=100)
        if longer == text or len(longer) > _MAX_LAYOUT:
            break
        text = longer
    stages = text.split("|")
    known = not set(text) - set("EtmL|") and "E" in stages[0] and "L" in stages[-1]
    return tuple(stage.count("t") for stage in stages) if known and len(text) <= _MAX_LAYOUT else None


def layout_of_blocks(blocks: tuple[int, ...], mtp: int) -> str:
    """Layout with given blocks of each stage, and further layers for later tokens on the last.

    >>> layout_of_blocks((1, 2, 0), 1)
    'Et|tt|mL'
    """
    stages = ["t" * number for number in blocks]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp + "L"
    return "|".join(stages)
