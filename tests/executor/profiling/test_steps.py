"""Recorded steps: the steady ones are found, a rank slower than its peers is told, a loaded machine has none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.launch.rank import RankFiles
from executor.profiling.recorder import StepRecord
from executor.profiling.results import RunSegment, gather, written_here
from executor.profiling.rounds import curve_of_workers
from executor.profiling.steps import (
    MIN_SLOWDOWN,
    MIN_STEADY_STEPS,
    compute_s,
    find_slow_ranks,
    steady_from,
)
from executor.run import run_job
from simplan.program.timeline import SpanKind
from simplan.runs.measurement import MeasuredCollective, MeasuredSpan, SlowRank
from simplan.runs.run_spec import RunSpec
from tests.executor.conftest import make_job, make_model
from tests.support.problems import says

SLOWER_S = 0.4
"""As in rank_programs/faulty_worker.py."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp": {"plan": {"dp_shard": 2}},
    "tp": {"plan": {"tp": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    STRATEGIES.values(),
    ids=STRATEGIES,
)
def test_a_slow_rank_is_told(strategy: dict[str, Any], tmp_path: Path, with_fault: Any) -> None:
    """What the other rank waits for it is not counted as computing."""
    job = make_job(model=make_model(vocab_size=96), num_steps=10, **strategy)
    notes: list[str] = []
    run = run_job(job, tmp_path, rank_module=with_fault("slow"), on_note=notes.append)
    (slow,) = run.slow_ranks
    assert (slow.rank, slow.compared_with) == (1, (0,))
    assert slow.compute_s > SLOWER_S > slow.others_compute_s
    assert slow.factor > 1.0
    assert list(run.notes) == notes == [slow.sentence]
    assert says(notes[0], "rank 1", f"{slow.factor:.1f} times", "rank 0", "same work: ")


def record(duration_s: float, waits: tuple[tuple[float, float], ...] = ()) -> StepRecord:
    span = MeasuredSpan(action="0B0", kind=SpanKind.COMPUTE, start_s=0.0, end_s=duration_s)
    collectives = tuple(
        MeasuredCollective(kind="all_reduce", action="0B0", ranks=(0, 1), num_bytes=1, start_s=low, end_s=high)
        for low, high in waits
    )
    return StepRecord(step=0, start_s=0.0, end_s=duration_s, losses=(), spans=(span,), collectives=collectives)


def test_only_what_a_rank_computes_counts() -> None:
    waits = ((1.0, 3.0), (2.0, 4.0), (9.0, 12.0))
    assert compute_s(record(10.0, waits), buckets=False, cuda=False) == pytest.approx(1.0 + 5.0)
    # of DDP's, only what is beyond the last one's start is known to be waiting
    assert compute_s(record(10.0, waits), buckets=True, cuda=False) == pytest.approx(9.0)
    assert compute_s(record(10.0, waits), buckets=False, cuda=True) == 0.0
    assert compute_s(record(10.0), buckets=True, cuda=True) == 10.0


def slow_ranks_of(job: RunSpec, times_s: Any) -> tuple[SlowRank, ...]:
    return find_slow_ranks(job, [tuple(record(float(x)) for x in step) for step in times_s], cuda=False)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(10, 40),
    spread=st.floats(0.0, 1.0),
    hiccup=st.floats(0.0, 0.15),
)
def test_equal_ranks_that_scatter_are_not_slow(seed: int, num_steps: int, spread: float, hiccup: float) -> None:
    """Step times as of a loaded machine: log-normal, and now and then much longer."""
    random = np.random.default_rng(seed)
    steps = np.exp(spread * random.normal(size=(num_steps, 1)))  # what disturbs both alike
    times_s = np.exp(0.05 * random.normal(size=(num_steps, 2)))
    times_s *= np.where(random.random((num_steps, 2)) < hiccup, 5.0, 1.0)
    assert slow_ranks_of(make_job(dp=2), steps * times_s) == ()


@given(factor=st.floats(1.0, 5.0), seed=st.integers(0, 2**32 - 1))
def test_a_rank_is_slow_from_a_factor_on(factor: float, seed: int) -> None:
    times_s = np.exp(0.01 * np.random.default_rng(seed).normal(size=(20, 4)))
    times_s[:, 2] *= factor
    slow = slow_ranks_of(make_job(dp=4), times_s)
    if factor > 1.05 * MIN_SLOWDOWN:
        (slow_rank,) = slow
        assert slow_rank.rank == 2
        assert 2 not in slow_rank.compared_with
        assert len(slow_rank.compared_with) == 2
        assert slow_rank.factor == pytest.approx(factor, rel=0.05)
    if factor < MIN_SLOWDOWN / 1.05:
        assert slow == ()


@given(seed=st.integers(0, 2**32 - 1))
def test_rank_of_a_third_of_the_speed_is_found_on_a_loaded_machine(seed: int) -> None:
    """Each rank waits for cores of its own: steps of one rank differ by more than the two ranks do."""
    times_s = np.exp(0.8 * np.random.default_rng(seed).normal(size=(120, 2))) * [1.0, 3.0]
    (slow,) = slow_ranks_of(make_job(dp=2), times_s)
    assert slow.rank == 1
    assert 1.5 < slow.factor < 6.0


