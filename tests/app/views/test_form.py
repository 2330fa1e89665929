"""The form of the sidebar: it shows the values that are in effect, and no value takes a field away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.fitting import document_text, mended
from app.state import USUAL
from simplan.errors import SpecError
from simplan.predict.step_summary import evaluate_step
from simplan.scenario import parse_scenario
from tests.app.views.pages import SMALL, assert_no_bug, opened_in_session

QWEN = {"model": {"preset": "qwen3-30b-a3b", "seq_len": 4096}, "training": {"global_batch_size": 64}}
ON_32 = {"cluster": {"preset": "dgx-h100", "num_devices": 32}}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "fsdp": {**USUAL, "plan": {"dp_shard": 64}},
    "ddp": {**USUAL, "plan": {"dp_replicate": 64}},
    "zero 1 of replicas": {**USUAL, "plan": {"dp_shard": 8, "dp_replicate": 8, "zero_stage": 1}},
    "tensor": USUAL,
    "context of torchtitan": {**USUAL, "software": "torchtitan", "plan": {"cp": 2, "tp": 8, "pp": 4}},
    "pipeline": {**USUAL, "plan": {"pp": 8, "tp": 8}},
    "interleaved": {**USUAL, "plan": {"pp": 8, "tp": 8, "virtual_stages": 2}},
    "zb-v": {**USUAL, "plan": {"pp": 8, "tp": 8, "schedule": "zb-v"}},
    "own sizes": {**USUAL, "plan": {"tp": 8, "dp_shard": 8, "microbatch_sizes": [4, 4, 4, 4, 4, 4, 4, 4]}},
    "experts": {**QWEN, **ON_32, "software": {"preset": "megatron-core"},
                "plan": {"ep": 8, "dp_shard": 32, "zero_stage": 1}},
    "one node of no number": {"model": {"preset": "gpt2-124m"}, "cluster": {"preset": "dgx-h100"},
                              "training": {"global_batch_size": 8}, "plan": {"dp_replicate": 8}},
    "nodes": {**USUAL, "cluster": {"preset": "dgx-h100", "num_nodes": 8}, "software": {"compiled": True}},
}  # fmt: skip


def shown(document: dict[str, Any]) -> AppTest:
    """The form with all its options."""

    def form() -> None:
        import streamlit as st

        from app.components.scenario_form import show_scenario_form

        st.session_state["details options"] = True
        show_scenario_form(budget=True)

    test = AppTest.from_function(form, default_timeout=600)
    test.session_state["simplan document"] = document
    return test.run()


def fields(page: AppTest) -> set[str]:
    return {str(widget.key) for widget in page.number_input if str(widget.key).startswith("document:")}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_value_shown_is_the_value_in_effect(name: str) -> None:
    document = DOCUMENTS[name]
    page = shown(document)
    job = parse_scenario(document_text(document)).job
    values = {
        widget.key.removeprefix("document:").split(".", 1)[-1]: widget
        for widget in (*page.number_input, *page.selectbox, *page.select_slider, *page.toggle)
        if str(widget.key).startswith("document:")
    }
    assert {"grad_sync", "zero_stage", "tp"} <= values.keys()
    wrong = []
    for key, widget in values.items():
        section = widget.key.removeprefix("document:").split(".")[0]
        if key in ("num_tokens", "price_per_device_hour") or widget.value is None:
            continue
        own = document.get(section, {})
        keys = own if isinstance(own, dict) else {}
        chosen = {**document, section: widget.value if section == key else {**keys, key: widget.value}}
        other = parse_scenario(document_text(chosen)).job
        if other != job and evaluate_step(other) != evaluate_step(job):
            wrong.append(f"{key} = {widget.value}")
    assert wrong == []


BUDGET = {"document:training.num_tokens", "document:cluster.price_per_device_hour"}
NUMBERS = ("model.seq_len", "model.vocab_size", "cluster.num_devices", "training.global_batch_size")


@pytest.mark.parametrize("value", [0, -3, 10**400, "many"], ids=["0", "-3", "huge", "text"])
def test_no_number_takes_a_field_away(value: Any) -> None:
    whole = fields(shown(dict(SMALL)))
    assert whole == BUDGET | {f"document:{name}" for name in NUMBERS}
    every = (*NUMBERS, "training.num_tokens", "cluster.price_per_device_hour")
    for names in (every, NUMBERS[2:3], NUMBERS[3:4]):
        document: dict[str, Any] = copy.deepcopy(dict(SMALL))
        for section, key in (name.split(".") for name in names):
            document[section][key] = value
        page = shown(document)
        assert_no_bug(page)
        assert fields(page) == whole


@pytest.mark.parametrize("name", ["plan", "compare", "scale", "network", "timeline", "search"])
def test_wrong_scenario_keeps_the_fields_of_every_page(name: str) -> None:
    training = {"global_batch_size": 16, "num_tokens": -1}
    view = {"by": "cost"} if name == "search" else {}
    page = opened_in_session(name, {**SMALL, "training": training}, view)
    assert_no_bug(page)
    assert page.warning
    expected = {f"document:{one}" for one in NUMBERS}
    assert fields(page) == expected | (BUDGET if name in ("plan", "compare", "scale", "search") else set())


@pytest.mark.parametrize("devices", [7, 12, 24, 48])
def test_devices_that_do_not_divide_the_batch_are_told_so(devices: int) -> None:
    """The sentence names the batch, and the batch that it names makes the scenario valid."""
    document, _ = mended({**USUAL, "cluster": {"preset": "dgx-h100", "num_devices": devices}})
    with pytest.raises(SpecError) as error:
        parse_scenario(document_text(document))
    [problem] = error.value.problems
    assert problem.field == "training.global_batch_size"
    assert problem.fix is not None
    for batch in problem.fix.removeprefix("use ").split(" or "):
        training = {**USUAL["training"], "global_batch_size": int(batch)}
        parse_scenario(document_text({**document, "training": training}))
