"""Candidate plans of a search as a table; columns have the names of ``ParallelPlan`` fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from simplan.plan.plan import ParallelPlan, Recompute
from simplan.plan.schedules import SCHEDULE_FACTS

Column = NDArray[np.int64]
Categories = Mapping[str, tuple[Any, ...]]
"""Values of each non-numeric field; columns store indices into them."""

FIELDS = (
    "dp_replicate", "dp_shard", "zero_stage", "reshard_after_forward", "tp", "sequence_parallel", "cp", "cp_comm",
    "ep", "pp", "virtual_stages", "schedule", "microbatch_size", "microbatch_sizes", "recompute", "recompute_modules",
    "grad_sync", "placement",
)  # fmt: skip
"""Plan fields that a search varies."""

_FLAGS = ("reshard_after_forward", "sequence_parallel")


def categories(
    recompute_modules: Sequence[tuple[str, ...]] = (),
    placements: Sequence[tuple[str, ...] | tuple[int, ...]] = (),
) -> Categories:
    """Values of the non-numeric plan fields.

    Args:
        recompute_modules: Module lists of a space. None (no modules named) is added in front.
        placements: Placements of a space. None (that of the mesh) is added in front.
    """
    return MappingProxyType(
        {
            "cp_comm": ("ring", "all_gather", "a2a"),
            "schedule": ("none", *SCHEDULE_FACTS),
            "recompute": get_args(Recompute),
            "recompute_modules": (None, *recompute_modules),
            "grad_sync": (None, "step", "microbatch"),
            "microbatch_sizes": (None, "balanced"),
            "placement": (None, *placements),
        }
    )


def plan_order(plan: ParallelPlan) -> tuple[Any, ...]:
    """Sort key that breaks ties between equally good plans; None sorts first."""
    values = (getattr(plan, name) for name in (*FIELDS, "recompute_layers"))
    return tuple((value is not None, isinstance(value, tuple) and isinstance(value[0], int), value) for value in values)


class Candidates:
    """Plans that differ only in ``FIELDS``.

    Args:
        base: Plan with the other fields.
        values: Values of the non-numeric fields.
        columns: By field, ``(num_rows,)`` integers.
    """

    __slots__ = ("base", "columns", "values")

    def __init__(self, base: ParallelPlan, values: Categories, columns: Mapping[str, Column]) -> None:
        self.base, self.values, self.columns = base, values, columns

    @classmethod
    def of_rows(
        cls, base: ParallelPlan, values: Categories, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> Candidates:
        """Make a table from rows of values of the fields ``names``, which are those of ``FIELDS`` in any order."""
        columns = {}
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            place = {value: number for number, value in enumerate(values.get(name, ()))}
            columns[name] = np.array([place[value] for value in column] if place else column, np.int64)
        return cls(base, values, {name: columns[name] for name in FIELDS})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle; read-only mappings cannot be."""
        return Candidates, (self.base, dict(self.values), self.columns)

    def __len__(self) -> int:
        return len(self.columns["pp"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def take(self, rows: NDArray[Any]) -> Candidates:
        """Select rows by index or mask."""
        return Candidates(self.base, self.values, {name: column[rows] for name, column in self.columns.items()})

    def with_value(self, name: str, value: Any) -> Candidates:
        """Copy of the table with one field set to a value in all rows."""
        number = self.values[name].index(value) if name in self.values else int(value)
        return Candidates(self.base, self.values, {**self.columns, name: np.full(len(self), number)})

    def parts(self, min_rows: int) -> list[Column]:
        """Rows of parts of at least ``min_rows`` rows; rows of equal layers are in one part, which bounds share."""
        columns = np.stack([self[name] for name in ("tp", "cp", "ep", "microbatch_size")])
        _, kinds = np.unique(columns, axis=1, return_inverse=True)
        order = np.argsort(kinds.reshape(-1), kind="stable")
        ends = np.flatnonzero(np.diff(kinds.reshape(-1)[order])) + 1
        cuts = [0]
        for end in ends.tolist():
            if min(end - cuts[-1], len(self) - end) >= min_rows:
                cuts.append(end)
        return np.split(order, cuts[1:])

    @staticmethod
    def joined(tables: Sequence[Candidates]) -> Candidates:
        """Concatenate at least one table of one search."""
        first = tables[0]
        columns = {name: np.concatenate([table[name] for table in tables]) for name in FIELDS}
        return Candidates(first.base, first.values, columns)

    def plan(self, row: int) -> ParallelPlan:
        """Plan of a row."""
        fields: dict[str, Any] = {name: int(column[row]) for name, column in self.columns.items()}
        fields |= {name: self.values[name][fields[name]] for name in self.values}
        fields |= {name: bool(fields[name]) for name in _FLAGS}
        return self.base.model_copy(update=fields)

    def has(self, name: str, value: Any) -> NDArray[np.bool_]:
        """``(num_rows,)`` True where a field has a value."""
        wanted = self.values[name].index(value) if name in self.values else int(value)
        return np.asarray(self.columns[name] == wanted)

    @property
    def dp(self) -> Column:
        """Data-parallel ranks."""
        return self["dp_replicate"] * self["dp_shard"]

    @property
    def num_shards(self) -> Column:
        """Ranks over which ZeRO shards."""
        return self["dp_shard"] * self["cp"]

    @property
    def num_devices(self) -> Column:
        """Devices that a plan needs."""
        return self.dp * self["tp"] * self["cp"] * self["pp"]

    @property
    def shards_parameters(self) -> NDArray[np.bool_]:
        """See ``ParallelPlan``."""
        return np.asarray((self["zero_stage"] >= 2) & (self.num_shards > 1))

    @property
    def reduces_every_microbatch(self) -> NDArray[np.bool_]:
        """See ``ParallelPlan``."""
        by_default = self.has("grad_sync", None) & self.shards_parameters & (self["pp"] == 1)
        return np.asarray(by_default | self.has("grad_sync", "microbatch"))

    @property
    def shards_optimizer_only(self) -> NDArray[np.bool_]:
        """See ``ParallelPlan``."""
        return np.asarray((self["zero_stage"] == 1) & (self.num_shards > 1))
