"""An optimizer whose states live in memory of the host and stream through the device, where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.host_link import HostLink, Moved
from executor.recorder import Recorder

__all__ = ["StreamedOptimizer", "by_layer"]


def by_layer(parameters: Iterable[nn.Parameter], layers: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """Parameters of each layer that has some of them, in order; a shared one is the first layer's."""
    wanted = {id(parameter) for parameter in parameters}
    groups = []
    for layer in layers:
        mine = [parameter for parameter in layer.parameters() if id(parameter) in wanted]
        wanted -= {id(parameter) for parameter in mine}
        if mine:
            groups.append(mine)
    assert not wanted
    return groups


class StreamedOptimizer:
    """Updates layer by layer, as ``simplan.program.offload.stream_updates`` has it: states of two layers at a time.

    Between updates the device's storages of the states are empty. They are made in the first step, in which nothing
    comes from the host.

    Args:
        groups: The parameters of each layer.
        make: Makes the optimizer of some parameters.
        link: To the host.
        recorder: Gets the copies.
        rank: The global rank.
    """

    def __init__(
        self,
        groups: Sequence[list[nn.Parameter]],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        link: HostLink,
        recorder: Recorder,
        rank: int,
    ) -> None:
        self._layers = [_LayerStates(make(group), link) for group in groups]
        self._recorder, self._rank = recorder, rank

    @property
    def state(self) -> dict[Any, Any]:
        """States by parameter, as torch's optimizers have them; between updates without their values."""
        return {parameter: of for layer in self._layers for parameter, of in layer.optimizer.state.items()}

    def step(self) -> None:
        """Updates all parameters."""
        for layer in self._layers[:2]:
            self._record("from_host", layer.bring())
        for number, layer in enumerate(self._layers):
            layer.wait()
            layer.optimizer.step()
            self._record("to_host", layer.take_back())
            for following in self._layers[number + 2 : number + 3]:
                self._record("from_host", following.bring())

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As torch's optimizers."""
        for layer in self._layers:
            layer.optimizer.zero_grad(set_to_none=set_to_none)

    def _record(self, kind: Any, num_bytes: int) -> None:
        if num_bytes:
            self._recorder.complete(self._recorder.issue(kind, (self._rank,), num_bytes))


class _LayerStates:
    """States of one layer; the count of steps, a number for each parameter, stays on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, link: HostLink) -> None:
        self.optimizer = optimizer
        self._link = link
        self._on_host: list[tuple[Tensor, Tensor]] = []  # on the device and on the host
        self._coming: list[Moved] = []

    def bring(self) -> int:
        """Copies to the device; gives bytes.

        The device's memory is that of the incoming stream: it was given back there once the states that were in it
        before had gone.
        """
        for state, host in self._on_host:
            with self._link.receiving():
                state.untyped_storage().resize_(host.nbytes)
            self._coming.append(self._link.fetch(host, state))
        return self._num_bytes

    def wait(self) -> None:
        """The current stream waits for them."""
        for moved in self._coming:
            self._link.wait(moved)
        self._coming.clear()

    def take_back(self) -> int:
        """Copies to the host and frees the device; gives bytes."""
        is_new = not self._on_host
        if is_new:
            states = [_local(state) for state in _states(self.optimizer) if _local(state).nbytes]
            self._on_host = [(state, self._link.host_buffer(state)) for state in states]
        for moved in [self._link.send(state, host) for state, host in self._on_host]:
            if is_new and moved.event is not None:  # made by the optimizer, in memory of the current stream
                moved.event.synchronize()
            self._link.receive_after(moved)
        for state, _ in self._on_host:
            state.untyped_storage().resize_(0)
        return self._num_bytes

    @property
    def _num_bytes(self) -> int:
        return sum(host.nbytes for _, host in self._on_host)


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state for of in optimizer.state.values() for name, state in of.items() if name != "step"]


def _local(state: Tensor) -> Tensor:
    """What is here of a sharded tensor."""
    return state._local_tensor if isinstance(state, DTensor) else state
