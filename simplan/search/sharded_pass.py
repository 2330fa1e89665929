"""FSDP without a pipeline: forward and backward of one microbatch, unit by unit, as ``simplan.program.fsdp`` lowers it.

Between microbatches nothing is under way: the gathers of a microbatch are all used in it, and reductions, which come
with the last one or with each, are waited for at its end. So a step is equal microbatches, and one that also reduces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.sim.jit import jit

__all__ = ["LayerArrays", "UnitArrays", "sharded_pass_s", "sharded_peak"]


class LayerArrays(NamedTuple):
    """By layer: times, bytes, and the units that begin and end there (-1 for none).

    ``forward`` and ``backward`` have ``(during, after)`` bytes; of the head what is left when its module and its loss,
    which hooks come between, are taken away: these are ``model`` and ``loss``.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    unit: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    model: int
    loss: int


class UnitArrays(NamedTuple):
    """By unit: times of its gather and reduction and of the copies around them, and bytes."""

    gather_s: NDArray[np.float64]
    copy_s: NDArray[np.float64]
    reduce_copy_s: NDArray[np.float64]
    scatter_s: NDArray[np.float64]
    all_reduce_s: NDArray[np.float64]
    stays: NDArray[np.bool_]
    gathered: NDArray[np.int64]
    cast: NDArray[np.int64]
    whole: NDArray[np.int64]
    accumulated: NDArray[np.int64]
    scattered: NDArray[np.int64]
    output: NDArray[np.int64]


@jit
def sharded_pass_s(layers: LayerArrays, units: UnitArrays, reshards: bool, prefetch: int, reduces: bool) -> float:
    """Time of forward and backward of one microbatch.

    Args:
        layers, units: The model.
        reshards: Units are let go of after forward, but for those that stay.
        prefetch: Units that backward gathers ahead.
        reduces: Gradients are reduced, each unit's after its backward.
    """
    num_layers, num_units = len(layers.forward_s), len(units.gather_s)
    gathered = np.zeros(num_units, np.bool_)
    gathering = np.full(num_units, -1.0)
    now_s = shard_s = replicate_s = 0.0
    copied_s = before_s = 0.0  # ends of the last copy out of a buffer and of the one before it
    for layer in range(num_layers):
        unit = layers.begins[layer]
        if unit >= 0 and not gathered[unit]:
            shard_s = max(shard_s, now_s if layer == 0 else before_s) + units.gather_s[unit]
            now_s = max(now_s, shard_s) + units.copy_s[unit]
            before_s, copied_s = copied_s, now_s
            gathered[unit] = True
        now_s += layers.forward_s[layer]
        unit = layers.ends[layer]
        if unit >= 0 and reshards and not units.stays[unit]:
            gathered[unit] = False
    scattered_s = reduced_s = 0.0
    for layer in range(num_layers - 1, -1, -1):
        unit = layers.unit[layer]
        if layers.ends[layer] == unit:
            if not gathered[unit]:
                if gathering[unit] < 0.0:
                    shard_s += units.gather_s[unit]
                    gathering[unit] = shard_s
                now_s = max(now_s, gathering[unit]) + units.copy_s[unit]
                gathering[unit] = -1.0
                gathered[unit] = True
                before_s, copied_s = copied_s, now_s
            for ahead in range(unit - 1, max(-1, unit - 1 - prefetch), -1):
                if not gathered[ahead] and gathering[ahead] < 0.0:
                    shard_s = max(shard_s, copied_s) + units.gather_s[ahead]
                    gathering[ahead] = shard_s
        now_s += layers.backward_s[layer]
        if layers.begins[layer] != unit:
            continue
        gathered[unit] = False
        if reduces:
            now_s = max(now_s, scattered_s) + units.reduce_copy_s[unit]
            shard_s = max(shard_s, now_s) + units.scatter_s[unit]
            scattered_s = reduced_s = shard_s
            if units.all_reduce_s[unit] > 0.0:
                replicate_s = max(replicate_s, scattered_s) + units.all_reduce_s[unit]
                reduced_s = replicate_s
    return max(now_s, reduced_s)


