"""Loss curves of runs, their comparison with a baseline, and the committed comparison of ways to train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.losses.figure import figure
from benchmarks.losses.report import curves_of, page
from benchmarks.losses.ways import SYNCHRONOUS
from simplan.errors import SpecError
from simplan.runs.measurement import LossPoint, Measurement
from simplan.training import DataName, TrainingSpec
from simplan.validate.losses import LossCurve, compare_losses, compare_with_baseline
from tests.executor.conftest import make_job, make_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "losses.md"


def measurement(scale: float, *, data: DataName = "markov", vocab_size: int = 64, num_steps: int = 400) -> Measurement:
    """A run whose loss is the scale over its samples, above 2; a step has 8 samples and takes the scale in seconds."""
    training = TrainingSpec(global_batch_size=8, precision="fp32", data=data)
    points = [
        LossPoint(num_samples=8 * step, seconds=scale * step, loss=2 + scale / (8 * step))
        for step in range(1, num_steps + 1)
    ]
    job = make_job(model=make_model(vocab_size=vocab_size), training=training)
    return Measurement(job=job, step_times_s=(1.0,), loss_curve=() if data == "random" else tuple(points))


def test_cost_of_the_loss_that_both_runs_reach() -> None:
    """A loss of a/n takes n = a/loss samples: three times the scale, three times the samples, nine times the time."""
    for run, baseline, factor in ((3.0, 1.0, 3.0), (1.0, 3.0, 1 / 3), (1.0, 1.0, 1.0)):
        cost = compare_with_baseline(measurement(run), measurement(baseline))
        assert cost.samples_factor == pytest.approx(factor, rel=0.1), "losses are means of 20 steps"
        assert cost.seconds_factor == pytest.approx(factor**2, rel=0.1)
        assert cost.loss == pytest.approx(2 + max(run, baseline) / 3200, rel=1e-3)


def test_loss_of_a_step_is_the_mean_of_the_last_ones() -> None:
    curve = LossCurve.of(measurement(8.0, num_steps=40))
    assert curve is not None
    assert curve.losses[0] == 3.0
    assert curve.losses[-1] == pytest.approx(2 + (1 / 40 + 1 / 39) / 2)
    assert [curve.step_at(samples) for samples in (7, 8, 23, 320, 321)] == [None, 0, 1, 39, None]


@pytest.mark.parametrize(
    ("run", "baseline", "sentence"),
    [
        (measurement(1.0, data="random"), measurement(1.0), "training.data = random: has no losses"),
        (measurement(1.0), measurement(1.0, data="random"), "training.data = random: has no losses"),
        (measurement(1.0), measurement(1.0, vocab_size=65), "model: differs from that of the run"),
    ],
)
def test_losses_of_different_tasks_are_not_compared(run: Measurement, baseline: Measurement, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        compare_with_baseline(run, baseline)


def test_committed_page_and_figure_are_those_of_the_data() -> None:
    data = json.loads(PAGE.with_suffix(".json").read_text())
    assert PAGE.read_text() == page(data)
    assert PAGE.with_suffix(".svg").read_text() == figure(data)
    curves = curves_of(data)
    together = [way for way in curves if not any(word in way for word in ("staleness", "unbounded", "hogwild"))]
    first_losses = zip(*[[curve.losses[0] for curve in curves[way]] for way in together], strict=True)
    assert all(len(set(losses)) == 1 for losses in first_losses), "weights and samples are those of the seed"
    for way, baseline in zip(curves["fp16"], curves[SYNCHRONOUS], strict=True):
        assert compare_losses(way, baseline).samples_factor == pytest.approx(1.0, abs=0.05)
