"""One of two ranks that reduce given gradients with compression: averages of each kind and step.

``python compressing_ranks.py FOLDER RANK``: the folder has ``cases.pt``, a list of compressions, and ``gradients.pt``,
(step, rank, element) FP32, and gets ``rank0.pt`` and ``rank1.pt``, for each case (step, element).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.distributed.compression import compression_hook
from executor.distributed.ddp import wrap_ddp
from executor.distributed.mesh import Peers
from simplan.plan.compression import Compression

NUM_RANKS = 2


class Linear(nn.Module):
    """A module whose gradients are what it is given, in two parameters or in one.

    DDP puts the parameters into a bucket in another order, and in yet another one after its first backward.
    """

    def __init__(self, num_elements: int, num_parameters: int) -> None:
        super().__init__()
        sizes = (num_elements // 3, num_elements - num_elements // 3) if num_parameters == 2 else (num_elements,)
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, gradient: Tensor) -> Tensor:
        """Product of weights and gradients."""
        return torch.cat([*self.weights]) @ gradient


def averages(compression: Compression, gradients: Tensor, peers: Peers) -> Tensor:
    """(step, element) What a rank has after each backward."""
    module = Linear(gradients.shape[2], 2 if compression.kind in ("top_k", "random_k") else 1)  # others have blocks
    hook = compression_hook(compression, peers, num_whole_steps=0)
    wrapped, means = wrap_ddp(module, peers, None, hook=hook.reduce), list[Tensor]()
    with hook.passing_on():
        wrapped(gradients[0, 0]).backward()
    for step in gradients:
        wrapped.zero_grad()
        wrapped(step[peers.rank]).backward()
        means.append(torch.cat([weight.grad for weight in module.weights if weight.grad is not None]).clone())
    return torch.stack(means)


def main(folder: Path, rank: int) -> None:
    """All cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    assert dist.group.WORLD is not None
    peers = Peers.of(dist.group.WORLD, tuple(range(NUM_RANKS)), rank, None)
    gradients = torch.load(folder / "gradients.pt")
    cases = torch.load(folder / "cases.pt")
    means = [averages(Compression.model_validate(case), gradients, peers) for case in cases]
    torch.save(means, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
