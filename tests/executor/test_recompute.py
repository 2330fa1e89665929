"""What layers keep from forward to backward, by torch's own trace of allocations: to the byte, for every split,
precision and kind of recomputation that the executor runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from executor.loss import cross_entropy
from executor.model import Stage, build_stage
from executor.parallel import Parallel
from simplan.program.footprint import layer_footprint
from simplan.program.uncollected import uncollected
from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import Recompute
from simplan.spec.recompute import recomputation
from simplan.spec.shard import Shard
from simplan.spec.software import StateBytes

CPU = torch.device("cpu")
BATCH = 3
SCALARS = 16  # the loss, and the sum of weights that it is divided by
STATES = {
    "fp32": StateBytes(parameter=4, gradient=4, activation=4, boundary=4),
    "autocast": StateBytes(parameter=4, gradient=4, activation=2, residual=4, boundary=4, weight_copy=2),
    "cast": StateBytes(parameter=2, gradient=2, activation=2, boundary=2),
}
SHARDS = {
    "whole": Shard(),
    "tensor": Shard(tp=2),
    "sequence": Shard(tp=2, sequence_parallel=True),
    "all_gather": Shard(cp=2, cp_comm="all_gather"),
    "a2a": Shard(cp=2, cp_comm="a2a"),
    "sequence-a2a": Shard(tp=2, sequence_parallel=True, cp=2, cp_comm="a2a"),
}


def model_of(family: str) -> ModelSpec:
    return ModelSpec(
        family=family,
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8 if family == "gpt" else 4,
        intermediate_size=256,
        vocab_size=500,
        seq_len=64,
    )


def traced(run: Callable[[], Any], *, onednn: bool = False) -> tuple[Any, int, int]:
    """What it gives, the bytes it leaves allocated, and the most it had.

    Without oneDNN: on CPUs with AVX-512 it copies bf16 matrices into a scratch of its own, as no GPU kernel does.
    Convolutions need it, for without it they make a copy of every window. Without garbage collection: what an earlier
    trace left in cycles must not be released in this one.
    """
    was_enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment] # a property of the module
    try:
        with uncollected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            result = run()
    finally:
        torch.backends.mkldnn.enabled = was_enabled  # a property too
    assert trace.profiler is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, held, peak


class LayerRun:
    """One layer, run forward and backward, once it is prepared."""

    def __init__(
        self,
        family: str,
        shard: str,
        index: int,
        recompute: Recompute,
        precision: str,
        prepare: Callable[[Stage], None] | None = None,
    ) -> None:
        spec, self._precision = model_of(family), precision
        self._parallel = Parallel.silent(SHARDS[shard])
        self.layer: LayerSpec = spec.layers_of(SHARDS[shard])[index]
        self.state = STATES[precision]
        dtype = torch.bfloat16 if precision == "cast" else torch.float32
        self._stage = build_stage(spec, [index % len(spec.layers)], dtype, CPU, 0, self._parallel, recompute)
        if prepare is not None:
            prepare(self._stage)
        tokens = torch.randint(spec.vocab_size, (BATCH, spec.seq_len // SHARDS[shard].cp))
        self._targets = tokens.flip(1)
        self._input = tokens
        if self.layer.kind is not LayerKind.EMBEDDING:
            own = self.layer.inputs[0].elements // spec.hidden_size
            self._input = torch.randn(BATCH, own, spec.hidden_size, dtype=dtype).requires_grad_()
        for parameter in self._stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.backward(self.forward())  # whatever torch makes once
        self._input.grad = None  # a release of what is older than a trace would count in it, or would not

    def forward(self) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with autocast if self._precision == "autocast" else nullcontext():
            out: Tensor = self._stage(self._input)
        return cross_entropy(out, self._targets, self._parallel) if self.layer.kind is LayerKind.HEAD else out

    def backward(self, out: Tensor) -> None:
        torch.autograd.backward(out, None if out.dim() == 0 else torch.ones_like(out))


CASES = [
    (family, shard, index, recompute, precision)
    for family in ("gpt", "llama")
    for shard in SHARDS
    for index, modes in ((0, ("none",)), (1, ("none", "selective", "selective_op", "full")), (-1, ("none",)))
    for recompute in modes
    for precision in STATES
]


@pytest.mark.parametrize(("family", "shard", "index", "recompute", "precision"), CASES)
def test_kept_bytes_are_those_of_the_layer(
    family: str, shard: str, index: int, recompute: Recompute, precision: str
) -> None:
    run = LayerRun(family, shard, index, recompute, precision)
    out, held, _ = traced(run.forward)
    kept = recomputation(run.layer, recompute)
    footprint = layer_footprint(run.layer, BATCH, run.state, kept)
    wanted = footprint.activations + footprint.logits - footprint.input_bytes
    if family == "gpt" and precision == "cast":  # LayerNorm's statistics of 16-bit input: fp32 on CUDA only
        wanted -= BATCH * sum(
            2 * t.elements for t in run.layer.saved if t.name in kept.saved and t.name.endswith("statistics")
        )
    result = 0 if out.dim() == 0 else out.nbytes
    assert 0 <= held - result - wanted <= (SCALARS if run.layer.kind is LayerKind.HEAD else 0)


@pytest.mark.parametrize("precision", STATES)
@pytest.mark.parametrize(
    ("shard", "recompute"),
    [
        *itertools.product(["whole", "sequence", "a2a"], ["none", "full"]),
        ("whole", "selective_op"),
        ("a2a", "selective_op"),
        ("sequence", "selective_op"),
    ],
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_peak_of_backward_is_that_of_the_layer(family: str, shard: str, recompute: Recompute, precision: str) -> None:
    """Of a block; the test also holds its output, but not its input, which was there before."""
    run = LayerRun(family, shard, 1, recompute, precision)
    footprint = layer_footprint(run.layer, BATCH, run.state, recomputation(run.layer, recompute))
    _, _, peak = traced(lambda: run.backward(run.forward()))
    kept = footprint.activations - footprint.input_bytes + footprint.output_bytes
    assert kept + footprint.backward_workspace == pytest.approx(peak, rel=0.03)
