"""Plans of ``simplan run --nnodes MIN:MAX`` on fewer nodes, checked and predicted before a run starts."""

from __future__ import annotations

from dataclasses import replace

from simplan.errors import Problem, SpecError
from simplan.job import numbers_left, with_replicas_left
from simplan.predict import run_spec_of
from simplan.prediction import Prediction
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import FewerNodes, on_fewer_devices
from simplan.scenario import Scenario
from simplan.units import counted


def scenario_on(scenario: Scenario, num_nodes: int) -> Scenario:
    """The scenario with a plan for fewer nodes.

    Raises:
        SpecError: The nodes cannot run the plan.
    """
    job = scenario.job
    num_devices = num_nodes * job.cluster.ranks_per_node
    cluster = job.cluster.model_copy(update={"num_devices": num_devices})
    fewer = replace(job, cluster=cluster, plan=on_fewer_devices(job.plan, num_devices))
    return replace(scenario, job=fewer, expect=(), whole_run=None)


def check_elastic(scenario: Scenario, min_nodes: int, checkpointing: Checkpointing | None) -> None:
    """Checks ``--nnodes MIN:MAX``.

    Raises:
        SpecError: The run writes no checkpoints to resume from, or the minimum number of nodes cannot run the plan.
    """
    number = f"{min_nodes}:{scenario.job.cluster.num_nodes}"
    if checkpointing is None or checkpointing.max_restarts == 0:
        missing = "--checkpoint-dir DIR" if checkpointing is None else "--max-restarts K"
        rule = "goes on without lost nodes from a checkpoint, and each time counts as a restart"
        raise SpecError(Problem(field="--nnodes", value=number, rule=rule, fix=f"add {missing}"))
    try:
        scenario_on(scenario, min_nodes)
    except SpecError as error:
        rule = f"{counted(min_nodes, 'node')} cannot go on with this plan: {error.sentences}"
        fix = f"or use --nnodes {scenario.job.cluster.num_nodes}"
        raise SpecError(Problem(field="--nnodes", value=number, rule=rule, fix=fix), file=scenario.file) from None


def scenarios_on_fewer(scenario: Scenario, min_nodes: int) -> tuple[dict[int, Scenario], list[str]]:
    """The scenario on every smaller number of nodes that can run it, and a sentence about each number that cannot.

    Args:
        scenario: Scenario on all nodes.
        min_nodes: Smallest number of nodes.

    Returns:
        Scenarios by number of nodes, largest first, and the sentences.
    """
    scenarios, sentences = {}, []
    for number in range(scenario.job.cluster.num_nodes - 1, min_nodes - 1, -1):
        try:
            scenarios[number] = scenario_on(scenario, number)
        except SpecError as error:
            sentences.append(f"{counted(number, 'node')} could not go on, but fewer of them: {error.sentences}")
    return scenarios, sentences


def scenarios_of_replicas_left(scenario: Scenario) -> list[Scenario]:
    """The scenario on the replicas that may be left of it; empty if it ends with any of them."""
    return [
        replace(scenario, job=with_replicas_left(scenario.job, number), expect=())
        for number in numbers_left(scenario.job)
    ]


def fewer_nodes(predictions: dict[int, Prediction]) -> tuple[FewerNodes, ...]:
    """Plans on fewer nodes for the executor, from predictions by number of nodes."""
    jobs = {number: run_spec_of(prediction) for number, prediction in predictions.items()}
    return tuple(
        FewerNodes(
            num_nodes=number,
            plan=job.plan,
            boundaries=job.boundaries,
            table=job.table,
            predicted_memory_bytes=job.predicted_memory_bytes,
        )
        for number, job in jobs.items()
    )
