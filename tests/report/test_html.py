"""HTML reports: one page of every kind of document, that loads and runs nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.figures import scale
from simplan.errors import SpecError
from simplan.explain import difference, explain
from simplan.report.html import KINDS, html_report
from simplan.scenario import load_scenario
from simplan.search import search
from simplan.units import format_bytes, format_percent, format_time
from simplan.validate.logged import compare_logged
from simplan.validate.logged_run import LoggedRun, parse_measured

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
VOID = ("meta", "br", "img")


class Page(HTMLParser):
    """Tags, attributes and text of a page, whose tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    first, second = (load_scenario(SCENARIOS / f"{name}.yaml") for name in ("1f1b", "fsdp"))
    prediction = first.predict()
    explanations = [explain(each.predict()) for each in (first, second)]
    measured = parse_measured("step_times_s: [0.5, 0.6, 0.5]", "log.yaml")
    assert isinstance(measured, LoggedRun)
    logged = compare_logged(prediction.to_json(), measured)
    text = (SCENARIOS / "fsdp.yaml").read_text()
    points = scale.sweep(text, "devices", False)
    swept = (points, scale.scale_rows(points), scale.worth(text), (0.1, scale.slow_ranks(text, 0.1)))
    found = {
        "prediction": prediction.to_json(),
        "search": search(first.job, {"tp": [1], "pp": [1, 4], "schedule": ["1f1b"], "top": 2}).to_json(),
        "explanation": explanations[0].to_json(),
        "sweep": scale.scale_document(second, "devices", *swept),
        "difference": difference(*explanations).to_json(),
        "logged_comparison": logged.to_json(),
    }
    found["prediction"]["name"] = "<script>alert(1)</script>"
    return {kind: json.loads(json.dumps(document)) for kind, document in found.items()}


def test_every_kind_is_shown_with_its_numbers(documents: dict[str, dict[str, Any]]) -> None:
    """A comparison with a run has the parts of one with a log; the executor's tests write it."""
    assert {*documents, "comparison"} == set(KINDS)
    page = html_report(documents.items(), written="today")
    shown = Page(page)
    assert not {"script", "link", "iframe", "img", "object"} & {*shown.tags}
    outside = [value for _, value in shown.attributes if "//" in value and value != "http://www.w3.org/2000/svg"]
    assert outside == []
    assert "alert(1)" in shown.text  # as text
    prediction, best = documents["prediction"], documents["search"]["best"]
    for seconds in (prediction["step_time_s"], best["step_time_s"], documents["difference"]["second"]["step_time_s"]):
        assert format_time(seconds) in shown.text
    swept = [point["step_time_s"] for point in documents["sweep"]["points"] if point["step_time_s"] is not None]
    assert len(swept) > 1
    assert all(format_time(seconds) in shown.text for seconds in swept)
    assert all(point["refused"] in shown.text for point in documents["sweep"]["points"])
    for term in documents["explanation"]["time"]:
        assert term["formula"] in shown.text
    for rule in documents["search"]["space"]["rejected"]:
        assert rule in shown.text
    assert shown.tags.count("svg") == 1


def test_prediction_with_a_topology_shows_its_fabric_and_the_load_of_its_links() -> None:
    prediction = load_scenario(SCENARIOS / "network" / "leaf-spine.yaml").predict()
    network = prediction.network
    assert network is not None
    shown = Page(html_report([("x", json.loads(json.dumps(prediction.to_json())))], written="today"))
    assert shown.tags.count("svg") == 2
    slowest = network.links[0]
    for text in (slowest.name, format_bytes(slowest.num_bytes), format_percent(slowest.busy_share)):
        assert text in shown.text
    assert f"Contention costs {format_time(network.contention_s)} of the step." in shown.text


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kind": "measurement", "schema_version": 2}, r"x\.json: kind = measurement: is not shown in a report"),
        ({"kind": "prediction", "schema_version": 1}, r"x\.json: schema_version = 1: is of another version"),
        ({"kind": "search", "schema_version": 1}, r"x\.json: file: lacks a part of a search"),
        ({}, r"x\.json: kind = None: is not shown"),
    ],
)
def test_what_is_no_such_document_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        html_report([("x.json", document)], written="today")
