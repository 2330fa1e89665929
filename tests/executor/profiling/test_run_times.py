"""Parts of the time of a run: those of invented logs, by arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest

from executor.launch.faults import FaultHappened
from executor.profiling.run_times import Launched, Logged, run_times
from simplan.runs.faults import Fault

KILL = Fault(kind="kill", at_step=1, rank=0)
LOST_NODE = Fault(kind="kill", at_step=1, node=1)


def log(*entries: tuple[str, int, float]) -> list[Logged]:
    return [Logged(kind=kind, step=step, end_s=end_s) for kind, step, end_s in entries]  # type: ignore[arg-type]


def parts(*args: Any) -> dict[str, float]:
    times = run_times(*args)
    assert times is not None
    assert sum(times.waterfall_s.values()) == pytest.approx(times.time_s)
    return times.waterfall_s


def test_a_killed_rank_loses_the_steps_since_the_checkpoint() -> None:
    """Steps of 1 s, a checkpoint of 2 s after the second; the fourth step is never finished."""
    entries = [("begin", 0, 10), ("step", 1, 11), ("step", 2, 12), ("checkpoint", 2, 14), ("step", 3, 15)]
    entries += [("begin", 2, 22), ("step", 3, 23), ("step", 4, 24), ("checkpoint", 4, 26)]
    launches = [Launched(5.0, 1), Launched(18.0, 1, ended_s=17.0, failed=True)]
    happened = [FaultHappened(KILL, 15.5)]
    times = run_times(launches, log(*entries), happened)
    assert times is not None
    assert times.waterfall_s == {
        "compute": 4.0,
        "checkpoint": 4.0,
        "lost_work": 1.5,
        "detection": 1.5,
        "waiting": 1.0,
        "restart": 4.0,
    }
    assert (times.initialization_s, times.time_s, times.goodput) == (5.0, 16.0, 0.25)
    (stop,) = times.stops
    assert (stop.kind, stop.at_s, stop.detection_s, stop.waiting_s, stop.restart_s) == ("kill", 5.5, 1.5, 1.0, 4.0)
    assert (times.step_s, times.checkpoint_s, times.interruptions) == ({1: 1.0}, 2.0, {"kill": 1})


def test_a_failure_in_the_restart_is_a_stop_of_its_own() -> None:
    entries = log(("begin", 0, 1), ("step", 1, 2), ("begin", 0, 20), ("step", 1, 21))
    launches = [Launched(0.0, 1), Launched(5.0, 1, 4.0, failed=True), Launched(12.0, 1, 9.0, failed=True)]
    happened = [FaultHappened(KILL, 3.0), FaultHappened(KILL, 8.0)]
    times = run_times(launches, entries, happened)
    assert times is not None
    assert times.waterfall_s == {"compute": 1.0, "lost_work": 2.0, "detection": 2.0, "waiting": 4.0, "restart": 11.0}
    assert [stop.restart_s for stop in times.stops] == [3.0, 8.0]


def test_fewer_nodes_take_longer_for_the_same_steps() -> None:
    entries = [("begin", 0, 0), ("step", 1, 1), ("step", 2, 2), ("begin", 2, 10), ("step", 3, 11.5)]
    entries += [("checkpoint", 3, 12), ("begin", 3, 20), ("step", 4, 21)]
    launches = [Launched(-5.0, 3), Launched(5.0, 2, 2.5, failed=True), Launched(15.0, 3, 13.0)]
    times = run_times(launches, log(*entries), [FaultHappened(LOST_NODE, 2.0)])
    assert times is not None
    assert (times.waterfall_s["compute"], times.waterfall_s["fewer_nodes"]) == (4.0, 0.5)
    assert [(stop.kind, stop.node, stop.num_nodes) for stop in times.stops] == [("kill", True, 2), ("nodes", False, 3)]
    assert times.interruptions == {"kill": 1}
    assert times.step_s == {3: 1.0, 2: 1.5}


def test_steps_beside_a_slow_rank_count_as_the_usual_step() -> None:
    entries = [("begin", 0, 0.0), *(("step", k, float(k)) for k in range(1, 6)), ("step", 6, 9.0), ("step", 7, 10.0)]
    slow = Fault(kind="slow", at_step=5, rank=0, slowdown=4.0, for_s=3.5)
    assert parts([Launched(-1.0, 1)], log(*entries), [FaultHappened(slow, 5.0)]) == {"compute": 7.0, "slow_device": 3.0}


def test_without_a_step_there_are_no_times() -> None:
    assert run_times([Launched(0.0, 1)], [], []) is None
    assert run_times([Launched(0.0, 1)], log(("begin", 0, 3.0)), []) is None


@pytest.mark.parametrize("seed", range(20))
def test_parts_sum_to_the_time_from_the_first_step_to_the_last(seed: int) -> None:
    """Parts sum to the time of any run, for every end of its ranks, seen or not."""
    draw, now_s, done = random.Random(seed), 0.0, 0
    launches, entries, happened, last_s, first_s = [], [], [], 0.0, None
    for attempt in range(6):
        ended_s = now_s + draw.random() if draw.random() < 0.8 else None
        now_s += 1 + draw.random()
        launches.append(Launched(now_s, draw.choice([2, 3]), ended_s if attempt else None, failed=draw.random() < 0.5))
        if attempt == 5 or draw.random() < 0.8:
            now_s += draw.random()
            first_s = now_s if first_s is None else first_s
            saved = done = draw.randint(max(0, done - 3), done)
            entries.append(("begin", done, now_s))
            for _ in range(draw.randint(1, 8)):
                now_s, done = now_s + draw.random(), done + 1
                entries.append(("step", done, now_s))
                if draw.random() < 0.3:
                    now_s, saved = now_s + draw.random(), done
                    entries.append(("checkpoint", saved, now_s))
            last_s = now_s
        if draw.random() < 0.7:
            now_s += draw.random()
            happened.append(FaultHappened(KILL, now_s))
    times = run_times(launches, log(*entries), happened[:5])
    assert times is not None
    assert first_s is not None
    assert times.time_s == pytest.approx(last_s - first_s)
    assert sum(times.waterfall_s.values()) == pytest.approx(times.time_s)
    assert times.waterfall_s["compute"] > 0
