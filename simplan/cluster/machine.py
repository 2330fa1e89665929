"""A cluster of one or several machines like this one: cores, memory and largest number of ranks. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.errors import Problem, SpecError
from simplan.units import MIB, format_bytes

THIS_MACHINE = "this-machine"
MAX_RANKS_PER_CORE = 4
RANK_OVERHEAD_BYTES = 350 * MIB
"""Resident memory of a process that has imported torch and started gloo, without a model."""


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_nvidia_devices() -> int:
    """NVIDIA GPUs of this machine that the Linux driver lists."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def machine_memory_bytes() -> int:
    """Memory of the machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def max_ranks(cores: int, memory_bytes: int) -> int:
    """Largest number of ranks of a machine, limited by cores and by memory per process."""
    return max(1, min(MAX_RANKS_PER_CORE * cores, memory_bytes // RANK_OVERHEAD_BYTES))


def this_machine(
    num_devices: int | None, link: LinkSpec, *, num_nodes: int = 1, inter_link: LinkSpec | None = None
) -> ClusterSpec:
    """The cluster of CPU ranks on this machine, or on several machines like it.

    Device memory is the machine's memory divided by its ranks. The peak rate is unknown without a calibration.

    Args:
        num_devices: Ranks of all nodes, a multiple of ``num_nodes``; None for one rank per core.
        link: Link between the ranks of a node.
        num_nodes: Machines, each with the same number of ranks.
        inter_link: Link between nodes; None for a single node.

    Raises:
        SpecError: More ranks than the machine can run.
    """
    cores, memory_bytes = num_cores(), machine_memory_bytes()
    ranks = cores if num_devices is None else num_devices // num_nodes
    most = max_ranks(cores, memory_bytes)
    if ranks > most:
        each = f"{ranks} ranks on each of {num_nodes} nodes are too many: " if num_nodes > 1 else ""
        rule = (
            f"{each}this machine holds at most {most} ranks: it has {cores} cores ({MAX_RANKS_PER_CORE} ranks each at "
            f"most) and {format_bytes(memory_bytes)} of memory ({format_bytes(RANK_OVERHEAD_BYTES)} per process)"
        )
        fix = f"use {num_nodes} to {most * num_nodes}, or another cluster"
        raise SpecError(Problem(field="cluster.num_devices", value=str(ranks * num_nodes), rule=rule, fix=fix))
    device = DeviceSpec(
        id="this-machine-cpu",
        kind="cpu",
        memory_bytes=memory_bytes // ranks,
        intra_link=link.id,
        sources={"memory_bytes": "memory of the machine divided by its ranks", "intra_link": "ranks of one machine"},
    )
    return ClusterSpec(
        id=THIS_MACHINE,
        device=device,
        devices_per_node=ranks,
        num_devices=ranks * num_nodes,
        intra_link=link,
        inter_link=inter_link,
        cores_per_node=cores,
        source="read from the operating system",
    )
