"""What all ranks of one lowering have in common: the layers of every stage, their work, memory and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simplan.program.action import Table
from simplan.program.complete import last_backwards, stage_to_rank
from simplan.program.footprint import LayerFootprint, layer_footprint, layers_effects, owned_parameters
from simplan.program.program import LayerWork, MemoryEffect, Phase
from simplan.program.units import Unit, fsdp_units
from simplan.spec.layer import Attention, CollectiveKind, Exchange, LayerKind, LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan, RankMapping, StageAssignment
from simplan.spec.recompute import Recomputation, recomputation
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Deal", "Segment", "Stages"]


Deal = tuple[dict[tuple[int, int], int], ...]
"""By rank of a shard group, elements it owns of (stage, layer)."""


class Segment(NamedTuple):
    """A piece of a layer's forward or backward: kernels, or an exchange between them.

    Attributes:
        work: What is computed; nothing for an exchange.
        recompute: The work is forward run again.
        memory: Its effects.
        exchange: The axis, kind and bytes of an exchange, and whether it runs beside the segment before it.
    """

    work: tuple[LayerWork, ...] = ()
    recompute: bool = False
    memory: tuple[MemoryEffect, ...] = ()
    exchange: tuple[str, CollectiveKind, int, bool] | None = None


class Stages:
    """Facts about the stages of a plan.

    Attributes:
        layers: By stage, its layers as one rank has them.
        owned: By stage and layer, the parameters it brings.
        units: By stage, FSDP's units; nothing where parameters are not sharded.
        boundary_bytes: What one rank sends to the next stage for one microbatch.
        deals: By pipeline rank, whose optimizer states are whose under ZeRO-1, once somebody asked.
        tied_bytes: Gradient of a tied embedding; 0 without.
    """

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        plan: ParallelPlan,
        software: SoftwareSpec,
        assignment: StageAssignment,
        table: Table,
    ) -> None:
        self.plan, self.training, self.software = plan, training, software
        self.state = software.state(training, plan)
        self.mapping = RankMapping.of(plan)
        self.placement = stage_to_rank(table)
        self.last_backward = last_backwards(table)
        self.num_stages = assignment.num_stages
        self.num_microbatches = 1 + max(action.microbatch or 0 for row in table for action in row)
        model_layers = model.layers_of(plan.shard)
        self.layers: list[list[LayerSpec]] = [
            [model_layers[i] for i in assignment.layer_range(stage)] for stage in range(self.num_stages)
        ]
        self._first_block = [assignment.boundaries[stage] - 1 for stage in range(self.num_stages)]
        self.owned = [owned_parameters(layers) for layers in self.layers]
        num_shards = plan.dp_shard * plan.cp
        self.units: list[tuple[Unit, ...]] = [
            fsdp_units(layers, num_shards, keep_last=plan.pp == 1 and software.keep_last_gathered)
            if plan.shards_parameters
            else ()
            for layers in self.layers
        ]
        self.boundary_bytes = model_layers[0].output_elements * plan.microbatch_size * self.state.boundary
        head = model_layers[-1]
        self.tied_bytes = sum(p.num_elements * self.state.gradient for p in head.parameters if p.name in head.tied)
        self._kept: dict[tuple[str, int, tuple[bool, bool]], tuple[Recomputation, LayerFootprint]] = {}
        self.deals: dict[int, Deal] = {}
        self._work: dict[tuple[int, range | tuple[int, ...], Phase], tuple[LayerWork, ...]] = {}
        self._whole: dict[tuple[int, range, bool], tuple[Segment, ...]] = {}
        self._scripts: dict[tuple[int, int, bool], tuple[Segment, ...]] = {}

    @property
    def tied_ends(self) -> tuple[int, int] | None:
        """Pipeline ranks that hold the two copies of a tied embedding, when they are two."""
        ends = self.placement[0], self.placement[self.num_stages - 1]
        return ends if self.tied_bytes and ends[0] != ends[1] else None

    def stages_of(self, pp_rank: int) -> list[int]:
        """Stages on a pipeline rank, ascending."""
        return sorted(stage for stage, rank in self.placement.items() if rank == pp_rank)

    def constant_bytes(self, stage: int) -> int:
        """Tables that the layers of a stage share."""
        layers = {layer.key: layer for layer in self.layers[stage]}.values()
        return sum(
            table.elements * (table.bytes_per_element or self.state.activation)
            for layer in layers
            for table in layer.constants
        )

    def layer_name(self, stage: int, position: int) -> str:
        """``embedding``, ``block 3`` or ``head``."""
        kind = self.layers[stage][position].kind
        return f"block {self._first_block[stage] + position}" if kind is LayerKind.BLOCK else str(kind)

    def work(self, stage: int, part: range | tuple[int, ...], phase: Phase) -> tuple[LayerWork, ...]:
        """A phase of some layers of a stage over all that they own; the same object for equal arguments."""
        key = (stage, part, phase)
        found = self._work.get(key)
        if found is None:
            b = self.plan.microbatch_size
            found = self._work[key] = tuple(
                LayerWork(self.layers[stage][i], phase, b, self.owned[stage][i]) for i in part
            )
        return found

    def script(self, stage: int, position: int, *, forward: bool) -> tuple[Segment, ...]:
        """Forward or backward of one layer, cut at its exchanges."""
        key = (stage, position, forward)
        found = self._scripts.get(key)
        if found is None:
            found = self._scripts[key] = self._cut(stage, position, forward)
        return found

    def merged(self, stage: int, part: range, *, forward: bool) -> tuple[Segment, ...]:
        """Forward or backward of some layers with nothing between them: all that is computed, then the exchanges."""
        key = (stage, part, forward)
        found = self._whole.get(key)
        if found is not None:
            return found
        order = part if forward else range(part.stop - 1, part.start - 1, -1)
        scripts = [self.script(stage, position, forward=forward) for position in order]
        segments = [segment for script in scripts for segment in script]
        effects = layers_effects([self._facts(stage, position)[1] for position in order], forward=forward)
        merged = []
        again = tuple(work for segment in segments if segment.recompute for work in segment.work)
        if again:
            merged.append(Segment(again, recompute=True))
        once = tuple(work for segment in segments if not segment.recompute for work in segment.work)
        merged.append(Segment(once, memory=effects))
        merged += [segment for segment in segments if segment.exchange is not None]
        found = self._whole[key] = tuple(merged)
        return found

    def _facts(self, stage: int, position: int) -> tuple[Recomputation, LayerFootprint]:
        layer = self.layers[stage][position]
        number = self._first_block[stage] + position if layer.kind is LayerKind.BLOCK else 0
        # with torchtitan's selective_layer every second block is recomputed; in all other modes they are alike
        variant = number % 2 if self.plan.recompute == "selective_layer" else 0
        ends = position == 0 and stage > 0, position == len(self.layers[stage]) - 1 and stage < self.num_stages - 1
        key = (layer.key, variant, ends)
        found = self._kept.get(key)
        if found is None:
            kept = recomputation(layer, self.plan.recompute, number)
            footprint = layer_footprint(layer, self.plan.microbatch_size, self.state, kept)
            if ends[0]:  # the input of a later stage is its receive buffer, which is counted there
                footprint = footprint._replace(activations=footprint.activations - footprint.input_bytes)
            if ends[1]:
                footprint = _receiving(footprint)
            if self.owned[stage][-1] != self.layers[stage][-1].num_parameters:
                footprint = footprint._replace(left=self._left_gradient(layer))
            found = self._kept[key] = (kept, footprint)
        return found

    def _left_gradient(self, layer: LayerSpec) -> int:
        """Of a weight that embedding and head share, autograd holds the head's gradient until it has the other one."""
        match layer.kind:
            case LayerKind.HEAD:
                return sum(p.num_elements for p in layer.parameters if p.name in layer.tied) * self.state.residual
            case LayerKind.EMBEDDING:
                return -layer.parameters[0].num_elements * self.state.residual
            case LayerKind.BLOCK:
                return 0

    def loss_effects(self, stage: int, *, forward: bool) -> tuple[MemoryEffect, ...]:
        """Of the head, the moments on the other side of its module's hooks than the rest of the head.

        Hooks come between the module and the loss: in forward this is the module, in backward it is the loss.
        """
        footprint = self._facts(stage, len(self.layers[stage]) - 1)[1]
        alone = footprint._replace(forward=footprint.forward[:1], backward=footprint.backward[:1])
        return tuple(effect._replace(after_bytes=0) for effect in layers_effects([alone], forward=forward))

    def _cut(self, stage: int, position: int, forward: bool) -> tuple[Segment, ...]:
        layer = self.layers[stage][position]
        kept, footprint = self._facts(stage, position)
        if forward:
            segments = list(self._pieces(layer, range(len(layer.kernels)), Phase.FORWARD))
        else:
            # what does not need the dropped tensors runs before they are made again
            segments = list(self._pieces(layer, range(len(layer.kernels) - 1, kept.needed_by, -1), Phase.BACKWARD))
            segments += self._pieces(layer, kept.kernels, Phase.RECOMPUTE)
            segments += self._pieces(layer, range(kept.needed_by, -1, -1), Phase.BACKWARD)
        computing = [index for index, segment in enumerate(segments) if segment.exchange is None]
        first, last = computing[0], computing[-1]
        if layer.kind is LayerKind.HEAD and self.plan.shards_parameters and self.plan.pp == 1:
            footprint = footprint._replace(forward=footprint.forward[1:], backward=footprint.backward[1:])
        effects = layers_effects([footprint], forward=forward)
        if first == last or forward:
            segments[first] = segments[first]._replace(memory=effects)
        else:  # what backward holds besides is there from its beginning, what it frees is freed at its end
            segments[first] = segments[first]._replace(memory=tuple(e._replace(after_bytes=0) for e in effects))
            segments[last] = segments[last]._replace(memory=tuple(e._replace(during_bytes=0) for e in effects))
        return tuple(segments)

    def _pieces(self, layer: LayerSpec, order: Sequence[int], phase: Phase) -> Sequence[Segment]:
        """The kernels in this order, those without an exchange between them in one piece."""
        b = self.plan.microbatch_size
        segments: list[Segment] = []
        run: list[int] = []

        def flush() -> None:
            if run:
                whole = len(run) == len(layer.kernels)
                kernels = None if whole else tuple(sorted(run))
                work = LayerWork(layer, phase, b, layer.num_parameters, kernels)
                segments.append(Segment((work,), recompute=phase is Phase.RECOMPUTE))
                run.clear()

        ring = any(isinstance(kernel, Exchange) and kernel.beside_previous for kernel in layer.kernels)
        for index in order:
            kernel = layer.kernels[index]
            if not isinstance(kernel, Exchange):
                if ring and isinstance(
                    kernel, Attention
                ):  # only the core is beside a hop: what goes round is its input
                    flush()
                run.append(index)
                continue
            kind = kernel.backward if phase is Phase.BACKWARD else kernel.forward
            if kind is not None:
                flush()
                width = kernel.bytes_per_element or (self.state.residual if kernel.residual else self.state.activation)
                segments.append(
                    Segment(exchange=(kernel.axis, kind, kernel.elements * b * width, kernel.beside_previous))
                )
        flush()
        return segments


def _receiving(footprint: LayerFootprint) -> LayerFootprint:
    """The gradient of the output of the last layer of a stage is in a receive buffer, which is counted there."""
    backward = tuple(
        moment._replace(workspace=moment.workspace - footprint.output_bytes) for moment in footprint.backward
    )
    return footprint._replace(backward=backward)
