"""Days, device-hours and cost of a full training, against their closed form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simplan.prediction import training_run
from simplan.units import format_count
from tests.cli.calls import Simplan, refused

TOKENS_PER_STEP, DEVICES = 8 * 32, 2


def written(scenario: Path, tokens: str = "", price: str = "", plan: str = "") -> Path:
    text = scenario.read_text()
    text = text.replace("batch_size: 8", f"batch_size: 8{tokens and f', num_tokens: {tokens}'}")
    text = text.replace("num_devices: 2", f"num_devices: 2{price and f', price_per_device_hour: {price}'}")
    if plan:
        text = text.partition("plan:")[0] + plan
    file = scenario.with_name("budget.yaml")
    file.write_text(text)
    return file


def test_training_run_equals_closed_form() -> None:
    """1,001 tokens at 100 per step are 11 steps; of 2 h on 12 devices at 0.5, these cost 132."""
    run = training_run(1001, 7200.0, (3600.0, 14400.0), tokens_per_step=100, num_devices=12, price_per_device_hour=0.5)
    assert (run.num_steps, run.device_hours, run.cost) == (11, 264.0, 132.0)
    assert run.days == pytest.approx(22 / 24)
    assert run.days_interval == pytest.approx((11 / 24, 44 / 24))
    assert run.cost_interval == (66.0, 264.0)


def test_training_run_of_full_steps_has_no_further_step() -> None:
    run = training_run(1000, 1.0, None, tokens_per_step=100, num_devices=1, price_per_device_hour=None)
    assert run.num_steps == 10
    assert (run.days_interval, run.cost, run.cost_interval) == (None, None, None)


def test_predict_json_has_the_training_run(simplan: Simplan, scenario: Path) -> None:
    before = json.loads(simplan("predict", scenario, "--json").stdout)
    after = json.loads(simplan("predict", written(scenario, "1e9", "2.5"), "--json").stdout)
    run = after.pop("training_run")
    assert "training_run" not in before
    assert after.pop("assumptions")[:-1] == before.pop("assumptions")
    assert after == before, "a step does not depend on the budget"
    num_steps = -(-(10**9) // TOKENS_PER_STEP)
    days, low, high = (
        num_steps * seconds / 86_400 for seconds in (after["step_time_s"], *after["step_time_interval_s"])
    )
    assert run == {
        "num_tokens": 1e9,
        "num_steps": num_steps,
        "days": pytest.approx(days),
        "days_interval": pytest.approx([low, high]),
        "device_hours": pytest.approx(days * 24 * DEVICES),
        "cost": pytest.approx(days * 24 * DEVICES * 2.5),
        "cost_interval": pytest.approx([low * 24 * DEVICES * 2.5, high * 24 * DEVICES * 2.5]),
        "price_per_device_hour": 2.5,
    }


def test_options_override_the_keys(simplan: Simplan, scenario: Path) -> None:
    by_keys = simplan("predict", written(scenario, "3e9", "4"), "--json").stdout
    both = simplan("predict", written(scenario, "1e6", "1"), "--tokens", "3e9", "--price", "4", "--json").stdout
    assert json.loads(by_keys)["training_run"] == json.loads(both)["training_run"]


def test_predict_text_shows_days_and_cost_after_throughput(simplan: Simplan, scenario: Path) -> None:
    lines = simplan("predict", scenario, "--tokens", "1e12", "--price", "2.5").stdout.splitlines()
    run = json.loads(simplan("predict", scenario, "--tokens", "1e12", "--price", "2.5", "--json").stdout)[
        "training_run"
    ]
    at = next(number for number, line in enumerate(lines) if line.startswith("  throughput"))
    low, high = (f"{days:,.0f}" if days >= 1000 else f"{days:.3g}" for days in run["days_interval"])
    assert lines[at + 1].startswith(f"  training     1 T tokens in {run['num_steps']:,} steps: ")
    assert f" days ({low} to {high}), {run['device_hours']:,.0f} device-hours" in lines[at + 1]
    cost_low, cost_high = run["cost_interval"]
    cost = f"{run['cost']:,.0f} ({cost_low:,.0f} to {cost_high:,.0f})"
    assert lines[at + 2] == f"  cost         {cost} at 2.5 per device-hour"
    assert any("constant step time, no failures, checkpoints or restarts" in line for line in lines)


def test_predict_without_tokens_shows_no_training_run(simplan: Simplan, scenario: Path) -> None:
    before = simplan("predict", written(scenario)).stdout
    assert simplan("predict", written(scenario, price="2.5")).stdout == before
    assert "device-hours" not in before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tokens", "0"), "--tokens = 0.0: must be at least 1"),
        (("--tokens", "1e19"), "--tokens = 1e+19: must be at most 1e+18"),
        (("--tokens", "nan"), "--tokens = .nan: must be a finite number"),
        (("--tokens", "1e9", "--price", "0"), "--price = 0.0: must be greater than 0"),
        (("--tokens", "1e9", "--price", "2e6"), "--price = 2000000.0: must be at most 1,000,000"),
        (("--tokens", "1e9", "--price", "inf"), "--price = .inf: must be a finite number"),
        (("--price", "2"), "--price = 2: ... training ... missing; give --tokens"),
    ],
)
def test_option_out_of_range_is_rejected(
    simplan: Simplan, scenario: Path, options: tuple[str, ...], sentence: str
) -> None:
    refused(simplan("predict", scenario, *options), sentence)


@pytest.mark.parametrize(
    ("tokens", "price", "sentence"),
    [
        ("0.5", "", "training.num_tokens = 0.5: must be at least 1"),
        (".inf", "", "training.num_tokens = .inf: must be a finite number"),
        ("2e18", "", "training.num_tokens = 2e+18: must be at most 1e+18"),
        ("", "0", "cluster.price_per_device_hour = 0: must be greater than 0"),
        ("", "1000001", "cluster.price_per_device_hour = 1000001: ... most 1,000,000"),
        ("", ".nan", "cluster.price_per_device_hour = .nan: ... finite number"),
    ],
)
def test_key_out_of_range_is_rejected(simplan: Simplan, scenario: Path, tokens: str, price: str, sentence: str) -> None:
    refused(simplan("predict", written(scenario, tokens, price)), sentence)


def test_tokens_of_image_model_are_rejected(simplan: Simplan, tmp_path: Path) -> None:
    file = tmp_path / "images.yaml"
    text = "model: {preset: resnet-50}\ncluster: {preset: dgx-h100, num_devices: 2}\n"
    text += "training: {global_batch_size: 8}\nplan: {dp_replicate: 2}\n"
    rule = " = 1e+09: is a number of tokens, and the model has no tokens; leave it out"
    file.write_text(text)
    refused(simplan("predict", file, "--tokens", "1e9"), f"--tokens{rule}")
    file.write_text(text.replace("size: 8", "size: 8, num_tokens: 1e9"))
    refused(simplan("predict", file), f"images.yaml:3:34: training.num_tokens{rule}")


def test_search_takes_budget_of_keys_and_options(simplan: Simplan, scenario: Path) -> None:
    search = "search: {objective: cost, pp: 1, microbatch_size: 1}\n"
    file = written(scenario, "1e9", "2.5", search)
    best = json.loads(simplan("search", file, "--json").stdout)["best"]
    hours = 1e9 / TOKENS_PER_STEP * best["step_time_s"] / 3600
    assert best["cost_dollars"] == pytest.approx(hours * DEVICES * 2.5)
    doubled = json.loads(simplan("search", file, "--price", "5", "--json").stdout)["best"]
    assert doubled["cost_dollars"] == pytest.approx(2 * best["cost_dollars"])
    file.write_text(file.read_text().replace("search: {", "search: {token_budget: 5e8, "))
    halved = json.loads(simplan("search", file, "--json").stdout)["best"]
    assert halved["cost_dollars"] == pytest.approx(best["cost_dollars"] / 2), "the section's own key counts"
    refused(simplan("search", file, "--tokens", "0"), "--tokens = 0.0: must be at least 1")


@pytest.mark.parametrize(("section", "key"), [("training", "num_tokens"), ("cluster", "price_per_device_hour")])
def test_show_lists_the_keys(simplan: Simplan, section: str, key: str) -> None:
    assert key in simplan("show", section).stdout


def test_counts_above_999_trillion_have_no_power_of_ten() -> None:
    assert format_count(1e18) == "1,000,000 T"


def test_saved_plan_keeps_budget_and_costs_what_the_search_said(
    simplan: Simplan, scenario: Path, tmp_path: Path
) -> None:
    """100,000,100 tokens are 390,625.4 steps of 256, and both count 390,626."""
    plan, tokens = tmp_path / "plan.yaml", 100_000_100
    file = written(scenario, plan="search: {pp: 1, microbatch_size: 1}\n")
    options = ("--tokens", str(tokens), "--price", "2.5", "--save-plan", plan, "--json")
    best = json.loads(simplan("search", file, *options).stdout)["best"]
    assert best["cost_dollars"] == pytest.approx(390_626 * best["step_time_s"] / 3600 * DEVICES * 2.5, rel=1e-12)
    run = json.loads(simplan("predict", plan, "--json").stdout)["training_run"]
    assert (run["num_steps"], run["price_per_device_hour"]) == (390_626, 2.5)
    assert run["cost"] == pytest.approx(best["cost_dollars"], rel=1e-6)
