"""Placement: the device of every rank of a plan. Devices fill nodes in order.

Ranks keep their numbers and groups (``simplan.plan.plan.RankMapping``). A placement moves them to other devices: it
orders the axes of the mesh from the innermost to the outermost one, or lists the device of every rank. Without a
placement, rank and device are the same number, and tensor-parallel ranks are neighbors.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from simplan.errors import did_you_mean
from simplan.plan.hostfile import bad_file, is_host_file

if TYPE_CHECKING:
    from simplan.plan.plan import Axis, ParallelPlan

PlacedAxis = Literal["tp", "cp", "ep", "dp", "dp_shard", "dp_replicate", "pp"]
AXES: tuple[str, ...] = get_args(PlacedAxis)
DEFAULT_ORDER: tuple[Axis, ...] = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""Axes of the mesh without a placement, innermost first; each can be placed on its own."""
_DP: tuple[Axis, ...] = ("dp_shard", "dp_replicate")
_GROUPS = {
    "tp": "tensor-parallel groups",
    "cp": "context-parallel groups",
    "dp_shard": "shard groups",
    "dp_replicate": "groups of replicas",
    "pp": "pipelines",
}
_EXAMPLE = "write axes, the innermost first, such as [tp, cp, dp, pp]"
NETWORK = "network"
"""Placement in scenario files: nodes in the order of the network (``simplan.network.order``)."""
_COLUMNS = ("rank", "node", "device")
_MAX_RUNS = 8
_MAX_BYTES = 64 * 1024**2


def is_rank_file(value: object) -> bool:
    """True if a placement is given as a CSV file with the device of every rank."""
    return isinstance(value, str) and value.strip().lower().endswith(".csv")


def is_placement_file(value: object) -> bool:
    """True if a placement is given as a file: a rank file, or a hostfile."""
    return is_rank_file(value) or is_host_file(value)


def check_placement(value: Any) -> tuple[str, ...] | tuple[int, ...] | None:
    """Return a placement as axes or as devices; a text is a list of axes with commas.

    Raises:
        ValueError: The value is neither, an axis is unknown or named twice, or a device has two ranks or none.
    """
    if value is None:
        return None
    if is_placement_file(value):
        reader = "placement.read_rank_file" if is_rank_file(value) else "hostfile.read_host_file"
        raise ValueError(f"is a file, which only scenario files name; use simplan.plan.{reader}")
    given = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"must be a list; {_EXAMPLE}, or the device of every rank")
    if all(isinstance(each, int) and not isinstance(each, bool) for each in given):
        return _checked_devices(given)
    for axis in given:
        if axis not in AXES:
            nearest = did_you_mean(axis, AXES) if isinstance(axis, str) else f"known: {', '.join(AXES)}"
            raise ValueError(f"has {axis!r}, which is no axis; {nearest}")
    _refuse_repeated_axes(given)
    return tuple(given)


def check_searched_placement(value: Any) -> tuple[str, ...] | tuple[int, ...]:
    """Return a placement that a search compares with others; see ``check_placement``.

    Raises:
        ValueError: The value is no placement.
    """
    placement = check_placement(value)
    if placement is None:
        raise ValueError(f"must be a placement; {_EXAMPLE}")
    return placement


def _checked_devices(devices: Sequence[int]) -> tuple[int, ...]:
    for rank, device in enumerate(devices):
        if device < 0:
            raise ValueError(f"puts rank {rank} on device {device}; devices are numbered from 0")
    device, number = Counter(devices).most_common(1)[0]
    if number > 1:
        first, second = [rank for rank, each in enumerate(devices) if each == device][:2]
        raise ValueError(f"puts ranks {first} and {second} on device {device}; give each rank its own device")
    last = len(devices) - 1
    if max(devices) > last:
        rank = next(rank for rank, device in enumerate(devices) if device > last)
        idle = min({*range(len(devices))} - {*devices})
        what = f"puts rank {rank} on device {devices[rank]}, and leaves device {idle} without a rank"
        raise ValueError(f"{what}; use each device from 0 to {last} once")
    return tuple(devices)


def _refuse_repeated_axes(axes: Sequence[str]) -> None:
    axis, number = Counter(axes).most_common(1)[0]
    if number > 1:
        raise ValueError(f"names {axis} twice; name each axis once")
    part = next((axis for axis in axes if axis in _DP), None)
    if "dp" in axes and part is not None:
        raise ValueError(f"names dp and {part}, and dp is dp_shard, then dp_replicate; keep one of the two")


