"""A run on this machine, started from the page: its progress, and stopping it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.serving import opened, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = {
    "family": "gpt",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "seq_len": 64,
}
HERE = "&".join(f"model.{key}={value}" for key, value in MODEL.items())
HERE += "&cluster.preset=this-machine&cluster.num_devices=2&training.global_batch_size=8&training.precision=fp32"
HERE += "&software=torch&plan.dp_replicate=2&v.held=run&v.steps=5"


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
