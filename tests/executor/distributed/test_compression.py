"""Gradient compression: hooks against numpy, training against one process, bytes and memory against predictions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.checks import check_job
from executor.distributed.quantization import QUANTIZERS
from executor.run import run_job
from simplan import catalog
from simplan.errors import NotModelledError
from simplan.job import Job
from simplan.plan.compression import BLOCK, Compression, CompressionKind
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, run_spec_of
from simplan.program.lowering.compression import QUANTIZER_KERNELS
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import MemoryCategory
from simplan.runs.run_spec import RunSpec
from simplan.scenario import evaluate, load_scenario
from simplan.validate.compare import predicted_communications
from tests.executor.conftest import make_job, make_model
from tests.executor.distributed.test_level2 import LLAMA, assert_issued_as_predicted, issued, run_predicted
from tests.executor.forked import run_program
from tests.executor.rank_programs.compressing_ranks import NUM_RANKS
from tests.executor.train.test_checkpoints import undisturbed, with_checkpoints
from tests.executor.train.test_equality import assert_equal_to_one_process, run_in_float64
from tests.support.problems import refuses
from tests.support.slow import slow_except
from tests.support.sources import ROOT

Array = NDArray[np.float32]
NUM_STEPS, NUM_ELEMENTS, RATIO = 4, 3500, 0.1
ALL: dict[str, Compression] = {
    "fp16": Compression(kind="fp16"),
    "bf16": Compression(kind="bf16"),
    "powersgd": Compression(kind="powersgd", rank=2, start_step=2, min_compression=0.5),
    "powersgd batched": Compression(kind="powersgd", rank=2, start_step=2, batched=True),
    "top_k": Compression(kind="top_k", ratio=0.05),
    "random_k": Compression(kind="random_k", ratio=0.05),
    "one_bit": Compression(kind="one_bit", warmup_share=0.0),
    "one_bit_adam": Compression(kind="one_bit_adam", warmup_share=0.2),
}
ALL |= {kind: Compression(kind=kind) for kind in get_args(CompressionKind) if kind not in ALL}


def top_k(values: Array, feedback: bool) -> Array:
    """Averages of (step, rank, element): each rank sends its largest values, and keeps the others for later."""
    num_kept, errors, means = int(RATIO * values.shape[2]), np.zeros_like(values[0]), []
    for step in values:
        errors = errors + step if feedback else step.copy()
        average = np.zeros_like(step[0])
        for error in errors:
            largest = np.argsort(-np.abs(error))[:num_kept]
            average[largest] += error[largest] / len(errors)
            error[largest] = 0
        means.append(average)
    return np.stack(means)


class InBlocks:
    """Averages of (rank, element), step after step: each rank's values are compressed, then the mean of them."""

    def __init__(self, compress: Callable[[Array], Array], num_elements: int, *, feedback: bool = True) -> None:
        self.compress, self.num_elements, self.feedback = compress, num_elements, feedback
        num_blocks = -(-num_elements // (BLOCK * NUM_RANKS)) * NUM_RANKS
        self.errors = np.zeros((NUM_RANKS, num_blocks * BLOCK))
        self.mean_errors = np.zeros(num_blocks * BLOCK)

    def mean(self, values: NDArray[Any]) -> Array:
        """Values are of FP32 or FP64, and sent in FP32."""
        values_of_ranks = np.zeros(self.errors.shape, values.dtype)
        values_of_ranks[:, : self.num_elements] = values
        values_of_ranks += self.errors * self.feedback
        sent = np.stack([self.in_blocks(of_rank) for of_rank in values_of_ranks])
        self.errors = values_of_ranks - sent
        mean = sent.mean(0, dtype=np.float32)
        mean += self.mean_errors * self.feedback
        average = self.in_blocks(mean)
        self.mean_errors = mean - average
        return average[: self.num_elements]

    def in_blocks(self, values: NDArray[Any]) -> Array:
        return np.concatenate([self.compress(block) for block in values.reshape(-1, BLOCK)])


def in_blocks(values: Array, compress: Callable[[Array], Array], feedback: bool) -> Array:
    """Averages of (step, rank, element)."""
    blocks = InBlocks(compress, values.shape[2], feedback=feedback)
    return np.stack([blocks.mean(step) for step in values])


def low_rank(values: Array, rank: int) -> Array:
    """Averages of (step, rank, element): the mean of square matrices, projected to a plane that follows it."""
    side = int(np.ceil(np.sqrt(values.shape[2])))
    padded = np.zeros((*values.shape[:2], side * side), np.float32)
    padded[:, :, : values.shape[2]] = values
    q = torch.randn(side, rank, generator=torch.Generator().manual_seed(0)).numpy()
    errors, means = np.zeros_like(padded[0]), []
    for step in padded:
        matrix = step + errors
        mean = matrix.mean(0).reshape(side, side)
        p = np.linalg.qr(mean @ np.linalg.qr(q).Q).Q
        q = mean.T @ p
        average = (p @ q.T).flatten()
        errors = matrix - average
        means.append(average[: values.shape[2]])
    return np.stack(means)


def to_integers(block: Array, largest: int) -> Array:
    scale = np.float32(np.abs(block).max() / np.float32(largest))
    return np.asarray(np.round(block / scale).astype(np.float32) * scale)


def to_sign(block: Array) -> Array:
    return np.asarray(np.where(block > 0, np.abs(block).mean(), -np.abs(block).mean()), np.float32)


def at_random(values: Array, means: Array, feedback: bool) -> Array:
    """As ``top_k``, of the elements that were found not to be 0; without feedback they stand for the others."""
    num_kept, errors, averages = int(RATIO * values.shape[2]), np.zeros_like(values[0]), []
    for step, there in zip(values, means != 0, strict=True):
        assert there.sum() == num_kept
        errors = errors + step if feedback else step * values.shape[2] / num_kept
        averages.append(np.where(there, errors.mean(0), 0))
        errors = np.where(there, 0, errors)
    return np.stack(averages)


CASES: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Array]]] = {
    "top_k": ({"ratio": RATIO}, lambda x, _: top_k(x, feedback=True)),
    "top_k without feedback": ({"ratio": RATIO, "error_feedback": False}, lambda x, _: top_k(x, feedback=False)),
    "random_k": ({"ratio": RATIO}, lambda x, generator: at_random(x, generator, feedback=True)),
    "random_k without feedback": (
        {"ratio": RATIO, "error_feedback": False},
        lambda x, generator: at_random(x, generator, feedback=False),
    ),
    "powersgd batched": ({"batched": True, "rank": 3}, lambda x, _: low_rank(x, 3)),
    "int8": ({}, lambda x, _: in_blocks(x, partial(to_integers, largest=127), feedback=True)),
    "int4": ({}, lambda x, _: in_blocks(x, partial(to_integers, largest=7), feedback=True)),
    "one_bit": ({"warmup_share": 0.0}, lambda x, _: in_blocks(x, to_sign, feedback=True)),
    "one_bit without feedback": (
        {"warmup_share": 0.0, "error_feedback": False},
        lambda x, _: in_blocks(x, to_sign, feedback=False),
    ),
}


