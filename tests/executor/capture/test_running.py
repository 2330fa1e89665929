"""Captured modules on real ranks: against one process that trains the module as people write it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.calibration import captured_timing
from executor.calibration.captured_timing import time_captured
from executor.calibration.timing import Bench
from executor.capture.capture import model_from_module
from executor.checks import check_job
from executor.dry_run.rehearse import rehearse
from executor.run import run_job
from simplan import catalog
from simplan.cost.calibration.format import ShapeRequest
from simplan.errors import NotModelledError, RunError, SpecError
from simplan.job import Job
from simplan.model.captured.facts import CapturedModel
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, run_spec_of
from simplan.prediction import Prediction
from simplan.runs.run_spec import RunSpec
from simplan.training import Precision, TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.capture import modules
from tests.executor.capture.test_capture import call
from tests.executor.dry_run.accounting import account
from tests.executor.train.test_equality import RELATIVE, run_in_float64
from tests.support.problems import refuses
from tests.support.slow import slow_except

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "UNet": (modules.UNet, modules.unet_batch),
    "DiT": (modules.DiT, modules.dit_batch),
    "SmallDiT": (modules.SmallDiT, modules.dit_batch),
    "AdaptedDiT": (modules.AdaptedDiT, modules.dit_batch),
    "Scaled": (modules.Scaled, modules.scaled_batch),
    "Tabled": (modules.Tabled, modules.scaled_batch),
    "Alternating": (modules.Alternating, modules.scaled_batch),
    "StateSpaceModel": (modules.StateSpaceModel, modules.token_batch),
    "Recommender": (modules.Recommender, modules.recommender_batch),
    "Normed": (modules.Normed, modules.normed_batch),
}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"dp_replicate": 2, "bucket_bytes": 40_000},
    "zero1": {"dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2},
    "zero3, recomputed": {"dp_shard": 2, "recompute": "full"},
    "ddp, recomputed": {"dp_replicate": 2, "recompute": "selective_layer"},
    "zero3, recomputed by op": {"dp_shard": 2, "recompute": "selective_op"},
    "diloco": {"dp_replicate": 2, "replication": {"kind": "diloco", "inner_steps": 2}},
}
NUM_MICROBATCHES, SIZE, SEED = 2, 2, 0


@cache
def captured(name: str) -> CapturedModel:
    """As ``simplan capture`` writes it."""
    make, batch = MODULES[name]
    origin = {"factory": f"{modules.__name__}:{name}", "batch": f"{modules.__name__}:{batch.__name__}"}
    return model_from_module(make(), batch).model_copy(update=origin)


def prediction_of(
    name: str,
    plan: dict[str, Any],
    precision: Precision = "fp32",
    num_microbatches: int = NUM_MICROBATCHES,
    **training: Any,
) -> Prediction:
    """Prediction of a plan; memory is that of any cluster."""
    made = ParallelPlan(microbatch_size=SIZE, **plan)
    asked = TrainingSpec(global_batch_size=num_microbatches * SIZE * made.dp, precision=precision, **training)
    model = ModelSpec(name=name, family="captured", captured=captured(name))
    return predict(Job(model, catalog.cluster("dgx-h100", made.num_devices), asked, made, catalog.software("torch")))


def job_of(prediction: Prediction, **fields: Any) -> RunSpec:
    """The job that was predicted, on this machine."""
    usual = {"num_steps": 2, "num_warmup_steps": 2, "device": "cpu", "profile_memory": False, "seed": SEED}
    return run_spec_of(prediction).model_copy(update=usual | fields)


def one_process(
    job: RunSpec, num_steps: int, change: Callable[[nn.Module], nn.Module] = lambda module: module
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a plain loop over all microbatches, whose samples have the seeds of the run.

    Args:
        change: Gives the module that is trained, from that of the factory.
    """
    make, batch = MODULES[job.model.name]
    torch.manual_seed(SEED)
    module = change(make()).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, gradients = [], []
    number = job.training.global_batch_size // SIZE
    for step in range(num_steps):
        total = 0.0
        for microbatch in range(number):
            torch.manual_seed((SEED * 100_003 + step) * 1_000_003 + microbatch)
            inputs: Any = torch.utils._pytree.tree_map(doubled, batch(SIZE))
            loss = call(module, inputs) / number
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        losses.append(total)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


SHARDED = [plan for plan in PLANS if plan.startswith(("zero2", "zero3"))]
# nothing repeats in UNet and Recommender, and FSDP takes no weight without dimensions
CASES = [
    (name, plan)
    for name, plan in product(MODULES, PLANS)
    if plan not in ("one", "diloco")
    and not ("recomputed" in plan and name in ("UNet", "Recommender"))
    and not (name == "Scaled" and plan in SHARDED)
]
FAST = [("DiT", "zero3, recomputed"), ("Recommender", "zero1")]


