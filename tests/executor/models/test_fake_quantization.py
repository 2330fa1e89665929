"""Simulated quantization: bytes and kernels of linear layers as torch has them, and ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.models.fake_quantization import simulate
from executor.models.model import Stage
from executor.run import run_job
from simplan.model.fake_quantization import FakeQuantization, SimulatedLinears, with_fake_quantization
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import Recompute
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import MICROBATCH_SIZE, NUM_MICROBATCHES, make_job, make_model
from tests.executor.models.layer_runs import BATCH, STATES, LayerRun, traced
from tests.support.slow import slow_except

FORMS: dict[str, FakeQuantization] = {
    "int4": FakeQuantization(weights="int4", activations="int8", group_size=32),
    "int4_fp8": FakeQuantization(weights="int4_fp8", group_size=64),
    "intx_int4": FakeQuantization(weights="intx_int4", activations="int8", group_size=128),
    "fp8": FakeQuantization(weights="fp8", activations="fp8"),
    "mxfp4": FakeQuantization(weights="mxfp4", activations="mxfp4"),
}
MODEL = ModelSpec(
    family="llama",
    num_hidden_layers=2,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=512,
    vocab_size=500,
    seq_len=64,
)
WIDTHS = {"fp32": 4, "cast": 2}
CASES = [(name, recompute, width) for name in FORMS for recompute in ("none", "full") for width in WIDTHS]
SCALAR_BYTES = 24
"""Factors that torch makes tensors of, and smallest and largest numbers, per linear layer."""


def layer_run(name: str, recompute: Recompute, precision: str) -> LayerRun:
    form, width = FORMS[name], WIDTHS[precision]
    made = SimulatedLinears(form, width, width, BATCH)

    def prepare(stage: Stage) -> None:
        ((_, layer),) = stage.layers.items()
        simulate(layer, MODEL.layers[2], form)

    run = LayerRun(MODEL, 2, recompute, precision, state=STATES[precision], prepare=prepare)
    run.layer = with_fake_quantization(run.layer, made)
    return run


def kept_by_modules(layer: LayerSpec) -> int:
    """Bytes of scales that modules hold on to, which a trace of one pass has in part."""
    return sum(table.elements for table in layer.attributes)


@pytest.mark.parametrize(
    ("name", "recompute", "precision"),
    slow_except({("int4", "none", "cast"), ("mxfp4", "full", "cast"), ("intx_int4", "full", "fp32")}, CASES),
)
def test_saved_bytes_and_peak_are_torchs(name: str, recompute: Recompute, precision: str) -> None:
    """A block saves what is predicted to the byte, but for numbers per tensor, and peaks within 1 %."""
    run = layer_run(name, recompute, precision)
    outputs, held, _ = traced(run.forward)
    made = BATCH * run.layer.output_bytes(run.state.activation, run.state.residual)[0]
    del outputs
    linears = len([parameter for parameter in run.layer.parameters if len(parameter.shape) > 1])
    assert 0 <= held - made - run.kept_bytes() <= linears * SCALAR_BYTES + kept_by_modules(run.layer)
    footprint, peak = run.footprint(), run.peak()
    saved = footprint.activations + footprint.logits - footprint.input_bytes
    predicted = saved + max(map(sum, footprint.forward + footprint.backward))
    assert -0.01 * peak <= peak - predicted <= 0.01 * peak + kept_by_modules(run.layer)


VIEWS = ("view", "_unsafe_view", "t", "transpose", "expand", "detach", "slice", "reshape", "unsqueeze")
WITHOUT_DATA = ("empty", "empty_like", "new_empty", "empty_strided")
MATMULS = ("mm", "addmm")


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that are no matmuls and no views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in (*VIEWS, *WITHOUT_DATA, *MATMULS):
            tensors = (t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor))
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_except({("int4", "cast"), ("mxfp4", "fp32")}, [(name, width) for name in FORMS for width in WIDTHS]),
)
def test_operations_move_the_predicted_bytes(name: str, precision: str) -> None:
    """One linear layer, by what torch's dispatcher runs; within 4 %, for scales are left out."""
    dtype, width = (torch.float32, 4) if precision == "fp32" else (torch.bfloat16, 2)
    form = FORMS[name]
    block = next(layer for layer in MODEL.layers if layer.kind is LayerKind.BLOCK)
    module = nn.ModuleDict({"up": nn.Linear(256, 512, bias=False, dtype=dtype)})
    linear = next(p for p in block.parameters if p.name == "up.weight")
    spec = LayerSpec(
        key="up",
        kind=LayerKind.BLOCK,
        parameters=(linear,),
        operators=tuple(o for o in block.operators if o.kernel is not None and o.kernel.name == "up"),
    )
    simulate(module, spec, form)
    x = torch.randn(3, 64, 256, dtype=dtype, requires_grad=True)
    kernels = SimulatedLinears(form, width, width, BATCH).kernels
    inputs, weight = x.numel(), linear.num_elements
    with Counted() as forward:
        y = module["up"](x)
    gradient = torch.ones_like(y)
    with Counted() as backward:
        y.backward(gradient)
    for counted, number in ((forward, 0), (backward, 1)):
        predicted = kernels.weights[number] * weight
        predicted += kernels.activations[number] * inputs if kernels.activations is not None else 0
        assert counted.num_bytes == pytest.approx(predicted, rel=0.04)


def job_with(form: FakeQuantization, plan: dict[str, Any]) -> RunSpec:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model: ModelSpec = make_model("llama", hidden_size=128, intermediate_size=256, **heads)
    job = make_job("none", model=model, plan=plan)
    size = NUM_MICROBATCHES * job.plan.dp * job.plan.microbatch_size
    training = TrainingSpec(global_batch_size=size, precision="fp32", fake_quantization=form)
    return job.model_copy(update={"training": training})


PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2},
    "zero3-recompute": {"dp_shard": 2, "recompute": "full"},
}
RANKS = [(name, plan) for name in ("int4", "intx_int4", "fp8", "mxfp4") for plan in PLANS]


@pytest.mark.parametrize(("name", "plan"), slow_except(set(), RANKS))
def test_ranks_equal_one_process_and_issue_what_is_predicted(name: str, plan: str, tmp_path: Path) -> None:
    """Fake quantizers round gathered weights under FSDP2; ranks may round a number near the middle up."""
    together = run_job(job_with(FORMS[name], PLANS[plan]), tmp_path / "ranks")
    alone = run_job(job_with(FORMS[name], {"microbatch_size": 2 * MICROBATCH_SIZE}), tmp_path / "one")
    assert together.losses == pytest.approx(alone.losses, rel=1e-3)
    assert issued_as_predicted(together)
