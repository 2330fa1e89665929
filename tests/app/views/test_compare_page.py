"""The page Compare: the numbers of each scenario are its prediction, and links contain the scenarios."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.state import decode
from simplan.units import format_bytes, format_time
from tests.app.views.pages import SMALL, assert_no_bug, opened, query_of
from tests.app.views.test_pages import whole

LARGER = {**SMALL, "model": {"preset": "gpt2-355m", "vocab_size": 50304}, "name": "larger"}
A100 = {**SMALL, "cluster": {"preset": "dgx-a100-80gb", "num_devices": 8}, "plan": {"dp_shard": 8}}
TENSOR = {**SMALL, "plan": {"tp": 2, "dp_replicate": 2}}


def table_of(page: Any) -> dict[str, list[str]]:
    """Cells of the table of numbers by row."""
    [text] = [shown.value for shown in page.markdown if "| step time" in shown.value]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.replace("\\", "").splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_numbers_are_those_of_predict() -> None:
    page = opened("compare", view={"scenarios": [LARGER, A100, TENSOR]})
    assert_no_bug(page)
    table = table_of(page)
    documents = [SMALL, LARGER, A100, TENSOR]
    predictions = [whole(dict(document)) for document in documents]
    assert table["step time"] == [format_time(prediction.step_time_s) for prediction in predictions]
    assert table["peak memory"] == [format_bytes(prediction.worst_memory.needed_bytes) for prediction in predictions]
    assert table["MFU"] == [f"{100 * prediction.mfu:.1f} %" for prediction in predictions]
    step, memory, *_ = (json.loads(chart.proto.spec) for chart in page.get("plotly_chart"))
    for figure, totals in (
        (step, [prediction.step_time_s * 1e3 for prediction in predictions]),
        (memory, [prediction.worst_memory.device_bytes / 2**30 for prediction in predictions]),
    ):
        bars = [trace["y"] for trace in figure["data"] if trace["type"] == "bar"]
        assert [sum(values) for values in zip(*bars, strict=True)] == pytest.approx(totals)


def test_reason_of_a_difference_is_named() -> None:
    slow = {**SMALL, "cluster": {"preset": "dgx-h100", "num_devices": 4, "intra_link": "pcie4"}}
    page = opened("compare", view={"scenarios": [slow]})
    assert_no_bug(page)
    [sentence] = [shown.value for shown in page.markdown if "mainly because of" in shown.value]
    assert sentence.startswith("- Each step of B is **")
    assert "longer** than that of A" in sentence
    [settings_] = [shown.value.replace("\\", "") for shown in page.markdown if "| setting" in shown.value]
    assert [line.split("|")[1].strip() for line in settings_.splitlines()[2:]] == ["cluster.intra_link"]


def test_scenarios_of_other_batches_are_compared_per_sequence() -> None:
    half = {**SMALL, "training": {"global_batch_size": 8}}
    page = opened("compare", view={"scenarios": [half]})
    assert_no_bug(page)
    first, second = (whole(dict(document)) for document in (SMALL, half))
    assert second.step_time_s < first.step_time_s
    longer = second.tokens_per_s_per_device < first.tokens_per_s_per_device
    words = [shown.value.replace("\\", "") for shown in page.markdown]
    differ = f"Batches differ: {first.job.training.global_batch_size} sequences (A), 8 sequences (B)."
    assert sum(differ in text for text in words) == 2, "of the table, and of the reasons"
    change = first.tokens_per_s_per_device / second.tokens_per_s_per_device - 1
    assert table_of(page)["vs A"] == ["", f"{change:+.1%}"]
    assert any(
        f"Per sequence, the step of B is {abs(100 * change):.1f} % {'longer' if longer else 'shorter'}" in text
        for text in words
    )


def test_terms_of_any_two_scenarios_are_compared() -> None:
    page = opened("compare", view={"scenarios": [LARGER, TENSOR], "terms_first": "C", "terms_of": "B"})
    assert_no_bug(page)
    larger, tensor = (whole(dict(document)) for document in (LARGER, TENSOR))
    times = f"Time: {format_time(tensor.step_time_s)} and {format_time(larger.step_time_s)}"
    assert times in [caption.value for caption in page.caption]


def test_scenario_is_pinned_changed_and_unpinned() -> None:
    page = opened("compare")
    assert "Pin the current scenario" in page.info[0].value
    page.button(key="pin scenario").click().run()
    page.number_input(key="document:training.global_batch_size").set_value(64).run()
    assert_no_bug(page)
    query = query_of(page)
    again = opened("compare", *decode(query))
    assert table_of(again) == table_of(page)
    assert decode(query)[1]["scenarios"][0]["training"]["global_batch_size"] == 16
    page.button(key="unpin scenario B").click().run()
    assert "v.scenarios" not in query_of(page)


def test_scenario_with_an_error_is_told_in_its_column() -> None:
    page = opened("compare", view={"scenarios": [{**SMALL, "plan": {"tp": 3}}, {"model": 7}]})
    assert_no_bug(page)
    assert table_of(page)["step time"][1:] == ["", ""]
    assert "needs 3 devices" in page.warning[0].value


DOCUMENTS: list[Any] = [LARGER, A100, {}, 7, None, "x", {"model": []}, {**SMALL, "plan": {"pp": 3}}]
SCENARIOS = st.lists(st.sampled_from(DOCUMENTS), max_size=6)
VIEWS = st.fixed_dictionaries(
    {},
    optional={
        "scenarios": st.one_of(SCENARIOS, st.just("x")),
        "terms_of": st.sampled_from(["B", "D", "x", 3]),
        "terms_first": st.sampled_from(["A", "B", 7]),
        "price": st.sampled_from([2.5, "x"]),
    },
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(VIEWS)
def test_no_view_shows_an_exception(view: dict[str, Any]) -> None:
    assert_no_bug(opened("compare", view=view))
