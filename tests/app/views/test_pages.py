"""Plan, Timeline and Learn without a browser: what they say, links that reproduce it, and that nothing breaks them."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.page import escaped
from app.state import decode
from simplan.documentation import documentation
from simplan.explain import explain
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict import predict
from simplan.report.html import html_report
from simplan.report.predictions import compared_predictions, predictions_text
from simplan.report.text import device_memory_words
from simplan.scenario import parse_scenario
from simplan.training import TrainingBudget
from simplan.units import format_bytes, format_count, format_number, format_time
from tests.app.views.pages import SMALL, assert_no_bug, drawings_of, opened, query_of

PLANS = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.sampled_from([1, 2, 3, 8, 0, -1, "two", None, 2.5]),
        "pp": st.sampled_from([1, 2, 4, 7]),
        "cp": st.sampled_from([1, 2]),
        "dp_replicate": st.sampled_from([1, 2, 4]),
        "dp_shard": st.sampled_from([1, 2, 4]),
        "zero_stage": st.sampled_from([0, 1, 2, 3, 4, "3"]),
        "schedule": st.sampled_from(
            ["1f1b", "gpipe", "interleaved_1f1b", "zb-h1", "zb-v", "dualpipe-v", "own.csv", "x"]
        ),
        "virtual_stages": st.sampled_from([1, 2, 3]),
        "microbatch_size": st.sampled_from([1, 2, 5]),
        "recompute": st.sampled_from(["none", "full", "selective", "all"]),
        "ep": st.sampled_from([1, 2]),
        "offload_optimizer": st.booleans(),
        "bogus": st.just(1),
    },
)
MODELS: list[Any] = [
    *({"preset": name} for name in ("gpt2-124m", "bert-tiny", "resnet-50", "nothing")),
    *({"preset": "gpt2-124m", "seq_len": 256}, {"hf_config": "config.json"}, "gpt2", None, {}),
]
CLUSTERS: list[Any] = [
    *({"preset": "dgx-h100", "num_devices": 4}, {"preset": "dgx-h100"}, {"preset": "dgx-a100-80gb", "num_nodes": 2}),
    *({"preset": "this-machine", "num_devices": 2}, {"device": "h100-sxm-80gb", "devices_per_node": 4}),
    *({"preset": 5}, [1]),
]
DOCUMENTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "cluster": st.sampled_from(CLUSTERS),
        "training": st.sampled_from(
            [
                *({"global_batch_size": 8}, {"global_batch_size": 16, "precision": "fp8", "num_tokens": 1e9}),
                *({"global_batch_size": "many"}, {"global_batch_size": 8, "num_tokens": -1}, {}),
            ]
        ),
        "plan": st.one_of(PLANS, st.sampled_from([None, [], "pp 2"])),
    },
    optional={"software": st.sampled_from(["torch", "megatron-core", "none", 3]), "name": st.sampled_from(["a b", 7])},
)
VIEWS = st.fixed_dictionaries(
    {},
    optional={
        "rank": st.sampled_from([0, 1, 99, "0"]),
        "schedules": st.sampled_from([["1f1b", "gpipe"], ["zb-h1", "x"], "1f1b", []]),
        "boxes": st.sampled_from(["layer", "action", 3]),
        "window": st.sampled_from([[0.2, 0.4], [1, 0], ["a", 2], 5]),
        "memory_rank": st.sampled_from([1, "x"]),
    },
)
EASY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def whole(document: dict[str, Any]) -> Any:
    scenario = parse_scenario(yaml.safe_dump(document))
    return predict(scenario.job, name="x")


def test_the_plan_says_what_predict_says() -> None:
    page = opened()
    assert_no_bug(page)
    prediction = whole(dict(SMALL))
    metrics = {metric.label: metric.value for metric in page.metric}
    assert metrics["Step time"] == format_time(prediction.step_time_s)
    assert metrics["MFU"] == f"{100 * prediction.mfu:.1f} %"
    run = prediction.with_budget(TrainingBudget(num_tokens=1e12)).training_run
    days = next(metric for metric in page.metric if metric.label == "1 T tokens")
    assert days.value == f"{run.days:,.1f} days"
    assert (
        f"{run.num_steps:,} steps. 90 % interval {' to '.join(map(format_number, run.days_interval))} days" in days.help
    )
    assert "**Fits**" in page.success[0].value
    assert len(page.get("plotly_chart")) == 2


def test_a_change_of_the_form_changes_answer_and_link() -> None:
    page = opened()
    before = page.metric[0].value
    page.number_input(key="document:training.global_batch_size").set_value(64).run()
    assert_no_bug(page)
    assert page.metric[0].value != before
    document, view = decode(query_of(page))
    assert document["training"]["global_batch_size"] == 64
    again = opened(document=document, view=view)
    assert [metric.value for metric in again.metric] == [metric.value for metric in page.metric]


def test_budget_is_of_the_scenario() -> None:
    priced = {"preset": "dgx-h100", "num_devices": 4, "price_per_device_hour": 2.5}
    page = opened(document={**SMALL, "cluster": priced, "training": {"global_batch_size": 16, "num_tokens": 3e11}})
    assert_no_bug(page)
    metrics = {metric.label: metric for metric in page.metric}
    run = whole(dict(SMALL)).with_budget(TrainingBudget(num_tokens=3e11, price_per_device_hour=2.5)).training_run
    assert metrics["300 B tokens"].value == f"{run.days:,.1f} days"
    assert metrics["Cost"].value == format_count(run.cost)
    page.number_input(key="document:cluster.price_per_device_hour").set_value(5.0).run()
    assert {metric.label: metric.value for metric in page.metric}["Cost"] == format_count(2 * run.cost)
    assert decode(query_of(page))[0]["cluster"]["price_per_device_hour"] == 5.0


def test_numbers_beyond_limits_are_answered_in_a_sentence() -> None:
    page = opened()
    page.number_input(key="document:cluster.num_devices").set_value(0).run()
    assert_no_bug(page)
    assert "num_devices = 0: must be at least 1" in page.warning[0].value.replace("\\", "")
    largest = {**SMALL, "cluster": {"preset": "dgx-h100", "num_devices": 2**18}, "plan": {"dp_replicate": 2**18}}
    page = opened(document=largest | {"training": {"global_batch_size": 2**18}})
    assert_no_bug(page)
    assert "is more than the pages predict, 131,072" in page.warning[0].value.replace("\\", "")


def test_a_preset_changes_the_plan_that_it_rules_out() -> None:
    page = opened(document={**SMALL, "plan": {"tp": 4}})
    page.selectbox(key="form model").set_value("gpt2-1.5b").run()
    assert_no_bug(page)
    assert not page.warning
    assert any("tp is now 1, since" in caption.value.replace("\\", "") for caption in page.caption)


def test_a_fix_is_applied() -> None:
    page = opened(document={**SMALL, "model": {"preset": "llama3-8b", "seq_len": 8192}, "plan": {"dp_replicate": 4}})
    assert_no_bug(page)
    assert "Does not fit" in page.error[0].value
    page.button(key="fix 0").click().run()
    assert_no_bug(page)
    assert not page.error


def test_ranks_outside_other_axes_are_data_parallel() -> None:
    page = opened()
    page.select_slider(key="document:plan.pp").set_value(1).run()
    page.select_slider(key="document:plan.tp").set_value(2).run()
    page.selectbox(key="document:plan.zero_stage").set_value(3).run()
    assert_no_bug(page)
    plan = decode(query_of(page))[0]["plan"]
    assert (plan["tp"], plan["dp_shard"], plan["zero_stage"]) == (2, 2, 3)
    assert "schedule" not in plan
    assert page.success


def test_errors_are_sentences() -> None:
    page = opened(document={**SMALL, "plan": {"dp_replicate": 3}})
    assert_no_bug(page)
    assert "needs 3 devices" in page.warning[0].value
    page = opened(document={**SMALL, "model": {"hf_config": "/etc/hostname"}})
    assert "names a file" in page.warning[0].value.replace("\\", "")


def test_markdown_shows_text_as_it_is_and_code_as_code() -> None:
    """CommonMark 0.31.2, sections 2.4 and 6.1; of GitHub's tables, a bar ends a cell of a table even in code."""
    assert escaped("use `simplan predict FILE` for tp_2") == "use `simplan predict FILE` for tp\\_2"
    assert escaped("a ``Job`` of *x*") == "a ``Job`` of \\*x\\*"
    assert escaped("one ` alone") == "one \\` alone"
    assert escaped("`a|b` and `c`") == "\\`a\\|b\\` and `c`"


