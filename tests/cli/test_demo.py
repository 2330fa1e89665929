"""The demo's note about a busy machine."""

from __future__ import annotations

import pytest

from simplan.cli import demo


@pytest.mark.parametrize(("load", "said"), [(0.0, False), (2.0, False), (2.1, True), (40.0, True)])
def test_a_busy_machine_is_told(load: float, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "num_cores", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert ("timings will scatter" in demo._busy()) == said
