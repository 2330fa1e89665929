"""The page Whole run: a start without a length, the numbers of the command, and one length and price for all pages."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest

from app.budget import TOKENS_START
from app.components.run_form import started
from app.fitting import document_text
from app.state import decode
from simplan.goodput.sections import SECTIONS
from simplan.report.drawings.run_timeline import run_timeline, subheading
from simplan.report.goodput import format_money, headline
from simplan.scenario import parse_scenario
from simplan.scenario.whole_run.goodput import goodput_of
from simplan.units import format_number, format_span
from tests.app.views.pages import SMALL, assert_no_bug, drawings_of, opened, query_of
from tests.support.slow import slow_except

SETTINGS: dict[str, Any] = {
    "reliability": {"device_mtbf_h": 20.0, "detection_s": 60.0},
    "checkpoint": {"interval_s": 300.0, "blocking_s": 5.0},
    "recovery": {"restart_s": 120.0, "spares": 1, "repair_h": 1.0},
    "evaluation": {"every_steps": 1000, "time_s": 10.0},
    "price": {"device_hour": 2.5},
    "power": {"device_w": 700.0, "co2_g_per_kwh": 400.0},
}
WHOLE: dict[str, Any] = {**SMALL, "run": {"num_steps": 20_000}, **SETTINGS}


def text_of(page: Any) -> str:
    return "\n".join(str(element.value).replace("\\", "") for element in (*page.markdown, *page.caption, *page.info))


def document_of(page: Any) -> dict[str, Any]:
    return decode(query_of(page))[0]


def test_the_page_asks_for_the_length_and_offers_a_start() -> None:
    page = opened("run")
    assert_no_bug(page)
    assert not page.warning
    assert "How long is the run?" in page.info[0].value
    [start] = [button for button in page.button if button.label == "Start with an example"]
    example = parse_scenario(document_text(started(dict(SMALL))))
    assert example.budget.num_tokens == TOKENS_START
    assert example.budget.price_per_device_hour is not None
    assert example.whole_run is not None
    assert example.whole_run.checkpoint is not None
    start.click()  # without a run of the page, which would simulate a long one
    assert started(WHOLE) == WHOLE  # what is there stays


def test_it_says_what_the_command_says() -> None:
    page = opened("run", document=WHOLE)
    assert_no_bug(page)
    result = goodput_of(parse_scenario(document_text(WHOLE)))
    document = result.to_json()
    assert headline(document).removeprefix("d") in text_of(page)  # with its capitals
    metrics = {metric.label: metric for metric in page.metric}
    assert metrics["Done in"].value == format_span(result.mean_time_s)
    assert metrics["Device-hours"].value == format_number(document["device_hours"])
    assert metrics["Cost"].value == format_money(document["cost"])
    assert metrics["Energy"].help.startswith(f"{format_money(document['co2_kg'])} kg")
    changes, causes = (frame.value for frame in page.dataframe)
    assert list(changes["change"]) == [change["words"] for change in document["sensitivity"]]
    assert list(causes["cause"]) == [*document["interruptions_by_cause"]]
    assert "simplan goodput gpt2-124m-4-dgx-h100.yaml --trials 500 --seed 0" in [code.value for code in page.code]
    assert subheading(run_timeline(result)) in drawings_of(page)
    page.number_input(key="view:trial").set_value(7).run()
    assert_no_bug(page)
    assert subheading(run_timeline(result, 7)) in drawings_of(page)
    again = opened("run", document=document_of(page), view={"trial": 7})
    assert document_of(again) == document_of(page) == WHOLE
    assert text_of(again) == text_of(page)


def test_length_and_price_are_those_of_other_pages() -> None:
    page = opened("scale", document=WHOLE)
    per_step = 16 * 1024
    assert page.number_input(key="document:training.num_tokens").value == pytest.approx(20_000 * per_step / 1e9)
    assert page.number_input(key="document:cluster.price_per_device_hour").value == 2.5
    page.number_input(key="document:training.num_tokens").set_value(0.1).run()
    assert_no_bug(page)
    page.number_input(key="document:cluster.price_per_device_hour").set_value(4.0).run()
    changed = document_of(page)
    assert "run" not in changed
    assert changed["training"]["num_tokens"] == 1e8
    assert changed["price"] == {"device_hour": 4.0}
    assert "price_per_device_hour" not in changed["cluster"]
    page.switch_page("views/run.py").run()
    assert page.number_input(key="document:run.num_steps").value == -(-100_000_000 // per_step)
    page.number_input(key="document:run.num_steps").set_value(5000).run()
    assert_no_bug(page)
    changed = document_of(page)
    assert changed["run"] == {"num_steps": 5000}
    assert "num_tokens" not in changed["training"]


@pytest.mark.slow
def test_a_section_ends_with_its_last_key_and_begins_whole() -> None:
    page = opened("run", document={**SMALL, "run": {"num_steps": 100}})
    assert_no_bug(page)
    page.selectbox(key="form failures").set_value("own").run()
    page.selectbox(key="form checkpoints").set_value("best").run()
    assert_no_bug(page)
    assert not page.warning
    assert {"device_mtbf_h"} == document_of(page)["reliability"].keys()
    assert document_of(page)["checkpoint"]["interval_s"] == "best"
    page.selectbox(key="form failures").set_value("llama3-2024").run()
    assert document_of(page)["reliability"] == {"preset": "llama3-2024"}
    for key in ("form checkpoints", "form failures"):
        page.selectbox(key=key).set_value("none").run()
    assert not {*SECTIONS} & {*document_of(page)} - {"run"}
    assert_no_bug(page)


def test_spot_nodes_come_with_a_price_and_take_it_with_them() -> None:
    page = opened("run", document={**SMALL, "run": {"num_steps": 100}})
    assert page.selectbox(key="form spot").value == "none"
    page.selectbox(key="form spot").set_value("own").run()
    assert_no_bug(page)
    assert document_of(page)["spot"] == {"preemptions_per_h": 0.01, "wait_h": 2.0}
    assert page.number_input(key="document:price.spot_device_hour").disabled
    page.number_input(key="document:cluster.price_per_device_hour").set_value(2.5).run()
    page.number_input(key="document:price.spot_device_hour").set_value(1.0).run()
    page.number_input(key="document:spot.notice_s").set_value(30.0).run()
    page.selectbox(key="document:spot.fallback").set_value("on_demand").run()
    assert_no_bug(page)
    assert not page.error
    spot = {"preemptions_per_h": 0.01, "wait_h": 2.0, "notice_s": 30.0, "fallback": "on_demand"}
    assert document_of(page)["spot"] == spot
    assert document_of(page)["price"] == {"device_hour": 2.5, "spot_device_hour": 1.0}
    page.selectbox(key="form spot").set_value("none").run()
    assert "spot" not in document_of(page)
    assert document_of(page)["price"] == {"device_hour": 2.5}
    assert_no_bug(page)


WRONG: tuple[Any, ...] = (None, 7, [], {}, {"bogus": 1})


@pytest.mark.parametrize(
    ("name", "value"), slow_except([*zip(SECTIONS, cycle(WRONG), strict=False)], product(SECTIONS, WRONG))
)
def test_no_section_breaks_the_page(name: str, value: Any) -> None:
    assert_no_bug(opened("run", document={**SMALL, "run": {"num_steps": 10}, name: value}))
