"""Whole pipelines in machine code: tables, step times and peaks of memory, without compilation."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.table import Row
from simplan.sim.pipeline.peaks import PipelineBytes, pipeline_peaks
from simplan.sim.pipeline.slots import Slot
from simplan.sim.pipeline.table import PipelineTable, compiled_table
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times

__all__ = ["pipeline_speed"]

_ROUNDS = 9
_LANES = (1, 8, 32)


def pipeline_speed() -> list[Row]:
    """Interleaved 1F1B of 64 ranks, 512 microbatches and 4 virtual stages, and what each further plan costs.

    Processor time, since the machine may be doing other things.
    """
    table = compiled_table("interleaved_1f1b", 64, 512, 4, "none")
    num_events = int((table.segments[:, 1] * table.segments[:, 2]).sum())

    def once() -> None:
        made = compiled_table("interleaved_1f1b", 64, 512, 4, "none")
        pipeline_times(made, _times(made, 1))

    whole_s = _seconds(once)
    by_lanes = []
    for lanes in _LANES:
        times, held = _times(table, lanes), _bytes(table, lanes)
        times_s = _seconds(lambda times=times: pipeline_times(table, times))  # type: ignore[misc]
        peaks_s = _seconds(lambda held=held: pipeline_peaks(table, held))  # type: ignore[misc]
        by_lanes.append(f"{lanes}: {1e3 * times_s / lanes:.2f} ms and {1e3 * peaks_s / lanes:.2f} ms")
    return [
        Row(
            "table and step time of interleaved 1F1B, p=64 m=512 v=4, Level 1, compiled",
            "under 20 ms",
            f"{1e3 * whole_s:.1f} ms ({num_events:,} events, {1e9 * whole_s / num_events:.0f} ns each)",
            whole_s < 0.02,
        ),
        Row(
            "the same, step time and peaks of memory per plan, by plans at once",
            "",
            "; ".join(by_lanes),
            True,
        ),
    ]


def _times(table: PipelineTable, lanes: int) -> PipelineTimes:
    """Stages that differ by up to a tenth, messages of a tenth of a forward."""
    rng = np.random.default_rng(0)
    times = PipelineTimes.zeros(table.num_stages, table.num_ranks, lanes)
    times.forward_s[:] = rng.uniform(1.0, 1.1, times.forward_s.shape)
    times.backward_s[:] = times.backward_last_s[:] = 2 * times.forward_s
    times.send_s[:] = 0.1
    return times


def _bytes(table: PipelineTable, lanes: int) -> PipelineBytes:
    held = PipelineBytes.zeros(table.num_stages, table.num_ranks, lanes)
    held.during[Slot.FORWARD] = held.after[Slot.FORWARD] = 100
    held.during[Slot.BACKWARD : Slot.INPUT] = 50
    held.after[Slot.BACKWARD : Slot.INPUT] = -100
    held.sent[:] = 1
    return held


def _seconds(run: Callable[[], object]) -> float:
    run()
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start_s = time.process_time()
        run()
        best_s = min(best_s, time.process_time() - start_s)
    return best_s
