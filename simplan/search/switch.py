"""Switch from the plan that runs today to a better one: gain, certainty and cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.prediction import Prediction
from simplan.search.space import OPTION_KEYS, option_of

RIGHT_ORDER = ((0.02, 0.58, 53), (0.05, 0.82, 77), (0.10, 0.88, 104), (0.20, 0.91, 117), (math.inf, 0.97, 184))
"""Upper end of the relative difference of two predicted step times, fraction of published pairs of plans that were
measured in the predicted order, and number of pairs. Pairs differ only in their plan; all pairs of scenarios/published
and scenarios/heldout, as predicted in November 2026."""

_SPLITS_STATES = (
    "tp", "pp", "virtual_stages", "stage_layers", "ep", "etp", "dp_shard", "zero_stage", "schedule",
)  # fmt: skip


def right_order(first_s: float, second_s: float) -> tuple[float, int]:
    """Fraction of published pairs of plans, predicted as far apart, that were measured in this order; and their number.

    Args:
        first_s, second_s: Predicted step times of two jobs that differ only in their plan.
    """
    apart = abs(math.log(second_s / first_s))
    return next((fraction, pairs) for end, fraction, pairs in RIGHT_ORDER if apart < end)


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """One setting that differs between two plans, in the words of the user's file.

    Attributes:
        key: Key of the framework, or of a scenario.
        before, after: Values; None if the setting is absent.
        line: Line of the file that has it; None if it has none.
    """

    key: str
    before: Any
    after: Any
    line: int | None = None


@dataclass(frozen=True, slots=True)
class PlanSwitch:
    """Comparison of the plan that runs today with the best plan of a search.

    Attributes:
        current, best: Predictions of both.
        changes: Settings that differ.
        current_words: What the current plan is.
    """

    current: Prediction
    best: Prediction
    changes: tuple[ChangedSetting, ...]
    current_words: str = "the current plan"

    @property
    def step_time_change(self) -> float:
        """Relative change of the step time, negative if the best plan is faster."""
        return self.best.step_time_s / self.current.step_time_s - 1

    @property
    def right_order(self) -> tuple[float, int]:
        """Fraction of published pairs with such a difference that were measured in this order, and their number."""
        return right_order(self.best.step_time_s, self.current.step_time_s)

    @property
    def costs(self) -> tuple[str, ...]:
        """Sentences on what the switch takes."""
        return switching_costs(self.current.job.plan, self.best.job.plan)

    def to_json(self) -> dict[str, Any]:
        """JSON document."""
        fraction, pairs = self.right_order

        def figures(prediction: Prediction) -> dict[str, Any]:
            return {
                "plan": prediction.job.plan.model_dump(mode="json"),
                "step_time_s": prediction.step_time_s,
                "step_time_interval_s": list(prediction.step_time_interval_s),
                "device_bytes": prediction.worst_memory.device_bytes,
                "memory_verdict": prediction.memory_verdict,
            }

        return {
            "current": figures(self.current),
            "best": figures(self.best),
            "step_time_change": self.step_time_change,
            "published_pairs_in_this_order": {"fraction": fraction, "num_pairs": pairs},
            "changes": [
                {"key": change.key, "before": change.before, "after": change.after, "line": change.line}
                for change in self.changes
            ],
            "costs": list(self.costs),
        }


def switching_costs(before: ParallelPlan, after: ParallelPlan) -> tuple[str, ...]:
    """Sentences on what a change of the plan takes, besides the changed settings."""
    if before == after:
        return ()
    changed = [name for name in _SPLITS_STATES if getattr(before, name) != getattr(after, name)]
    if changed:
        checkpoint = (
            f"checkpoints split weights and optimizer states differently ({', '.join(changed)}): resume from one that "
            "can be resharded (torch.distributed.checkpoint, Megatron's torch_dist), or convert it"
        )
    else:
        checkpoint = "checkpoints stay as they are"
    sums = "the global batch stays, so that losses differ by the order of sums only"
    return (checkpoint, sums)


def changed_keys(before: Job, after: Job) -> tuple[ChangedSetting, ...]:
    """Fields of the plan and searched options that differ, as settings of a scenario."""
    old_plan, new_plan = before.plan, after.plan
    pairs = ((name, getattr(old_plan, name), getattr(new_plan, name)) for name in type(old_plan).model_fields)
    of_plan = tuple(ChangedSetting(f"plan.{name}", old, new) for name, old, new in pairs if old != new)
    return of_plan + changed_options(before, after)


def changed_options(before: Job, after: Job) -> tuple[ChangedSetting, ...]:
    """Searched options outside of the plan that differ, as settings of a scenario."""
    keys = {name: key for name, key in OPTION_KEYS.items() if not key.startswith("plan.")}
    settings = ((key, option_of(before, name), option_of(after, name)) for name, key in keys.items())
    return tuple(ChangedSetting(key, old, new) for key, old, new in settings if old != new)
