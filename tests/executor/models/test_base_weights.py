"""Frozen weights of few bits: bytes of layers as torch allocates them, and ranks against one process."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor.checks import check_job
from executor.models.base_weights import quantize
from executor.models.model import Stage
from executor.run import run_job
from simplan import catalog
from simplan.errors import NotModelledError
from simplan.model.base_weights import BaseWeights, FrozenBase, with_frozen_base
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.runs.run_spec import RunSpec
from simplan.software.software import StateBytes
from simplan.training import TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import MICROBATCH_SIZE, NUM_MICROBATCHES, make_job, make_model
from tests.executor.models.layer_runs import PEAK, LayerRun, traced
from tests.executor.models.test_lora import model_of
from tests.support.problems import says

BNB = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
TORCHAO: dict[str, Any] = {"format": "nf4", "library": "torchao", "double_quantization": True}
FORMATS: dict[str, BaseWeights] = {
    "torchao": BaseWeights(**TORCHAO),
    "nf4": BaseWeights(format="nf4"),
    "nf4-double": BaseWeights(format="nf4", double_quantization=True),
    "fp4-floats": BaseWeights(format="fp4", storage="fp32"),
}
CASES = [pytest.param(name, marks=[BNB] if form.library is None else []) for name, form in FORMATS.items()]
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
WIDTHS = {"fp32": 4, "autocast": 2}


def layer_run(
    name: str, recompute: Recompute, precision: str, targets: tuple[str, ...] = ("q", "v"), **fields: Any
) -> LayerRun:
    """A block with packed weights, which gets what a block before it gives."""
    spec, base, width = model_of("llama", targets, **SIZES, qk_norm=None, **fields), FORMATS[name], WIDTHS[precision]
    frozen = FrozenBase(
        weights=base.stored(width),
        activation_bytes=width,
        compute_bytes=width,
        adapter_bytes=width,
        attention_bytes=width,
        autocast=True,
        peft=False,
    )
    copy = width if precision == "autocast" else 0
    state = StateBytes(
        parameter=4, frozen=width, gradient=4, activation=width, boundary=width, weight_copy=copy, base=frozen
    )

    def pack(stage: Stage) -> None:
        ((_, layer),) = stage.layers.items()
        quantize(layer, spec.layers[2], base)

    run = LayerRun(spec, 2, recompute, precision, state=state, prepare=pack)
    run.layer = with_frozen_base(run.layer, frozen)
    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", WIDTHS)
def test_saved_bytes_are_torchs(name: str, recompute: Recompute, precision: str) -> None:
    """To the byte: packed weights save nothing besides themselves."""
    layer_run(name, recompute, precision).assert_kept()


@pytest.mark.parametrize("name", CASES[1:2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_norms_of_packed_weights_take_what_is_predicted(name: str, recompute: Recompute) -> None:
    """DoRA unpacks a weight once more for the norms of its rows, and saves no more than of other weights."""
    run = layer_run(name, recompute, "fp32", lora_dora=True)
    run.assert_kept()
    run.assert_peak(within=PEAK)


EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 500,
    "seq_len": 64, "num_experts": 4, "top_k": 2, "moe_intermediate_size": 128, "lora_rank": 4, "lora_targets": ("q",),
}  # fmt: skip


@BNB
@pytest.mark.parametrize("targets", [("q",), ("q", "experts_up", "experts_down")])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_unpacked_experts_are_kept_for_backward(recompute: Recompute, targets: tuple[str, ...]) -> None:
    """bitsandbytes' parametrization unpacks all experts at once; with adapters their sum is kept in its place."""
    spec = ModelSpec(family="moe", **{**EXPERTS, "lora_targets": targets})
    base = BaseWeights(format="nf4", experts=True)
    width = 4
    frozen = FrozenBase(
        weights=base.stored(width),
        experts=base.stored_experts(width),
        activation_bytes=width,
        compute_bytes=width,
        adapter_bytes=width,
        attention_bytes=width,
        autocast=True,
        peft=False,
    )

    def pack(stage: Stage) -> None:
        ((_, layer),) = stage.layers.items()
        quantize(layer, spec.layers[2], base)

    state = StateBytes(parameter=4, frozen=4, gradient=4, activation=4, boundary=4, base=frozen)
    run = LayerRun(spec, 2, recompute, "fp32", state=state, prepare=pack)
    run.layer = with_frozen_base(run.layer, frozen)
    assert sum("experts" in p.name and p.stored is not None for p in run.layer.parameters) == 3
    run.assert_kept()
    run.assert_peak(within=PEAK)


@pytest.mark.parametrize("name", CASES[1:])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", WIDTHS)
def test_peak_is_torchs(name: str, recompute: Recompute, precision: str) -> None:
    layer_run(name, recompute, precision).assert_peak(within=PEAK)


