"""Adapters of captured modules (``model.lora_rank``), against modules that have them in their code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.capture.capture import model_from_module
from executor.checks import check_job
from executor.models.lora import Rotation
from executor.run import run_job
from simplan import catalog
from simplan.errors import NotModelledError
from simplan.job import Job
from simplan.model.captured.adapters import targets_of, with_adapters
from simplan.model.captured.layers import captured_layers
from simplan.model.layer import LayerSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.program.action import ActionKind
from simplan.program.program import LayerWork
from simplan.training import Precision, TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.capture.test_capture import MODULES, saved
from tests.executor.capture.test_running import NUM_MICROBATCHES, PLANS, SIZE, captured, job_of, one_process
from tests.executor.dry_run.accounting import account, predicted_peak
from tests.executor.train.test_equality import RELATIVE, run_in_float64
from tests.jobs import lowered, problems
from tests.support.problems import refuses, says
from tests.support.slow import slow_except

RANK, SCALE, STD = 4, 2.0, 0.02


class Adapted(nn.Module):
    """A linear layer with an adapter, as PEFT writes it."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        (n, k), self.base, self.dropout = base.weight.shape, base, nn.Dropout(dropout)
        self.lora_a = nn.Linear(k, RANK, bias=False, device="meta")
        self.lora_b = nn.Linear(RANK, n, bias=False, device="meta")
        for factor in (self.lora_a, self.lora_b):
            factor.weight = nn.Parameter(torch.empty(factor.weight.shape).normal_(0.0, STD))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_b(self.lora_a(self.dropout(x))) * SCALE
        return out


def adapted(module: nn.Module, paths: Sequence[str], dropout: float = 0.0) -> nn.Module:
    """The module, frozen, with adapters at linear layers."""
    module.requires_grad_(requires_grad=False)
    for path in paths:
        parent, _, name = path.rpartition(".")
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        setattr(module.get_submodule(parent), name, Adapted(linear, dropout))
    return module


def totals(layers: tuple[LayerSpec, ...]) -> tuple[object, ...]:
    """Parameters, FLOPs, saved bytes, and all kernels with what backward computes of them."""
    kernels = Counter(
        (type(k).__name__, getattr(k, "trained", None), getattr(k, "propagates", None))
        for layer in layers
        for k in layer.kernels
    )
    passes = sum(layer.flops() for layer in layers), sum(layer.backward_flops() for layer in layers)
    weights = sum(layer.num_parameters for layer in layers), sum(layer.num_trained for layer in layers)
    return weights, passes, saved(layers, "fp32"), kernels


TARGETS = [
    ("dit", ("qkv", "up")),
    ("dit", ("all",)),
    ("dit", ("blocks.1.down",)),
    ("scan", ("all",)),
    ("unet", ("time",)),
    ("recommender", ("all",)),
]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("name", "targets"), slow_except([TARGETS[0], TARGETS[2]], TARGETS))
def test_adapters_are_those_of_a_capture_with_adapters_in_the_code(
    name: str, targets: tuple[str, ...], dropout: float
) -> None:
    make, batch = MODULES[name]
    plain = model_from_module(make(), batch, precisions=("fp32",))
    paths = [path for of_target in targets_of(plain, targets).values() for path in of_target]
    written = model_from_module(adapted(make(), paths, dropout), batch, precisions=("fp32",))
    ours = captured_layers(with_adapters(plain, RANK, targets, dropout=dropout > 0))
    assert totals(ours) == totals(captured_layers(written))


