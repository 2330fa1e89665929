"""What must hold between a model and the ways its layers are split: tensor, context and sharded data parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.expert_rules import expert_parallel_rules, unmodelled_expert_parallelism
from simplan.spec.model import ModelSpec
from simplan.spec.models import FAMILIES
from simplan.spec.numbers import either, nearest_divisors
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec

__all__ = ["parallel_rules", "unmodelled_parallelism", "unmodelled_splits"]


def parallel_rules(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Plans that cannot be, or that the framework would run wrongly."""
    yield from _tensor_rules(model, plan)
    if plan.sequence_parallel and plan.tp > 1 and not software.sequence_parallelism:
        rule = f"is more than {software.id} has: its tensor-parallel ranks all have whole norms and sums"
        yield Problem(field="plan.sequence_parallel", value="true", rule=rule, fix="write sequence_parallel: false")
    yield from _context_rules(model, plan)
    yield from expert_parallel_rules(model, plan)
    yield from _sharding_rules(plan, software)
    yield from _stage_rules(model, plan, software)


def unmodelled_parallelism(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Plans that can be, but that simplan does not model."""
    if plan.grad_dtype is not None and plan.grad_dtype not in software.grad_dtypes:
        what = f"another dtype for gradients with {software.id}"
        fix = f"use {either(software.grad_dtypes)}, or remove it" if software.grad_dtypes else "remove it"
        yield _not_modelled("plan.grad_dtype", plan.grad_dtype, what, fix)
    if plan.zero_stage not in software.zero_stages and plan.dp_shard * plan.cp > 1:
        what = f"this ZeRO stage with {software.id}"
        yield _not_modelled("plan.zero_stage", plan.zero_stage, what, f"use {either(software.zero_stages)}")
    yield from unmodelled_expert_parallelism(model, plan, software)
    if model.qk_norm == "projection" and plan.tp > 1:
        yield _not_modelled("plan.tp", plan.tp, "a norm over heads of several ranks (qk_norm = projection)", "use 1")
    if plan.grad_sync == "microbatch" and plan.pp > 1:
        what = "gradient reduction after every microbatch of a pipeline (torch's pipelines reduce once a step)"
        yield _not_modelled("plan.grad_sync", plan.grad_sync, what, "use step")
    if plan.shards_parameters and plan.pp > 1 and model.tied_embeddings:
        what = "sharding of an embedding whose two copies are on different stages"
        fix = "use model.tied_embeddings = false, or plan.zero_stage = 1"
        yield _not_modelled("model.tied_embeddings", "true", what, fix)
    yield from unmodelled_splits(model, plan)
    if plan.cp > 1 and software.layers.attention == "unfused":
        yield _not_modelled(
            "plan.cp", plan.cp, f"context parallelism of unfused attention, which {software.id} has,", "use 1"
        )
    if plan.prefetch_depth is not None:
        what = "another depth of prefetching than the software's own"
        yield _not_modelled("plan.prefetch_depth", plan.prefetch_depth, what, "remove it")


def unmodelled_splits(model: ModelSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """Splits of tokens that are not modelled for the model's family."""
    family = FAMILIES[model.family]
    if family.whole_layers:
        for field, degree, kind in (("plan.tp", plan.tp, "tensor"), ("plan.cp", plan.cp, "context")):
            if degree > 1:
                yield _not_modelled(field, degree, f"{kind} parallelism of {family.whole_layers}", "use 1")
        return
    if plan.sequence_parallel and plan.tp > 1 and family.task == "class":
        what = "sequence parallelism of patches and a class token"
        yield _not_modelled("plan.sequence_parallel", "true", what, "use false")
    if plan.cp == 1:
        return
    if family.task == "class":
        yield _not_modelled("plan.cp", plan.cp, "context parallelism of patches and a class token", "use 1")
    elif family.task == "masked_token":
        what = "context parallelism of a loss over masked tokens, of which ranks have unequal numbers,"
        yield _not_modelled("plan.cp", plan.cp, what, "use 1")
    elif plan.cp_comm == "ring" and (family.alibi or any(model.windows)):
        what = f"ring attention {'with ALiBi' if family.alibi else 'in a window'}"
        yield _not_modelled("plan.cp_comm", "ring", what, "use all_gather or a2a")


def _not_modelled(field: str, value: object, what: str, fix: str) -> Problem:
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)


