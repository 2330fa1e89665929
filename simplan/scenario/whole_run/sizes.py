"""Numbers of nodes on which a job goes on: smaller plans at the same batch, or fewer replica groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from simplan.errors import Problem, SpecError
from simplan.goodput.setup import Size
from simplan.prediction import Prediction
from simplan.scenario.elastic import scenario_on, scenarios_on_fewer
from simplan.scenario.file import Scenario
from simplan.wording import either

_MAX_PREDICTED = 8
"""Numbers of replica groups that are predicted; step times between them are interpolated."""

Predict = Callable[[Scenario], Prediction]


def sizes_of(scenario: Scenario, whole: Size, predict: Predict) -> tuple[Size, ...]:
    """Sizes of the job, the whole job first.

    Args:
        whole: Size of the whole job.
        predict: Predicts the step of a smaller job.

    Raises:
        SpecError: ``recovery.min_nodes`` cannot run the plan.
    """
    run = scenario.whole_run
    recovery = None if run is None else run.recovery
    match None if recovery is None else recovery.policy:
        case "shrink":
            return (whole, *_smaller_plans(scenario, recovery.min_nodes if recovery else None, predict))
        case "continue":
            return (whole, *_fewer_groups(scenario, whole, recovery.min_nodes if recovery else None, predict))
        case _:
            return (whole,)


def _smaller_plans(scenario: Scenario, min_nodes: int | None, predict: Predict) -> list[Size]:
    """Smaller plans at the same batch that fit, as ``simplan run --nnodes MIN:MAX`` makes them."""
    if min_nodes is not None:
        _check_min_nodes(scenario, min_nodes)
    smaller, _ = scenarios_on_fewer(scenario, min_nodes or 1)
    predictions = {number: predict(other) for number, other in smaller.items()}
    return [
        Size(num_nodes=number, step_s=prediction.step_time_s)
        for number, prediction in predictions.items()
        if prediction.fits is not False
    ]


def _check_min_nodes(scenario: Scenario, min_nodes: int) -> None:
    """Check the smallest number of nodes; the error has the nearest ones that can run the plan."""
    try:
        scenario_on(scenario, min_nodes)
    except SpecError as error:
        able, _ = scenarios_on_fewer(scenario, 1)
        nodes = sorted([*able, scenario.job.cluster.num_nodes])
        near = [
            *[number for number in nodes if number < min_nodes][-1:],
            *[number for number in nodes if number > min_nodes][:1],
        ]
        rule = f"cannot run this plan: {error.problems[0].sentence()}"
        problem = Problem(field="recovery.min_nodes", value=str(min_nodes), rule=rule, fix=f"use {either(near)}")
        raise SpecError(problem, file=scenario.file) from None


def _fewer_groups(scenario: Scenario, whole: Size, min_nodes: int | None, predict: Predict) -> list[Size]:
    """Fewer replica groups, each with its batch: a step advances by their part of the groups."""
    job = scenario.job
    groups = job.plan.dp_replicate
    nodes = job.cluster.num_nodes // groups
    least = max(1, (min_nodes or 0) // nodes)
    numbers = range(groups - 1, least - 1, -1)
    if not numbers:
        return []
    predicted = sorted({int(num_groups) for num_groups in np.linspace(least, groups - 1, _MAX_PREDICTED)})
    step_s = [predict(_on_groups(scenario, num_groups)).step_time_s for num_groups in predicted]
    interpolated = np.interp(numbers, [*predicted, groups], [*step_s, whole.step_s])
    return [
        Size(num_nodes=number * nodes, step_s=float(seconds), advance=number / groups)
        for number, seconds in zip(numbers, interpolated, strict=True)
    ]


def _on_groups(scenario: Scenario, groups: int) -> Scenario:
    """The scenario on fewer replica groups, with the same batch for each."""
    job = scenario.job
    before = job.plan.dp_replicate
    job = job.with_num_devices(job.cluster.num_devices // before * groups).with_changes({
        "plan.dp_replicate": groups,
        "training.global_batch_size": job.training.global_batch_size // before * groups,
    })  # fmt: skip
    return replace(scenario, job=job, expect=(), whole_run=None)
