"""Rules about the batch: division into microbatches, and the number of microbatches that can be predicted."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.rules.rule import experts_apart, nearest_multiples, not_modelled, problem_of, rule, unmodelled
from simplan.wording import either, nearest_divisors

_MOST_PIPELINE_CELLS = 30_000


@rule("global_batch_size must be a multiple of dp x microbatch_size", reads="dp microbatch_size")
def batch_divides(job: Job) -> Iterator[Problem]:
    plan = job.plan
    batch, unit = job.training.global_batch_size, plan.dp * plan.microbatch_size
    if batch % unit == 0:
        return
    fix = f"use {either(nearest_multiples(batch, unit))}"
    if batch % plan.dp == 0:
        sizes = nearest_divisors(batch // plan.dp, plan.microbatch_size)
        fix += f", or plan.microbatch_size = {either(sizes)}"
    rule = f"must be a multiple of dp x microbatch_size = {plan.dp} x {plan.microbatch_size} = {unit}"
    yield problem_of(job, "training.global_batch_size", rule, fix)


@rule(
    f"microbatches x pipeline ranks must be at most {_MOST_PIPELINE_CELLS:,} where a step cannot be truncated",
    reads="dp microbatch_size pp schedule offload_activations",
)
def pipeline_cells(job: Job) -> Iterator[Problem]:
    """More take minutes and gigabytes to simulate whole."""
    plan = job.plan
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if plan.pp == 1 or (facts is not None and not facts.needs_times and not plan.offload_activations):
        return
    cells = job.num_microbatches * plan.pp
    if cells > _MOST_PIPELINE_CELLS:
        most = _MOST_PIPELINE_CELLS // plan.pp * plan.dp * plan.microbatch_size
        rule = (
            f"gives {cells:,} microbatches x pipeline ranks, more than {_MOST_PIPELINE_CELLS:,}, and schedule "
            f"{plan.schedule} differs with every number of microbatches"
        )
        fix = f"use at most {most}, a larger microbatch_size, or 1f1b" if most else "use fewer pipeline ranks"
        yield problem_of(job, "training.global_batch_size", rule, fix)


@rule("grad_sync = microbatch is about data-parallel ranks, and there is one", reads="grad_sync dp cp")
def grad_sync_of_replicas(job: Job) -> Iterator[Problem]:
    if job.plan.grad_sync == "microbatch" and job.plan.dp * job.plan.cp == 1:
        rule = "is about reducing gradients over data-parallel ranks, and there is one"
        yield problem_of(job, "plan.grad_sync", rule, "remove it")


@unmodelled("gradient reduction after every microbatch of a pipeline is not modelled", reads="grad_sync pp")
def grad_sync_modelled(job: Job) -> Iterator[Problem]:
    if job.plan.grad_sync == "microbatch" and job.plan.pp > 1:
        what = "gradient reduction after every microbatch of a pipeline (torch's pipelines reduce once a step)"
        yield not_modelled(job, "plan.grad_sync", what, "use step")


@unmodelled(
    "gradient reduction after every microbatch of experts that ranks share out is not modelled",
    reads="grad_sync experts_apart",
)
def grad_sync_of_experts(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if job.model.num_experts and experts_apart(plan) and plan.grad_sync == "microbatch":
        what = "gradient reduction after every microbatch with " + ("ep > 1" if plan.ep > 1 else "tp > 1 and etp = 1")
        yield not_modelled(job, "plan.grad_sync", what, "use step")
