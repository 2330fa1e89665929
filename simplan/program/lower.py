"""Lowers a complete Level 1 table to a Program of Level 1 or Level 2 operations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from simplan.program.action import Action, ActionKind, Table
from simplan.program.buckets import ddp_buckets
from simplan.program.complete import last_backwards, stage_to_rank
from simplan.program.footprint import (
    LayerFootprint,
    layer_footprint,
    layers_effects,
    owned_parameters,
    resting_bytes,
)
from simplan.program.program import (
    COMPUTE_STREAM,
    LayerWork,
    MemoryCategory,
    MemoryEffect,
    Message,
    Op,
    Phase,
    Program,
)
from simplan.program.timeline import SpanKind
from simplan.spec.layer import LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan, RankMapping, StageAssignment
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["lower"]

_K = ActionKind


def lower(
    model: ModelSpec,
    training: TrainingSpec,
    plan: ParallelPlan,
    software: SoftwareSpec,
    assignment: StageAssignment,
    table: Table,
    *,
    level: int,
    fold_replicas: bool,
    expand_all: bool = True,
) -> Program:
    """The Program of one step.

    What each action becomes: F and B compute the stage's layers (Level 2: one operation each); B waits for its RECV,
    as F does. With data parallelism the last backward of a stage also reduces the gradients: Level 2 in DDP's
    buckets, each as soon as its gradients are there, Level 1 in one piece afterwards; the stage's next computation
    waits for them, as DDP's end of backward does. A message is issued when the host gets to it, that is, after the
    computation before it. REDUCE_GRAD divides gradients by the number of microbatches. OPTIM waits for all sends,
    all-reduces gradients of tied embeddings that sit on two ranks, and updates.

    Args:
        model, training, plan, software, assignment: What is run.
        table: A complete table that ``check_table`` accepts.
        level: 1 or 2.
        fold_replicas: Write out one data-parallel replica only; right when ranks share nothing but their groups.
        expand_all: At Level 2, expand also the actions in which nothing communicates. Their layers run back to back,
            so the step takes the same time without; for large Programs that are not drawn.
    """
    assert level in (1, 2)
    mapping = RankMapping(plan.pp, plan.dp)
    shared = _Shared(model, training, plan, software, assignment, table, level, mapping)
    shared.expand_all = expand_all
    replicas = range(1 if fold_replicas else plan.dp)
    ops: list[Op] = []
    ranks: list[int] = []
    resting: dict[int, dict[MemoryCategory, int]] = {}
    rebuild: dict[int, int] = {}
    for pp_rank in range(plan.pp):
        for dp_rank in replicas:
            rank = mapping.rank(pp_rank, dp_rank)
            lowering = _RankLowering(shared, pp_rank, dp_rank, len(ops))
            ops.extend(lowering.run(table[pp_rank]))
            ranks.append(rank)
            resting[rank] = shared.resting[pp_rank]
            rebuild[rank] = resting[rank][MemoryCategory.GRADIENTS] if plan.dp > 1 else 0
    return Program(level, table, tuple(ops), tuple(ranks), plan.dp if fold_replicas else 1, resting, rebuild)


class _Shared:
    """What all ranks of one lowering have in common."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        plan: ParallelPlan,
        software: SoftwareSpec,
        assignment: StageAssignment,
        table: Table,
        level: int,
        mapping: RankMapping,
    ) -> None:
        self.plan, self.software, self.level, self.mapping = plan, software, level, mapping
        self.expand_all = True
        self._segments: dict[tuple[int, range, Phase], tuple[tuple[LayerWork, ...], tuple[MemoryEffect, ...]]] = {}
        self.state = software.state_bytes[training.precision]  # type: ignore[index]
        self.num_stages = assignment.num_stages
        self.placement = stage_to_rank(table)
        self.last_backward = last_backwards(table)
        self.num_microbatches = 1 + max(a.microbatch or 0 for row in table for a in row)
        self.layers: list[list[LayerSpec]] = [
            [model.layers[i] for i in assignment.layer_range(stage)] for stage in range(self.num_stages)
        ]
        self.owned = [owned_parameters(layers) for layers in self.layers]
        self.footprints: list[list[LayerFootprint]] = [
            [layer_footprint(layer, plan.microbatch_size, self.state) for layer in layers] for layers in self.layers
        ]
        for footprints in self.footprints[1:]:
            # the input of a later stage is its receive buffer, which is counted there
            first = footprints[0]
            footprints[0] = first._replace(activations=first.activations - first.input_bytes)
        self.boundary_bytes = model.layers[0].output_elements * plan.microbatch_size * self.state.boundary
        self.tied_bytes = sum(
            p.num_elements * self.state.gradient for p in model.layers[-1].parameters if p.name in model.layers[-1].tied
        )
        self.resting = [self._resting(rank, training) for rank in range(len(table))]
        if not software.grad_overlap:
            self.bucket_limits = (2**62, 2**62)
        elif plan.bucket_bytes is not None:
            self.bucket_limits = (plan.bucket_bytes, plan.bucket_bytes)
        else:
            self.bucket_limits = (software.bucket_bytes, software.first_bucket_bytes)

    def _resting(self, pp_rank: int, training: TrainingSpec) -> dict[MemoryCategory, int]:
        stages = sorted(stage for stage, rank in self.placement.items() if rank == pp_rank)
        neighbours = [n for stage in stages for n in (stage - 1, stage + 1) if 0 <= n < self.num_stages]
        receives = sum(self.placement[n] != pp_rank for n in neighbours)
        return resting_bytes(
            [layer for stage in stages for layer in self.layers[stage]],
            training,
            self.software,
            dp=self.plan.dp,
            receive_bytes=receives * self.num_microbatches * self.boundary_bytes,
        )

    def segment(self, stage: int, part: range, phase: Phase) -> tuple[tuple[LayerWork, ...], tuple[MemoryEffect, ...]]:
        """Work and memory effects of some layers of a stage, in the order in which the phase runs them.

        Every microbatch gets the same objects, so that what follows can tell equal work by identity.
        """
        key = (stage, part, phase)
        found = self._segments.get(key)
        if found is None:
            order = part if phase is Phase.FORWARD else range(part.stop - 1, part.start - 1, -1)
            work = tuple(
                LayerWork(self.layers[stage][i], phase, self.plan.microbatch_size, self.owned[stage][i]) for i in order
            )
            effects: tuple[MemoryEffect, ...] = ()
            if phase in (Phase.FORWARD, Phase.BACKWARD):
                footprints = [self.footprints[stage][i] for i in order]
                effects = layers_effects(footprints, forward=phase is Phase.FORWARD)
            found = self._segments[key] = (work, effects)
        return found

    def stage_work(self, stage: int, phase: Phase) -> tuple[LayerWork, ...]:
        """A phase of all layers of a stage."""
        return self.segment(stage, range(len(self.layers[stage])), phase)[0]

    @property
    def tied_ends(self) -> tuple[int, int] | None:
        """Pipeline ranks that hold the two copies of a tied embedding, when they are two."""
        ends = self.placement[0], self.placement[self.num_stages - 1]
        return ends if self.tied_bytes and ends[0] != ends[1] else None