class Rotated(nn.Module):
    """A linear layer whose input is rotated (OFT), as PEFT writes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.oft_r = base, Rotation(base.in_features // RANK, RANK)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(self.oft_r(x.to(self.oft_r.weight.dtype)).to(x.dtype))
        return out


def saved_tensors(layers: tuple[LayerSpec, ...]) -> Counter[tuple[int, bool]]:
    """Elements of the tensors that layers save, and whether the microbatch has one of it."""
    roots = [(layer, layer.storages(2, 4)) for layer in layers]
    kept = {(id(layer), of[t.name].name): of[t.name] for layer, of in roots for t in layer.saved if not t.elsewhere}
    return Counter((tensor.elements, tensor.per_microbatch) for tensor in kept.values())


def test_rotations_are_those_of_a_module_that_has_them_in_its_code() -> None:
    """But for copies of frozen weights in 16 bits and indices of blocks, which a capture of the written module has."""
    (make, batch), targets = MODULES["dit"], ("qkv", "up")
    plain, module = model_from_module(make(), batch, precisions=("autocast",)), make()
    module.requires_grad_(requires_grad=False)
    for path in (path for of_target in targets_of(plain, targets).values() for path in of_target):
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, Rotated(module.get_submodule(path)))  # type: ignore[arg-type]
    written = model_from_module(module, batch, precisions=("autocast",))
    ours, theirs = (
        captured_layers(model.model_copy(update={"computed_in": "autocast"}))
        for model in (with_adapters(plain, RANK, targets, oft=True), written)
    )
    assert [sum(layer.num_trained for layer in layers) for layers in (ours, theirs)] == [3 * 2 * 64 // 4 * 6] * 2
    assert not saved_tensors(ours) - saved_tensors(theirs)
    weights = {parameter.num_elements for layer in theirs for parameter in layer.parameters if parameter.frozen}
    indices = 2 * RANK * (RANK - 1) // 2
    assert {size for size, _ in saved_tensors(theirs) - saved_tensors(ours)} <= weights | {indices}


class Words(nn.Module):
    """Next words by one linear layer, with their own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def test_preferences_of_a_capture_have_a_forward_without_adapters() -> None:
    """Both sequences of a pair pass the frozen module once more, after the forward with adapters."""
    plain = model_from_module(Words(), lambda number: (torch.zeros(number, 8, dtype=torch.int64),))
    model = ModelSpec(family="captured", captured=plain, lora_rank=RANK, lora_targets=("head",))
    training = TrainingSpec(global_batch_size=1, precision="fp32", task="dpo")
    job = Job(model, catalog.cluster("dgx-h100", 1), training, ParallelPlan(), catalog.software("torch"))
    forwards = [op for op in lowered(job, 2).ops if op.action.kind is ActionKind.FORWARD and op.work]
    passes = [op for op in forwards if op.name.endswith("reference")]
    works = [work for op in passes for work in op.work if isinstance(work, LayerWork)]
    assert {work.microbatch_size for work in works} == {2}
    assert [work.layer.flops() for work in works] == [layer.flops() for layer in captured_layers(plain)]
    assert not sum(work.layer.num_trained for work in works)
    assert forwards[-1] == passes[-1]
    assert not problems(job.model, {}, cluster="dgx-h100", task="dpo")


def prediction_of(name: str, plan: str, precision: Precision, targets: Sequence[str] = ("all",)) -> Prediction:
    made = ParallelPlan(microbatch_size=SIZE, **(PLANS | STAGES)[plan])
    size = NUM_MICROBATCHES * SIZE * made.dp
    training = TrainingSpec(global_batch_size=size, precision=precision, task="lora")
    model = ModelSpec(
        name=name, family="captured", captured=captured(name), lora_rank=RANK, lora_targets=tuple(targets)
    )
    return predict(Job(model, catalog.cluster("dgx-h100", made.num_devices), training, made, catalog.software("torch")))


