"""Knowledge about a job: its ground, fitted runs along axes, and the sentence on the weakest term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplan import catalog
from simplan.cost.known import AXES, ErrorShare, Ground, counts_of, ground_of, known_by, known_of, weakest_term
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.training import TrainingSpec

STDS = dict.fromkeys(AXES, 0.1)
AT = Ground("ampere", "a100-sxm-80gb", "bf16", "nemo", "transformer", 2, 3)


def job_of(cluster: str = "dgx-h100", software: str = "nemo", model: str = "llama3-8b", **training: Any) -> Job:
    fields = {"global_batch_size": 64, "precision": "bf16", **training}
    return Job(
        catalog.model(model),
        catalog.cluster(cluster),
        TrainingSpec(**fields),
        ParallelPlan(),
        catalog.software(software),
    )


def on_device(name: str) -> Job:
    cluster = catalog.cluster("dgx-h100").model_copy(update={"device": catalog.device(name)})
    return replace(job_of(), cluster=cluster)


def test_ground_of_a_job() -> None:
    """Llama 3 8B: more than 6 x 8.03e9 x 8,192 FLOPs for each of 64 sequences take 3.2 s or more of 8 x 989 TFLOP/s."""
    ground = ground_of(job_of())
    assert ground == Ground("hopper", "h100-sxm-80gb", "bf16", "nemo", "transformer", 3, 1)
    assert ground_of(job_of(global_batch_size=32)).step == 2
    stripped = job_of().software
    stripped = stripped.model_copy(update={"rates": stripped.rates.model_copy(update={"fitted_on": None})})
    assert ground_of(replace(job_of(), software=stripped)).framework == ""
    assert ground_of(job_of(model="mixtral-8x7b")).operators == "experts"
    assert ground_of(job_of(model="resnet-50", software="torch")).operators == "convolutions"


def test_intervals_are_wider_where_no_run_was_fitted() -> None:
    """An axis without runs counts in full; four runs on another one halve its square."""
    counts = counts_of({AT: 4, AT._replace(device="a100-sxm-40gb"): 10**6})
    known = known_by(AT._replace(framework="torch"), counts, STDS, 4.0, 0.07)
    stds = {name: axis.std for name, axis in known.axes.items()}
    assert stds["framework"] == 0.1
    assert stds["device"] == pytest.approx(0.1 / 2**0.5)
    assert stds["architecture"] < 1e-3
    assert known.std("compute") == pytest.approx((0.01 + 0.005) ** 0.5, rel=1e-3)
    assert known.axes["framework"].fact == "no run under torch was fitted"
    assert known.axes["device"].fact == "4 runs on a100-sxm-80gb were fitted"


def test_the_weakest_term_is_the_one_that_widens_most() -> None:
    """Rubin has no fitted run, so its kernels are known least, unless they were timed."""
    job = on_device("rubin-sxm")
    shares = {"compute": ErrorShare(0.2, 0.2, False), "communication": ErrorShare(0.01, 0.1, False)}
    weakest = weakest_term(job, shares)
    assert weakest is not None
    assert (weakest.term, weakest.num_runs) == ("compute", 0)
    assert "was fitted; `simplan calibrate`" in weakest.fact
    timed = {"compute": ErrorShare(0.2, 0.2, True), "communication": ErrorShare(0.01, 0.1, False)}
    weakest = weakest_term(job, timed)
    assert weakest is not None
    assert weakest.fact.startswith("compute was timed on this machine")
    waiting = {"compute": ErrorShare(0.01, 0.2, False), "host": ErrorShare(0.3, 0.5, False)}
    weakest = weakest_term(job, waiting)
    assert weakest is not None
    assert (weakest.term, weakest.num_runs) == ("host", None)
    assert weakest.interval_share == pytest.approx(0.09 / (0.09 + 1e-4))
    assert weakest_term(job, {}) is None


def test_the_catalog_knows_less_of_new_devices_and_precisions() -> None:
    stds = [
        known_of(ground_of(job)).std("compute")
        for job in (job_of("dgx-a100-80gb"), job_of("dgx-b200", precision="mxfp8"), on_device("rubin-sxm"))
    ]
    assert stds[0] < stds[1] < stds[2]
    assert stds[2] == pytest.approx(0.3, abs=0.03)
