"""Rules about optimizers: what the table of ``simplan.optimizers`` refuses, and in which words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from simplan.errors import Problem
from simplan.job import Job
from simplan.model.layer import LayerKind
from simplan.optimizers import OPTIMIZERS, Situation
from simplan.rules.rule import problem_of, rule, unmodelled
from simplan.wording import either


def _has_dtensors(job: Job) -> bool:
    """False for DeepSpeed, whose ZeRO gives an optimizer plain flat tensors (``runtime/zero/stage3.py``), and FSDP1's.

    FSDP1 gives it views of them (torch 2.13, torch/distributed/fsdp/_flat_param.py, ``_use_sharded_views``), which an
    optimizer takes that updates element by element.
    """
    is_flat = job.software.flat_shards and OPTIMIZERS[job.training.optimizer].package == "bitsandbytes"
    return job.software.id != "deepspeed" and not is_flat


_ABOUT_PLANS: Mapping[Situation, Callable[[Job], bool]] = MappingProxyType(
    {
        "fsdp2": lambda job: job.plan.shards_parameters and job.software.runtime == "torch" and _has_dtensors(job),
        "tp": lambda job: job.plan.tp > 1,
        "ep": lambda job: job.plan.ep > 1,
        "experts": lambda job: job.model.num_experts > 0 and job.software.runtime == "torch",
        "on_host": lambda job: job.plan.offload_optimizer,
        "replication": lambda job: job.plan.replication is not None and job.plan.replication.has_workers,
    }
)
"""Situations that a table entry may refuse, without those of the cluster."""


@unmodelled(
    "the optimizer does not work with this sharding, or is not modeled with it",
    reads="shards_parameters tp ep offload_optimizer replication",
)
def optimizer_of_plan(job: Job) -> Iterator[Problem]:
    name = job.training.optimizer
    for situation, (sentence, fix) in (OPTIMIZERS[name].refused_under or {}).items():
        applies = _ABOUT_PLANS.get(situation)
        if applies is not None and applies(job):
            yield problem_of(job, "training.optimizer", sentence, fix)


@unmodelled("the optimizer is not modeled for this software")
def optimizer_of_software(job: Job) -> Iterator[Problem]:
    name, software = job.training.optimizer, job.software
    known = OPTIMIZERS[name].software
    if known and software.id not in known:
        sentence = f"is not modeled yet with {software.id}"
        yield problem_of(job, "training.optimizer", sentence, f"use adamw, or software {either(known)}")


_PRECISION_AWARE = ("megatron-core", "megatron-bridge")
_OF_TORCHTITAN = ("torchtitan", "torchtitan-2025")
_DTYPES = "training.optimizer_dtypes"


@unmodelled("types of Adam's states are not modeled for this software, optimizer or sharding", reads="zero_stage")
def dtypes_of_states(job: Job) -> Iterator[Problem]:
    """Types of states that Megatron Core's precision-aware optimizer and torchtitan have."""
    training, software, types = job.training, job.software, job.training.optimizer_dtypes
    if types is None:
        return
    given = ", ".join(f"{name}: {getattr(types, name)}" for name in ("exp_avg", "exp_avg_sq", "main_params"))
    rule, fix = "", "remove it"
    if training.optimizer not in ("adam", "adamw"):
        rule, fix = f"is of Adam, and training.optimizer = {training.optimizer}", "use adamw, or remove it"
    elif software.id in _OF_TORCHTITAN:
        if (types.exp_avg, types.exp_avg_sq) != ("bf16", "bf16") or "main_params" in types.model_fields_set:
            rule = f"in {software.id} both states are BF16 (fused_opt_states_bf16), and there is no copy of the weights"
            fix = "use exp_avg: bf16 and exp_avg_sq: bf16, or remove it"
    elif software.id not in _PRECISION_AWARE:
        rule = f"is not modeled yet with {software.id}"
        fix = f"use software {either(_PRECISION_AWARE + _OF_TORCHTITAN)}"
    elif job.plan.zero_stage != 1:
        rule = f"is of Megatron's distributed optimizer, and plan.zero_stage = {job.plan.zero_stage}"
        fix = "use zero_stage = 1"
    elif training.precision in ("fp16", "fp32", "tf32"):
        rule, fix = f"is not modeled yet with training.precision = {training.precision}", "use bf16"
    if rule:
        yield Problem(field=_DTYPES, value=f"{{{given}}}", rule=rule, fix=fix)


@rule("a rank of projected gradients is of GaLore and APOLLO")
def rank_of_projections(job: Job) -> Iterator[Problem]:
    rank, name = job.training.optimizer_rank, job.training.optimizer
    projects = OPTIMIZERS[name].projects
    if rank is None and projects:
        sentence = f"is needed by {name}, which projects gradients to this rank"
        yield problem_of(job, "training.optimizer_rank", sentence, "use 128, or adamw", value="none")
    elif rank is not None and not projects:
        known = [each for each, facts in OPTIMIZERS.items() if facts.projects]
        sentence = f"is of optimizers with projected gradients, and {name} is none"
        yield problem_of(job, "training.optimizer_rank", sentence, f"remove it, or use {either(known)}")


@rule("BAdam trains one block at a time, in processes that do not average gradients", reads="dp_replicate dp_shard cp")
def blocks_of_badam(job: Job) -> Iterator[Problem]:
    """Badam 1.4; LLaMA-Factory, ``hparams/parser.py``: several processes need DeepSpeed's ZeRO-3."""
    if job.training.optimizer != "badam":
        return
    trained = [layer for layer in job.model.layers if any(not each.frozen for each in layer.parameters)]
    if len(trained) != 1 or trained[0].kind is not LayerKind.BLOCK:
        sentence = f"must leave one block to badam, and leaves {len(trained)} layers"
        last = job.model.num_blocks - 1
        fix = f'use ["embedding", "head", "blocks.1-{last}"], which leaves the first block'
        yield problem_of(job, "model.frozen", sentence, fix, value="" if not job.model.frozen else None)
    if job.plan.num_averaging > 1:
        sentence = "trains by several processes with DeepSpeed's ZeRO-3 only, which is not modeled yet"
        yield problem_of(job, "training.optimizer", sentence, "use one device")


@unmodelled("paged states need CUDA", reads_cluster=True)
def pages_of_cuda(job: Job) -> Iterator[Problem]:
    """Managed memory is CUDA's; on CPUs bitsandbytes falls back to plain states with a warning."""
    refused = OPTIMIZERS[job.training.optimizer].refused_under or {}
    if "no_cuda" in refused and job.cluster.device.kind != "gpu":
        yield problem_of(job, "training.optimizer", *refused["no_cuda"])
