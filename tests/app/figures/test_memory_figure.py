"""Memory by rank: what is drawn is what was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.figures.plan import memory_bars, memory_figure, memory_rows
from app.figures.style import MEMORY
from simplan.units import GIB
from tests.app.figures.drawn import checked
from tests.app.questions import predicted


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
    assert drawn["gradients"] == "#e889ab"
    assert drawn["optimizer states"] == "#cec0fa"
    assert drawn["activations"] == "#e38a42"
    assert len(set(MEMORY.values())) == len(MEMORY)


def test_many_ranks_share_bars() -> None:
    memory = predicted("zb-h1").memory
    first = memory[0]
    many = [replace(first, rank=rank) for rank in range(100)]
    [bar] = memory_bars(many)
    assert bar.ranks == tuple(range(100))
    assert len(memory_bars(many[:64])) == 64
