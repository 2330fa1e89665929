"""The dashboard without a mouse: Tab reaches everything and leaves it again, and one sees where one is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
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


def test_a_lesson_is_played_by_keys(page: Any, served: str) -> None:
    opened(page, f"{served}/learn?v.topic=schedules")
    tab_to(page, "Play")
    page.keyboard.press("Enter")
    wait_for_time(page, lambda now: now > 3)
    tab_to(page, "Stop")
    page.keyboard.press("Enter")
    tab_to(page, "time")
    page.keyboard.press("Home")
    wait_for_time(page, lambda now: now == 0)
    for now in (1, 2, 3):
        page.keyboard.press("ArrowRight")
        wait_for_time(page, float(now).__eq__)
    page.keyboard.press("ArrowLeft")
    wait_for_time(page, lambda now: now == 2)
    assert "time 2" in page.locator(".js-plotly-plot").text_content(), "what is heard is what is seen"


def wait_for_time(page: Any, holds: Callable[[float], bool]) -> None:
    """Waits for what the slider of a lesson says."""
    slider = page.get_by_role("slider", name="time")
    end_s = time.monotonic() + 120
    while not holds(float(slider.get_attribute("aria-valuetext"))):
        assert time.monotonic() < end_s, slider.get_attribute("aria-valuetext")
        page.wait_for_timeout(50)


@pytest.mark.parametrize("name", PAGES)
def test_figures_have_words(page: Any, served: str, name: str) -> None:
    opened(page, f"{served}/{'' if name == 'plan' else name}?{SMALL}")
    charts = page.locator(".js-plotly-plot")
    named = page.locator("[role=figure][aria-label]").filter(has=page.locator(".js-plotly-plot"))
    assert charts.count() == named.count()
    for figure in named.all():
        assert len(figure.get_attribute("aria-label").split()) > 2
