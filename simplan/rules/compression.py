"""Rules about gradient compression: what communication hooks of torch's DDP can do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.compression import CompressionKind, compressed_matrix_rank
from simplan.rules.rule import experts_apart, not_modelled, problem_of, rule, unmodelled
from simplan.wording import either

_FIELD = "plan.compression"
_OF_TORCH: tuple[CompressionKind, ...] = ("fp16", "bf16", "powersgd")
_ALL = get_args(CompressionKind)
_KINDS: dict[str, tuple[CompressionKind, ...]] = {
    "torch": _ALL,
    "transformers": _ALL,
    "accelerate": _OF_TORCH,  # accelerate 1.15.0, utils/dataclasses.py, DDPCommunicationHookType
}
"""Kinds by software whose data parallelism is torch's DDP, and takes a hook."""


def _refused(job: Job, sentence: str, fix: str) -> Problem:
    assert job.plan.compression is not None
    return problem_of(job, _FIELD, sentence, fix, value=job.plan.compression.kind)


@rule("compression is about data-parallel ranks, and there is one", reads="compression dp cp")
def compression_of_replicas(job: Job) -> Iterator[Problem]:
    if job.plan.compression is not None and job.plan.dp * job.plan.cp == 1:
        yield _refused(job, "is about reducing gradients over data-parallel ranks, and there is one", "remove it")


@rule(
    "compression needs whole gradients on every rank: torch's FSDP takes no communication hook",
    reads="compression shards_parameters shards_optimizer_only",
    outside_torch="compression needs whole gradients on every rank",
)
def compression_of_ddp(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.compression is None:
        return
    fix = f"use zero_stage = 0, dp_replicate = {plan.dp} and dp_shard = 1; or remove it"
    if plan.shards_parameters:
        sentence = f"is a hook of DDP, and zero_stage = {plan.zero_stage} reduce-scatters gradients (FSDP has no hook)"
        yield _refused(job, sentence, fix)
    elif plan.shards_optimizer_only and job.software.optimizer_shards == "elements":
        yield _refused(job, f"is a hook of DDP, and ZeRO-1 of {job.software.id} reduce-scatters gradients", fix)


@rule("compression needs a framework whose DDP takes communication hooks", reads="compression")
def compression_of_software(job: Job) -> Iterator[Problem]:
    compression, software = job.plan.compression, job.software
    if compression is None or compression.kind in (kinds := _KINDS.get(software.id, ())):
        return
    if kinds:
        yield _refused(job, f"is no communication hook of {software.id}", f"use {either(kinds)}, or software torch")
    else:
        sentence = f"is a communication hook of torch's DDP, and {software.id} reduces gradients without it"
        yield _refused(job, sentence, "use software torch, or remove it")


@rule("PowerSGD needs a matrix with more elements than its factors", reads="compression", after_others=True)
def powersgd_of_matrices(job: Job) -> Iterator[Problem]:
    compression = job.plan.compression
    if compression is None or compression.kind != "powersgd" or compression.batched:
        return
    shapes = {p.shape for layer in {*job.model.layers} for p in layer.parameters if not p.frozen}
    sizes = [(rows, math.prod(others)) for rows, *others in shapes]
    if not any(compressed_matrix_rank(rows, columns, compression) for rows, columns in sizes):
        sentence = (
            f"compresses nothing: every gradient has fewer elements than min_compression = "
            f"{compression.min_compression:g} times those of its factors of rank {compression.rank}"
        )
        yield _refused(job, sentence, "use a lower rank or min_compression, or another kind")


@rule(
    "1-bit Adam averages the momentum of Adam, of gradients that differ between ranks",
    reads="compression shards_optimizer_only",
)
def one_bit_adam_of_momentum(job: Job) -> Iterator[Problem]:
    compression, training = job.plan.compression, job.training
    if compression is None or not compression.of_momentum:
        return
    fix = "or use kind = one_bit, which compresses gradients"
    if training.optimizer not in ("adam", "adamw"):
        rule = "has another momentum than plan.compression = one_bit_adam averages"
        yield problem_of(job, "training.optimizer", rule, f"use adam or adamw, {fix}")
    if training.clip_grad_norm is not None:
        rule = "clips gradients, and those of plan.compression = one_bit_adam differ between ranks"
        yield problem_of(job, "training.clip_grad_norm", rule, f"remove it, {fix}")
    if job.plan.shards_optimizer_only:
        sentence = "needs the momentum of all parameters on every rank, and zero_stage = 1 shards it"
        yield _refused(job, sentence, f"use zero_stage = 0, {fix}")


@rule("compression and another way to reduce gradients do not go together", reads="compression collectives grad_dtype")
def compression_alone(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.compression is None:
        return
    if plan.collectives is not None and plan.collectives.num_servers:
        sentence = "is a hook of DDP's all-reduce, and gradients go to parameter servers"
        yield _refused(job, sentence, "remove one of them")
    if plan.grad_dtype is not None:
        yield problem_of(job, "plan.grad_dtype", "is another way to reduce gradients in fewer bits", "remove it")


@unmodelled(
    "compression is modeled for FP32 gradients of plain data parallelism, reduced once per step",
    reads="compression tp cp pp ep etp grad_sync microbatch_sizes",
)
def compression_modelled(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.compression is None:
        return
    refused = [f"plan.{key} = {getattr(plan, key)}" for key in ("tp", "cp", "pp", "ep") if getattr(plan, key) > 1]
    if not refused and job.model.num_experts and experts_apart(plan):
        refused.append(f"plan.etp = {plan.etp}")
    refused += ["plan.grad_sync = microbatch"] if plan.grad_sync == "microbatch" else []
    refused += ["plan.microbatch_sizes"] if plan.microbatch_sizes is not None else []
    refused += ["training.backup_workers"] if job.training.backup_workers else []
    refused += ["training.pure_bf16"] if job.training.pure_bf16 else []
    if refused:
        yield not_modelled(
            job, f"{_FIELD}.kind", f"compression with {', '.join(refused)}", "use dp_replicate alone, or remove it"
        )
