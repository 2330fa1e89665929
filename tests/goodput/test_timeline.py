"""The timeline of a run against the waterfall that the simulation counts while it runs."""

from __future__ import annotations

import re
from importlib import import_module
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.errors import SpecError
from simplan.goodput.engines.simulate import one_run
from simplan.goodput.setup import WATERFALL, RunSetup
from simplan.goodput.timeline import timeline_of
from simplan.report.drawings.run_timeline import run_timeline, whole_run_text
from simplan.report.drawings.run_timeline_svg import whole_run_svg
from tests.goodput.setups import INF, setups
from tests.goodput.test_result import FAILING, result


def test_timeline_has_the_times_of_the_waterfall(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("simplan.goodput.engines.simulate")  # simplan.goodput is a function for users
    monkeypatch.setattr(module, "_MAX_STOPS", 300)  # some never end

    @settings(max_examples=15)
    @given(setups(), st.integers(0, 2**63 - 1))
    def agree(setup: RunSetup, seed: int) -> None:
        try:
            run = one_run(setup, seed=seed)
        except SpecError:
            return
        timeline = timeline_of(setup, run)
        assert [a.end_s for a in timeline[:-1]] == pytest.approx([b.start_s for b in timeline[1:]])
        assert timeline[0].start_s == 0
        assert timeline[-1].end_s == pytest.approx(run.time_s)
        spent_s = dict.fromkeys(WATERFALL, 0.0)
        for stretch in timeline:
            spent_s[stretch.kind] += stretch.end_s - stretch.start_s
        counted_s = dict(run.waterfall_s)
        may_write_twice = setup.memory_every or setup.write_s or setup.corruption_mtbf_s < INF
        for seconds in (spent_s, counted_s):
            # The waterfall has only the excess of slow and of fewer devices apart. Where there may be several
            # checkpoints at one step, pauses at the step to which a run goes back may be shown as not repeated.
            seconds["compute"] += seconds.pop("slow_device") + seconds.pop("fewer_nodes")
            if may_write_twice:
                seconds["lost_work"] += seconds.pop("checkpoint") + seconds.pop("evaluation")
        assert spent_s == pytest.approx(counted_s, abs=1e-5)

    agree()


def test_rows_of_a_drawing_show_every_stop_and_what_is_done() -> None:
    answer = result(FAILING, 20)
    timeline = run_timeline(answer)
    assert timeline.time_s == sorted(answer.runs.time_s)[10]
    lines = whole_run_text(answer, timeline, 80).splitlines()
    rows = [line.split("│") for line in lines if re.match(r"(minute|hour|day) +\d+ +│", line)]
    assert {len("│".join(row)) for row in rows} == {80}
    figures = [row[2].split() for row in rows]  # stops if any, percent done, %
    assert sum(int(figure[0]) for figure in figures if len(figure) == 3) == len(timeline.stops) > 0
    assert all({*"xdwr"} & {*row[1]} for row, figure in zip(rows, figures, strict=True) if len(figure) == 3)
    assert figures[-1][-2:] == ["100.0", "%"]
    svg = ElementTree.fromstring(whole_run_svg(answer.to_json(), timeline))
    assert len(svg.findall("{*}g[@class='row']")) == len(rows)
    assert len(svg.findall("{*}path[@class='ink']")) == len(timeline.stops)
