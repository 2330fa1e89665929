"""Plans without a pipeline: microbatches one after the other."""

from __future__ import annotations

from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.numbers import Numbers
from simplan.search.part import Part
from simplan.search.rank_numbers import completing_s
from simplan.search.replicas import reduced_backward_s
from simplan.search.sharded_pass import sharded_pass_s, sharded_peak
from simplan.search.sharding import layer_arrays
from simplan.search.stage_numbers import Walk, pass_bytes

__all__ = ["peak_bytes", "step_time_s"]


def step_time_s(numbers: Numbers, c: Candidate) -> float:
    """The time of a step: nothing is under way between microbatches, and the last one reduces gradients."""
    part, layers, m, software = _whole(numbers), numbers.layers(c), numbers.num_microbatches(c), numbers.software
    if c.shards_parameters:
        stage = numbers.sharded(c, part)
        assert stage is not None
        arrays = layer_arrays(layers, part, stage.units)
        last_s = sharded_pass_s(arrays, stage.arrays, _reshards(c), software.backward_prefetch, True)
        each_s = 0.0
        if m > 1:
            each_s = sharded_pass_s(arrays, stage.arrays, _reshards(c), software.backward_prefetch, False)
    else:
        forward_s = layers.pass_s(part, Phase.FORWARD)
        each_s = last_s = forward_s + layers.pass_s(part, Phase.BACKWARD)
        if c.dp * c.cp > 1:
            data_s, limit = numbers.mesh(c).data_s, numbers.bucket_bytes
            last_s = forward_s + reduced_backward_s(layers, part, Phase.BACKWARD, software, limit, data_s)
    rank = numbers.rank(c, (part,))
    completing = completing_s(layers, numbers.mesh(c), part, c, divides=m > 1)
    return (m - 1) * each_s + last_s + completing + rank.update_s + rank.after_s


def peak_bytes(numbers: Numbers, c: Candidate) -> int:
    """Memory of a rank at its worst instant."""
    part, layers, m = _whole(numbers), numbers.layers(c), numbers.num_microbatches(c)
    rank = numbers.rank(c, (part,))
    base = rank.resting_bytes + layers.batch_bytes * m
    if c.shards_parameters:
        stage = numbers.sharded(c, part)
        assert stage is not None
        arrays, prefetch = layer_arrays(layers, part, stage.units), numbers.software.backward_prefetch
        return base + sharded_peak(arrays, stage.arrays, _reshards(c), prefetch, m, c.dp_replicate > 1)
    walk = Walk()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        walk.add(*pass_bytes(layers, part, phase))
    return base + max(rank.rebuild_bytes, walk.change.during)


def _whole(numbers: Numbers) -> Part:
    return Part(0, len(numbers.model.layers), tied=numbers.model.tied_embeddings)


def _reshards(c: Candidate) -> bool:
    return c.zero_stage == 3 and c.reshard_after_forward
