"""FSDP2 hooks: all-gathers, frees and gradient reductions around the layers of a rank, in torch's order.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard and torch/distributed/pipelining/stage.py. Without a pipeline, a
unit is unsharded before its forward. A unit that was resharded is unsharded again before its backward, prefetched one
unit ahead. Gradients are reduce-scattered after the unit's backward. Experts sharded over the ranks with the same
experts are a nested unit, all-gathered after the enclosing unit and reduced before it. Both are placed around the whole
layer here (torchtitan prefetches both, torchtitan/models/llama4/infra/parallelize.py). In a pipeline, UNSHARD
all-gathers a whole stage, gradients accumulate unsharded, and REDUCE_GRAD reduces them. Frozen weights are all-gathered
like others and have no gradients to reduce. A frozen embedding is even prefetched in backward, which never reaches it;
its buffer is freed at the end of backward.

``plan.offload_optimizer`` is CPUOffloadPolicy: shards of parameters, gradients and optimizer states are in pinned host
memory. Before each all-gather, a unit's shards are copied to the device in the dtype in which they are stored. The copy
runs on the stream that copies into the all-gather's buffer. In a pipeline, whose all-gathers are explicit, the copy
runs on the compute stream. Reduced gradients are copied to the host after the reduction. The host waits for these
copies only at the end of backward. If an earlier microbatch left gradients, the host adds to them immediately and waits
for each copy. Where host and device share one memory, nothing is copied: a reduction's output is the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from simplan.model.layer import CollectiveKind
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.fsdp_units import Unit, merged_units, unit_of_layer, units_at
from simplan.program.lowering.hooks import Hooks
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.program import Communication, HostCalls, LayerWork, MemoryCategory, MemoryEffect, Phase, Stream
from simplan.program.timeline import SpanKind

_GATHERED, _BUFFERS, _GRADIENTS = MemoryCategory.GATHERED, MemoryCategory.BUFFERS, MemoryCategory.GRADIENTS
_HOST = MemoryCategory.HOST


class FsdpHooks(Hooks):
    """FSDP2 hooks of one rank.

    Args:
        stages, writer, level: As for ``Hooks``. At Level 1 a stage is one unit.
        host_waits: True if the host blocks on collectives that were not requested asynchronously, as with gloo.
    """

    STATE: ClassVar = (
        "_copied",
        "_forward_buffer_bytes",
        "_reduce_buffer_bytes",
        "_reduced_bytes",
        "_last_scatter",
        "last_reduction",
        "_last_copy",
    )
    STAGE_STATE: ClassVar = ("gathering", "_gathered", "_accumulated", "_narrow", "_reduced", "_made")

    def __init__(self, stages: Stages, writer: RankWriter, level: int, *, host_waits: bool) -> None:
        super().__init__(stages, writer, level)
        self._host_waits = host_waits
        plan, state = stages.plan, stages.state
        self._in_pipeline = plan.pp > 1
        reshards = plan.zero_stage == 3 and plan.reshard_after_forward and not self._in_pipeline
        self._reshards = reshards or stages.is_second_model  # no backward follows
        self.shard_group = stages.mapping.group("shard", writer.rank)
        self._expert_group = stages.mapping.group("expert_shard", writer.rank)
        apart = stages.plan.replicas_apart
        self._replicate_group = () if apart else stages.mapping.group("replicate", writer.rank)
        self.num_shards = len(self.shard_group)
        self._casts = state.gathered != state.parameter
        self._drops = plan.offload_optimizer or stages.software.drops_gradients
        # experts that no other rank has are in no unit
        self._holds_experts = self._drops and not plan.offload_optimizer and plan.ep > 1 and plan.expert_shards == 1
        self._copies_to_host = plan.offload_optimizer and not host_waits
        self.units: dict[int, tuple[Unit, ...]] = {
            stage: stages.units[stage] if level == 2 else merged_units(stages.units[stage])
            for stage in stages.stages_of(stages.mapping.place(writer.rank).pp)
        }
        self._unit_of = {stage: unit_of_layer(units) for stage, units in self.units.items()}
        self._first = {s: units_at([unit.layers[0] for unit in units]) for s, units in self.units.items()}
        self._last = {s: units_at([unit.layers[-1] for unit in units]) for s, units in self.units.items()}
        # units of the stage being lowered
        self.gathering: dict[int, int] = {}  # unit -> its all-gather, not yet waited for
        self._gathered: set[int] = set()
        self._accumulated: set[int] = set()  # units whose unsharded gradients are held
        self._narrow: set[int] = set()  # units with gradients not yet added to the accumulated ones
        self._reduced: set[int] = set()  # units whose reduced gradients are held, if those are freed after the update
        self._copied: list[int] = []  # the last two copies out of all-gather buffers
        self._forward_buffer_bytes = 0  # of the last all-gather in forward, freed with the next
        self._reduce_buffer_bytes = 0  # of the last reduction, freed with the next
        self._reduced_bytes = 0  # outputs that hybrid sharding holds to the end
        self._last_scatter: int | None = None
        self.last_reduction: int | None = None
        self._last_copy: int | None = None  # of reduced gradients to the host

    def expands(self, action: Action) -> bool:
        """Returns True for all actions without a pipeline: units are unsharded and reduced between layers.

        In a pipeline, unsharded gradients accumulate layer by layer in the first backward of a stage. They do so in
        every backward if gradients are computed in another dtype than the one of accumulation.
        """
        if not self._in_pipeline:
            return True
        changes_dtype = self.stages.state.gathered != self.stages.state.accumulated
        units = range(len(self.units[action.stage]))
        accumulates = changes_dtype or any(index not in self._accumulated for index in units)
        return action.kind is not ActionKind.FORWARD and accumulates

    def before_forward(self, action: Action, part: range) -> None:
        """All-gathers the units that begin with these layers."""
        stage = action.stage
        if self.level == 2 and self.makes_gradients(stage, part[-1]):
            self._hold_unsharded(action, [self._unit_of[stage][part[-1]]])
        if self._in_pipeline:
            self._settle(action)
            return
        for index in self._beginning(action, part):
            if index not in self._gathered:
                # the first one waits for all before it, the others for the copy-out of the buffer before the last
                waits = [self.writer.last_compute] if part.start == 0 else self._copied[-2:-1]
                self.gather(action, index, waits)
                self.copy_out(action, index, in_forward=True)
        if self._at_head(stage, part):  # the last buffer goes between the model and the loss
            freed = self._forward_buffer_bytes
            self._forward_buffer_bytes = 0
            effects = [*self.computed.loss_effects(stage, forward=True), MemoryEffect(_BUFFERS, 0, -freed)]
            self.writer.compute(action, "model", memory=effects)
            if self.stages.is_second_model:  # no backward begins with these units
                self._reshard(action, self._ending(action, part))

    def after_forward(self, action: Action, part: range) -> None:
        """Reshards the units that end with these layers."""
        if self._in_pipeline:
            return
        stage, effects = action.stage, list[MemoryEffect]()
        for index in self._ending(action, part):
            unit = self.units[stage][index]
            if self._reshards and not unit.stays and index in self._gathered:
                self._gathered.discard(index)
                effects.append(MemoryEffect.freeing(_GATHERED, unit.gathered_bytes(self.stages.state)))
        if part.stop == len(self.stages.layers[stage]) and self._forward_buffer_bytes:
            effects.append(MemoryEffect.freeing(_BUFFERS, self._forward_buffer_bytes))
            self._forward_buffer_bytes = 0
        if effects:
            self.writer.compute(action, "reshard", memory=effects)

    def before_backward(self, action: Action, part: range) -> None:
        """Waits for the unit whose backward comes next, and prefetches the one after it."""
        stage = action.stage
        index = self._unit_of[stage][part[-1]]
        if self._in_pipeline:
            self._settle(action)
            return
        unit = self.units[stage][index]
        if unit.layers[-1] not in part or not unit.has_backward:
            return
        if self._at_head(stage, part):  # no prefetch before the backward of the loss is done
            self.writer.compute(action, "loss", memory=self.stages.loss_effects(stage, forward=False))
        for index in sorted(self._ending(action, part), reverse=True):  # experts after the enclosing unit
            if index not in self._gathered:
                if index not in self.gathering:
                    self.gather(action, index, [])
                self.copy_out(action, index, in_forward=False)
            for ahead in self.units_ahead(self.units[stage][index], index):
                if ahead not in self._gathered and ahead not in self.gathering:
                    self.gather(action, ahead, self._copied[-1:])

    def units_ahead(self, unit: Unit, index: int) -> range:
        """Returns the units that backward prefetches while it processes a unit.

        That is the unit whose forward ended before. After several forwards in a step this is, for the first unit, the
        last one of an earlier forward, whose backward is done, and nothing uses what is gathered.
        """
        if index == 0 and self.repeats_forward:
            return range(len(self.units[self.writer.stage]) - 1, len(self.units[self.writer.stage]) - 2, -1)
        del unit
        return range(index - 1, max(-1, index - 2), -1)

    def after_backward(self, action: Action, part: range, phase: Phase) -> None:
        """Reduces complete unsharded gradients if this backward synchronizes; otherwise accumulates them.

        The hooks of a split backward do not see new weight gradients, which stay in the dtype of the weights. The next
        input-gradient pass finds them, and adds them, upcast, to the accumulated ones.
        """
        stage, state, beginning = action.stage, self.stages.state, self._beginning(action, part)
        if self._holds_experts and phase is not Phase.BACKWARD_INPUT:
            new = {*part} - self._made
            self._made |= new
            self._change_gradients(action, sum(self.stages.experts[stage][layer] for layer in new))
        if phase is Phase.BACKWARD_INPUT:
            self._widen(action, [index for index in beginning if index in self._narrow])
        elif phase is Phase.BACKWARD_WEIGHT and state.gathered != state.accumulated:
            narrow = [index for index in beginning if index not in self._narrow]
            self._narrow |= {*narrow}
            held = self._trained(stage, narrow) * state.gathered
            if held:
                self.writer.compute(action, "hold gradients", memory=[MemoryEffect(_GRADIENTS, held, held)])
        elif phase is Phase.BACKWARD_WEIGHT or self._in_pipeline:
            self._hold_unsharded(action, [i for i in beginning if not self._made_in_forward(stage, i)])
        elif self.units[stage][self._unit_of[stage][part[0]]].layers[0] in part:  # else a tied weight has more to come
            for index in reversed(beginning):
                if self._synchronizes and self.units[stage][index].trained:
                    adds = state.is_flat and index in self._accumulated
                    if adds:  # before the reduction, which is of the sum
                        self._hold_unsharded(action, [index])
                    self.reduce_unit(action, index, made_now=not adds)
                else:
                    self._hold_unsharded(action, [index])
                    if self._reshards or not state.is_flat:  # FSDP1 with SHARD_GRAD_OP waits for a reduction
                        self._reshard(action, [index])

    def end_of_backward(self, action: Action) -> None:
        """Waits for the last reduction, and for prefetched units that backward did not use."""
        if self._in_pipeline:
            return
        for index in [*self.gathering]:
            self.writer.block_on(self.gathering.pop(index))
            freed = self.units[action.stage][index].gathered_bytes(self.stages.state)
            self.writer.compute(action, "drop", memory=[MemoryEffect.freeing(_BUFFERS, freed)])
        if self._synchronizes:
            self._finish(action)

    def unshard(self, action: Action) -> None:
        """All-gathers all units of the stage together; the stage's next compute waits for all of them."""
        for index in self._in_order_of_modules(action):
            self.gather(action, index, [self.writer.last_compute], in_background=True)

    def reshard(self, action: Action) -> None:
        """Frees the parameters of the stage that are still unsharded."""
        self._reshard(action, range(len(self.units[action.stage])), "{action}")

    def reduce(self, action: Action) -> None:
        """Reduces all units of the stage; only in a pipeline."""
        if not self._in_pipeline:
            return
        for index in self._in_order_of_modules(action):
            self._widen(action, [index] if index in self._narrow else [])
            if self.units[action.stage][index].trained:
                self.reduce_unit(action, index, made_now=False)
            else:
                self._reshard(action, [index])
        self._finish(action)

    def _made_in_forward(self, stage: int, index: int) -> bool:
        """Returns True if forward has added the gradients of a unit, a head's small ones aside."""
        unit = self.units[stage][index]
        return index in self._accumulated and len(unit.layers) == 1 and self.makes_gradients(stage, unit.layers[0])

    def _at_head(self, stage: int, part: range) -> bool:
        return self.level == 2 and part.stop == len(self.stages.layers[stage])

    def _settle(self, action: Action) -> None:
        """Copies out the units of a stage in its first compute after UNSHARD."""
        for index in self._in_order_of_modules(action):
            if index in self.gathering:
                self.copy_out(action, index, in_forward=False)

    @property
    def _synchronizes(self) -> bool:
        return self.is_last_backward or self.stages.plan.reduces_every_microbatch

    def gather(self, action: Action, index: int, waits: Sequence[int | None], *, in_background: bool = False) -> None:
        """Issues the all-gather of a unit, and before it the copy from the host if parameters are offloaded."""
        state, unit = self.stages.state, self.units[action.stage][index]
        num_bytes = unit.gathered_bytes(state)
        group = self._group(unit)
        cast_bytes = unit.trained_padded * state.gathered // len(group) if self._casts else 0
        if self._host_waits and not in_background:
            waits = [self.writer.last_compute]
        if self._copies_to_host:
            fetched_bytes = unit.stored_bytes(state) // len(group)
            # cast parameter by parameter; without casts all stay until they are in the all-gather's buffer
            cast_bytes = cast_bytes if self._casts else fetched_bytes
            name = self.name(action, index, "fetch")
            waits = [self.writer.host_copy(action, name, fetched_bytes, waits, (), to_host=False)]
            if in_background:  # on the stream of computation
                self.writer.block_on(*waits)
        gather = self.writer.collective(
            action,
            Stream.SHARD,
            self.name(action, index, "all_gather"),
            Communication(CollectiveKind.ALL_GATHER, num_bytes, group),
            waits,
            [MemoryEffect(_BUFFERS, num_bytes + cast_bytes + self._copied_by_gloo(num_bytes), num_bytes)],
        )
        self.gathering[index] = gather
        if self._host_waits and not in_background:
            self.writer.block_on(gather)

    def copy_out(self, action: Action, index: int, *, in_forward: bool) -> None:
        """Waits for the all-gather of a unit and copies the unit to where it is used.

        In forward the buffer of the previous unit is freed; a variable in torch references it until after the copy.
        """
        unit = self.units[action.stage][index]
        num_bytes = unit.gathered_bytes(self.stages.state)
        freed = self._forward_buffer_bytes if in_forward else num_bytes
        buffers = MemoryEffect(_BUFFERS, 0, -freed)
        if in_forward:
            self._forward_buffer_bytes = num_bytes
        self.writer.block_on(self.gathering.pop(index))
        memory = [MemoryEffect(_GATHERED, num_bytes, num_bytes), buffers]
        copied = self.writer.compute(
            action, self.name(action, index, "copy"), self._copy(action, index, Phase.GATHER_COPY), memory
        )
        self._copied = [*self._copied[-1:], copied]
        self._gathered.add(index)

    def _in_order_of_modules(self, action: Action) -> list[int]:
        """Returns all units of a stage: that of code between modules, then layer by layer, nested ones after theirs."""
        layers, units = self.stages.layers[action.stage], self.units[action.stage]
        found = self._beginning(action, range(len(layers)))
        return sorted(found, key=lambda index: not layers[units[index].layers[0]].in_root)

    def _beginning(self, action: Action, part: range) -> list[int]:
        """Returns the units whose first layer is in ``part``."""
        return [index for layer in part for index in self._first[action.stage].get(layer, ())]

    def _ending(self, action: Action, part: range) -> list[int]:
        """Returns the units whose last layer is in ``part``."""
        return [index for layer in part for index in self._last[action.stage].get(layer, ())]

    def _trained(self, stage: int, indices: Iterable[int]) -> int:
        """Returns the trained elements of some units."""
        return sum(self.units[stage][index].trained for index in indices)

    def _group(self, unit: Unit) -> tuple[int, ...]:
        """Returns the ranks over which a unit is sharded."""
        return self._expert_group if unit.experts else self.shard_group

    def _gradient_bytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's reduced gradients."""
        return unit.trained_padded * self.stages.state.gradient // len(self._group(unit))

    def dropped_gradients(self) -> int:
        """Returns bytes of reduced gradients on the device that are freed after the update."""
        if not self._drops or self.stages.plan.offload_optimizer or self._updates:
            return 0
        experts = sum(sum(self.stages.experts[stage]) for stage in self.units) if self._holds_experts else 0
        units = (unit for units in self.units.values() for unit in units)
        return experts * self.stages.state.gradient + sum(map(self._gradient_bytes, units))

    def _widen(self, action: Action, indices: list[int]) -> None:
        """Adds gradients in the dtype of the weights to the accumulated gradients, and frees them."""
        if not indices:
            return
        self._narrow -= {*indices}
        freed = self._trained(action.stage, indices) * self.stages.state.gathered
        self._hold_unsharded(action, indices)
        self.writer.compute(action, "widen gradients", memory=[MemoryEffect.freeing(_GRADIENTS, freed)])

    def _hold_unsharded(self, action: Action, indices: list[int]) -> None:
        """Holds unsharded gradients of units until they are reduced; later gradients are added to them."""
        state = self.stages.state
        new = [index for index in indices if index not in self._accumulated]
        self._accumulated |= {*new}
        held = self._trained(action.stage, new) * state.accumulated
        # gradients are computed in the precision of the weights and upcast unit by unit
        narrow = max(self.units[action.stage][index].trained for index in indices) * state.gathered if indices else 0
        during = held + (narrow if state.gathered != state.accumulated else 0)
        if state.is_flat:  # gradients of all weights are there, and the flat one made of them, which then is added
            during = held + narrow + (0 if new else narrow)
        if during:
            self.writer.compute(action, "hold gradients", memory=[MemoryEffect(_GRADIENTS, during, held)])

    def reduce_unit(self, action: Action, index: int, *, made_now: bool) -> None:
        """Reduce-scatters a unit's gradients over its shards; with replicas, all-reduces the shard.

        With host offload, the reduced shard is then copied to the host.
        """
        state, unit = self.stages.state, self.units[action.stage][index]
        whole_bytes, input_bytes = unit.trained * state.gathered, unit.trained_padded * state.reduced
        group = self._group(unit)
        output_bytes = input_bytes // len(group)
        held_bytes = unit.trained * state.accumulated if index in self._accumulated else 0
        self._accumulated.discard(index)
        # new gradients of the same precision are added in place to the accumulated ones
        adds_in_place = held_bytes > 0 and state.gathered == state.accumulated
        extra = whole_bytes if made_now and not adds_in_place else 0
        memory = [
            MemoryEffect(_GRADIENTS, extra, -held_bytes),
            MemoryEffect(_BUFFERS, input_bytes - self._reduce_buffer_bytes, input_bytes - self._reduce_buffer_bytes),
        ]
        if index in self._gathered:  # resharded before the buffer is made
            self._gathered.discard(index)
            gathered_bytes = unit.gathered_bytes(state)
            memory.append(MemoryEffect(_GATHERED, -gathered_bytes, -gathered_bytes))
        self._reduce_buffer_bytes = input_bytes
        self.writer.block_on(self._last_scatter)
        copied = self.writer.compute(
            action, self.name(action, index, "copy"), self._copy(action, index, Phase.REDUCE_COPY), memory
        )
        replicated = len(self._replicate_group) > 1
        is_first = self._drops and index not in self._reduced
        self._reduced |= {index} if is_first else set()
        stays = is_first and not self._copies_to_host  # the output is the gradient, or is cast to it
        gradient_bytes = self._gradient_bytes(unit)
        cast_bytes = gradient_bytes if state.reduced != state.gradient else 0
        category = _HOST if self.stages.plan.offload_optimizer else _GRADIENTS
        held_until_end = output_bytes if replicated and not stays else 0
        copy_bytes = self._copied_by_gloo(input_bytes)
        reduction = self.writer.collective(
            action,
            Stream.SHARD,
            self.name(action, index, "reduce_scatter"),
            Communication(CollectiveKind.REDUCE_SCATTER, input_bytes, group),
            (copied, None if replicated else self._last_copy),  # copies to the host follow the last collective
            [
                MemoryEffect(_BUFFERS, output_bytes + copy_bytes, held_until_end),
                *([MemoryEffect(category, cast_bytes, gradient_bytes)] if stays else []),
            ],
        )
        self._last_scatter = reduction
        if replicated:
            self._reduced_bytes += held_until_end
            reduction = self.writer.collective(
                action,
                Stream.REPLICATE,
                self.name(action, index, "all_reduce"),
                Communication(CollectiveKind.ALL_REDUCE, output_bytes, self._replicate_group),
                (reduction, self._last_copy),
            )
        if self._copies_to_host:
            reduction = self._last_copy = self._send_home(action, index, reduction, is_first=is_first)
        if self._updates:
            reduction = self._update_unit(action, index, reduction)
        self.last_reduction = reduction
        if self._host_waits:
            self.writer.block_on(reduction)

    def _update_unit(self, action: Action, index: int, reduction: int) -> int:
        """Updates a unit by hooks of its reduced gradients, and frees these; returns the index of the update.

        FSDP2 calls the hooks on the stream of the last reduction, next to the backward of other units
        (``_fsdp_collectives.py``, ``foreach_reduce``).
        """
        unit, name = self.units[action.stage][index], self.name(action, index, "update")
        scratch, freed = self.states.scratch_bytes(action.stage, unit.layers), self._gradient_bytes(unit)
        memory = [MemoryEffect(MemoryCategory.WORKSPACE, scratch, 0), MemoryEffect(_GRADIENTS, 0, -freed)]
        work = self.update_work(action.stage, unit.layers)
        if self._host_waits:  # hooks run in the thread of backward
            self.writer.block_on(reduction)
            return self.writer.compute(action, name, work, memory, SpanKind.OPTIMIZER)
        stream = Stream.REPLICATE if len(self._replicate_group) > 1 else Stream.SHARD
        return self.writer.callback(action, stream, name, work, (reduction,), memory, SpanKind.OPTIMIZER)

    def _send_home(self, action: Action, index: int, reduction: int, *, is_first: bool) -> int:
        """Copies a unit's reduced gradients to the host, which adds them to those present; returns the copy's index."""
        unit = self.units[action.stage][index]
        num_shards, num_bytes = len(self._group(unit)), self._gradient_bytes(unit)
        memory = [MemoryEffect(_HOST, num_bytes, num_bytes if is_first else 0)]
        name = self.name(action, index, "offload")
        copy = self.writer.host_copy(action, name, num_bytes, (reduction,), memory, to_host=True)
        if not is_first:
            self.writer.block_on(copy)
            whole = self._work(action, index, Phase.ACCUMULATE)
            work = tuple(w._replace(num_parameters=-(-w.num_parameters // num_shards), on_host=True) for w in whole)
            self.writer.compute(action, self.name(action, index, "add"), work, kind=SpanKind.HOST)
        return copy

    def _reshard(self, action: Action, indices: Iterable[int], name: str = "reshard") -> None:
        """Frees the unsharded parameters of some units."""
        gathered = [index for index in indices if index in self._gathered]
        self._gathered -= {*gathered}
        num_bytes = sum(self.units[action.stage][index].gathered_bytes(self.stages.state) for index in gathered)
        if num_bytes:
            self.writer.compute(action, name, memory=[MemoryEffect.freeing(_GATHERED, num_bytes)])

    def _copied_by_gloo(self, num_bytes: int) -> int:
        """Returns the bytes gloo copies: input of a reduction, output of an all-gather (ProcessGroupGloo.cpp)."""
        return num_bytes if self._host_waits else 0

    def _finish(self, action: Action) -> None:
        """Waits for the last reduction and frees its buffers."""
        freed = self._reduce_buffer_bytes + self._reduced_bytes
        self._reduce_buffer_bytes = self._reduced_bytes = 0
        self.writer.block_on(self.last_reduction)  # torch waits for all-reduces of replicas here only
        self._last_scatter = self.last_reduction = self._last_copy = None
        self.writer.compute(
            action, "wait for gradients", memory=[MemoryEffect.freeing(_BUFFERS, freed)] if freed else []
        )

    def _copy(self, action: Action, index: int, phase: Phase) -> tuple[LayerWork, ...]:
        return () if self.stages.software.runtime == "xla" else self._work(action, index, phase)

    def _work(self, action: Action, index: int, phase: Phase) -> tuple[LayerWork, ...]:
        unit = self.units[action.stage][index]
        return self.stages.work(action.stage, unit.layers, phase, of="experts" if unit.experts else "rest")

    def name(self, action: Action, index: int, what: str) -> str:
        """Returns the name of an operation on a unit."""
        unit = self.units[action.stage][index]
        if self.level == 1:
            return what
        return f"{what} {{{unit.layers[0]}}}{' experts' if unit.experts else ''}"


class FsdpListHooks(FsdpHooks):
    """FSDP hooks of one rank, with host-side handling per matrix and rank; arguments as for ``FsdpHooks``."""

    def units_ahead(self, unit: Unit, index: int) -> range:
        """Returns no units if a matrix of this unit reaches the limit of live elements; otherwise as in FSDP."""
        return range(0) if self._leaves_no_room(unit) else super().units_ahead(unit, index)

    def gather(self, action: Action, index: int, waits: Sequence[int | None], *, in_background: bool = False) -> None:
        """All-gathers a unit; the host creates views before it and copies during it.

        Unless a matrix reaches the limit of live elements, the all-gather overlaps with earlier compute.
        """
        unit = self.units[action.stage][index]
        alone = self._leaves_no_room(unit)
        listed = self._list_parts(action, index, len(unit.matrices), copies=False)
        super().gather(action, index, [listed] if alone else waits, in_background=in_background)
        self._list_parts(action, index, len(unit.matrices), copies=True)
        if alone:
            self.writer.block_on(self.gathering[index])

    def copy_out(self, action: Action, index: int, *, in_forward: bool) -> None:
        """In backward, all-gathers again the matrices that were freed after recomputation."""
        super().copy_out(action, index, in_forward=in_forward)
        limit, unit = self.stages.software.live_elements, self.units[action.stage][index]
        repeats = any(self.stages.facts(action.stage, layer).kept.kernels for layer in unit.layers)
        if in_forward or limit is None or self.level == 1 or not repeats:
            return
        again = [size for i, size in enumerate(unit.matrices) if 2 * sum(unit.matrices[i + 1 :]) >= limit]
        if again:
            listed = self._list_parts(action, index, len(again), copies=False)
            communication = Communication(
                CollectiveKind.ALL_GATHER, sum(again) * self.stages.state.gathered, self.shard_group
            )
            name = self.name(action, index, "all_gather again")
            gathered = self.writer.collective(action, Stream.SHARD, name, communication, [listed])
            self._list_parts(action, index, len(again), copies=True)
            self.writer.block_on(gathered)

    def reduce_unit(self, action: Action, index: int, *, made_now: bool) -> None:
        """Reduces a unit after the host created views and copied from them; the host waits for the result."""
        num_matrices = len(self.units[action.stage][index].matrices)
        self._list_parts(action, index, num_matrices, copies=False)
        self._list_parts(action, index, num_matrices, copies=True)
        super().reduce_unit(action, index, made_now=made_now)
        self.writer.block_on(self.last_reduction)

    def _list_parts(self, action: Action, index: int, num_matrices: int, *, copies: bool) -> int | None:
        """Records host calls for each rank's part of ``num_matrices`` matrices; returns the operation's index."""
        if not num_matrices:
            return self.writer.last_compute
        calls = HostCalls(num_matrices * self.num_shards, copies)
        name = self.name(action, index, "copy parts" if copies else "list parts")
        return self.writer.compute(action, name, (calls,), kind=SpanKind.HOST)

    def _leaves_no_room(self, unit: Unit) -> bool:
        limit = self.stages.software.live_elements
        return limit is not None and max(unit.matrices, default=0) >= limit
