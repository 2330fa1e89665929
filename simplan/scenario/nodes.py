"""Nodes of a framework's file, compared with those of the cluster that is predicted."""

from __future__ import annotations

from simplan.cluster.hardware import ClusterSpec
from simplan.errors import Problem, SpecError
from simplan.interop.configuration import Configuration
from simplan.units import counted

_LARGEST_HOST = 16
"""Devices that one operating system has in today's machines; larger domains, as of NVL72, are of several hosts."""


def check_ranks_per_node(configuration: Configuration, cluster: ClusterSpec) -> None:
    """Check that a node has as many devices as a job on several nodes has ranks on each.

    Raises:
        SpecError: It has more or fewer, so communications would cross nodes elsewhere.
    """
    setting, devices = configuration.ranks_per_node, cluster.devices_per_node
    if setting is None or setting.value == devices or devices > _LARGEST_HOST:
        return
    rule = f"is the number of ranks on each node, and nodes of this cluster have {counted(devices, 'device')}"
    fix = f"add --set cluster.devices_per_node={setting.value}, or name a cluster of such nodes"
    problem = Problem(field=setting.key, value=str(setting.value), rule=rule, fix=fix, line=setting.line)
    raise SpecError(problem, file=configuration.file)
