"""Rules between the sections of a whole run and the job, checked before anything is predicted."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem, SpecError
from simplan.goodput.sections import Recovery, Reliability, RunSections
from simplan.job import Job
from simplan.scenario.whole_run.failures import causes_of
from simplan.units import counted
from simplan.wording import either


def check_run(run: RunSections, job: Job) -> None:
    """Check the sections of a whole run against the job.

    Raises:
        SpecError: They contradict the job; lists all problems.
    """
    problems = [*_nodes(job), *_recovery(run.recovery or Recovery(), job)]
    try:
        causes_of(run.reliability or Reliability(), run.recovery or Recovery(), job.cluster)
    except SpecError as error:
        problems += error.problems
    if problems:
        raise SpecError(problems)


def _nodes(job: Job) -> Iterator[Problem]:
    cluster = job.cluster
    if last := cluster.num_devices % cluster.ranks_per_node:
        per_node = cluster.devices_per_node
        rule = f"leaves a last node with {last} of {per_node} devices; failures of unequal nodes are not modeled yet"
        yield Problem(
            field="cluster.num_devices", value=str(cluster.num_devices), rule=rule, fix=f"use a multiple of {per_node}"
        )


def _recovery(recovery: Recovery, job: Job) -> Iterator[Problem]:
    nodes, policy = job.cluster.num_nodes, recovery.policy
    if recovery.spares > nodes:
        rule = f"is more than the {counted(nodes, 'node')} of the job"
        fix = f"use {nodes} or less; spares are nodes"
        yield Problem(field="recovery.spares", value=str(recovery.spares), rule=rule, fix=fix)
    if recovery.min_nodes is not None and recovery.min_nodes > nodes:
        rule = f"is more than the {counted(nodes, 'node')} of the job"
        yield Problem(field="recovery.min_nodes", value=str(recovery.min_nodes), rule=rule, fix=f"use {nodes} or less")
    if policy != "restart" and job.cluster.is_mixed:
        rule = "is not modeled yet for nodes that differ"
        yield Problem(field="recovery.policy", value=f'"{policy}"', rule=rule, fix="use policy: restart")
    elif policy == "continue":
        yield from _replica_groups(recovery, job)


def _replica_groups(recovery: Recovery, job: Job) -> Iterator[Problem]:
    """Groups of ``continue``: replicas of the model on nodes of their own."""
    cluster, replicas = job.cluster, job.plan.dp_replicate
    field, value = "recovery.policy", '"continue"'
    size, rest = divmod(cluster.num_nodes, replicas)
    if replicas == 1:
        rule, fix = "goes on without a replica group, and plan.dp_replicate = 1", "use policy: restart or shrink"
        yield Problem(field=field, value=value, rule=rule, fix=fix)
    elif rest:
        rule = f"needs whole nodes, and {counted(cluster.num_nodes, 'node')} are no multiple of plan.dp_replicate"
        fix = f"change plan.dp_replicate = {replicas} to a divisor of {cluster.num_nodes}"
        yield Problem(field=field, value=value, rule=rule, fix=fix)
    elif (number := recovery.min_nodes) is not None and number % size:
        rule = f"is no whole number of replica groups, which have {counted(size, 'node')}"
        below = number - number % size
        fix = f"use {either(group_count for group_count in (below, below + size) if group_count)}"
        yield Problem(field="recovery.min_nodes", value=str(number), rule=rule, fix=fix)
