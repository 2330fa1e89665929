"""Jitter: expected step times by order statistics, laws, and the same numbers every time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from simplan import catalog
from simplan.cluster.hardware import Jitter, Straggler
from simplan.errors import NotModelledError
from simplan.explain import explain
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, predict_step
from simplan.prediction import JitteredStep, Prediction
from simplan.search import search
from simplan.training import TrainingSpec
from tests.jobs import job_of as any_job
from tests.jobs import tiny_model
from tests.support.problems import refuses


def job_of(num_ranks: int, jitter: Jitter | None, **plan: int) -> Job:
    """Data-parallel ranks whose communication takes no time next to their compute."""
    cluster_of_ranks = catalog.cluster("dgx-h100", num_ranks)
    fast = {} if cluster_of_ranks.intra_link is None else {"bytes_per_s": 1e16, "latency_s": 0.0}
    link = None if cluster_of_ranks.intra_link is None else cluster_of_ranks.intra_link.model_copy(update=fast)
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "seq_len": 4096}
    model = tiny_model(**sizes, tied_embeddings=False)
    made = ParallelPlan.model_validate(plan or {"dp_replicate": num_ranks})
    training = TrainingSpec(global_batch_size=made.dp, precision="bf16")
    cluster = cluster_of_ranks.with_changes(jitter=jitter, intra_link=link, devices_per_node=num_ranks)
    return Job(model, cluster, training, made, catalog.software("torch"))


def jittered(job: Job) -> JitteredStep:
    jittered_step = predict(job).jitter
    assert jittered_step is not None
    return jittered_step


def phases_s(num_ranks: int) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer step of a rank without jitter."""
    simulated = predict_step(job_of(num_ranks, Jitter(seed=1)))[1]
    by_kind = {"F": 0.0, "B": 0.0, "OPTIM": 0.0}
    parts = np.array([any(type(part).__name__ == "LayerWork" for part in work) for work in simulated.program.works])
    for index in simulated.program.by_rank[0]:
        op = simulated.program.ops[index]
        if parts[simulated.program.columns.work[index]]:
            by_kind[op.action.kind.value] += float(simulated.program_costs.durations_s[index])
    return by_kind["F"], by_kind["B"], by_kind["OPTIM"]


def expected_largest_normal(num: int) -> float:
    """Mean of the largest of independent standard normal samples, by integration."""
    x = np.linspace(-10, 10, 200_001)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    below = np.cumsum(density) * (x[1] - x[0])
    return float(np.trapezoid(x * num * below ** (num - 1) * density, x))


def test_mean_of_normal_jitter_is_that_of_the_largest_sample() -> None:
    """Ranks meet after forward and backward, whose deviations add in squares, and after the optimizer step."""
    assert expected_largest_normal(2) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-6)
    num_ranks, std = 32, 0.1
    noisy = jittered(job_of(num_ranks, Jitter(distribution="normal", compute_relative_std=std, seed=5)))
    forward_s, backward_s, update_s = phases_s(num_ranks)
    late_s = std * expected_largest_normal(num_ranks) * (np.hypot(forward_s, backward_s) + update_s)
    assert noisy.mean_s - noisy.without_s == pytest.approx(late_s, rel=0.04)


def test_mean_of_exponential_jitter_is_that_of_the_largest_sample() -> None:
    """Mean of the largest of n sums of two exponentials, by integration of its survival; the optimizer step: H_n."""
    num_ranks = 16
    noisy = jittered(job_of(num_ranks, Jitter(distribution="exponential", compute_relative_std=1.0, seed=3)))
    a, b, update_s = phases_s(num_ranks)
    t = np.linspace(0, 60 * (a + b), 400_001)
    below = 1 - (a * np.exp(-t / a) - b * np.exp(-t / b)) / (a - b)
    largest_s = float(np.trapezoid(1 - below**num_ranks, t))
    harmonic = sum(1 / k for k in range(1, num_ranks + 1))
    steady_s = noisy.without_s - a - b - update_s
    assert noisy.mean_s == pytest.approx(steady_s + largest_s + harmonic * update_s, rel=0.04)


def expected_kth_s(below: NDArray[np.float64], t: NDArray[np.float64], num: int, kept: int) -> float:
    """Mean of the ``kept``-th smallest of ``num`` samples with the distribution ``below`` of ``t``, by integration."""
    arrived = sum(math.comb(num, j) * below**j * (1 - below) ** (num - j) for j in range(kept, num + 1))
    return float(np.trapezoid(1 - arrived, t))


