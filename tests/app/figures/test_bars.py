"""Bars: memory by rank sums to what was predicted, and rows of two plans sum to the difference of the wholes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.figures.compared import difference_figure, difference_rows, difference_words
from app.figures.plan import memory_bars, memory_figure, memory_rows
from app.figures.style import MEMORY
from simplan.explain import Difference, difference, explain
from simplan.scenario import parse_scenario
from simplan.units import GIB
from tests.app.figures.drawn import checked
from tests.app.questions import predicted, text_of


@pytest.mark.parametrize("name", ["one-gpu/gpt2-124m", "zb-h1", "fsdp"])
def test_bars_sum_to_what_the_device_needs(name: str) -> None:
    prediction = predicted(name)
    figure = checked(memory_figure(memory_bars(prediction.memory), prediction.capacity_bytes))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    sums = [sum(column) for column in zip(*(trace.y for trace in bars), strict=True)]
    assert sums == pytest.approx([memory.device_bytes / GIB for memory in prediction.memory])
    assert [row["device_gib"] for row in memory_rows(memory_bars(prediction.memory))] == pytest.approx(sums)


def test_parts_have_the_colours_of_the_field() -> None:
    prediction = predicted("one-gpu/gpt2-124m")
    figure = checked(memory_figure(memory_bars(prediction.memory), prediction.capacity_bytes))
    drawn = {trace.name: trace.marker.color for trace in figure.data}
    assert drawn["parameters"] == "#4ea5b7"
    assert drawn["optimizer states"] == "#cec0fa"
    assert drawn["activations"] == "#e38a42"
    assert len(set(MEMORY.values())) == len(MEMORY)


def test_many_ranks_share_bars() -> None:
    memory = predicted("zb-h1").memory
    first = memory[0]
    many = [replace(first, rank=rank) for rank in range(100)]
    [bar] = memory_bars(many)
    assert bar.ranks == tuple(range(100))
    assert len(memory_bars(many[:16])) == 16


@pytest.fixture(scope="module")
def differing() -> Difference:
    first, two = (explain(*parse_scenario(text_of(name)).predict_step()) for name in ("1f1b", "gpipe"))
    return difference(first, two)


def test_bars_sum_to_steps_and_to_memory(differing: Difference) -> None:
    first, second = differing.first, differing.second
    for rows, wholes in (
        (differing.time, (first.step_time_s, second.step_time_s)),
        (differing.memory, (first.device_bytes / GIB, second.device_bytes / GIB)),
    ):
        figure = checked(difference_figure(rows, ("a", "b")))
        assert [sum(bar.x) for bar in figure.data] == pytest.approx(wholes)
        table = difference_rows(rows)
        assert sum(row["difference"] for row in table) == pytest.approx(wholes[1] - wholes[0])
        assert all(row["first formula"] or row["second formula"] for row in table)


def test_words_name_what_differs_most(differing: Difference) -> None:
    words = difference_words(differing.memory)
    assert words[0].startswith("activations +")
    assert words[0].endswith(" GiB")
