"""Calibrated costs: looked up where timed, said to be extrapolated where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan import catalog
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import Calibration, CommunicationTiming, LayerTiming, Mixed, Sample
from simplan.cost.calibration.store import load, save
from simplan.cost.communication.collectives import communication_cost
from simplan.cost.model import Provenance
from simplan.errors import SpecError
from simplan.model.layer import (
    Attention,
    CollectiveKind,
    Gemm,
    Kernel,
    LayerCollective,
    LayerSpec,
    ParameterSpec,
    Pointwise,
)
from simplan.model.low_precision import Fp8Recipe
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan
from simplan.program.program import Communication, LayerWork, Phase
from tests.jobs import tiny_model
from tests.layers import layer_of_kernels
from tests.support.problems import refuses

MODEL = tiny_model()
BLOCK = MODEL.layers[1]


def sample(seconds: float) -> Sample:
    return Sample(mean_s=seconds, low_s=0.9 * seconds, high_s=1.1 * seconds, round_std=0.03, num_repeats=20)


def link(kind: CollectiveKind, num_bytes: int, seconds: float, num_ranks: int = 2) -> CommunicationTiming:
    return CommunicationTiming(
        kind=kind, num_ranks=num_ranks, world_size=2, num_bytes=num_bytes, seconds=sample(seconds)
    )


CALIBRATION = Calibration(
    created="2026-01-01T00:00:00+00:00",
    device_kind="cpu",
    num_cores=2,
    memory_bytes=2**33,
    layers=(
        LayerTiming(
            key=BLOCK.key,
            microbatch_size=2,
            dtype="fp32",
            num_ranks=2,
            optimizer="adamw",
            forward_s=sample(0.010),
            backward_s=sample(0.020),
            backward_input_s=sample(0.012),
            backward_weight_s=sample(0.009),
            optimizer_s=sample(0.004),
            scale_s=sample(0.001),
            gather_copy_s=sample(0.002),
            reduce_copy_s=sample(0.003),
        ),
    ),
    communication=(
        link(CollectiveKind.ALL_REDUCE, 1000, 0.001),
        link(CollectiveKind.ALL_REDUCE, 3000, 0.003),
        link(CollectiveKind.ALL_REDUCE, 5000, 0.004),
        link(CollectiveKind.SEND, 1000, 0.002),
    ),
)


def calibrated(num_ranks: int = 2, **changes: Any) -> CalibratedCost:
    """The cost in fp32 of a calibration with changes."""
    calibration = CALIBRATION.model_copy(update=changes)
    return CalibratedCost(calibration, dtype="fp32", optimizer="adamw", num_ranks=num_ranks)


COST = calibrated()


def work(phase: Phase, microbatch_size: int = 2, num_parameters: int = BLOCK.num_parameters) -> LayerWork:
    return LayerWork(BLOCK, phase, microbatch_size, num_parameters)


@pytest.mark.parametrize(
    ("phase", "part", "seconds"),
    [
        (Phase.FORWARD, 1, 0.010),
        (Phase.RECOMPUTE, 1, 0.010),
        (Phase.BACKWARD, 1, 0.020),
        (Phase.BACKWARD_INPUT, 1, 0.012),
        (Phase.BACKWARD_WEIGHT, 1, 0.009),
        # in proportion to the weights that are updated or copied
        (Phase.OPTIMIZER, 2, 0.004 / 2),
        (Phase.GATHER_COPY, 4, 0.002 / 4),
        (Phase.REDUCE_COPY, 4, 0.003 / 4),
    ],
)
def test_a_timed_layer_costs_its_mean(phase: Phase, part: int, seconds: float) -> None:
    cost_estimate = COST.compute(work(phase, num_parameters=BLOCK.num_parameters // part))
    assert cost_estimate.seconds == pytest.approx(seconds, rel=1e-3 if part > 1 else 1e-12)
    assert cost_estimate.provenance is Provenance.CALIBRATED
    assert cost_estimate.relative_std == pytest.approx(0.05)  # 3 % from round to round and 4 % that every timing has


def test_a_layer_whose_input_has_no_gradient_has_its_whole_backward_in_the_second_part() -> None:
    (timing,) = CALIBRATION.layers
    first = timing.model_copy(update={"backward_input_s": None, "backward_weight_s": None})
    cost = calibrated(layers=(first,))
    cost_estimate = cost.compute(work(Phase.BACKWARD_INPUT))
    assert (cost_estimate.seconds, cost_estimate.provenance) == (0.0, Provenance.CALIBRATED)
    assert cost.compute(work(Phase.BACKWARD_WEIGHT)).seconds == 0.020


def parts(*kernels: Kernel) -> LayerSpec:
    """Every matrix has weights."""
    weights = tuple(ParameterSpec(f"{k.name}.weight", (k.n, k.k)) for k in kernels if isinstance(k, Gemm))
    return layer_of_kernels(kernels, weights, key=BLOCK.key)


def test_parts_of_a_layer_add_up_to_it_and_large_ones_cost_what_their_flops_say() -> None:
    """Of two large matrix products one has three times the FLOPs of the other; the exchange is priced elsewhere."""
    collective = LayerCollective("x", "tp", CollectiveKind.ALL_REDUCE, None, 10**9)
    layer = parts(Gemm("a", 10**4, 10**4, 10**4), collective, Gemm("b", 10**4, 3 * 10**4, 10**4))
    seconds = [COST.compute(LayerWork(layer, Phase.FORWARD, 2, 0, (index,))).seconds for index in range(3)]
    assert seconds == pytest.approx([0.0025, 0.0, 0.0075], rel=0.02)
    assert sum(seconds) == pytest.approx(0.010)
    backward = COST.compute(LayerWork(layer, Phase.BACKWARD, 2, 0, (0, 1))).seconds
    assert backward == pytest.approx(0.005, rel=0.02)


def test_parts_of_a_split_backward_have_their_share_of_it() -> None:
    """Attention has the FLOPs of both matrices: two thirds of I, which has one product of each, and nothing of W."""
    attention = Attention(1, 1, 10**4, 10**4, causal=False)  # 4 * 10^12 FLOPs
    layer = parts(Gemm("a", 10**4, 10**4, 10**4), attention, Pointwise("b", 0, 0), Gemm("c", 10**4, 10**4, 10**4))
    for phase, seconds in (
        (Phase.BACKWARD_INPUT, [0.002, 0.008, 0.0, 0.002]),
        (Phase.BACKWARD_WEIGHT, [0.0045, 0.0, 0.0, 0.0045]),
    ):
        parts_s = [COST.compute(LayerWork(layer, phase, 2, 0, (index,))).seconds for index in range(4)]
        assert parts_s == pytest.approx(seconds, rel=0.02)


def test_recomputation_costs_the_forward_of_what_runs_again() -> None:
    again = LayerWork(BLOCK, Phase.RECOMPUTE, 2, 0, (2,))  # the attention core
    assert 0 < COST.compute(again).seconds < 0.010
    assert COST.compute(again).seconds == COST.compute(again._replace(phase=Phase.FORWARD)).seconds


def test_half_precision_is_looked_up_by_how_it_comes_about() -> None:
    (timing,) = CALIBRATION.layers
    casts = timing.model_copy(update={"dtype": "bf16", "mixed": "cast", "forward_s": sample(0.003)})
    calibration = CALIBRATION.model_copy(update={"layers": (timing, casts)})

    def cost(dtype: str, mixed: Mixed) -> CalibratedCost:
        return CalibratedCost(calibration, dtype=dtype, optimizer="adamw", num_ranks=2, mixed=mixed)

    assert cost("bf16", "cast").compute(work(Phase.FORWARD)).seconds == 0.003
    assert not cost("bf16", "autocast").covers([BLOCK.key], 2)
    # fp32 is fp32, whether parameters are sharded or not
    assert cost("fp32", "cast").compute(work(Phase.FORWARD)).seconds == 0.010


def test_recipes_of_fp8_are_looked_up_apart() -> None:
    (timing,) = CALIBRATION.layers
    calibration = CALIBRATION.model_copy(
        update={"layers": (timing.model_copy(update={"dtype": "fp8", "fp8_recipe": "rowwise"}),)}
    )

    def covers(recipe: Fp8Recipe) -> bool:
        cost = CalibratedCost(calibration, dtype="fp8", optimizer="adamw", num_ranks=2, fp8_recipe=recipe)
        return cost.covers([BLOCK.key], 2)

    assert covers("rowwise")
    assert not covers("tensorwise")


def test_another_microbatch_size_is_extrapolated() -> None:
    cost_estimate = COST.compute(work(Phase.FORWARD, microbatch_size=6))
    assert cost_estimate.seconds == pytest.approx(0.030)
    assert cost_estimate.provenance is Provenance.EXTRAPOLATED
    assert cost_estimate.relative_std >= 0.3


def test_ranks_that_shared_cores_when_timed_are_priced_alone() -> None:
    """Eight ranks on two cores: each was timed four times slower than it runs alone; so were the communications."""
    cost = calibrated(
        8,
        layers=tuple(t.model_copy(update={"num_ranks": 8}) for t in CALIBRATION.layers),
        communication=tuple(t.model_copy(update={"world_size": 8}) for t in CALIBRATION.communication),
    )
    assert cost.compute(work(Phase.FORWARD)).seconds == pytest.approx(0.010 / 4)
    assert cost.communication(Communication(CollectiveKind.ALL_REDUCE, 1000, (0, 1))).seconds == pytest.approx(
        0.001 / 4
    )


def test_a_layer_that_was_never_timed_is_refused() -> None:
    other = MODEL.model_copy(update={"hidden_size": 128}).layers[1]
    with pytest.raises(SpecError, match="has no timing of the layer gpt-block:h128"):
        COST.compute(LayerWork(other, Phase.FORWARD, 1, other.num_parameters))


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "provenance"),
    [
        (1000, 0.001, Provenance.CALIBRATED),
        (2000, 0.002, Provenance.CALIBRATED),
        (4000, 0.0035, Provenance.CALIBRATED),
        (10, 0.001, Provenance.CALIBRATED),
        (7000, 0.005, Provenance.EXTRAPOLATED),
    ],
)
def test_communications_are_interpolated_in_bytes(num_bytes: int, seconds: float, provenance: Provenance) -> None:
    cost_estimate = COST.communication(Communication(CollectiveKind.ALL_REDUCE, num_bytes, (0, 1)))
    assert cost_estimate.seconds == pytest.approx(seconds)
    assert cost_estimate.provenance is provenance


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (CollectiveKind.ALL_REDUCE, (2 * 3 / 4) / (2 * 1 / 2)),
        (CollectiveKind.ALL_GATHER, (3 / 4) / (1 / 2)),
        (CollectiveKind.REDUCE_SCATTER, (3 / 4) / (1 / 2)),
        (CollectiveKind.ALL_TO_ALL, (3 / 4) / (1 / 2)),
        (CollectiveKind.BROADCAST, 1),
        (CollectiveKind.RING, 1),
    ],
)
def test_kinds_are_told_apart_and_extrapolated_by_what_each_rank_sends(kind: CollectiveKind, factor: float) -> None:
    """Four ranks where two were timed."""
    timings = tuple(link(kind, 1000, 0.001 * (1 + index)) for index, kind in enumerate(CollectiveKind))
    cost = calibrated(communication=timings)
    own_s = 0.001 * (1 + list(CollectiveKind).index(kind))
    assert cost.communication(Communication(kind, 1000, (0, 1))).seconds == pytest.approx(own_s)
    larger = cost.communication(Communication(kind, 1000, (0, 1, 2, 3)))
    assert larger.seconds == pytest.approx(own_s * factor)
    assert larger.provenance is Provenance.EXTRAPOLATED


def test_a_group_of_one_costs_nothing() -> None:
    cost_estimate = COST.communication(Communication(CollectiveKind.BROADCAST, 1000, (1,)))
    assert (cost_estimate.seconds, cost_estimate.provenance) == (0.0, Provenance.CALIBRATED)


def test_covers_says_whether_a_calibration_is_enough() -> None:
    assert COST.covers([BLOCK.key], 2)
    assert COST.covers([BLOCK.key], 2, {CollectiveKind.ALL_REDUCE, CollectiveKind.SEND})
    assert not COST.covers([BLOCK.key], 2, {CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST})
    assert not COST.covers([BLOCK.key], 3)
    assert not COST.covers([MODEL.layers[0].key], 2)
    assert not calibrated(3).covers([BLOCK.key], 2)


def test_kernels_that_were_never_timed_are_refused() -> None:
    cost = calibrated(layers=(), communication=())
    with pytest.raises(SpecError, match="run `simplan calibrate SCENARIO`"):
        cost.compute(work(Phase.FORWARD))
    with refuses("calibration", rule="has no timing of send", fix="run `simplan calibrate --ranks 2`"):
        cost.communication(Communication(CollectiveKind.SEND, 1, (0, 1)))


def test_merging_keeps_what_only_one_has_and_takes_the_newer_of_both() -> None:
    newer = CALIBRATION.model_copy(
        update={
            "communication": (link(CollectiveKind.SEND, 1000, 0.5), link(CollectiveKind.SEND, 2000, 0.6)),
            "layers": (),
        }
    )
    merged = CALIBRATION.merged(newer)
    assert merged.layers == CALIBRATION.layers
    mean_s = {(c.kind, c.num_bytes): c.seconds.mean_s for c in merged.communication}
    assert mean_s[(CollectiveKind.SEND, 1000)] == 0.5
    assert len(mean_s) == 5


def test_timings_under_another_torch_are_dropped() -> None:
    newer = CALIBRATION.model_copy(update={"environment": {"torch": "2.99"}, "layers": ()})
    assert CALIBRATION.merged(newer) == newer


def test_store_reads_what_it_wrote_and_refuses_what_it_did_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    assert load(path) is None
    save(path, CALIBRATION)
    assert load(path) == CALIBRATION
    path.write_text('{"schema_version": 7}')
    with pytest.raises(SpecError, match="delete the file and run `simplan calibrate`"):
        load(path)


@pytest.mark.parametrize(("now_s", "factor"), [(0.012, 2.0), (0.003, 0.5), (0.0061, 1.0)])
def test_timings_of_a_busy_machine_are_those_of_now(now_s: float, factor: float) -> None:
    """The product took 6 ms while the block was timed; what a twentieth changes is noise."""
    timing = CALIBRATION.layers[0].model_copy(update={"reference_s": 0.006})
    four = timing.model_copy(update={"num_ranks": 4})
    calibration = CALIBRATION.model_copy(update={"layers": (timing, four)})
    paced = calibration.at_pace(now_s, 2)
    assert paced.pace == (None if factor == 1.0 else pytest.approx(factor))
    assert paced.layers[0].backward_s.mean_s == pytest.approx(0.020 * factor)
    assert paced.layers[0].backward_s.high_s == pytest.approx(0.022 * factor)
    assert paced.layers[0].reference_s == (0.006 if factor == 1.0 else now_s)
    assert paced.layers[1] == four, "timed on other ranks"
    wider = paced.layers[0].forward_s.round_std / timing.forward_s.round_std
    assert (wider > 1.5) == (factor != 1.0)
    assert paced.communication == CALIBRATION.communication


def test_values_that_were_scaled_already_stay() -> None:
    now_s = 0.012
    timing = CALIBRATION.layers[0].model_copy(update={"reference_s": 0.006})
    paced = CALIBRATION.model_copy(update={"layers": (timing,)}).at_pace(now_s, 2)
    assert paced.at_pace(now_s, 2).layers == paced.layers


def test_placed_ranks_are_on_the_nodes_of_their_devices() -> None:
    """Timings of one node are for groups in one node, whatever the numbers of their ranks."""
    cluster = catalog.cluster("dgx-h100", 16)
    placement = Placement.of(ParallelPlan(tp=2, dp_replicate=8, placement=("dp", "tp")))
    cost = CalibratedCost(
        CALIBRATION, dtype="fp32", optimizer="adamw", num_ranks=2, cluster=cluster, placement=placement
    )
    inside, across = (Communication(CollectiveKind.ALL_REDUCE, 3000, ranks) for ranks in ((0, 2), (0, 1)))
    assert cost.communication(inside).seconds == pytest.approx(0.003)
    assert cost.communication(across) == communication_cost(across._replace(ranks=(0, 8)), cluster)


@pytest.mark.parametrize("seconds", [1.7e308, 3601.0, float("inf"), float("nan"), -1.0])
def test_time_beyond_an_hour_is_refused(seconds: float) -> None:
    """Sums of such times overflow."""
    with pytest.raises(ValueError, match="mean_s"):
        Sample(mean_s=seconds, low_s=0.0, high_s=0.0, round_std=0.0, num_repeats=1)


@pytest.mark.parametrize("created", ["{}", "", "2026-01-01T00:00:00"])
def test_calibration_without_a_date_is_refused(created: str) -> None:
    """Its age decides whether the machine's speed is measured again."""
    with pytest.raises(ValueError, match=r"must be an ISO date and time with its time zone"):
        Calibration(created=created, device_kind="cpu", num_cores=1, memory_bytes=1)
