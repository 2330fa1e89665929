"""Calibrated costs: looked up where timed, said to be extrapolated where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.cost.base import Provenance
from simplan.cost.calibrated import CalibratedCost
from simplan.cost.calibration import Calibration, CommunicationTiming, LayerTiming, MatmulTiming, Sample
from simplan.cost.store import load, save
from simplan.errors import SpecError
from simplan.program.program import LayerWork, Message, Phase
from simplan.spec.model import ModelSpec

MODEL = ModelSpec(family="gpt", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, seq_len=16)
BLOCK = MODEL.layers[1]


def sample(seconds: float) -> Sample:
    return Sample(mean_s=seconds, low_s=0.9 * seconds, high_s=1.1 * seconds, round_std=0.03, num_repeats=20)


def link(kind: str, num_bytes: int, seconds: float, num_ranks: int = 2) -> CommunicationTiming:
    return CommunicationTiming(
        kind=kind,  # type: ignore[arg-type]
        num_ranks=num_ranks,
        world_size=2,
        num_bytes=num_bytes,
        seconds=sample(seconds),
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
            optimizer_s=sample(0.004),
            scale_s=sample(0.001),
        ),
    ),
    matmuls=(MatmulTiming(m=100, n=100, k=100, dtype="fp32", num_ranks=2, seconds=sample(2e-5)),),  # 100 GFLOP/s
    communication=(
        link("all_reduce", 1000, 0.001),
        link("all_reduce", 3000, 0.003),
        link("all_reduce", 5000, 0.004),
        link("send", 1000, 0.002),
    ),
)
COST = CalibratedCost(CALIBRATION, dtype="fp32", optimizer="adamw", num_ranks=2)


def work(phase: Phase, microbatch_size: int = 2, num_parameters: int = BLOCK.num_parameters) -> LayerWork:
    return LayerWork(BLOCK, phase, microbatch_size, num_parameters)


def test_a_timed_layer_costs_its_mean() -> None:
    assert COST.compute(work(Phase.FORWARD)).seconds == 0.010
    price = COST.compute(work(Phase.BACKWARD))
    assert (price.seconds, price.provenance) == (0.020, Provenance.CALIBRATED)
    assert price.relative_std == pytest.approx(0.05)  # 3 % from round to round and 4 % that every timing has


def test_the_optimizer_costs_in_proportion_to_the_weights_it_updates() -> None:
    half = COST.compute(work(Phase.OPTIMIZER, num_parameters=BLOCK.num_parameters // 2))
    assert half.seconds == pytest.approx(0.002, rel=1e-3)


def test_another_microbatch_size_is_extrapolated() -> None:
    price = COST.compute(work(Phase.FORWARD, microbatch_size=6))
    assert price.seconds == pytest.approx(0.030)
    assert price.provenance is Provenance.EXTRAPOLATED
    assert price.relative_std >= 0.3


def test_ranks_that_shared_cores_when_timed_are_priced_alone() -> None:
    """Eight ranks on two cores: each was timed four times slower than it runs alone; so were the messages."""
    crowded = CALIBRATION.model_copy(
        update={
            "layers": tuple(t.model_copy(update={"num_ranks": 8}) for t in CALIBRATION.layers),
            "communication": tuple(t.model_copy(update={"world_size": 8}) for t in CALIBRATION.communication),
        }
    )
    cost = CalibratedCost(crowded, dtype="fp32", optimizer="adamw", num_ranks=8)
    assert cost.compute(work(Phase.FORWARD)).seconds == pytest.approx(0.010 / 4)
    assert cost.message(Message("all_reduce", 1000, (0, 1))).seconds == pytest.approx(0.001 / 4)


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
def test_messages_are_interpolated_in_bytes(num_bytes: int, seconds: float, provenance: Provenance) -> None:
    price = COST.message(Message("all_reduce", num_bytes, (0, 1)))
    assert price.seconds == pytest.approx(seconds)
    assert price.provenance is provenance


def test_a_larger_group_is_scaled_as_a_ring() -> None:
    price = COST.message(Message("all_reduce", 1000, (0, 1, 2, 3)))
    assert price.seconds == pytest.approx(0.001 * (3 / 4) / (1 / 2))
    assert price.provenance is Provenance.EXTRAPOLATED


def test_covers_says_whether_a_calibration_is_enough() -> None:
    assert COST.covers([BLOCK.key], 2)
    assert not COST.covers([BLOCK.key], 3)
    assert not COST.covers([MODEL.layers[0].key], 2)
    assert not CalibratedCost(CALIBRATION, dtype="fp32", optimizer="adamw", num_ranks=3).covers([BLOCK.key], 2)


def test_what_was_never_timed_is_refused() -> None:
    empty = CALIBRATION.model_copy(update={"layers": (), "matmuls": (), "communication": ()})
    cost = CalibratedCost(empty, dtype="fp32", optimizer="adamw", num_ranks=2)
    with pytest.raises(SpecError, match="run `simplan calibrate SCENARIO`"):
        cost.compute(work(Phase.FORWARD))
    with pytest.raises(SpecError, match=r"has no timing of send; run `simplan calibrate --ranks 2`"):
        cost.message(Message("send", 1, (0, 1)))


def test_merging_keeps_what_only_one_has_and_takes_the_newer_of_both() -> None:
    newer = CALIBRATION.model_copy(
        update={"communication": (link("send", 1000, 0.5), link("send", 2000, 0.6)), "layers": ()}
    )
    merged = CALIBRATION.merged(newer)
    assert merged.layers == CALIBRATION.layers
    found = {(c.kind, c.num_bytes): c.seconds.mean_s for c in merged.communication}
    assert found[("send", 1000)] == 0.5
    assert len(found) == 5


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
