"""Replicas that leave and join: against models trained alone by one process, and averaged over those that are left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from executor.checks import check_job
from executor.run import run_job
from simplan.errors import NotModelledError, RunError
from simplan.plan.replication import Replication
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.validate.compare import ran_as_predicted
from tests.executor.conftest import RANK_PROGRAMS, Run, make_model
from tests.executor.distributed.test_level2 import assert_issued_as_predicted
from tests.executor.distributed.test_outer import RELATIVE, Replicas, job_of
from tests.support.problems import refuses
from tests.support.slow import slow_except

INNER_STEPS = 3
ALL, LEFT = (0, 1, 2), (0, 2)
NUM_STEPS = 18


class ElasticReplicas(Replicas):
    """Models of one process, of which some are in a round.

    Attributes:
        lost: Mean loss of every step over the models that are in its round.
    """

    def __init__(self, job: RunSpec) -> None:
        super().__init__(job)
        self.lost: list[float] = []

    def train_rounds(self, rounds: list[tuple[int, ...]]) -> ElasticReplicas:
        """Trains those of every round; one that comes back takes all of the first one's state."""
        replication = self.job.plan.replication
        assert replication is not None
        outer, anchor, before = replication.outer, self.get(0), tuple(range(len(self.models)))
        momentum = torch.zeros_like(anchor)
        for number, members in enumerate(rounds):
            for replica in set(members) - set(before):
                source, optimizer = self.optimizers[before[0]], self.optimizers[replica]
                assert isinstance(source, torch.optim.Optimizer)
                assert isinstance(optimizer, torch.optim.Optimizer)
                self.set(replica, self.get(before[0]))
                optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
            before = members
            for step in range(number * INNER_STEPS, (number + 1) * INNER_STEPS):
                self.backward(step)
                self.lost.append(sum(self.own_losses[-1][replica] for replica in members) / len(members))
                for replica in members:
                    self.optimizers[replica].step()
                if step == (number + 1) * INNER_STEPS - 1:
                    delta = torch.stack([anchor - self.get(replica) for replica in members]).mean(0)
                    momentum = outer.momentum * momentum + delta
                    step_of = (
                        delta if replication.kind == "local_sgd" else outer.lr * (delta + outer.momentum * momentum)
                    )
                    anchor = anchor - step_of
                    for replica in members:
                        self.set(replica, anchor.clone())  # which parameters become views of
                self.weights.append([self.get(replica) for replica in range(len(self.models))])
        return self


def elastic_job(replication: dict[str, Any] | None = None, **fields: Any) -> RunSpec:
    kind = {"kind": "diloco", "inner_steps": INNER_STEPS, "min_replicas": 2, **(replication or {})}
    plan = {"dp_replicate": 3, **fields.pop("plan", {})}
    return job_of(kind, plan=plan, **{"num_steps": NUM_STEPS, "num_warmup_steps": 0, **fields})


