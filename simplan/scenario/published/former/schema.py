"""The former schema of published runs; a key that is None stands for a value that the source does not print."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from simplan.base import Count, Line, Natural, NumDevices, Rate, Spec
from simplan.cluster.hardware import Dtype
from simplan.plan.plan import RecomputeModule
from simplan.training import Precision

Framework = Literal[
    "megatron-lm", "megatron-deepspeed", "megatron-core", "megatron-bridge", "nemo", "torchtitan", "llm-foundry",
    "maxtext", "fsdp-paper", "deepspeed", "gpipe", "torch", "transformers", "llm.c", "t5x", "other",
]  # fmt: skip
Task = Literal["pretrain", "sft", "lora"]
_Layers = tuple[Natural, ...]


class FormerSoftware(Spec):
    """Framework, and what is known of its settings."""

    framework: Framework
    version: str | None = None
    flash_attention: bool | None = None
    compile: bool | None = None
    tp_comm_overlap: bool | None = None
    grad_overlap: bool | None = None
    channels_last: bool | None = None


class FormerModel(Spec):
    """Sizes; those that a family does not have may be 0."""

    name: str
    family: Literal["gpt", "llama", "mpt", "t5", "bert", "vit", "resnet", "moe", "other"]
    num_hidden_layers: Natural = 0
    hidden_size: Natural = 0
    num_attention_heads: Natural = 0
    num_key_value_heads: Natural = 0
    intermediate_size: Natural = 0
    vocab_size: Natural = 0
    seq_len: Annotated[int, Field(ge=0, le=10**8)] = 0
    gated_mlp: bool = False
    tied_embeddings: bool | None = None
    head_dim: Count | None = None
    params: Natural | None = None
    max_predictions_per_seq: Natural | None = None
    num_decoder_layers: Count | None = None
    decoder_seq_len: Count | None = None
    image_size: Count | None = None
    patch_size: Count | None = None
    num_classes: Count | None = None
    depths: tuple[Count, ...] | None = None
    layer_type: str | None = None
    moe: dict[str, Natural | None] | None = None
    mla: dict[str, Natural | None] | None = None


class FormerCluster(Spec):
    """Devices and links."""

    device: str
    num_devices: NumDevices
    devices_per_node: NumDevices
    intra_link: str | None = None
    inter_link_gbit_per_device: float | None = None
    matmul_flop_per_s: dict[Dtype, Rate] | None = None


class FormerPlan(Spec):
    """Plan, batch and precision; ``stage_layers`` is by pipeline rank."""

    dp_replicate: Count
    dp_shard: Count
    zero_stage: Natural
    tp: Count
    sequence_parallel: bool
    pp: Count
    virtual_stages: Count
    cp: Count
    ep: Count
    schedule: str
    microbatch_size: Count
    num_microbatches: Count
    global_batch_size: Count
    recompute: str
    precision: Precision
    optimizer: str
    stage_layers: _Layers | None = None
    cp_comm: str | None = None
    grad_dtype: str | None = None
    fp8_recipe: str | None = None
    lora_rank: Count | None = None
    fused_optimizer: bool | None = None
    clip_grad_norm: float | None = None


class FormerRun(Spec):
    """One run."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    source: Line
    software: FormerSoftware
    task: Task
    model: FormerModel
    cluster: FormerCluster
    plan: FormerPlan
    measured: dict[str, Any]
    derived_step_time: bool = False
    assumed: tuple[str, ...] = ()
    quality: Literal["good", "assumed", "noisy", "inconsistent"] = "good"


class Experts(Spec):
    """Sizes that identify a mixture of experts, since the names of models vary in spelling."""

    num_experts: Count
    top_k: Count
    hidden_size: Count


def _is_release(text: str) -> str:
    if not re.fullmatch(r"2[0-9]\.[01][0-9]", text):
        raise ValueError('must be the year and month of a release, such as "26.04"')
    return text


Release = Annotated[str, AfterValidator(_is_release)]
"""Year and month of a container, such as "26.04"; releases compare as text."""


class Conditions(Spec):
    """Conditions that select runs: a release and allowed values; None for all."""

    since: Release = ""
    before: Release = "99"
    tasks: tuple[Task, ...] | None = None
    models: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None
    precisions: tuple[Precision, ...] | None = None
    num_devices: tuple[Count, ...] | None = None
    zero_stages: tuple[Natural, ...] | None = None
    ep: tuple[Count, ...] | None = None
    num_stages: tuple[Count, ...] | None = None
    experts: tuple[Experts, ...] | None = None


class Settings(Spec):
    """Settings of scripts; ``states`` are bytes of optimizer states by kind, ``stage_layers`` is by stage."""

    grad_dtype: str | None = None
    weights: str | None = None
    states: dict[Literal["master", "moment"], Natural] = Field(default_factory=dict)
    offload_layers: Count | None = None
    lora_rank: Count | None = None
    lora_targets: tuple[str, ...] | None = None
    virtual_stages: Count | None = None
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    recompute_layers: Count | None = None
    stage_layers: _Layers | None = None
    mtp_num_layers: Natural | None = None
    expert_dispatch: str | None = None
    expert_overlap: bool | None = None
    fused_experts: bool | None = None
    fp8_dot_product_attention: bool | None = None


class Recipe(Spec):
    """Settings of the runs that meet one of the conditions, or of all runs of a framework, and where they stand."""

    where: tuple[Conditions, ...] = ()
    sets: Settings
    source: Line


class FormerFile(Spec):
    """A file of runs, with settings by framework that its tables do not print."""

    meta: dict[str, Any] = Field(default_factory=dict)
    recipes: dict[Framework, tuple[Recipe, ...]] = Field(default_factory=dict)
    runs: tuple[FormerRun, ...] = ()
