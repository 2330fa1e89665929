"""Jobs of the replicas that are left when others have left a run (``Replication.min_replicas``)."""

from __future__ import annotations

from dataclasses import replace

from simplan.job import Job

_MAX_NUMBERS = 4


def numbers_left(job: Job) -> list[int]:
    """Numbers of replicas with which a run is predicted to go on, largest first; none if it ends with any replica.

    Of many, these are the largest ones and the smallest.
    """
    replication = job.plan.replication
    if replication is None or replication.min_replicas is None:
        return []
    numbers = list(range(job.plan.dp_replicate - 1, replication.min_replicas - 1, -1))
    return numbers if len(numbers) <= _MAX_NUMBERS else [*numbers[: _MAX_NUMBERS - 1], numbers[-1]]


def with_replicas_left(job: Job, number: int) -> Job:
    """The job of some of its replicas: their devices, and their part of the batch."""
    plan, replication = job.plan, job.plan.replication
    assert replication is not None
    left = plan.with_changes(
        dp_replicate=number, replication={**replication.model_dump(exclude_defaults=True), "min_replicas": number}
    )
    cluster = job.cluster.model_copy(update={"num_devices": left.num_devices})
    batch = job.training.global_batch_size * number // plan.dp_replicate
    return replace(job, cluster=cluster, plan=left, training=job.training.with_changes(global_batch_size=batch))