@pytest.mark.parametrize(("name", "plan"), slow_except(FAST, CASES))
def test_ranks_equal_one_process(name: str, plan: str, tmp_path: Path) -> None:
    """Losses and all gradients, of a loop without simplan."""
    job = job_of(prediction_of(name, PLANS[plan]), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    assert_equal_to_one_process(job, run.measurement.losses, tmp_path)


def assert_equal_to_one_process(job: RunSpec, found_losses: Sequence[float], folder: Path) -> None:
    """Losses of a run, and the gradients that its ranks wrote, those of all stages together."""
    losses, gradients = one_process(job, job.num_all_steps)
    assert found_losses == pytest.approx(losses, rel=RELATIVE)
    for step, wanted in enumerate(gradients):
        seen: set[str] = set()
        for rank in range(job.plan.num_devices):
            of_rank = torch.load(folder / f"gradients.rank{rank}.step{step}.pt")
            seen.update(name.removeprefix("module.") for name in of_rank)
            assert job.plan.pp > 1 or seen == set(wanted)
            for name, gradient in of_rank.items():
                expected = wanted[name.removeprefix("module.")]
                assert torch.allclose(gradient, expected, rtol=1e-8, atol=1e-12), (step, rank, name)
        assert seen == set(wanted)


ISSUED = [
    ("Normed", "ddp"),
    ("DiT", "ddp"),
    ("Normed", "zero1"),
    ("StateSpaceModel", "zero3, recomputed"),
    ("Recommender", "zero3"),
    ("DiT", "diloco"),
]


@pytest.mark.parametrize(("name", "plan"), slow_except(ISSUED[:2], ISSUED))
def test_ranks_issue_what_is_predicted(name: str, plan: str, tmp_path: Path) -> None:
    """Kinds, groups, bytes and order of collectives."""
    assert issued_as_predicted(run_job(job_of(prediction_of(name, PLANS[plan])), tmp_path))


def test_buffers_are_broadcast_as_torch_does_it(tmp_path: Path) -> None:
    """Once per step by torch's own record, although a step has two forwards: the buffers of each dtype together."""
    job = job_of(prediction_of("Normed", PLANS["ddp"]), dtype="fp64")
    run_in_float64(job, tmp_path)
    wanted: dict[torch.dtype, int] = {}
    for buffer in modules.Normed().buffers():
        wanted[buffer.dtype] = wanted.get(buffer.dtype, 0) + buffer.numel()
    collectives = torch.load(tmp_path / "collectives.rank1.pt")
    assert [elements for kind, elements in collectives if kind == "broadcast"] == [*wanted.values()]


BY_CLASS: dict[str, Any] = {"dp_shard": 2, "fsdp_units": ["DiffusionBlock"]}


@pytest.mark.slow
def test_units_by_class_and_by_size_are_those_of_torch(tmp_path: Path) -> None:
    """Small blocks are in the root unit; both ways name the same blocks here, which have 12,672 parameters."""
    prediction = prediction_of("Alternating", BY_CLASS)
    issued = run_job(job_of(prediction), tmp_path)
    assert issued_as_predicted(issued)
    assert prediction.memory[0].allocated_bytes == pytest.approx(account(job_of(prediction), 0).total_bytes, rel=0.055)
    by_size, all_blocks = ({"dp_shard": 2, "fsdp_units": units} for units in (10_000, None))
    assert prediction_of("Alternating", by_size).step_time_s == prediction.step_time_s
    assert prediction_of("Alternating", all_blocks).step_time_s != prediction.step_time_s


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"dp_shard": 2, "fsdp_units": ["Other"]}, "fsdp_units = Other: is no class of a block of Alternating; use "
         "DiffusionBlock or SmallBlock"),
        ({"dp_replicate": 2, "fsdp_units": ["SmallBlock"]}, "is about sharded parameters, and there are none"),
        ({"dp_shard": 2, "fsdp_units": 4_000}, r"a unit that is no block \(blocks\.0\.condition has as many "),
    ],
)  # fmt: skip
def test_units_that_there_are_not_are_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        prediction_of("Alternating", plan)


PEAKS = [
    (name, plan, precision)
    for (name, plan), precision in product([*CASES, *((name, "one") for name in MODULES)], ("fp32", "bf16"))
]


@pytest.mark.parametrize(
    ("name", "plan", "precision"),
    slow_except(
        [
            ("AdaptedDiT", "ddp", "bf16"),
            ("StateSpaceModel", "zero3", "fp32"),
        ],
        PEAKS,
    ),
)
def test_the_peak_of_a_rank_is_that_of_torchs_tracker(name: str, plan: str, precision: Precision) -> None:
    """On tensors without data, which have no scratch inside of kernels."""
    prediction = prediction_of(name, PLANS[plan], precision)
    assert prediction.memory[0].allocated_bytes == pytest.approx(account(job_of(prediction), 0).total_bytes, rel=0.055)


