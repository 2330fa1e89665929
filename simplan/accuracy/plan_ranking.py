"""Quality of plan choices: predicted and measured ranking of plans for the same training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from simplan.accuracy.outcome import RunOutcome

_APART = 1.03  # pairs with a smaller ratio of step times are within measurement noise
_OF_SHAPE = {"name", "sources", "vocab_size", "lora_rank"}  # vocabularies are padded to multiples of tp
_OF_PLAN = {"optimizer", "fused_optimizer", "clip_grad_norm"}


@dataclass(frozen=True, slots=True)
class Choice:
    """Predicted choice in a group of runs that differ only in their plan.

    Attributes:
        model: Name of the model.
        devices: Devices of all runs, in words.
        chosen, best: Runs predicted and measured to be fastest.
        regret: Relative excess of the measured step time of ``chosen`` over that of ``best``.
    """

    file: str
    model: str
    devices: str
    num_runs: int
    chosen: str
    best: str
    regret: float


@dataclass(frozen=True, slots=True)
class Choices:
    """Quality of predicted choices among plans.

    Attributes:
        num_groups: Groups of at least two runs that differ only in their plan.
        num_runs: Runs in the groups.
        num_best: Groups in which the plan predicted to be best is the measured best.
        median_regret, mean_regret, max_regret: Relative excess of the measured step time of the plan predicted to be
            best over the measured best, per group. None without groups.
        num_pairs: Pairs of plans in a group whose measured times differ by more than 3%.
        kendall_tau: Fraction of the pairs predicted in the right order minus the fraction in the wrong order; None
            without pairs.
        wrong: Choices of other plans than the best, largest regret first.
    """

    num_groups: int
    num_runs: int
    num_best: int
    median_regret: float | None
    mean_regret: float | None
    max_regret: float | None
    num_pairs: int
    kendall_tau: float | None
    wrong: tuple[Choice, ...] = ()


def choices(outcomes: Iterable[RunOutcome]) -> Choices:
    """Evaluate choices in groups of runs of one file that differ only in their plan.

    They have the model (vocabulary and adapters apart), sequence length, devices, global batch, precision and software
    version in common, and what they state of the software that no plan decides.
    """
    groups = [group for group in plan_groups(outcomes) if len({_plan(outcome) for outcome in group}) > 1]
    chosen = [_choice(group) for group in groups]
    regrets = [choice.regret for choice in chosen]
    pairs = [pair for group in groups for pair in plan_pairs(group)]
    orders = [float(np.sign(was) * np.sign(said)) for said, was in pairs if abs(was) > math.log(_APART)]
    return Choices(
        num_groups=len(groups),
        num_runs=sum(len(group) for group in groups),
        num_best=sum(regret == 0 for regret in regrets),
        median_regret=float(np.median(regrets)) if regrets else None,
        mean_regret=float(np.mean(regrets)) if regrets else None,
        max_regret=max(regrets) if regrets else None,
        num_pairs=len(orders),
        kendall_tau=float(np.mean(orders)) if orders else None,
        wrong=tuple(sorted((c for c in chosen if c.regret > 0), key=lambda choice: -choice.regret)),
    )


def _choice(group: Sequence[RunOutcome]) -> Choice:
    chosen, best = min(group, key=_predicted_s), min(group, key=_measured_s)
    job = best.run.known_job
    return Choice(
        file=best.file,
        model=job.model.name,
        devices=job.cluster.devices_in_words,
        num_runs=len(group),
        chosen=chosen.run.id,
        best=best.run.id,
        regret=_measured_s(chosen) / _measured_s(best) - 1,
    )


def plan_pairs(group: Iterable[RunOutcome]) -> Iterator[tuple[float, float]]:
    """Logarithms of the predicted and the measured ratio of step times, of runs that differ only in their plan."""
    for outcome, other in combinations(group, 2):
        if _plan(outcome) != _plan(other):
            predicted, measured = _predicted_s(outcome) / _predicted_s(other), _measured_s(outcome) / _measured_s(other)
            yield math.log(predicted), math.log(measured)


def plan_groups(outcomes: Iterable[RunOutcome]) -> list[list[RunOutcome]]:
    """Groups of runs that differ only in their plan, as ``choices`` compares them; some have one plan only."""
    groups: dict[Hashable, list[RunOutcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is None:
            continue
        job = outcome.run.known_job
        key = (
            outcome.file,
            outcome.run.measured.version,
            outcome.run.fallback_for or job.software.id,
            tuple(_stated(outcome.run.software)),
            job.model.model_dump_json(exclude=_OF_SHAPE),
            job.cluster.model_dump_json(exclude={"source"}),
            job.training.model_dump_json(exclude=_OF_PLAN),
        )
        groups[key].append(outcome)
    return list(groups.values())


def _stated(software: Mapping[str, Any]) -> Iterator[Any]:
    """Settings of the software that no plan decides, as overlap does; None for those that the run does not state."""
    yield from (software.get(name) for name in ("compiled", "channels_last"))
    yield software.get("layers", {}).get("attention")


def _plan(outcome: RunOutcome) -> str:
    job = outcome.run.known_job
    return f"{job.plan.model_dump_json()}{job.training.model_dump_json(include=_OF_PLAN)}{outcome.run.steps_overlap}"


def _measured_s(outcome: RunOutcome) -> float:
    assert outcome.run.measured.step_time_s is not None
    return outcome.run.measured.step_time_s


def _predicted_s(outcome: RunOutcome) -> float:
    assert outcome.predicted is not None
    return outcome.predicted.step_time_s
