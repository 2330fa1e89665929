"""What must hold for LoRA: between the task and the model's adapters, and what of it is not modelled."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.adapters import GROUPS, adapted_matrices, matrices_of
from simplan.spec.model import ModelSpec
from simplan.spec.models import FAMILIES
from simplan.spec.numbers import either
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS, is_own_schedule
from simplan.spec.shard import Shard
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["adapter_rules", "adapter_task_rules", "unmodelled_adapters"]


def adapter_rules(model: ModelSpec) -> Iterator[Problem]:
    """Adapters that cannot be."""
    family = FAMILIES[model.family]
    if "lora_rank" not in family.fields:
        return
    shown = f"[{', '.join(model.lora_targets)}]"
    if not model.lora_rank:
        if model.lora_targets != ModelSpec.model_fields["lora_targets"].default:
            yield Problem(
                field="model.lora_targets",
                value=shown,
                rule="says which matrices have adapters, and lora_rank = 0",
                fix="give lora_rank, e.g. 16, or remove it",
            )
        return
    matrices = matrices_of(family.layers(model, Shard()))
    for target in model.lora_targets:
        if not adapted_matrices([target], matrices):
            yield Problem(
                field="model.lora_targets",
                value=target,
                rule=f"is no matrix of a block of family {model.family}",
                fix=f"use {either(dict.fromkeys([*matrices, *GROUPS]))}",
            )


def adapter_task_rules(model: ModelSpec, training: TrainingSpec) -> Iterator[Problem]:
    """The task says that adapters are trained, and the model that there are some: each needs the other."""
    if training.task == "lora" and not model.lora_rank:
        having = [name for name, family in FAMILIES.items() if "lora_rank" in family.fields]
        known = model.family in having
        yield Problem(
            field="training.task",
            value="lora",
            rule="trains adapters, and "
            + ("model.lora_rank = 0" if known else f"those of family {model.family} are not modelled yet"),
            fix="give model.lora_rank, e.g. 16" if known else f"use pretrain, or a model of family {either(having)}",
        )
    if model.lora_rank and training.task != "lora":
        yield Problem(
            field="training.task",
            value=training.task,
            rule=f"trains all weights, and model.lora_rank = {model.lora_rank} freezes them",
            fix="use lora, or remove model.lora_rank",
        )


def unmodelled_adapters(
    model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[Problem]:
    """Plans that could train adapters, but that simplan does not model."""
    if not model.lora_rank:
        return
    facts = SCHEDULE_FACTS.get(plan.schedule)
    own = is_own_schedule(plan.schedule)  # which may split backward
    if own or (facts is not None and facts.splits_backward):
        what = "a schedule of one's own" if own else "a backward in two parts"
        yield _not_modelled("plan.schedule", plan.schedule, what, "use 1f1b or interleaved_1f1b")
    low = software.low_precision.get(training.precision)  # type: ignore[arg-type]
    if low is not None and not low.frozen:
        what = f"a frozen matrix in low precision under {software.id}"
        yield _not_modelled("training.precision", training.precision, what, "use bf16")
    for field in ("offload_optimizer", "offload_activations"):
        if getattr(plan, field):
            yield _not_modelled(f"plan.{field}", "true", "offloading", "remove it")


def _not_modelled(field: str, value: str, what: str, fix: str) -> Problem:
    rule = f"{what} with adapters (model.lora_rank) is not modelled yet"
    return Problem(field=field, value=value, rule=rule, fix=fix)
