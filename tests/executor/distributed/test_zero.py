"""ZeRO-1 by torch's ZeroRedundancyOptimizer: owners, ranks without parameters, and a limit of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.distributed.mesh import Peers
from executor.distributed.zero import ShardedOptimizer
from executor.dry_run.rehearse import rehearse
from simplan.optimizers import OptimizerName
from simplan.program.memory.states import partition_states
from simplan.training import TrainingSpec
from simplan.validate.compare import predicted_communications
from tests.executor.conftest import make_job, make_model
from tests.executor.train.test_equality import assert_equal_to_one_process, run_in_float64
from tests.support.slow import slow_except

ZERO_1 = {"zero_stage": 1}


@contextmanager
def fake_peers(num_ranks: int) -> Iterator[Peers]:
    """Rank 0 of a process group that communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        assert dist.group.WORLD is not None
        yield Peers.of(dist.group.WORLD, tuple(range(num_ranks)), 0, None)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("sizes", [(3, 1, 2, 5, 5, 4, 4, 1, 1, 7), (6, 6, 6, 6, 6), (9, 1, 1)])
def test_predicted_owners_are_those_of_torch(sizes: tuple[int, ...], num_ranks: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    with fake_peers(num_ranks) as peers:
        optimizer = ShardedOptimizer(parameters, peers, lambda groups: torch.optim.SGD(groups, lr=0.1))
        (buckets,) = optimizer._buckets
    storages = [bucket.untyped_storage().data_ptr() for bucket in buckets]
    owners = [storages.index(parameter.untyped_storage().data_ptr()) for parameter in parameters]
    assert partition_states(sizes, num_ranks) == owners


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", slow_except(["lamb"], ["adamw", "lars", "lamb"]))
def test_more_ranks_than_parameters_issue_what_is_predicted(optimizer: OptimizerName) -> None:
    """Ranks without parameters broadcast as well, and take part in no norms of LARS and LAMB."""
    plan = {"tp": 2, "dp_shard": 20, **ZERO_1}  # the block and all around it have 17 parameters
    training = TrainingSpec(global_batch_size=160, precision="fp32", optimizer=optimizer)
    model = make_model(vocab_size=96, num_hidden_layers=1)
    job = make_job(model=model, plan=plan, training=training)
    predicted = predicted_communications(job)
    for rank in (0, 39):
        broadcasts = [
            (c.kind, c.ranks, c.num_bytes) for c in rehearse(job, rank, fake=True).collectives if "OPT" in c.action
        ]
        assert broadcasts == [message[:3] for message in predicted[rank] if "OPT" in message[3]]
        assert min(num_bytes for kind, _, num_bytes in broadcasts if kind == "broadcast") == 4


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", slow_except(["lamb"], ["adamw", "lamb"]))
def test_more_ranks_than_parameters_equal_one_process(optimizer: OptimizerName, tmp_path: Path) -> None:
    model = make_model("llama", lora_rank=4, lora_targets=("q",), num_hidden_layers=1)
    job = make_job(model=model, plan={"dp_shard": 4, **ZERO_1}, dtype="fp64")
    training = TrainingSpec(
        global_batch_size=job.training.global_batch_size, precision="fp32", task="lora", optimizer=optimizer
    )
    assert_equal_to_one_process(run_in_float64(job.model_copy(update={"training": training}), tmp_path))


def test_torch_cannot_mix_tensors_with_dtensors() -> None:
    """So ZeRO-1 needs tensor-parallel shards as plain tensors."""
    with fake_peers(2) as peers:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        parameters = [
            nn.Parameter(torch.zeros(4)),
            nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()])),
        ]
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            ShardedOptimizer(parameters, peers, lambda groups: torch.optim.SGD(groups, lr=0.1))