def axes_of(placement: Iterable[str]) -> tuple[Axis, ...]:
    """Axes of the mesh that a placement orders: ``dp`` written out, and without ``ep``, which is no axis of it.

    >>> axes_of(("tp", "dp", "pp"))
    ('tp', 'dp_shard', 'dp_replicate', 'pp')
    """
    meant: dict[str, tuple[Axis, ...]] = {**{axis: (axis,) for axis in DEFAULT_ORDER}, "dp": _DP}
    return tuple(axis for name in placement for axis in meant.get(name, ()))


def placed_order(placement: Iterable[str], sizes: dict[Axis, int]) -> tuple[Axis, ...]:
    """Axes of several ranks, innermost first; axes that a placement leaves out are outermost.

    >>> placed_order(("pp", "dp"), {"tp": 1, "cp": 1, "dp_shard": 4, "dp_replicate": 1, "pp": 2})
    ('pp', 'dp_shard')
    """
    axes = axes_of(placement)
    return tuple(axis for axis in (*axes, *(axis for axis in DEFAULT_ORDER if axis not in axes)) if sizes[axis] > 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of the ranks of one mesh.

    Attributes:
        sizes: Ranks along each axis, in the order of ``DEFAULT_ORDER``.
        order: Axes of several ranks, innermost first; or the device of every rank.
    """

    sizes: tuple[int, ...]
    order: tuple[Axis, ...] | tuple[int, ...]

    @classmethod
    def of(cls, plan: ParallelPlan) -> Placement | None:
        """Placement of a plan; None if every rank is on the device of its own number.

        A list of devices of another length than the number of ranks, which ``simplan.rules`` refuses, counts as none.
        """
        if plan.placement is None:
            return None
        sizes = tuple(getattr(plan, axis) for axis in DEFAULT_ORDER)
        return _placement(sizes, plan.placement)

    @property
    def devices(self) -> tuple[int, ...]:
        """Device of every rank."""
        return _devices(self)[0]

    def device_of(self, rank: int) -> int:
        """Device of a rank."""
        return _devices(self)[0][rank]

    def devices_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Devices of some ranks, in their order."""
        devices = _devices(self)[0]
        return tuple(devices[rank] for rank in ranks)

    def rank_of(self, device: int) -> int:
        """Rank on a device; devices beyond the mesh have the rank of their own number."""
        ranks = _devices(self)[1]
        return ranks[device] if device < len(ranks) else device

    def nodes_per_group(self, axis: Axis, devices_per_node: int) -> tuple[int, int]:
        """Fewest and most nodes of a group along an axis."""
        sizes = self.sizes[::-1]
        nodes = np.array(self.devices).reshape(sizes) // devices_per_node
        groups = np.sort(np.moveaxis(nodes, len(sizes) - 1 - DEFAULT_ORDER.index(axis), -1), axis=-1)
        numbers = 1 + np.count_nonzero(np.diff(groups, axis=-1), axis=-1)
        return int(numbers.min()), int(numbers.max())

    @property
    def title(self) -> str:
        """The order of axes, as ``tp-pp-dp_shard``; or the listed devices, in runs.

        >>> Placement((1, 8, 1, 1, 1), (4, 5, 6, 7, 0, 1, 2, 3)).title
        'devices 4-7 0-3'
        """
        if not isinstance(self.order[0], int):
            return "-".join(map(str, self.order))
        return f"devices {listed_words(self.order)}"

    def words(self, devices_per_node: int) -> str:
        """The order of axes, innermost first, and the nodes of the groups along each.

        >>> Placement((2, 1, 4, 1, 1), ("dp_shard", "tp")).words(4)
        'dp_shard-tp: shard groups inside nodes, tensor-parallel groups across 2 nodes'
        """
        several = [axis for axis, size in zip(DEFAULT_ORDER, self.sizes, strict=True) if size > 1]
        order = [axis for axis in self.order if not isinstance(axis, int)] or several
        parts = []
        for axis in order:
            fewest, most = self.nodes_per_group(axis, devices_per_node)
            number = f"{most}" if fewest == most else f"{fewest} to {most}"
            parts.append(f"{_GROUPS[axis]} {'inside nodes' if most == 1 else f'across {number} nodes'}")
        return f"{self.title}: {', '.join(parts)}"


def listed_words(devices: Sequence[object]) -> str:
    """Listed devices in runs, as ``4-7 0-3``; at most eight of them."""
    numbers = np.array(devices)
    runs = [
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}"
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    ]
    more = f" ... ({len(runs)} runs)" if len(runs) > _MAX_RUNS else ""
    return " ".join(runs[:_MAX_RUNS]) + more


