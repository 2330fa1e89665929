"""A run on this machine, started from the page: its progress, stopping it, and both steps on one axis at its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.serving import opened, serving, settled

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = {"family": "gpt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
HERE = "&".join(f"model.{key}={value}" for key, value in {**MODEL, "vocab_size": 256, "seq_len": 64}.items())
HERE += "&cluster.preset=this-machine&cluster.num_devices=2&training.global_batch_size=8&training.precision=fp32"
HERE += "&software=torch&plan.dp_replicate=2&v.held=run&v.steps=5"
NAMES = ("stMetricLabel", "stMetricValue")


def test_a_run_is_watched_and_stopped(page: Any, tmp_path: Path) -> None:
    """In a workspace of its own: where nothing is calibrated a run is too long to end before it is stopped."""
    with serving(tmp_path) as (url, _):
        opened(page, f"{url}/validate?{HERE}")
        main = page.locator("[data-testid=stMainBlockContainer]")
        main.get_by_role("button", name="Run here").click()
        main.get_by_text(re.compile(r"calibrating|step \d")).first.wait_for()
        main.get_by_role("button", name="Stop").click()
        main.get_by_text("Stopped after").wait_for()
        main.get_by_role("button", name="Run here").wait_for()
        assert page.locator("[data-testid=stException]").count() == 0


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


def test_another_site_cannot_frame_a_run(page: Any, served: str) -> None:
    """One click in a frame of another page would start a run on this machine."""
    page.set_content(f'<iframe src="{served}/validate?{HERE}"></iframe>')
    page.wait_for_function("document.querySelector('iframe').contentDocument === null")  # of another origin: loaded
    (frame,) = page.main_frame.child_frames
    assert frame.url.startswith("chrome-error:")
    assert frame.get_by_role("button").count() == 0
