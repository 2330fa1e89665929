"""What only a browser shows: pages open, a change changes the answer, downloads hold what was shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.components.plan_table import ROW_PX
from simplan.scenario import load_scenario
from tests.browser.serving import PAGES, SMALL, opened, settled

pytestmark = pytest.mark.browser

FRAMES = re.compile("Unrecognized feature|An iframe which has both allow-scripts")
"""Warnings of the browser about how Streamlit writes frames; those of drawings let no script run."""


def address(served: str, name: str) -> str:
    return f"{served}/{'' if name == 'plan' else name}?{SMALL}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_complaint(page: Any, served: str, name: str) -> None:
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    opened(page, address(served, name))
    assert page.locator("[data-testid=stException]").count() == 0
    assert "bug of simplan" not in page.content()
    others = [url for url in asked if not url.startswith((served, "data:", "blob:"))]
    assert not others, "it works without any other host"
    assert not [words for words in said if not FRAMES.search(words)], "the browser has nothing to complain about"


def test_a_change_changes_the_answer_and_the_address(page: Any, served: str) -> None:
    opened(page, f"{served}/?{SMALL}")
    step = page.locator("[data-testid=stMetric]").filter(has_text="Step time").locator("[data-testid=stMetricValue]")
    before = step.inner_text()
    batch = page.get_by_role("spinbutton", name="Global batch")
    batch.fill("64")
    batch.press("Enter")
    page.wait_for_function("before => !document.body.innerText.includes(before)", arg=before)
    page.wait_for_url(lambda url: "training.global_batch_size=64" in url)  # written when the whole page is there


def test_a_typed_name_that_begins_with_the_value_is_taken(page: Any, served: str) -> None:
    """Streamlit drops the label of the value from a text that begins with it: torchtitan became titan under torch."""
    opened(page, f"{served}/?{SMALL}&cluster.intra_link=pcie4")
    for label, name, key in (
        ("Framework", "torchtitan", "software"),
        ("Link in a node", "pcie4-no-p2p", "cluster.intra_link"),
        ("Model", "gpt2-124m", "model.preset"),
    ):
        box = page.locator(f'[data-testid=stSelectbox]:has(label:has-text("{label}")) input').first
        box.click()
        page.keyboard.type(name, delay=30)
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url, said=f"{key}={name}": f"{said}&" in f"{url}&")
        settled(page)


def test_a_download_is_the_scenario_that_was_asked(page: Any, served: str, tmp_path: Path) -> None:
    opened(page, f"{served}/?{SMALL}")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Scenario", exact=True).click()
    file = tmp_path / "scenario.yaml"
    waiting.value.save_as(file)
    scenario = load_scenario(file)
    assert (scenario.job.plan.pp, scenario.job.plan.dp_replicate, scenario.job.cluster.num_devices) == (2, 2, 4)


@pytest.mark.parametrize("name", ["plan", "timeline", "network", "scale"])
def test_report_is_one_file_that_loads_nothing(page: Any, served: str, tmp_path: Path, name: str) -> None:
    opened(page, address(served, name))
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Report", exact=True).click()
    file = tmp_path / "report.html"
    waiting.value.save_as(file)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    assert page.get_by_role("heading", level=1).inner_text() == "simplan report"
    assert page.locator("section .verdict, section .figures").count()
    assert asked == [file.as_uri()]


@pytest.mark.parametrize(("format_", "starts"), [("SVG", b"<svg"), ("PNG", b"\x89PNG")])
def test_a_figure_is_saved_as_it_is_drawn(page: Any, served: str, tmp_path: Path, format_: str, starts: bytes) -> None:
    opened(page, address(served, "plan"))
    chart = page.locator(".js-plotly-plot").first
    chart.hover()
    with page.expect_download() as waiting:
        chart.get_by_label(f"Save as {format_}").click()
    assert waiting.value.suggested_filename.endswith(f"memory-by-rank.{format_.lower()}")
    file = tmp_path / "figure"
    waiting.value.save_as(file)
    content = file.read_bytes()
    assert content.startswith(starts)
    if format_ == "SVG":
        for words in (b"parameters", b"optimizer states", b"GiB"):
            assert words in content


def test_a_search_finds_plans_and_pinned_ones_are_compared(page: Any, served: str) -> None:
    opened(page, f"{served}/search?{SMALL}")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("button", name="Open as the plan").wait_for()
    page.get_by_text(re.compile("Best of .* \\(in")).wait_for()
    settled(page)
    page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("link", name="Compare 1 pinned scenario").click()
    page.get_by_text("terms with their formulas").wait_for()
    assert page.locator("[data-testid=stException]").count() == 0


def test_a_click_on_a_point_or_a_row_selects_its_plan(page: Any, served: str) -> None:
    opened(page, f"{served}/search?{SMALL.replace('batch_size=16', 'batch_size=32')}")  # not searched by another test
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_text(re.compile("Best of .* \\(in")).wait_for()
    settled(page)
    points = page.locator(".js-plotly-plot .scatterlayer .points path.point")
    points.nth(3).click(force=True)
    page.wait_for_url(lambda url: "v.plan=3" in url)
    settled(page)
    canvas = page.locator("[data-testid=stDataFrame] canvas").first
    canvas.scroll_into_view_if_needed()
    table = canvas.bounding_box()
    page.mouse.click(table["x"] + 15, table["y"] + ROW_PX * 3.5)  # the checkbox of the third row
    page.wait_for_url(lambda url: "v.plan=2" in url)
    page.wait_for_function("[...document.querySelectorAll('input')].some(box => box.value.startsWith('3. '))")


def test_back_leaves_a_page_with_one_press(page: Any, served: str) -> None:
    opened(page, served)
    page.wait_for_url(lambda url: "plan.dp_shard=64" in url)
    page.get_by_role("link", name="Timeline").click()
    page.wait_for_url(lambda url: "/timeline?" in url)
    settled(page)
    page.go_back()
    page.wait_for_url(lambda url: "/timeline" not in url and "plan.dp_shard=64" in url)
    page.get_by_role("heading", name="Downloads").wait_for()


@pytest.mark.parametrize(("content", "words"), [("{", "this is not JSON"), ("{}", "schema_version: is missing")])
def test_a_broken_upload_gives_a_sentence(page: Any, served: str, tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "prediction.json"
    file.write_text(content)
    opened(page, f"{served}/validate?{SMALL}&v.held=measured&v.prediction=file")
    page.locator(".st-key-prediction-file input[type=file]").set_input_files(str(file))
    page.get_by_text(words, exact=False).first.wait_for()
    assert page.locator("[data-testid=stException]").count() == 0


def test_file_that_is_too_large_gets_a_sentence(page: Any, served: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(b" " * (33 * 2**20))
    opened(page, f"{served}/validate?{SMALL}&v.held=measured")
    page.locator(".st-key-measurement-file input[type=file]").set_input_files(str(file))
    sentence = page.get_by_role("alert").filter(has_text="File must be 32.0MB or smaller")
    sentence.wait_for()
    box = sentence.bounding_box()
    assert box["width"] > 100, "for everybody, not for screen readers alone"
    assert box["height"] > 10


def test_unknown_page_names_the_pages(page: Any, served: str) -> None:
    response = page.goto(f"{served}/no-such-page")
    assert response.status == 404
    page.get_by_role("link", name="Timeline").click()
    page.get_by_role("heading", level=1, name="Timeline").wait_for()


def test_a_link_starts_no_run(page: Any, served: str) -> None:
    here = SMALL.replace("dgx-h100", "this-machine")
    opened(page, f"{served}/validate?{here}&v.held=run&v.run=true")
    page.get_by_role("button", name="Run here").wait_for()
    assert page.get_by_role("button", name="Stop").count() == 0


def test_two_schedules_are_compared_on_one_axis(page: Any, served: str) -> None:
    opened(page, f"{served}/timeline?{SMALL}&v.schedules=%5B%221f1b%22%2C%22gpipe%22%5D")
    chart = page.locator(".js-plotly-plot").first
    chart.wait_for()
    words = chart.text_content()
    assert "gpipe" in words
    assert "1f1b" in words
    assert page.locator("[data-testid=stException]").count() == 0