def test_schedules_stand_over_each_other() -> None:
    page = opened("timeline", view={"schedules": ["1f1b", "gpipe"]})
    assert_no_bug(page)
    [chart] = page.get("plotly_chart")
    titles = [note.get("text", "") for note in json.loads(chart.proto.spec)["layout"]["annotations"]]
    assert [title.split("<b>")[1].split("<")[0] for title in titles if "<b>" in title] == ["1f1b", "gpipe"]


def test_learning() -> None:
    page = opened(
        "learn", view={"topic": "schedules", "lesson": "zb-h1", "lesson_p": 3, "lesson_w": 2, "lesson_time": 4.0}
    )
    assert_no_bug(page)
    svg = drawings_of(page)
    assert "0F2: forward" in svg
    assert "0F0: forward, microbatch 0 on stage 0; starts at 0 units, takes 1 units" in svg
    assert "2W" not in svg, "not begun at 4"
    page.pills(key="view:topic").set_value("definitions").run()
    assert_no_bug(page)
    assert query_of(page)["v.topic"] == "definitions"


@settings(EASY, max_examples=6)
@given(document=DOCUMENTS, view=VIEWS)
def test_no_link_breaks_a_page(document: dict[str, Any], view: dict[str, Any]) -> None:
    assert_no_bug(opened(document=document, view=view))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["", "timeline"])
