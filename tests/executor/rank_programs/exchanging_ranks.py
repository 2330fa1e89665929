"""One of two ranks that split the layers of small models in several ways: what they compute and what they exchange.

``python exchanging_ranks.py REQUEST RANK``: the request is a folder with ``cases.pt``, a list of (model, shard,
recompute, dtype), and gets ``rank0.pt`` and ``rank1.pt``, a result for each case.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.distributed.gradients import partial_parameters, sum_partial_gradients
from executor.distributed.mesh import ParallelDims, Peers, local
from executor.models.model import build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy, split_loss
from simplan.model.model import ModelSpec
from simplan.plan.plan import Recompute
from simplan.plan.shard import Shard
from tests.executor.models.layer_runs import without_levels

CPU = torch.device("cpu")
NUM_RANKS = 2
NUM_SAMPLES = 3
SEED = 5


class Listener:
    """Takes the place of a recorder."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        self.issued: list[tuple[str, tuple[int, ...], int]] = []
        self.completed: list[int] = []

    def issue(self, kind: str, ranks: tuple[int, ...], num_bytes: int, action: object = None) -> int:
        """Remembers a collective."""
        self.issued.append((kind, ranks, num_bytes))
        return len(self.issued) - 1

    def complete(self, handle: int) -> None:
        """Remembers its end."""
        self.completed.append(handle)


def run(model: ModelSpec, shard: Shard, recompute: Recompute, dtype: torch.dtype, peers: Peers) -> Any:
    """One forward and backward of the rank's share of a model."""
    listener: Any = peers.recorder
    listener.forget()
    tp, cp = (peers if degree > 1 else Peers() for degree in (shard.tp, shard.cp))
    parallel = ParallelDims(shard, tp=tp, cp=cp)
    stage = build_stage(model, range(len(model.layers)), dtype, CPU, SEED, parallel, recompute)
    batch = model_batch(model, seed=SEED, step=0, first_sample=0, num_samples=NUM_SAMPLES)
    inputs, targets = (parallel.local_tokens(x) for x in batch)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    order: list[str] = []
    for name, parameter in stage.named_parameters():
        hook = partial(lambda name, _: order.append(without_levels(name)), name)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    with split_loss(parallel):
        loss = cross_entropy(stage(inputs), targets, parallel)
        loss.backward()  # type: ignore[no-untyped-call]
    num_issued = len(listener.issued)
    sum_partial_gradients(partial_parameters(stage, model.layers_of(shard)), parallel.tp)
    gradients = {}
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None
        if shard.cp > 1:  # what data parallelism does over these ranks
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(shard.cp)
        gradients[name] = local(parameter.grad)
    return {
        "loss": loss.detach(),
        "gradients": gradients,
        "order": order,
        "issued": listener.issued[:num_issued],
        "issued for partial gradients": listener.issued[num_issued:],
        "all completed": sorted(listener.completed) == list(range(len(listener.issued))),
    }


def main(folder: Path, rank: int) -> None:
    """Runs all cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS)
    handle = dist.new_group(list(range(NUM_RANKS)))
    assert isinstance(handle, dist.ProcessGroup)
    cases: list[tuple[ModelSpec, Shard, Recompute, torch.dtype]] = torch.load(folder / "cases.pt", weights_only=False)
    listener: Any = Listener()
    peers = Peers.of(handle, tuple(range(NUM_RANKS)), rank, listener)
    peers = peers.meshed("tp", "cpu")  # one for all cases: DTensor takes equal meshes for the same
    torch.save([run(*case, peers=peers) for case in cases], folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