def run_leaving(job: RunSpec, when: str, folder: Path, *, returns: bool) -> Measurement:
    """A run whose replica 1 is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
        patch.setenv("TEST_LEAVES", when)
        if returns:
            patch.setenv("TEST_RETURNS", "")
        return run_job(job.model_copy(update={"replica_restarts": int(returns)}), folder, rank_module="leaving_worker")


def rounds_of(when: str, *, returns: bool) -> list[tuple[int, ...]]:
    """Members of every round; one that is killed once its mean is kept was in the round."""
    back = ALL if returns else LEFT
    return [ALL, ALL if when == "kept" else LEFT, LEFT, LEFT, back, back]


CASES = [
    ("step", True, {}, {}),
    ("mean", False, {}, {}),
    ("average", False, {}, {}),
    ("kept", True, {}, {}),
    ("step", True, {"kind": "local_sgd"}, {}),
    ("average", True, {}, {"dp_shard": 2}),
    ("step", True, {}, {"dp_shard": 2, "zero_stage": 1}),
    ("mean", True, {}, {"dp_shard": 2, "zero_stage": 0}),
    ("step", True, {}, {"tp": 2}),
    ("step", True, {}, {"cp": 2, "cp_comm": "all_gather"}),
]


@pytest.mark.parametrize(("when", "returns", "replication", "inside"), slow_except([CASES[0]], CASES))
def test_replicas_go_on_without_one_that_leaves(
    when: str, returns: bool, replication: dict[str, Any], inside: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever it was doing then; a mean that it could not confirm is made again without it."""
    model = {"model": make_model("llama", vocab_size=96)} if "tp" in inside else {}
    job = elastic_job(replication, plan=inside, **model)
    measurement = run_leaving(job, when, tmp_path, returns=returns)
    assert measurement.complete
    members = rounds_of(when, returns=returns)
    assert [training_round.replicas for training_round in measurement.rounds] == members
    expected = ElasticReplicas(job).train_rounds(members)
    last = 2 * INNER_STEPS - 1
    if when == "kept":  # what a rank has of a step is written after the outer step
        expected.lost[last] = sum(expected.own_losses[last][replica] for replica in LEFT) / len(LEFT)
    assert measurement.losses == pytest.approx(expected.lost, rel=RELATIVE)
    num_ranks = job.plan.num_devices // job.plan.dp_replicate
    for step, weights in enumerate(expected.weights):
        for replica in LEFT if (when, step) == ("kept", last) else members[step // INNER_STEPS]:
            for rank in range(replica * num_ranks, (replica + 1) * num_ranks):
                weight: Tensor = torch.load(tmp_path / f"weights.rank{rank}.step{step}.pt")
                torch.testing.assert_close(weight, weights[replica], rtol=RELATIVE, atol=RELATIVE)
    assert ran_as_predicted(measurement)
    if "tp" not in inside:  # whose weights are gathered by recorded collectives, to be written
        assert_issued_as_predicted(Run(job, measurement, tmp_path))
    assert measurement.notes[0].startswith("replica 1 of 3 has left: rank ")
    assert any(note.startswith("replica 1 left in the round of steps ") for note in measurement.notes)
    assert returns == any(note.startswith("replica 1 came back for ") for note in measurement.notes)


def test_a_run_ends_with_too_few_replicas(tmp_path: Path) -> None:
    said = r"only 2 of 3 replicas are left, and plan.replication.min_replicas = 3"
    with pytest.raises(RunError, match=said):
        run_leaving(elastic_job({"min_replicas": 3}), "step", tmp_path, returns=False)
    measurement = Measurement.model_validate_json((tmp_path / "measurement.json").read_bytes())
    assert not measurement.complete
    assert [training_round.replicas for training_round in measurement.rounds] == [ALL]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"plan": {"pp": 2, "schedule": "1f1b"}, "schedule": "1f1b"}, "and plan.pp = 2; use pp = 1"),
        ({"checkpointing": Checkpointing(folder="kept")}, "makes no checkpoints"),
    ],
)
def test_options_without_execution_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(NotModelledError, match=said):
        check_job(elastic_job(**fields))


@pytest.mark.parametrize(
    ("replication", "said"),
    [
        ({"kind": "streaming_diloco", "min_replicas": 1}, "has min_replicas, and streaming_diloco has"),
        ({"kind": "hogwild", "min_replicas": 1}, "has min_replicas, and hogwild has"),
        ({"kind": "local_sgd", "start_step": 2, "min_replicas": 1}, "none of them may leave; use start_step = 0"),
        ({"kind": "parameter_server", "min_replicas": 1}, "every step waits for all workers; use staleness = 1"),
    ],
)
def test_ways_that_need_all_replicas_are_refused(replication: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Replication(**replication)


def test_more_replicas_than_there_are_cannot_be_needed() -> None:
    with refuses("plan.replication.min_replicas", "4", rule="must be at most dp_replicate", fix="use 3 or less"):
        check_job(elastic_job({"min_replicas": 4}))