@dataclass
class _RankLowering:
    """Writes the operations of one rank, in host issue order."""

    shared: _Shared
    pp_rank: int
    dp_rank: int
    first: int  # index of the rank's first operation in the Program
    ops: list[Op] = field(default_factory=list)
    received: dict[Action, int] = field(default_factory=dict)
    last_compute: int | None = None
    sends: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.shared.mapping.rank(self.pp_rank, self.dp_rank)

    def run(self, row: Sequence[Action]) -> list[Op]:
        """The operations of a row of the table."""
        for action in row:
            match action.kind:
                case _K.FORWARD:
                    self._forward(action)
                case _K.BACKWARD:
                    self._backward(action)
                case _K.SEND_F | _K.SEND_B | _K.RECV_F | _K.RECV_B:
                    self._message(action)
                case _K.REDUCE_GRAD:
                    work = self.shared.stage_work(action.stage, Phase.SCALE) if self.shared.num_microbatches > 1 else ()
                    self._compute(action, str(action), work)
                case _K.OPTIM:
                    self._optimizer(action)
                case _:
                    raise AssertionError(f"{action} is not lowered")
        return self.ops

    def _add(
        self,
        action: Action,
        stream: str,
        name: str,
        kind: SpanKind,
        work: tuple[LayerWork, ...] | Message,
        waits: Sequence[int | None] = (),
        meeting: Hashable | None = None,
        memory: Sequence[MemoryEffect] = (),
    ) -> int:
        known = tuple(wait for wait in waits if wait is not None)
        self.ops.append(Op(self.rank, stream, name, action, kind, work, known, meeting, tuple(memory)))
        return self.first + len(self.ops) - 1

    def _compute(
        self,
        action: Action,
        name: str,
        work: tuple[LayerWork, ...],
        waits: Sequence[int | None] = (),
        memory: Sequence[MemoryEffect] = (),
        kind: SpanKind = SpanKind.COMPUTE,
    ) -> int:
        self.last_compute = self._add(action, COMPUTE_STREAM, name, kind, work, waits, None, memory)
        return self.last_compute

    def _forward(self, action: Action) -> None:
        awaited = self.received.get(Action(action.stage, _K.RECV_F, action.microbatch))
        for part in self._parts(action.stage, self.shared.expand_all):
            work, effects = self.shared.segment(action.stage, part, Phase.FORWARD)
            self._compute(action, self._name(action, part), work, (awaited,), effects)
            awaited = None

    def _backward(self, action: Action) -> None:
        shared, stage = self.shared, action.stage
        awaited = self.received.get(Action(stage, _K.RECV_B, action.microbatch))
        reduces = shared.plan.dp > 1 and shared.last_backward[stage] == action
        ended: dict[int, int] = {}
        for part in reversed(self._parts(stage, shared.expand_all or reduces)):
            work, effects = shared.segment(stage, part, Phase.BACKWARD)
            if reduces:  # gradients are divided by the number of data-parallel ranks before they are summed
                work += shared.segment(stage, part, Phase.SCALE)[0]
            index = self._compute(action, self._name(action, part), work, (awaited,), effects)
            awaited = None
            ended.update(dict.fromkeys(part, index))
        if reduces:
            self._reduce(action, ended)

    def _reduce(self, action: Action, ended: dict[int, int]) -> None:
        """All-reduces of the stage's gradients, and the wait for them."""
        shared, stage = self.shared, action.stage
        group = shared.mapping.dp_group(self.pp_rank)
        bucket_bytes, first_bucket_bytes = shared.bucket_limits if shared.level == 2 else (2**62, 2**62)
        buckets = ddp_buckets(shared.layers[stage], shared.state.gradient, bucket_bytes, first_bucket_bytes)
        indices = []
        for number, bucket in enumerate(buckets):
            indices.append(
                self._add(
                    action,
                    "grad",
                    f"bucket {number}" if shared.level == 2 else "all_reduce",
                    SpanKind.COMMUNICATION,
                    Message("all_reduce", bucket.num_bytes, group),
                    (ended[bucket.ready_layer],),
                    ("reduce", stage, number),
                )
            )
        self._compute(action, "wait for gradients", (), indices)

    def _message(self, action: Action) -> None:
        stage, kind, microbatch = action
        assert microbatch is not None
        sends = kind in (_K.SEND_F, _K.SEND_B)
        forward = kind in (_K.SEND_F, _K.RECV_F)
        other_stage = stage + (1 if forward == sends else -1)
        other = self.shared.mapping.rank(self.shared.placement[other_stage], self.dp_rank)
        ends = (self.rank, other) if sends else (other, self.rank)
        source_stage = stage if sends else other_stage
        num_bytes = self.shared.boundary_bytes
        # a send keeps its tensor alive until it is waited for at the end of the step
        effect = (MemoryEffect(MemoryCategory.BUFFERS, num_bytes, num_bytes),) if sends else ()
        index = self._add(
            action,
            kind.value.lower(),
            str(action),
            SpanKind.COMMUNICATION,
            Message("send", num_bytes, ends),
            (self.last_compute,),
            ("F" if forward else "B", source_stage, microbatch, self.dp_rank),
            effect,
        )
        if sends:
            self.sends.append(index)
        else:
            self.received[action] = index

    def _optimizer(self, action: Action) -> None:
        shared = self.shared
        stages = sorted(stage for stage, rank in shared.placement.items() if rank == self.pp_rank)
        waits: list[int | None] = list(self.sends)
        if shared.tied_ends and self.pp_rank in shared.tied_ends:
            ends = tuple(shared.mapping.rank(pp_rank, self.dp_rank) for pp_rank in shared.tied_ends)
            waits.append(
                self._add(
                    action,
                    "tied",
                    "all_reduce tied embedding",
                    SpanKind.COMMUNICATION,
                    Message("all_reduce", shared.tied_bytes, ends),
                    (*self.sends, self.last_compute),
                    ("tied", self.dp_rank),
                )
            )
        work = tuple(item for stage in stages for item in shared.stage_work(stage, Phase.OPTIMIZER))
        held = len(self.sends) * shared.boundary_bytes
        release = (MemoryEffect(MemoryCategory.BUFFERS, -held, -held),) if held else ()
        self._compute(action, str(action), work, waits, release, SpanKind.OPTIMIZER)

    def _parts(self, stage: int, expand: bool) -> Sequence[range]:
        """Layers that one operation computes: all of them at Level 1, one at Level 2."""
        num_layers = len(self.shared.layers[stage])
        if self.shared.level == 1 or not expand:
            return (range(num_layers),)
        return [range(i, i + 1) for i in range(num_layers)]

    def _name(self, action: Action, part: range) -> str:
        if len(part) == len(self.shared.layers[action.stage]):
            return str(action)
        first = sum(len(self.shared.layers[s]) for s in range(action.stage))
        layer = self.shared.layers[action.stage][part[0]]
        number = first + part[0]
        return f"{layer.kind} {number - 1}" if layer.kind == "block" else str(layer.kind)