@pytest.mark.parametrize(
    ("plan", "precision", "loss_bytes"), slow_except([("one", "fp32", 4)], [("one", "fp32", 4), ("zero3", "bf16", 2)])
)
def test_the_batch_of_a_step_is_in_memory(plan: str, precision: Precision, loss_bytes: int) -> None:
    """Six microbatches in place of two add equal bytes in prediction and torch, which holds a loss of each as well."""
    jobs = [prediction_of("UNet", PLANS[plan], precision, number) for number in (2, 6)]
    predicted = [prediction.memory[0].allocated_bytes for prediction in jobs]
    torchs = [account(job_of(prediction), 0).total_bytes for prediction in jobs]
    more = 4 * sum(tensor.nbytes for tensor in modules.unet_batch(SIZE))
    assert predicted[1] - predicted[0] == torchs[1] - torchs[0] - 4 * loss_bytes == more


@pytest.mark.parametrize("plan", slow_except(["zero3"], ["one", "ddp", "zero3"]))
def test_weights_of_16_bits_that_two_layers_share_are_rehearsed(plan: str) -> None:
    """torch swaps no fake tensor that has two names, as it does to change its dtype."""
    prediction = prediction_of("StateSpaceModel", PLANS[plan], "bf16", pure_bf16=True)
    alone = rehearse(job_of(prediction), 0, fake=True)
    assert prediction.memory[0].allocated_bytes == pytest.approx(alone.peak_memory.allocated_bytes, rel=0.055)


class Clocked(nn.Module):
    """Blocks of which the clock shows how often they ran: 3 in forward, 5 in backward; and 2 between any two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(Ticking(3, 5), nn.Linear(4, 4)) for _ in range(3))
        self.between, self.head = Ticking(2, 7), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x).sum()  # type: ignore[no-any-return]


class Ticking(nn.Module):
    """Moves a clock in forward and in backward."""

    now = 0

    def __init__(self, up: int, down: int) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Ticking.now += self.up
        y = x * 1
        y.register_hook(self.back)  # type: ignore[no-untyped-call]
        return y * 1

    def back(self, gradient: torch.Tensor) -> None:
        Ticking.now += self.down


def test_times_of_layers_are_those_between_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code between two blocks belongs to the one before; a last one after all blocks is the head's."""
    monkeypatch.setattr(time, "perf_counter", lambda: Ticking.now)
    module = Clocked()
    starts = model_from_module(module, lambda number: (torch.randn(number, 4),), precisions=("fp32",)).starts
    assert starts == ("", "enter blocks.0", "enter blocks.1", "enter blocks.2", "leave blocks.2")
    crossings = captured_timing._Crossings(starts, module, torch.device("cpu"))
    forward, backward = crossings.of_step(lambda: module(torch.randn(2, 4)))
    assert forward == [0, 5, 5, 3, 2]
    assert backward == [0, 12, 12, 5, 7]


PRECISIONS: dict[Literal["fp32", "bf16"], str] = {"fp32": "one", "bf16": "zero3"}


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", slow_except(["Recommender"], MODULES))
def test_all_layers_are_timed(name: str) -> None:
    """Each different layer once, in the precision of FSDP too; alone here, without other ranks."""
    for precision, plan in PRECISIONS.items():
        if (name, plan) == ("Scaled", "zero3"):
            continue
        prediction = prediction_of(name, PLANS[plan], precision)
        shape = ShapeRequest(model=prediction.job.model, microbatch_size=SIZE, dtype=precision, mixed="cast")
        timings = time_captured(shape, Bench(1, torch.device("cpu"), lambda done: done < 1))
        assert {timing.key for timing in timings} == {layer.key for layer in prediction.job.model.layers}
        assert all(timing.forward_s.mean_s > 0 for timing in timings if "root" not in timing.key)


LIMITS: dict[str, tuple[str, dict[str, Any]]] = {
    "plan.recompute": ("UNet", {"recompute": "full"}),
    "plan.replication": ("DiT", {"dp_replicate": 2, "replication": {"kind": "parameter_server", "staleness": 2}}),
}


@pytest.mark.parametrize("field", LIMITS)
def test_options_without_execution_are_refused_by_name(field: str) -> None:
    name, plan = LIMITS[field]
    with pytest.raises(NotModelledError, match=field.replace(".", r"\.")):
        check_job(job_of(prediction_of(name, plan)))


def test_weights_without_dimensions_are_refused_by_fsdp_and_the_rule() -> None:
    """As torch refuses them."""
    with refuses("plan.zero_stage", "3", rule="shards weights along a dimension"):
        prediction_of("Scaled", PLANS["zero3"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="scalar parameters"):
            fully_shard(modules.Scaled(), mesh=DeviceMesh("cpu", [0, 1]))
    finally:
        dist.destroy_process_group()


def test_a_module_that_changed_since_its_capture_is_refused(tmp_path: Path) -> None:
    job = job_of(prediction_of("DiT", {}))
    assert job.model.captured is not None
    other = job.model.captured.model_copy(update={"source_sha256": "0" * 64})
    job = job.model_copy(update={"model": job.model.model_copy(update={"captured": other})})
    with pytest.raises(RunError, match="captured from other code"):
        run_job(job, tmp_path)
