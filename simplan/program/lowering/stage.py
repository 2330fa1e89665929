"""What all ranks of one lowering have in common: the layers of every stage, their work, memory and messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Literal, NamedTuple

from simplan.job import Job
from simplan.model.implementations.layer_style import SplitBackward
from simplan.model.layer import Gemm, LayerKind, LayerSpec, ParameterSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import Recomputation, recomputation, recompute_of
from simplan.plan.plan import RankMapping, Recompute, StageAssignment
from simplan.program.action import Table
from simplan.program.lowering.units import Unit, fsdp_units
from simplan.program.memory.footprint import LayerFootprint, brought_parameters, layer_footprint, layers_effects
from simplan.program.memory.low_precision_footprint import keeping_quantized, resting_weight_bytes
from simplan.program.memory.split_footprint import SplitFootprint, products_footprint, split_footprint
from simplan.program.program import LayerWork, MemoryEffect, Message, Phase
from simplan.program.tables.complete import stage_to_rank
from simplan.software.software import StateBytes

__all__ = ["Crossing", "Deal", "LayerFacts", "Stages", "layer_facts"]


Deal = tuple[dict[tuple[int, int], int], ...]
"""By rank of a shard group, elements it owns of (stage, layer)."""

Weights = Literal["all", "rest", "experts"]
"""Which weights of a layer: experts of which other ranks have others, or the rest."""


class Crossing(NamedTuple):
    """A tensor that leaves a stage.

    Attributes:
        num_bytes: Of one microbatch.
        passes: It came into the stage as it leaves it.
    """

    num_bytes: int
    passes: bool


class LayerFacts(NamedTuple):
    """What one layer of a stage keeps.

    Attributes:
        kept: What is kept for backward, and what runs again.
        footprint: Its memory.
        split: Makes its memory in a backward of two parts.
    """

    kept: Recomputation
    footprint: LayerFootprint
    split: Callable[[], SplitFootprint]


class Stages:
    """Facts about the stages of a plan.

    Attributes:
        layers: By stage, its layers as one rank has them.
        brought: By stage and layer, the parameters it brings.
        owned: Their elements.
        trained: Of those that are not frozen.
        experts: By stage and layer, of those that data parallelism leaves alone, or FSDP shards among fewer ranks:
            other ranks have other experts.
        units: By stage, FSDP's units; nothing where parameters are not sharded.
        splits_sends: Tensor-parallel ranks have equal tensors, of which each sends a part.
        crossings: By stage, tensors that one rank sends to the next one for one microbatch, and gets gradients of.
        boundary_bytes: By stage, all of them together.
        batch_bytes: Images of a step, which the first stage has from its beginning to its end. Tokens are not counted.
        deals: By pipeline rank, whose optimizer states are whose under ZeRO-1, once somebody asked.
        broadcasts: By shard group, messages in which owners send what they updated, once somebody asked.
        tied_bytes: Gradient of a tied embedding; 0 without.
    """

    def __init__(
        self,
        job: Job,
        assignment: StageAssignment,
        table: Table,
    ) -> None:
        model, training, plan, software = job.model, job.training, job.plan, job.software
        self.plan, self.training, self.software = plan, training, software
        self.state = software.state(training, plan)
        self.mapping = RankMapping.of(plan)
        self.placement = stage_to_rank(table)
        self.num_stages = assignment.num_stages
        self.num_microbatches = training.global_batch_size // (plan.dp * plan.microbatch_size)
        joined = software.layers.joined_products
        built = software.layers_of(model, plan)
        made = {layer: keeping_quantized(layer, self.state.linear, joined=joined) for layer in {*built}}
        if not software.executable:  # the executor's RMSNorm has no kernel on CPUs
            made = {layer: _with_kernels(quantized) for layer, quantized in made.items()}
        model_layers = [made[layer] for layer in built]
        self.layers: list[list[LayerSpec]] = [
            [model_layers[i] for i in assignment.layer_range(stage)] for stage in range(self.num_stages)
        ]
        self._first_block = [assignment.boundaries[stage] - 1 for stage in range(self.num_stages)]
        self.brought = [brought_parameters(layers) for layers in self.layers]
        self.owned = self._elements(lambda parameter: True)
        self.trained = self._elements(lambda parameter: not parameter.frozen)
        self.experts = self._elements(lambda parameter: parameter.expert)
        num_shards = plan.dp_shard * plan.cp
        self.units: list[tuple[Unit, ...]] = [
            fsdp_units(layers, num_shards, keep_last=plan.pp == 1, expert_shards=plan.expert_shards)
            if plan.shards_parameters
            else ()
            for layers in self.layers
        ]
        self.splits_sends = software.splits_sends and plan.tp > 1 and not plan.sequence_parallel
        self.crossings = [self.leaving(layers) for layers in self.layers]
        self.boundary_bytes = [sum(tensor.num_bytes for tensor in leaving) for leaving in self.crossings]
        self.batch_bytes = self.num_microbatches * plan.microbatch_size * _image_elements(model) * self.state.parameter
        head = model_layers[-1]
        tied = [p for p in head.parameters if p.name in head.tied and not p.frozen]
        self.tied_bytes = sum(p.num_elements for p in tied) * self.state.gradient
        self._facts: dict[tuple[str, Recompute, int, tuple[bool, bool]], LayerFacts] = {}
        self.deals: dict[int, Deal] = {}
        self.broadcasts: dict[tuple[int, ...], tuple[Message, ...]] = {}
        self._work: dict[tuple[int, range | tuple[int, ...], Phase, Weights], tuple[LayerWork, ...]] = {}

    def _elements(self, counts: Callable[[ParameterSpec], bool]) -> list[list[int]]:
        """By stage and layer, elements of some of the parameters it brings."""
        alike = {id(parameters): parameters for of_stage in self.brought for parameters in of_stage}
        found = {key: sum(p.num_elements for p in parameters if counts(p)) for key, parameters in alike.items()}
        return [[found[id(parameters)] for parameters in of_stage] for of_stage in self.brought]

    def leaving(self, layers: Sequence[LayerSpec]) -> tuple[Crossing, ...]:
        """What a stage with these layers gives to the next."""
        found = []
        for index, shape in enumerate(layers[-1].output_shapes if layers[-1].output_elements else ()):
            width = self.state.activation if index in layers[-1].product_outputs else self.state.boundary
            passes = all(index in layer.passed_outputs for layer in layers)
            found.append(Crossing(math.prod(shape) * self.plan.microbatch_size * width, passes))
        return tuple(found)

    @property
    def tied_ends(self) -> tuple[int, int] | None:
        """Pipeline ranks that hold the two copies of a tied embedding, when they are two."""
        ends = self.placement[0], self.placement[self.num_stages - 1]
        return ends if self.tied_bytes and ends[0] != ends[1] else None

    def stages_of(self, pp_rank: int) -> list[int]:
        """Stages on a pipeline rank, ascending."""
        return sorted(stage for stage, rank in self.placement.items() if rank == pp_rank)

    def constant_bytes(self, stage: int) -> int:
        """Tables that the layers of a stage share, and those that each has."""
        shared = {table for layer in self.layers[stage] for table in layer.constants}
        tables = [*shared, *(table for layer in self.layers[stage] for table in layer.buffers)]
        return sum(table.num_bytes(self.state.activation, self.state.residual) for table in tables)

    def quantized_weight_bytes(self, stages: Iterable[int]) -> int:
        """What quantized weights take between steps beside those in 16 bits, or, negative, less than them.

        Where FSDP shards weights that are quantized this is not counted: they are 1/shards of what it is elsewhere.
        """
        if self.plan.shards_parameters:
            return 0
        return sum(resting_weight_bytes(layer, self.state) for stage in stages for layer in self.layers[stage])

    def placeholder_bytes(self, stages: Iterable[int]) -> int:
        """Empty tensors in place of gradients, one for each shape that a matrix of blocks on these stages has."""
        width = self.state.placeholder
        layers = {layer for stage in stages for layer in self.layers[stage] if layer.kind is LayerKind.BLOCK and width}
        return (
            sum(rows * columns for rows, columns in {shape for layer in layers for shape in _matrices(layer)}) * width
        )

    @property
    def layer_names(self) -> dict[int, tuple[str, ...]]:
        """By stage, the names of its layers."""
        return {
            stage: tuple(self.layer_name(stage, position) for position in range(len(layers)))
            for stage, layers in enumerate(self.layers)
        }

    def layer_name(self, stage: int, position: int) -> str:
        """``embedding``, ``block 3``, ``mtp 1`` or ``head``."""
        layer = self.layers[stage][position]
        is_block = layer.kind is LayerKind.BLOCK
        number = layer.mtp_depth or self._first_block[stage] + position
        return f"{layer.title} {number}" if is_block else layer.title

    def work(
        self, stage: int, part: range | tuple[int, ...], phase: Phase, *, of: Weights = "all"
    ) -> tuple[LayerWork, ...]:
        """A phase of some layers of a stage over all that they own, or, but for gathering, all of it that is trained.

        The same object for equal arguments.

        Args:
            stage, part: Which layers.
            phase: One of parameters or gradients.
            of: All weights, or experts of which other ranks have others, or all but these.
        """
        key = (stage, part, phase, of)
        found = self._work.get(key)
        if found is None:
            b = self.plan.microbatch_size
            experts = self.experts[stage]
            number = self.owned[stage] if phase is Phase.GATHER_COPY else self.trained[stage]
            rest = [each - apart for each, apart in zip(number, experts, strict=True)]
            counted = {"all": number, "experts": experts, "rest": rest}[of]
            found = self._work[key] = tuple(LayerWork(self.layers[stage][i], phase, b, counted[i]) for i in part)
        return found

    def facts(self, stage: int, position: int) -> LayerFacts:
        """What a layer keeps, and for how long."""
        layer = self.layers[stage][position]
        number = self._first_block[stage] + position if layer.kind is LayerKind.BLOCK else 0
        # with torchtitan's selective_layer every second block is recomputed, else the first ones, or all
        variant = number % 2 if self.plan.recompute == "selective_layer" else 0
        mode = recompute_of(layer, self.plan, position - (self.layers[stage][0].kind is LayerKind.EMBEDDING))
        buffered = self.software.preallocated_receives  # else a receive makes its tensor, as a layer would
        ends = (
            buffered and position == 0 and self._crosses(stage - 1),
            buffered and position == len(self.layers[stage]) - 1 and self._crosses(stage),
        )
        key = (layer.key, mode, variant, ends)
        found = self._facts.get(key)
        if found is None:
            shares = self.trained[stage][-1] != self.layers[stage][-1].num_trained
            left = self._left_gradient(layer) if shares else 0
            kept = recomputation(layer, mode, number, self.plan.recompute_modules)
            b, way = self.plan.microbatch_size, self.software.layers.split_backward
            found = self._facts[key] = layer_facts(layer, b, self.state, kept, ends, left, way)
        return found

    def _crosses(self, boundary: int) -> bool:
        """Whether the stages on both sides of a boundary are on different ranks."""
        return 0 <= boundary < self.num_stages - 1 and self.placement[boundary] != self.placement[boundary + 1]

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
        footprint = self.facts(stage, len(self.layers[stage]) - 1).footprint
        alone = footprint._replace(forward=footprint.forward[:1], backward=footprint.backward[:1])
        return tuple(effect._replace(after_bytes=0) for effect in layers_effects([alone], forward=forward))


def layer_facts(
    layer: LayerSpec,
    b: int,
    state: StateBytes,
    kept: Recomputation,
    ends: tuple[bool, bool],
    left: int = 0,
    split_backward: SplitBackward = "all",
    inside: LayerFootprint | None = None,
) -> LayerFacts:
    """Facts about a layer at some place in a stage.

    Args:
        layer: The layer.
        b: Sequences of a microbatch.
        state: Element widths.
        kept: What of it is kept.
        ends: Its input, and the gradient of its output, come from other ranks, into receive buffers.
        left: See ``LayerFootprint``.
        split_backward: See ``LayerStyle``.
        inside: What it needs between other layers, where that is known.
    """
    footprint = (inside or layer_footprint(layer, b, state, kept))._replace(left=left)
    if ends[0]:  # the input is a receive buffer, which is counted there
        footprint = footprint._replace(activations=footprint.activations - footprint.input_bytes)
    if split_backward == "products":
        split = cache(partial(products_footprint, layer, b, state, footprint))
    else:
        split = cache(partial(split_footprint, layer, b, state, footprint, receives=ends[1]))
    return LayerFacts(kept, _receiving(footprint) if ends[1] else footprint, split)


def _with_kernels(layer: LayerSpec) -> LayerSpec:
    """The layer with a kernel for every backward."""
    operators = (replace(o, composed=False, backward_scratch=()) if o.composed else o for o in layer.operators)
    return replace(layer, operators=tuple(operators))


def _matrices(layer: LayerSpec) -> Iterator[tuple[int, int]]:
    """Shapes of its matrices; those side by side with one input are one."""
    for apart, run in groupby(layer.kernels, key=lambda k: (k.m, k.k) if isinstance(k, Gemm) else None):
        if apart is not None:
            yield sum(kernel.n for kernel in run if isinstance(kernel, Gemm)), apart[1]


def _image_elements(model: ModelSpec) -> int:
    """Of one sample; 0 for models of tokens."""
    return model.num_channels * model.image_size**2


def _receiving(footprint: LayerFootprint) -> LayerFootprint:
    """The gradient of the output of the last layer of a stage is in a receive buffer, which is counted there."""
    backward = tuple(point._replace(workspace=point.workspace - footprint.output_bytes) for point in footprint.backward)
    return footprint._replace(backward=backward)
