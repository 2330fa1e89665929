"""Jobs as a configuration of Megatron Bridge, with the few lines of Python that start it."""

from __future__ import annotations

import re
from typing import Any

from simplan.errors import NotModelledError, Problem
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks.bridge.words import (
    DISPATCHERS,
    EXPERT_MATCHES,
    LATENT_MATCHES,
    MODEL_MATCHES,
    PRECISIONS,
    RECIPES,
    WORDS,
    layout_of_blocks,
)
from simplan.interop.writing import Exported, Option, Writing
from simplan.io import as_argument
from simplan.job import Job

BUCKET_ELEMENTS = 40_000_000
"""Elements of a gradient bucket by default, in FP32."""
_PROFILE = "megatron-bridge"
_TARGET = "Megatron Bridge"
_FAMILIES = ("gpt", "llama", "moe", "deepseek")
_AS_PROFILE = "as the profile has it"


def settings(job: Job) -> tuple[Option, ...]:
    """The job in settings of ConfigContainer.

    Raises:
        NotModelledError: Megatron Bridge cannot express the job; names the key.
    """
    writing = Writing(job, _TARGET)
    if job.software.id != _PROFILE:
        rule = f"cannot be said in {_TARGET}"
        raise NotModelledError(
            Problem(field="software", value=job.software.id, rule=rule, fix=f"use software: {_PROFILE}")
        )
    writing.allowed("model.family", _FAMILIES)
    _write_model(writing)
    _write_plan(writing)
    _write_training(writing)
    _write_software(writing)
    return writing.finish()


def _write_model(writing: Writing) -> None:
    model = writing.job.model
    latent, experts = model.family == "deepseek", bool(model.num_experts)
    for match in (*MODEL_MATCHES, *(EXPERT_MATCHES if experts else ()), *(LATENT_MATCHES if latent else ())):
        value = writing.value(match.path)
        if latent and match.path in ("model.num_key_value_heads", "model.head_dim"):
            continue
        if value or match in LATENT_MATCHES:
            writing.set(match.key, value, match.path)
    length = writing.value("model.seq_len")
    writing.set("model.seq_length", length, "model.seq_len")
    writing.set("dataset.seq_length", length, "model.seq_len")
    writing.taken("model.max_position_embeddings", "model.gated_mlp", "model.expert_imbalance")
    gpt = model.family == "gpt"
    if gpt and model.max_position_embeddings != model.seq_len:
        fix = f"use model.seq_len = {model.seq_len}, as its table has one row per token"
        writing.refuse("model.max_position_embeddings", fix)
    for key, value in (
        ("gated_linear_unit", not gpt),
        ("activation_func", "gelu" if gpt else "silu"),
        ("normalization", "LayerNorm" if gpt else "RMSNorm"),
        ("position_embedding_type", "learned_absolute" if gpt else "rope"),
        ("add_bias_linear", gpt),
        ("hidden_dropout", 0.1 if gpt else 0.0),
        ("attention_dropout", 0.1 if gpt else 0.0),
    ):
        writing.set(f"model.{key}", value, f"model.family = {model.family}")
    writing.copy("model.share_embeddings_and_output_weights", "model.tied_embeddings")
    _write_attention(writing)
    if experts:
        _write_experts(writing)
    _write_adapters(writing)


def _write_attention(writing: Writing) -> None:
    model = writing.job.model
    latent = model.family == "deepseek"
    if latent:
        writing.set("model.multi_latent_attention", True, "model.family = deepseek")
    writing.copy("model.add_qkv_bias", "model.qkv_bias", if_set=True)
    if writing.value("model.qk_norm") == "projection":
        writing.refuse("model.qk_norm", "use head, or none")
    if model.qk_norm or latent:
        writing.set("model.qk_layernorm", True, "model.qk_norm" if model.qk_norm else "norms of the latent vectors")
    if writing.value("model.sliding_window") is not None:
        writing.set("model.window_size", [model.sliding_window, 0], "model.sliding_window")
        writing.copy("model.window_attn_skip_freq", "model.sliding_window_pattern", if_set=True)
    if writing.value("model.attention_sinks"):
        writing.set("model.softmax_type", "learnable", "model.attention_sinks")


def _write_adapters(writing: Writing) -> None:
    rank, targets = writing.value("model.lora_rank"), writing.value("model.lora_targets")
    if not rank:
        return
    if len(targets) != 1 or targets[0] not in core.LORA_TARGETS:
        writing.refuse("model.lora_targets", f"use one of {', '.join(core.LORA_TARGETS)}")
    writing.set("peft._target_", "megatron.bridge.peft.lora.LoRA", "training.task = lora")
    writing.set("peft.dim", rank, "model.lora_rank")
    if dropout := writing.value("model.lora_dropout"):
        writing.set("peft.dropout", dropout, "model.lora_dropout, of the input of A")
    writing.set("peft.target_modules", list(core.LORA_TARGETS[targets[0]]), "model.lora_targets")


