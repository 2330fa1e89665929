"""Activation offload of blocks to host memory (``plan.offload_activations``), and the timing of its copies.

A copy to the host starts when a block's forward ends, and the copy back starts one block ahead of its backward.
torchtune's OffloadActivations and Megatron Core's CPU offloading do the same. ``plan.offload_optimizer`` is in
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

_ACTIVATIONS, _HOST = MemoryCategory.ACTIVATIONS, MemoryCategory.HOST

_Key = tuple[int, int | None, int]
"""Stage, microbatch (None for none) and first layer."""


class _Copy(NamedTuple):
    """A copy of activations to the host."""

    key: _Key
    operation: int
    num_bytes: int


def backward_follows(row: Sequence[Action]) -> frozenset[Action]:
    """Returns the forwards directly followed by the backward of the same microbatch and stage on their rank."""
    computed = [action for action in row if action.kind.is_compute]
    return frozenset(
        first
        for first, second in pairwise(computed)
        if first.kind is ActionKind.FORWARD
        and second.kind is ActionKind.BACKWARD
        and (first.stage, first.microbatch) == (second.stage, second.microbatch)
    )


class OffloadedActivations:
    """Activation offload of one rank.

    When the forward of a block ends, all its activations saved for backward are copied to the host. The device copy is
    freed before the forward of the second next layer (of any microbatch), for which the device waits for the copy. The
    device therefore holds activations of at most two layers of forward. When the backward of a block begins, pending
    copies of other blocks are waited for and freed. If the block's own copy is pending, backward uses the tensors on
    the device; otherwise they are fetched, unless prefetched. The block below is then prefetched. The last block of a
    stage is not offloaded if the backward of the same microbatch follows directly. Embedding, head and receive buffers
    are not offloaded.

    With ``plan.offload_layers`` = n only the first n of L blocks are offloaded, and the device holds L - n blocks. Each
    offloaded block is freed before the forward of the block L - n + 1 (at least 2) further on. A block is prefetched at
    the backward of the block L - n - 1 (at least 1) further on (Transformer Engine,
    transformer_engine/pytorch/cpu_offload.py, DefaultOffloadSynchronizer).

    Device memory counts saved activations from the start of forward to the wait for the copy. A second period is from
    the issue of the copy back to the end of backward. Host memory counts them from the issue of the first copy to the
    end of the second.

    Args:
        host_waits: True if the host blocks on every copy: on a CPU a copy is compute.
    """

    STATE: ClassVar = ("_leaving", "_on_host", "_coming")

    def __init__(self, stages: Stages, writer: RankWriter, *, host_waits: bool) -> None:
        self._stages, self._writer, self._host_waits = stages, writer, host_waits
        num_blocks = sum(layer.kind is LayerKind.BLOCK for layers in stages.layers for layer in layers)
        self._moved = stages.plan.offload_layers or num_blocks
        stays = max(1, num_blocks - self._moved)
        self._held_ahead, self._asked_ahead = stays, max(1, stays - 1)
        self._at_once = frozenset[Action]()
        self._leaving: deque[_Copy | None] = deque()  # one for each layer, the newest last
        self._on_host: dict[_Key, int] = {}
        self._coming: dict[_Key, int] = {}

    def start(self, row: Sequence[Action]) -> None:
        """Begins a step of the rank with the actions of its row."""
        self._at_once = backward_follows(row)

    def before_forward(self, action: Action) -> None:
        """Frees offloaded activations of earlier layers, except of the newest ones, which may stay on the device."""
        while len(self._leaving) > self._held_ahead:
            self._let_go(action, self._leaving.popleft())

    def after_forward(self, action: Action, part: range) -> None:
        """Starts the copy of some layers' saved activations to the host."""
        num_bytes = self._kept_bytes(action, part)
        if not num_bytes:
            self._leaving.append(None)
            return
        key = (action.stage, action.microbatch, part.start)
        held = [MemoryEffect(_HOST, num_bytes, num_bytes)]
        index = self._copy(action, part, num_bytes, held, to_host=True)
        self._leaving.append(_Copy(key, index, num_bytes))

    def before_backward(self, action: Action, part: range) -> None:
        """Waits for some layers' saved activations, and prefetches the next ones."""
        layers = self._stages.layers[action.stage]
        if all(layers[position].kind is not LayerKind.BLOCK for position in part):
            return
        key = (action.stage, action.microbatch, part.start)
        while self._leaving:
            copy = self._leaving.popleft()
            if copy is not None and copy.key == key and len(part) == 1:  # at Level 1 all layers are copied together
                self._writer.block_on(copy.operation)
                self._writer.compute(action, "keep", memory=[MemoryEffect.freeing(_HOST, copy.num_bytes)])
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
        self._writer.compute(action, "free", memory=[MemoryEffect.freeing(_ACTIVATIONS, copy.num_bytes)])

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
