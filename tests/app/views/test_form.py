"""The form of the sidebar: it shows the values that are in effect, and no value takes a field away."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel
from streamlit.testing.v1 import AppTest

from app.fitting import document_text, mended
from app.state import USUAL
from simplan import catalog
from simplan.cluster.topology import FatTree, LeafSpine, Rail
from simplan.errors import SpecError
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict.step_summary import evaluate_step
from simplan.scenario import parse_scenario
from simplan.scenario.clusters import ClusterSection
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSection
from tests.app.views.pages import SMALL, assert_no_bug, opened_in_session
from tests.support.slow import slow_except

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

        st.session_state["details options"] = st.session_state["details training options"] = True
        show_scenario_form(budget=True)

    test = AppTest.from_function(form, default_timeout=600)
    test.session_state["simplan document"] = document
    return test.run()


def fields(page: AppTest) -> set[str]:
    return {str(widget.key) for widget in page.number_input if str(widget.key).startswith("document:")}


@pytest.mark.parametrize("name", slow_except(["interleaved", "experts", "own sizes", "nodes"], DOCUMENTS))
def test_value_shown_is_the_value_in_effect(name: str) -> None:
    document, page = DOCUMENTS[name], shown_by_name(name)
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
        if section == "software" and widget.disabled:  # no option of the framework, so no scenario may write it
            wrong += [key] * (widget.value != getattr(job.software, key))
            continue
        section_keys = document.get(section, {})
        keys = {"preset": section_keys} if isinstance(section_keys, str) else section_keys
        chosen = {**document, section: {**keys, key: widget.value}}
        other = parse_scenario(document_text(chosen)).job
        if other != job and evaluate_step(other) != evaluate_step(job):
            wrong.append(f"{key} = {widget.value}")
    assert wrong == []


BUDGET = {"document:training.num_tokens", "document:cluster.price_per_device_hour"}
SIZES = ("cluster.num_nodes", "cluster.devices_per_node", "cluster.num_devices")
NUMBERS = ("model.seq_len", "model.vocab_size", *SIZES, "training.global_batch_size")
MORE_NUMBERS = ("model.lora_rank",)


@pytest.mark.parametrize("value", slow_except(["many"], [0, -3, 10**400, "many"]), ids=["0", "-3", "huge", "text"])
def test_no_number_takes_a_field_away(value: Any) -> None:
    whole = fields(shown(dict(SMALL)))
    assert whole == BUDGET | {f"document:{name}" for name in (*NUMBERS, *MORE_NUMBERS)}
    every = (*NUMBERS, *MORE_NUMBERS, "training.num_tokens", "cluster.price_per_device_hour")
    for names in (every, SIZES[:1], SIZES[1:2], SIZES[2:], NUMBERS[-1:], MORE_NUMBERS):
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
    expected = {f"document:{number_key}" for number_key in NUMBERS}
    assert fields(page) == expected | (BUDGET if name in ("plan", "compare", "scale", "search") else set())


def typed(page: AppTest, key: str, text: str) -> AppTest:
    """The page after a text that is none of a box's labels was typed into the box."""
    box = page.selectbox(key=key)
    box.options.append(text)
    return box.set_value(text).run()


def captions(page: AppTest) -> str:
    return "\n".join(str(caption.value).replace("\\", "") for caption in page.caption)


@pytest.mark.parametrize(
    ("box", "text", "path", "value"),
    [
        ("model", "meta-llama/Llama-3.1-8B", ("model",), {"preset": "llama3.1-8b"}),
        ("hardware", "2x8 H100", ("cluster",), {"preset": "dgx-h100", "num_nodes": 2}),
        ("framework", "Megatron Core", ("software",), "megatron-core"),
        ("hardware", "a100", ("cluster",), USUAL["cluster"]),
    ],
)
def test_typed_name_is_taken_or_told_to_be_unclear(box: str, text: str, path: tuple[str, ...], value: Any) -> None:
    page = typed(shown(USUAL), f"form {box}", text)
    assert_no_bug(page)
    document = page.session_state["simplan document"]
    assert document[path[0]] == value
    is_unclear = USUAL[path[0]] == value
    assert ("name one of" in captions(page)) is is_unclear
    assert page.selectbox(key=f"form {box}").value == (value if isinstance(value, str) else next(iter(value.values())))
    assert "name one of" not in captions(page.run()), "told once"


