"""Replicas that train alone: against models trained alone by one process, and averaged by hand as the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from executor.checks import check_job, check_rehearsal
from executor.models.model import build_stage
from executor.run import run_job
from executor.train.data import model_batch
from executor.train.loss import cross_entropy
from simplan import catalog
from simplan.errors import NotModelledError
from simplan.plan.plan import ParallelPlan
from simplan.plan.replication import Replication
from simplan.predict import predict, run_spec_of
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import FewerNodes
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.scenario import evaluate, load_scenario
from simplan.training import TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import RANK_PROGRAMS, Run, make_job, make_model
from tests.executor.distributed.test_level2 import LLAMA, assert_issued_as_predicted, run_predicted
from tests.executor.train.reference_optimizers import reference_optimizer
from tests.executor.train.test_equality import one_process
from tests.support.problems import refuses
from tests.support.slow import slow_except
from tests.support.sources import ROOT

RELATIVE = 1e-9
NUM_STEPS = 7


class Replicas:
    """Models of one process: each has its own samples and optimizer.

    Attributes:
        weights: By step and replica, all weights after the step.
        losses: Mean over replicas by step.
        own_losses: By step and replica.
        sent: Pseudo-gradients by outer step and replica.
    """

    def __init__(self, job: RunSpec) -> None:
        dtype = {"fp64": torch.float64, "fp32": torch.float32}[job.dtype]
        layers, self.job, self.dtype = range(len(job.model.layers)), job, dtype
        number = job.plan.dp_replicate
        self.models = [build_stage(job.model, layers, dtype, torch.device("cpu"), job.seed) for _ in range(number)]
        self.optimizers = [reference_optimizer(job.training, list(model.parameters())) for model in self.models]
        self.weights: list[list[Tensor]] = []
        self.losses: list[float] = []
        self.own_losses: list[list[float]] = []
        self.sent: list[list[Tensor]] = []

    def backward(self, step: int) -> None:
        """Gradients of every replica's own part of the batch."""
        job = self.job
        number = job.training.global_batch_size // len(self.models)
        losses = []
        for replica, model in enumerate(self.models):
            first = replica * number
            x, y = model_batch(job.model, seed=job.seed, step=step, first_sample=first, num_samples=number)
            model.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        self.own_losses.append(losses)
        self.losses.append(sum(losses) / len(losses))

    def average_gradients(self) -> None:
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
            for p in same:
                p.grad = mean.clone()

    def get(self, replica: int) -> Tensor:
        return parameters_to_vector(self.models[replica].parameters()).detach().clone()

    def set(self, replica: int, weights: Tensor) -> None:
        vector_to_parameters(weights, self.models[replica].parameters())

    def train(self, num_steps: int) -> Replicas:
        """Every step of the run, and outer steps between."""
        replication = self.job.plan.replication
        assert replication is not None
        everyone, outer = range(len(self.models)), replication.outer
        anchor = self.get(0)
        momentum = torch.zeros_like(anchor)
        size = -(-len(anchor) // replication.outer_steps)
        parts = [slice(first, first + size) for first in range(0, len(anchor), size)]
        between = replication.inner_steps // len(parts)
        late: dict[int, tuple[slice, Tensor]] = {}  # by step, what arrives after it
        for step in range(num_steps):
            self.backward(step)
            if step < replication.start_step:
                self.average_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
            done = step + 1 - replication.start_step
            if done > 0 and done % between == 0:
                part = parts[(done // between - 1) % len(parts)]
                weights_of_all = [self.get(replica)[part] for replica in everyone]
                self.sent.append([anchor[part] - weights for weights in weights_of_all])
                late[step + replication.steps_beside] = part, torch.stack(self.sent[-1]).mean(0)
            if step in late:
                part, delta = late.pop(step)
                if replication.kind == "local_sgd":
                    new, kept = anchor[part] - delta, 0.0
                else:
                    if outer.optimizer == "nesterov":
                        momentum[part] = outer.momentum * momentum[part] + delta
                        delta = outer.lr * (delta + outer.momentum * momentum[part])
                    anchor[part] = new = anchor[part] - delta
                    kept = replication.mixing if replication.steps_beside else 0.0
                for replica in everyone:
                    weights = self.get(replica)
                    weights[part] = kept * weights[part] + (1 - kept) * new
                    self.set(replica, weights)
            self.weights.append([self.get(replica) for replica in everyone])
        return self


def weighed(job: RunSpec, folder: Path) -> tuple[Measurement, list[list[Tensor]]]:
    """A run, and by step and rank the weights after the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        measurement = run_job(job, folder, rank_module="weights_worker")
    ranks = range(job.plan.num_devices)
    return measurement, [
        [torch.load(folder / f"weights.rank{rank}.step{step}.pt") for rank in ranks]
        for step in range(job.num_all_steps)
    ]


def job_of(replication: dict[str, Any], **fields: Any) -> RunSpec:
    num_warmup = max(1, replication.get("start_step", 0))
    plan = {"dp_replicate": 2, "replication": replication, **fields.pop("plan", {})}
    values = {"plan": plan, "num_steps": NUM_STEPS - num_warmup, "num_warmup_steps": num_warmup, "dtype": "fp64"}
    return make_job(**{**values, **fields})


STREAMING = {"kind": "streaming_diloco", "inner_steps": 4, "fragments": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "local": ({"kind": "local_sgd", "inner_steps": 3}, {}),
    "post-local": ({"kind": "local_sgd", "inner_steps": 2, "start_step": 3}, {}),
    "diloco": ({"kind": "diloco", "inner_steps": 3}, {}),
    "average": ({"kind": "diloco", "inner_steps": 3, "outer": {"optimizer": "average"}}, {}),
    "on-host": ({"kind": "diloco", "inner_steps": 2, "outer": {"on_host": True, "momentum": 0.5, "lr": 0.9}}, {}),
    "without-momentum": ({"kind": "diloco", "inner_steps": 2, "outer": {"momentum": 0.0}}, {}),
    "streaming": ({**STREAMING, "overlap_steps": 1}, {}),
    "streaming-late": ({**STREAMING, "overlap_steps": 2, "mixing": 0.25}, {}),
    "streaming-that-waits": ({**STREAMING, "fragments": 4, "overlap_steps": 0}, {}),
    "fsdp": ({"kind": "diloco", "inner_steps": 3}, {"dp_shard": 2}),
    "ddp": ({"kind": "local_sgd", "inner_steps": 3}, {"dp_shard": 2, "zero_stage": 0}),
    "zero1": ({"kind": "local_sgd", "inner_steps": 3}, {"dp_shard": 2, "zero_stage": 1}),
}
"""Replication, and what splits a replica."""


@pytest.mark.parametrize("name", slow_except(["post-local", "streaming"], CASES))
def test_replicas_train_as_models_alone(name: str, tmp_path: Path) -> None:
    replication, inside = CASES[name]
    job = job_of(replication, plan=inside)
    measurement, weights = weighed(job, tmp_path)
    expected = Replicas(job).train(job.num_all_steps)
    assert measurement.losses == pytest.approx(expected.losses, rel=RELATIVE)
    per_replica = job.plan.num_devices // 2
    for of_ranks, wanted in zip(weights, expected.weights, strict=True):
        for rank, weight in enumerate(of_ranks):
            torch.testing.assert_close(weight, wanted[rank // per_replica], rtol=RELATIVE, atol=RELATIVE)
    together = [torch.equal(*of_ranks[::per_replica]) for of_ranks in weights]  # to the last bit
    if job.plan.replication is not None and job.plan.replication.kind != "streaming_diloco":
        first, inner = job.num_whole_steps, job.plan.round_steps
        assert together == [step < first or (step + 1 - first) % inner == 0 for step in range(NUM_STEPS)]
    assert len(measurement.step_times_s) % job.plan.round_steps == 0
    assert_issued_as_predicted(Run(job, measurement, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside",
    [
        {"tp": 2},
        {"pp": 2, "schedule": "1f1b"},
        {"cp": 2, "cp_comm": "all_gather"},
        {"cp": 2, "cp_comm": "a2a", "dp_shard": 1, "zero_stage": 2},
        {"dp_shard": 2, "zero_stage": 2},
        {"dp_shard": 2, "recompute": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_replicas_are_split(inside: dict[str, Any], name: str, tmp_path: Path) -> None:
    """By other axes; fragments of streaming DiLoCo are then other elements, and its losses others."""
    fields = {**inside}
    schedule = fields.pop("schedule", "none")
    model = make_model("llama", vocab_size=96)
    job = job_of(CASES[name][0], plan={**fields, "schedule": schedule}, model=model, schedule=schedule)
    measurement = run_job(job, tmp_path)
    if name == "diloco":
        assert measurement.losses == pytest.approx(Replicas(job).train(job.num_all_steps).losses, rel=RELATIVE)
    assert_issued_as_predicted(Run(job, measurement, tmp_path))


def test_local_sgd_that_averages_every_step_is_synchronous(tmp_path: Path) -> None:
    """With plain SGD, the mean of weights after a step is the step by the mean gradient."""
    training = TrainingSpec(global_batch_size=16, precision="fp32", optimizer="sgd")
    job = job_of({"kind": "local_sgd", "inner_steps": 1}, training=training, num_steps=3)
    measurement = run_job(job, tmp_path)
    losses, *_ = one_process(job, job.num_all_steps)
    assert measurement.losses == pytest.approx(losses, rel=1e-6)


def test_step_time_is_the_mean_of_whole_rounds() -> None:
    job = job_of({"kind": "diloco", "inner_steps": 3})
    measurement = Measurement(job=job, step_times_s=(1.0, 1.0, 4.0, 1.0, 1.0, 7.0))
    assert measurement.step_time_s == 2.5  # of rounds of 2 and 3 seconds a step
    assert measurement.spread == pytest.approx(0.5 * (3 - 2) / 2.5)


@pytest.mark.parametrize(("dtype", "levels"), slow_except([("int4", 7)], [("int4", 7), ("int8", 127)]))
def test_few_bits_are_within_their_rounding(dtype: str, levels: int, tmp_path: Path) -> None:
    """Values and their mean are rounded to a multiple of the largest of a block, over half of the levels."""
    replication = {"kind": "diloco", "inner_steps": 2, "outer": {"dtype": dtype}}
    job = job_of(replication, dtype="fp32", num_steps=2, num_warmup_steps=0)
    measurement, weights = weighed(job, tmp_path)
    expected = Replicas(job).train(2)
    largest = max(float(delta.abs().max()) for delta in expected.sent[0])
    assert job.plan.replication is not None
    outer = job.plan.replication.outer
    error = (weights[1][0] - expected.weights[1][0]).abs().max()
    assert torch.equal(weights[1][0], weights[1][1])
    assert 0.1 < float(error) / (outer.lr * (1 + outer.momentum) * largest / levels) < 1
    assert issued_as_predicted(measurement)


@pytest.mark.parametrize("dtype", slow_except(["bf16"], ["fp32", "fp16", "bf16", "int8", "int4"]))
def test_communication_is_that_predicted(dtype: str, tmp_path: Path) -> None:
    """In the step after which a fragment is sent, beside the next one or not."""
    replication = {**STREAMING, "inner_steps": 2, "overlap_steps": 1, "outer": {"dtype": dtype}}
    job = job_of(replication, dtype="fp32", num_steps=2)
    measurement = run_job(job, tmp_path)
    assert issued_as_predicted(measurement)
    size = -(-job.model.num_parameters // 2)
    (*_, last) = measurement.ranks[0].collectives
    bits = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}[dtype]
    assert size * bits / 8 <= last.num_bytes <= 1.3 * size * bits / 8  # whole blocks and their scales


@pytest.mark.slow
@pytest.mark.parametrize(
    "replication",
    [
        {"kind": "local_sgd", "inner_steps": 2},
        {"kind": "local_sgd", "inner_steps": 2, "start_step": 2},
        {"kind": "diloco", "inner_steps": 2},
        {"kind": "diloco", "inner_steps": 2, "outer": {"dtype": "int8"}},
        {**STREAMING, "overlap_steps": 2},
    ],
)
def test_peak_memory_is_that_predicted(replication: dict[str, Any], tmp_path: Path) -> None:
    plan = ParallelPlan(dp_replicate=2, replication=Replication(**replication))
    prediction, _ = run_predicted(LLAMA, plan, 4, "fp32", tmp_path, num_steps=4)
    job = run_spec_of(prediction, num_steps=4, num_warmup_steps=2, device="cpu", profile_memory=True)
    measured = run_job(job, tmp_path / "traced").ranks[0].peak_memory.allocated_bytes
    assert measured == pytest.approx(prediction.memory[0].allocated_bytes, rel=0.02)


RESUMED = [("streaming", 4), ("streaming-late", 5), ("diloco", 5), ("post-local", 8), ("fsdp", 5)]
"""Case, and the steps after which it is resumed."""


@pytest.mark.parametrize(("name", "stopped"), slow_except([RESUMED[1]], RESUMED))
def test_a_resumed_run_computes_the_same(name: str, stopped: int, tmp_path: Path) -> None:
    """In the middle of a round, with a fragment in flight; checkpoints do not change a run."""
    replication, inside = CASES[name]
    job = job_of(replication, plan=inside, num_steps=stopped, num_warmup_steps=3)
    whole = run_job(job, tmp_path / "whole")
    kept = Checkpointing(folder=str(tmp_path / "kept"), every=1, keep=1)
    start = job.num_whole_steps
    begun = {"checkpointing": kept, "num_steps": stopped - start, "num_warmup_steps": start}
    first = run_job(job.model_copy(update=begun), tmp_path / "first")
    resumed = job.model_copy(update={"checkpointing": kept.model_copy(update={"resume": True})})
    second = run_job(resumed, tmp_path / "second")
    assert second.first_step == stopped
    assert (*first.losses, *second.losses) == whole.losses


def test_replicas_resume_with_the_same_plan_only(tmp_path: Path) -> None:
    kept = Checkpointing(folder=str(tmp_path / "kept"), every=2)
    replication = {"kind": "local_sgd", "inner_steps": 2}
    run_job(job_of(replication, checkpointing=kept, num_steps=2, num_warmup_steps=0), tmp_path / "first")
    resumed = kept.model_copy(update={"resume": True})
    other = job_of({**replication, "inner_steps": 3}, checkpointing=resumed)
    with refuses("plan.replication.inner_steps", "3", rule="the checkpoint is of a training"):
        run_job(other, tmp_path / "second")


def test_run_refuses_rounds_that_it_would_not_measure() -> None:
    with refuses("num_steps", "10", rule="a round of plan.replication, of 500", fix="use 500"):
        check_job(job_of({"kind": "diloco"}, num_steps=10))
    late = job_of({"kind": "local_sgd", "inner_steps": 2, "start_step": 20}, num_steps=2, num_warmup_steps=2)
    with pytest.raises(NotModelledError, match=r"20 steps .* after its first 2"):
        check_job(late)
    job = job_of({"kind": "local_sgd", "inner_steps": 2})
    with pytest.raises(NotModelledError, match="a rehearsal has one rank"):
        check_rehearsal(job, 0, fake=True)
    fewer = FewerNodes(num_nodes=1, plan=job.plan, boundaries=job.boundaries, table=job.table)
    with pytest.raises(NotModelledError, match="with which fewer nodes cannot go on"):
        check_job(job.model_copy(update={"fewer_nodes": (fewer,)}))


WAYS = ("local-sgd", "post-local-sgd", "diloco", "streaming-diloco", "diloco-fsdp", "diloco-elastic")


@pytest.mark.parametrize("name", WAYS)
def test_scenario_has_the_bytes_that_it_expects(name: str) -> None:
    scenario = load_scenario(ROOT / f"scenarios/ways/{name}.yaml")
    number = scenario.job.plan.num_devices
    there = replace(scenario.job, cluster=catalog.cluster("dgx-h100", num_devices=number))  # needs no calibration
    results = [evaluate(expectation, predict(there).to_json(timeline=False)) for expectation in scenario.expect]
    assert len(results) == 2
    assert all(result.passed for result in results), [result.message for result in results]
