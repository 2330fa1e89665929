"""What must hold for a plan that keeps optimizer states or activations in memory of the host."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.models import FAMILIES
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS, is_own_schedule
from simplan.spec.training import TrainingSpec

__all__ = ["offload_rules", "unmodelled_offload"]

_FAMILIES = ("gpt", "llama")


def offload_rules(cluster: ClusterSpec, training: TrainingSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """Plans that cannot be: nothing to move, or nothing to move it over."""
    if plan.offload_optimizer and training.optimizer == "sgd":
        rule = "moves optimizer states, and sgd has none"
        yield Problem(field="plan.offload_optimizer", value="true", rule=rule, fix="remove it, or use adamw")
    if plan.offload_layers is not None and not plan.offload_activations:
        rule = "says of how many blocks activations are moved, and offload_activations is off"
        fix = "set offload_activations, or remove it"
        yield Problem(field="plan.offload_layers", value=str(plan.offload_layers), rule=rule, fix=fix)
    offloads = plan.offload_optimizer or plan.offload_activations
    if offloads and cluster.device.kind != "cpu" and cluster.host_link is None:
        yield Problem(
            field="cluster.device.host_link",
            rule=f"is missing: the catalogue does not say what joins {cluster.device.id} with its host",
            fix="name a link, e.g. {preset: " + cluster.device.id + ", host_link: pcie4} (`simplan show links`)",
        )


def unmodelled_offload(model: ModelSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """Plans that can be, but that simplan does not model."""
    if plan.offload_optimizer and model.num_experts and plan.shard.experts_apart:
        fix = "use ep = 1" if plan.ep > 1 else "use etp = tp"
        yield _not_modelled("offload_optimizer", "states of experts of which other ranks have others", fix)
    if not plan.offload_activations:
        return
    what = ""
    if model.family not in _FAMILIES:
        what, fix = f"activations of the family {model.family}", f"models: {', '.join(_FAMILIES)}"
    elif any(model.windows) or FAMILIES[model.family].alibi:
        what, fix = "attention in a window, whose masks would have to stay on the device,", "remove it"
    elif is_own_schedule(plan.schedule) and plan.schedule != "none":
        what, fix = "a schedule of your own", "use 1f1b"
    elif plan.schedule in SCHEDULE_FACTS and SCHEDULE_FACTS[plan.schedule].splits_backward:
        what, fix = f"a backward in two parts ({plan.schedule})", "use 1f1b"
    elif plan.cp > 1:
        what, fix = f"context parallelism (cp = {plan.cp})", "use cp = 1"
    elif plan.recompute == "qkv_proj_offloaded":
        what, fix = "recompute = qkv_proj_offloaded, which has transfers of its own,", "use selective or full"
    if plan.offload_layers is not None and plan.pp > 1:
        fix = "remove it: then all blocks are moved"
        rule = f"a part of the blocks of a pipeline (pp = {plan.pp}) is not modelled yet"
        yield Problem(field="plan.offload_layers", value=str(plan.offload_layers), rule=rule, fix=fix)
    if what:
        yield _not_modelled("offload_activations", what, fix)


def _not_modelled(field: str, what: str, fix: str) -> Problem:
    return Problem(field=f"plan.{field}", value="true", rule=f"{what} is not modelled yet with it", fix=fix)
