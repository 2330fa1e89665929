"""A rank that is rehearsed alone issues and allocates what the same rank of a real run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor.dry_run.rehearse import rehearse
from executor.run import run_job
from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.model.model import ModelSpec
from simplan.runs.measurement import MeasuredCollective
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from simplan.validate.compare import TIMED_KINDS, predicted_communications
from tests.executor.conftest import make_job
from tests.support.problems import says
from tests.support.slow import slow_except

LLAMA = ModelSpec(
    family="llama",
    num_hidden_layers=2,
    hidden_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    vocab_size=1024,
    seq_len=64,
)
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp": {"plan": {"dp_shard": 2}},
    "tp": {"plan": {"tp": 2}},
    "1f1b": {"schedule": "1f1b", "pp": 2},
    "zero-1": {"plan": {"dp_shard": 2, "zero_stage": 1}},
    "fsdp of 4 in bf16": {"plan": {"dp_shard": 4}, "dtype": "bf16"},
    "hsdp": {"plan": {"dp_replicate": 2, "dp_shard": 2}},
    "1f1b of 4": {"schedule": "1f1b", "pp": 4},
    "1f1b x fsdp": {"schedule": "1f1b", "pp": 2, "plan": {"dp_shard": 2}},
    "zb-h1": {"schedule": "zb-h1", "pp": 2},
}
TOLERANCE = 0.03


def job_of(name: str, **fields: Any) -> RunSpec:
    asked = {**PLANS[name], **fields}
    if asked.get("dtype") == "bf16":
        asked["training"] = {"global_batch_size": 4 * 2 * 4, "precision": "bf16", "optimizer": "adamw"}
    return make_job(asked.pop("schedule", "none"), model=LLAMA, **asked)


def issued(collectives: tuple[MeasuredCollective, ...]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(c.action, c.kind, c.ranks, c.num_bytes) for c in collectives]


@pytest.mark.parametrize("name", slow_except(["1f1b"], PLANS))
def test_a_rehearsed_rank_does_what_the_real_one_does(name: str, tmp_path: Path) -> None:
    """The real run's memory is that of the profiler's trace: gloo's threads may let go of a block's tensors later."""
    job = job_of(name, num_steps=1, profile_memory=True)
    measured = run_job(job, tmp_path)
    block_bytes = 4 * max(layer.num_parameters for layer in job.model.layers)
    for real in (measured.ranks[0], measured.ranks[-1]):
        rehearsed = rehearse(job, real.rank, fake=False)
        fake = rehearse(job, real.rank, fake=True)
        assert issued(rehearsed.collectives) == issued(real.collectives)
        assert [time.action for time in rehearsed.actions] == [span.action for span in real.actions]
        assert all(time.median_s > 0 for time in rehearsed.actions if "REDUCE_GRAD" not in time.action)
        allocated = real.peak_memory.allocated_bytes
        assert allocated is not None
        for rehearsal in (rehearsed, fake):
            total = sum(rehearsal.peak_by_category.values())
            assert total == rehearsal.peak_memory.allocated_bytes
            assert total * (1 - TOLERANCE) <= allocated <= total * (1 + TOLERANCE) + 2 * block_bytes
        if job.plan.shards_parameters or job.plan.dp == 1:  # without data DDP keeps its first buckets
            assert issued(fake.collectives) == issued(real.collectives)


def test_a_rank_of_a_job_that_no_machine_holds() -> None:
    """Everything of a rank in the middle of 512, from its groups to the order of what it issues."""
    plan = {"pp": 4, "tp": 2, "dp_shard": 64, "schedule": "1f1b"}
    training = TrainingSpec(global_batch_size=512, precision="fp32", data="markov")
    job = make_job("1f1b", model=LLAMA, training=training, plan={**plan, "zero_stage": 2})
    rank = 234
    rehearsal = rehearse(job, rank, fake=True)
    assert issued(rehearsal.collectives) == [
        (action, kind, ranks, num_bytes) for kind, ranks, num_bytes, action in predicted_communications(job)[rank]
    ]
    assert rehearsal.actions == ()
    assert rehearsal.peak_memory.allocated_bytes == sum(rehearsal.peak_by_category.values())


def test_times_are_of_the_own_actions_only() -> None:
    job = job_of("1f1b", num_steps=3)
    rehearsal = rehearse(job, 1, fake=False)
    row = job.parsed_table()[1]
    assert [time.action for time in rehearsal.actions] == [str(a) for a in row if a.kind in TIMED_KINDS]
    assert all(len(time.seconds) == 3 for time in rehearsal.actions)


COMPILED = catalog.software("torch").model_copy(update={"compiled": True})


@pytest.mark.parametrize(
    ("fields", "rank", "fake", "said"),
    [
        ({}, 2, True, "rank = 2: is none of the 2 ranks of the plan; use 0 to 1"),
        ({"device": "cuda"}, 0, False, "device = cuda: is a CUDA device, and this machine has none"),
        (
            {"software": COMPILED},
            0,
            True,
            "software.compiled = true: ... kernels ... tensors ... use false",
        ),
        (
            {"software": COMPILED},
            0,
            False,
            "software.compiled = true: ... tensors ... rehearsal ... use",
        ),
        ({"plan": {"cp": 2, "cp_comm": "ring"}, "dp": 1}, 0, True, "plan.cp_comm = ring: the executor has no ring"),
    ],
)
def test_jobs_without_a_rehearsal_are_refused_by_name(fields: dict[str, Any], rank: int, fake: bool, said: str) -> None:
    job = make_job(**{"dp": 2, **fields})
    with pytest.raises((SpecError, NotModelledError)) as caught:
        rehearse(job, rank, fake=fake)
    assert says(str(caught.value), said)
