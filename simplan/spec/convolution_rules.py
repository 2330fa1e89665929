"""What is not modelled of convolutions and batch norms, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.training import TrainingSpec

__all__ = ["unmodelled_convolutions"]


def unmodelled_convolutions(model: ModelSpec, training: TrainingSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """Options that other models have and ResNets have not."""
    if not model.depths:
        return
    if plan.recompute != "none":
        what = "recomputation of batch norms, whose running statistics would count every microbatch twice,"
        yield _not_modelled("plan.recompute", plan.recompute, what, "use none")
    if plan.shards_parameters and training.precision not in ("fp32", "tf32"):
        what = "a batch norm whose weights FSDP casts to half precision, and whose statistics it does not,"
        fix = "use fp32, or plan.zero_stage = 1"
        yield _not_modelled("training.precision", training.precision, what, fix)
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if facts is not None and facts.splits_backward:
        what = "the memory of convolutions whose backward is in two parts"
        yield _not_modelled("plan.schedule", plan.schedule, what, "use 1f1b")


def _not_modelled(field: str, value: str, what: str, fix: str) -> Problem:
    return Problem(field=field, value=value, rule=f"{what} is not modelled yet", fix=fix)
