"""The fit of step times: sums of prices, constants found again, and errors on runs that a fit has not seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from fit.cross_validation import LEFT_OUT_FILE, sample_errors, sampled_runs
from fit.perturbation import parts_of
from fit.robust import minimize
from fit.rows import FitCosts, FitRow, _row, load_rows
from fit.spread import SpreadEstimate
from fit.step_times import FITTED_FILE, constants_of, fit, fitted_text, log_errors
from simplan import catalog
from simplan.predict.step_summary import step_terms, summarize_step

FOLDER = Path(__file__).parent.parent.parent / "scenarios" / "published"
HALF_A_POINT = 0.005
LEFT_OUT = yaml.safe_load(LEFT_OUT_FILE.read_text(encoding="utf-8"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> list[FitRow]:
    """Small runs of one file: three devices' worth of shapes, no pipeline."""
    all_rows = load_rows([FOLDER / "megatron_sc21_and_2020.yaml"], {}, jobs=1)
    return [row for row in all_rows if row.job.plan.pp == 1 and not row.job.plan.shards_parameters]


@pytest.mark.parametrize("name", ["zb-09", "zb-39", "korthikanti-3", "torchtitan-12", "simumax-27", "mosaic-041"])
def test_waits_of_a_step_add_up_to_its_time(name: str) -> None:
    """With and without pipelines, sharded, split backwards, overlapped exchanges, steps that overlap."""
    files = {"zb": "zero_bubble", "korthikanti": "korthikanti_2022_megatron_a100", "torchtitan": "torchtitan"}
    files |= {"simumax": "simumax_b200", "mosaic": "mosaic_llm_foundry_mpt"}
    [(_, run)] = sampled_runs(FOLDER, {files[name.partition("-")[0]]: [name]})
    terms = step_terms(run.known_job, steps_overlap=run.steps_overlap)
    whole_s = summarize_step(run.known_job, steps_overlap=run.steps_overlap).step_time_s
    assert sum(term.seconds * term.times for term in terms) == pytest.approx(whole_s, rel=2e-4)
    backwards_s = -sum(term.seconds * term.times for term in terms if term.times < 0)  # by what replaces a wait
    assert backwards_s < 0.01 * whole_s


def test_rows_are_priced_as_predictions_are(rows: list[FitRow]) -> None:
    prices = FitCosts({})
    for row in rows:
        assert row.predicted_s(prices) == pytest.approx(sum(t.seconds * t.times for t in row.terms))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("zb-09", {"kernel_overhead_s": 4e-5, "megatron-lm-2023.inter_slowdown": 2.0}),
        ("vtrain-multi-023", {"megatron-deepspeed-2023.inter_slowdown": 3.0}),
        ("simumax-27", {"megatron-core.intra_slowdown": 2.5, "kernel_overhead_s": 5e-5}),
    ],
)
def test_terms_at_other_constants_add_up_to_what_is_predicted_with_them(name: str, changed: dict[str, float]) -> None:
    """To one percent: the longest path may be another one."""
    files = {"zb": "zero_bubble", "vtrain": "vtrain_a100_multi_node", "simumax": "simumax_b200"}
    file = files[name.partition("-")[0]]
    [(_, run)] = sampled_runs(FOLDER, {file: [name]})
    before, after = _row(file, run, {}), _row(file, run, changed)
    assert before is not None
    assert after is not None
    moved_s, predicted_s = before.predicted_s(FitCosts(changed)), after.predicted_s(FitCosts({}))
    assert moved_s == pytest.approx(predicted_s, rel=0.01)
    assert abs(predicted_s / before.predicted_s(FitCosts({})) - 1) > 0.02


def test_constants_that_made_step_times_are_found_again(rows: list[FitRow]) -> None:
    """Measured times made up by other constants; the fit is drawn a little to the textbook."""
    wanted = {"ampere.matmul_efficiency": 0.75, "megatron-lm-2021.traffic": 1.6}
    prices = FitCosts(wanted)

    def made_up(row: FitRow) -> FitRow:
        measured = row.run.measured.model_copy(update={"step_time_s": row.predicted_s(prices)})
        return replace(row, run=replace(row.run, measured=measured))

    made = [made_up(row) for row in rows]
    start = log_errors(made, {})
    values = fit(made, {})
    left = log_errors(made, values)
    assert np.abs(start).mean() > 0.15
    assert np.abs(left).mean() < np.abs(start).mean() / 5


