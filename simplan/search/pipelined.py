"""Plans with a pipeline: numbers of their stages side by side, for all plans that share a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simplan.search.candidate import Candidate
from simplan.search.numbers import Numbers
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times
from simplan.spec.layer import CollectiveKind

__all__ = ["least_time_s", "step_times_s"]


def step_times_s(table: PipelineTable, numbers: Numbers, candidates: Sequence[Candidate]) -> list[float]:
    """Step times of plans that share a table."""
    sharded = (numbers.sharded(c, part) for c in candidates if c.shards_parameters for part in numbers.layout(c).parts)
    num_units = max((len(stage.units) for stage in sharded if stage), default=0)
    times = PipelineTimes.zeros(table.num_stages, table.num_ranks, len(candidates), num_units)
    for k, candidate in enumerate(candidates):
        _write(times, k, numbers, candidate)
    return [float(seconds) for seconds in pipeline_times(table, times)]


def _write(times: PipelineTimes, k: int, numbers: Numbers, c: Candidate) -> None:
    """Fills in the column of a plan."""
    layout, layers = numbers.layout(c), numbers.layers(c)
    stages, index = [numbers.stage_times(c, part) for part in layout.parts], layout.index
    times.compute_s[:, :, k] = np.array([stage.compute_s for stage in stages]).T[:, index]
    times.reduce_copy_s[:, k] = np.array([stage.reduce_copy_s for stage in stages])[index]
    times.reduce_s[:, k] = np.array([stage.reduce_s for stage in stages])[index]
    forward_s, backward_s = _sends_s(numbers, c)
    times.send_forward_s[:, k] = forward_s
    times.send_backward_s[:, k] = backward_s
    for number, part in enumerate(layout.parts):
        sharded = numbers.sharded(c, part)
        if sharded is not None:
            num_units, places = len(sharded.units), np.flatnonzero(index == number)
            times.gather_s[places, :num_units, k] = sharded.arrays.gather_s
            times.copy_s[places, :num_units, k] = sharded.arrays.copy_s
    ends = layout.placement[0], layout.placement[-1]
    if layers.tied_bytes and ends[0] != ends[1]:
        times.tied_s[k] = numbers.mesh(c).between_s(CollectiveKind.ALL_REDUCE, layers.tied_bytes, *ends)
    ranks = [numbers.rank(c, parts) for parts in layout.rank_parts]
    times.update_s[:, k] = [rank.update_s for rank in ranks]
    times.after_s[:, k] = [rank.after_s for rank in ranks]


def _sends_s(numbers: Numbers, c: Candidate) -> tuple[list[float], list[float]]:
    """By boundary, the messages forward and back."""
    layout, mesh, send = numbers.layout(c), numbers.mesh(c), CollectiveKind.SEND
    found: tuple[list[float], list[float]] = ([], [])
    for stage, crossing in enumerate(layout.crossings[:-1]):
        ends = layout.placement[stage], layout.placement[stage + 1]
        for way, (source, target) in enumerate((ends, ends[::-1])):
            found[way].append(sum(mesh.between_s(send, size, source, target) for size in crossing.sizes))
    return found


def least_time_s(numbers: Numbers, c: Candidate) -> float:
    """A bound: no rank is through before its first input is there, all its work is done, and what it gave is used.

    Where backward is whole the last action of a rank is a backward of its first stage, after which those of all stages
    before that come one after the other.
    """
    layout, m = numbers.layout(c), numbers.num_microbatches(c)
    forward_s, backward_s = _sends_s(numbers, c)
    stages = [numbers.stage_times(c, part) for part in layout.parts]
    busy_s = [0.0] * c.pp
    for stage, number in enumerate(layout.index.tolist()):
        f_s, b_s, last_s, i_s, w_s, _ = stages[number].compute_s
        each_s = b_s or i_s + w_s
        busy_s[layout.placement[stage]] += m * f_s + (m - 1) * each_s + (last_s or each_s)
    splits = any(stage.compute_s[3] for stage in stages)
    least_s = before_s = after_s = 0.0
    for rank in range(c.pp):
        least_s = max(least_s, before_s + busy_s[rank] + (0.0 if splits else after_s))
        if rank + 1 < c.pp:
            f_s, b_s, *_ = stages[layout.index[rank]].compute_s
            before_s += f_s + forward_s[rank]
            after_s += b_s + backward_s[rank]
    return least_s + min(numbers.rank(c, parts).update_s for parts in layout.rank_parts)
