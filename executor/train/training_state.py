"""What a training is between two steps, as named tensors that any split over data-parallel ranks can read.

A parameter has the name of its layer in the whole model, so that it is found whatever the stage it is in. Tensors that
FSDP shards are DTensors; of tensor- and expert-parallel splits every part is a tensor of its own, named by its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.distributed.mesh import ParallelDims
from executor.models.model import Stage

__all__ = ["TrainingState"]

Kind = tuple[torch.Size, torch.dtype]
"""Shape and type of a whole tensor."""


class _Sharing(Protocol):
    """An optimizer made of others."""

    @property
    def optimizers(self) -> tuple[object, ...]:
        """Those."""


class TrainingState:
    """Parameters, optimizer states, buffers and random number generators of one rank.

    Args:
        stages: Its stages, sharded already if they are to be.
        optimizer: What updates them: torch's own, or one with ``optimizers``.
        dims: Its part of layers.
        device: Where it computes.
    """

    def __init__(self, stages: Iterable[Stage], optimizer: object, dims: ParallelDims, device: torch.device) -> None:
        self._device = device
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                self._parameters[_part_name(name, dims)] = parameter
            persistent = stage.state_dict(keep_vars=True).keys()
            for name, buffer in stage.named_buffers():
                if name in persistent:
                    self._buffers[_part_name(name, dims)] = buffer
        self._optimizers = list(_innermost(optimizer))

    def tensors(self) -> dict[str, Tensor]:
        """All of it; the tensors themselves, not copies."""
        return {
            **{f"parameters/{name}": parameter.detach() for name, parameter in self._parameters.items()},
            **{f"buffers/{name}": buffer for name, buffer in self._buffers.items()},
            **{
                f"optimizer/{name}/{key}": value
                for name, parameter in self._parameters.items()
                for key, value in self._states(parameter).items()
                if isinstance(value, Tensor)
            },
            **self._generators(),
        }

    def restore(self, stored: Mapping[str, Kind], read: Callable[[dict[str, Tensor]], None]) -> None:
        """Takes over what is stored.

        Optimizer states are made where there are none yet. Generators keep their state where nothing is stored for
        this rank, as with more ranks than there were.

        Args:
            stored: Shape and type of every whole tensor that is stored, by name.
            read: Fills tensors by name, in place.
        """
        by_parameter: dict[str, dict[str, Kind]] = {}
        for key, kind in stored.items():
            section, _, rest = key.partition("/")
            if section == "optimizer":
                name, _, state = rest.rpartition("/")
                by_parameter.setdefault(name, {})[state] = kind
        for name, parameter in self._parameters.items():
            for optimizer in self._optimizers:
                if _updates(optimizer, parameter):
                    kinds = by_parameter.get(name, {}).items()
                    optimizer.state[parameter] = {key: _made(parameter, optimizer, *kind) for key, kind in kinds}
        wanted = {name: tensor for name, tensor in self.tensors().items() if name in stored}
        read(wanted)
        if (generator := wanted.get(f"generators/cpu/{_rank()}")) is not None:
            torch.set_rng_state(generator)
        if (generator := wanted.get(f"generators/cuda/{_rank()}")) is not None:
            torch.cuda.set_rng_state(generator, self._device)

    def _states(self, parameter: nn.Parameter) -> dict[str, object]:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                states: dict[str, object] = optimizer.state[parameter]
                return states
        return {}

    def _generators(self) -> dict[str, Tensor]:
        generators = {f"generators/cpu/{_rank()}": torch.get_rng_state()}
        if self._device.type == "cuda":
            generators[f"generators/cuda/{_rank()}"] = torch.cuda.get_rng_state(self._device)
        return generators


def _rank() -> str:
    return f"rank{dist.get_rank()}"


def _part_name(name: str, dims: ParallelDims) -> str:
    """A name that is the same on all ranks that hold the same part."""
    experts = ".experts_" in name
    if experts and dims.ep.size > 1:
        name = f"{name}.ep{dims.ep.rank}"
    splits = dims.shard.etp > 1 if experts else dims.tp.size > 1
    return f"{name}.tp{dims.tp.rank}" if splits else name


def _innermost(optimizer: object) -> Iterable[torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
        return
    assert hasattr(optimizer, "optimizers"), f"no checkpoints of {type(optimizer).__name__}"
    sharing: _Sharing = optimizer
    for part in sharing.optimizers:
        yield from _innermost(part)


def _updates(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is other for group in optimizer.param_groups for other in group["params"])


def _made(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Room for a state: split as its parameter when it is of its shape, else whole, as a count of steps.

    torch counts steps on the host, unless the update is one kernel of the device or is captured: a count on the device
    would be read back for every parameter.
    """
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device or shape else "cpu")