def test_one_stall_of_the_other_rank_hides_no_slow_rank() -> None:
    times_s = np.tile([1.0, 3.0], (10, 1))
    times_s[4, 0] = 8.0
    (slow,) = slow_ranks_of(make_job(dp=2), times_s)
    assert (slow.rank, slow.factor) == (1, 3.0)


@given(seed=st.integers(0, 2**32 - 1), load=st.floats(0.0, 1.0), share=st.floats(0.0, 0.49))
def test_rank_that_shares_its_core_for_a_while_is_not_slow(seed: int, load: float, share: float) -> None:
    times_s = np.exp(0.1 * load * np.random.default_rng(seed).normal(size=(40, 2)))
    times_s[: int(40 * share), 1] *= 4.0
    assert slow_ranks_of(make_job(dp=2), times_s) == ()


def test_stages_are_not_compared() -> None:
    """The second stage may have more to do than the first."""
    times_s = np.tile([1.0, 1.0, 3.0, 3.0], (10, 1))
    assert slow_ranks_of(make_job("1f1b", pp=2, dp=2), times_s) == ()
    times_s[:, 3] = 6.0
    (slow,) = slow_ranks_of(make_job("1f1b", pp=2, dp=2), times_s)
    assert (slow.rank, slow.factor, slow.compared_with) == (3, 2.0, (2,))


def test_a_short_run_says_nothing() -> None:
    times_s = np.tile([1.0, 3.0], (10, 1))
    assert slow_ranks_of(make_job(dp=2), times_s)
    assert slow_ranks_of(make_job(dp=2), times_s[:8]) == ()  # one of 2^8 = 256 such runs of equal ranks
    assert slow_ranks_of(make_job(dp=2), 0.06 * times_s) == ()


def test_report_sentences() -> None:
    slow = SlowRank(rank=3, factor=2.14, compared_with=(0, 1), compute_s=0.0412, others_compute_s=0.0193)
    assert says(slow.sentence, "rank 3", "2.1 times", "rank 0 and rank 1", "41.2 ms per step", "19.3 ms")
    assert "of 5 others, which have" in slow.model_copy(update={"compared_with": (0, 1, 2, 4, 5)}).sentence


def write_steps(job: RunSpec, times_s: list[float], folder: Path) -> None:
    """What a rank of a run would have written."""
    assert len(times_s) == job.num_all_steps
    with RankFiles(folder, 0).steps.open("w") as file:
        for step, time_s in enumerate(times_s):
            print(record(time_s).model_copy(update={"step": step, "losses": (1.0,)}).model_dump_json(), file=file)


def noisy(seed: int, num_steps: int) -> list[float]:
    draw = random.Random(seed)
    return [1.0 + draw.gauss(0.0, 0.01) for _ in range(num_steps)]


@pytest.mark.parametrize("slow", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_slow_first_steps_are_left_out(slow: int, seed: int) -> None:
    """With a hundredth of noise, MSER leaves out all of the slow steps, and few others."""
    times = [2.0, 1.6, 1.5, 1.4, 1.35, 1.3, 1.2][:slow] + noisy(seed, 20)
    assert slow <= steady_from(times) <= slow + 8


def test_a_slow_step_in_the_second_half_counts() -> None:
    times = [1.0] * 20
    times[15] = 3.0
    assert steady_from(times) <= 10
    assert len(times) - steady_from(times) >= MIN_STEADY_STEPS


@given(st.lists(st.floats(1e-4, 1e3), max_size=40))
def test_no_less_than_half_and_five_steps_count(times: list[float]) -> None:
    first = steady_from(times)
    assert 0 <= first <= len(times) // 2
    assert len(times) - first >= min(len(times), MIN_STEADY_STEPS)


def test_a_run_without_a_number_of_warmup_steps_finds_them(tmp_path: Path) -> None:
    job = make_job(num_steps=6, num_warmup_steps=None)
    assert job.num_all_steps == 6 + MIN_STEADY_STEPS
    write_steps(job, [9.0, 5.0, *noisy(0, 9)], tmp_path)
    measurement = gather([RunSegment(job)], written_here(tmp_path, 1))
    assert measurement.warmup_step_times_s[:2] == (9.0, 5.0)
    assert len(measurement.step_times_s) >= MIN_STEADY_STEPS
    assert measurement.step_time_s == pytest.approx(1.0, abs=0.03)
    assert len(measurement.warmup_step_times_s) + len(measurement.step_times_s) == 11


def test_losses_of_unequal_workers_are_in_the_order_of_their_ends() -> None:
    """Worker 1 takes 2.5 s for a step, and worker 0 one: its third step is of newer parameters than the first of 1."""
    durations_s, losses = (1.0, 2.5), ((8.0, 6.0, 4.0, 2.0), (7.0, 1.0, 0.5, 0.25))
    steps = [
        tuple(
            record(durations_s[worker]).model_copy(
                update={
                    "start_s": durations_s[worker] * step,
                    "end_s": durations_s[worker] * (step + 1),
                    "losses": (losses[worker][step],),
                }
            )
            for worker in range(2)
        )
        for step in range(4)
    ]
    points = list(curve_of_workers(steps, make_job(dp=2)))
    assert [(point.num_samples, point.seconds, point.loss) for point in points] == [(16, 2.0, 7.0), (32, 3.0, 5.5)]
