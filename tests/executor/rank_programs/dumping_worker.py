"""executor.worker, also writing the gradients of every step and torch's own record of step 2's collectives."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import executor.worker
from executor.train.trainer import Trainer

PROFILED_STEP = 2  # DDP has settled its buckets by then
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}


class DumpingTrainer(Trainer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps_done = 0
        self.gradients: dict[str, torch.Tensor] = {}
        self.in_flight: dict[int, int] = {}
        for stage in getattr(self._engine, "_stages", []):
            self.count_in_flight(stage)

    def count_in_flight(self, stage: Any) -> None:
        """By stage, the most microbatches of which torch holds activations after a forward."""
        forward = stage.forward_one_chunk

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            held = len(stage.fwd_cache) + len(stage.backward_state)
            self.in_flight[stage.stage_index] = max(held, self.in_flight.get(stage.stage_index, 0))
            return output

        stage.forward_one_chunk = counted

    def update(self) -> None:
        for stage in self.stages.values():
            self.gradients |= {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
        super().update()

    def step(self, tokens: Any, targets: Any) -> list[torch.Tensor]:
        if self.steps_done == PROFILED_STEP:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                losses = super().step(tokens, targets)
            torch.save(issued_elements(trace), Path(sys.argv[2]) / f"collectives.rank{dist.get_rank()}.pt")
        else:
            losses = super().step(tokens, targets)
        whole = {name: unsharded(g) if isinstance(g, DTensor) else g for name, g in self.gradients.items()}
        torch.save(whole, Path(sys.argv[2]) / f"gradients.rank{dist.get_rank()}.step{self.steps_done}.pt")
        torch.save(self.in_flight, Path(sys.argv[2]) / f"in_flight.rank{dist.get_rank()}.pt")
        self.steps_done += 1
        return losses


def unsharded(gradient: DTensor) -> torch.Tensor:
    """What this tensor-parallel rank has of a gradient, of all FSDP shards; nothing that a recorder sees."""
    mesh, here = gradient.device_mesh, gradient.to_local()
    if "tp" not in (mesh.mesh_dim_names or ()):
        return gradient.full_tensor()
    if mesh.ndim == 1:
        return here
    placements: dict[str, Any] = dict(zip(mesh.mesh_dim_names or (), gradient.placements, strict=True))
    parts: list[Any] = [None] * mesh["shard"].size()
    dist.all_gather_object(parts, here, group=mesh.get_group("shard"))
    return torch.cat(parts, placements["shard"].dim)


def issued_elements(trace: profile) -> list[tuple[str, int]]:
    """Kind and elements of every collective that torch was asked for, in order of time."""
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    calls = [event for event in results.events() if event.name() in KINDS]
    calls.sort(key=lambda event: event.start_ns())
    sizes, end_ns = [], 0
    for call in calls:
        if call.start_ns() >= end_ns:  # a dispatch mode calls again what it was called for, inside of the same call
            sizes.append((KINDS[call.name()], largest_elements(call)))
            end_ns = call.start_ns() + call.duration_ns()
    return sizes


def largest_elements(call: Any) -> int:
    """Elements of the larger of a call's buffers: what was gathered, or is to be scattered."""
    size = max(math.prod(shape) for shape in shapes_in(call.structured_input_shapes()))
    # a functional all-gather has its input and the number of ranks
    return size * int(call.concrete_inputs()[1]) if "functional::all_gather" in call.name() else size


def shapes_in(shapes: Any) -> Iterator[list[int]]:
    """The shapes of tensors and of lists of tensors."""
    for shape in shapes:
        if shape and isinstance(shape[0], list):
            yield from shapes_in(shape)
        elif shape:
            yield shape


if __name__ == "__main__":
    executor.worker.Trainer = DumpingTrainer  # type: ignore[assignment, attr-defined]
    executor.worker.main(sys.argv[1:])
