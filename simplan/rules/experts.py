"""Rules about experts, expert parallelism, and the overlap of expert all-to-all with another microbatch.

Megatron Core at d98e8a6 asserts the requirements of ``overlap_moe_expert_parallel_comm``, here ``expert_overlap``
(megatron/core/transformer/transformer_config.py), and so does Megatron Bridge.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.rules.rule import experts_apart, not_modelled, problem_of, rule, undivided, unmodelled
from simplan.wording import either, nearest_divisors

_OTHERWISE = "or software.expert_overlap = false"


@rule("ep must divide num_experts and dp_replicate x dp_shard x cp x tp", reads="ep expert_ranks")
def ep_divides(job: Job) -> Iterator[Problem]:
    plan, experts = job.plan, job.model.num_experts
    if not experts:
        yield from _without_experts(job, "plan.ep", plan.ep, "spreads experts over")
        return
    ranks = "dp_replicate x dp_shard" + " x cp" * (plan.cp > 1) + " x tp" * (plan.tp > 1)
    ranks += " / etp" if plan.etp > 1 else ""
    every = ": every rank has as many experts as any other"
    yield from undivided(job, "plan.ep", "model.num_experts", experts, every)
    yield from undivided(job, "plan.ep", ranks, plan.expert_ranks, ": experts are spread over the ranks of a stage")


@rule("etp must divide tp and moe_intermediate_size", reads="etp tp")
def etp_divides(job: Job) -> Iterator[Problem]:
    plan, model = job.plan, job.model
    if not model.num_experts:
        yield from _without_experts(job, "plan.etp", plan.etp, "splits experts among")
        return
    size = model.moe_intermediate_size
    yield from undivided(job, "plan.etp", "plan.tp", plan.tp, ": tensor-parallel ranks split an expert")
    yield from undivided(job, "plan.etp", "model.moe_intermediate_size", size, ": each has as many columns")


def _without_experts(job: Job, field: str, degree: int, does: str) -> Iterator[Problem]:
    if degree > 1:
        sentence = f"{does} ranks, and models of family {job.model.family} have none"
        yield problem_of(job, field, sentence, "remove it")


@rule("expert all-to-all that overlaps another microbatch needs experts on several ranks", reads="ep")
def expert_overlap_ranks(job: Job) -> Iterator[Problem]:
    if job.software.expert_overlap and job.plan.ep == 1:
        sentence = "must be more with software.expert_overlap: with all experts on every rank no token travels"
        yield problem_of(job, "plan.ep", sentence, f"use 2 or more, {_OTHERWISE}")


@rule("expert all-to-all that overlaps another microbatch needs several stages per rank", reads="ep pp virtual_stages")
def expert_overlap_stages(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if job.software.expert_overlap and plan.ep > 1 and plan.pp > 1 and plan.virtual_stages == 1:
        sentence = (
            "must be more with software.expert_overlap and pp > 1: the other pass is of another stage of the rank"
        )
        yield problem_of(job, "plan.virtual_stages", sentence, f"use 2 or more, {_OTHERWISE}")


@rule("expert all-to-all that overlaps another microbatch needs weights of 16 bits or less", reads="ep")
def expert_overlap_precision(job: Job) -> Iterator[Problem]:
    if job.software.expert_overlap and job.plan.ep > 1 and job.training.precision in ("fp32", "tf32"):
        sentence = "does not go with software.expert_overlap, which is for weights of 16 bits and less"
        yield problem_of(job, "training.precision", sentence, f"use bf16, {_OTHERWISE}")


@rule("expert all-to-all that overlaps another microbatch allows one layer for multi-token prediction")
def expert_overlap_mtp(job: Job) -> Iterator[Problem]:
    layers = job.model.mtp_num_layers
    if job.software.expert_overlap and layers > 1:
        sentence = "must be at most 1 with software.expert_overlap"
        yield problem_of(job, "model.mtp_num_layers", sentence, f"use 1, {_OTHERWISE}")


@unmodelled("tensor parallelism with experts needs sequence parallelism", reads="tp sequence_parallel")
def sequence_parallel_of_experts(job: Job) -> Iterator[Problem]:
    if job.model.num_experts and job.plan.tp > 1 and not job.plan.sequence_parallel:
        what = "tensor parallelism with experts but without sequence parallelism, by which ranks route local tokens,"
        yield not_modelled(job, "plan.sequence_parallel", what, "use true")


@unmodelled("this splitting of experts is not modeled", reads="etp tp")
def etp_modelled(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not job.model.num_experts:
        return
    if plan.etp not in (1, plan.tp):
        what = "splitting experts among other numbers of ranks than attention"
        yield not_modelled(job, "plan.etp", what, f"use {either(sorted({1, plan.tp}))}")
    if plan.etp > 1 and job.model.expert_bias:
        yield not_modelled(job, "plan.etp", "splitting experts that have biases", "use 1")


@unmodelled("sending tokens once to ranks that split experts is not modeled", reads="etp")
def expert_dispatch_modelled(job: Job) -> Iterator[Problem]:
    dispatch = job.software.expert_dispatch
    if job.model.num_experts and dispatch in ("deepep", "hybridep") and job.plan.etp > 1:
        what, fix = "sending tokens once to ranks that split experts", "use all_to_all, or plan.etp = 1"
        yield not_modelled(job, "software.expert_dispatch", what, fix)


@unmodelled(
    "ep must divide dp_shard x cp x tp, or be a multiple of it, with sharded parameters",
    reads="experts_apart dp_shard cp shards_parameters",
)
def ep_within_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not job.model.num_experts or not experts_apart(plan):
        return
    shards = max(1, plan.dp_shard * plan.cp * plan.tp // plan.etp)  # 0 if etp is refused
    if plan.shards_parameters and plan.ep % shards and shards % plan.ep:
        what = f"experts over {plan.ep} ranks, some of them of other replicas than others,"
        fix = f"use {either(nearest_divisors(shards, plan.ep))}, or a multiple of {shards}"
        yield not_modelled(job, "plan.ep", what, fix)


@unmodelled(
    "ep must be a multiple of dp_shard x cp x tp if optimizer states are partitioned by parameter",
    reads="experts_apart dp_shard cp shards_optimizer_only",
)
def ep_covers_shards(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not job.model.num_experts or not experts_apart(plan) or not plan.shards_optimizer_only:
        return
    shards = max(1, plan.dp_shard * plan.cp * plan.tp // plan.etp)  # 0 if etp is refused
    if plan.ep % shards and job.software.optimizer_shards != "elements":
        others = " x cp" * (plan.cp > 1) + (" x tp" * (plan.tp > 1) if plan.etp == 1 else "")
        what = f"sharding one expert over several of the dp_shard{others} = {shards} ranks"
        yield not_modelled(job, "plan.ep", what, f"use a multiple of {shards}, or a smaller dp_shard")
