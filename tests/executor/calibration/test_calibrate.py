"""A real calibration of two ranks, small, and the statistics it writes."""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from executor.calibration.calibrate import calibrate
from executor.calibration.communication_timing import (
    TimedLink,
    collectives_of,
    group_shapes,
    receiving_s,
    warmed_up,
)
from executor.calibration.layer_timing import time_layers
from executor.calibration.timing import Bench, Stopwatch, sample_of, wide
from executor.distributed.precision import with_fp8_linears
from executor.models import model as models
from executor.models.embedding_and_head import OutputHead
from simplan import catalog
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import CalibrationRequest, Mixed, ShapeRequest
from simplan.cost.calibration.store import load
from simplan.model.families import FAMILIES
from simplan.model.implementations.loss_in_chunks import LossMode
from simplan.model.layer import CollectiveKind, LayerSpec
from simplan.model.low_precision import Fp8Recipe
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard
from simplan.program.program import LayerWork, Phase
from simplan.units import KIB
from tests.support.problems import refuses
from tests.support.slow import slow_except

MODEL = ModelSpec(
    family="llama",
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=96,
    vocab_size=128,
    seq_len=16,
)
ONE_ROUND = Bench(1, torch.device("cpu"), lambda done: done < 1)


def test_a_calibration_of_two_ranks_covers_what_was_asked() -> None:
    told: list[tuple[int, str]] = []
    halves = Shard(tp=2, sequence_parallel=True)
    request = CalibrationRequest(
        shapes=(
            ShapeRequest(model=MODEL, microbatch_size=2),
            ShapeRequest(model=MODEL, microbatch_size=2, shard=halves),
        ),
        num_ranks=2,
        budget_s=1.0,
        communication=tuple(CollectiveKind),
    )
    calibration = calibrate(request, lambda done, of, what: told.append((done, what)))
    keys = {layer.key for shard in (Shard(), halves) for layer in MODEL.layers_of(shard)}
    assert len(keys) == 6
    assert {timing.key for timing in calibration.layers} == keys
    for timing in calibration.layers:
        assert 0 < timing.forward_s.low_s <= timing.forward_s.high_s
        assert timing.forward_s.low_s <= timing.forward_s.mean_s
        assert timing.backward_s.mean_s > 0
        is_first = "embedding" in timing.key  # its input are tokens, which have no gradient
        for part in (timing.backward_input_s, timing.backward_weight_s):
            assert part is None if is_first else part is not None and part.mean_s > 0
        assert timing.optimizer_s.mean_s > 0
        assert timing.gather_copy_s.mean_s > 0
        assert timing.reduce_copy_s.mean_s > 0
    sizes = [size * KIB for size in (4, 64, 256, 1024, 4096, 16384, 65536)]
    for kind in CollectiveKind:  # on a machine that is slow at the moment the largest are left out
        timed = sorted(t.num_bytes for t in calibration.communication if t.kind == kind and t.num_ranks == 2)
        assert timed, kind
        assert timed == sizes[: len(timed)], kind
    assert {t.num_ranks for t in calibration.communication} == {2}
    assert all(t.seconds.mean_s > 0 for t in calibration.communication)
    # a process that has imported torch and trained takes hundreds of MB, and less than the machine
    assert calibration.memory_bytes is not None
    assert 100e6 < calibration.context_bytes < calibration.memory_bytes
    cost = CalibratedCost(calibration, dtype="fp32", optimizer="adamw", num_ranks=2)
    assert cost.covers(keys, 2, tuple(CollectiveKind))
    assert cost.reference_s(keys, 2)
    assert cost.reference_s(keys, 3) is None
    layers_told = [done for done, what in told if "layers" in what]
    assert len(layers_told) > 1
    assert layers_told == sorted(set(layers_told))


@pytest.mark.slow
def test_a_grid_prices_a_model_that_was_never_timed_and_an_interrupted_one_goes_on(tmp_path: Path) -> None:
    request = CalibrationRequest(
        shapes=(),
        num_ranks=2,
        budget_s=1.0,
        communication=(CollectiveKind.ALL_REDUCE, CollectiveKind.SEND),
        grid=("fp32",),
        small_grid=True,
        host_copies=True,
        overlap=True,
    )
    calibration = calibrate(request)
    assert calibration.pending == ()
    cost = CalibratedCost(calibration, dtype="fp32", optimizer="adamw", num_ranks=2)
    for layer, phase in itertools.product(MODEL.layers, Phase):
        if "embedding" not in layer.key or phase is not Phase.BACKWARD_INPUT:  # tokens have no gradient
            price = cost.compute(LayerWork(layer, phase, 2, layer.num_parameters))
            assert 0 < price.seconds < 1
    larger = cost.compute(LayerWork(MODEL.layers[1], Phase.FORWARD, 32, 0)).seconds
    assert larger > cost.compute(LayerWork(MODEL.layers[1], Phase.FORWARD, 2, 0)).seconds
    (overlap,) = calibration.overlaps
    assert cost.reference_s((), 2) == pytest.approx(calibration.kernels[0].reference_s)
    assert min(overlap.compute_slowdown, overlap.communication_slowdown) >= 1
    assert calibration.host_copies

    # one part was left to do: it is done, and no other; what was measured is in the file
    file = tmp_path / "calibration.json"
    rest = calibrate(request.model_copy(update={"pending": ("collectives and P2P sends on 2 cpu ranks",)}), None, file)
    assert rest.communication
    assert not rest.kernels
    assert load(file) == rest


