"""Plans with a pipeline that share a table, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simplan.program.complete import Unshard
from simplan.search.layout import Layout
from simplan.search.passes import Passes
from simplan.search.upkeep import Upkeep
from simplan.sim.pipeline.peaks import PipelineBytes, pipeline_peaks
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times

__all__ = ["Pipelined", "peaks_bytes", "step_times_s"]

_Integers = NDArray[np.int64]
_Item = TypeVar("_Item", Passes, Upkeep)
_Array = TypeVar("_Array", NDArray[np.int64], NDArray[np.float64])


class Pipelined(NamedTuple):
    """A plan, in two halves that it shares with others.

    Attributes:
        passes, upkeep: These.
        table: Arguments of ``compiled_table``.
    """

    passes: Passes
    upkeep: Upkeep
    table: tuple[str, int, int, int, Unshard]


def peaks_bytes(table: PipelineTable, plans: Sequence[Pipelined]) -> list[int]:
    """Memory of the worst rank of plans that share a table."""
    passes, upkeeps = _half([plan.passes for plan in plans]), _half([plan.upkeep for plan in plans])
    held = PipelineBytes.zeros(table.num_stages, table.num_ranks, len(plans))
    slots = table.memory_slots
    found = passes.by_stage([one.changes for one in passes.distinct], slots)
    found += upkeeps.by_stage([one.changes for one in upkeeps.distinct], slots)
    held.during[slots], held.after[slots] = found
    made, crossed = passes.by_stage([one.crossing_bytes for one in passes.distinct])
    held.sent[0], held.sent[1, 1:] = made, crossed[:-1]
    resting = upkeeps.by_plan([one.resting_bytes for one in upkeeps.distinct])
    held.base[:] = resting[0] + passes.by_plan([one.buffer_bytes for one in passes.distinct])
    held.extra[:] = resting[1]
    peaks: list[int] = pipeline_peaks(table, held).max(axis=0).tolist()
    return peaks


def step_times_s(table: PipelineTable, plans: Sequence[Pipelined]) -> list[float]:
    """Step times of plans that share a table."""
    passes, upkeeps = _half([plan.passes for plan in plans]), _half([plan.upkeep for plan in plans])
    num_units = max(one.num_units for one in upkeeps.distinct)
    units_s = upkeeps.by_stage([_padded(one.units_s, num_units) for one in upkeeps.distinct])
    sends_s = passes.by_plan([one.sends_s for one in passes.distinct])
    send_s = np.zeros((2, table.num_stages, len(plans)))
    send_s[0, :-1] = send_s[1, 1:] = sends_s
    reduce_copy_s, reduce_s, divide_s = upkeeps.by_stage([one.reduce_s for one in upkeeps.distinct])
    update_s, after_s = upkeeps.by_plan([one.update_s for one in upkeeps.distinct])
    gather_s, copy_s = np.ascontiguousarray(units_s.transpose(0, 2, 1, 3))
    times = PipelineTimes(
        compute_s=passes.by_stage([one.compute_s for one in passes.distinct]),
        send_s=send_s,
        gather_s=gather_s,
        copy_s=copy_s,
        reduce_copy_s=reduce_copy_s,
        reduce_s=reduce_s + divide_s if table.num_microbatches > 1 else reduce_s,
        tied_s=np.array([one.tied_s for one in passes.distinct])[passes.of_plan],
        update_s=np.ascontiguousarray(update_s),
        after_s=np.ascontiguousarray(after_s),
    )
    seconds: list[float] = pipeline_times(table, times).tolist()
    return seconds


class _Half(NamedTuple, Generic[_Item]):
    """One half of all plans.

    Attributes:
        distinct: Those that differ.
        of_plan: ``(plans,)``: which of them a plan has.
        part_of: ``(stages, plans)``: by stage, the place of its part when all parts of all that differ stand in a row.
    """

    distinct: list[_Item]
    of_plan: _Integers
    part_of: _Integers

    def by_stage(self, of_parts: Sequence[_Array], some: _Integers | None = None) -> _Array:
        """From ``(parts, ..., n)`` of each that differs to ``(n, ..., stages, plans)``, or to some of the n."""
        of_all = np.concatenate(of_parts).T
        return (of_all if some is None else of_all[..., some, :]).take(self.part_of, axis=-1)

    def by_plan(self, found: Sequence[_Array]) -> _Array:
        """From an array of each that differs to one with the plans as its last axis."""
        of_plans = np.array(found)[self.of_plan]
        return of_plans.transpose(*range(1, of_plans.ndim), 0)


def _half(items: Sequence[_Item]) -> _Half[_Item]:
    distinct = list(dict.fromkeys(items))
    place_of = {item: place for place, item in enumerate(distinct)}
    of_plan = np.array([place_of[item] for item in items])
    layouts: list[Layout] = [item.layout for item in distinct]
    begins = list(accumulate((len(layout.parts) for layout in layouts[:-1]), initial=0))
    part_of = np.array([layout.part_of for layout in layouts]).T + np.array(begins)
    return _Half(distinct, of_plan, part_of.take(of_plan, axis=1))


def _padded(units_s: NDArray[np.float64], num_units: int) -> NDArray[np.float64]:
    missing = num_units - units_s.shape[1]
    return np.pad(units_s, ((0, 0), (0, missing), (0, 0))) if missing else units_s