@settings(EASY, max_examples=150)
@given(document=DOCUMENTS, view=VIEWS)
def test_no_link_breaks_any_page(page: str, document: dict[str, Any], view: dict[str, Any]) -> None:
    assert_no_bug(opened(page, document=document, view=view))


LESSONS = st.fixed_dictionaries(
    {},
    optional={
        "topic": st.sampled_from(["schedules", "zero", "pp", "definitions", "missing", "nonsense", 3]),
        "zero_x": st.sampled_from([0, 3, 7, "x"]),
        "pp_other": st.sampled_from(["gpipe", "nonsense", 1]),
        "lesson_f": st.sampled_from([0.1, 3, -1, "x", 1e9]),
        "lesson_send": st.sampled_from([0, 0.3, None]),
        "lesson_time": st.sampled_from([0.0, 3.0, 3, "x", 1e9]),
        "lesson": st.sampled_from([*SCHEDULE_FACTS, "nonsense", 7, None]),
        "lesson_p": st.sampled_from([*range(-1, 12), "x", None]),
        "lesson_m": st.sampled_from([*range(-1, 40), 2.5, "x"]),
        "lesson_v": st.sampled_from([*range(6), "x"]),
    },
)


@pytest.mark.slow
@settings(EASY, max_examples=150)
@given(view=LESSONS)
def test_no_link_breaks_learn(view: dict[str, Any]) -> None:
    assert_no_bug(opened("learn", view=view))


LARGE = {
    "model": {"preset": "llama3-8b", "seq_len": 9216},
    "cluster": {"preset": "dgx-h100", "num_devices": 16},
    "training": {"global_batch_size": 64},
}


@pytest.mark.parametrize(("microbatch_size", "fits"), [(2, False), (1, True)])
def test_memory_that_decides_the_fit_is_one_number(microbatch_size: int, fits: bool) -> None:
    """The allocator's whole reserve, for which the device has no memory, is in no number but those that say so."""
    document = {**LARGE, "plan": {"pp": 4, "dp_shard": 4, "microbatch_size": microbatch_size}}
    prediction = whole(document)
    worst = prediction.worst_memory
    assert worst.short_bytes
    assert prediction.fits is fits
    shown = {"predict": prediction.report().partition("Peak memory per rank")[0]}  # that table has all three columns
    if not fits:  # those that fit are shown with the memory that they want
        several = predictions_text(compared_predictions([prediction.to_json()]))
        shown |= {"several": several, "repr": repr(prediction)}
    shown["report"] = unescape(html_report([("one", prediction.to_json())], written=""))
    assert device_memory_words(worst) in explain(prediction).report()
    for name in ("plan", "compare", "timeline"):
        page = opened(name, document, {"scenarios": [SMALL]})
        assert_no_bug(page)
        texts = (*page.success, *page.error, *page.warning, *page.markdown, *page.caption, *page.get("plotly_chart"))
        shown[name] = " ".join(
            escaped_away(element.proto.spec if element.type == "plotly_chart" else element.value) for element in texts
        )
    needed, wanted = map(format_bytes, (worst.needed_bytes, worst.device_bytes))
    for place, text in shown.items():
        assert needed in text, place
        unsaid = rf"(?<!% of ){wanted}(?! with the allocator's whole reserve)"  # tooltips have shares of whole bars
        assert not re.findall(unsaid, text), place
    assert (f"{format_bytes(worst.needed_bytes - prediction.capacity_bytes)} over" in shown["compare"]) is not fits
    assert ("not fit" in shown["timeline"]) is not fits


def escaped_away(text: str) -> str:
    """Markdown or JSON as a reader sees it."""
    return text.replace("\\", "")


def test_model_that_no_plan_of_its_device_holds_is_trained_otherwise() -> None:
    """Adapters for fine-tuning, or more devices; the verdict links to the guide, as the command line does."""
    document = {
        "model": {"preset": "mistral-7b", "seq_len": 8192},
        "cluster": {"device": "rtx-4090", "num_devices": 1, "inter_link": "network-400gbit"},
        "training": {"global_batch_size": 128},
        "plan": {"recompute": "full", "microbatch_size": 2},
    }
    page = opened("plan", document)
    assert_no_bug(page)
    assert documentation("how-to/troubleshooting") in page.error[0].value
    assert "Network" not in [box.label for box in page.selectbox], "one device has none"
    assert any("no pair of changes" in text.value for text in page.markdown)
    for key, keys in (("fix adapters", ("training", "task")), ("fix devices", ("cluster", "num_devices"))):
        changed = opened("plan", document).button(key=key).click().run()
        assert_no_bug(changed)
        prediction = whole(changed.session_state["simplan document"])
        assert prediction.fits
        assert not changed.error
        section, name = keys
        assert changed.session_state["simplan document"][section][name] in ("lora", 8, 16, 32)
