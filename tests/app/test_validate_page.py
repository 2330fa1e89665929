"""The page Validate: a link starts nothing, and no combination of inputs shows an exception."""

from __future__ import annotations

from typing import Any

import pytest

from app.jobs.server import jobs, runs
from simplan.cli.dashboard import RUN_FLAG
from tests.app.pages import SMALL, assert_no_bug, opened

HERE = {**SMALL, "cluster": {"preset": "this-machine", "num_devices": 4}}


@pytest.mark.parametrize(
    "view", [{}, {"held": "measured"}, {"held": "run"}, {"held": 7, "source": "nonsense", "steps": 0}]
)
def test_it_opens(view: dict[str, Any]) -> None:
    assert_no_bug(opened("validate", view=view))


@pytest.mark.parametrize("flag", ["0", "1"])
def test_a_link_starts_no_run(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FLAG, flag)
    view = {"held": "run", "start run": True, "run": True, "steps": 5}
    page = opened("validate", HERE, view)
    assert_no_bug(page)
    assert runs().last is None
    assert not jobs().busy()
    assert ("Run it here" in [button.label for button in page.button]) is (flag == "1")


def test_published_runs_of_the_repository_are_offered() -> None:
    page = opened("validate")
    [source] = [box for box in page.selectbox if box.label == "Source"]
    assert "zero_bubble" in source.options
    assert "Predict them" in [button.label for button in page.button]
