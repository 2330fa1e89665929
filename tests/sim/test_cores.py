"""Processor sharing against arithmetic by hand."""

from __future__ import annotations

import pytest
from simpy import Environment

from simplan.sim.engine import SharedCores


def ends(num_cores: int, jobs: list[tuple[float, float, float]]) -> list[float]:
    """End of every (arrival, work, demand)."""
    env = Environment()
    cores = SharedCores(env, num_cores)
    found = [0.0] * len(jobs)

    def job(i: int, arrival: float, work: float, demand: float):  # type: ignore[no-untyped-def]
        yield env.timeout(arrival)
        done = env.event()
        cores.run(done, work, demand)
        yield done
        found[i] = env.now

    for i, (arrival, work, demand) in enumerate(jobs):
        env.process(job(i, arrival, work, demand))
    env.run()
    return found


def test_two_jobs_on_one_core_share_it() -> None:
    # both at half speed until the shorter is done at 2, then the longer has 1 left alone
    assert ends(1, [(0, 1, 1), (0, 2, 1)]) == pytest.approx([2.0, 3.0])


def test_a_late_job_slows_the_first() -> None:
    # 1 done alone by t=1; then both at half speed: the first's 1 ends at 3, the second's 2 has 1 left, ends at 4
    assert ends(1, [(0, 2, 1), (1, 2, 1)]) == pytest.approx([3.0, 4.0])


def test_demand_above_the_cores_slows_in_proportion() -> None:
    assert ends(2, [(0, 1, 2), (0, 1, 1), (0, 1, 1)]) == pytest.approx([2.0, 2.0, 2.0])


def test_work_is_conserved() -> None:
    """While demand exceeds the cores, cores x time = work x demand."""
    jobs = [(0.0, 1.5, 1.0), (0.0, 2.5, 1.0), (0.0, 3.5, 1.0)]
    assert max(ends(1, jobs)) == pytest.approx(sum(work for _, work, _ in jobs))