def _tensor_rules(model: ModelSpec, plan: ParallelPlan) -> Iterator[Problem]:
    tp = plan.tp
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "num_classes"):
        size = getattr(model, key)
        if size % tp:
            fix = f"use {either(nearest_divisors(size, tp))}"
            if key == "vocab_size":
                fix += f", or model.vocab_size = {-(-size // tp) * tp} (padded)"
            yield Problem(field="plan.tp", value=str(tp), rule=f"must divide model.{key} = {size}", fix=fix)
    if not plan.sequence_parallel:
        return
    if tp == 1:
        yield Problem(
            field="plan.sequence_parallel",
            value="true",
            rule="splits tokens over the tensor-parallel ranks, and tp = 1",
            fix="use false, or a larger tp",
        )
    elif FAMILIES[model.family].task != "class" and model.seq_len % (tp * plan.cp):
        yield Problem(
            field="model.seq_len",
            value=str(model.seq_len),
            rule=f"must be a multiple of tp x cp = {tp * plan.cp} for sequence parallelism",
            fix=f"use {either(_nearest_multiples(model.seq_len, tp * plan.cp))}, or plan.sequence_parallel = false",
        )


def _context_rules(model: ModelSpec, plan: ParallelPlan) -> Iterator[Problem]:
    cp = plan.cp
    if cp == 1:
        if plan.cp_comm != "ring":
            rule = "says how context-parallel ranks exchange keys, and cp = 1"
            yield Problem(field="plan.cp_comm", value=plan.cp_comm, rule=rule, fix="remove it, or use a larger cp")
        return
    if FAMILIES[model.family].task != "class" and model.seq_len % (2 * cp):
        yield Problem(
            field="model.seq_len",
            value=str(model.seq_len),
            rule=f"must be a multiple of 2 x cp = {2 * cp}: each rank takes an early and a late part of the sequence, "
            "so that causal attention is spread evenly",
            fix=f"use {either(_nearest_multiples(model.seq_len, 2 * cp))}, or another plan.cp",
        )
    if plan.cp_comm == "a2a":
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(model, key)
            if heads % (cp * plan.tp):
                yield Problem(
                    field="plan.cp",
                    value=str(cp),
                    rule=f"cp x tp = {cp * plan.tp} must divide model.{key} = {heads}: "
                    "all-to-all trades tokens for heads",
                    fix="use plan.cp_comm = ring or all_gather, or a smaller cp",
                )


def _sharding_rules(plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    if plan.dp_shard > 1 and plan.zero_stage == 0:
        yield Problem(
            field="plan.zero_stage",
            value="0",
            rule=f"shards nothing, and dp_shard = {plan.dp_shard}",
            fix=f"use 1, 2 or 3, or dp_replicate = {plan.dp} and dp_shard = 1",
        )
    if not plan.reshard_after_forward and not plan.shards_parameters:
        none = f"zero_stage = {plan.zero_stage}" if plan.zero_stage < 2 else "there is one shard"
        yield Problem(
            field="plan.reshard_after_forward",
            value="false",
            rule=f"is about sharded parameters, and {none}",
            fix="remove it, or use zero_stage = 3",
        )
    if plan.shards_parameters and plan.bucket_bytes is not None:
        yield Problem(
            field="plan.bucket_bytes",
            value=str(plan.bucket_bytes),
            rule="is about DDP's buckets; FSDP reduces layer by layer",
            fix="remove it, or use zero_stage = 0 or 1",
        )
    if plan.bucket_bytes is not None and not software.grad_overlap:
        yield Problem(
            field="plan.bucket_bytes",
            value=str(plan.bucket_bytes),
            rule=f"is about reducing gradients while backward runs, and {software.id} reduces all of them after it",
            fix="remove it",
        )
    if plan.bucket_bytes is not None and plan.dp * plan.cp == 1:
        yield Problem(
            field="plan.bucket_bytes",
            value=str(plan.bucket_bytes),
            rule="is about reducing gradients over data-parallel ranks, and there is one",
            fix="remove it",
        )
    if plan.grad_sync == "microbatch" and plan.dp * plan.cp == 1:
        yield Problem(
            field="plan.grad_sync",
            value="microbatch",
            rule="is about reducing gradients over data-parallel ranks, and there is one",
            fix="remove it",
        )


def _stage_rules(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    stages, blocks = plan.num_stages, model.num_blocks
    if software.equal_stages == "always" and plan.stage_layers is None and stages <= blocks and blocks % stages:
        field, value = ("pp", plan.pp) if plan.virtual_stages == 1 else ("virtual_stages", plan.virtual_stages)
        rule = f"{stages} stages must divide the {blocks} blocks of the model: {software.id} has as many in each"
        yield Problem(
            field=f"plan.{field}",
            value=str(value),
            rule=rule,
            fix=f"use {either(nearest_divisors(blocks // (stages // value), value))}, or give stage_layers",
        )
    if plan.virtual_stages > 1 and plan.dp * plan.cp > 1 and not plan.shards_parameters and not software.ddp_stages:
        yield Problem(
            field="plan.virtual_stages",
            value=str(plan.virtual_stages),
            rule="torch's DistributedDataParallel fails with several stages on a rank"
            if software.framework == "torch"
            else f"is not modelled for {software.id} where parameters are whole",
            fix=f"use dp_shard = {plan.dp} and dp_replicate = 1 with zero_stage = 3, or virtual_stages = 1",
        )


def _nearest_multiples(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [value for value in (below, below + unit) if value]