def tensors_of(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """Tensors in which a packed weight lies."""
    if hasattr(parameter, "quant_state"):
        state: Any = parameter.quant_state
        yield from (parameter.data, state.absmax, state.code)
        if state.nested:
            yield from (state.offset, state.state2.absmax, state.state2.code)
        return
    inner: Any = parameter.data
    yield from (getattr(inner, name) for name in inner.__tensor_flatten__()[0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("n", "k"), [(256, 256), (512, 1024)])
def test_stored_bytes_are_those_of_the_tensors(name: str, n: int, k: int) -> None:
    form = FORMATS[name].stored(2)
    spec = model_of("llama", ("up",), hidden_size=k, intermediate_size=n, seq_len=8)
    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    from executor.models import base_weights

    make: Any = base_weights._of_torchao if FORMATS[name].library else base_weights._of_bitsandbytes
    packed = make(layer.weight.detach(), FORMATS[name])
    assert spec.hidden_size == k
    assert sum(t.nbytes for t in tensors_of(packed)) == form.packed_bytes(n * k) + form.scale_bytes((n, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_unpacks_through_what_is_predicted(dtype: torch.dtype) -> None:
    """One linear layer of few rows, by torch's trace of allocations."""
    from executor.models import base_weights

    n, k, rows = 512, 1024, 8
    weight: Any = base_weights._of_torchao(torch.randn(n, k, dtype=dtype), FORMATS["torchao"])
    x = torch.randn(rows, k, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    _, _, peak = traced(lambda: torch.nn.functional.linear(x, weight), onednn=False)
    width = dtype.itemsize
    result = rows * n * width
    predicted = result + FORMATS["torchao"].stored(width).scratch_bytes(n, k, rows, width, forward=True)
    assert peak == pytest.approx(predicted, rel=0.005)


PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero3": {"dp_shard": 2},
    "zero3-recompute": {"dp_shard": 2, "recompute": "full"},
    "cp": {"cp": 2, "cp_comm": "all_gather", "zero_stage": 0},
    "cp-zero3": {"cp": 2, "cp_comm": "all_gather", "zero_stage": 3},
    "pp": {"pp": 2, "schedule": "1f1b"},
    "pp-zero2": {"pp": 2, "dp_shard": 2, "zero_stage": 2, "schedule": "1f1b"},
}
RANKS = [
    pytest.param("torchao", "ddp", marks=[pytest.mark.slow]),
    pytest.param("torchao", "zero3"),
    pytest.param("nf4", "ddp", marks=[BNB]),
    pytest.param("nf4-double", "zero1", marks=[BNB, pytest.mark.slow]),
    pytest.param("fp4-floats", "zero3", marks=[BNB]),
    pytest.param("torchao", "zero3-recompute", marks=[pytest.mark.slow]),
    pytest.param("torchao", "cp", marks=[pytest.mark.slow]),
    pytest.param("torchao", "cp-zero3", marks=[pytest.mark.slow]),
    pytest.param("nf4", "cp", marks=[BNB, pytest.mark.slow]),
    pytest.param("torchao", "pp", marks=[pytest.mark.slow]),
    pytest.param("nf4", "pp", marks=[BNB, pytest.mark.slow]),
    pytest.param("fp4-floats", "pp-zero2", marks=[BNB, pytest.mark.slow]),
]


def job_with(name: str, plan: dict[str, Any]) -> RunSpec:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model: ModelSpec = make_model("llama", lora_rank=4, hidden_size=256, intermediate_size=512, **heads)
    job = make_job("none", model=model, plan=plan)
    size = NUM_MICROBATCHES * job.plan.dp * job.plan.microbatch_size
    training = TrainingSpec(global_batch_size=size, precision="fp32", task="lora", base_weights=FORMATS[name])
    return job.model_copy(update={"training": training})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), RANKS)
def test_ranks_equal_one_process_and_issue_what_is_predicted(name: str, plan: str, tmp_path: Path) -> None:
    """In FP32, the precision in which bitsandbytes quantizes here."""
    together = run_job(job_with(name, PLANS[plan]), tmp_path / "ranks")
    dp = ParallelPlan.model_validate(PLANS[plan]).dp
    alone = run_job(job_with(name, {"microbatch_size": dp * MICROBATCH_SIZE}), tmp_path / "one")
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert issued_as_predicted(together)


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ({"format": "int8"}, "nf4 and fp4 ... nf4 ... use nf4"),
        ({**TORCHAO, "upcast": True}, "precision of computation"),
    ],
)
def test_weights_that_are_not_run_are_refused(base: dict[str, Any], sentence: str) -> None:
    job = job_with("torchao", {"dp_replicate": 2})
    training = job.training.model_copy(update={"base_weights": BaseWeights(**base)})
    with pytest.raises(NotModelledError) as error:
        check_job(job.model_copy(update={"training": training}))
    assert says(str(error.value), sentence)


def test_widths_of_a_job_are_those_of_the_test() -> None:
    plan, training = ParallelPlan(), TrainingSpec(global_batch_size=1, task="lora", base_weights=FORMATS["nf4"])
    state = catalog.software("torch").state(training, plan)
    assert state.base is not None
    assert (state.base.activation_bytes, state.base.adapter_bytes, state.base.peft) == (2, 2, False)
