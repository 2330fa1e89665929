"""The tour of docs/how-to/dashboard.md: the best plan of Llama 3 70B on 64 H100s, why it is best, and the file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simplan.units import format_time
from tests.browser.serving import LARGE, ROOT, opened, settled
from tests.browser.slow_link import slow_link

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_SEEN = """
() => {
  window.most = {}
  const look = () => {
    for (const words of ["Filters", "Open as the plan", "Search"]) {
      const shown = [...document.querySelectorAll("summary, [data-testid=stMainBlockContainer] button")]
        .filter(one => one.textContent.trim().endsWith(words))
      window.most[words] = Math.max(window.most[words] || 0, shown.length)
    }
  }
  new MutationObserver(look).observe(document, {childList: true, subtree: true})
}
"""
"""How often words of the page were seen at once, at most."""


def test_the_tour_ends_with_a_plan_that_predict_confirms(page: Any, served: str, tmp_path: Path) -> None:
    page.set_default_timeout(240_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    opened(page, served)
    page.get_by_role("link", name="Search").click()
    page.evaluate(MAX_SEEN)
    page.get_by_role("button", name="Search", exact=True).click()
    verdict = page.get_by_text(re.compile(r"^Best of 76,\d{3} plans by step time: .* s a step on 64 devices \(in"))
    verdict.wait_for()
    settled(page)
    assert page.evaluate("() => window.most") == {"Filters": 1, "Open as the plan": 1, "Search": 1}
    best = re.search(r"step time: (.* s) a step", verdict.inner_text())
    page.get_by_role("button", name="Open as the plan").click()
    page.wait_for_url(lambda url: "/search" not in url)
    page.get_by_role("heading", name="Downloads").wait_for()
    settled(page)
    step = page.locator("[data-testid=stMetric]").filter(has_text="Step time").locator("[data-testid=stMetricValue]")
    assert best is not None
    assert step.inner_text() == best[1]
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Scenario", exact=True).click()
    file = tmp_path / "plan.yaml"
    waiting.value.save_as(file)
    command = [sys.executable, "-m", "simplan", "predict", str(file), "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    predicted = json.loads(said)
    assert predicted["fits"]
    assert format_time(predicted["step_time_s"]) == best[1]
    page.get_by_role("link", name="Timeline").click()
    page.locator(".js-plotly-plot .infolayer").first.wait_for()
    assert page.locator("[data-testid=stException]").count() == 0
    assert not complaints, "the browser has nothing to complain about"


def test_a_plan_is_opened_while_others_are_explained_and_answers_are_slow(page: Any, served: str) -> None:
    """Requests of the page that is left, still on their way, must not clear the next one."""
    page.set_default_timeout(240_000)
    scenario = LARGE.replace("batch_size=128", "batch_size=384")
    with slow_link(served) as link:
        opened(page, f"{link.address}/search?{scenario}")
        page.get_by_role("button", name="Search", exact=True).click()
        page.get_by_text("the ranking is final").wait_for()
        link.delay_s = 0.8
        page.get_by_role("button", name="Open as the plan").click()
        page.get_by_role("heading", name="Downloads").wait_for()
        page.wait_for_timeout(4_000)
        assert page.get_by_role("heading", name="Downloads").is_visible()
