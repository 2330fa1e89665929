"""Rules about replicas that do not reduce whole gradients in every step, or compress them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from simplan.errors import Problem
from simplan.job import Job
from simplan.optimizers import LAYERWISE
from simplan.plan.compression import CompressionKind, compressed_matrix_rank
from simplan.plan.replication import Replication
from simplan.rules.rule import experts_apart, not_modelled, problem_of, rule, unmodelled
from simplan.units import counted
from simplan.wording import either

_FIELD = "plan.replication"
_COMPRESSION = "plan.compression"
_OF_TORCH: tuple[CompressionKind, ...] = ("fp16", "bf16", "powersgd")
_ALL = get_args(CompressionKind)
_KINDS: dict[str, tuple[CompressionKind, ...]] = {
    "torch": _ALL,
    "transformers": _ALL,
    "accelerate": _OF_TORCH,  # accelerate 1.15.0, utils/dataclasses.py, DDPCommunicationHookType
}
"""Kinds by software whose data parallelism is torch's DDP, and takes a hook."""


def _refused(job: Job, sentence: str, fix: str) -> Problem:
    return problem_of(job, _FIELD, sentence, fix, value=_replication(job).kind)


def _replication(job: Job) -> Replication:
    assert job.plan.replication is not None
    return job.plan.replication


@rule("replication is about replicas, and there is one", reads="replication dp_replicate")
def replication_of_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    replication = plan.replication
    if replication is not None and plan.dp_replicate == 1 and replication.min_replicas != 1:
        fix = f"use dp_replicate = {plan.dp_shard} and dp_shard = 1; or remove it" if plan.dp_shard > 1 else "remove it"
        yield _refused(job, "is about the replicas of dp_replicate, and there is one", fix)


@rule("fewest replicas are some of the replicas", reads="replication dp_replicate")
def min_replicas_of_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.replication is None or (least := plan.replication.min_replicas) is None:
        return
    if least > plan.dp_replicate:
        sentence = f"must be at most dp_replicate = {plan.dp_replicate}, the replicas that there are"
        yield problem_of(job, f"{_FIELD}.min_replicas", sentence, f"use {plan.dp_replicate} or less")


