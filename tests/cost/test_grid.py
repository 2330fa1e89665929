"""Layers priced from kernels over sizes: power laws, sums by hand, and what is said where the grid ends."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import Calibration, CommunicationTiming, KernelName, KernelTiming, Sample
from simplan.cost.compute.grid_cost import GridCost, KernelGrid, of_grid
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.compute.matmul import Matmul
from simplan.cost.model import Provenance
from simplan.errors import SpecError
from simplan.model.layer import CollectiveKind, Gemm, LayerSpec, ParameterSpec, Pointwise
from simplan.optimizers import UpdateName
from simplan.predict import predict
from simplan.program.program import LayerWork, Phase
from simplan.scenario import load_scenario
from tests.cost.rates import cost_of
from tests.jobs import job_of
from tests.layers import layer_of_kernels
from tests.support.problems import refuses

ROOT = Path(__file__).resolve().parents[2]
DIMS = (64, 256, 1024)
PRODUCTS: tuple[KernelName, ...] = ("linear", "linear_input_gradient", "linear_weight_gradient")
ELEMENTS = (2**12, 2**16, 2**20)
FLOP_PER_S, BYTES_PER_S = 1e12, 1e11


def sample(seconds: float) -> Sample:
    return Sample(mean_s=seconds, low_s=0.9 * seconds, high_s=1.1 * seconds, round_std=0.05, num_repeats=20)


def kernel(name: KernelName, sizes: tuple[int, ...], seconds: float, backward_s: float | None = None) -> KernelTiming:
    return KernelTiming(
        kernel=name,
        sizes=sizes,
        dtype="bf16",
        num_ranks=8,
        seconds=sample(seconds),
        backward_s=None if backward_s is None else sample(backward_s),
    )


def grid_timings() -> list[KernelTiming]:
    """A device without launches: products at a rate, all else at a bandwidth, backwards twice as long."""
    timings = []
    for rows, columns, depth in itertools.product(DIMS, repeat=3):
        seconds = 2 * rows * columns * depth / FLOP_PER_S
        timings += [kernel(name, (rows, columns, depth), seconds) for name in PRODUCTS]
    for heads, length, width in itertools.product((8, 64), (256, 1024), (64, 128)):
        seconds = 2 * heads * length**2 * width / FLOP_PER_S
        timings.append(kernel("attention", (heads, length, width), seconds, 2.5 * seconds))
    both: tuple[KernelName, ...] = ("layer_norm", "rms_norm", "gelu", "silu_multiply", "add", "lookup")
    both += ("cross_entropy", "rotary")
    alone: tuple[KernelName, ...] = ("accumulate", "scale", "copy", "adamw", "sgd", "gather_copy", "reduce_copy")
    for elements in ELEMENTS:
        seconds = 4 * elements / BYTES_PER_S
        timings += [kernel(name, (elements,), seconds, 2 * seconds) for name in both]
        timings += [kernel(name, (elements,), 3 * seconds) for name in alone]
    return timings


GRID = KernelGrid(grid_timings())
H100: dict[str, Any] = {"device": "NVIDIA H100 80GB HBM3", "backend": "nccl"}
CALIBRATION = Calibration(
    created="2026-01-01T00:00:00+00:00",
    environment=H100,
    device_kind="gpu",
    num_cores=64,
    memory_bytes=85_000_000_000,
    context_bytes=10**9,
    kernels=tuple(grid_timings()),
    communication=tuple(
        CommunicationTiming(kind=kind, num_ranks=8, world_size=8, num_bytes=num_bytes, seconds=sample(num_bytes / 1e11))
        for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        for num_bytes in (2**20, 2**30)
    ),
)


@given(st.tuples(*[st.floats(64, 1024)] * 3))
def test_power_laws_are_met_between_sizes(sizes: tuple[float, float, float]) -> None:
    grid_time = GRID.time("linear", sizes)
    assert grid_time.seconds == pytest.approx(2 * sizes[0] * sizes[1] * sizes[2] / FLOP_PER_S)
    assert grid_time.inside


@given(st.tuples(*[st.floats(1, 10**5)] * 3), st.floats(1.0, 8.0), st.integers(0, 2))
def test_more_work_never_takes_less_time(sizes: tuple[float, ...], factor: float, axis: int) -> None:
    more = tuple(size * factor if index == axis else size for index, size in enumerate(sizes))
    assert GRID.time("linear", more).seconds >= GRID.time("linear", sizes).seconds * (1 - 1e-12)


def test_small_kernels_are_bound_by_their_launch_and_large_ones_grow_with_their_work() -> None:
    smallest = GRID.time("gelu", (2**12,))
    assert GRID.time("gelu", (1,)) == smallest
    largest, beyond = GRID.time("gelu", (2**20,)), GRID.time("gelu", (2**25,))
    assert beyond.seconds == pytest.approx(32 * largest.seconds)
    assert (largest.inside, beyond.inside) == (True, False)
    long = GRID.time("attention", (64, 8192, 128))
    assert long.seconds == pytest.approx(64 * GRID.time("attention", (64, 1024, 128)).seconds)  # 8 times the length
    assert not long.inside


def test_a_corner_that_was_too_large_to_time_has_its_work() -> None:
    known = [timing for timing in grid_timings() if timing.kernel == "linear" and timing.sizes != (1024, 1024, 1024)]
    grid_time = KernelGrid(known).time("linear", (1024, 1024, 1024))
    assert grid_time.seconds == pytest.approx(2 * 1024**3 / FLOP_PER_S)
    assert grid_time.inside  # four times what was timed, the distance of two sizes


def of_gpu(launch_s: float = 1e-9) -> KernelCost:
    """Kernels of an H100 at the rates of the grid, whose kernels are so small here that launches must be shorter."""
    timings = [*grid_timings(), kernel("launch", (1,), launch_s)]
    return of_grid(cost_of("h100-sxm-80gb", num_devices=1), KernelGrid(timings))


def test_a_gpu_multiplies_as_timed_at_the_clocks_that_a_step_sustains() -> None:
    kernels = of_gpu()
    sustained = kernels.matmuls.rates.matmul_efficiency
    matmul = Matmul(512, 256, 512, 3, 0)
    assert kernels.matmuls.part("", matmul).seconds == pytest.approx(3 * 2 * 512 * 256 * 512 / FLOP_PER_S / sustained)
    odd, even = (kernels.matmuls.part("", matmul._replace(columns=n)).seconds for n in (257, 258))
    rates = catalog.device("h100-sxm-80gb").kernels
    assert 132 * rates.odd_flop_per_s > FLOP_PER_S, "too fast to bound these"
    assert odd == pytest.approx(even, rel=0.01)


@pytest.mark.parametrize("like", ["add", "gelu"])
def test_a_gpu_moves_bytes_at_the_bandwidth_of_a_copy_or_of_their_function_or_waits_for_its_host(like: Any) -> None:
    pointwise = layer_of_kernels([Pointwise(like, 2**18, 2**18, like=like)], key=like)
    work = LayerWork(pointwise, Phase.FORWARD, 64, 0)
    copied_bytes_per_s = 8 / (3 * 4 / BYTES_PER_S)  # a copy of the grid takes three times 4 bytes an element
    overhead_s = GRID.time("add", (1,)).seconds
    kernels = of_gpu()
    bytes_per_s = {"add": copied_bytes_per_s, "gelu": BYTES_PER_S}[like]
    expected_s = kernels.traffic * 64 * 2**18 * (2 + 2) / bytes_per_s + overhead_s
    assert kernels.seconds(work) == pytest.approx(expected_s)
    assert of_gpu(launch_s=1.0).seconds(work) == pytest.approx(2.5)


@pytest.mark.parametrize("device", ["h200"])
def test_runs_on_a_gpu_take_what_its_calibration_predicts(device: str) -> None:
    """Half of the step times within 5.5 %, peaks of tensors within 3.5 %: `simplan suite` on that device."""
    folder = ROOT / "scenarios" / "measured" / device
    calibration = Calibration.model_validate_json((folder / "calibration.json").read_bytes())
    timed = {timing.dtype for timing in calibration.kernels}
    errors_s, errors_bytes = [], []
    for case in json.loads((folder / "report.json").read_text())["cases"]:
        job = load_scenario(ROOT / "scenarios" / "one-gpu" / f"{case['name']}.yaml").job
        # buckets were the gradients then, and these were set to zero
        job = job.with_changes({"software.gradient_as_bucket_view": True, "software.zero_grad_set_to_none": False})
        prediction = predict(job, calibration=calibration if job.training.precision in timed else None)
        if case["measured_step_time_s"] is not None:
            errors_s.append(abs(prediction.step_time_s / case["measured_step_time_s"] - 1))
        allocated_bytes = prediction.to_json()["ranks"][0]["peak_memory_gib"]["allocated"] * 2**30
        errors_bytes.append(abs(allocated_bytes / case["measured_allocated_bytes"] - 1))
    assert len(errors_s) >= 24
    assert statistics.median(errors_s) < 0.055
    assert max(errors_bytes) < 0.035


def layer() -> LayerSpec:
    """A norm, a matrix and its activation."""
    weights = (ParameterSpec("norm.weight", (512,)), ParameterSpec("up.weight", (1024, 512)))
    kernels = (
        Pointwise("norm", 256 * 512, 256 * 512, like="rms_norm"),
        Gemm("up", 256, 1024, 512),
        Pointwise("gelu", 2**18, 2**18, like="gelu"),
    )
    return layer_of_kernels(kernels, weights, key="x")


@pytest.mark.parametrize(
    ("phase", "matmuls", "elements"),
    [
        (Phase.FORWARD, 1, 512 * 512 + 2**19),
        (Phase.RECOMPUTE, 1, 512 * 512 + 2**19),
        (Phase.BACKWARD, 2, 2 * (512 * 512 + 2**19) + 3 * 1024 * 512),
        (Phase.BACKWARD_INPUT, 1, 2 * (512 * 512 + 2**19)),
        (Phase.BACKWARD_WEIGHT, 1, 3 * 1024 * 512),
        (Phase.OPTIMIZER, 0, 3 * 1024 * 513),
        (Phase.SCALE, 0, 3 * 1024 * 513),
        (Phase.GATHER_COPY, 0, 3 * 1024 * 513),
    ],
)
def test_a_layer_is_the_sum_of_its_kernels(phase: Phase, matmuls: int, elements: int) -> None:
    """Two sequences of 256 tokens, counted by hand; new gradients are added to those that are there."""
    cost_estimate = GridCost(GRID, optimizer="adamw").cost_estimate(LayerWork(layer(), phase, 2, 1024 * 513))
    expected = matmuls * 2 * 512 * 1024 * 512 / FLOP_PER_S + elements * 4 / BYTES_PER_S
    assert cost_estimate.seconds == pytest.approx(expected)
    assert cost_estimate.provenance is Provenance.CALIBRATED
    assert cost_estimate.relative_std == pytest.approx((0.12**2 + 0.05**2) ** 0.5)


@pytest.mark.parametrize(
    ("optimizer", "times"), [("adamw_foreach", 84 / 32), ("sgd_momentum", 24 / 16), ("lamb", 44 / 32)]
)
def test_optimizers_that_were_not_timed_take_longer_by_their_bytes(optimizer: UpdateName, times: float) -> None:
    work = LayerWork(layer(), Phase.OPTIMIZER, 2, 1024 * 513)
    near: UpdateName = "sgd" if optimizer.startswith("sgd") else "adamw"
    timed, other = (GridCost(GRID, optimizer=name).cost_estimate(work).seconds for name in (near, optimizer))
    assert other == pytest.approx(times * timed)


def test_gradients_that_are_new_are_not_added_up() -> None:
    work = LayerWork(layer(), Phase.BACKWARD_WEIGHT, 2, 1024 * 513)
    new = GridCost(GRID, optimizer="adamw", accumulates=False).cost_estimate(work)
    assert new.seconds == pytest.approx(2 * 512 * 1024 * 512 / FLOP_PER_S)


def test_values_outside_the_range_are_named() -> None:
    cost_estimate = GridCost(GRID, optimizer="adamw").cost_estimate(LayerWork(layer(), Phase.FORWARD, 10**4, 0))
    assert cost_estimate.provenance is Provenance.EXTRAPOLATED
    assert cost_estimate.relative_std == 0.3
    assert [part.name for part in cost_estimate.parts if "beyond the sizes" in part.formula] == ["norm", "up", "gelu"]


def test_any_model_on_a_device_of_the_catalogue_is_priced_from_its_calibration() -> None:
    """Nothing of gpt2 was timed; its gathers were, over 8 ranks; 16 ranks were not."""
    model = catalog.model("gpt2-124m").model_copy(update={"num_hidden_layers": 2})
    prediction = predict(job_of(model, {"dp_shard": 8}, num_microbatches=2), name="x", calibration=CALIBRATION)
    by_name = {term.name: term.provenance for term in prediction.terms}
    assert by_name["block forward"] == by_name["all_gather over 8 ranks (shard)"] == "calibrated"
    assert prediction.memory[0].device_bytes - prediction.memory[0].reserved_bytes == 10**9
    assert not any("datasheet" in text for text in prediction.assumptions)
    prediction = predict(job_of(model, {"dp_shard": 16}, num_microbatches=1), name="x", calibration=CALIBRATION)
    by_name = {term.name: term.provenance for term in prediction.terms}
    assert (by_name["block forward"], by_name["all_gather over 16 ranks (shard)"]) == ("calibrated", "published")
    said = "not timed, so estimated from datasheets: all_gather over 16"
    assert any(text.startswith(said) for text in prediction.assumptions)


@pytest.mark.parametrize(
    ("changes", "cluster", "told"),
    [
        ({}, "dgx-a100-80gb", "was measured on NVIDIA H100 80GB HBM3 of 79 GiB, .* nothing about a100-sxm-80gb"),
        ({"memory_bytes": 2**35}, "dgx-h100", "of 32 GiB, which tells nothing about h100-sxm-80gb"),
        ({"device_kind": "cpu", "environment": {"device": "AMD EPYC"}}, "dgx-h100", "was measured on AMD EPYC, which"),
        ({}, "this-machine", "tells nothing about this-machine-cpu"),
    ],
)
def test_a_calibration_of_another_device_is_refused(changes: dict[str, Any], cluster: str, told: str) -> None:
    other = CALIBRATION.model_copy(update=changes)
    job = job_of("gpt2-124m", {"dp_replicate": 2}, cluster=cluster)
    with pytest.raises(SpecError, match=told):
        predict(job, name="x", calibration=other)


def test_another_precision_is_refused_in_a_sentence() -> None:
    cost = CalibratedCost(CALIBRATION, dtype="fp32", optimizer="adamw", num_ranks=8)
    with refuses("calibration", rule="has no timing of the layer"):
        cost.compute(LayerWork(layer(), Phase.FORWARD, 2, 0))
