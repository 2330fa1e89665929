"""Traces of spot nodes in CSV files: gaps, wrong order, negative values and other mistakes, each with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.scenario.whole_run.traces import read_trace
from tests.scenario.whole_run.scenarios import refusal, run_of, scenario_of, written
from tests.support.problems import says

HEADER = "time_s,available"


def test_trace_has_times_from_0_to_its_end_and_nodes_between(tmp_path: Path) -> None:
    times_s, nodes = read_trace(Path(written(tmp_path, HEADER, "0,4", "60.5, 2", "100,4")))
    assert times_s == (0.0, 60.5, 100.0)
    assert nodes == (4, 2)


@pytest.mark.parametrize(
    ("lines", "line", "rule"),
    [
        (("time,nodes", "0,4"), 1, "must begin with the columns time_s,available"),
        ((), 1, "must begin with the columns time_s,available"),
        ((HEADER, "0,4", "", "9,4"), 3, "the trace has a gap: the line is empty"),
        ((HEADER, "0,4", "5", "9,4"), 3, "the trace has a gap: the line has 1 of 2 values"),
        ((HEADER, "0,4", "5,", "9,4"), 3, "the trace has a gap: the line has 1 of 2 values"),
        ((HEADER, "0,4", "9,3", "5,4"), 4, "time_s = 5 does not come after 9"),
        ((HEADER, "0,4", "9,3", "9,4"), 4, "time_s = 9 does not come after 9"),
        ((HEADER, "3,4", "9,3"), 2, "the trace begins at time_s = 3"),
        ((HEADER, "-3,4", "9,3"), 2, "time_s = -3 must be seconds, 0 or more"),
        ((HEADER, "0,4", "nan,3"), 3, "time_s = nan must be seconds, 0 or more"),
        ((HEADER, "0,-4", "9,3"), 2, "available = -4 must be a whole number of nodes, 0 or more"),
        ((HEADER, "0,4.5", "9,3"), 2, "available = 4.5 must be a whole number of nodes, 0 or more"),
        ((HEADER, "0,four", "9,3"), 2, "the line has no two numbers"),
        ((HEADER, "0,4"), None, "the trace has no length"),
        ((HEADER,), None, "the trace has no length"),
    ],
)
def test_wrong_trace_is_refused_with_its_line(
    tmp_path: Path, lines: tuple[str, ...], line: int | None, rule: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read_trace(Path(written(tmp_path, *lines)))
    (problem,) = caught.value.problems
    assert problem.sentence().startswith(rule)
    assert problem.line == line


def test_trace_that_never_has_enough_nodes_is_refused_unless_others_replace_them(tmp_path: Path) -> None:
    trace = written(tmp_path, HEADER, "0,3", "60,1", "100,3")
    assert says(refusal(spot={"trace": trace}), "never", "4 nodes of the job", "3 at most")
    setup = run_of(scenario_of(spot={"trace": trace, "fallback": "on_demand"})).setup
    assert (setup.trace_nodes, setup.on_demand, setup.is_spot) == ((3, 1), True, True)
    shrinking = run_of(scenario_of(spot={"trace": trace}, recovery={"policy": "shrink"})).setup
    assert [size.num_nodes for size in shrinking.sizes] == [4, 2, 1]