@pytest.mark.parametrize(
    ("box", "text", "number"), [("model", "llama3", 9), ("hardware", "a100", 6), ("hardware", "asdf", 0)]
)
def test_unclear_name_is_told_in_words_of_the_form(box: str, text: str, number: int) -> None:
    """With every entry of the list that has the typed words, of clusters and devices, and with no key of a file."""
    page = typed(shown(USUAL), f"form {box}", text)
    [said] = [line for line in captions(page).splitlines() if f"{text}: " in line]
    listed = [name for name in page.selectbox(key=f"form {box}").options if text in name and name != text]
    assert [name for name in listed if name.rpartition(" · ")[2] not in said] == []
    assert len(listed) == number
    assert "devices_per_node" not in said
    assert ("name one of" in said) is (number > 0)


def test_names_of_a_link_are_shown_as_in_the_catalog() -> None:
    document = {**USUAL, "model": {"preset": "Llama 3 70B", "seq_len": 8192}, "software": "FSDP2"}
    page = shown(document | {"cluster": {"preset": "8x8 H100"}})
    names = {box: page.selectbox(key=f"form {box}").value for box in ("model", "hardware", "framework")}
    assert names == {"model": "llama3-70b", "hardware": "dgx-h100", "framework": "torch"}


@pytest.mark.parametrize("name", ["plan", "timeline"])
def test_button_under_the_error_sets_a_batch_that_the_ranks_can_share(name: str) -> None:
    """In the main area of every page, since a phone hides the sidebar."""
    document = {**SMALL, "cluster": {"preset": "dgx-h100", "num_devices": 12}, "plan": {"dp_replicate": 12}}
    page = opened_in_session(name, document, {})
    assert "training.global_batch_size = 16" in page.warning[0].value.replace("\\", "")
    assert [button.label for button in page.main.button if button.label.startswith("Batch")] == ["Batch 12", "Batch 24"]
    page.button(key="form batch 24").click().run()
    assert_no_bug(page)
    assert not page.warning
    assert page.session_state["simplan document"]["training"]["global_batch_size"] == 24


@cache
def shown_by_name(name: str) -> AppTest:
    """One form for two tests, which only look at it."""
    return shown(HELPED[name])


SPECS: dict[str, type[BaseModel]] = {
    "model": ModelSpec, "cluster": ClusterSection, "training": TrainingSection, "plan": ParallelPlan,
    "software": SoftwareSpec, "topology": LeafSpine,
}  # fmt: skip
OVERSUBSCRIBED = {"kind": "leaf_spine", "nodes_per_leaf": 4, "oversubscription": 2.0}
HELPED = DOCUMENTS | {
    "bare devices": {**USUAL, "cluster": {"device": "gaudi3", "devices_per_node": 8, "num_nodes": 8}},
    "fp8": {**USUAL, "training": USUAL["training"] | {"precision": "fp8"}, "plan": {"dp_shard": 64}},
    "topology": {**USUAL, "cluster": USUAL["cluster"] | {"topology": OVERSUBSCRIBED}},
    "bridge": {**USUAL, **QWEN, "software": "megatron-bridge"},
}


@pytest.mark.parametrize("name", slow_except(["nodes", "experts", "bare devices", "fp8", "topology"], HELPED))
def test_help_of_every_field_is_the_description_of_its_key(name: str) -> None:
    page = shown_by_name(name)
    wrong, helped = [], set()
    for widget in (*page.number_input, *page.selectbox, *page.select_slider, *page.toggle):
        if not str(widget.key).startswith("document:") or widget.key in BUDGET:
            continue
        path = str(widget.key).removeprefix("document:")
        *_, section, key = path.split(".")
        description = SPECS[section].model_fields[key].description or ""
        first = description.split(". ")[0].split("; ")[0].rstrip(".")
        plain = widget.help.replace("\\", "")
        if not first or not plain.casefold().startswith(f"`{path}`: {first}".casefold()):
            wrong.append((path, plain))
        helped.add(path)
    assert wrong == []
    assert helped >= {"plan.tp", "model.lora_rank", "software.compiled", "cluster.num_nodes"}


