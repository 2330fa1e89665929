"""CPU time of torch's DTensor per block of eager tensor parallelism, in operators of plain torch.

    python -m benchmarks.dtensor_host

A Llama block of tiny sizes runs forward and backward on a fake process group of two ranks, with and without
``parallelize_module``. Time is that of the thread; blocks take turns, and ratios are medians of 40 rounds, so that
other work on the machine counts little.
``simplan.cost.compute.kernels`` has the numbers as ``_DTENSOR_CALLS``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

_ROUNDS, _RUNS, _SIZE = 41, 4, 16


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(_SIZE, _SIZE, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (linear(x).view(b, s, -1, 4).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y: Tensor = self.proj(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        )
        return y


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(_SIZE, 2 * _SIZE, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * _SIZE, _SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(_SIZE), nn.RMSNorm(_SIZE)
        self.attention, self.mlp = _Attention(), _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def _parallel(block: nn.Module, *, sequence_parallel: bool) -> nn.Module:
    gathers = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    names = {"columns": ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
    plan: dict[str, object] = {name: ColwiseParallel() for name in names["columns"]}
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence_parallel else RowwiseParallel()
    plan |= dict.fromkeys(("attention.proj", "mlp.down"), rows)
    if sequence_parallel:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gathers, "mlp": gathers}
    return parallelize_module(block, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]


def _us(run: Callable[[], object]) -> float:
    """CPU time of this thread per run, in microseconds."""
    begin = time.thread_time()
    for _ in range(_RUNS):
        run()
    return (time.thread_time() - begin) / _RUNS * 1e6


def _ratios(plain: nn.Module, other: nn.Module) -> tuple[float, float]:
    """Time of another block beyond that of a plain block, forward and backward, over the plain one's both."""
    x = torch.randn(1, 4, _SIZE, requires_grad=True)
    gradient = torch.randn(1, 4, _SIZE)
    runs = [(lambda b=block: b(x), lambda b=block: b(x).backward(gradient)) for block in (plain, other)]
    ratios = []
    for _ in range(_ROUNDS):
        (forward, both), (other_forward, other_both) = [(_us(first), _us(second)) for first, second in runs]
        ratios.append(((other_forward - forward) / both, (other_both - other_forward - both + forward) / both))
    forwards, backwards = zip(*ratios[1:], strict=True)
    return statistics.median(forwards), statistics.median(backwards)


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for sequence_parallel in (True, False):
        forward, backward = _ratios(_Block(), _parallel(_Block(), sequence_parallel=sequence_parallel))
        words = "sequence parallel" if sequence_parallel else "whole tokens"
        print(f"torch {torch.__version__}, {words}: {forward:.1f} plain blocks more forward, {backward:.1f} backward")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
