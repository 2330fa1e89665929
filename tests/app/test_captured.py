"""Files of simplan capture in the dashboard: taken as a config.json is, planned on all pages, refused by the rules."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from app import uploads
from app.fitting import document_text
from app.state import decode
from executor.capture.capture import model_from_module
from simplan.errors import SpecError
from simplan.io import write_model
from simplan.predict import predict
from simplan.scenario import load_scenario, parse_scenario
from simplan.search import SearchSpace, largest
from simplan.units import format_time
from tests.app.views.pages import MAIN, SMALL, assert_no_bug, complaints, opened, opened_in_session, query_of
from tests.executor.capture import modules
from tests.support.problems import refuses, says

PLAN = {"dp_shard": 4, "zero_stage": 3}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captured U-Net, whose samples are images."""
    file = tmp_path_factory.mktemp("captured") / "unet.json"
    write_model(file, model_from_module(modules.UNet(), modules.unet_batch))
    return file


@pytest.fixture(scope="module")
def document(file: Path) -> dict[str, Any]:
    """Scenario of the session with the U-Net."""
    model = uploads.own_model_fields(file.name, file.read_bytes(), 4096)
    return {**SMALL, "model": model, "plan": PLAN}


def test_captured_file_becomes_the_model_that_a_scenario_with_it_has(document: dict[str, Any], file: Path) -> None:
    scenario = file.with_name("scenario.yaml")
    scenario.write_text(document_text({**document, "model": {"file": file.name}}))
    assert parse_scenario(document_text(document)).job == load_scenario(scenario).job
    first, second = (load_scenario(scenario).job.model.captured for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.graph is second.graph, "hashes are made once"
    recognized = uploads.recognized(file.name, file.read_bytes(), {**SMALL, "plan": PLAN})
    assert recognized.title == "captured model"
    assert recognized.document == document


def test_broken_captured_file_is_refused_with_its_key(file: Path) -> None:
    broken = {**json.loads(file.read_text()), "graphs": {"fp32": {}}}
    with pytest.raises(SpecError, match=r"graphs\.fp32\.\w+: is missing"):
        uploads.own_model_fields("unet.json", json.dumps(broken).encode(), 4096)


def test_captured_file_is_uploaded_in_the_form_and_predicted(document: dict[str, Any], file: Path) -> None:
    page = opened(document={**SMALL, "plan": PLAN})
    page.file_uploader(key="form model file").upload(file.name, file.read_bytes(), "application/json").run()
    page.button(key="form use model").click().run()
    assert_no_bug(page)
    assert complaints(page) == []
    prediction = predict(parse_scenario(document_text(document)).job, name="x")
    metrics = {metric.label: metric.value for metric in page.metric}
    assert metrics["Step time"] == format_time(prediction.step_time_s)
    assert page.selectbox(key="form model").value == "own"
    assert "UNet (captured)" in page.selectbox(key="form model").options
    labels = [number.label for number in page.number_input]
    assert not {"Sequence", "Vocabulary"} & set(labels), "sizes are those of the code"


@pytest.mark.parametrize("name", sorted(path.stem for path in (MAIN.parent / "views").glob("*.py")))
def test_page_shows_a_captured_model(name: str, document: dict[str, Any]) -> None:
    page = opened_in_session(name, document, {})
    assert_no_bug(page)
    assert complaints(page) == []


@pytest.mark.slow
def test_plans_of_a_captured_model_are_searched_and_opened(document: dict[str, Any]) -> None:
    page = opened_in_session("search", {**document, "plan": {"tp": 4}}, {})
    next(button for button in page.button if button.label == "Search").click().run(timeout=600)
    assert_no_bug(page)
    assert complaints(page) == []
    next(button for button in page.button if button.label == "Open as the plan").click().run()
    plan = page.session_state["simplan document"]["plan"]
    assert parse_scenario(document_text({**document, "plan": plan})).job.plan.tp == 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"plan": {"tp": 4}}, "UNet ... parallelism; use 1"),
        ({"plan": {"cp": 4}}, "not modeled ... use 1"),
        ({"software": {"preset": "torch", "compiled": True}}, "torch.compile of a captured module without blocks"),
    ],
)
def test_option_that_captured_models_lack_is_refused_by_its_rule(
    changes: dict[str, Any], rule: str, document: dict[str, Any]
) -> None:
    for name in ("plan", "timeline"):
        page = opened_in_session(name, {**document, **changes}, {})
        assert_no_bug(page)
        elements = (*page.error, *page.warning, *page.info)
        assert says(" ".join(str(element.value) for element in elements), rule), name


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"seq_len": 77}, "model.seq_len = 77: ... captured ... capture"),
        ({"preset": "gpt2-124m"}, "model.captured: cannot go with preset"),
        ({"captured": 3}, "model.captured: is no captured model as a word"),
        ({"captured": "eJy*"}, "model.captured: is no captured model as a word"),
        ({"captured": b64encode(zlib.compress(bytes(2**25))).decode()}, "model.captured: is cut short, or more than "),
        ({"captured": b64encode(zlib.compress(b"{}")).decode()}, "model.captured: is no captured model; write one"),
    ],
)
def test_wrong_captured_model_of_a_link_is_refused(
    changes: dict[str, Any], rule: str, document: dict[str, Any]
) -> None:
    text = document_text({**document, "model": {**document["model"], **changes}})
    with pytest.raises(SpecError) as error:
        parse_scenario(text)
    assert says(str(error.value), rule)


@pytest.mark.parametrize(("key", "value"), [("seq_len", 77), ("num_hidden_layers", 2)])
def test_size_that_a_capture_does_not_have_is_refused(key: str, value: int, document: dict[str, Any]) -> None:
    """By whatever changes a model, such as the page Scale."""
    job = parse_scenario(document_text(document)).job
    with pytest.raises(SpecError, match=f"{key} = {value} is not that of the capture, "):
        job.model.with_changes(**{key: value})
    if key == "seq_len":
        with refuses("--largest", rule="of family captured have no seq_len", fix="use microbatch_size"):
            largest(job, SearchSpace(), "seq_len")


def test_small_captured_model_is_part_of_the_link(document: dict[str, Any]) -> None:
    page = opened_in_session("plan", document, {})
    assert decode(query_of(page))[0] == document
