"""How sure step times are: scatter that was put in is found again, and intervals hold what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fit.spread import Parts, Spread, fit_spread, interval_score, unseen_std, within, within_left_out

MADE = {"steady": 0.04, "usual": 0.08, "erratic": 0.2}
TRUTH = Spread(MADE, 0.08, 0.6, 1.2)


def made_up(runs: int, truth: Spread = TRUTH, seed: int = 0) -> tuple[list[Parts], np.ndarray]:
    """So many runs of every framework, some of which wait for messages between nodes, and their errors."""
    rng = np.random.default_rng(seed)
    parts = [
        Parts(name, 0.95 - between, 0.005, between)
        for name in truth.computing
        for between in rng.choice([0.0, 0.02, 0.3], size=runs)
    ]
    late = rng.random(len(parts)) < truth.skew / (truth.skew + 1 / truth.skew)  # of two halves the wider holds more
    scales = truth.half_widths(parts) / 2.015  # quantiles of Student's t with five degrees of freedom
    sizes = np.abs(rng.standard_t(5, len(parts))) * scales
    return parts, np.where(late, -sizes * truth.skew, sizes / truth.skew)


def test_scatter_that_was_put_in_is_found_again() -> None:
    parts, errors = made_up(250)
    found = fit_spread(parts, errors)
    for name, std in MADE.items():
        assert found.computing[name] == pytest.approx(std, rel=0.2)
    assert found.between_nodes == pytest.approx(TRUTH.between_nodes, rel=0.3)
    assert found.skew == pytest.approx(TRUTH.skew, abs=0.11)
    assert within(parts, errors, found).mean() == pytest.approx(0.9, abs=0.03)


def test_intervals_hold_nine_in_ten_of_what_they_were_not_calibrated_on() -> None:
    """Errors of a normal distribution, which is not the one that is assumed."""
    parts, _ = made_up(60)
    rng = np.random.default_rng(3)
    errors = rng.normal(0.0, Spread(MADE, 0.08, 0.6, 1.0).half_widths(parts) / 1.645)
    inside, scores = within_left_out(parts, errors, [index % 3 for index in range(len(parts))])
    assert inside.mean() == pytest.approx(0.9, abs=0.05)
    too_wide = Spread({name: 3 * std for name, std in MADE.items()}, 0.2, 2.0, 1.0)
    assert scores.mean() < interval_score(parts, errors, too_wide).mean()


def test_a_run_that_is_far_off_leaves_the_others_their_width() -> None:
    """As vtrain-multi-016 among vTrain's 45: the deviation of a normal distribution would double."""
    rng = np.random.default_rng(1)
    errors = np.append(rng.normal(0.0, 0.05, 44), -0.6)
    parts = [Parts("one", 1.0, 0.0, 0.0)] * 45
    with_it = fit_spread(parts, errors).computing["one"]
    without = fit_spread(parts[:-1], errors[:-1]).computing["one"]
    assert np.std(errors) > 1.9 * np.std(errors[:-1])
    assert without <= with_it < 1.25 * without


def test_a_framework_of_few_runs_is_drawn_to_the_others() -> None:
    parts, errors = made_up(40, replace(TRUTH, computing=dict.fromkeys("abcd", 0.05)))
    lucky = [Parts("few", 1.0, 0.0, 0.0)] * 2
    found = fit_spread([*parts, *lucky], np.append(errors, [0.001, -0.001]))
    assert 0.02 < found.computing["few"] < found.common < 0.07


def test_of_a_framework_that_was_never_seen_nine_in_ten_are_inside_each_source_counting_alike() -> None:
    """By hand: nine sources of one run 10 % off, and a tenth of many that are much further off."""
    plain = Spread({}, 0.1, 0.5, 1.0)
    parts = [Parts("any", 0.5, 0.0, 0.0)] * 59
    errors = np.array([0.1] * 9 + [0.5] * 50)
    sources = [f"source {index}" for index in range(9)] + ["tenth"] * 50
    assert unseen_std(parts, errors, sources, plain) == pytest.approx(0.1 / 1.645 / 0.5)
    assert unseen_std(parts, errors, ["one"] * 59, plain) == pytest.approx(0.5 / 1.645 / 0.5)
    late = replace(plain, skew=1.25)
    assert unseen_std(parts, -errors, sources, late) == pytest.approx(0.1 / 1.25 / 1.645 / 0.5)


def test_an_interval_by_hand() -> None:
    spread = Spread({"one": 0.1}, 0.3, 0.5, 1.25)
    parts = [Parts("one", 0.8, 0.01, 0.1)]
    half = 1.645 * np.hypot(0.08, 0.06)
    assert spread.half_widths(parts) == pytest.approx(half)
    assert spread.half_widths([parts[0]._replace(software="other")]) == pytest.approx(1.645 * np.hypot(0.24, 0.06))
    width = np.exp(1.25 * half) - np.exp(-half / 1.25)
    high = np.log(np.exp(1.25 * half) + 0.05)  # measured 5 % of the prediction above the interval
    assert interval_score(parts, np.array([0.0]), spread) == pytest.approx(width)
    assert interval_score(parts, np.array([-high]), spread) == pytest.approx(width + 20 * 0.05)
    assert within(parts * 2, np.array([-1.24 * half, 0.81 * half]), spread).tolist() == [1.0, 0.0]
