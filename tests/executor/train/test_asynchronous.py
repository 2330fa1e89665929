"""Workers of parameter servers and Hogwild in real processes: replays, bounds, ends, bytes and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executor.checks import check_job
from executor.run import run_job
from executor.train.asynchronous import Common
from executor.train.parameter_server import HEADER, ParameterServer
from simplan import catalog
from simplan.errors import NotModelledError, RunError
from simplan.job import Job
from simplan.plan.replication import Replication
from simplan.predict.memory import rank_peaks
from simplan.program.lowering.lower import Lowering, lower
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from simplan.validate.compare import issued_as_predicted, ran_as_predicted
from tests.executor.conftest import RANK_PROGRAMS, make_job, make_model

ASYNC = {"kind": "parameter_server", "staleness": "unbounded"}
LR = 1e-3  # of executor.train.optimizers


def job_with(replication: Any, num_workers: int = 2, optimizer: str = "sgd", **fields: Any) -> RunSpec:
    batch = 8 * num_workers
    training = TrainingSpec(global_batch_size=batch, precision="fp32", optimizer=optimizer)  # type: ignore[arg-type]
    plan = {"dp_replicate": num_workers, "replication": replication}
    return make_job(plan=plan, training=training, **fields)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets TEST_FAULT of ``serving_worker``."""
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    return monkeypatch


