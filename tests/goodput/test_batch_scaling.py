"""Samples to target against batch: the law's own identities, published counts of MLPerf, and tables of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import benchmarks.goodput
from simplan.errors import SpecError
from simplan.goodput.batch_scaling import SamplesAtBatch, fitted, learning_rate_rule
from simplan.goodput.sections import RunLength
from simplan.optimizers import OPTIMIZERS
from simplan.problems import parse_model

MLPERF: dict[str, Any] = yaml.safe_load(Path(benchmarks.goodput.__path__[0], "mlperf.yaml").read_text())["samples"]
LAW = SamplesAtBatch(kind="critical_batch", num_samples=1_000_000, critical_batch_size=500.0)


def published(name: str) -> list[tuple[int, float]]:
    """Batch and median of samples to the target."""
    return [(batch, samples) for batch, _, samples, *_ in MLPERF[name]["points"]]


def worst_left_out(points: list[tuple[int, float]]) -> float:
    """Largest relative error of points between the ends, each predicted from all others."""
    return max(
        abs(fitted(points[:number] + points[number + 1 :]).samples(batch) / samples - 1)
        for number, (batch, samples) in enumerate(points)
        if 0 < number < len(points) - 1
    )


def test_law_is_that_of_mccandlish() -> None:
    """S / S_min - 1 = 1 / (E / E_min - 1), with S_min = E_min / B_crit; B_crit needs twice E_min."""
    for batch in (1, 100, 500, 10_000):
        examples = LAW.samples(batch)
        steps_factor = examples / batch / (1_000_000 / 500)
        assert steps_factor - 1 == pytest.approx(1 / (examples / 1_000_000 - 1))
    assert LAW.samples(500) == pytest.approx(2_000_000)


def test_num_samples_are_those_of_its_batch() -> None:
    law = SamplesAtBatch(kind="critical_batch", num_samples=300_000, batch_size=64, critical_batch_size=128.0)
    assert law.samples(64) == pytest.approx(300_000)
    assert law.num_steps(64) == 4688  # 4687.5
    assert law.samples(256) == pytest.approx(600_000)  # 200,000 of small batches, three times


def test_critical_batch_follows_from_loss_or_samples() -> None:
    """Kaplan et al. 2020: 1 to 2 million tokens at convergence of the largest models. Zhang et al.: 0.47."""
    for loss in (2.65, 3.0):
        law = SamplesAtBatch(kind="loss", num_samples=10**9, loss=loss)
        assert 1e6 < 2048 * (law.critical_batch(2048) or 0) < 2.1e6
    law = SamplesAtBatch(kind="data", num_samples=4 * 10**6, critical_batch_size=100.0, at_samples=10**6)
    assert law.critical_batch(1) == pytest.approx(100 * 4**0.47)


@pytest.mark.parametrize(("name", "error"), [("llama2_70b_lora", 0.10), ("llama31_8b", 0.10), ("bert", 0.18)])
def test_published_batches_are_predicted_from_the_others(name: str, error: float) -> None:
    """Within 10 % between the ends for two benchmarks. BERT's hyperparameters differ from batch to batch."""
    assert error - 0.02 < worst_left_out(published(name)) < error


def test_one_law_agrees_with_all_batches_of_405b() -> None:
    """Up to the resolution of its evaluations: that of the step from 1,152 to 1,216 is one of 46,080 samples."""
    law = SamplesAtBatch(kind="critical_batch", num_samples=276_480, batch_size=1184, critical_batch_size=6000.0)
    resolution = MLPERF["llama31_405b"]["evaluation_samples"]
    for batch, samples in published("llama31_405b"):
        assert samples - resolution - batch <= law.samples(batch) <= samples + batch


def test_table_is_interpolated_and_not_extrapolated() -> None:
    law = SamplesAtBatch(kind="table", table=((16, 100_000.0), (64, 400_000.0), (128, 400_000.0)))
    assert [law.samples(batch) for batch in (16, 32, 64, 100)] == pytest.approx([100_000, 200_000, 400_000, 400_000])
    with pytest.raises(ValueError, match=r"batch 8 is outside .* 16 to 128; add a point"):
        law.samples(8)
    with pytest.raises(ValueError, match="the batch 129 is outside"):
        law.samples(129)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "critical_batch", "num_samples": 10}, "of kind critical_batch needs critical_batch_size"),
        ({"kind": "loss", "num_samples": 10, "loss": 2.0, "exponent": 0.5}, "has exponent, and loss has num_samples"),
        ({"kind": "table", "table": [[16, 100]]}, "table needs two or more points, with rising batches"),
        ({"kind": "table", "table": [[16, 100], [8, 90]]}, "table needs two or more points, with rising batches"),
    ],
)
def test_wrong_keys_are_refused_in_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        parse_model(RunLength, {"samples_at_batch": fields})


def test_samples_that_fall_with_the_batch_have_no_critical_batch() -> None:
    with pytest.raises(ValueError, match="samples must rise with the batch"):
        fitted([(8, 100.0), (16, 90.0)])


def test_every_optimizer_has_a_rule_for_its_learning_rate() -> None:
    """MLPerf's 405B is linear; linear for SGD and LARS, square root for all others."""
    powers = {name: learning_rate_rule(name).power for name in OPTIMIZERS}
    assert powers == {name: 1 if name in ("sgd", "sgd_momentum", "lars") else 0.5 for name in OPTIMIZERS}
    assert learning_rate_rule("lamb").factor(4) == 2