@jit
def sharded_peak(
    layers: LayerArrays,
    units: UnitArrays,
    reshards: bool,
    prefetch: int,
    num_microbatches: int,
    replicated: bool,
    reduces_each: bool,
) -> int:
    """Most bytes above those between steps, over the first two microbatches and the last one."""
    num_layers, num_units = len(layers.forward_s), len(units.gather_s)
    widens = False
    for unit in range(num_units):
        widens = widens or units.accumulated[unit] != units.whole[unit]
    gathered = np.zeros(num_units, np.bool_)
    gathering = np.zeros(num_units, np.bool_)
    accumulates = np.zeros(num_units, np.bool_)
    held = peak = 0
    forward_buffer = reduce_buffer = reduced = 0
    for microbatch in range(min(num_microbatches, 3)):
        reduces = reduces_each or microbatch == min(num_microbatches, 3) - 1
        for layer in range(num_layers):
            unit = layers.begins[layer]
            if unit >= 0 and not gathered[unit]:
                size = units.gathered[unit]
                peak = max(peak, held + size + units.cast[unit])
                held += size
                peak = max(peak, held + size)
                held += size - forward_buffer
                forward_buffer = size
                gathered[unit] = True
            if layer == num_layers - 1:
                peak = max(peak, held + layers.model)
                held -= forward_buffer
                forward_buffer = 0
            peak = max(peak, held + layers.forward[layer, 0])
            held += layers.forward[layer, 1]
            unit = layers.ends[layer]
            if unit >= 0 and reshards and not units.stays[unit]:
                gathered[unit] = False
                held -= units.gathered[unit]
                peak = max(peak, held)
        for layer in range(num_layers - 1, -1, -1):
            unit = layers.unit[layer]
            if layers.ends[layer] == unit:
                if layer == num_layers - 1:
                    peak = max(peak, held + layers.loss)
                if not gathered[unit]:
                    size = units.gathered[unit]
                    if not gathering[unit]:
                        peak = max(peak, held + size + units.cast[unit])
                        held += size
                    gathering[unit] = False
                    peak = max(peak, held + size)
                    gathered[unit] = True
                for ahead in range(unit - 1, max(-1, unit - 1 - prefetch), -1):
                    if not gathered[ahead] and not gathering[ahead]:
                        peak = max(peak, held + units.gathered[ahead] + units.cast[ahead])
                        held += units.gathered[ahead]
                        gathering[ahead] = True
            peak = max(peak, held + layers.backward[layer, 0])
            held += layers.backward[layer, 1]
            if layers.begins[layer] != unit:
                continue
            if reduces:
                extra = 0 if accumulates[unit] and not widens else units.whole[unit]
                change = units.scattered[unit] - reduce_buffer - (units.gathered[unit] if gathered[unit] else 0)
                peak = max(peak, held + extra + change)
                held += change - (units.accumulated[unit] if accumulates[unit] else 0)
                reduce_buffer = units.scattered[unit]
                accumulates[unit] = False
                gathered[unit] = False
                peak = max(peak, held + units.output[unit])
                if replicated:
                    held += units.output[unit]
                    reduced += units.output[unit]
                    peak = max(peak, held)
            else:
                new = 0 if accumulates[unit] else units.accumulated[unit]
                during = new + (units.whole[unit] if widens else 0)
                if during:
                    peak = max(peak, held + during)
                held += new
                accumulates[unit] = True
                if gathered[unit]:
                    gathered[unit] = False
                    held -= units.gathered[unit]
                peak = max(peak, held)
        if reduces:
            held -= reduce_buffer + reduced
            reduce_buffer = reduced = 0
            peak = max(peak, held)
    return peak
