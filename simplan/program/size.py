"""Size of a Program: a step of too many operations, or of too many bytes to count, is refused."""

from __future__ import annotations

from simplan.errors import Problem, SpecError
from simplan.job import Job

MAX_OPERATIONS = 4_000_000
"""Operations of one Program. Lowered and simulated, also 200 times with jitter, each takes 0.6 kB and 10 to 13
microseconds, so the largest takes 2.5 GiB and almost a minute."""
MAX_CONTENDED = 2_500_000
"""The same of a Program whose communications share links, which takes 1.2 kB and 30 microseconds per operation."""

MAX_TRACED = 400_000
"""Operations of a trace, of which each takes 65 microseconds, 8 kB of memory and half a kilobyte of the file."""


def refuse_many_actions(job: Job, num_ranks: int, num_microbatches: int) -> None:
    """Refuses a step whose actions alone are too many, before its action table is made.

    Args:
        job: The job.
        num_ranks: Simulated ranks.
        num_microbatches: Simulated microbatches.

    Raises:
        SpecError: Each rank has several actions per microbatch, and all ranks together have too many.
    """
    plan = job.plan
    # a forward and a backward of every stage, and both ends of both transfers between stages
    least = num_microbatches * (2 * plan.num_stages + 4 * (plan.pp - 1))
    refuse_many_operations(job, least * num_ranks // plan.pp, num_ranks, num_microbatches)


def refuse_many_operations(
    job: Job, num_operations: int, num_ranks: int, num_microbatches: int, limit: tuple[int, str] | None = None
) -> None:
    """Refuses a Program that has too many operations.

    Args:
        job: The job.
        num_operations: Operations of all simulated ranks; fewer only if these are too many already.
        num_ranks, num_microbatches: Simulated ranks and microbatches.
        limit: Most operations, and the words for what is done with them; None for those that are simulated.

    Raises:
        SpecError: There are more operations than the limit.
    """
    most, done = limit or _max_operations(job)
    if num_operations <= most:
        return
    rule = (
        f"needs {num_operations:,} operations or more ({num_ranks:,} simulated ranks, {num_microbatches:,} "
        f"microbatches); at most {most:,} are {done}"
    )
    fixes = [f"{field} takes all ranks: remove it" for field in _fields_of_all_ranks(job)]
    fixes = fixes if num_ranks > job.plan.pp else []
    if num_ranks > job.plan.pp:
        fixes.append("use fewer devices")
    if num_microbatches > 1:
        fixes.append("use fewer or larger microbatches")
    field, value = "training.global_batch_size", job.training.global_batch_size
    if num_ranks > num_microbatches:
        field, value = "cluster.num_devices", job.cluster.num_devices
    raise SpecError(Problem(field=field, value=f"{value:,}", rule=rule, fix=", or ".join(fixes)))


def _max_operations(job: Job) -> tuple[int, str]:
    """Most operations of a Program that is simulated for a job, and the words for that."""
    if job.cluster.topology is not None:
        return MAX_CONTENDED, "simulated on links of cluster.topology"
    return MAX_OPERATIONS, "simulated"


MAX_BYTES = 2**62
"""Bytes of a rank at its peak, which are counted in 64 bits."""


def refuse_many_bytes(job: Job, num_bytes: float) -> None:
    """Refuses a Program whose bytes cannot be counted.

    Args:
        job: The job.
        num_bytes: Bytes of a rank at its peak, or of one of its operations; only their magnitude counts.

    Raises:
        SpecError: They are more than ``MAX_BYTES``.
    """
    if num_bytes <= MAX_BYTES:
        return
    rule = f"takes more than {MAX_BYTES // 2**60} EiB of memory on a rank, which no device has"
    value = f"{max(job.plan.sizes_of_ranks):,}"
    raise SpecError(Problem(field="plan.microbatch_size", value=value, rule=rule, fix="use smaller microbatches"))


def _fields_of_all_ranks(job: Job) -> list[str]:
    """Fields that make every rank different, so that all are simulated."""
    given = {
        "cluster.jitter": job.cluster.jitter,
        "cluster.topology": job.cluster.topology,
        "training.backup_workers": job.training.backup_workers,
    }
    return [field for field, value in given.items() if value]