def _write_experts(writing: Writing) -> None:
    model = writing.job.model
    dense = writing.value("model.num_dense_layers")
    layers = [0] * dense + [1] * (model.num_hidden_layers - dense)
    writing.set("model.moe_layer_freq", layers if dense else 1, "model.num_dense_layers")
    writing.set("model.moe_grouped_gemm", True, _AS_PROFILE)
    if writing.value("model.drop_tokens"):
        writing.set("model.moe_expert_capacity_factor", writing.value("model.capacity_factor"), "model.capacity_factor")
        writing.set("model.moe_pad_expert_input_to_capacity", True, "model.drop_tokens: all slots are computed")
    if not dense:  # without dense blocks, simplan's width of an MLP says nothing
        writing.options[:] = [option for option in writing.options if option.setting.key != "model.ffn_hidden_size"]
        writing.set("model.ffn_hidden_size", model.moe_intermediate_size, "model.moe_intermediate_size")


def _write_plan(writing: Writing) -> None:
    plan, software = writing.job.plan, writing.job.software
    writing.match(core.parallel_matches(WORDS))
    core.write_placement(writing, "dist.use_tp_pp_dp_mapping")
    if plan.tp > 1:
        writing.copy("model.sequence_parallel", "plan.sequence_parallel")
        overlapped = software.tp_overlap == "all" and plan.sequence_parallel
        writing.set("comm_overlap._target_", "megatron.bridge.training.comm_overlap.CommOverlapConfig", _AS_PROFILE)
        writing.set("comm_overlap.tp_comm_overlap", overlapped, "tensor-parallel collectives overlap with GEMMs")
    if writing.value("plan.virtual_stages") > 1:
        key = "model.virtual_pipeline_model_parallel_size"
        writing.set(key, plan.virtual_stages, "plan.virtual_stages")
        writing.set("model.overlap_p2p_comm", True, _AS_PROFILE)
        writing.set("model.batch_p2p_comm", False, _AS_PROFILE)
    writing.allowed("plan.schedule", ("none", "1f1b", "interleaved_1f1b"), "use 1f1b or interleaved_1f1b")
    if plan.cp > 1:
        words = {comm: word or "p2p" for word, comm in core.CP_COMM.items()}
        writing.set("model.cp_comm_type", words[writing.value("plan.cp_comm")], "plan.cp_comm")
    if writing.job.model.num_experts:
        writing.copy("model.expert_model_parallel_size", "plan.ep")
        writing.copy("model.expert_tensor_parallel_size", "plan.etp")
    if writing.value("plan.stage_layers") is not None and plan.stage_layers is not None:
        layout = layout_of_blocks(plan.stage_layers, writing.job.model.mtp_num_layers)
        writing.set("model.pipeline_model_parallel_layout", layout, "plan.stage_layers")
    _write_recompute(writing)
    _write_data_parallel(writing)
    if writing.value("plan.offload_activations"):
        layers = writing.value("plan.offload_layers")
        writing.set("model.cpu_offloading", True, "plan.offload_activations")
        number = writing.job.model.num_hidden_layers if layers is None else layers
        writing.set("model.cpu_offloading_num_layers", number, "plan.offload_layers")


def _write_recompute(writing: Writing) -> None:
    plan = writing.job.plan
    mode = writing.allowed("plan.recompute", ("none", "selective", "full"))
    if mode == "none":
        writing.set("model.recompute_granularity", None, "plan.recompute")
        return
    writing.set("model.recompute_granularity", mode, "plan.recompute")
    if mode == "selective":
        modules = writing.value("plan.recompute_modules")
        named = ["core_attn"] if modules is None else list(modules)
        writing.set("model.recompute_modules", named, "plan.recompute_modules")
        return
    layers = writing.value("plan.recompute_layers")
    writing.set("model.recompute_method", "uniform" if layers is None else "block", "plan.recompute_layers")
    writing.set("model.recompute_num_layers", 1 if layers is None else plan.recompute_layers, "plan.recompute_layers")


