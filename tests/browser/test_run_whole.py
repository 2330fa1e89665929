"""A run on this machine, started from the page, to its end: both steps on one axis."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.serving import opened, settled
from tests.browser.test_run import HERE

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1200)]

NAMES = ("stMetricLabel", "stMetricValue")


def test_a_run_is_compared_with_its_prediction(page: Any, served: str) -> None:
    page.set_default_timeout(900_000)
    opened(page, f"{served}/validate?{HERE}")
    main = page.locator("[data-testid=stMainBlockContainer]")
    main.get_by_role("button", name="Run here").click()
    main.get_by_role("button", name="Stop").wait_for()
    assert main.get_by_role("button", name="Run here").count() == 0, "one at a time"
    main.get_by_text("Files are in").wait_for()
    settled(page)
    values = dict(zip(*(main.get_by_test_id(name).all_inner_texts() for name in NAMES), strict=True))
    assert re.fullmatch(r"[\d.,]+ m?s", values["Predicted step"])
    assert re.fullmatch(r"[\d.,]+ m?s", values["Measured step"])
    assert values["Actions"] == "as predicted"
    words = " ".join(main.locator(".js-plotly-plot").all_text_contents())
    assert "predicted" in words
    assert "measured" in words
    assert main.get_by_test_id("stException").count() == 0
    main.get_by_role("button", name="Run here").wait_for()
