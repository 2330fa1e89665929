"""FSDP whose collectives take lists of tensors, matrix by matrix: ZeRO-3 of DeepSpeed before 2022.

For each matrix that is gathered or reduced the host makes a view for every rank, and torch copies from or to each,
while the device waits: with a thousand ranks that takes longer than the bytes. Before a gather the host waits for the
device and makes the views; the copies of what arrives are launched while NCCL moves bytes. A reduction begins when
views are made and copied from, and the host waits for it, as it looks for infinities in what comes out. DeepSpeed keeps
no more than so many elements gathered: nothing is gathered beside a matrix that is as large as that, and matrices of a
layer that ran again are gathered once more for its backward if as many elements are used in between.

Source: microsoft/DeepSpeed at c83e49f (2021-04-14), deepspeed/runtime/zero/partition_parameters.py (_allgather_param,
_reduce_scatter_gradient) and stage3.py (_synchronize_communication, prefetch_next_sub_modules, _keep_for_later,
update_overflow_tracker_for_param_grad); pytorch at v1.8, torch/lib/c10d/ProcessGroupNCCL.cpp (allgather copies after,
reduce_scatter before the collective).
"""

from __future__ import annotations

from collections.abc import Sequence

from simplan.model.layer import CollectiveKind
from simplan.program.action import Action
from simplan.program.lowering.fsdp import FsdpHooks
from simplan.program.lowering.units import Unit
from simplan.program.program import HostCalls, Message, Stream
from simplan.program.timeline import SpanKind

__all__ = ["FsdpListHooks"]


class FsdpListHooks(FsdpHooks):
    """Hooks of one rank; arguments as for ``FsdpHooks``."""

    def units_ahead(self, unit: Unit, index: int) -> range:
        """Nothing beside a unit that leaves no room."""
        return range(0) if self._leaves_no_room(unit) else super().units_ahead(unit, index)

    def gather(self, action: Action, index: int, waits: Sequence[int | None], *, in_background: bool = False) -> None:
        """The host makes views first, and copies while bytes move.

        Where there is room the bytes move beside what is computed before, matrix by matrix.
        """
        unit = self.units[action.stage][index]
        alone = self._leaves_no_room(unit)
        listed = self._list_parts(action, index, len(unit.matrices), copies=False)
        super().gather(action, index, [listed] if alone else waits, in_background=in_background)
        self._list_parts(action, index, len(unit.matrices), copies=True)
        if alone:
            self.writer.block_on(self.gathering[action.stage, index])

    def copy_out(self, action: Action, index: int, *, in_forward: bool) -> None:
        """In backward, what was let go of since it ran again is gathered once more."""
        super().copy_out(action, index, in_forward=in_forward)
        limit, unit = self.stages.software.live_elements, self.units[action.stage][index]
        repeats = any(self.stages.facts(action.stage, layer).kept.kernels for layer in unit.layers)
        if in_forward or limit is None or self.level == 1 or not repeats:
            return
        again = [size for i, size in enumerate(unit.matrices) if 2 * sum(unit.matrices[i + 1 :]) >= limit]
        if again:
            listed = self._list_parts(action, index, len(again), copies=False)
            message = Message(CollectiveKind.ALL_GATHER, sum(again) * self.stages.state.gathered, self.shard_group)
            name = self.name(action, index, "all_gather again")
            gathered = self.writer.collective(action, Stream.SHARD, name, message, [listed])
            self._list_parts(action, index, len(again), copies=True)
            self.writer.block_on(gathered)

    def reduce_unit(self, action: Action, index: int, *, made_now: bool) -> None:
        """The host makes views and copies from them first, and waits for what comes out."""
        num_matrices = len(self.units[action.stage][index].matrices)
        self._list_parts(action, index, num_matrices, copies=False)
        self._list_parts(action, index, num_matrices, copies=True)
        super().reduce_unit(action, index, made_now=made_now)
        self.writer.block_on(self.last_reduction)

    def _list_parts(self, action: Action, index: int, num_matrices: int, *, copies: bool) -> int | None:
        """The host handles the part of every rank of so many matrices."""
        if not num_matrices:
            return self.writer.last_compute
        calls = HostCalls(num_matrices * self.num_shards, copies)
        name = self.name(action, index, "copy parts" if copies else "list parts")
        return self.writer.compute(action, name, (calls,), kind=SpanKind.HOST)

    def _leaves_no_room(self, unit: Unit) -> bool:
        limit = self.stages.software.live_elements
        return limit is not None and max(unit.matrices, default=0) >= limit
