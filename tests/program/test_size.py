"""Steps of too many operations are refused in a sentence, before they take memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from simplan import catalog
from simplan.errors import SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import folding_of, predict, predict_step
from simplan.program.size import refuse_many_actions
from simplan.report.trace import predicted_trace
from simplan.training import TrainingSpec
from tests.jobs import job_of
from tests.support.problems import refuses, says


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cluster.jitter": {"compute_relative_std": 0.1}},
            "most 4,000,000 ... cluster.jitter",
        ),
        (
            {"training.backup_workers": 2, "cluster.stragglers": [{"rank": 3, "slowdown": 1.5}]},
            "most 4,000,000 ... training.backup_workers",
        ),
        (
            {"cluster.topology": {"kind": "fat_tree", "radix": 128, "levels": 3, "routing": "ecmp"}},
            "most 2,500,000 ... cluster.topology; cluster.topology",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_steps_of_all_ranks_are_refused_if_they_are_too_many(changes: dict[str, Any], words: str) -> None:
    cluster = catalog.cluster("dgx-h100", 32_768)
    plan = ParallelPlan(dp_replicate=1024, tp=8, pp=4, schedule="1f1b")
    training = TrainingSpec(global_batch_size=1024 * 64)
    job = Job(catalog.model("llama3-70b"), cluster, training, plan, catalog.software("megatron-core"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refuses("cluster.num_devices", "32,768", rule="operations or more") as error:
        predict(job.with_changes(changes))
    assert says(str(error.value), words)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024**2  # KiB
    refuse_many_actions(job, len(folding_of(job).ranks), job.num_microbatches)  # folded, the same ranks are few


def test_a_trace_of_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplan.report.trace.MAX_TRACED", 100)
    words = r"training\.global_batch_size = 80: needs [\d,]+ operations or more .* at most 100 are in a trace"
    with pytest.raises(SpecError, match=words):
        predicted_trace(*predict_step(job_of("gpt2-124m", num_microbatches=80)))