@lru_cache(maxsize=1024)
def _placement(sizes: tuple[int, ...], placement: tuple[str, ...] | tuple[int, ...]) -> Placement | None:
    if isinstance(placement[0], int):
        devices = tuple(int(device) for device in placement)
        moved = len(devices) == int(np.prod(sizes)) and devices != tuple(range(len(devices)))
        return Placement(sizes, devices) if moved else None
    by_axis = dict(zip(DEFAULT_ORDER, sizes, strict=True))
    order = placed_order(map(str, placement), by_axis)
    return None if order == placed_order((), by_axis) else Placement(sizes, order)


@lru_cache(maxsize=256)
def _devices(placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Device of every rank, and rank of every device."""
    order = placement.order
    if isinstance(order[0], int):
        devices = np.array(order)
    else:
        inner_first = [*order, *(axis for axis in DEFAULT_ORDER if axis not in order)]
        places = [DEFAULT_ORDER.index(axis) for axis in reversed(inner_first)]  # of the array's dimensions
        grid = np.arange(int(np.prod(placement.sizes))).reshape([placement.sizes[place] for place in places])
        devices = grid.transpose([places.index(place) for place in reversed(range(len(places)))]).reshape(-1)
    return tuple(devices.tolist()), tuple(np.argsort(devices).tolist())


def read_rank_file(path: str | Path, devices_per_node: int) -> tuple[int, ...]:
    """Read the device of every rank from a CSV file with the columns rank, node and device, all counted from 0.

    ``device`` is the local index of a device in its node (LOCAL_RANK).

    Raises:
        SpecError: The file cannot be read, lacks a column or a rank, or names a rank or a device twice.
    """
    path = Path(path)
    places: dict[int, tuple[int, int]] = {}
    taken: dict[tuple[int, int], int] = {}
    for number, row in _rows(path):
        rank, node, device = (_whole(path, number, name, row[name]) for name in _COLUMNS)
        if device >= devices_per_node:
            fix = f"use 0 to {devices_per_node - 1}"
            raise bad_file(path, f"line {number} has device {device}, and a node has {devices_per_node} devices", fix)
        if rank in places:
            raise bad_file(path, f"line {number} has rank {rank} once more", "name each rank once")
        if (node, device) in taken:
            where = f"device {device} of node {node}"
            rule = f"puts ranks {taken[node, device]} and {rank} on {where} (line {number})"
            raise bad_file(path, rule, "give each rank its own device")
        places[rank], taken[node, device] = (node, device), rank
    missing = next((rank for rank in range(len(places)) if rank not in places), None)
    if missing is not None or not places:
        rule = "has no ranks" if missing is None else f"has {len(places)} ranks, and not rank {missing}"
        raise bad_file(path, rule, "add a line for each rank, from 0 on")
    return tuple(node * devices_per_node + device for _, (node, device) in sorted(places.items()))


def _rows(path: Path) -> Iterable[tuple[int, dict[str, str]]]:
    """Line number and cells of every line, by column."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise bad_file(path, f"is larger than {_MAX_BYTES // 1024**2} MiB", "use a smaller file")
        with path.open(newline="", encoding="utf-8-sig") as opened:
            lines = list(csv.reader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "is not a text file with comma-separated values"
        raise bad_file(
            path, f"cannot be read: {reason}", "name a CSV file with the columns rank, node, device"
        ) from error
    columns = [cell.strip().lower() for cell in lines[0]] if lines else []
    absent = [name for name in _COLUMNS if name not in columns]
    if absent:
        raise bad_file(path, f"has no column {absent[0]} in its first line", "begin it with rank,node,device")
    for number, line in enumerate(lines[1:], 2):
        if any(cell.strip() for cell in line):
            yield (
                number,
                {name: line[columns.index(name)] if columns.index(name) < len(line) else "" for name in _COLUMNS},
            )


def _whole(path: Path, number: int, name: str, cell: str) -> int:
    text = cell.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise bad_file(path, f"line {number} has the {name} {text!r}", "write a whole number, from 0 on")
    return int(text)
