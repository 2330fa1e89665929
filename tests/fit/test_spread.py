"""How sure step times are: scatter that was put in is found again, and intervals hold what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fit.perturbation import BETWEEN, MovedParts
from fit.spread import SpreadEstimate, fit_spread, interval_score, within, within_left_out

MADE = {"steady": 0.04, "usual": 0.08, "erratic": 0.2}
TRUTH = SpreadEstimate(MADE, 0.08, 0.6)


def part(name: str, computing: float, waits: float = 0.0, hidden: float = 0.0) -> MovedParts:
    """A step that waits for communications between nodes for a share, and has others that may take as long before it
    does."""
    spread = np.array(BETWEEN)
    longer = np.log1p(waits * spread + np.maximum(0.0, hidden * spread - hidden))
    shorter = -np.log1p(-waits * spread / (1 + spread))
    return MovedParts(name, computing, tuple(longer), tuple(shorter))


def made_up(runs: int, truth: SpreadEstimate = TRUTH, seed: int = 0) -> tuple[list[MovedParts], np.ndarray]:
    """So many runs of every framework, some of which wait for communications between nodes, and their errors."""
    rng = np.random.default_rng(seed)
    parts = [
        part(name, 0.95 - between, between)
        for name in truth.computing
        for between in rng.choice([0.0, 0.02, 0.3], size=runs)
    ]
    down, up = (side / 2.015 for side in truth.half_widths(parts))  # as Student's t of five degrees
    late = rng.random(len(parts)) < up / (up + down)  # of two halves the wider holds more
    sizes = np.abs(rng.standard_t(5, len(parts)))
    return parts, np.where(late, -sizes * up, sizes * down)


def test_scatter_that_was_put_in_is_found_again() -> None:
    parts, errors = made_up(250)
    spread = fit_spread(parts, errors)
    for name, std in MADE.items():
        assert spread.computing[name] == pytest.approx(std, rel=0.2)
    assert spread.between_nodes == pytest.approx(TRUTH.between_nodes, rel=0.3)
    assert within(parts, errors, spread).mean() == pytest.approx(0.9, abs=0.03)


def test_intervals_hold_nine_in_ten_of_what_they_were_not_calibrated_on() -> None:
    """Errors of a normal distribution, which is not the one that is assumed."""
    parts, _ = made_up(60)
    rng = np.random.default_rng(3)
    down, up = TRUTH.half_widths(parts)
    errors = rng.normal(0.0, (down + up) / 2 / 1.645)
    inside, scores = within_left_out(parts, errors, [index % 3 for index in range(len(parts))])
    assert inside.mean() == pytest.approx(0.9, abs=0.05)
    too_wide = SpreadEstimate({name: 3 * std for name, std in MADE.items()}, 0.2, 2.0)
    assert scores.mean() < interval_score(parts, errors, too_wide).mean()


def test_a_run_that_is_far_off_leaves_the_others_their_width() -> None:
    """As vtrain-multi-016 among vTrain's 45: the deviation of a normal distribution would double."""
    rng = np.random.default_rng(1)
    errors = np.append(rng.normal(0.0, 0.05, 44), -0.6)
    parts = [part("one", 1.0)] * 45
    with_it = fit_spread(parts, errors).computing["one"]
    without = fit_spread(parts[:-1], errors[:-1]).computing["one"]
    assert np.std(errors) > 1.9 * np.std(errors[:-1])
    assert without <= with_it < 1.25 * without


def test_a_framework_of_few_runs_is_drawn_to_the_others() -> None:
    parts, errors = made_up(40, replace(TRUTH, computing=dict.fromkeys("abcd", 0.05)))
    lucky = [part("few", 1.0)] * 2
    spread = fit_spread([*parts, *lucky], np.append(errors, [0.001, -0.001]))
    assert 0.02 < spread.computing["few"] < spread.common < 0.07


def test_an_interval_by_hand() -> None:
    spread = SpreadEstimate({"one": 0.1}, 0.3, 0.5)
    parts = [part("one", 0.8, 0.1)]
    up = 1.645 * np.hypot(np.log(1.08), np.log(1.05))
    down = 1.645 * np.hypot(np.log(1 - 0.8 * 0.1 / 1.1), np.log(1 - 0.1 * 0.5 / 1.5))
    assert np.hstack(spread.half_widths(parts)) == pytest.approx([down, up])
    _, other = spread.half_widths([parts[0]._replace(software="other")])
    assert other == pytest.approx(1.645 * np.hypot(np.log(1.24), np.log(1.05)))
    width = np.exp(up) - np.exp(-down)
    high = np.log(np.exp(up) + 0.05)  # measured 5 % of the prediction above the interval
    assert interval_score(parts, np.array([0.0]), spread) == pytest.approx(width)
    assert interval_score(parts, np.array([-high]), spread) == pytest.approx(width + 20 * 0.05)
    assert within(parts * 2, np.array([-0.99 * up, 1.01 * down]), spread).tolist() == [1.0, 0.0]


def test_hidden_communication_widens_the_interval_upwards_only() -> None:
    [down], [up] = SpreadEstimate({}, 0.05, 1.5).half_widths([part("any", 1.0, hidden=0.4)])
    [plain_down], [plain_up] = SpreadEstimate({}, 0.05, 1.5).half_widths([part("any", 1.0)])
    assert down == plain_down
    assert up > 2 * plain_up
