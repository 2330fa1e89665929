"""Settings of torchtitan as sections of a scenario."""

from __future__ import annotations

import math
from typing import Any

from simplan import catalog
from simplan.interop.allocator import note_allocator
from simplan.interop.configuration import Configuration
from simplan.interop.frameworks import names_without_effect
from simplan.interop.frameworks.torchtitan import stages
from simplan.interop.frameworks.torchtitan.settings import RunSettings, facts, num_layers
from simplan.interop.nccl import read_nccl_algo
from simplan.problems import render_value
from simplan.wording import either

_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
_FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8")
_MX = ("mx", "quantize.linear.mx", "quantize.dense.mx")
_EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx", "quantize.moe.mx")
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_HEAD = {"output", "lm_head"}
_NUM_CHUNKS = 8
"""ChunkedLossWrapper's default, and the profiles'."""
_ADAM_KWARGS = tuple(f".optimizer_kwargs.{name}" for name in ("lr", "betas", "eps", "weight_decay"))
_LATER = (
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.max_context_length",
    "parallelism.num_pp_microbatches",
)


def configuration_of(settings: RunSettings, num_devices: int | None = None, devices_key: str = "") -> Configuration:
    """Sections of a scenario.

    Args:
        num_devices: Number of ranks that the launcher starts; None if unknown.
        devices_key: Setting that gives it.

    Raises:
        SpecError: RunSettings are refused or contradict each other.
    """
    for key in _LATER:
        if key in settings:
            settings.refuse(key, "is of a version after 0.3, which simplan does not read", "give the key of 0.3")
    model = _model(settings)
    layers = None if model is None else num_layers(model)
    _devices(settings, num_devices, devices_key)
    pp = _pipeline(settings, layers)
    _batch(settings, pp)
    _sharding(settings, pp)
    _tensor_and_context(settings)
    _experts(settings)
    _recomputation(settings)
    _precision(settings)
    _optimizer(settings)
    _software(settings)
    read_nccl_algo(settings.reading)
    note_allocator(settings.reading, grown=True)
    _rest(settings)
    return settings.reading.finish()


def _model(settings: RunSettings) -> Any:
    """Put the section ``model``; its keys, or None if the command line has to name it."""
    name, flavor = str(settings["model.name"]), str(settings["model.flavor"])
    name = {"llama": "llama3", "llama3_ft": "llama3", "torchft.llama3": "llama3"}.get(name, name)
    settings.put_whole("model.seq_len", "training.seq_len")
    if name in facts().other_models:
        settings.refuse("model.name", f"is {facts().other_models[name]}, which is not modeled yet")
        return None
    model = facts().model(name, flavor, of_2024=settings.is_of_2024)
    if model is None:
        what = f"has the model {name} {flavor}, which is not one of torchtitan's own"
        settings.reading.ask("model.preset", "model.hf_config", what=what, fix="add --model with a preset or a config")
        return None
    if "preset" in model:
        settings.put("model.preset", model["preset"], "model.flavor")
        return model
    settings.put("model.name", f"{name}-{flavor}", "model.flavor")
    for key, value in model.items():
        settings.put(f"model.{key}", value, "model.flavor")
    return model


def _devices(settings: RunSettings, num_devices: int | None, devices_key: str) -> None:
    """Put the number of devices, if the file says it, and ask for the rest."""
    shard, product = "parallelism.data_parallel_shard_degree", 1
    for name in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    ):
        degree = settings[f"parallelism.{name}_degree"]
        product *= degree if isinstance(degree, int) and degree > 0 else 1
    is_known = settings[shard] not in (-1, None)
    if num_devices is not None:
        settings.reading.put("cluster.num_devices", num_devices, devices_key)
        if num_devices % product or (is_known and product != num_devices):
            rule = f"the degrees multiply to {product}, and {devices_key} starts {num_devices} ranks"
            settings.contradiction(shard, rule, "change one of them")
    elif is_known:
        settings.reading.put("cluster.num_devices", product, "all degrees multiplied")
    what = "does not say on which devices it runs"
    if num_devices is None and not is_known:
        settings.reading.ask("cluster", what=what, fix="add --cluster dgx-h100 --num-nodes 1")
    else:
        settings.reading.ask("cluster.preset", "cluster.device", what=what, fix="add --cluster dgx-h100")


