"""``simplan export --to hostfile`` and ``--to slurm-hostfile``: nodes in the order of the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from simplan.interop.writing import Exported
from simplan.job import Job
from simplan.plan.hostfile import host_lines, task_lines
from simplan.rules import check_job

_NAMES = "nodes have the numbers of their places in the network: replace each name with that of the host there"


def _devices(job: Job) -> tuple[int, ...]:
    check_job(job)
    placement = job.placement
    return tuple(range(job.plan.num_devices)) if placement is None else placement.devices


def _hostfile(job: Job, name: str) -> Exported:
    """Write a hostfile; refuses placements that none can say, as ``host_lines`` does."""
    del name
    text = "\n".join(host_lines(_devices(job), job.cluster.devices_per_node)) + "\n"
    return Exported({"hostfile": text}, "mpirun --hostfile hostfile PROGRAM", (_NAMES,))


def _slurm(job: Job, name: str) -> Exported:
    """Write a file for Slurm's arbitrary distribution, with one line per rank; refuses as ``task_lines`` does."""
    del name
    text = "\n".join(task_lines(_devices(job), job.cluster.devices_per_node)) + "\n"
    start = "SLURM_HOSTFILE=slurm-hostfile srun --distribution=arbitrary PROGRAM"
    return Exported({"slurm-hostfile": text}, start, (_NAMES,))


HOSTFILES: Mapping[str, Callable[[Job, str], Exported]] = MappingProxyType(
    {"hostfile": _hostfile, "slurm-hostfile": _slurm}
)
"""Target of an export -> function from a job and its name to the file."""