@pytest.mark.parametrize("num_dropped", [1, 4, 12])
def test_backup_workers_wait_for_the_kept_order_statistic(num_dropped: int) -> None:
    """Chen et al. 2016: the step waits for the (N - k)-th arrival; that of exponentials is at H_N - H_k in the mean."""
    num_ranks, num_kept = 16, 16 - num_dropped
    harmonic = np.cumsum([0.0, *(1 / n for n in range(1, num_ranks + 1))])
    t = np.linspace(0, 60, 400_001)
    exact = harmonic[num_ranks] - harmonic[num_dropped]
    assert expected_kth_s(1 - np.exp(-t), t, num_ranks, num_kept) == pytest.approx(exact, rel=1e-6)

    job = job_of(num_ranks, Jitter(distribution="exponential", compute_relative_std=1.0, seed=3))
    training = job.training.with_changes(backup_workers=num_dropped)
    noisy = jittered(replace(job, training=training))
    a, b, update_s = phases_s(num_ranks)
    t *= a + b
    below = 1 - (a * np.exp(-t / a) - b * np.exp(-t / b)) / (a - b)  # sum of the exponentials of forward and backward
    arrival_s = expected_kth_s(below, t, num_ranks, num_kept)
    steady_s = noisy.without_s - a - b - update_s
    assert noisy.mean_s == pytest.approx(steady_s + arrival_s + harmonic[num_kept] * update_s, rel=0.04)


def test_a_slow_rank_may_be_dropped_in_some_steps_and_kept_in_others() -> None:
    """With little more than jitter, a slow rank still costs time next to one backup worker, but less than without."""
    even, dropping = job_of(8, Jitter(compute_relative_std=0.1, seed=2)), {"backup_workers": 1}
    slow = replace(even, cluster=even.cluster.with_changes(stragglers=(Straggler(rank=3, slowdown=1.1),)))
    waiting_s, with_s, without_s = (
        jittered(job).mean_s
        for job in (
            slow,
            replace(slow, training=slow.training.with_changes(**dropping)),
            replace(even, training=even.training.with_changes(**dropping)),
        )
    )
    assert without_s * 1.001 < with_s < waiting_s * 0.98


@lru_cache(maxsize=64)
def mean_s(num_ranks: int, jitter: Jitter) -> float:
    return jittered(job_of(num_ranks, jitter)).mean_s


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["lognormal", "normal", "exponential"]),
    st.floats(0.01, 0.25),
    st.integers(0, 100),
    st.sampled_from([(1, 2), (2, 3), (4, 8), (8, 16)]),
)
def test_more_ranks_are_never_faster(distribution: str, std: float, seed: int, numbers: tuple[int, int]) -> None:
    jitter = Jitter.model_validate({"distribution": distribution, "compute_relative_std": std, "seed": seed})
    few_s, many_s = (mean_s(num_ranks, jitter) for num_ranks in numbers)
    assert many_s >= few_s * (1 - 1e-12)


@pytest.mark.parametrize(
    "plan",
    [{"dp_replicate": 16}, {"dp_shard": 16}, {"dp_replicate": 2, "tp": 2, "pp": 4}],
)
def test_without_deviation_it_is_the_step_without_jitter(plan: dict[str, int]) -> None:
    steady, noisy = (predict(job_of(16, jitter, **plan)) for jitter in (None, Jitter(seed=4)))
    assert noisy.step_time_s == pytest.approx(steady.step_time_s, rel=1e-12)
    assert noisy.jitter is not None
    times_s = (noisy.jitter.mean_s, noisy.jitter.without_s, *noisy.jitter.range_s)
    assert times_s == pytest.approx([steady.step_time_s] * 4, rel=1e-12)


def test_equal_seeds_give_equal_steps_near_the_mean() -> None:
    def predicted(seed: int) -> Prediction:
        return predict(job_of(8, Jitter(compute_relative_std=0.05, communication_relative_std=0.1, seed=seed)))

    once, again, other = predicted(1), predicted(1), predicted(2)
    assert once.to_json() == again.to_json()
    assert once.step_time_s != other.step_time_s
    assert once.jitter is not None
    low_s, high_s = once.jitter.range_s
    assert low_s < once.jitter.median_s < high_s
    assert abs(once.step_time_s - once.jitter.mean_s) < 0.05 * (high_s - low_s)
    for split in once.splits:
        parts = (getattr(split, name) for name in type(split).__dataclass_fields__)
        assert sum(parts) == pytest.approx(once.step_time_s, rel=1e-9)


def test_jitter_of_communication_is_what_communication_takes_longer() -> None:
    """One all-reduce that overlaps nothing: its mean is the same, and its deviation that of the step."""
    job = any_job(tiny_model(), {"dp_replicate": 16, "grad_sync": "step"}, num_microbatches=1)
    jitter = Jitter(communication_relative_std=0.2, seed=2)
    noisy = replace(job, cluster=job.cluster.with_changes(jitter=jitter))
    with_jitter = jittered(noisy)
    assert with_jitter.range_s[0] < with_jitter.without_s < with_jitter.range_s[1]


def test_explanation_names_jitter() -> None:
    prediction, simulated = predict_step(job_of(8, Jitter(compute_relative_std=0.1)))
    explanation = explain(prediction, simulated)
    assert explanation.jitter.startswith("jitter costs ")
    assert sum(term.value for term in explanation.time) == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert any(term.name.startswith("jitter") for term in explanation.time)


def test_impossible_values_of_it_are_refused() -> None:
    job = job_of(8, Jitter(distribution="normal", compute_relative_std=0.5))
    with refuses("cluster.jitter.compute_relative_std", "0.5", rule="is too large for a normal"):
        predict(job)
    with refuses("cluster.jitter", rule="a search compares steps", kind=NotModelledError):
        search(job_of(8, Jitter(compute_relative_std=0.1)))
