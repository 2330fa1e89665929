"""``simplan search --hardware``: one job on several kinds of devices."""

from __future__ import annotations

import json

import pytest

from tests.cli.calls import Simplan, refused
from tests.support.problems import says

QLORA = ("search", "llama3-8b", "--task", "lora", "--quantize", "nf4", "--lora-rank", "16", "--seq-len", "2048")
"""A job that fits on cards of 24 GB, and not on those of 8 GB."""


def test_each_row_is_the_best_plan_of_a_search_on_that_hardware(simplan: Simplan) -> None:
    """The fastest per token is first; cost is devices x hours x the price of this hardware."""
    kinds = {"RTX 4090": 0.35, "L40S": None}
    listed = ", ".join(name if price is None else f"{name} @ {price}" for name, price in kinds.items())
    searched = simplan(*QLORA, "--tokens", "1e9", "--hardware", listed, "--json")
    assert searched.returncode == 0, searched.stderr
    document = json.loads(searched.stdout)
    rates = []
    for row in document["predictions"]:
        name, run, num_devices = row["name"], row["training_run"], row["step_work"]["num_devices"]
        alone = json.loads(simplan(*QLORA, "--gpus", name, "--json").stdout)["best"]
        assert row["inputs"]["plan"] == alone["plan"]
        assert row["step_time_s"] == pytest.approx(alone["step_time_s"], rel=1e-9)
        price = kinds.pop(name)
        assert run["cost"] == (None if price is None else pytest.approx(price * num_devices * 24 * run["days"]))
        rates.append(row["tokens_per_s_per_device"] * num_devices)
    assert not kinds
    assert rates == sorted(rates, reverse=True)
    assert not document["unfit"]


def test_hardware_that_is_too_small_says_what_it_lacks(simplan: Simplan) -> None:
    """It leaves the rest of the table as it is; alone, the exit code is that of a search without a plan."""
    both = simplan(*QLORA, "--hardware", "RTX 4090, T4", "--recompute", "full")
    assert both.returncode == 0
    assert "RTX 4090" in both.stdout
    assert says(both.stdout, "T4: training.precision = bf16: ", "t4")
    small = simplan(*QLORA, "--hardware", "RTX 4090", "--seq-len", "131072")
    assert small.returncode == 3
    assert "RTX 4090: no plan fits; the nearest one needs " in small.stdout


def test_the_largest_value_of_each(simplan: Simplan) -> None:
    document = json.loads(simplan(*QLORA, "--largest", "seq_len", "--hardware", "RTX 4090, L40S", "--json").stdout)
    assert [row["name"] for row in document["largest"]] == ["L40S", "RTX 4090"]
    for row in document["largest"]:
        alone = json.loads(simplan(*QLORA, "--largest", "seq_len", "--gpus", row["name"], "--json").stdout)
        assert {**alone, "name": row["name"]} == row


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("RTX 4090 @ cheap",), "--hardware = RTX 4090 @ cheap: is no KIND or KIND @ PRICE"),
        (("RTX 4090, RTX 4090 @ 1",), "--hardware = RTX 4090: is given twice"),
        (("RTX 4090 @ 1",), "--price = 1: ... training ... missing"),
        (("RTX 4099",), "RTX 4099: is not in the catalog"),
        (("RTX 4090", "--top", "3"), "--top: is of one search"),
        (("RTX 4090", "--gpus", "8"), "--num-devices = 8: is said by --hardware"),
    ],
)
def test_what_a_comparison_does_not_take(simplan: Simplan, options: tuple[str, ...], sentence: str) -> None:
    refused(simplan(*QLORA, "--hardware", *options), sentence)
