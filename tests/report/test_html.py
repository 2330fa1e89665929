"""HTML reports: one page of every kind of document, that loads and runs nothing."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.figures import scale
from simplan.errors import SpecError
from simplan.explain import difference, explain
from simplan.report.html import KINDS, html_report
from simplan.report.predictions import compared_predictions
from simplan.scenario import load_scenario
from simplan.search import search
from simplan.units import format_bytes, format_percent, format_time
from simplan.validate.logged import compare_logged
from simplan.validate.logged_run import LoggedRun, parse_measured
from tests.report.test_goodput_drawing import document as goodput_document
from tests.support.problems import refuses
from tests.support.sources import nodes, python_files

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
    explanations = [explain(scenario.predict()) for scenario in (first, second)]
    measured = parse_measured("step_times_s: [0.5, 0.6, 0.5]", "log.yaml")
    assert isinstance(measured, LoggedRun)
    logged = compare_logged(prediction.to_json(), measured)
    text = (SCENARIOS / "fsdp.yaml").read_text()
    points = scale.sweep(text, "devices", False)
    swept = (points, scale.scale_rows(points), scale.worth(text), (0.1, scale.slow_ranks(text, 0.1)))
    by_kind = {
        "prediction": prediction.to_json(),
        "predictions": compared_predictions([prediction.to_json(), second.predict().to_json()]),
        "search": search(first.job, {"tp": [1], "pp": [1, 4], "schedule": ["1f1b"], "top": 2}).to_json(),
        "explanation": explanations[0].to_json(),
        "sweep": scale.scale_document(second, "devices", *swept),
        "difference": difference(*explanations).to_json(),
        "logged_comparison": logged.to_json(),
        "goodput": goodput_document(),
    }
    by_kind["prediction"]["name"] = "<script>alert(1)</script>"
    return {kind: json.loads(json.dumps(document)) for kind, document in by_kind.items()}


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
    assert shown.tags.count("svg") == 4, "of each prediction, and of the whole run"


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


def kinds_written() -> set[str]:
    """Kinds of the JSON documents that any module writes: literals with ``kind`` and ``schema_version``."""
    kinds = set()
    texts = (file.read_text() for file in python_files("simplan", "executor", "app"))
    for text in (text for text in texts if '"kind"' in text):  # to parse all takes seconds
        for node in nodes(text):
            if isinstance(node, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                if "kind" in keys and {"schema_version", None} & {*keys}:
                    value = node.values[keys.index("kind")]
                    kinds |= {str(value.value)} if isinstance(value, ast.Constant) else set()
    return kinds


def test_every_kind_is_shown_or_refused_with_the_command_for_one_that_is() -> None:
    kinds = kinds_written()
    assert {"prediction", "predictions", "suite", "largest", "run", *KINDS} <= kinds
    for kind in kinds - {*KINDS}:
        with refuses("kind", kind, rule="is not shown in a report") as error:
            html_report([("x.json", {"kind": kind, "schema_version": 1})], written="today")
        [fix] = [problem.fix for problem in error.value.problems]
        assert re.search(r"`simplan \w+ SCENARIO -o \w+\.json`|comparison\.json", fix)


def test_predictions_are_told_apart_and_add_up(documents: dict[str, dict[str, Any]]) -> None:
    """Two plans of one name have the names of their files; a bar of memory has all that the peak has."""
    first = documents["prediction"] | {"name": "one"}
    second = next(
        prediction for prediction in documents["predictions"]["predictions"] if prediction["name"] == "fsdp"
    ) | {"name": "one"}
    page = Page(html_report([("a/plan-a.json", first), ("a/plan-b.json", second)], written="today")).text
    for name in ("Comparison: plan-b and plan-a", "Prediction: plan-a", "Prediction: plan-b"):
        assert page.count(name) == 2, "a heading, and its link"
    for document in (first, second):
        worst = next(rank for rank in document["ranks"] if rank["rank"] == document["worst_rank"])
        peak = worst["peak_memory_gib"]
        caption = f"Memory of rank {worst['rank']} at its peak: {peak['device']:.2f} GiB"
        bar = page[page.index(caption) :][:600].partition(" of ")[2].partition(" GiB")[2]
        parts = re.findall(r"([\d.]+) GiB \(([\d.]+) %\)", bar)
        assert sum(float(gib) for gib, _ in parts) == pytest.approx(peak["device"], rel=0.01)
        assert sum(float(share) for _, share in parts) == pytest.approx(100, abs=1)
        assert f"allocator reserve {peak['reserved'] - peak['allocated']:.2f} GiB" in bar


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kind": "prediction", "schema_version": 1}, r"x\.json: schema_version = 1: is of another version"),
        ({"kind": "search", "schema_version": 1}, r"x\.json: file: lacks a part of a search"),
        ({}, r"x\.json: kind = None: is not shown"),
    ],
)
def test_documents_of_other_kinds_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        html_report([("x.json", document)], written="today")
