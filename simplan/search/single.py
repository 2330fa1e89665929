"""Plans without a pipeline: microbatches one after the other."""

from __future__ import annotations

from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.numbers import Numbers
from simplan.search.replicas import reduced_backward_s
from simplan.search.sharded_pass import sharded_pass_s, sharded_peak
from simplan.search.stage_numbers import pass_runs, walked

__all__ = ["peak_bytes", "step_time_s"]


def step_time_s(numbers: Numbers, c: Candidate) -> float:
    """The time of a step: nothing is under way between microbatches, and the last one, or each, reduces gradients."""
    part, layers, m, software = numbers.whole, numbers.layers(c), numbers.num_microbatches(c), numbers.software
    if c.shards_parameters:
        [stage] = numbers.sharded(c, [part])
        arrays = numbers.whole_model(c, stage.units)
        last_s = sharded_pass_s(arrays, stage.arrays, _reshards(c), software.backward_prefetch, True)
        each_s = last_s
        if m > 1 and not _reduces_each(c):
            each_s = sharded_pass_s(arrays, stage.arrays, _reshards(c), software.backward_prefetch, False)
    else:
        forward_s = layers.pass_s(part, Phase.FORWARD)
        each_s = last_s = forward_s + layers.pass_s(part, Phase.BACKWARD)
        if c.dp * c.cp > 1:
            last_s = forward_s + reduced_backward_s(layers, part, numbers.buckets(c, part))
    [states] = numbers.states(c, [part])
    update_s = states.update_s
    if c.shards_optimizer_only:
        dealt = numbers.dealt(c, (part,))
        update_s = dealt.update_s + dealt.broadcast_s
    return (m - 1) * each_s + last_s + states.completing_s(divides=m > 1) + numbers.host_step_s + update_s


def peak_bytes(numbers: Numbers, c: Candidate) -> int:
    """Memory of a rank at its worst instant."""
    part, layers, m = numbers.whole, numbers.layers(c), numbers.num_microbatches(c)
    [states], widths = numbers.states(c, [part]), layers.state
    trained = numbers.dealt(c, (part,)).elements if c.shards_optimizer_only else states.elements
    base = states.elements * (widths.parameter + widths.gradient) + states.table_bytes + layers.batch_bytes * m
    base += trained * widths.optimizer_bytes(numbers.training.optimizer)
    if c.shards_parameters:
        [stage] = numbers.sharded(c, [part])
        arrays, prefetch = numbers.whole_model(c, stage.units), numbers.software.backward_prefetch
        replicated = c.dp_replicate > 1
        return base + sharded_peak(arrays, stage.arrays, _reshards(c), prefetch, m, replicated, _reduces_each(c))
    runs = [run for phase in (Phase.FORWARD, Phase.BACKWARD) for run in pass_runs(layers, part, phase)]
    rebuilt = states.elements * widths.gradient if c.dp * c.cp > 1 else 0  # DDP's second buckets
    return base + max(rebuilt, walked(runs).during)


def _reduces_each(c: Candidate) -> bool:
    return c.grad_sync == "microbatch"


def _reshards(c: Candidate) -> bool:
    return c.zero_stage == 3 and c.reshard_after_forward
