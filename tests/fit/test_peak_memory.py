"""Uncertainty of peak memory: the fit finds the deviations of drawn errors, and held-out intervals hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fit.peak_memory import (
    FITTED_FILE,
    Deviations,
    PeakRow,
    apart,
    fine_tuning_std,
    fit,
    fitted_lines,
    held_out,
    load_peaks,
    load_rehearsed,
    unfitted,
)

PUBLISHED = Path(__file__).parents[2] / "scenarios" / "published"
FINE_TUNING = sorted(PUBLISHED.with_name("heldout").glob("finetuning_*.yaml"))


def test_fit_finds_the_deviations_of_drawn_errors() -> None:
    draw, rows = np.random.default_rng(0), []
    for number in range(240):
        kind, transient = ("allocated", "reserved")[number % 2], float(draw.uniform(0.2, 1.0))
        std = np.hypot(0.05 * transient, 0.1 * (kind == "reserved"))
        error = float(draw.normal(0.0, std))
        rows.append(PeakRow(str(number % 4), "torch", kind, error, 2 * error, transient))  # type: ignore[arg-type]
    estimate = fit(rows)
    assert (estimate.transient, estimate.allocator) == pytest.approx((0.05, 0.1), rel=0.25)
    inside, _ = held_out(rows)
    assert 0.85 < inside.mean() < 0.95
    wider = unfitted(rows, estimate)
    covered = np.abs([row.unfitted_error for row in rows]) <= wider.half_widths(rows)
    assert covered.mean() == pytest.approx(0.9, abs=0.01)
    assert wider.transient / estimate.transient == pytest.approx(2.0, rel=0.1), "errors are twice as large"


def test_the_part_of_fine_tuning_is_what_others_leave() -> None:
    """Drawn errors have 3% of the profile and 4% of fine-tuning; a row that is far off does not set the width."""
    errors = np.random.default_rng(1).normal(0.0, 0.05, size=400)
    errors[0] = 1.1
    rows = [
        PeakRow(str(number % 2), "litgpt", "allocated", error, error, 1.0, std=0.03)
        for number, error in enumerate(errors.tolist())
    ]
    assert fine_tuning_std(rows) == pytest.approx(0.04, rel=0.2)
    assert fine_tuning_std([]) == 0.0


@pytest.mark.slow
def test_intervals_hold_for_sources_that_are_left_out() -> None:
    """Also: memory_fitted.yaml is what the fit writes."""
    rows, loading = apart(load_peaks([PUBLISHED]))
    inside, _ = held_out(rows)
    assert 0.85 <= inside.mean() <= 0.95
    estimate = fit(rows)
    tuned = fine_tuning_std([row for row in load_peaks(FINE_TUNING) if row.is_new])
    lines = fitted_lines([*rows, *load_rehearsed(), *loading], estimate, fit(loading), unfitted(rows, estimate), tuned)
    text = "\n".join([*lines, ""])
    assert text == FITTED_FILE.read_text()
    assert Deviations(0.0, 0.0).half_widths(rows).max() == 0.0