def test_every_hook_that_is_not_torchs_has_a_case_and_a_scenario() -> None:
    kinds = {*get_args(CompressionKind)} - {"fp16", "bf16"}
    assert {name.split()[0] for name in CASES} | {"one_bit_adam"} == kinds
    files = {file.stem for file in (ROOT / "scenarios/ways").glob("compression-*.yaml")}
    assert {f"compression-{kind.replace('_', '-')}" for kind in kinds} <= files


class CountedBytes(TorchDispatchMode):
    """Bytes that kernels read and write, which views do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and "split" not in func.name() and "unsafe_view" not in func.name():
            self.num_bytes += sum(each.nbytes for each in tree_leaves((args, made)) if isinstance(each, torch.Tensor))
        return made


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_kernels_of_quantizers_move_the_bytes_that_are_predicted(kind: str) -> None:
    """Within a tenth: what is packed is read and written by more kernels than its bits are counted for."""
    values = torch.randn(2, 16 * BLOCK)
    predicted = QUANTIZER_KERNELS[Compression.model_validate({"kind": kind}).bits or 0]
    encode, decode = QUANTIZERS[kind]
    with CountedBytes() as encoding:
        encoded = encode(values)
    with CountedBytes() as decoding:
        decode(encoded, values.shape[1])
    counted = [each.num_bytes / values.numel() for each in (encoding, decoding)]
    assert counted == pytest.approx([num_bytes for num_bytes, _ in predicted], rel=0.1)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Array, list[dict[str, Array]]]:
    """Gradients (step, rank, element), and by rank and case the averages (step, element)."""
    folder = tmp_path_factory.mktemp("compressing")
    gradients = torch.randn(NUM_STEPS, NUM_RANKS, NUM_ELEMENTS, generator=torch.Generator().manual_seed(3))
    torch.save(gradients, folder / "gradients.pt")
    torch.save([{"kind": name.split()[0], **keys} for name, (keys, _) in CASES.items()], folder / "cases.pt")
    run_program("compressing_ranks", NUM_RANKS, folder)
    results = [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]
    return gradients.numpy(), [dict(zip(CASES, map(torch.Tensor.numpy, result), strict=True)) for result in results]


@pytest.mark.parametrize("name", CASES)
def test_hook_averages_as_numpy_does(name: str, reduced: tuple[Array, list[dict[str, Array]]]) -> None:
    gradients, (of_rank, of_other) = reduced
    assert np.array_equal(of_rank[name], of_other[name])
    expected = CASES[name][1](gradients, of_rank[name])
    tolerance = 1e-4 if "batched" in name else 1e-6  # decompositions in another order
    differs = np.abs(of_rank[name] - expected) > tolerance * np.abs(gradients).max()
    # a sum in another order may round a value to the next number, or the sign of a value near 0
    assert differs.mean() < (0.002 if name.split()[0] in QUANTIZERS else 1e-9)


@pytest.mark.parametrize(
    "compression",
    slow_except(
        [{"kind": "top_k", "ratio": 1.0}],
        [
            {"kind": "top_k", "ratio": 1.0},
            {"kind": "random_k", "ratio": 1.0},
            {"kind": "powersgd", "rank": 1000, "min_compression": 0.0, "start_step": 2},
            {"kind": "powersgd", "rank": 1000, "batched": True, "start_step": 2},
        ],
    ),
)
def test_whole_gradients_train_as_one_process(compression: dict[str, Any], tmp_path: Path) -> None:
    """All elements, or factors of full rank, are the whole gradient; in float64, to the tolerance of plain DDP."""
    plan = {"dp_replicate": 2, "bucket_bytes": 40_000, "compression": compression}
    run = run_in_float64(make_job(plan=plan, dp=2, num_steps=3, num_warmup_steps=2, dtype="fp64"), tmp_path)
    assert_equal_to_one_process(run)
    assert_issued_as_predicted(run)


@pytest.mark.parametrize("name", slow_except(["one_bit_adam"], ALL))
def test_bytes_on_the_wire_are_those_predicted(name: str, tmp_path: Path) -> None:
    plan = ParallelPlan(dp_replicate=2, bucket_bytes=300_000, compression=ALL[name])
    prediction, measurement = run_predicted(LLAMA, plan, 4, "fp32", tmp_path)
    predicted = predicted_communications(measurement.job)
    assert all(issued(measurement, rank) == predicted[rank] for rank in range(2))
    assert len(predicted[0]) == 2 if name == "one_bit_adam" else len(predicted[0]) > 4
    assert prediction.compression is not None
    sent = sum(num_bytes * {"all_reduce": 1.0}.get(sort, 0.5) for sort, _, num_bytes, _ in issued(measurement, 0))
    assert prediction.compression.sent_bytes == sent
    assert sent < 0.51 * prediction.compression.whole_bytes


@pytest.mark.parametrize(("kind", "tolerance"), slow_except([("fp16", 1e-4)], [("fp16", 1e-4), ("bf16", 1e-3)]))
def test_sixteen_bits_train_as_whole_gradients(kind: str, tolerance: float, tmp_path: Path) -> None:
    losses = []
    for compression in (None, {"kind": kind}):
        job = make_job(dp=2, plan={"dp_replicate": 2, "compression": compression}, num_steps=6)
        measurement = run_job(job, tmp_path / str(compression is None))
        losses.append(np.array(measurement.losses))
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert not np.array_equal(losses[0], losses[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_peak_memory_is_that_predicted(name: str, tmp_path: Path) -> None:
    """Within 10 %: torch frees some tensors in threads that its trace does not see."""
    plan = ParallelPlan(dp_replicate=2, compression=ALL[name])
    prediction, _ = run_predicted(LLAMA, plan, 4, "fp32", tmp_path)
    job = run_spec_of(prediction, num_steps=2, num_warmup_steps=2, device="cpu", profile_memory=True)
    measured = run_job(job, tmp_path / "traced").ranks[0].peak_memory.allocated_bytes
    assert measured == pytest.approx(prediction.memory[0].allocated_bytes, rel=0.1)


def test_run_refuses_what_it_would_not_measure() -> None:
    compression = {"kind": "powersgd", "start_step": 2, "min_compression": 0.1}
    job = make_job(model=make_model(), dp=2, plan={"dp_replicate": 2, "compression": compression})
    with refuses("plan.compression.start_step", rule="2 steps with whole gradients", kind=NotModelledError):
        check_job(job)


def of_two_ranks(compression: Compression, **fields: Any) -> RunSpec:
    """Two of its steps are warm-up, and have whole gradients with some kinds; it has several buckets."""
    plan = {"dp_replicate": 2, "bucket_bytes": 30_000, "compression": compression}
    return make_job(plan=plan, dp=2, num_warmup_steps=2, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["one_bit_adam"], ALL))
def test_resumed_run_equals_undisturbed(name: str, tmp_path: Path) -> None:
    job = of_two_ranks(ALL[name])
    whole = undisturbed(job, tmp_path / "whole", 8)
    run_job(with_checkpoints(job, tmp_path / "kept", 6, every=3), tmp_path / "first")
    second = run_job(with_checkpoints(job, tmp_path / "kept", 8, resume=True), tmp_path / "second")
    assert second.losses == whole.losses[6:]
    assert second.notes == ("resuming after step 6",)
    saved = saved_bytes(tmp_path / "kept" / "step-00000006")
    padding = saved * 2 // 3 - 4 * job.model.num_parameters if name == "one_bit_adam" else 0  # of a momentum
    assert saved + padding == predicted_bytes(job)


def saved_bytes(folder: Path) -> int:
    """Bytes of the errors, and the like, of the first rank in a checkpoint."""
    stored = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata
    tensors = [x for name, x in stored.items() if name.startswith("compression.") and name.endswith(".rank0")]
    return sum(x.size.numel() * x.properties.dtype.itemsize for x in tensors)


def predicted_bytes(job: RunSpec) -> int:
    """Bytes that compression keeps between steps, in the memory of the first rank."""
    cluster = catalog.cluster("dgx-h100", num_devices=2)
    buffers = [
        lower(
            Job(job.model, cluster, job.training, plan, job.software), job.assignment, job.parsed_table(), Lowering()
        ).persistent_bytes[0][MemoryCategory.BUFFERS]
        for plan in (job.plan, job.plan.with_changes(compression=None))
    ]
    return buffers[0] - buffers[1]


@pytest.mark.slow
def test_errors_of_other_ranks_begin_at_zero_with_a_note(tmp_path: Path) -> None:
    job = of_two_ranks(ALL["top_k"])
    run_job(with_checkpoints(job, tmp_path / "kept", 4), tmp_path / "first")
    four = job.plan.with_changes(dp_replicate=4, microbatch_size=1)
    resumed = with_checkpoints(job.model_copy(update={"plan": four}), tmp_path / "kept", 6, resume=True)
    measurement = run_job(resumed, tmp_path / "second")
    assert measurement.first_step == 4
    sentence = "errors of plan.compression = top_k begin at zero: the checkpoint has none of these ranks and buckets"
    assert measurement.notes[0] == sentence


@pytest.mark.parametrize(
    "file", sorted((ROOT / "scenarios/ways").glob("compression-*.yaml")), ids=lambda file: file.stem
)
def test_scenario_of_a_kind_has_the_bytes_that_it_expects(file: Path) -> None:
    scenario = load_scenario(file)
    compression = scenario.job.plan.compression
    assert compression is not None
    assert file.stem.startswith(f"compression-{compression.kind.replace('_', '-')}")
    there = replace(scenario.job, cluster=catalog.cluster("dgx-h100", num_devices=2))  # which needs no calibration
    results = [evaluate(expectation, predict(there).to_json(timeline=False)) for expectation in scenario.expect]
    assert len(results) == 2
    assert all(result.passed for result in results), [result.message for result in results]