STAGES: dict[str, dict[str, Any]] = {
    "stages": {"pp": 2, "schedule": "1f1b"},
    "early stages": {"pp": 2, "schedule": "1f1b", "stage_layers": (0, 1)},
    "stages, zero1": {"pp": 2, "schedule": "1f1b", "dp_shard": 2, "zero_stage": 1},
    "stages, zero3": {"pp": 2, "schedule": "1f1b", "dp_shard": 2},
}
RUNS = [("UNet", "ddp"), ("DiT", "zero1"), ("DiT", "zero3, recomputed"), ("StateSpaceModel", "zero3")]
IN_STAGES = [
    ("DiT", "stages"),
    ("DiT", "stages, zero1"),
    ("DiT", "stages, zero3"),
    ("UNet", "early stages"),
    ("StateSpaceModel", "stages"),
]


@pytest.mark.parametrize(("name", "plan"), slow_except([], [*RUNS, *IN_STAGES]))
def test_ranks_with_adapters_equal_one_process(name: str, plan: str, tmp_path: Path) -> None:
    job = job_of(prediction_of(name, plan, "fp32"), dtype="fp64")
    assert job.model.captured is not None
    paths = targets_of(job.model.captured, ["all"])["all"]
    losses, gradients = one_process(job, job.num_all_steps, lambda module: adapted(module, paths))
    run = run_in_float64(job, tmp_path)
    assert run.measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for step, wanted in enumerate(gradients):
        seen = set[str]()
        for rank in range(job.plan.num_devices):
            of_rank = torch.load(tmp_path / f"gradients.rank{rank}.step{step}.pt")
            seen.update(key.removeprefix("module.") for key in of_rank)
            assert job.plan.pp > 1 or seen == set(wanted)
            for key, gradient in of_rank.items():
                assert torch.allclose(gradient, wanted[key.removeprefix("module.")], rtol=1e-8, atol=1e-12), key
        assert seen == set(wanted)


@pytest.mark.parametrize("rank", slow_except([3], [0, 3]))
def test_the_peak_of_stages_with_adapters_is_that_of_torchs_tracker(rank: int) -> None:
    """In BF16, where the base has 16 bits and adapters have 32."""
    job = job_of(prediction_of("DiT", "stages, zero3", "bf16"))
    assert predicted_peak(job, rank).total_bytes == pytest.approx(account(job, rank).total_bytes, rel=0.01)


def test_a_stage_without_adapters_is_refused() -> None:
    with refuses("plan.pp", rule="stage 0 has no adapters", kind=NotModelledError):
        check_job(job_of(prediction_of("DiT", "stages", "fp32", ["blocks.2.down"])))


@pytest.mark.parametrize("plan", slow_except([], ["ddp", "zero3", "zero3, recomputed", "stages, zero3"]))
def test_ranks_issue_what_is_predicted_below_the_first_adapter(plan: str, tmp_path: Path) -> None:
    """FSDP gathers no block again that has no backward, except one ahead."""
    targets = ["all"] if "stages" in plan else ["blocks.2.down"]
    prediction = prediction_of("DiT", plan, "fp32", targets)
    assert issued_as_predicted(run_job(job_of(prediction), tmp_path))


PEAKS = [(name, plan, precision) for name, plan in RUNS for precision in ("fp32", "bf16")][:-1]


@pytest.mark.parametrize(("name", "plan", "precision"), slow_except([], PEAKS))
def test_the_peak_with_adapters_is_that_of_torchs_tracker(name: str, plan: str, precision: Precision) -> None:
    prediction = prediction_of(name, plan, precision)
    assert prediction.memory[0].allocated_bytes == pytest.approx(account(job_of(prediction), 0).total_bytes, rel=0.05)


def test_targets_that_name_no_linear_layer_are_refused() -> None:
    plain = model_from_module(MODULES["dit"][0](), MODULES["dit"][1], precisions=("fp32",))
    model = ModelSpec(family="captured", captured=plain, lora_rank=RANK, lora_targets=("q_proj",))
    [said] = problems(model, precision="fp32", task="lora")
    assert says(said, "model.lora_targets = q_proj: ", "no linear layer of DiT", "use all, ")
    assert said.partition("use ")[2] == "all, condition, qkv, out, up, down or head"