def _pipeline(settings: RunSettings, layers: int | None) -> int:
    """Put the pipeline; its degree."""
    pp = settings.whole("parallelism.pipeline_parallel_degree")
    if pp == 1:
        unused = [*facts().known("parallelism.pipeline_parallel_"), "parallelism.module_fqns_per_model_part"]
        settings.reading.no_effect(*(settings.key(key) for key in unused if key in settings.names))
        return 1
    settings.put("plan.pp", pp, "parallelism.pipeline_parallel_degree")
    written = settings["parallelism.pipeline_parallel_schedule"]
    schedule = stages.schedule_class(written)
    csv = settings["parallelism.pipeline_parallel_schedule_csv"]
    if csv:
        settings.put("plan.schedule", str(csv), "parallelism.pipeline_parallel_schedule_csv")
    elif schedule in stages.SCHEDULES:
        settings.put("plan.schedule", stages.SCHEDULES[schedule], "parallelism.pipeline_parallel_schedule")
    else:
        fix = f"use {either(stages.SCHEDULES)}, or a CSV file with its actions"
        settings.refuse("parallelism.pipeline_parallel_schedule", "is not modeled yet", fix)
        return pp
    _stages(settings, pp, schedule or stages.CUSTOM_MULTI, layers)
    return pp


def _stages(settings: RunSettings, pp: int, schedule: str, layers: int | None) -> None:
    """Put stages per rank and blocks per stage."""
    key, counts, number = "parallelism.pipeline_parallel_degree", None, pp * stages.default_stages_per_rank(schedule)
    try:
        if parts := settings["parallelism.module_fqns_per_model_part"]:
            key, number = "parallelism.module_fqns_per_model_part", len(parts)
            counts = stages.layers_of_modules(parts, layers) if layers is not None else None
        elif splits := settings["parallelism.pipeline_parallel_split_points"]:
            key = "parallelism.pipeline_parallel_split_points"
            names = splits.split(",") if isinstance(splits, str) else splits
            number = len(names) + 1
            counts = stages.layers_of_splits(names, layers) if layers is not None else None
        elif layers is not None:
            counts, number = _generated(settings, layers, number)
    except (ValueError, TypeError, AttributeError) as error:
        settings.contradiction(key, str(error))
        return
    if number % pp:
        settings.contradiction(key, f"gives {number} stages, which {pp} pipeline ranks do not divide")
        return
    if number > pp:
        settings.put("plan.virtual_stages", number // pp, key)
    if counts is not None:
        settings.put("plan.stage_layers", list(counts), key)
    else:
        settings.not_modeled(key, "blocks per stage are balanced, as their number is not known here")


def _generated(settings: RunSettings, layers: int, number: int) -> tuple[tuple[int, ...], int]:
    """Blocks of each stage, and number of stages, that torchtitan generates."""
    ends = (f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
    first_less, last_less = (settings.whole(key, 0) for key in ends)
    key = "parallelism.pipeline_parallel_layers_per_stage"
    if settings[key] is not None:
        number = math.ceil((layers + first_less + last_less) / settings.whole(key))
    if settings.is_of_2024:
        return stages.generated_layers_of_2024(layers, number), number
    return stages.generated_layers(layers, number, first_less, last_less), number


def _batch(settings: RunSettings, pp: int) -> None:
    """Put microbatch size and batch."""
    local, microbatch = settings.whole("training.local_batch_size"), "training.local_batch_size"
    size, number = local, 1
    microbatches = settings["parallelism.pipeline_parallel_microbatches"]
    if pp > 1 and (settings.is_of_2024 or microbatches is not None):  # until 5e2033c75, 2025-04-07
        number = microbatches or pp
        size, rest = divmod(local, number) if isinstance(number, int) and number > 0 else (0, 1)
        if rest or size == 0:
            rule = f"must be a multiple of the {render_value(number)} microbatches of the pipeline"
            settings.contradiction("training.local_batch_size", rule)
            return
    elif pp > 1:
        microbatch = "parallelism.pipeline_parallel_microbatch_size"
        size = settings.whole(microbatch)
        number, rest = divmod(local, size)
        if rest:
            settings.contradiction(microbatch, f"must divide training.local_batch_size = {local}")
            return
    settings.put("plan.microbatch_size", size, microbatch)
    batch = settings["training.global_batch_size"]
    if batch in (-1, None):
        settings.put("num_microbatches", number, "training.local_batch_size")
        return
    batch = settings.put_whole("training.global_batch_size", "training.global_batch_size")
    replicas, shards = (settings[f"parallelism.data_parallel_{kind}_degree"] for kind in ("replicate", "shard"))
    if not isinstance(replicas, int) or not isinstance(shards, int) or shards < 1:
        accumulates = "if gradients are accumulated, the pipeline drains after each part of the batch"
    elif batch % (local * replicas * shards):
        rule = f"must be a multiple of local batch x data-parallel ranks = {local} x {replicas * shards}"
        settings.contradiction("training.global_batch_size", rule)
        return
    else:
        accumulates = "the pipeline drains after each part of the batch" if batch > local * replicas * shards else ""
    if pp > 1 and accumulates:
        settings.not_modeled("training.global_batch_size", accumulates)


def _sharding(settings: RunSettings, pp: int) -> None:
    """Put data parallelism."""
    key = "parallelism.data_parallel_shard_degree"
    shards, cp = settings[key], settings["parallelism.context_parallel_degree"]
    replicas = settings.put_whole("plan.dp_replicate", "parallelism.data_parallel_replicate_degree")
    if shards not in (-1, None):
        settings.put_whole("plan.dp_shard", key)
    reshard = settings["parallelism.fsdp_reshard_after_forward"]
    if reshard not in ("default", "always", "never"):
        settings.contradiction("parallelism.fsdp_reshard_after_forward", "must be default, always or never")
    if shards == 1 and cp == 1:
        settings.put("plan.zero_stage", 0, key)
        if replicas > 1 and pp == 1 and settings["training.global_batch_size"] not in (-1, None):
            settings.put("plan.grad_sync", "microbatch", "parallelism.data_parallel_replicate_degree")
    elif reshard == "never" or (reshard == "default" and pp > 1):
        settings.put("plan.zero_stage", 2, "parallelism.fsdp_reshard_after_forward")
    else:
        settings.put("plan.zero_stage", 3, "parallelism.fsdp_reshard_after_forward")
    if settings.flag("training.enable_cpu_offload"):
        settings.put("plan.offload_optimizer", True, "training.enable_cpu_offload")


def _tensor_and_context(settings: RunSettings) -> None:
    """Put tensor and context parallelism."""
    tp = settings.put_whole("plan.tp", "parallelism.tensor_parallel_degree")
    parallel_sequence = settings.flag("parallelism.enable_sequence_parallel")
    if tp > 1:
        settings.put("plan.sequence_parallel", parallel_sequence, "parallelism.enable_sequence_parallel")
        if settings.flag("parallelism.disable_loss_parallel"):
            settings.not_modeled("parallelism.disable_loss_parallel", "every tensor-parallel rank has the whole logits")
    cp = settings.put_whole("plan.cp", "parallelism.context_parallel_degree")
    rotates = settings["parallelism.context_parallel_rotate_method"]
    if cp > 1 and rotates in ("allgather", "alltoall"):
        value = "all_gather" if rotates == "allgather" else "ring"
        settings.put("plan.cp_comm", value, "parallelism.context_parallel_rotate_method")
    elif cp > 1:
        settings.refuse("parallelism.context_parallel_rotate_method", "is not modeled yet", "use allgather or alltoall")
    balancer = settings["parallelism.context_parallel_load_balancer"]
    if cp > 1 and "parallelism.context_parallel_load_balancer" in settings and balancer in (None, "None"):
        settings.not_modeled(
            "parallelism.context_parallel_load_balancer", "ranks with the ends of sequences have more attention"
        )


def _experts(settings: RunSettings) -> None:
    ep = settings.whole("parallelism.expert_parallel_degree")
    etp = settings.whole("parallelism.expert_tensor_parallel_degree")
    if ep == 1:
        return
    settings.put("plan.ep", ep, "parallelism.expert_parallel_degree")
    if etp > 1:
        settings.put("plan.etp", etp, "parallelism.expert_tensor_parallel_degree")
    backend = settings["parallelism.expert_parallel_comm_backend"]
    if backend not in (None, "standard"):
        settings.not_modeled("parallelism.expert_parallel_comm_backend", "its all-to-all is faster than NCCL's")


def _recomputation(settings: RunSettings) -> None:
    mode = settings["activation_checkpoint.mode"]
    option = str(settings["activation_checkpoint.selective_ac_option"])
    key = "activation_checkpoint.mode"
    if mode in ("none", "full"):
        settings.put("plan.recompute", mode, key)
    elif mode == "selective":
        if option in ("op", "2"):
            settings.put("plan.recompute", "selective_op" if option == "op" else "selective_layer", key)
        elif option == "1":
            settings.put("plan.recompute", "full", "activation_checkpoint.selective_ac_option")
        else:
            settings.refuse("activation_checkpoint.selective_ac_option", "is not modeled yet", 'use "op", "1" or "2"')
    else:
        settings.refuse(key, "is not modeled yet", "use none, selective or full")


def _precision(settings: RunSettings) -> None:
    wide = settings.word("training.mixed_precision_param") or ""
    dtype = settings["training.dtype"]
    if dtype == "bfloat16" and wide == "bfloat16":
        settings.put("training.pure_bf16", True, "training.dtype")
    elif dtype not in ("float32", "bfloat16"):
        settings.refuse("training.dtype", "is not modeled yet", "use bfloat16 or float32")
    elif dtype == "bfloat16":
        rule = f"keeps weights in 16 bits and computes in {wide}, which is not modeled yet"
        settings.refuse("training.dtype", rule, "use float32, or mixed_precision_param bfloat16")
    names = settings.listed("model.converters")
    key, precision = "training.mixed_precision_param", {"bfloat16": "bf16", "float32": "fp32"}.get(wide)
    if precision is None:
        settings.refuse(key, "is not modeled yet", "use bfloat16 or float32")
    is_old = settings.flag("float8.enable_float8_linear")
    if is_old or any(name in _FLOAT8 for name in names):
        key, precision = "float8.enable_float8_linear" if is_old else "model.converters", "fp8"
        _float8(settings)
    elif any(name in _MX for name in names):
        key, precision = "model.converters", "mxfp8"
    else:
        unused = [settings.key(name) for name in facts().known("quantize.linear.")]
        settings.reading.no_effect(*unused)
    settings.put("training.precision", precision, key)
    for name in names:
        if name in _EXPERTS:
            settings.not_modeled("model.converters", "grouped GEMMs of experts in 8 bits are faster")
        elif name not in (*_FLOAT8, *_MX):
            settings.refuse("model.converters", f"has {name}, which is not modeled yet", "use float8 or mx")
    if not any(name in _EXPERTS for name in names):
        unused = [settings.key(name) for name in facts().known("quantize.grouped_mm.")]
        settings.reading.no_effect(*unused)
    for name in ("quantize.linear.mx.recipe_name", "quantize.grouped_mm.float8.fqns", "quantize.grouped_mm.mx.fqns"):
        settings.reading.no_effect(settings.key(name))


def _float8(settings: RunSettings) -> None:
    """Put the recipe of FP8, and note layers that it leaves out."""
    recipe = settings.word("quantize.linear.float8.recipe_name") or "tensorwise"
    if recipe in _RECIPES:
        settings.put("training.fp8_recipe", recipe, "quantize.linear.float8.recipe_name")
    else:
        settings.refuse("quantize.linear.float8.recipe_name", "is not modeled yet", f"use {either(_RECIPES)}")
    names = set(settings.listed("quantize.linear.float8.filter_fqns"))
    others = sorted(map(str, names - _HEAD - {"router.gate", "auto_filter_small_kn"}))
    if others:
        settings.not_modeled("quantize.linear.float8.filter_fqns", f"{', '.join(others)} stay in BF16")
    elif not names & _HEAD and not settings.is_of_2024:
        settings.not_modeled("quantize.linear.float8.filter_fqns", "the head is in FP8, too")
        settings.not_modeled("model.converters", "the head is in FP8, too, unless filter_fqns leaves it out")


def _optimizer(settings: RunSettings) -> None:
    name = settings.word("optimizer.name")
    if name in _OPTIMIZERS:
        settings.put("training.optimizer", _OPTIMIZERS[name], "optimizer.name")
    else:
        settings.refuse("optimizer.name", "is not modeled yet", f"use {either(_OPTIMIZERS)}")
    how = settings["optimizer.implementation"]
    if "optimizer.fused" in settings and settings.flag("optimizer.fused"):
        how = "fused"
    if how == "foreach":
        settings.put("training.fused_optimizer", False, "optimizer.implementation")
    elif how == "fused_opt_states_bf16":
        types = {"exp_avg": "bf16", "exp_avg_sq": "bf16"}
        settings.put("training.optimizer_dtypes", types, "optimizer.implementation")
    elif how != "fused":
        settings.refuse("optimizer.implementation", "is not modeled yet", "use fused or foreach")
    norm = settings["training.max_norm"]
    if isinstance(norm, int | float) and norm > 0:
        settings.put("training.clip_grad_norm", float(norm), "training.max_norm")


def _software(settings: RunSettings) -> None:
    """Put the profile, by the age of the file, and its options."""
    parts = settings.listed("compile.components")
    enabled = settings.flag("compile.enable")
    model, loss = (enabled and part in parts for part in ("model", "loss"))
    profile = catalog.software("torchtitan-2024" if settings.is_of_2024 else "torchtitan")
    settings.put("software.preset", profile.id, "compile.enable")
    settings.put("software.compiled", model, "compile.enable")
    if "compiled_loss" in profile.options:
        if loss is not model:
            settings.put("software.compiled_loss", loss, "compile.components")
    elif loss:
        settings.not_modeled("compile.components", f"the loss is {'not ' * (not loss)}compiled")
    if (
        settings.flag("parallelism.enable_async_tensor_parallel")
        and settings.whole("parallelism.tensor_parallel_degree") > 1
    ):
        settings.put("software.tp_overlap", "all", "parallelism.enable_async_tensor_parallel")
    if settings["compile.backend"] not in (None, "inductor"):
        settings.not_modeled("compile.backend", "another compiler makes other kernels")
    if settings.name:
        _version_0_3(settings)


def _version_0_3(settings: RunSettings) -> None:
    """Put the loss and the CUDA graphs of version 0.3, and note its attention."""
    if settings["loss"] == "chunked":
        settings.put("software.loss", "chunked", "loss")
    if not settings["training.disable_cuda_graphs"]:
        settings.put("software.cuda_graphs", True, "training.disable_cuda_graphs")
    attention = "version 0.3 attends within documents; with FlexAttention, its default, slower on Blackwell"
    settings.reading.not_modeled("config", attention)
    for key in settings.names:
        if key == "loss.num_chunks" and settings[key] != _NUM_CHUNKS:
            settings.not_modeled(key, f"chunks of the loss are {_NUM_CHUNKS}")


def _rest(settings: RunSettings) -> None:
    """Note what is left."""
    for key, why in facts().not_modeled.items():
        if key in settings and settings[key] not in (False, None, []):
            settings.not_modeled(key, why)
    without_effect = names_without_effect("torchtitan")
    settings.reading.no_effect(
        *(name for key, name in settings.names.items() if key in without_effect or key.endswith(_ADAM_KWARGS))
    )
