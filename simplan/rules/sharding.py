"""Rules about sharding over data-parallel ranks, and about gradient buckets."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.rules.rule import not_modelled, problem_of, rule, unmodelled
from simplan.wording import either


@rule("dp_shard > 1 needs zero_stage 1, 2 or 3", reads="dp zero_stage")
def zero_stage_of_shards(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.dp_shard > 1 and plan.zero_stage == 0:
        rule = f"shards nothing, and dp_shard = {plan.dp_shard}"
        yield problem_of(job, "plan.zero_stage", rule, f"use 1, 2 or 3, or dp_replicate = {plan.dp} and dp_shard = 1")


@rule("reshard_after_forward is about sharded parameters", reads="reshard_after_forward shards_parameters")
def reshard_needs_shards(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not plan.reshard_after_forward and not plan.shards_parameters:
        none = f"zero_stage = {plan.zero_stage}" if plan.zero_stage < 2 else "there is one shard"
        rule = f"is about sharded parameters, and {none}"
        yield problem_of(job, "plan.reshard_after_forward", rule, "remove it, or use zero_stage = 3")


@rule("bucket_bytes is about DDP's buckets", reads="bucket_bytes shards_parameters")
def buckets_of_ddp(job: Job) -> Iterator[Problem]:
    if job.plan.shards_parameters and job.plan.bucket_bytes is not None:
        rule = "is about DDP's buckets; FSDP reduces layer by layer"
        yield problem_of(job, "plan.bucket_bytes", rule, "remove it, or use zero_stage = 0 or 1")


@rule("bucket_bytes is about reducing gradients while backward runs", reads="bucket_bytes")
def buckets_need_overlap(job: Job) -> Iterator[Problem]:
    if job.plan.bucket_bytes is not None and not job.software.grad_overlap:
        rule = f"is about reducing gradients while backward runs, and {job.software.id} reduces all of them after it"
        yield problem_of(job, "plan.bucket_bytes", rule, "remove it")


@rule("bucket_bytes is about data-parallel ranks, and there is one", reads="bucket_bytes dp cp")
def buckets_of_replicas(job: Job) -> Iterator[Problem]:
    if job.plan.bucket_bytes is not None and job.plan.dp * job.plan.cp == 1:
        rule = "is about reducing gradients over data-parallel ranks, and there is one"
        yield problem_of(job, "plan.bucket_bytes", rule, "remove it")


@unmodelled("this precision of gradients is not modelled for the software", reads="grad_dtype")
def grad_dtype_modelled(job: Job) -> Iterator[Problem]:
    dtype, known = job.plan.grad_dtype, job.software.grad_dtypes
    if dtype is not None and dtype not in known:
        what = f"another dtype for gradients with {job.software.id}"
        fix = f"use {either(known)}, or remove it" if known else "remove it"
        yield not_modelled(job, "plan.grad_dtype", what, fix)


@unmodelled("this ZeRO stage is not modelled for the software", reads="zero_stage dp_shard cp")
def zero_stage_modelled(job: Job) -> Iterator[Problem]:
    plan, known = job.plan, job.software.zero_stages
    if plan.zero_stage not in known and plan.dp_shard * plan.cp > 1:
        what = f"this ZeRO stage with {job.software.id}"
        yield not_modelled(job, "plan.zero_stage", what, f"use {either(known)}")


@unmodelled("sharding embeddings tied over two pipeline ranks is not modelled", reads="shards_parameters pp")
def tied_embeddings_sharded(job: Job) -> Iterator[Problem]:
    if job.plan.shards_parameters and job.plan.pp > 1 and job.model.tied_embeddings:
        what = "sharding of an embedding whose two copies are on different stages"
        fix = "use model.tied_embeddings = false, or plan.zero_stage = 1"
        yield not_modelled(job, "model.tied_embeddings", what, fix)


@unmodelled("sharding batch norms in half precision is not modelled", reads="shards_parameters")
def sharded_precision_modelled(job: Job) -> Iterator[Problem]:
    precision = job.training.precision
    if job.model.depths and job.plan.shards_parameters and precision not in ("fp32", "tf32"):
        what = "a batch norm whose weights FSDP casts to half precision, and whose statistics it does not,"
        yield not_modelled(job, "training.precision", what, "use fp32, or plan.zero_stage = 1")


@unmodelled("sharding of parameters with layers for multi-token prediction is not modelled", reads="shards_parameters")
def mtp_sharded(job: Job) -> Iterator[Problem]:
    layers = job.model.mtp_num_layers
    if layers and job.plan.shards_parameters:
        what = f"sharding of parameters with model.mtp_num_layers = {layers}"
        yield not_modelled(job, "plan.zero_stage", what, "use 0 or 1")