def test_the_file_says_what_was_fitted_to_what(rows: list[FitRow]) -> None:
    values = {constant.name: constant.textbook for constant in constants_of(rows)}
    values["ampere.matmul_efficiency"] = 0.71234
    values |= dict.fromkeys(("rowwise_efficiency", "head_dim_64_efficiency"), 1.0)
    text = yaml.safe_load(fitted_text(values, rows, SpreadEstimate({"megatron-lm-2021": 0.1234}, 0.1, 0.5)))
    assert text["architectures"]["ampere"]["matmul_efficiency"] == 0.7123
    assert text["software"]["megatron-lm-2021"]["relative_std"] == 0.123
    assert text["all"]["inter_node_std"] == 0.5
    assert str(len(rows)) in text["software"]["megatron-lm-2021"]["fitted_on"]


def test_the_catalogue_has_what_was_fitted() -> None:
    fitted = yaml.safe_load(FITTED_FILE.read_text(encoding="utf-8"))
    ampere, of_ampere = catalog.kernel_rates("ampere"), fitted["architectures"]["ampere"]
    assert ampere.matmul_efficiency == of_ampere["matmul_efficiency"]
    assert ampere.attention["flash2"].sustained == of_ampere["attention"]["flash2"]
    assert catalog.kernel_rates("ampere", textbook=True).fitted_on is None
    software = catalog.software("llm-foundry")
    assert software.rates.traffic == fitted["software"]["llm-foundry"]["traffic"]
    assert "fitted on" in software.sources["rates"]


def test_constants_are_as_few_as_they_should_be() -> None:
    """Six for an architecture and a framework, thirty common to all (DESIGN)."""
    fitted = yaml.safe_load(FITTED_FILE.read_text(encoding="utf-8"))
    said = {"fitted_on", "relative_std", "attention", "inter_node_std"}
    for of_architecture in fitted["architectures"].values():
        assert len(of_architecture.keys() - said) + len(of_architecture.get("attention", {})) <= 6
    assert all(len(of_software.keys() - said) <= 6 for of_software in fitted["software"].values())
    assert len(fitted["all"].keys() - said) <= 30


def test_intervals_are_as_wide_as_the_fit_says() -> None:
    """The fit takes a step apart and adds up; a prediction moves prices and looks for the longest path again."""
    name = "vtrain_a100_multi_node"
    [(_, run)] = sampled_runs(FOLDER, {name: ["vtrain-multi-023"]})  # tensor parallelism across nodes
    row = _row(name, run, {})
    assert row is not None
    summary = summarize_step(row.job, steps_overlap=run.steps_overlap)
    rates, own_std = row.job.cluster.device.kernels, row.job.software.rates.relative_std
    assert own_std is not None
    assert rates.inter_node_std is not None
    spread = SpreadEstimate({row.job.software.id: own_std}, 0.0, rates.inter_node_std)
    [part] = parts_of([row], {}, jobs=1)
    assert part.longer[-1] > 0.3
    [[down], [up]] = spread.half_widths([part])
    low_s, high_s = (seconds / summary.step_time_s for seconds in summary.step_time_interval_s)
    assert high_s == pytest.approx(np.exp(up), rel=0.01)
    # the prediction moves no byte faster than the data sheet, which the fit does not know
    assert low_s >= np.exp(-down) * (1 - 0.01)


def test_errors_on_runs_left_out_of_the_fit_are_no_worse_than_committed() -> None:
    """Constants of five folds predict runs of every file that they have not seen; see fit/cross_validation.py."""
    errors = sample_errors(sampled_runs(FOLDER, LEFT_OUT["runs"]), LEFT_OUT["folds"])
    assert Counter(map(len, LEFT_OUT["runs"].values())) == {4: len(errors)}
    worse = {
        name: (errors[name], before)
        for name, before in LEFT_OUT["mean_error"].items()
        if errors[name] > before + HALF_A_POINT
    }
    assert not worse


def test_a_fit_may_start_anywhere() -> None:
    from fit.robust import Constant

    constant = Constant("x", 1.0, 10.0, 0.1, 10.0, range(3))

    def residuals(x: np.ndarray, indices: object) -> np.ndarray:
        del indices
        return np.asarray(np.log(np.full(3, x[0] / 2)) / 0.01)

    for start in ({}, {"x": 5.0}):
        assert minimize([constant], residuals, np.ones(3), start=start)["x"] == pytest.approx(2, rel=1e-3)
