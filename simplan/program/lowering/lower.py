"""Lowering of a complete action table to a Program of Level 1 or Level 2 operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

import numpy as np

from simplan.job import Job
from simplan.model.implementations.expert_dispatch import SM_FRACTION
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import Place, RankGroup, StageAssignment
from simplan.program.action import Action, ActionKind, Table
from simplan.program.folding import Folding, unfolded
from simplan.program.lowering.fsdp import FsdpHooks, FsdpListHooks
from simplan.program.lowering.hooks import DdpHooks, Hooks
from simplan.program.lowering.offload import OffloadedActivations
from simplan.program.lowering.optimizer_step import complete_gradients, step_optimizer
from simplan.program.lowering.script import IssuedCollective, Scripts, Segment, in_order
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.stamping import OpIndex, ProgramBuilder, restore_state, take_state
from simplan.program.lowering.walk import ActionTemplate, ActionVariant, Integers, RowWalk, Walker, row_of_actions
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates, second_model_bytes
from simplan.program.program import (
    Communication,
    HostWait,
    MemoryCategory,
    MemoryEffect,
    OverlapRemainder,
    Phase,
    Program,
    Stream,
    Work,
    gc_paused,
    magnitude_bytes,
)
from simplan.program.sequence import in_sequence
from simplan.program.size import refuse_many_bytes, refuse_many_operations
from simplan.program.timeline import SpanKind

if TYPE_CHECKING:
    from simplan.program.lowering.passes import ForwardPass

_K = ActionKind
_BACKWARD_PHASE = {
    _K.BACKWARD: Phase.BACKWARD,
    _K.BACKWARD_INPUT: Phase.BACKWARD_INPUT,
    _K.BACKWARD_WEIGHT: Phase.BACKWARD_WEIGHT,
}
_OUTER_BYTES = 4
"""Bytes of an element of the outer parameters, of outer momentum, and of buffers that workers push."""
RoundPart = Literal["step", "send", "merge"]
_AXIS_STREAM = {"tp": Stream.TENSOR, "cp": Stream.CONTEXT, "ep": Stream.EXPERT, "etp": Stream.EXPERT}


@dataclass(frozen=True, slots=True)
class Lowering:
    """Options for lowering an action table.

    Attributes:
        level: 1 for one operation per action and merged communication; 2 for one operation per layer.
        folding: Ranks to simulate; None for all ranks.
        expand_all: True to expand, at Level 2, also actions between whose layers nothing can overlap. False merges the
            layers of such an action into one operation and its collectives into another, with the same step time. Use
            False for large Programs.
        host_waits: True if the host blocks on collectives that are not asynchronous (gloo on CPUs), and on copies
            between host and device memory, which are one memory there.
    """

    level: int = 2
    folding: Folding | None = None
    expand_all: bool = True
    host_waits: bool = False


@gc_paused()
def lower(job: Job, assignment: StageAssignment, table: Table, how: Lowering) -> Program:
    """Lowers one step to a Program.

    F, B, I and W compute the layers of their stage. At Level 2 each layer is one operation, split at its tensor-,
    context- and expert-parallel collectives. B and I also recompute what was not saved. F, B and I wait for their RECV.
    In preference training F has passes in forward alone besides (``simplan.program.lowering.passes``).
    A send or receive is issued after the compute before it. Hooks (``simplan.program.lowering.hooks``,
    ``simplan.program.lowering.fsdp``) add the communication of data parallelism. REDUCE_GRAD all-reduces gradients of
    which tensor-parallel ranks hold partial sums, averages gradients of experts, and divides all by the number of
    microbatches. OPTIM waits for all sends and for the host of the trainer. It all-reduces gradients of an embedding
    tied across two ranks, clips gradients (``simplan.program.lowering.optimizer_step``) and updates parameters. It then
    broadcasts or all-gathers sharded updates (ZeRO-1).

    Args:
        job: Training job; of its cluster, only the node groups count.
        table: A complete action table that ``check_table`` accepts.
    """
    return Lowerer(job, assignment, table, how).program(table)


class Lowerer:
    """Lowers action tables of one plan that differ in the number of microbatches; common parts are created once.

    Args:
        job, assignment, how: See ``lower``.
        table: Any of the tables; defines the rank of each stage.
    """

    def __init__(self, job: Job, assignment: StageAssignment, table: Table, how: Lowering) -> None:
        assert how.level in (1, 2)
        self._job, self._how = job, how
        self._stages = Stages(job, assignment, table)
        self._folding = how.folding or unfolded(self._stages.mapping)
        self._builder = ProgramBuilder()
        by_size = {job.plan.microbatch_size: _Passes(job, self._stages, assignment, table)}
        for size in {*job.plan.sizes_of_ranks} - by_size.keys():
            own = job.with_plan(job.plan.model_copy(update={"microbatch_size": size}))
            by_size[size] = _Passes(own, Stages(own, assignment, table), assignment, table)
        self._by_size = by_size
        self._leaders: dict[Hashable, tuple[_RankLowering, list[int]]] = {}  # with the stages of the leader

    def _leader(self, rank: int) -> tuple[_RankLowering, dict[int, int]]:
        """Returns the lowering of a rank with the same work, and own stage -> corresponding stage of that rank."""
        job, mapping = self._job, self._stages.mapping
        group, passes = job.group_of(rank), self._by_size[job.plan.sizes_of_ranks[mapping.dp_rank(rank)]]
        stages = passes.stages
        own = stages.stages_of(mapping.place(rank).pp)
        is_folded = len(self._folding.ranks) < mapping.world_size
        key = _rank_key(stages, rank, is_folded=is_folded), group
        if key not in self._leaders:
            found = _RankLowering(passes, rank, self._builder, self._how, self._folding, group)
            self._leaders[key] = found, own
        leader, leading = self._leaders[key]
        return leader, dict(zip(own, leading, strict=True))

    def round_of(self, table: Table) -> Program:
        """Lowers steps that end with an outer step of replicas that train alone, or beside which it communicates.

        Raises:
            SpecError: They have too many operations.
        """
        replication = self._job.plan.replication
        assert replication is not None
        updates = tuple(tuple(action for action in row if action.kind is _K.OPTIM) for row in table)
        step, send, merge = self.program(table), self.program(updates, "send"), self.program(updates, "merge")
        beside = replication.steps_beside
        parts = [send, *[step] * beside, merge] if beside else [step, send, merge]
        return in_sequence(parts, carried=Stream.REPLICATE)

    def program(self, table: Table, part: RoundPart = "step") -> Program:
        """Lowers an action table to a Program.

        Args:
            part: What OPTIM does: the optimizer step of the replica, or the beginning or end of an outer step.

        Raises:
            SpecError: It has too many operations.
        """
        stages, builder, folding = self._stages, self._builder, self._folding
        width, ranks = stages.mapping.ranks_per_stage, folding.ranks
        num_microbatches = 1 + max(action.microbatch or 0 for row in table for action in row)
        builder.restart()
        walks: dict[tuple[int, int], tuple[RowWalk, Integers, Integers]] = {}
        leader_of: dict[int, _RankLowering] = {}

        def walk(rank: int) -> tuple[RowWalk, Integers, Integers]:
            leader, leading = self._leader(rank)
            leader.part = part
            pp_rank, leader_of[rank] = rank // width, leader
            if (leader.rank, pp_rank) not in walks:
                walks[leader.rank, pp_rank] = leader.walk(table[pp_rank], leading)
            return walks[leader.rank, pp_rank]

        column = [rank for rank in ranks if rank % width == ranks[0] % width]
        of_column = sum(int(walk(rank)[0].num_ops.sum()) for rank in column)  # others have about as many operations
        refuse_many_operations(self._job, of_column * len(ranks) // len(column), len(ranks), num_microbatches)
        for rank in ranks:
            walked = walk(rank)
            builder.start(rank, leader_of[rank].rank, stages.mapping)
            builder.stamp(*walked)
        leaders = {leader.rank: leader for leader in leader_of.values()}
        software, how = stages.software, self._how
        # old buckets live while new ones are made only if gradients are views of them
        keeps_old = software.runtime == "torch" and not (software.ddp_copies_gradients or software.drops_gradients)
        compression = stages.plan.compression
        if compression is not None and compression.depends_on_buckets:  # made before there are states and errors
            keeps_old = False
        resting = {rank: leader.persistent_bytes() for rank, leader in leaders.items()}
        rebuilt = {rank: leader.bucket_bytes() if keeps_old else 0 for rank, leader in leaders.items()}
        program = Program(
            how.level,
            table,
            builder.columns(),
            tuple(builder.names),
            tuple(builder.works),
            tuple(builder.effects),
            folding.ranks,
            folding.stands_for,
            {rank: resting[leader.rank] for rank, leader in leader_of.items()},
            {rank: rebuilt[leader.rank] for rank, leader in leader_of.items()},
            one_memory=how.host_waits,
            paged_bytes={r: leader.states.paged_bytes for r, leader in leader_of.items() if leader.states.paged_bytes},
            layer_names=stages.layer_names,
            all_written_out=how.level == 2 and how.expand_all and len(folding.ranks) == len(folding.stands_for),
        )
        refuse_many_bytes(self._job, magnitude_bytes(program))
        return program


class _Passes:
    """The trained pass of a microbatch, and those in forward alone, with the scripts of their layers."""

    def __init__(self, job: Job, stages: Stages, assignment: StageAssignment, table: Table) -> None:
        self.stages, self.scripts = stages, Scripts(stages)
        self.in_forward: list[tuple[ForwardPass, Stages, Scripts]] = []
        if not job.training.is_of_preferences:
            return
        from simplan.program.lowering.passes import forward_passes  # only where needed

        self.in_forward = [
            (each, own, Scripts(own)) for each in forward_passes(job) for own in (Stages(job, assignment, table, each),)
        ]


@dataclass(slots=True)
class _Pass:
    """A pass of one rank through the layers of a stage.

    Attributes:
        name: Suffix of the names of its operations; empty for the trained pass.
    """

    name: str
    stages: Stages
    scripts: Scripts
    hooks: Hooks
    comes_first: bool = False


def _stage_key(stages: Stages, stage: int) -> Hashable:
    """Returns a key that is equal for stages with equal layers, saved tensors and relative neighbors."""
    own = stages.placement[stage]
    around = [stages.placement.get(stage + step) for step in (-1, 1)]
    return (
        tuple(id(stages.facts(stage, position)) for position in range(len(stages.layers[stage]))),
        tuple(layer.key for layer in stages.layers[stage]),
        tuple(stages.trained[stage]),
        tuple(stages.experts[stage]),
        tuple(None if other is None else other - own for other in around),
        tuple(map(tuple, stages.crossings[max(0, stage - 1) : stage + 1])),
        stage == 0,
    )


def _rank_key(stages: Stages, rank: int, *, is_folded: bool) -> Hashable:
    """Returns a key that is equal for ranks with the same work, apart from their stages and peers.

    Args:
        is_folded: True if some ranks are not simulated: columns then meet different numbers of ranks.
    """
    place, plan = stages.mapping.place(rank), stages.plan
    deals = plan.shards_optimizer_only and stages.software.optimizer_shards != "elements"
    has_servers = plan.replication is not None and plan.replication.has_servers
    if deals or plan.offload_activations or has_servers:  # optimizer shards, names of offloads, and routes to servers
        return rank
    column = place._replace(pp=-1)
    if not is_folded:
        shard = (place.dp_shard, place.cp) if stages.shards_partial_gradients_unevenly else (-1, -1)
        column = Place(-1, -1, *shard, -1)
    return column, tuple(_stage_key(stages, stage) for stage in stages.stages_of(place.pp))


class _RankLowering:
    """Lowers the actions of a rank to templates, and stamps them for all ranks with the same work."""

    def __init__(
        self,
        passes: _Passes,
        rank: int,
        builder: ProgramBuilder,
        how: Lowering,
        folding: Folding,
        group: int | None,
    ) -> None:
        stages, self.passes = passes.stages, passes
        self.stages, self.rank, self.how = stages, rank, how
        self.pp_rank = stages.mapping.place(rank).pp
        self.synchronous = stages.plan.schedule in stages.software.blocking_p2p_schedules
        ordered = not how.host_waits and not self.synchronous  # unordered transfers are in one batch and may overtake
        ahead = stages.plan.schedule in stages.software.prefetch_receive_schedules and not how.host_waits
        self.builder = builder
        self.walker = Walker()
        self.numbers: dict[Hashable, int] = defaultdict(count().__next__)  # by key of a template
        self.writer = RankWriter(
            rank,
            builder,
            folding,
            ordered_communications=ordered,
            prefetch_receive_schedules=ahead,
            group=group,
        )
        self.hooks = _hooks(stages, self.writer, how)
        self.trained = _Pass("", stages, passes.scripts, self.hooks)
        self.second_model: Hooks | None = None
        self.in_forward = [self._in_forward(*each) for each in passes.in_forward]
        self.offload = None
        if stages.plan.offload_activations:
            self.offload = OffloadedActivations(stages, self.writer, host_waits=how.host_waits)
        self.states = self.hooks.states = RankStates(stages, rank)
        self.groups = stages.mapping.layer_collective_groups(rank)
        self.overlaps = stages.plan.cp > 1 and stages.plan.cp_comm == "ring" and not how.host_waits
        self.merged_collectives: dict[tuple[str, int, range, str, Phase, bool], tuple[Work, ...]] = {}
        self.is_paired = self.receives = False
        self.part: RoundPart = "step"
        self.alike = self._alike_stages()
        self.received: list[int] = []  # receives that the pass being lowered needs
        self.new_received: list[int] = []
        self.sent: list[int] = []
        self.sent_bytes = 0
        every = [*{id(hooks): hooks for hooks in (self.hooks, *(each.hooks for each in self.in_forward))}.values()]
        stateful: list[RankWriter | Hooks | OffloadedActivations] = [self.writer, *every]
        stateful += [] if self.offload is None else [self.offload]
        self.common = [(each, name) for each in stateful for name in each.STATE]
        self.of_stage = [(hooks, name) for hooks in every for name in hooks.STAGE_STATE]
        self.shapes_of_stage: dict[Hashable, int] = defaultdict(count().__next__)
        self.first_shapes = (
            builder.shape(take_state(self.common)[0]),
            self.shapes_of_stage[take_state(self.of_stage)[0]],
        )

    def _in_forward(self, of: ForwardPass, stages: Stages, scripts: Scripts) -> _Pass:
        """Returns a pass in forward alone, with the hooks of its weights; passes of a second model share them."""
        hooks = self.hooks
        if of.is_apart:
            if self.second_model is None:
                self.second_model = _hooks(stages, self.writer, self.how)
            hooks = self.second_model
        hooks.repeats_forward = True
        return _Pass(f" {of.name}", stages, scripts, hooks, of.comes_first)

    def walk(self, row: Sequence[Action], leading: Mapping[int, int]) -> tuple[RowWalk, Integers, Integers]:
        """Returns a row of the action table: each action as lowered in the state that the rank has reached.

        Args:
            row: Row of this rank, or of one with the same work.
            leading: Stage of the row -> corresponding stage of this rank.

        Returns:
            Templates, stages and microbatches; see ``ProgramBuilder.stamp``.
        """
        overlaps = self.stages.software.expert_overlap and not self.how.host_waits
        actions, stage, microbatch, variant, needs, variants = row_of_actions(
            row, synchronous=self.synchronous, overlaps_experts=overlaps
        )
        if self.offload is not None:
            self.offload.start(row)
        leaders = [each.at_stage(leading) for each in variants]
        numbers = [self.numbers[self._template_key(each)] for each in leaders]
        kinds = np.array(numbers, np.int64)[variant]
        if self.offload is not None:  # offloads are identified by their microbatch
            kinds = np.array([self.numbers[pair] for pair in zip(kinds.tolist(), microbatch.tolist(), strict=True)])

        def lowered(place: int, shape: int, of_stage: int, num_inputs: int, sent_bytes: int) -> ActionTemplate:
            of = leaders[variant[place]]
            action = of.action._replace(microbatch=actions[place].microbatch)
            return self._lowered(of._replace(action=action), shape, of_stage, num_inputs, sent_bytes)

        stages = np.unique(stage, return_inverse=True)[1].reshape(-1)
        return self.walker.run(kinds, needs, stages, (*self.first_shapes, 0), lowered), stage, microbatch

    def _template_key(self, variant: ActionVariant) -> Hashable:
        """Returns the key of an action's template; the state of the rank is the other part of it."""
        kind, stage = variant.action.kind, variant.action.stage
        alone = variant.is_first or kind is _K.OPTIM
        return kind, -1 - stage if alone else self.alike[stage], *variant[1:], self.part

    def _alike_stages(self) -> dict[int, int]:
        """Returns stage of the rank -> first stage whose passes have the same operations.

        Stages are distinct if activation offload depends on the stage.
        """
        stages, apart = self.stages, self.offload is not None
        keys = {stage: stage if apart else _stage_key(stages, stage) for stage in stages.stages_of(self.pp_rank)}
        first: dict[Hashable, int] = {}
        return {stage: first.setdefault(key, stage) for stage, key in keys.items()}

    def _lowered(
        self, variant: ActionVariant, shape: int, of_stage: int, num_inputs: int, sent_bytes: int
    ) -> ActionTemplate:
        """Lowers an action in the state of a shape.

        Args:
            shape: Number of the shape of the state common to all stages of the rank.
            of_stage: Number of the shape of the state of the action's stage.
            num_inputs: Number of operations that the action needs, in addition to those in the state.
            sent_bytes: Bytes held by pending sends.
        """
        self.is_paired, self.receives = variant.is_paired, variant.receives
        self.hooks.is_first_forward, self.hooks.is_last_backward = variant.is_first, variant.is_last
        builder = self.builder
        num_indices = restore_state(self.common, builder.structures[shape])
        num_indices = restore_state(self.of_stage, [*self.shapes_of_stage][of_stage], num_indices)
        self.writer.stage = variant.action.stage
        symbols: list[int] = [OpIndex(-1 - num_indices - k) for k in range(num_inputs)]
        self.received, self.new_received, self.sent, self.sent_bytes = symbols, [], [], sent_bytes
        self._write(variant.action)
        rows = self.writer.take_rows()
        structure, indices = take_state(self.common)
        own_structure, own_indices = take_state(self.of_stage)
        return ActionTemplate(
            builder.template_rows(rows),
            len(rows),
            builder.shape(structure),
            self.shapes_of_stage[own_structure],
            tuple(indices),
            tuple(own_indices),
            tuple(self.new_received),
            tuple(self.sent),
            self.sent_bytes - sent_bytes,
        )

    def _write(self, action: Action) -> None:
        match action.kind:
            case _K.FORWARD:
                self._forward(action)
            case _K.BACKWARD | _K.BACKWARD_INPUT | _K.BACKWARD_WEIGHT:
                self._backward(action)
            case _K.SEND_F | _K.SEND_B:
                self._communication(action)
            case _K.RECV_F | _K.RECV_B:
                if not self.synchronous:
                    self._communication(action)
            case _K.UNSHARD:
                self.hooks.unshard(action)
            case _K.RESHARD:
                self.hooks.reshard(action)
            case _K.REDUCE_GRAD:
                self.hooks.reduce(action)
                complete_gradients(action, self.states, self.writer)
            case _K.OPTIM if self.part == "step":
                self._optimizer(action)
            case _K.OPTIM:
                self._outer_step(action)

    def persistent_bytes(self) -> dict[MemoryCategory, int]:
        """Returns the persistent memory of the rank between steps by category, in bytes."""
        stages, software = self.stages, self.stages.software
        mine = stages.stages_of(self.pp_rank)
        crossed = [boundary for stage in mine for boundary in (stage - 1, stage) if stages.crosses(boundary)]
        received_bytes = sum(stages.boundary_bytes[b] for b in crossed) * stages.num_microbatches
        trained = self.states.elements.trained
        frozen = self.states.elements.weights - trained - self.states.elements.packed
        state = stages.state
        parameter_bytes = trained * state.parameter + frozen * state.frozen + self.states.elements.packed_bytes
        optimizer_bytes = self.states.optimizer_bytes
        outer_bytes = joined_bytes = 0
        if (replication := stages.plan.replication) is not None:
            outer_bytes = replication.num_outer_states * _OUTER_BYTES * trained
            if replication.has_servers:  # which have the states of the optimizer
                optimizer_bytes, joined_bytes = 0, _OUTER_BYTES * trained
        outer_on_host = replication is not None and replication.outer.on_host
        offloads = stages.plan.offload_optimizer  # gradients are there from the first reduction to the update only
        drops = software.drops_gradients
        gradient_bytes = (
            0 if offloads or drops else self.states.elements.gradients * (state.gradient + state.unaccumulated)
        )
        # else the buckets are the gradients
        buffer_bytes = self.bucket_bytes() if drops or software.ddp_copies_gradients else 0
        buffer_bytes += self.hooks.persistent_bytes() + joined_bytes
        sharded_bytes, whole_bytes, second_tables = self._second_model_bytes(mine)
        parameter_bytes += sharded_bytes
        return {
            MemoryCategory.HOST: (parameter_bytes + optimizer_bytes if offloads else 0)
            + outer_bytes * outer_on_host
            + (0 if self.how.host_waits else joined_bytes),
            MemoryCategory.PARAMETERS: (0 if offloads else parameter_bytes)
            + whole_bytes
            + stages.quantized_weight_bytes(mine),
            MemoryCategory.GRADIENTS: gradient_bytes,
            MemoryCategory.OPTIMIZER: (0 if offloads else optimizer_bytes) + outer_bytes * (not outer_on_host),
            MemoryCategory.BUFFERS: buffer_bytes + (received_bytes if software.preallocated_receives else 0),
            MemoryCategory.WORKSPACE: sum(stages.constant_bytes(stage) for stage in mine)
            + second_tables
            + stages.placeholder_bytes(mine)
            + (stages.batch_bytes if stages.all_have_batch or 0 in mine else 0),
        }

    def _second_model_bytes(self, mine: Sequence[int]) -> tuple[int, int, int]:
        """Returns bytes of a second model that the rank holds: of sharded and of whole weights, and of tables."""
        stages = next((own for _, own, _ in self.passes.in_forward if own.is_second_model), None)
        if stages is None:
            return 0, 0, 0
        num_bytes, tables = second_model_bytes(stages, self.rank), sum(map(stages.constant_bytes, mine))
        return (num_bytes, 0, tables) if stages.is_sharded else (0, num_bytes, tables)

    def bucket_bytes(self) -> int:
        """Returns the bytes of gradients in DDP's buckets; 0 without DDP."""
        if not isinstance(self.hooks, DdpHooks):
            return 0
        return (self.states.elements.trained - self.states.elements.experts) * self.stages.state.gradient

    def _forward(self, action: Action) -> None:
        self._receive(Action(action.stage, _K.RECV_F, action.microbatch))
        if self.stages.software.waits_for_batch:
            self.writer.compute(action, "{action} batch", (HostWait("batch"),), kind=SpanKind.HOST)
        first = [each for each in self.in_forward if each.comes_first]
        for of in first:
            self._pass_forward(action, of)
        kept_bytes = first[-1].stages.logits_bytes if first and self.stages.training.task == "asft" else 0
        if kept_bytes:  # of the reference, until the loss has compared them
            held = [MemoryEffect(MemoryCategory.LOGITS, kept_bytes, kept_bytes)]
            self.writer.compute(action, "hold logits of the reference", memory=held)
        for part in self._parts(action):
            if self.offload is not None:
                self.offload.before_forward(action)
            self.hooks.before_forward(action, part)
            self._layers(action, part, Phase.FORWARD, self.trained)
            self.hooks.after_forward(action, part)
            if self.offload is not None:
                self.offload.after_forward(action, part)
        if kept_bytes:
            freed = [MemoryEffect(MemoryCategory.LOGITS, 0, -kept_bytes)]
            self.writer.compute(action, "free logits of the reference", memory=freed)
        for of in (each for each in self.in_forward if not each.comes_first):
            self._pass_forward(action, of)

    def _pass_forward(self, action: Action, of: _Pass) -> None:
        """Writes a pass in forward alone."""
        for part in self._parts(action, of):
            with of.hooks.passing(of.stages):
                of.hooks.before_forward(action, part)
                self._layers(action, part, Phase.FORWARD, of)
                of.hooks.after_forward(action, part)

    def _backward(self, action: Action) -> None:
        if action.kind is not _K.BACKWARD_WEIGHT:
            self._receive(Action(action.stage, _K.RECV_B, action.microbatch))
        phase = _BACKWARD_PHASE[action.kind]
        if action.stage == 0:  # no rank needs the gradient of tokens: W does all of it, as in torch's pipelines
            if phase is Phase.BACKWARD_INPUT:
                self.writer.compute(action, "{action}")
                return
            phase = Phase.BACKWARD
        for part in in_order(self._parts(action), phase):
            self.hooks.before_backward(action, part)
            if self.offload is not None:
                self.offload.before_backward(action, part)
            self._layers(action, part, phase, self.trained)
            self.hooks.after_backward(action, part, phase)
        if phase is not Phase.BACKWARD_INPUT:
            self.hooks.end_of_backward(action)

    def _layers(self, action: Action, part: range, phase: Phase, of: _Pass) -> None:
        """Writes a pass through some layers."""
        stages, writer, paired = of.stages, self.writer, self.is_paired
        merged = not self._expands(action, of)
        scripts = of.scripts
        script = scripts.merged(action.stage, phase) if merged else scripts.layer(action.stage, part[0], phase)
        name = ("{action}" if len(part) == len(stages.layers[action.stage]) else f"{{{part[0]}}}") + of.name
        scaling = self.hooks.scaling(action, part) if phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT) else ()
        last = max(number for number, segment in enumerate(script) if segment.collective is None)
        before = (writer.last_compute, *writer.blocking)  # waits of the last segment
        for number, segment in enumerate(script):
            if segment.collective is None:
                before = (writer.last_compute, *writer.blocking)
                work = segment.work + scaling if number == last and scaling else segment.work
                kind = SpanKind.RECOMPUTE if segment.recompute else SpanKind.COMPUTE
                label = f"{name} recompute" if segment.recompute else name
                writer.compute(action, label, work, segment.memory, kind)
            elif not merged and not (paired and segment.collective.axis == "ep"):
                self._write_collective(action, name, segment.collective, before)
        for axis, stream in _AXIS_STREAM.items() if merged else [("ep", Stream.EXPERT)] if paired else ():
            where = of.name, action.stage, part
            collectives = self._merged_collectives_over(where, axis, script, phase, paired=paired)
            if collectives:
                writer.exposed(action, stream, f"{name} collectives", collectives)

    def _merged_collectives_over(
        self, where: tuple[str, int, range], axis: str, script: Sequence[Segment], phase: Phase, *, paired: bool
    ) -> tuple[Work, ...]:
        """Returns the collectives of merged layers over one axis; the same object for equal layers, estimated once.

        Collectives that overlap with GEMMs, or with another microbatch, contribute only their exposed time.
        """
        key = (*where, axis, phase, paired)
        found = self.merged_collectives.get(key)
        if found is None:
            collectives: list[Work] = []
            sm_fraction = SM_FRACTION[self.stages.software.expert_dispatch]
            for segment in script:
                if segment.collective is None or segment.collective.axis != axis:
                    continue
                communication = segment.collective.among(self.groups[axis])
                last = collectives[-1] if collectives else None
                overlaps_gemms = axis == "tp" and segment.collective.beside and not self.how.host_waits
                hidden = paired if axis == "ep" else overlaps_gemms
                if not hidden:
                    collectives.append(communication)
                elif segment.beside is not None:
                    collectives.append(
                        OverlapRemainder((communication,), segment.beside, sm_fraction if axis == "ep" else 0.0)
                    )
                else:
                    assert isinstance(last, OverlapRemainder)
                    collectives[-1] = last._replace(communications=(*last.communications, communication))
            found = self.merged_collectives[key] = tuple(collectives)
        return found

    def _write_collective(
        self, action: Action, name: str, layer_collective: IssuedCollective, before: Sequence[int | None]
    ) -> None:
        """Writes a collective that the next compute waits for; an overlapped one waits only for earlier operations."""
        begins = before if layer_collective.beside and not self.how.host_waits else (self.writer.last_compute,)
        communication = layer_collective.among(self.groups[layer_collective.axis])
        waits = [*begins, *self.writer.blocking]
        stream, name = _AXIS_STREAM[layer_collective.axis], f"{layer_collective.kind} {name}"
        self.writer.block_on(self.writer.collective(action, stream, name, communication, waits))

    def _receive(self, action: Action) -> None:
        """Makes the next compute wait for its receives; synchronous frameworks issue the receive only here."""
        if self.receives:
            self._communication(action)
            self.received, self.new_received = self.new_received, []
        self.writer.block_on(*self.received)

    def _communication(self, action: Action) -> None:
        stages, other_end = self.stages, action.other_end
        assert other_end is not None
        sends = action.kind in (_K.SEND_F, _K.SEND_B)
        other = self.rank + (stages.placement[other_end.stage] - self.pp_rank) * stages.mapping.ranks_per_stage
        ends = RankGroup.of("send", (self.rank, other) if sends else (other, self.rank))
        is_backward = action.kind in (_K.SEND_B, _K.RECV_B)
        for number, tensor in enumerate(stages.crossings[min(action.stage, other_end.stage)]):
            if is_backward and not tensor.returns:
                continue
            # a send keeps its tensor alive until its wait; a tensor that only passes through is in a receive buffer
            sent = 0 if action.kind is _K.SEND_F and tensor.passes else tensor.num_bytes
            held = sent if stages.software.runtime == "torch" else 0
            effects = (MemoryEffect(MemoryCategory.BUFFERS, sent, held),) if sends else ()
            num_bytes, gathered = tensor.num_bytes, None
            if stages.scatter_gather_p2p:
                gathered = Communication(CollectiveKind.ALL_GATHER, num_bytes, self.groups["tp"])
                num_bytes = -(-num_bytes // stages.plan.tp)
            stream = Stream(action.kind.lower())
            index = self.writer.send(action, stream, num_bytes, ends, effects, number=number, gathered=gathered)
            if sends:
                self.sent.append(index)
                self.sent_bytes += held
            else:
                self.new_received.append(index)
            if sends and self.synchronous:
                self.writer.send_first(index)

    def _optimizer(self, action: Action) -> None:
        """Writes the optimizer step after all sends have completed, and frees their memory."""
        self.writer.block_on(*self.received)  # for OPTIM: all sends
        held, dropped = self.sent_bytes, self.hooks.dropped_gradients()
        release = (MemoryEffect.freeing(MemoryCategory.BUFFERS, held),) if held else ()
        if dropped:  # after the update
            release = (*release, MemoryEffect(MemoryCategory.GRADIENTS, 0, -dropped))
        if self.stages.software.trainer:
            self.writer.compute(action, "host", (HostWait("step"),), kind=SpanKind.HOST)
        replication = self.stages.plan.replication
        if replication is not None and replication.has_servers:
            from simplan.program.lowering.servers import exchange_with_servers  # only where needed

            exchange_with_servers(action, self.states, self.writer, release, on_host=not self.how.host_waits)
            return
        if (compression := self.stages.plan.compression) is not None and compression.of_momentum:
            from simplan.program.lowering.compression import step_one_bit_adam  # only where needed

            step_one_bit_adam(action, self.states, self.writer, release)
            return
        step_optimizer(action, self.states, self.writer, release)

    def _outer_step(self, action: Action) -> None:
        """Writes the beginning or the end of an outer step."""
        from simplan.program.lowering.outer import OuterStep  # only where needed

        step = OuterStep(self.states, self.writer, self.stages.layers[action.stage][0])
        if self.part == "send":
            step.send(action)
        else:
            step.merge(action)

    def _parts(self, action: Action, of: _Pass | None = None) -> Sequence[range]:
        """Returns the layers per operation: all of the stage if merged, one each if expanded."""
        num_layers = len(self.stages.layers[action.stage])
        if self._expands(action, of or self.trained):
            return [range(i, i + 1) for i in range(num_layers)]
        return (range(num_layers),)

    def _expands(self, action: Action, of: _Pass) -> bool:
        """Returns True if each layer of the action has separate operations."""
        offloads = self.offload is not None  # copies happen between layers
        needed = self.how.expand_all or self.overlaps or offloads or of.hooks.expands(action)
        return self.how.level == 2 and needed


def _hooks(stages: Stages, writer: RankWriter, how: Lowering) -> Hooks:
    plan = stages.plan
    if stages.is_sharded:
        hooks = FsdpListHooks if stages.software.per_rank_tensor_lists else FsdpHooks
        return hooks(stages, writer, how.level, host_waits=how.host_waits)
    if plan.num_averaging == 1 or stages.is_second_model:
        return Hooks(stages, writer, how.level)
    if plan.compression is None:
        return DdpHooks(stages, writer, how.level)
    from simplan.program.lowering.compression import CompressedDdpHooks  # only where needed

    return CompressedDdpHooks(stages, writer, how.level, plan.compression)
