"""Two plans side by side: bars and rows sum to the difference of the wholes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.figures.plans import difference_figure, difference_rows, difference_words
from simplan.explain import Difference, difference, explain
from simplan.scenario import load_scenario
from simplan.units import GIB
from tests.app.figures.drawn import checked

SCENARIOS = Path(__file__).resolve().parents[3] / "scenarios"


@pytest.fixture(scope="module")
def found() -> Difference:
    one, two = (explain(*load_scenario(SCENARIOS / f"{name}.yaml").predict_step()) for name in ("1f1b", "gpipe"))
    return difference(one, two)


def test_bars_sum_to_steps_and_to_memory(found: Difference) -> None:
    one, two = found.first, found.second
    for rows, wholes in (
        (found.time, (one.step_time_s, two.step_time_s)),
        (found.memory, (one.device_bytes / GIB, two.device_bytes / GIB)),
    ):
        figure = checked(difference_figure(rows, ("a", "b")))
        assert [sum(bar.x) for bar in figure.data] == pytest.approx(wholes)
        table = difference_rows(rows)
        assert sum(row["difference"] for row in table) == pytest.approx(wholes[1] - wholes[0])
        assert all(row["first formula"] or row["second formula"] for row in table)


def test_words_name_what_differs_most(found: Difference) -> None:
    words = difference_words(found.memory)
    assert words[0].startswith("activations +")
    assert words[0].endswith(" GiB")