def test_a_request_that_this_machine_cannot_serve_is_refused() -> None:
    num_gpus = torch.cuda.device_count()
    ring = ShapeRequest(model=MODEL, microbatch_size=2, shard=Shard(cp=2))
    tf32 = ShapeRequest(model=MODEL, microbatch_size=2, dtype="tf32")
    with refuses("device", "cuda", rule=f"this machine has {num_gpus}", fix="use device cpu"):
        calibrate(CalibrationRequest(shapes=(), num_ranks=num_gpus + 1, device="cuda"))
    with refuses("shapes.0.dtype", "tf32", rule="needs CUDA", fix="use fp32"):
        calibrate(CalibrationRequest(shapes=(tf32,), num_ranks=1))
    with refuses("shapes.0.shard.cp_comm", "ring", rule="cannot be timed", fix="use all_gather or a2a"):
        calibrate(CalibrationRequest(shapes=(ring,), num_ranks=1))


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "shapes"),
    [
        (2, 2, {(2, 1)}),
        (6, 6, {(2, 1), (3, 1), (6, 1)}),
        (8, 4, {(2, 1), (4, 1), (8, 2), (2, 2)}),
        (6, 3, {(3, 1), (6, 2), (2, 2)}),  # pairs of neighbours are in one node or in two
        (4, 1, {(2, 2), (4, 4)}),
    ],
)
def test_groups_of_one_shape_cover_all_ranks_and_are_alike(
    num_ranks: int, ranks_per_node: int, shapes: set[tuple[int, int]]
) -> None:
    groups_of = group_shapes(num_ranks, ranks_per_node)
    assert set(groups_of) == shapes
    for (size, num_nodes), groups in groups_of.items():
        assert sorted(rank for group in groups for rank in group) == list(range(num_ranks))
        assert {len(group) for group in groups} == {size}
        assert {len({rank // ranks_per_node for rank in group}) for group in groups} == {num_nodes}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("budget_s", "timed"), [(1.0, [4 * KIB, 64 * KIB]), (1000.0, [4 * KIB, 64 * KIB, 256 * KIB])])
def test_sizes_that_take_too_long_for_the_time_there_is_are_left_out(budget_s: float, timed: list[int]) -> None:
    """A link that takes a microsecond a byte: a quarter of a second for the largest size."""
    links = [
        TimedLink(CollectiveKind.ALL_REDUCE, 2, 2, num_bytes, partial(time.sleep, num_bytes * 1e-6))
        for num_bytes in (256 * KIB, 4 * KIB, 64 * KIB)
    ]
    assert [link.num_bytes for link in warmed_up(links, Stopwatch(torch.device("cpu")), budget_s)] == timed


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("family", "shard", "precisions"),
    [
        ("gpt", Shard(tp=2), ["fp32"]),
        ("llama", Shard(cp=2, cp_comm="all_gather"), ["fp32"]),
        ("llama", Shard(tp=2, sequence_parallel=True, cp=2, cp_comm="a2a"), ["fp32", "bf16"]),
    ],
)
def test_one_rank_times_its_part_of_every_layer_alone(family: str, shard: Shard, precisions: list[str]) -> None:
    """Without anybody to exchange anything with."""
    model = MODEL.model_copy(update={"family": family, "gated_mlp": FAMILIES[family].gated_mlp})
    keys = [model.layers_of(shard)[index].key for index in (0, 1, -1)]
    for dtype, mixed in itertools.product(precisions, ("autocast", "cast")):
        shape = ShapeRequest.model_validate(
            {"model": model, "shard": shard, "microbatch_size": 2, "dtype": dtype, "mixed": mixed}
        )
        timings = time_layers(shape, ONE_ROUND)
        told = mixed if dtype == "bf16" else "autocast"  # in fp32 there is one way only
        assert [(t.key, t.dtype, t.mixed) for t in timings] == [(key, dtype, told) for key in keys]
        assert all(
            min(t.forward_s.low_s, t.backward_s.low_s, t.gather_copy_s.low_s, t.reduce_copy_s.low_s) > 0
            for t in timings
        )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mixed", slow_except(["cast"], ["autocast", "cast"]))
@pytest.mark.parametrize("recipe", slow_except(["rowwise"], ["tensorwise", "rowwise", "rowwise_with_gw_hp"]))
def test_linear_layers_in_fp8_are_timed(recipe: Fp8Recipe, mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fp8Recipe] = []

    def convert(module: nn.Module, layer: LayerSpec, recipe: Fp8Recipe) -> nn.Module:
        made.append(recipe)
        return with_fp8_linears(module, layer, recipe)

    monkeypatch.setattr(models, "with_fp8_linears", convert)
    shape = ShapeRequest(model=MODEL, microbatch_size=2, dtype="fp8", fp8_recipe=recipe, mixed=mixed)
    timings = time_layers(shape, ONE_ROUND)
    assert {*made} == {recipe}
    assert {(t.dtype, t.fp8_recipe, t.mixed) for t in timings} == {("fp8", recipe, mixed)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loss", ["chunked", "recomputed"])
def test_loss_in_chunks_is_timed_with_its_head(loss: LossMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction finds the timings; a backward that recomputes includes that, and no schedule splits it."""
    tokens: list[int] = []
    whole = OutputHead.logits

    def counted(self: OutputHead, hidden: torch.Tensor) -> torch.Tensor:
        tokens.append(len(hidden))
        return whole(self, hidden)

    monkeypatch.setattr(OutputHead, "logits", counted)
    software = catalog.software("torch").model_copy(update={"loss": loss})
    shape = ShapeRequest(model=MODEL, microbatch_size=2, chunked_loss=software.chunked_losses[loss])
    *_, head = time_layers(shape, ONE_ROUND)
    layer = software.layers_of(MODEL, ParallelPlan())[-1]
    assert head.key == layer.key
    assert layer.loss_chunks is not None
    assert max(tokens) == layer.loss_chunks.tokens(2)
    assert (head.backward_input_s is None) == (loss == "recomputed")


@pytest.mark.usefixtures("alone")
def test_every_kind_of_block_is_timed_once() -> None:
    """Every second block has a window."""
    model = MODEL.model_copy(update={"sliding_window": 4, "sliding_window_pattern": 2})
    timings = time_layers(ShapeRequest(model=model, microbatch_size=2), ONE_ROUND)
    assert [t.key for t in timings] == list(dict.fromkeys(layer.key for layer in model.layers))
    assert len(timings) == 4


def test_an_interval_is_narrow_once_there_are_enough_timings() -> None:
    """McGill's notch by hand: quartiles at 0.98 and 1.02, so 1.57 x 0.04 / sqrt(n) is 1.5 % of 1 from n = 18 on."""
    assert not wide([])
    assert wide([1.0] * 7)
    assert not wide([1.0] * 8)
    spread = [0.98, 0.98, 1.0, 1.02, 1.02]
    assert wide(spread * 3)
    assert not wide(spread * 4)


def test_a_receiver_later_than_the_root_still_has_a_time() -> None:
    assert receiving_s(1.25e-3, 1.0e-3) == pytest.approx(0.25e-3)
    assert receiving_s(1.25e-3, 1.1e-3) == pytest.approx(0.15e-3)
    assert receiving_s(0.25e-3, 1.0e-3) == 0.25e-3


@pytest.mark.usefixtures("alone")
def test_sample_statistics_by_hand() -> None:
    """Against torch's quantiles; one stall among a hundred timings hardly moves the mean."""
    seconds = [1.0 + 0.01 * (i % 10) for i in range(100)]
    calm = sample_of(seconds, 10)
    values = torch.tensor(seconds, dtype=torch.float64)
    assert calm.low_s == pytest.approx(values.quantile(0.1).item())
    assert calm.high_s == pytest.approx(values.quantile(0.9).item())
    assert calm.mean_s == pytest.approx(1.045, abs=1e-3)
    assert calm.round_std == pytest.approx(0.0, abs=1e-9)  # every round of ten has the same mean
    stalled = sample_of([*seconds[:-1], 1000.0], 10)
    assert stalled.mean_s == pytest.approx(calm.mean_s, abs=2e-3)
    # rounds at 1 and at 1.2 by turns: mean 1.1, p10 to p90 is 0.2
    drifting = sample_of([1.0 + 0.2 * ((i // 5) % 2) for i in range(100)], 5)
    assert drifting.round_std == pytest.approx(0.2 / 2.563 / 1.1, rel=1e-6)


def test_a_request_of_nothing_tells_how_fast_the_machine_is() -> None:
    """2 * 384^3 operations: no core of today does a thousand times as many in a second, or as few, as one."""
    calibration = calibrate(CalibrationRequest(shapes=(), num_ranks=2, communication=()))
    assert calibration.reference_s is not None
    assert 1e9 < 2 * 384**3 / calibration.reference_s < 1e13
    assert not calibration.layers


def test_gathers_are_timed_into_new_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP allocates the output of every gather; above 32 MiB its pages are new each time."""
    outputs: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda output, shard, group: outputs.append(output))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    whole = torch.zeros(8)
    group: Any = None
    (link,) = collectives_of([CollectiveKind.ALL_GATHER], group, 1, whole, torch.zeros(8))
    for _ in range(2):
        assert link.run is not None
        link.run()
    assert len({whole.data_ptr(), *(output.data_ptr() for output in outputs)}) == 3
