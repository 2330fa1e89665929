"""Backup workers in real ranks: against one process that drops the same gradients, and against the prediction."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.checks import check_job, check_rehearsal
from executor.distributed.gradients import StepOverError
from executor.distributed.mesh import Peers
from executor.distributed.replicas.backup_workers import FirstReplicas
from executor.launch.watchdog import Unwatched
from executor.profiling.recorder import Clock, Recorder
from executor.run import run_job
from executor.train.boundaries import LayerBoundaries
from simplan import catalog
from simplan.cluster.hardware import Straggler
from simplan.errors import NotModelledError, RunError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, run_spec_of
from simplan.program.action import Action, ActionKind
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.run_spec import RunSpec
from simplan.scenario import evaluate, load_scenario
from simplan.training import TrainingSpec
from simplan.validate.compare import compare
from tests.executor.conftest import MICROBATCH_SIZE, NUM_MICROBATCHES, RANK_PROGRAMS, make_job, make_model
from tests.executor.train.test_equality import RELATIVE, one_process
from tests.support.problems import refuses, says
from tests.support.sources import ROOT


def job_of(num_replicas: int = 3, num_dropped: int = 1, **fields: Any) -> RunSpec:
    plan = {"dp_replicate": num_replicas, **fields.pop("plan", {})}
    batch = NUM_MICROBATCHES * MICROBATCH_SIZE * ParallelPlan(**plan).dp
    training = TrainingSpec(global_batch_size=batch, precision="fp32", clip_grad_norm=1.0, backup_workers=num_dropped)
    return make_job(plan=plan, training=training, num_steps=7, **fields)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> str:
    """Program of ranks that are late in turns."""
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    monkeypatch.setenv("TEST_LATE", "turns")
    return "late_worker"


@pytest.mark.parametrize(("num_replicas", "num_dropped"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_replicas_train_as_one_process_without_the_dropped_gradients(
    num_replicas: int, num_dropped: int, late: str, tmp_path: Path
) -> None:
    """All replicas, late ones too, have the same gradients in every step, and the same weights in the end."""
    job = job_of(num_replicas, num_dropped, dtype="fp64")
    measurement = run_job(job, tmp_path, rank_module=late)
    arrivals = measurement.arrivals
    assert [step.step for step in arrivals] == list(range(job.num_all_steps))
    assert all(len(set(step.kept)) == num_replicas - num_dropped == len(step.kept) for step in arrivals)
    for step in arrivals:
        assert max(step.arrived_s[rank] for rank in step.kept) <= min(step.arrived_s[rank] for rank in step.dropped)
    losses, gradients, model = one_process(job, job.num_all_steps, [step.kept for step in arrivals])
    assert measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for number, expected in enumerate(gradients):
        of_first, *others = (
            torch.load(tmp_path / f"gradients.rank{rank}.step{number}.pt") for rank in range(num_replicas)
        )
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert float((of_first[name] - gradient).abs().max()) < RELATIVE * largest
            assert all(torch.equal(of_first[name], other[name]) for other in others)
    of_first, *others = (torch.load(tmp_path / f"weights.rank{rank}.pt") for rank in range(num_replicas))
    for name, weight in model.named_parameters():
        torch.testing.assert_close(of_first[name], weight, rtol=1e-6, atol=1e-9)
        assert all(torch.equal(of_first[name], other[name]) for other in others)


def test_a_replica_that_dies_is_named(late: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where others could go on without it: nobody waits for ever."""
    monkeypatch.setenv("TEST_LATE", "kill")
    with pytest.raises(RunError, match=r"^rank 2 was killed by signal 9"):
        run_job(job_of(), tmp_path, rank_module=late)


