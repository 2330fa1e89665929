"""Hostfiles: the nodes of a job in the order of its ranks, as launchers read them.

``node2 slots=8`` gives the next eight ranks to node 2 (mpirun, DeepSpeed). A host without ``slots`` has one rank per
line, as in the file of Slurm's arbitrary distribution, or one for each of its devices if every host has one line.
Hosts are named ``node0`` and so on, as in ``cluster.topology``: their numbers are their places in the network.

Sources: Open MPI's manual (mpirun, hostfile); DeepSpeed's documentation (resource configuration); srun's manual
(``--distribution=arbitrary``, SLURM_HOSTFILE).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePath

from simplan.errors import Problem, SpecError
from simplan.units import counted

_LINE = re.compile(r"(?P<host>[^\s:]+)(?:\s+slots\s*=\s*(?P<slots>[0-9]{1,6})|:(?P<number>[0-9]{1,6}))?")
_NODE = re.compile(r"node(0|[1-9][0-9]{0,6})")
_MAX_BYTES = 64 * 1024**2


def is_host_file(value: object) -> bool:
    """True if a placement is given as a hostfile: a file named so, or one that ends in ``.hosts`` or ``.txt``."""
    name = PurePath(value.strip().lower()).name if isinstance(value, str) else ""
    return name.endswith(("hostfile", ".hosts", ".txt"))


def read_host_file(path: str | Path, devices_per_node: int, num_devices: int) -> tuple[int, ...]:
    """Read the device of every rank from a hostfile. Ranks of a node are on its devices in order.

    Raises:
        SpecError: The file cannot be read, names a host that is no node of the cluster, or has more or fewer ranks than
            the cluster has devices, in all or on a node.
    """
    path, last = Path(path), (num_devices - 1) // devices_per_node
    lines = [*_lines(path)]
    names = Counter(host for _, host, _ in lines)
    per_line = devices_per_node if max(names.values(), default=0) == 1 else 1  # of a host without slots
    taken, devices = [0] * (last + 1), list[int]()
    for number, host, slots in lines:
        found = _NODE.fullmatch(host)
        node = int(found[1]) if found else last + 1
        if node > last:
            rule = f"line {number} names {host}, and the nodes of the cluster are node0 to node{last}"
            fix = "write the numbers of the nodes in the topology, in the order of the ranks"
            raise bad_file(path, rule, fix)
        there = min(devices_per_node, num_devices - node * devices_per_node)
        for _ in range(min(per_line, there) if slots is None else slots):
            if taken[node] == there:
                rule = f"line {number} gives {host} more ranks than its {counted(there, 'device')}"
                raise bad_file(path, rule, f"use slots={there}, and name each node once")
            devices.append(node * devices_per_node + taken[node])
            taken[node] += 1
    if len(devices) != num_devices:
        idle = next(node for node in range(last + 1) if taken[node] < devices_per_node)
        rule = f"has {counted(len(devices), 'rank')}, and the cluster has {counted(num_devices, 'device')}"
        raise bad_file(path, rule, f"add node{idle} slots={devices_per_node - taken[idle]}, or use fewer nodes")
    return tuple(devices)


def nodes_of(devices: Sequence[int], devices_per_node: int) -> tuple[int, ...]:
    """Nodes in the order of the first rank on each, as NCCL numbers them.

    >>> nodes_of((2, 3, 0, 1), 2)
    (1, 0)
    """
    return tuple(dict.fromkeys(device // devices_per_node for device in devices))


def host_lines(devices: Sequence[int], devices_per_node: int) -> tuple[str, ...]:
    """Lines of a hostfile that gives every rank its device.

    Raises:
        SpecError: Ranks of a node do not follow each other.
    """
    _refuse_other_devices(devices, devices_per_node)
    runs = [(node, len([*ranks])) for node, ranks in groupby(device // devices_per_node for device in devices)]
    node, number = Counter(node for node, _ in runs).most_common(1)[0]
    if number > 1:
        rule = f"puts ranks on node{node} that do not follow each other, which a hostfile cannot say"
        raise SpecError(Problem(field="plan.placement", rule=rule, fix="use --to slurm-hostfile"))
    return tuple(f"node{node} slots={slots}" for node, slots in runs)


def task_lines(devices: Sequence[int], devices_per_node: int) -> tuple[str, ...]:
    """Lines of a file for Slurm's arbitrary distribution, one per rank.

    Raises:
        SpecError: Ranks of a node are not on its devices in order: Slurm counts the tasks of a node by rank.
    """
    _refuse_other_devices(devices, devices_per_node)
    return tuple(f"node{device // devices_per_node}" for device in devices)


def _refuse_other_devices(devices: Sequence[int], devices_per_node: int) -> None:
    taken: Counter[int] = Counter()
    for rank, device in enumerate(devices):
        node, local = divmod(device, devices_per_node)
        if local != taken[node]:
            rule = f"puts rank {rank} on device {local} of node{node}, and launchers would put it on {taken[node]}"
            raise SpecError(
                Problem(field="plan.placement", rule=rule, fix="give the ranks of a node its devices in order")
            )
        taken[node] += 1


def _lines(path: Path) -> Iterator[tuple[int, str, int | None]]:
    """Line number, host and slots of every line; None for a line without slots."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise bad_file(path, f"is larger than {_MAX_BYTES // 1024**2} MiB", "use a smaller file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not a text file"
        raise bad_file(path, f"cannot be read: {reason}", "name a hostfile with lines such as node0 slots=8") from error
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        found = _LINE.fullmatch(said)
        if found is None:
            raise bad_file(path, f"line {number} is {said!r}", "write a host and its slots, such as node0 slots=8")
        slots = found["slots"] or found["number"]
        yield number, found["host"], None if slots is None else int(slots)


def bad_file(path: Path, rule: str, fix: str) -> SpecError:
    """Error of a file that ``plan.placement`` names."""
    return SpecError(Problem(field="plan.placement", value=str(path), rule=rule, fix=fix))
