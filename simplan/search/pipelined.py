"""Plans with a pipeline that share a table, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.search.column import Column
from simplan.sim.pipeline.peaks import PipelineBytes, pipeline_peaks
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times

__all__ = ["peaks_bytes", "step_times_s"]


def peaks_bytes(table: PipelineTable, columns: Sequence[Column]) -> list[int]:
    """Memory of the worst rank of plans that share a table."""
    held = PipelineBytes.zeros(table.num_stages, table.num_ranks, len(columns))
    for k, column in enumerate(columns):
        column.write_bytes(held, k, table.num_microbatches)
    return [int(peak) for peak in pipeline_peaks(table, held).max(axis=0)]


def step_times_s(table: PipelineTable, columns: Sequence[Column]) -> list[float]:
    """Step times of plans that share a table."""
    num_units = max(column.num_units for column in columns)
    times = PipelineTimes.zeros(table.num_stages, table.num_ranks, len(columns), num_units)
    for k, column in enumerate(columns):
        column.write_times(times, k)
    return [float(seconds) for seconds in pipeline_times(table, times)]
