"""State of a training between two steps, as named tensors that any split over data-parallel ranks can read.

A parameter has the name of its layer in the whole model, independent of the stage. Tensor-parallel shards are stored
as DTensors, with or without FSDP sharding, so that another number of ranks can read them. Each rank stores its experts
as separate tensors, with the rank's mesh coordinate as suffix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from executor.distributed.mesh import ParallelDims, local
from executor.models.model import Stage

if TYPE_CHECKING:
    from executor.distributed.compression import CompressionHook
    from executor.distributed.replicas.outer import OuterSteps


class TrainingState:
    """Parameters, buffers, optimizer states and random number generators of one rank.

    Args:
        stages: Stages of the rank, already sharded.
        split: By name of a parameter, the dimension along which ranks split it.
        dims: Tensor- and expert-parallel groups of the rank.
        outer: Outer steps of replicas that train alone. Each of them has its own parameters, with its number as a
            suffix, and the state of outer steps is stored by rank.
        compression: Hook of compressed gradients, whose errors are stored by rank.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        optimizers: list[torch.optim.Optimizer],
        split: Mapping[str, int],
        dims: ParallelDims,
        device: torch.device,
        *,
        outer: OuterSteps | None = None,
        compression: CompressionHook | None = None,
    ) -> None:
        self._optimizers, self._device, self._outer, self._compression = optimizers, device, outer, compression
        self._replica = "" if outer is None else f".replica{dims.outer.rank}"
        self._model = stages[0].joined(stages[1:])
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._second_names = parameters.keys() - dict(self._model.named_parameters()).keys()
        self._split, self._tp = split, dims.tp
        self._suffixes = {name: _suffix(p, dims) for name, p in parameters.items() if ".experts_" in name}

    def tensors(self) -> dict[str, dict[str, Any]]:
        """All of the state; tensors are not copied."""
        model: dict[str, Any] = get_model_state_dict(self._model)
        states: Any = get_optimizer_state_dict(self._model, self._optimizers)["state"]
        rank = f"rank{dist.get_rank()}"
        by_rank = {"outer": self._outer, "compression": self._compression}
        kept = {section: {} if holder is None else holder.tensors() for section, holder in by_rank.items()}
        generators = {"cpu": {rank: torch.get_rng_state()}}
        if self._device.type == "cuda":
            generators["cuda"] = {rank: torch.cuda.get_rng_state(self._device)}
        return {
            "model": {
                self._stored(name): self._placed(name, value, value.shape)
                for name, value in model.items()
                if name not in self._second_names
            },
            "optimizer": {
                self._stored(name): {
                    key: self._placed(name, value, model[name].shape)
                    for key, value in state.items()
                    if isinstance(value, Tensor)
                }
                for name, state in states.items()
            },
            "generators": generators,
            **{
                section: {name: {rank: x} for name, x in tensors.items()}
                for section, tensors in kept.items()
                if tensors
            },
        }

    def restore(self, reader: FileSystemReader, group: dist.ProcessGroup, *, with_errors: bool) -> None:
        """Reads a checkpoint in place.

        Generators keep their state if the checkpoint has none for this rank, as with more ranks than before.

        Args:
            with_errors: Also errors of compressed gradients; False if they are those of other ranks or buckets.
        """
        tensors = self._complete()
        generators = {"generators": tensors.pop("generators")}
        load(tensors, storage_reader=reader, process_group=group)
        load(
            generators,
            storage_reader=reader,
            process_group=group,
            planner=DefaultLoadPlanner(allow_partial_load=True),
        )
        for kind, states in generators["generators"].items():
            (state,) = states.values()
            if kind == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self._device)

        if self._compression is not None and with_errors:
            self._compression.restore(self._errors(reader, group))

    def _errors(self, reader: FileSystemReader, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Errors of this rank in a checkpoint, by name; none before the first compressed step."""
        section, rank = "compression", f"rank{dist.get_rank()}"
        stored = {key: x for key, x in reader.read_metadata().state_dict_metadata.items() if key.endswith(f".{rank}")}
        tensors = {tuple(key.split(".")): x for key, x in stored.items() if isinstance(x, TensorStorageMetadata)}
        errors = {
            key[1]: torch.empty(x.size, dtype=x.properties.dtype, device=self._device)
            for key, x in tensors.items()
            if key[0] == section
        }
        if errors:
            read: dict[str, Any] = {section: {name: {rank: tensor} for name, tensor in errors.items()}}
            load(read, storage_reader=reader, process_group=group)
        return errors

    def handed_on(self) -> list[Tensor]:
        """Tensors that a replica that joins takes from another one: all but generators, in the same order."""
        tensors = self._complete()
        parts = [tensors["model"], *tensors["optimizer"].values(), *tensors.get("outer", {}).values()]
        return [local(tensor) for part in parts for tensor in part.values()]

    def _complete(self) -> dict[str, dict[str, Any]]:
        """All of the state, with the states that optimizers make in their first step."""
        trained = [p for optimizer in self._optimizers for held in optimizer.param_groups for p in held["params"]]
        gradients = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None  # torch makes optimizer states, by a step with rate 0, only without gradients
        tensors = self.tensors()
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        return tensors

    def _stored(self, name: str) -> str:
        return name + self._suffixes.get(name, "") + self._replica

    def _placed(self, name: str, value: Tensor, shape: torch.Size) -> Tensor:
        """A tensor of a parameter's shape; a part as a DTensor that shares its memory, as DDP and ZeRO-1 have none."""
        if name not in self._split or name in self._suffixes or value.shape != shape:
            return value
        if not isinstance(value, DTensor):
            return DTensor.from_local(value, self._tp.mesh, (Shard(self._split[name]),), run_check=False)
        assert self._tp.mesh is not None
        is_whole = "tp" in (value.device_mesh.mesh_dim_names or ())
        return value if is_whole else _of_all_parts(value, self._tp.mesh, self._split[name])


def _of_all_parts(shard: DTensor, tp: DeviceMesh, dim: int) -> DTensor:
    """The tensor of which FSDP has sharded one tensor-parallel rank's part, with the same memory.

    torch's FSDP gives this placement to a weight that was a DTensor before (``FSDPParam``).
    """
    shape, stride = list(shard.shape), list(shard.stride())
    shape[dim] *= tp.size()
    stride = [step * tp.size() if step > shard.stride(dim) else step for step in stride]
    placements = [
        _StridedShard(dim, split_factor=tp.size())
        if isinstance(placement, Shard) and placement.dim == dim
        else placement
        for placement in shard.placements
    ]
    mesh = DeviceMesh._concatenate([shard.device_mesh, tp])
    return DTensor.from_local(
        shard._local_tensor,
        mesh,
        (*placements, Shard(dim)),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def _suffix(parameter: nn.Parameter, dims: ParallelDims) -> str:
    """Ranks along the axes by which experts are split, unless they are axes of their mesh."""
    splits = {"ep": dims.ep.size > 1, "tp": dims.shard.etp > 1}
    axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    ranks = {"ep": dims.ep.rank, "tp": dims.tp.rank}
    return "".join(f".{axis}{ranks[axis]}" for axis, split in splits.items() if split and axis not in axes)