def test_ranks_issue_what_is_predicted(tmp_path: Path) -> None:
    cluster = catalog.cluster("dgx-h100", 3).with_changes(stragglers=(Straggler(rank=1, slowdown=3.0),))
    training = TrainingSpec(global_batch_size=12, precision="fp32", backup_workers=1)
    plan = ParallelPlan(dp_replicate=3, microbatch_size=2)
    prediction = predict(Job(make_model(), cluster, training, plan, catalog.software("torch")), name="late")
    job = run_spec_of(prediction, num_steps=5, num_warmup_steps=1, device="cpu", profile_memory=True)
    assert job.slowdowns == (1.0, 3.0, 1.0)
    measurement = run_job(job, tmp_path)
    comparison = compare(prediction.to_json(), measurement)
    assert comparison.structure_equal
    (note,) = (note for note in comparison.notes if "dropped" in note)
    assert note.startswith("gradients that 6 steps dropped, warm-up included: ")
    reduced = [rank.collectives[0] for rank in measurement.ranks if not rank.is_dropped]
    assert len(reduced) == 2
    predicted_bytes, part_bytes = prediction.memory[0].allocated_bytes, reduced[0].num_bytes // 2
    allocated = max(rank.peak_memory.allocated_bytes or 0 for rank in measurement.ranks)
    assert 0.99 * predicted_bytes < allocated < 1.01 * predicted_bytes + job.num_all_steps * part_bytes


def test_an_ended_backward_leaves_no_activations(alone: None) -> None:
    """torch keeps the nodes that were due, and what they have saved."""
    group = dist.group.WORLD
    assert group is not None
    layers = [nn.Linear(8, 8) for _ in range(4)]
    replicas = FirstReplicas(
        Peers.of(group, (0,), 0, None),
        0,
        [nn.Parameter(torch.ones(1))],
        Recorder((Action(0, ActionKind.OPTIM),), Clock(), Unwatched()),
    )
    x, activations = torch.ones(2, 8), list[weakref.ref[Tensor]]()

    def end(*arguments: Any) -> None:
        raise StepOverError

    layers[2].weight.register_post_accumulate_grad_hook(end)  # type: ignore[no-untyped-call]
    for layer in layers:
        x = x + torch.tanh(layer(x))
        activations.append(weakref.ref(x))
    with suppress(StepOverError):
        x.sum().backward()  # type: ignore[no-untyped-call]
    del x
    assert any(activation() is not None for activation in activations)
    replicas.free_backward()
    assert all(activation() is None for activation in activations)


def test_a_slow_rank_computes_longer_by_its_slowdown() -> None:
    boundaries = LayerBoundaries(3.0, lambda: None)
    boundaries.begin()
    start_s = time.thread_time()
    while time.thread_time() < start_s + 0.02:
        pass
    boundaries.compute_longer()
    assert time.thread_time() - start_s >= 3 * 0.02


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"plan": {"dp_replicate": 2, "tp": 2}}, "where ... replica ... use"),
        ({"device": "cuda"}, "training.backup_workers: is run only on CPUs; use device cpu"),
        ({"slowdowns": (1.0, 1.0, 2.0), "device": "cuda"}, "cluster.stragglers: is run only on CPUs"),
        ({"checkpointing": Checkpointing(folder="/tmp")}, "without checkpoints, for which all ranks wait; use none"),
        (
            {"software": catalog.software("torch").with_changes(gradient_as_bucket_view=True)},
            "software.gradient_as_bucket_view: ... with training.backup_workers; use false",
        ),
    ],
)
def test_jobs_that_cannot_drop_replicas_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(NotModelledError) as caught:
        check_job(job_of(**fields))
    assert says(str(caught.value), words)


def test_late_ranks_of_another_node_and_of_a_rehearsal_are_refused() -> None:
    with refuses("training.backup_workers", rule="is run only on one node", kind=NotModelledError):
        check_job(job_of(4), num_local_ranks=2)
    with refuses("training.backup_workers", rule="is about ranks that others wait", kind=NotModelledError):
        check_rehearsal(job_of(), 0, fake=True)


def test_scenario_has_a_slow_rank_on_this_machine_and_the_memory_that_it_expects() -> None:
    scenario = load_scenario(ROOT / "scenarios/ways/backup-workers.yaml")
    slow = scenario.job.cluster.stragglers
    assert slow == (Straggler(rank=2, slowdown=2.0),)
    there = replace(scenario.job, cluster=catalog.cluster("dgx-h100", 3).with_changes(stragglers=slow))
    prediction = predict(there)  # of devices that need no calibration
    (check,) = (evaluate(expectation, prediction.to_json(timeline=False)) for expectation in scenario.expect)
    assert check.passed, check.message
    waiting = predict(replace(there, training=there.training.with_changes(backup_workers=0)))
    assert prediction.step_time_s < waiting.step_time_s
