"""Rules about models with modules of Hugging Face transformers: the supported subset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.schedules import splits_backward
from simplan.rules.rule import not_modelled, problem_of, unmodelled

_FAMILIES = ("gpt", "llama", "moe")
_MODELLED: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "attention_sinks": (False,),
    "mtp_num_layers": (0,),
    "num_dense_layers": (0,),
    "shared_expert_intermediate_size": (0,),
    "router_bias": (False,),
    "expert_bias": (False,),
    "drop_tokens": (False,),
    "capacity_factor": (1.0,),
    "qk_norm": (None, "head"),
}
"""Supported values of ``ModelSpec`` fields; the first value is the fix."""
_MIXTRAL: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "qkv_bias": (False,), "qk_norm": (None,)}
_RECOMPUTES = ("none", "full", "selective_layer")
_FIX = "use software torch"


def _is_transformers(job: Job) -> bool:
    return job.software.layers.model_code == "transformers"


@unmodelled("of transformers' models GPT-2, Llama, Qwen2, Qwen3 and Mixtral are modelled")
def transformers_model(job: Job) -> Iterator[Problem]:
    model = job.model
    if not _is_transformers(job):
        return
    if model.family not in _FAMILIES:
        what = "transformers' code for this family"
        yield not_modelled(job, "model.family", what, f"use {', '.join(_FAMILIES)}, or software torch")
        return
    for field, values in (_MODELLED | (_MIXTRAL if model.family == "moe" else {})).items():
        value = getattr(model, field)
        if value not in values:
            fix = "remove it" if values[0] in (None, False) else f"use {values[0]:g}"
            yield not_modelled(job, f"model.{field}", "this with transformers' code", f"{fix}, or {_FIX}")
    if model.qkv_bias and (model.attention_bias or model.qk_norm):
        what = "transformers' Qwen2 with other biases or norms"
        yield not_modelled(job, "model.qkv_bias", what, f"remove it, or {_FIX}")
    heads, width = model.num_attention_heads, model.num_attention_heads * model.head_dim
    if model.family == "gpt" and (width != model.hidden_size or model.num_key_value_heads != heads):
        rule = "must make up the hidden size in transformers' GPT-2, with as many heads of keys"
        yield problem_of(
            job, "model.num_attention_heads", rule, f"leave out head_dim and num_key_value_heads, or {_FIX}"
        )


@unmodelled(
    "of transformers' models, the matrices of dense Llamas are split over tensor-parallel ranks",
    reads="tp cp ep shards_parameters",
)
def transformers_splits(job: Job) -> Iterator[Problem]:
    """ColwiseParallel of torch splits nn.Linear, not GPT-2's Conv1D and not grouped experts."""
    if not _is_transformers(job):
        return
    plan, model = job.plan, job.model
    for field, what in (("cp", "context"), ("ep", "expert")):
        degree = getattr(plan, field)
        if degree > 1:
            what = f"{what} parallelism of transformers' code"
            yield not_modelled(job, f"plan.{field}", what, f"use 1, or {_FIX}")
    if plan.tp == 1:
        return
    if model.family != "llama":
        name = "GPT-2, whose matrices are no nn.Linear," if model.family == "gpt" else "Mixtral"
        what = f"tensor parallelism of transformers' {name}"
        yield not_modelled(job, "plan.tp", what, f"use 1, or {_FIX}")
    elif job.training.precision in ("bf16", "fp16") and not plan.shards_parameters:
        what = "tensor parallelism of transformers' code under autocast, where every matrix casts what is gathered,"
        yield not_modelled(job, "plan.tp", what, f"use FSDP (dp_shard), or precision fp32, or {_FIX}")


@unmodelled(
    "of transformers' models, whole blocks are recomputed, and nothing is moved to the host",
    reads="recompute offload_activations",
)
def transformers_recompute(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not _is_transformers(job):
        return
    if plan.recompute not in _RECOMPUTES:
        what = "recomputing parts of transformers' blocks"
        yield not_modelled(job, "plan.recompute", what, f"use {' or '.join(_RECOMPUTES)}, or {_FIX}")
    if plan.offload_activations:
        what = "moving activations of transformers' blocks to the host"
        yield not_modelled(job, "plan.offload_activations", what, f"use false, or {_FIX}")


@unmodelled("backward of transformers' models is not split", reads="schedule")
def transformers_split_backward(job: Job) -> Iterator[Problem]:
    if _is_transformers(job) and splits_backward(job.plan.schedule):
        what = "a split backward of transformers' code"
        yield not_modelled(job, "plan.schedule", what, f"use 1f1b, or {_FIX}")


@unmodelled(
    "transformers' experts are not modelled under autocast, which leaves them in FP32", reads="shards_parameters"
)
def transformers_experts_autocast(job: Job) -> Iterator[Problem]:
    """grouped_mm is on none of autocast's lists (transformers, integrations/moe.py, _grouped_mm)."""
    precision = job.training.precision
    narrow = precision in ("bf16", "fp16")
    if _is_transformers(job) and job.model.num_experts and narrow and not job.plan.shards_parameters:
        what = "transformers' Mixtral under autocast, which leaves its experts in fp32,"
        yield not_modelled(job, "training.precision", what, f"use fp32, or FSDP (dp_shard), or {_FIX}")
