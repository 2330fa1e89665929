"""What must hold for a mixture of experts, and between experts and the ranks that they are spread over."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.model import ModelSpec
from simplan.spec.numbers import either, nearest_divisors
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["expert_overlap_rules", "expert_parallel_rules", "expert_rules", "unmodelled_expert_parallelism"]


def expert_rules(model: ModelSpec) -> Iterator[Problem]:
    """Models with experts that cannot be."""
    experts, blocks = model.num_experts, model.num_hidden_layers
    if model.top_k > experts:
        yield Problem(
            field="model.top_k",
            value=str(model.top_k),
            rule=f"must be at most num_experts = {experts}",
            fix=f"use {experts}",
        )
    if model.num_dense_layers > blocks:
        yield Problem(
            field="model.num_dense_layers",
            value=str(model.num_dense_layers),
            rule=f"must be at most num_hidden_layers = {blocks}",
            fix=f"use {blocks}",
        )
    if model.shared_expert_gate and not model.shared_expert_intermediate_size:
        yield Problem(
            field="model.shared_expert_gate",
            value="true",
            rule="weighs a shared expert, and shared_expert_intermediate_size = 0",
            fix="remove it, or give shared_expert_intermediate_size",
        )
    needed = model.expert_imbalance
    if model.capacity_factor < needed and not model.drop_tokens:
        balanced, fullest = "even balanced experts need", f"the fullest expert needs with expert_imbalance = {needed:g}"
        why = balanced if needed == 1 else fullest
        yield Problem(
            field="model.capacity_factor",
            value=f"{model.capacity_factor:g}",
            rule=f"is less than the {needed:g} that {why}",
            fix=f"use {needed:g} or more, or model.drop_tokens = true",
        )


def expert_parallel_rules(model: ModelSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """Plans that cannot spread or split experts."""
    if not model.num_experts:
        for field, degree, does in (("ep", plan.ep, "spreads experts over"), ("etp", plan.etp, "splits experts among")):
            if degree > 1:
                yield Problem(
                    field=f"plan.{field}",
                    value=str(degree),
                    rule=f"{does} ranks, and models of family {model.family} have none",
                    fix="remove it",
                )
        return
    ranks = "dp_replicate x dp_shard" + " x cp" * (plan.cp > 1) + " x tp" * (plan.tp > 1)
    ranks += " / etp" if plan.etp > 1 else ""
    shared = model.shared_expert_intermediate_size
    for field, degree, name, number, why in (
        ("ep", plan.ep, "model.num_experts", model.num_experts, "every rank has as many experts as any other"),
        ("ep", plan.ep, ranks, plan.expert_ranks, "experts are spread over the ranks of a stage"),
        ("etp", plan.etp, "plan.tp", plan.tp, "tensor-parallel ranks split an expert"),
        ("etp", plan.etp, "model.moe_intermediate_size", model.moe_intermediate_size, "each has as many columns"),
        ("tp", plan.tp, "model.shared_expert_intermediate_size", shared, "each rank has as many columns"),
    ):
        if number % degree:
            yield Problem(
                field=f"plan.{field}",
                value=str(degree),
                rule=f"must divide {name} = {number}: {why}",
                fix=f"use {either(nearest_divisors(number, degree))}",
            )


def expert_overlap_rules(training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Plans whose exchanges for experts have no other microbatch beside them.

    Megatron Core at d98e8a6 asserts the same where ``overlap_moe_expert_parallel_comm`` is set
    (megatron/core/transformer/transformer_config.py), and so does Megatron Bridge. Recomputation is in
    ``recompute_rules``.
    """
    if not software.expert_overlap:
        return
    otherwise = "or software.expert_overlap = false"
    if plan.ep == 1:
        yield Problem(
            field="plan.ep",
            value="1",
            rule="must be more with software.expert_overlap: with all experts on every rank no token travels",
            fix=f"use 2 or more, {otherwise}",
        )
        return
    if plan.pp > 1 and plan.virtual_stages == 1:
        yield Problem(
            field="plan.virtual_stages",
            value="1",
            rule="must be more with software.expert_overlap and pp > 1: the other pass is of another stage of the rank",
            fix=f"use 2 or more, {otherwise}",
        )
    if training.precision in ("fp32", "tf32"):
        yield Problem(
            field="training.precision",
            value=training.precision,
            rule="does not go with software.expert_overlap, which is for weights of 16 bits and less",
            fix=f"use bf16, {otherwise}",
        )


def unmodelled_expert_parallelism(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Plans that could train a model with experts, but that simplan does not model."""
    if not model.num_experts:
        return
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if plan.tp > 1 and not plan.sequence_parallel:
        what = "tensor parallelism beside experts without sequence parallelism, by which ranks route their own tokens,"
        yield _not_modelled("plan.sequence_parallel", "false", what, "use true")
    if plan.etp not in (1, plan.tp):
        what = "splitting experts among other numbers of ranks than attention"
        yield _not_modelled("plan.etp", plan.etp, what, f"use {either(sorted({1, plan.tp}))}")
    if plan.etp > 1 and model.expert_bias:
        yield _not_modelled("plan.etp", plan.etp, "splitting experts that have biases", "use 1")
    if plan.cp > 1 and model.family == "deepseek":
        yield _not_modelled("plan.cp", plan.cp, "context parallelism with multi-head latent attention", "use 1")
    if facts is not None and facts.splits_backward:
        what = "a backward in two parts through experts"
        yield _not_modelled("plan.schedule", plan.schedule, what, "use 1f1b or interleaved_1f1b")
    if software.expert_dispatch in ("deepep", "hybridep") and plan.etp > 1:
        what = "sending tokens once to ranks that split experts"
        yield _not_modelled(
            "software.expert_dispatch", software.expert_dispatch, what, "use all_to_all, or plan.etp = 1"
        )
    if not plan.shard.experts_apart:
        return
    even = plan.shards_optimizer_only and software.optimizer_shards == "elements"
    shards = plan.dp_shard * plan.cp * plan.tp // plan.etp
    if plan.shards_parameters and plan.ep % shards and shards % plan.ep:
        what = f"experts over {plan.ep} ranks, some of them of other replicas than others,"
        fix = f"use {either(nearest_divisors(shards, plan.ep))}, or a multiple of {shards}"
        yield _not_modelled("plan.ep", plan.ep, what, fix)
    if plan.shards_optimizer_only and plan.ep % shards and not even:
        others = " x cp" * (plan.cp > 1) + (" x tp" * (plan.tp > 1) if plan.etp == 1 else "")
        what = f"sharding one expert over several of the dp_shard{others} = {shards} ranks"
        yield _not_modelled("plan.ep", plan.ep, what, f"use a multiple of {shards}, or a smaller dp_shard")
    if plan.grad_sync == "microbatch":
        what = "gradient reduction after every microbatch with " + ("ep > 1" if plan.ep > 1 else "tp > 1 and etp = 1")
        yield _not_modelled("plan.grad_sync", plan.grad_sync, what, "use step")


def _not_modelled(field: str, value: object, what: str, fix: str) -> Problem:
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)