def served(folder: Path) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]], torch.Tensor]:
    updates = torch.load(folder / "served.pt")
    return updates["first"], updates["applied"], updates["last"]


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Measurement, Path]:
    """Three workers, the second of which is slow, and may be a step behind."""
    folder = tmp_path_factory.mktemp("slow")
    job = job_with({"kind": "parameter_server", "staleness": 1}, num_workers=3, num_steps=4, num_warmup_steps=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        patch.setenv("TEST_FAULT", "slow")
        return job, run_job(job, folder, rank_module="serving_worker"), folder


def test_server_ends_with_the_sum_of_gradients_in_their_order(
    slow_run: tuple[RunSpec, Measurement, Path],
) -> None:
    """Replayed by numpy: plain SGD, a gradient at a time."""
    job, _, folder = slow_run
    first, applied, last = served(folder)
    weights = first.numpy().copy()
    for _, gradient in applied:
        weights -= np.float32(LR) * gradient.numpy()
    np.testing.assert_allclose(weights, last.numpy(), rtol=1e-5, atol=1e-8)  # torch multiplies and adds at once
    assert sorted(worker for worker, _ in applied) == [w for w in range(3) for _ in range(job.num_all_steps)]
    assert any(np.abs(first.numpy() - last.numpy()) > 0)


def test_staleness_is_that_of_the_recorded_order(slow_run: tuple[RunSpec, Measurement, Path]) -> None:
    """A worker that is held pulls later; so updates are at most as stale as updates in between say."""
    job, measured, folder = slow_run
    order = [worker for worker, _ in served(folder)[1]]
    between = []
    for worker in range(3):
        places = [place for place, other in enumerate(order) if other == worker]
        between += [after - before - 1 for before, after in zip([-1, *places], places, strict=False)]
    assert measured.workers is not None
    counts = measured.workers.staleness_counts
    assert 0 < sum(counts.values()) < job.num_all_steps * 3 == len(between)  # until the first worker is done
    assert sum(key * number for key, number in counts.items()) <= sum(between)
    assert max(counts) <= 2 * (2 * 1 + 1)


def test_no_worker_is_further_ahead_than_the_bound(slow_run: tuple[RunSpec, Measurement, Path]) -> None:
    _, measured, folder = slow_run
    assert measured.workers is not None
    assert measured.workers.most_ahead == 1
    assert measured.workers.held_s > 0
    clocks = [0, 0, 0]
    for worker, _ in served(folder)[1]:
        assert clocks[worker] - min(clocks) <= 1, "it could not have pulled"
        clocks[worker] += 1


def test_transfers_and_actions_are_those_predicted(slow_run: tuple[RunSpec, Measurement, Path]) -> None:
    _, measured, _ = slow_run
    assert ran_as_predicted(measured)
    assert issued_as_predicted(measured)


@pytest.mark.parametrize("placement", ["parts", "whole"])
def test_two_servers_have_all_parameters_once(placement: str) -> None:
    sizes = [7, 1, 12, 30]
    replication = Replication(kind="parameter_server", staleness=3, servers=3, parameter_placement=placement)  # type: ignore[arg-type]
    ranges = [
        (index, place)
        for slices in replication.server_slices(sizes)
        for index, begin, end in slices
        for place in range(begin, end)
    ]
    assert sorted(ranges) == [(index, place) for index, size in enumerate(sizes) for place in range(size)]


def parameters_and_gradients(num_steps: int) -> tuple[list[nn.Parameter], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 3), (4,)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return parameters, [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(num_steps)]


def trained_alone(optimizer: str, num_steps: int) -> torch.Tensor:
    parameters, gradients = parameters_and_gradients(num_steps)
    makers = {
        "sgd": torch.optim.SGD(parameters, lr=LR),
        "sgd_momentum": torch.optim.SGD(parameters, lr=LR, momentum=0.9),
        "adamw": torch.optim.AdamW(parameters, lr=LR),
    }
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        makers[optimizer].step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum", "adamw"])
def test_a_server_of_one_worker_trains_as_one_process(optimizer: Any) -> None:
    replication = Replication(**ASYNC)  # type: ignore[arg-type]
    parameters, gradients = parameters_and_gradients(6)
    server = ParameterServer(replication, 0, 1, [parameter.numel() for parameter in parameters], optimizer)
    torch._foreach_copy_(
        [tensor.detach() for tensor in server.parameters], [tensor.detach().flatten() for tensor in parameters]
    )
    for step in gradients:
        message = torch.cat([torch.ones(HEADER), *(gradient.flatten() for gradient in step)])
        server.answer(0, message)
        assert message[0] == 0, "no other updates"
    torch.testing.assert_close(message[HEADER:], trained_alone(optimizer, 6), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("locks", [True, False])
def test_hogwild_with_one_process_trains_as_one_process(locks: bool) -> None:
    parameters, gradients = parameters_and_gradients(6)
    common = Common(0, 1)
    common.share(parameters)
    optimizer = torch.optim.SGD(parameters, lr=LR)
    for step in gradients:
        common.begin()
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        (update,) = common.update([optimizer], locks=locks)
        assert update.staleness == 0
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    torch.testing.assert_close(weights, trained_alone("sgd", 6), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lock", [True, False])
def test_hogwild_with_two_processes_learns(lock: bool, fault: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One batch over and over, which a model of this size can learn by heart."""
    fault.setenv("TEST_FAULT", "same_batch")
    job = job_with({"kind": "hogwild", "lock": lock}, optimizer="adamw", num_steps=30, num_warmup_steps=0)
    measured = run_job(job, tmp_path, rank_module="serving_worker")
    assert np.mean(measured.losses[-5:]) < np.mean(measured.losses[:5]) - 0.1
    assert measured.workers is not None
    assert 30 < measured.workers.num_updates <= 60
    assert ran_as_predicted(measured)
    assert issued_as_predicted(measured)
    assert measured.workers.pushed_bytes == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [("kill_worker", "rank 1 was killed by signal 9"), ("kill_server", "rank 2 was killed by signal 9")],
)
def test_a_process_that_is_killed_ends_the_run_with_its_name(
    kind: str, said: str, fault: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault.setenv("TEST_FAULT", kind)
    with pytest.raises(RunError, match=said):
        run_job(job_with(ASYNC, num_steps=6), tmp_path, rank_module="serving_worker")
    measurement = Measurement.model_validate_json((tmp_path / "measurement.json").read_bytes())
    assert not measurement.complete


def test_workers_go_on_without_one_that_leaves(fault: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server forgets the clock of a worker that is killed, and gives it its parameters when it comes back."""
    fault.setenv("TEST_FAULT", "leave")
    replication = {"kind": "parameter_server", "staleness": 1, "min_replicas": 2}
    job = job_with(replication, num_workers=3, num_steps=12, num_warmup_steps=0, replica_restarts=1)
    measured = run_job(job, tmp_path, rank_module="serving_worker")
    assert measured.complete
    members = [training_round.replicas for training_round in measured.rounds]
    first = members.index((0, 1, 2), 2)
    assert members == [(0, 1, 2)] * 2 + [(0, 2)] * (first - 2) + [(0, 1, 2)] * (12 - first)
    assert first >= 5
    weights, applied, last = served(tmp_path)
    clocks: list[float] = [0, 0, 0]
    for worker, gradient in applied:
        weights -= LR * gradient
        if worker == 1 and clocks[1] == 2:
            clocks[1] = first  # it came back
        present = clocks if clocks[1] != 2 else clocks[::2]
        assert clocks[worker] - min(present) <= 1
        clocks[worker] += 1
    assert clocks == [12, 12, 12]
    torch.testing.assert_close(weights, last, rtol=1e-5, atol=1e-8)
    assert measured.notes[0].startswith("replica 1 of 3 has left: rank 1 was killed by signal 9")
    assert ran_as_predicted(measured)
    assert issued_as_predicted(measured)


def test_a_run_ends_with_too_few_workers(fault: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault.setenv("TEST_FAULT", "kill_worker")
    said = "only 1 of 2 workers are left, and plan.replication.min_replicas = 2"
    with pytest.raises(RunError, match=said):
        run_job(job_with({**ASYNC, "min_replicas": 2}, num_steps=6), tmp_path, rank_module="serving_worker")


@pytest.mark.parametrize("replication", [ASYNC, {"kind": "hogwild"}], ids=["server", "hogwild"])
def test_memory_is_that_predicted(replication: Any, tmp_path: Path) -> None:
    """States of adamw are the server's, or with Hogwild each process's own."""
    job = job_with(replication, optimizer="adamw", model=make_model(hidden_size=128), profile_memory=True)
    asked = Job(job.model, catalog.cluster("this-machine", 2), job.training, job.plan, job.software)
    program = lower(asked, job.assignment, job.parsed_table(), Lowering(host_waits=True))
    measured = run_job(job, tmp_path)
    for rank in measured.ranks:
        predicted_bytes = rank_peaks(program, rank.rank).allocated
        assert rank.peak_memory.allocated_bytes == pytest.approx(predicted_bytes, rel=0.01)


def test_checkpoints_of_workers_are_refused(tmp_path: Path) -> None:
    job = job_with(ASYNC, checkpointing=Checkpointing(folder=str(tmp_path)))
    with pytest.raises(NotModelledError, match="checkpoint"):
        check_job(job)


@pytest.mark.parametrize(
    ("replication", "num_local_ranks", "said"),
    [
        ({"kind": "hogwild"}, 1, "hogwild: shares the memory of one node; use one node, or kind: parameter_server"),
        ({**ASYNC, "servers": 2, "min_replicas": 1}, 1, "min_replicas = 1: cannot be kept .*; use servers: 1"),
        ({**ASYNC, "server_nodes": "apart"}, 2, "server_nodes = apart: is not run, .*; use workers"),
    ],
)
def test_workers_that_no_nodes_run_are_refused(replication: Any, num_local_ranks: int, said: str) -> None:
    with pytest.raises(NotModelledError, match=said):
        check_job(job_with(replication), num_local_ranks)
