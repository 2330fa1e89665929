"""Layers run alone, and jobs run by real ranks, for the tests of families whose layers hand on several tensors."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.data import model_batch
from executor.loss import cross_entropy
from executor.model import build_stage
from executor.run import run_job
from simplan.program.footprint import layer_footprint
from simplan.program.run_spec import RunSpec
from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import Recompute
from simplan.spec.recompute import recomputation
from simplan.validate.structure import predicted_messages
from tests.executor.conftest import RANK_PROGRAMS
from tests.executor.test_equality import one_process
from tests.executor.test_level2 import issued
from tests.executor.test_recompute import SCALARS, STATES, traced

__all__ = ["LayerRun", "assert_kept_and_peak", "assert_ranks_equal_one_process"]

CPU = torch.device("cpu")
BATCH = 3
PEAK = 0.03
RELATIVE = 1e-9


class LayerRun:
    """One layer of a model, run forward and backward on what the layer before it would give."""

    def __init__(self, spec: ModelSpec, index: int, recompute: Recompute, precision: str) -> None:
        self._precision = precision
        self.layer: LayerSpec = spec.layers[index]
        self.state = STATES[precision]
        dtype = torch.bfloat16 if precision == "cast" else torch.float32
        self._stage = build_stage(spec, [index], dtype, CPU, 0, recompute=recompute)
        inputs, self._targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
        self._inputs = [inputs.to(dtype) if inputs.is_floating_point() else inputs]
        if index:
            before = spec.layers[index - 1]
            narrow = before.product_outputs if precision == "autocast" else ()
            self._inputs = [
                torch.randn(BATCH, *shape, dtype=torch.bfloat16 if number in narrow else dtype).requires_grad_()
                for number, shape in enumerate(before.output_shapes)
            ]
        for parameter in self._stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.backward(self.forward())  # whatever torch makes once
        for x in self._inputs:
            x.grad = None  # a release of what is older than a trace would count in it, or would not

    def forward(self) -> list[Tensor]:
        """Its outputs, or the loss."""
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with autocast if self._precision == "autocast" else nullcontext():
            out = self._stage(*self._inputs)
        if self.layer.kind is LayerKind.HEAD:
            return [cross_entropy(out, self._targets)]
        return list(out) if isinstance(out, tuple) else [out]

    def backward(self, outputs: list[Tensor]) -> None:
        """From a sum of all outputs, so that their gradients are autograd's alone, as within a model."""
        total = torch.stack([(2.0 * out).sum() for out in outputs]).sum()
        outputs.clear()
        total.backward()  # type: ignore[no-untyped-call]


def assert_kept_and_peak(spec: ModelSpec, index: int, recompute: Recompute, precision: str) -> None:
    """What forward leaves is, to the byte, what the layer keeps; the peak of both passes is within 3 %."""
    run = LayerRun(spec, index, recompute, precision)
    kept = recomputation(run.layer, recompute)
    footprint = layer_footprint(run.layer, BATCH, run.state, kept)
    widths = run.state.activation, run.state.residual
    handed_on = BATCH * sum(
        tensor.num_bytes(*widths) for tensor in run.layer.saved if tensor.name in kept.saved and tensor.handed_on
    )
    made = BATCH * run.layer.output_bytes(*widths)[0]
    outputs, held, _ = traced(run.forward)
    wanted = footprint.activations + footprint.logits - footprint.input_bytes
    is_head = run.layer.kind is LayerKind.HEAD
    assert 0 <= held - made - (wanted - handed_on) <= (SCALARS if is_head else 0)
    del outputs
    _, _, peak = traced(lambda: run.backward(run.forward()))
    assert wanted + footprint.backward_workspace == pytest.approx(peak, rel=PEAK) or is_head


def assert_ranks_equal_one_process(job: RunSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of every step in float64; and ranks issued what Level 2 says, twice as wide as in fp32."""
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    measurement = run_job(job, folder, rank_module="dumping_worker")
    losses, gradients = one_process(job, job.num_all_steps)
    assert measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for step, wanted in enumerate(gradients):
        seen = set()
        for rank in range(job.plan.num_devices):
            for name, found in torch.load(folder / f"gradients.rank{rank}.step{step}.pt").items():
                whole = name if name in wanted else "layers.0.wte.weight"  # a tied weight's copy on the last stage
                difference = float((found - wanted[whole]).abs().max() / wanted[whole].abs().max())
                assert difference < RELATIVE, (step, rank, name)
                seen.add(whole)
        assert seen == set(wanted)
    half = None if job.plan.bucket_bytes is None else job.plan.bucket_bytes // 2
    narrow = job.model_copy(update={"plan": job.plan.model_copy(update={"bucket_bytes": half})})
    for rank, predicted in predicted_messages(narrow).items():
        wide = [(kind, ranks, 2 * num_bytes, action) for kind, ranks, num_bytes, action in predicted]
        assert issued(measurement, rank) == wide
