"""Activations of blocks in memory of the host (``plan.offload_activations``), and when they are copied.

They go the way of torchtune's OffloadActivations and Megatron Core's CPU offloading: a copy leaves when a block's
forward is done, and comes back one block ahead of its backward. What ``plan.offload_optimizer`` has on the host is in
``simplan.program.lowering.fsdp``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

from simplan.model.layer import LayerKind
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.program import MemoryCategory, MemoryEffect

__all__ = ["OffloadedActivations", "backward_follows"]

_ACTIVATIONS, _HOST = MemoryCategory.ACTIVATIONS, MemoryCategory.HOST

_Key = tuple[int, int | None, int]
"""Stage, microbatch and first layer."""


class _Copy(NamedTuple):
    """Activations under way to the host.

    Attributes:
        key: Whose.
        operation: Its index.
        num_bytes: How many.
    """

    key: _Key
    operation: int
    num_bytes: int


def backward_follows(row: Sequence[Action]) -> frozenset[Action]:
    """The forwards after which a rank computes the backward of the same microbatch and stage at once."""
    computed = [action for action in row if action.kind.is_compute]
    return frozenset(
        first
        for first, second in pairwise(computed)
        if first.kind is ActionKind.FORWARD
        and second.kind is ActionKind.BACKWARD
        and (first.stage, first.microbatch) == (second.stage, second.microbatch)
    )


class OffloadedActivations:
    """Activations of one rank.

    All that a block keeps for its backward is copied to the host once its forward has ended, and let go of before the
    forward of the second next layer (of whatever microbatch) begins, for which the device waits: so the device holds
    activations of two layers of forward at most. When the backward of a block begins, copies that are still under way
    are waited for and let go of, but the block's own, which it then uses as they are; else its activations come back,
    if they have not been asked for yet. Then those of the block below it are asked for. The last block of a stage keeps
    its activations on the device where the backward of the same microbatch follows at once. Embedding and head, and
    receive buffers, are left alone.

    With ``plan.offload_layers`` = n only the first n of L blocks are moved, and the device holds L - n of them: each is
    let go of before the forward of the block L - n further on begins, and asked for when the device has let go of that
    many in backward (Transformer Engine, transformer_engine/pytorch/cpu_offload.py, DefaultOffloadSynchronizer).

    Device memory counts what is kept from the beginning of forward to the wait after the copy, and from the issue of
    the copy back to the end of backward; host memory from the issue of the first to the end of the second.

    Args:
        stages: Facts about the stages.
        writer: Takes the operations.
        host_waits: The host waits for every copy: on a CPU a copy is computation.
    """

    STATE: ClassVar = ("_leaving", "_on_host", "_coming")

    def __init__(self, stages: Stages, writer: RankWriter, *, host_waits: bool) -> None:
        self._stages, self._writer, self._host_waits = stages, writer, host_waits
        self._is_on = stages.plan.offload_activations
        num_blocks = sum(layer.kind is LayerKind.BLOCK for layers in stages.layers for layer in layers)
        self._moved = stages.plan.offload_layers or num_blocks
        stays = max(1, num_blocks - self._moved)
        self._held_ahead, self._asked_ahead = stays, max(1, stays - 1)
        self._at_once = frozenset[Action]()
        self._leaving: deque[_Copy | None] = deque()  # one for each layer, the newest last
        self._on_host: dict[_Key, int] = {}
        self._coming: dict[_Key, int] = {}

    def start(self, row: Sequence[Action]) -> None:
        """Begins a step of the rank with these actions."""
        self._at_once = backward_follows(row) if self._is_on else frozenset()

    @property
    def expands(self) -> bool:
        """Whether actions must be written layer by layer, because something happens between layers."""
        return self._is_on

    def before_forward(self, action: Action) -> None:
        """Lets go of all but what the layers before have kept, one or as many as stay on the device."""
        while len(self._leaving) > self._held_ahead:
            self._let_go(action, self._leaving.popleft())

    def after_forward(self, action: Action, part: range) -> None:
        """Sends off what some layers have kept."""
        if not self._is_on:
            return
        num_bytes = self._kept_bytes(action, part)
        if not num_bytes:
            self._leaving.append(None)
            return
        key = (action.stage, action.microbatch, part.start)
        held = [MemoryEffect(_HOST, num_bytes, num_bytes)]
        index = self._copy(action, part, num_bytes, held, to_host=True)
        self._leaving.append(_Copy(key, index, num_bytes))

    def before_backward(self, action: Action, part: range) -> None:
        """Waits for what some layers have kept, and asks for what comes next."""
        layers = self._stages.layers[action.stage]
        if not self._is_on or all(layers[position].kind is not LayerKind.BLOCK for position in part):
            return
        key = (action.stage, action.microbatch, part.start)
        while self._leaving:
            copy = self._leaving.popleft()
            if copy is not None and copy.key == key and len(part) == 1:  # at Level 1 all goes and comes in one piece
                self._writer.block_on(copy.operation)
                self._writer.compute(action, "keep", memory=[_freed(_HOST, copy.num_bytes)])
                continue
            self._let_go(action, copy)
        self._fetch(action, part)
        self._writer.block_on(self._coming.pop(key, None))
        if len(part) == 1 and part.start >= self._asked_ahead:
            first = part.start - self._asked_ahead
            self._fetch(action, range(first, first + 1))

    def _let_go(self, action: Action, copy: _Copy | None) -> None:
        if copy is None:
            return
        self._on_host[copy.key] = copy.num_bytes
        self._writer.block_on(copy.operation)
        self._writer.compute(action, "let go", memory=[_freed(_ACTIVATIONS, copy.num_bytes)])

    def _fetch(self, action: Action, part: range) -> None:
        key = (action.stage, action.microbatch, part.start)
        num_bytes = self._on_host.pop(key, 0)
        if num_bytes:
            effects = [MemoryEffect(_ACTIVATIONS, num_bytes, num_bytes), MemoryEffect(_HOST, 0, -num_bytes)]
            self._coming[key] = self._copy(action, part, num_bytes, effects, to_host=False)

    def _copy(self, action: Action, part: range, num_bytes: int, memory: list[MemoryEffect], *, to_host: bool) -> int:
        what = "offload" if to_host else "fetch"
        name = f"{what} {{{part.start if len(part) == 1 else 'action'}}}"
        waits = [self._writer.last_compute, *self._writer.blocking]
        index = self._writer.host_copy(action, name, num_bytes, waits, memory, to_host=to_host)
        if self._host_waits:
            self._writer.block_on(index)
        return index

    def _kept_bytes(self, action: Action, part: range) -> int:
        layers = self._stages.layers[action.stage]
        blocks = [position for position in part if layers[position].kind is LayerKind.BLOCK]
        if action in self._at_once:
            last = max(position for position, layer in enumerate(layers) if layer.kind is LayerKind.BLOCK)
            blocks = [position for position in blocks if position != last]
        if self._stages.plan.offload_layers is not None:  # without a pipeline, so all blocks are of one stage
            first = min(position for position, layer in enumerate(layers) if layer.kind is LayerKind.BLOCK)
            blocks = [position for position in blocks if position - first < self._moved]
        return sum(self._stages.facts(action.stage, position).footprint.activations for position in blocks)


def _freed(category: MemoryCategory, num_bytes: int) -> MemoryEffect:
    """Frees before anything else happens."""
    return MemoryEffect(category, -num_bytes, -num_bytes)
