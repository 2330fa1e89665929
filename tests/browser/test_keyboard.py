"""The dashboard without a mouse: Tab reaches everything and leaves it again, and one sees where one is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.serving import PAGES, SMALL, opened, settled

pytestmark = pytest.mark.browser

_MAX_STOPS = 200
_NAME = """
() => {
  const at = document.activeElement
  if (at.matches("body, main")) return at.matches("main") ? "main" : ""
  return (at.getAttribute("aria-label") || at.textContent).trim()
}
"""
"""What has the focus; empty for nothing."""

_RING = """
() => {
  const ringed = at => {
    const style = getComputedStyle(at), box = at.getBoundingClientRect()
    const clear = style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2
    return clear && box.width > 5 && box.height > 5
  }
  let at = document.activeElement
  for (let up = 0; up < 4; up++, at = at.parentElement) if (ringed(at)) return true
  return false
}
"""
"""Whether there is a ring around what has the focus, or around the field that it is in."""


def tab_to(page: Any, name: str) -> None:
    """Presses Tab until something of this name has the focus."""
    for _ in range(_MAX_STOPS):
        page.keyboard.press("Tab")
        if page.evaluate(_NAME).endswith(name):
            return
    raise AssertionError(f"Tab does not reach {name}")


def step_time(page: Any) -> str:
    metric = page.locator("[data-testid=stMetric]").filter(has_text="Step time")
    text: str = metric.locator("[data-testid=stMetricValue]").inner_text()
    return text


@pytest.mark.parametrize("name", PAGES)
def test_tab_passes_through_a_page_and_is_seen_everywhere(page: Any, served: str, name: str) -> None:
    opened(page, f"{served}/{'' if name == 'plan' else name}?{SMALL}")
    hidden, stops = [], []
    for _ in range(_MAX_STOPS):
        page.keyboard.press("Tab")
        stop = page.evaluate(_NAME)
        if not stop:
            break
        stops.append(stop)
        if not page.evaluate(_RING):
            hidden.append(stop)
    assert len(stops) < _MAX_STOPS, "it comes to the end"
    assert stops[0] == "Skip to main content"
    assert not hidden, "where one is can be seen"


def test_a_plan_is_changed_searched_and_opened_by_keys(page: Any, served: str) -> None:
    opened(page, f"{served}/?{SMALL}")
    before = step_time(page)
    tab_to(page, "Model")
    page.keyboard.type("bert-base")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "model.preset=bert-base" in url)
    settled(page)
    assert step_time(page) != before
    tab_to(page, "Search")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Search", exact=True).wait_for()
    settled(page)
    tab_to(page, "Learn")
    tab_to(page, "Search")
    page.keyboard.press("Enter")
    verdict = page.get_by_text(re.compile("^Best of"))
    verdict.wait_for()
    settled(page)  # until all plans are explained the page is drawn anew now and then
    best = re.search(r"step time: (.*s) a step", verdict.inner_text())
    tab_to(page, "Open as the plan")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Downloads").wait_for()
    settled(page)
    assert best is not None
    assert step_time(page) == best[1]


def test_a_schedule_is_stepped_through_by_keys(page: Any, served: str) -> None:
    opened(page, f"{served}/learn?v.topic=schedules")
    slider = page.get_by_role("slider", name="Time")
    slider.focus()
    page.keyboard.press("Home")
    page.wait_for_url(lambda url: "v.lesson_time=0.0" in url)
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: "v.lesson_time=1.0" in url)
    settled(page)
    drawing = page.frame_locator(".st-key-drawing-schedule iframe")
    drawing.locator("svg .box title", has_text="0F0: forward").wait_for(state="attached")
    assert drawing.locator("svg .box").count() == 1, "the first forward"


@pytest.mark.parametrize("name", PAGES)
def test_figures_have_words(page: Any, served: str, name: str) -> None:
    opened(page, f"{served}/{'' if name == 'plan' else name}?{SMALL}")
    charts = page.locator(".js-plotly-plot")
    named = page.locator("[role=figure][aria-label]").filter(has=page.locator(".js-plotly-plot"))
    assert charts.count() == named.count()
    for figure in named.all():
        assert len(figure.get_attribute("aria-label").split()) > 2
    for drawing in page.locator("[class*=st-key-drawing] iframe").all():
        assert len(drawing.get_attribute("title").split()) > 2
