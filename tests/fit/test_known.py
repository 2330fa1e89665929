"""How intervals widen on new ground: deviations that were put in are found again, and runs outside of a part count."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml

from fit.known import (
    LeftOut,
    UnknownEstimate,
    counts_without,
    coverage_text,
    fit_unknown,
    half_widths,
    known_lines,
    left_out_lines,
)
from fit.perturbation import BETWEEN, MovedParts
from fit.spread import SpreadEstimate
from simplan.cost.known import AXES, Ground

AT = Ground("ampere", "a100-sxm-80gb", "bf16", "nemo", "transformer", 2, 3)
SPREAD = SpreadEstimate({"nemo": 0.05}, 0.05, 0.3)
COMPUTING = MovedParts("nemo", 1.0, (0.0,) * len(BETWEEN), (0.0,) * len(BETWEEN))


def counts(num_runs: int, **of_axis: float) -> dict[str, np.ndarray]:
    """As if 1,000 runs were known along every axis but these."""
    return {name: np.full(num_runs, of_axis.get(name, 1000.0)) for name in AXES}


def test_runs_outside_of_a_part_count() -> None:
    grounds = [AT, AT, AT._replace(precision="fp16"), AT._replace(device="a100-sxm-40gb", framework="torch")]
    counts = counts_without(grounds, ["a", "b", "b", "c"])
    assert counts["architecture"].tolist() == [3, 2, 2, 3]
    assert counts["precision"].tolist() == [2, 2, 0, 2]
    assert counts["device"].tolist() == [2, 1, 1, 0]
    assert counts["framework"].tolist() == [2, 1, 1, 0]


def test_deviations_that_were_put_in_are_found_again() -> None:
    """New frameworks err by 20 % more, new devices by nothing more; each has 300 runs without and with others."""
    rng = np.random.default_rng(0)
    parts, plain = [COMPUTING] * 300, rng.normal(0.0, 0.05, 300)
    new = rng.normal(0.0, np.hypot(0.05, 0.2), 300)
    tables = [
        LeftOut(new, counts(300, framework=0.0)),
        LeftOut(plain, counts(300, device=0.0)),
        LeftOut(plain, counts(300)),
    ]
    estimate = fit_unknown(parts, tables, ["one"] * 300, SPREAD)
    assert estimate.unknown_std["framework"] == pytest.approx(0.2, rel=0.25)
    assert estimate.unknown_std["device"] < 0.04
    lines = [*coverage_text(parts, {"framework": tables[0]}, SPREAD, estimate)]
    inside, known = map(int, re.findall(r"(?:left out|ground) (\d+) %", lines[-1]))
    assert inside == pytest.approx(90, abs=5)
    assert known < 60


def test_a_width_by_hand() -> None:
    """Four runs of twelve that halve the square leave a quarter of it."""
    unknown = UnknownEstimate(dict.fromkeys(AXES, 0.0) | {"precision": 0.1}, 4.0)
    down, up = half_widths([COMPUTING], counts(1, precision=12.0), SPREAD, unknown)
    std = np.hypot(0.05, 0.05)
    assert up == pytest.approx(1.645 * np.log1p(std))
    assert down == pytest.approx(-1.645 * np.log1p(-std / (1 + std)))


def test_files_say_what_was_counted_and_left_out() -> None:
    grounds, errors = [AT, AT, AT._replace(step=-1)], np.array([0.1, -0.1, 0.3])
    unknown = UnknownEstimate(dict.fromkeys(AXES, 0.1), 2.0)
    data = yaml.safe_load("\n".join(known_lines(grounds, ["a", "b", "b"], errors, SPREAD, unknown)))
    assert data["runs"] == [[*AT._replace(step=-1), 1, 1, 0.3], [*AT, 2, 2, 0.1]]
    assert data["unknown_std"] == dict.fromkeys(AXES, 0.1)
    left = LeftOut(errors, counts(3))
    parts = [COMPUTING, replace_share(COMPUTING, 0.0), COMPUTING]
    text = "\n".join(left_out_lines(["x", "y", "z"], np.log([1.1, 0.9, 1.0]), parts, left, SPREAD, unknown))
    runs = yaml.safe_load(text)["runs"]
    assert runs["y"] == [0.9, 1.0, 1.0]
    factor, low, high = runs["x"]
    assert factor == 1.1
    assert low < 1 < high


def replace_share(part: MovedParts, computing: float) -> MovedParts:
    return part._replace(computing=computing)