def _write_data_parallel(writing: Writing) -> None:
    plan, job = writing.job.plan, writing.job
    stage = writing.allowed("plan.zero_stage", (0, 1, 3), "use 0, 1 or 3")
    writing.taken("plan.dp_shard", "plan.dp_replicate")
    writing.set("ddp.use_distributed_optimizer", stage > 0, "plan.zero_stage")
    writing.set("ddp.use_megatron_fsdp", stage == 3, "plan.zero_stage")
    if stage == 3:
        writing.set("ddp.data_parallel_sharding_strategy", "optim_grads_params", "plan.zero_stage")
        writing.set("checkpoint.ckpt_format", "fsdp_dtensor", "what Megatron FSDP writes")
    if stage and plan.dp_replicate > 1:
        writing.set("ddp.num_distributed_optimizer_instances", plan.dp_replicate, "plan.dp_replicate")
    writing.set("ddp.overlap_grad_reduce", job.software.grad_overlap, _AS_PROFILE)
    writing.set("ddp.overlap_param_gather", job.software.overlap_param_gather and stage > 0, _AS_PROFILE)
    bucket = writing.value("plan.bucket_bytes")
    if bucket is not None:
        if bucket % 4:
            writing.refuse("plan.bucket_bytes", "use a multiple of 4")
        writing.set("ddp.bucket_size", bucket // 4, "plan.bucket_bytes, in FP32 elements")


def _write_training(writing: Writing) -> None:
    training = writing.job.training
    optimizers = {"adamw": ("adam", True), "adam": ("adam", False), "sgd_momentum": ("sgd", True)}
    name, decoupled = optimizers[writing.allowed("training.optimizer", optimizers)]
    writing.set("optimizer.optimizer", name, "training.optimizer")
    writing.set("optimizer.decoupled_weight_decay", decoupled, "training.optimizer")
    writing.set("optimizer.clip_grad", writing.value("training.clip_grad_norm") or 0.0, "training.clip_grad_norm")
    recipe, known = writing.value("training.fp8_recipe"), ("fp16", "bf16", "fp8", "mxfp8", "nvfp4")
    precision = writing.allowed("training.precision", known, "use fp16, bf16, fp8, mxfp8 or nvfp4")
    wide = "fp16" if precision == "fp16" else "bf16"
    for kind in ("bf16", "fp16"):
        writing.set(f"mixed_precision.{kind}", kind == wide, "training.precision")
    if precision in ("fp8", "mxfp8"):
        chosen = (precision, recipe or ("tensorwise" if precision == "fp8" else None))
        word = next((word for word, precision in PRECISIONS.items() if precision == chosen), None)
        if word is None:
            writing.refuse("training.fp8_recipe", "use tensorwise, delayed or blockwise")
        writing.set("mixed_precision.fp8", "e4m3" if precision == "mxfp8" else "hybrid", "training.precision")
        writing.set("mixed_precision.fp8_recipe", word, "training.fp8_recipe")
        writing.set("mixed_precision.fp8_param_gather", word != "blockwise", _AS_PROFILE)
        writing.set("mixed_precision.first_last_layers_bf16", False, _AS_PROFILE)
    elif precision == "nvfp4":
        writing.set("mixed_precision.fp4", "e2m1", "training.precision")
        writing.set("mixed_precision.fp4_recipe", "nvfp4", "training.precision")
    dtype = writing.allowed("plan.grad_dtype", (None, "fp32", wide), f"use fp32 or {wide}")
    in_fp32 = dtype == "fp32" or (dtype is None and wide != "fp16")
    writing.set("mixed_precision.grad_reduce_in_fp32", in_fp32, "plan.grad_dtype")
    if training.task == "lora":
        writing.set("checkpoint.pretrained_checkpoint", "CHECKPOINT", "the model that adapters are for")
    writing.taken("training.task")
    for key, value in (
        ("model.cross_entropy_fusion_impl", "te"),
        ("model.apply_rope_fusion", writing.job.model.family != "gpt"),
        ("model.gradient_accumulation_fusion", True),
    ):
        writing.set(key, value, _AS_PROFILE)


def _write_software(writing: Writing) -> None:
    software = writing.job.software
    writing.taken("software.id", "software.vocab_multiple", "software.fp8_dot_product_attention")
    writing.set("tokenizer.tokenizer_type", "NullTokenizer", "a placeholder")
    comment = "model.vocab_size, less the one token that a NullTokenizer adds"
    writing.set("tokenizer.vocab_size", writing.job.model.vocab_size - 1, comment)
    if software.vocab_multiple > 1:  # vocabularies of tokenizers are padded, those of models are not
        writing.set("tokenizer.use_tokenizer_vocab_size", True, "software.vocab_multiple")
        writing.set("model.make_vocab_size_divisible_by", software.vocab_multiple, "software.vocab_multiple")
    if software.fp8_dot_product_attention:
        writing.set("mixed_precision.fp8_dot_product_attention", True, "software.fp8_dot_product_attention")
    if writing.value("software.cuda_graphs"):
        writing.set("model.cuda_graph_impl", "local", "software.cuda_graphs")
    writing.copy("model.activation_func_fp8_input_store", "software.fp8_activation_input", if_set=True)
    if not writing.job.model.num_experts:
        return
    dispatch = writing.value("software.expert_dispatch")
    words = {dispatch: word for word, dispatch in DISPATCHERS.items()}
    if dispatch in words:
        writing.set("model.moe_token_dispatcher_type", words[dispatch][0], "software.expert_dispatch")
        writing.set("model.moe_flex_dispatcher_backend", words[dispatch][1], "software.expert_dispatch")
    elif dispatch == "all_to_all":
        writing.set("model.moe_token_dispatcher_type", "alltoall", "software.expert_dispatch")
    else:
        writing.refuse("software.expert_dispatch", "use all_to_all, deepep or hybridep")
    writing.copy("model.overlap_moe_expert_parallel_comm", "software.expert_overlap", if_set=True)
    writing.copy("model.use_transformer_engine_op_fuser", "software.fused_experts", if_set=True)


_NODE_0 = "${MASTER_ADDR:?set it to the host name of node 0}"


def export(job: Job, name: str) -> Exported:
    """A configuration, and the program that starts it on all ranks of torchrun.

    Raises:
        NotModelledError: Megatron Bridge cannot express the job; names the key.
    """
    options = settings(job)
    name = re.sub(r"[^\w.-]+", "-", name)
    file = f"{name}.yaml"
    provider = ("mla_provider", "MLAModelProvider") if job.model.family == "deepseek" else None
    cluster = job.cluster
    nodes, ranks_per_node = cluster.num_nodes, cluster.ranks_per_node
    several = f' --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "{_NODE_0}:29500"' if nodes > 1 else ""
    start = f"torchrun --nproc-per-node {ranks_per_node}{several} pretrain.py"
    notes = [
        f"data-parallel ranks follow from the number of ranks, here {job.plan.num_devices:,} x {cluster.device.id}",
        f"data, tokenizer and checkpoints: the placeholders at the top of {file}; without data, tokens are made up",
        "what changes neither time nor memory (rotary base, norm epsilon, router scores) is Megatron Core's default",
    ]
    program = _program(file, provider, _mixed(job))
    return Exported({file: _yaml(options, name), "pretrain.py": program}, start, tuple(notes))


def _mixed(job: Job) -> str:
    """Name of the mixed precision that the configuration changes."""
    wanted = (
        job.training.precision,
        job.training.fp8_recipe or ("tensorwise" if job.training.precision == "fp8" else None),
    )
    return next((name for name, recipe in RECIPES.items() if recipe == wanted), "bf16_mixed")


def _program(file: str, provider: tuple[str, str] | None, mixed: str) -> str:
    imports = [
        "from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config",
        "from megatron.bridge.training.gpt_step import forward_step",
        "from megatron.bridge.training.mixed_precision import get_mixed_precision_config",
        "from megatron.bridge.training.pretrain import pretrain",
        "from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides",
    ]
    changes = [f'config.mixed_precision = get_mixed_precision_config("{mixed}")']
    if provider is not None:
        imports.insert(0, f"from megatron.bridge.models.{provider[0]} import {provider[1]}")
        changes.insert(0, f"config.model = {provider[1]}()")
    lines = [
        f'"""Train with Megatron Bridge as {file} says, on every rank of torchrun."""',
        "",
        *imports,
        "",
        "config = vanilla_gpt_pretrain_config()",
        *changes,
        f'config = process_config_with_overrides(config, config_filepath="{file}")',
        "pretrain(config=config, forward_step_func=forward_step)",
    ]
    return "\n".join(lines) + "\n"


def _yaml(options: tuple[Option, ...], name: str) -> str:
    """Settings as YAML, each with the key of the scenario."""
    sections: dict[str, list[Option]] = {}
    for option in options:
        sections.setdefault(option.setting.key.partition(".")[0], []).append(option)
    lines = [
        f"# {name}, planned with simplan: overrides of vanilla_gpt_pretrain_config, which pretrain.py starts.",
        "# For Megatron Bridge 0.4 or later, which has vanilla_gpt_pretrain_config.",
        f"# Import it again: simplan import {as_argument(name)}.yaml",
        "# Yours to fill in:",
        "#   dataset: {blend: [[DATA], null]}",
        "#   tokenizer: {tokenizer_type: HuggingFaceTokenizer, tokenizer_model: TOKENIZER} instead of the placeholder",
        "#   checkpoint: {save: CHECKPOINTS}",
    ]
    for section, listed in sections.items():
        lines.append(f"{section}:")
        for option in listed:
            key = option.setting.key.partition(".")[2]
            comment = f"  # {option.comment}" if option.comment else ""
            lines.append(f"  {key}: {_scalar(option.setting.value)}{comment}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return f'"{value}"' if isinstance(value, str) and not value.replace("_", "").isalnum() else str(value)
