"""Error figures against numpy by hand, and against cases that can be counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simplan.accuracy.left_out import LeftOut, without_sources
from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.plan_ranking import choices
from simplan.accuracy.result import Figures
from simplan.accuracy.statistics import constant_mfu, memory_figures, step_flops, step_time_figures, verdicts
from tests.accuracy.runs import outcome, run

PREDICTED = np.array([1.0, 2.2, 0.9, 4.0, 5.0])
MEASURED = np.array([1.0, 2.0, 1.2, 3.0, 5.5])


def test_errors_of_step_times_are_those_of_numpy() -> None:
    outcomes = [
        outcome(run(f"r{i}", measured__step_time_s=m), p, step_time_interval_s=(0.9 * p, 1.1 * p))
        for i, (p, m) in enumerate(zip(PREDICTED.tolist(), MEASURED.tolist(), strict=True))
    ]
    figures = step_time_figures(outcomes).to_json()
    errors = PREDICTED / MEASURED - 1
    assert figures["num"] == 5
    assert figures["mape"] == pytest.approx(np.abs(errors).mean())
    assert figures["median_ape"] == pytest.approx(0.1)
    assert figures["p90_ape"] == pytest.approx(np.quantile(np.abs(errors), 0.9))
    assert figures["max_ape"] == pytest.approx(1 / 3)
    assert figures["bias"] == pytest.approx(errors.mean())
    assert figures["interval_coverage"] == pytest.approx(3 / 5), "1 in 0.9..1.1, 2 in 1.98..2.42, 5.5 in 4.5..5.5"
    assert figures["median_interval_half_width"] == pytest.approx(0.1)


def test_without_any_run_there_are_no_figures() -> None:
    assert step_time_figures([]).to_json() == {
        "num": 0,
        "mape": None,
        "median_ape": None,
        "p90_ape": None,
        "max_ape": None,
        "bias": None,
        "interval_coverage": None,
        "median_interval_half_width": None,
    }


def test_a_run_out_of_memory_has_no_step_time_and_a_verdict() -> None:
    fits: dict[str, Any] = {"memory_gib": {"allocated": 1.0, "reserved": 2.0, "device": 3.0}}
    outcomes = [
        outcome(run("a"), 1.0, oom=False, **fits),
        outcome(run("b", measured__oom=True, measured__step_time_s=None), 1.0, oom=True, **fits),
        outcome(run("c", measured__oom=True, measured__step_time_s=None), 1.0, oom=False, **fits),
        outcome(run("d"), 1.0, oom=True, **fits),
        outcome(run("e"), 1.0, oom=None, **fits),
    ]
    assert step_time_figures(outcomes).errors.num == 3
    assert verdicts(outcomes).to_json() == {
        "right": 0.5,
        "fit": 1,
        "oom": 1,
        "missed": 1,
        "false_alarms": 1,
        "unknown": 1,
    }


def test_memory_is_compared_with_the_figure_that_the_source_means() -> None:
    predicted: dict[str, Any] = {
        "memory_gib": {"allocated": 10.0, "reserved": 12.0, "device": 15.0},
        "memory_interval_gib": {"allocated": (9.0, 11.0), "reserved": (11.0, 13.0), "device": (12.0, 21.0)},
    }
    both = outcome(run("a", measured__peak_allocated_gib=8.0, measured__peak_reserved_gib=12.0), 1.0, **predicted)
    printed = outcome(run("b", measured__peak_allocated_gb=20.0), 1.0, **predicted)
    device = outcome(run("c", measured__peak_memory_gib=20.0), 1.0, **predicted)
    assert [o.memory_kind for o in (both, printed, device)] == ["allocated", "allocated", "device"]
    unstated = outcome(run("d", measured__peak_unstated_gib=12.5), 1.0, **predicted)
    assert unstated.memory_errors == pytest.approx({"reserved": 12 / 12.5 - 1}), "the nearer one"
    assert (unstated.memory_kind, unstated.in_memory_interval("reserved")) == ("reserved", True)
    assert both.memory_errors == pytest.approx({"allocated": 0.25, "reserved": 0.0})
    figures = memory_figures([both, printed, device])
    assert figures["all"].errors.mape == pytest.approx((0.25 + (1 - 10 * 2**30 / 20e9) + 0.25) / 3), "each run once"
    assert figures["device"].errors.mape == pytest.approx(0.25)
    assert figures["reserved"].errors.num == 1
    assert [figures[kind].interval_coverage for kind in ("all", "reserved", "device")] == [
        pytest.approx(1 / 3),
        1.0,
        1.0,
    ]
    assert figures["all"].median_interval_half_width == pytest.approx(0.1)
    assert both.in_memory_interval("allocated") is False


def test_a_constant_utilization_is_the_median_of_a_device_and_precision() -> None:
    """Three runs reach 10, 20 and 40 FLOP/s a device: at 20 they are predicted at 1/2, 1 and 2 times their time."""
    runs = [
        outcome(run(f"r{rate}", measured__step_time_s=4 / rate * 10), 1.0, flops=160.0) for rate in (10.0, 20.0, 40.0)
    ]
    alone = outcome(run("other", training__precision="fp16"), 1.0, flops=1e9)
    figures = constant_mfu([*runs, alone])
    assert figures.num == 4
    assert figures.mape == pytest.approx((0.5 + 0.0 + 1.0 + 0.0) / 4)
    assert figures.bias == pytest.approx((-0.5 + 1.0) / 4)


def test_flops_of_a_step_are_those_of_the_megatron_formula() -> None:
    """96 b s l h^2 (1 + s/6h + V/16lh) with recomputation (Narayanan et al. 2021); causal attention counts by half."""
    job = run(plan__recompute="full").known_job
    model, batch = job.model, job.training.global_batch_size
    s, h, layers, v = model.seq_len, model.hidden_size, model.num_hidden_layers, model.vocab_size
    formula = 96 * batch * s * layers * h**2 * (1 + s / (12 * h) + v / (16 * layers * h))
    assert step_flops(job) == pytest.approx(formula, rel=1e-3)


def test_flops_of_a_step_count_the_blocks_that_run_again() -> None:
    """One block of each of two stages: 2 (4 h^2 + 2 h i) s and 2 s^2 h FLOPs more for every sequence."""
    job = run(plan__recompute="none", plan__pp=2).known_job
    model, batch = job.model, job.training.global_batch_size
    s, h, i = model.seq_len, model.hidden_size, model.intermediate_size
    assert job.model.num_blocks > 2
    first = job.plan.model_copy(update={"recompute": "full", "recompute_layers": 1})
    again = step_flops(job.with_plan(first)) - step_flops(job)
    assert again == pytest.approx(2 * batch * (2 * s * (4 * h**2 + 2 * h * i) + 2 * s**2 * h), rel=1e-9)


def test_choosing_looks_at_runs_that_differ_in_their_plan_only() -> None:
    """Best measured is b; a is predicted to be best and 10 % slower. Of 5 pairs a-b and a-close are in wrong order."""

    def timed(name: str, measured_s: float, predicted_s: float, **changes: Any) -> RunOutcome:
        return outcome(run(name, measured__step_time_s=measured_s, plan={"dp_replicate": 4}, **changes), predicted_s)

    outcomes = [
        timed("a", 1.1, 0.9),
        timed("b", 1.0, 1.0, plan__microbatch_size=2, model__vocab_size=2048),
        timed("c", 2.0, 3.0, plan__microbatch_size=4),
        timed("close to b", 1.01, 1.2, plan__microbatch_size=8),
        timed("other batch", 9.0, 0.1, training__global_batch_size=64),
        timed("other software", 9.0, 0.1, measured__version="2021"),
        timed("twice", 1.0, 1.0, model__seq_len=512),
        timed("twice again", 2.0, 0.5, model__seq_len=512),
    ]
    choices_of_runs = choices(outcomes)
    assert (choices_of_runs.num_groups, choices_of_runs.num_runs) == (1, 4)
    assert choices_of_runs.median_regret == pytest.approx(0.1)
    assert (choices_of_runs.num_best, [(choice.chosen, choice.best) for choice in choices_of_runs.wrong]) == (
        0,
        [("a", "b")],
    )
    assert choices_of_runs.wrong[0].regret == pytest.approx(0.1)
    assert choices_of_runs.num_pairs == 5
    assert choices_of_runs.kendall_tau == pytest.approx((3 - 2) / 5)


def test_runs_of_a_fit_are_predicted_without_their_source_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first would be 10 % slower and measured as fast as predicted; the second is in no fit."""
    known = {"a": LeftOut(1.1, 0.9, 1.2)}
    monkeypatch.setattr("simplan.accuracy.left_out._left_out", lambda: known)
    outcomes = [outcome(run("a", measured__step_time_s=0.022), 0.02), outcome(run("b"), 0.02)]
    [left_out] = without_sources(outcomes)
    assert left_out.error == pytest.approx(0.0)
    assert left_out.predicted is not None
    assert left_out.predicted.step_time_interval_s == pytest.approx((0.9 * 0.022, 1.2 * 0.022))
    left = Figures.of(outcomes).source_left_out
    assert left is not None
    assert (left.step_time.errors.num, left.step_time.interval_coverage) == (1, 1.0)
    assert Figures.of(outcomes[1:]).source_left_out is None


def test_skipped_runs_are_counted_and_nothing_else() -> None:
    figures = Figures.of([outcome(run("a"), 0.02), RunOutcome("f", run("b"), None, "a reason")])
    assert (figures.num_runs, figures.num_skipped, figures.step_time.errors.num) == (2, 1, 1)