@pytest.mark.parametrize("name", slow_except(["torch", "torchtitan", "megatron-core"], catalog.names("software")))
def test_options_are_those_of_the_framework(name: str) -> None:
    profile = catalog.software(name)
    precision = "fp8" if "fp8" in profile.low_precision else "bf16"
    page = shown({**USUAL, "software": name, "training": USUAL["training"] | {"precision": precision}})
    options = {
        key.removeprefix("document:software."): widget
        for widget in (*page.selectbox, *page.toggle, *page.number_input)
        if (key := str(widget.key)).startswith("document:software.")
    }
    assert options.keys() == {"compiled", "loss", *profile.options}
    for option in options.keys() - set(profile.options):
        assert options[option].disabled
        assert "option of" in options[option].help.replace("\\", ""), "the reason"
    assert page.selectbox(key="form attention").value == profile.layers.attention
    recipes = [box for box in page.selectbox if box.key == "document:training.fp8_recipe"]
    assert len(recipes) == (precision == "fp8")
    for box in recipes:
        labels = {label.removesuffix(" (default)") for label in box.options}
        assert labels == {"tensorwise", *profile.low_precision["fp8"].recipes}


def test_task_of_preferences_stays_with_adapters() -> None:
    """A task of preference training keeps its name with and without adapters, and its reference follows."""
    page = shown({**USUAL, "plan": {"dp_shard": 64}})
    page.selectbox(key="document:training.task").set_value("dpo").run()
    document = page.session_state["simplan document"]
    assert parse_scenario(document_text(document)).job.reference == "second_model"
    page.number_input(key="document:model.lora_rank").set_value(8).run()
    job = parse_scenario(document_text(page.session_state["simplan document"])).job
    assert (job.training.task, job.reference, job.model.lora_rank) == ("dpo", "adapters_off", 8)


def test_options_of_the_framework_are_written_and_left_out() -> None:
    page = shown({**USUAL, "plan": {"dp_shard": 64}})
    page.toggle(key="document:software.compiled").set_value(True).run()
    page.selectbox(key="document:software.loss").set_value("chunked").run()
    page.number_input(key="document:model.lora_rank").set_value(8).run()
    document = page.session_state["simplan document"]
    assert document["software"] == {"preset": "torch", "compiled": True, "loss": "chunked"}
    assert (document["model"]["lora_rank"], document["training"]["task"]) == (8, "lora")
    job = parse_scenario(document_text(document)).job
    assert (job.software.compiled, job.software.loss, job.model.lora_rank) == (True, "chunked", 8)
    page.toggle(key="document:software.compiled").set_value(False).run()
    page.selectbox(key="document:software.loss").set_value("whole").run()
    page.number_input(key="document:model.lora_rank").set_value(None).run()
    document = page.session_state["simplan document"]
    assert (document["software"], document["model"], document["training"]) == (
        "torch", USUAL["model"], USUAL["training"],
    )  # fmt: skip


def test_oversubscription_is_that_of_the_topology() -> None:
    assert shown(USUAL).number_input(key="form oversubscription").disabled
    page = shown({**USUAL, "cluster": USUAL["cluster"] | {"topology": "superpod-h100"}})
    box = page.number_input(key="document:cluster.topology.oversubscription")
    before = box.value
    assert before == catalog.topology_fields("superpod-h100").get("oversubscription", 1.0)
    box.set_value(3.0).run()
    document = page.session_state["simplan document"]
    topology = parse_scenario(document_text(document)).job.cluster.topology
    assert isinstance(topology, LeafSpine | Rail | FatTree)
    assert topology.oversubscription == 3.0
    page.number_input(key=str(box.key)).set_value(before).run()
    assert page.session_state["simplan document"]["cluster"]["topology"] == "superpod-h100"


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