@rule(
    "replication and another way to reduce gradients between replicas do not go together",
    reads="replication compression collectives",
)
def replication_alone(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.replication is None:
        return
    if plan.compression is not None and plan.num_averaging == 1:
        sentence = "leaves no gradients to reduce in every step, and plan.compression is about those"
        fix = "remove one of them; replication.outer.dtype sends pseudo-gradients in fewer bits"
        yield _refused(job, sentence, fix if plan.replication.has_rounds else "remove one of them")
    if plan.collectives is not None and plan.collectives.num_servers:
        yield _refused(job, "does not send gradients to synchronous parameter servers", "remove one of them")
    if job.training.backup_workers:
        yield _refused(job, "has no step in which all replicas wait for gradients", "use training.backup_workers = 0")


@rule("the first steps of post-local SGD need whole gradients on every rank (DDP)", reads="replication dp_shard tp pp")
def start_step_of_ddp(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.replication is None or not plan.replication.start_step:
        return
    split = [f"{key} = {getattr(plan, key)}" for key in ("dp_shard", "cp", "tp", "pp") if getattr(plan, key) > 1]
    if split:
        sentence = f"starts with steps of torch's DDP over all ranks, and {', '.join(split)}"
        yield problem_of(job, f"{_FIELD}.start_step", sentence, "use 0, or dp_replicate alone")


@unmodelled(
    "replication is modeled for torch's data parallelism with FP32 parameters of equal ranks",
    reads="replication ep etp tp microbatch_sizes compression",
)
def replication_modelled(job: Job) -> Iterator[Problem]:
    plan, training = job.plan, job.training
    if plan.replication is None:
        return
    refused = [f"software.id = {job.software.id}"] if job.software.runtime != "torch" else []
    if job.model.num_experts and experts_apart(plan):
        refused.append(f"plan.ep = {plan.ep}" if plan.ep > 1 else f"plan.etp = {plan.etp}")
    refused += ["plan.microbatch_sizes"] if plan.microbatch_sizes is not None else []
    refused += ["plan.compression inside of replicas"] if plan.compression and plan.num_averaging > 1 else []
    refused += ["plan.offload_optimizer"] if plan.offload_optimizer else []
    refused += ["training.pure_bf16"] if training.pure_bf16 else []
    if refused:
        fix = "use software torch and dp_replicate alone, or remove it"
        yield not_modelled(job, f"{_FIELD}.kind", f"replication with {', '.join(refused)}", fix)


@unmodelled(
    "workers that do not wait for each other are one device each, without anything sharded",
    reads="replication dp_shard tp cp pp ep zero_stage",
)
def workers_of_one_device(job: Job) -> Iterator[Problem]:
    plan, replication = job.plan, job.plan.replication
    if replication is None or not replication.has_workers:
        return
    split = [f"{key} = {getattr(plan, key)}" for key in ("dp_shard", "tp", "cp", "pp", "ep") if getattr(plan, key) > 1]
    if split:
        workers = "asynchronous parameter servers" if replication.has_servers else "hogwild"
        what = f"{workers} with {', '.join(split)} inside a worker"
        yield not_modelled(job, f"{_FIELD}.kind", what, "use dp_replicate alone, or kind: diloco")
    if job.model.num_experts:
        yield not_modelled(job, f"{_FIELD}.kind", "asynchronous training of experts", "use a model without experts")
    if job.training.optimizer in LAYERWISE:
        what = f"asynchronous training with {job.training.optimizer}, which takes norms of whole tensors,"
        yield not_modelled(job, f"{_FIELD}.kind", what, "use training.optimizer = sgd, sgd_momentum or adamw")


@rule(
    "parameter servers are nodes; hogwild is for the processes of one node of CPUs",
    reads="replication placement tp cp ep pp dp_replicate dp_shard",
    reads_cluster=True,
)
def workers_on_nodes(job: Job) -> Iterator[Problem]:
    plan, cluster, replication = job.plan, job.cluster, job.plan.replication
    if replication is None or not replication.has_workers or plan.num_devices > cluster.num_devices:
        return
    num_nodes = len(set(map(job.node_of, range(plan.num_devices))))
    if replication.kind == "hogwild":
        if cluster.device.kind != "cpu":
            sentence = f"shares parameters in the memory of a host, and {cluster.device.id} has its own"
            yield _refused(job, sentence, "use kind: parameter_server with staleness: unbounded, or a cluster of CPUs")
        elif num_nodes > 1:
            sentence = f"shares parameters in the memory of a host, and there are {num_nodes} nodes"
            yield _refused(job, sentence, "use kind: parameter_server with staleness: unbounded, or one node")
        return
    if replication.server_nodes == "workers" and replication.servers > num_nodes:
        sentence = f"is more than the {counted(num_nodes, 'node')} that could serve"
        fix = f"use {num_nodes} or less" + (", or server_nodes: apart" if num_nodes > 1 else "")
        yield problem_of(job, f"{_FIELD}.servers", sentence, fix)
    if replication.server_nodes == "apart" and num_nodes == 1:
        sentence = "needs the link between nodes, and the workers are on one node"
        yield problem_of(job, f"{_FIELD}.server_nodes", sentence, "use workers, or two nodes or more")
    if cluster.device.kind != "cpu" and cluster.host_link is None:
        yield Problem(
            field="cluster.device.host_link",
            rule="is needed, because parameter servers are on the host, where gradients are copied",
            fix="name a link, e.g. {preset: " + cluster.device.id + ", host_link: pcie4} (`simplan show links`)",
        )


@unmodelled(
    "workers that do not wait for each other are modeled on equal nodes, whose links no other job uses",
    reads="replication",
    reads_cluster=True,
)
def workers_alone_on_links(job: Job) -> Iterator[Problem]:
    cluster, replication = job.cluster, job.plan.replication
    if replication is None or not replication.has_workers:
        return
    refused = ["cluster.nodes of several kinds"] if cluster.is_mixed else []
    refused += ["cluster.background"] if cluster.background else []
    refused += ["flapping cluster.slow_links"] if any(each.period_s is not None for each in cluster.slow_links) else []
    if replication.server_nodes == "apart" and cluster.topology is not None:
        refused.append("servers apart in a cluster.topology")
    if refused:
        what = f"asynchronous training with {', '.join(refused)}"
        yield not_modelled(job, f"{_FIELD}.kind", what, "remove it, or replication")


def _refused_hook(job: Job, sentence: str, fix: str) -> Problem:
    assert job.plan.compression is not None
    return problem_of(job, _COMPRESSION, sentence, fix, value=job.plan.compression.kind)


@rule("compression is about data-parallel ranks, and there is one", reads="compression dp cp")
def compression_of_replicas(job: Job) -> Iterator[Problem]:
    if job.plan.compression is not None and job.plan.dp * job.plan.cp == 1:
        yield _refused_hook(job, "is about reducing gradients over data-parallel ranks, and there is one", "remove it")


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
        yield _refused_hook(job, sentence, fix)
    elif plan.shards_optimizer_only and job.software.optimizer_shards == "elements":
        yield _refused_hook(job, f"is a hook of DDP, and ZeRO-1 of {job.software.id} reduce-scatters gradients", fix)


@rule("compression needs a framework whose DDP takes communication hooks", reads="compression")
def compression_of_software(job: Job) -> Iterator[Problem]:
    compression, software = job.plan.compression, job.software
    if compression is None or compression.kind in (kinds := _KINDS.get(software.id, ())):
        return
    if kinds:
        yield _refused_hook(
            job, f"is no communication hook of {software.id}", f"use {either(kinds)}, or software torch"
        )
    else:
        sentence = f"is a communication hook of torch's DDP, and {software.id} reduces gradients without it"
        yield _refused_hook(job, sentence, "use software torch, or remove it")


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
        yield _refused_hook(job, sentence, "use a lower rank or min_compression, or another kind")


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
        yield _refused_hook(job, sentence, f"use zero_stage = 0, {fix}")


@rule("compression and another way to reduce gradients do not go together", reads="compression collectives grad_dtype")
def compression_alone(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.compression is None:
        return
    if plan.collectives is not None and plan.collectives.num_servers:
        sentence = "is a hook of DDP's all-reduce, and gradients go to parameter servers"
        yield _refused_hook(job, sentence, "remove one of them")
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
            job,
            f"{_COMPRESSION}.kind",
            f"compression with {', '.join(refused)}",
            "use dp_replicate alone, or remove it",
        )
