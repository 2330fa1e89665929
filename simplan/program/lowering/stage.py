"""Facts common to all ranks of one lowering: layers of every stage, their work, memory and P2P tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from simplan.job import Job
from simplan.model.captured.layers import CAPTURED, blocks_in_root
from simplan.model.layer import Gemm, LayerKind, LayerSpec, ParameterSpec
from simplan.model.recompute import Recomputation, recomputation, recompute_of
from simplan.plan.plan import RankMapping, Recompute, StageAssignment
from simplan.program.action import Table
from simplan.program.lowering.fsdp_units import Unit, fsdp_units
from simplan.program.memory.footprint import (
    LayerFootprint,
    brought_parameters,
    cached_copies,
    layer_footprint,
    layers_effects,
    passing_footprint,
)
from simplan.program.memory.low_precision_footprint import keeping_quantized, persistent_weight_bytes
from simplan.program.memory.split_footprint import SplitFootprint, matmul_split_footprint, split_footprint
from simplan.program.program import Communication, LayerWork, MemoryEffect, Phase
from simplan.program.tables.complete import stage_to_rank
from simplan.software.software import StateBytes

if TYPE_CHECKING:
    from simplan.program.lowering.passes import ForwardPass

Deal = tuple[dict[tuple[int, int], int], ...]
"""Per rank of a shard group: (stage, layer) -> number of elements that the rank owns."""

Weights = Literal["all", "rest", "experts"]
"""Subsets of a layer's weights: all, expert-parallel weights only, or all others."""


class StageOutput(NamedTuple):
    """A tensor sent from one stage to the next.

    Attributes:
        num_bytes: Size for one microbatch, in bytes.
        passes: True if the stage passes the tensor through unchanged.
        returns: True if backward sends a gradient of the tensor back.
    """

    num_bytes: int
    passes: bool
    returns: bool = True


class LayerFacts(NamedTuple):
    """Recomputation and memory of one layer of a stage.

    Attributes:
        kept: Tensors saved for backward, and kernels to recompute.
        split: Computes the memory of a split backward.
    """

    kept: Recomputation
    footprint: LayerFootprint
    split: Callable[[], SplitFootprint]


class Stages:
    """Facts about the stages of a plan.

    Attributes:
        is_second_model: The weights are those of a reference model next to the one that is trained.
        comes_first: The pass comes before the forward that is trained.
        is_sharded: Weights are sharded over ranks.
        updates_in_backward: Hooks of gradients update the weights, and free the gradients.
        layers: Per stage, its layers as sharded for one rank.
        brought: Per stage and layer, the parameters that the layer adds to the stage.
        owned: Per stage and layer, the elements of these parameters.
        trained: Per stage and layer, the elements of weights that have gradients.
        copied: ``owned``, in which a weight of few bits counts as much as its bytes.
        experts: Per stage and layer, the trained elements of expert-parallel parameters. Data parallelism skips them,
            or FSDP shards them over fewer ranks.
        units: Per stage, FSDP's units; empty if parameters are not sharded.
        scatter_gather_p2p: True if tensor-parallel ranks hold equal tensors and each sends a part.
        crossings: Per stage, the tensors of one microbatch that a rank sends to the next stage and receives gradients
            of.
        boundary_bytes: Per stage, the total size of these tensors in bytes.
        batch_bytes: Bytes of the images of a step, resident on the first stage for the whole step; of a captured model,
            of all its inputs. Tokens of families are not counted.
        all_have_batch: True if every stage has the batch.
        deals: Per pipeline rank, the owners of optimizer states under ZeRO-1; computed on first use.
        broadcasts: Per shard group, the broadcasts of updates by their owners; computed on first use.
        tied_bytes: Bytes of the gradient of a tied embedding; 0 for none.

    Args:
        job, assignment, table: See ``Lowerer``.
        of_pass: Pass in forward alone that the stages are about; None for the model that is trained.
    """

    def __init__(self, job: Job, assignment: StageAssignment, table: Table, of_pass: ForwardPass | None = None) -> None:
        job = job if of_pass is None else of_pass.job
        model, training, plan, software = job.model, job.training, job.plan_in_sequences, job.software
        self.plan, self.training, self.software, self.of_pass = plan, training, software, of_pass
        self.is_second_model = of_pass is not None and of_pass.is_apart
        self.comes_first = of_pass is not None and of_pass.comes_first
        self.is_sharded = plan.shards_parameters and (of_pass is None or of_pass.is_sharded or not of_pass.is_apart)
        self.state = software.state(training, plan)
        self.updates_in_backward = training.optimizer_in_backward and of_pass is None
        if self.updates_in_backward and not self.is_sharded:
            self.state = self.state.model_copy(update={"updated_by": training.update})
        if self.is_second_model and of_pass is not None:
            stored = of_pass.stored_bytes or self.state.frozen
            self.state = self.state.model_copy(update={"frozen": stored, "parameter": stored})
        self.mapping = RankMapping.of(plan)
        self.placement = stage_to_rank(table)
        self.num_stages = assignment.num_stages
        self.num_microbatches = job.num_microbatches
        built, joined = software.layers_of(model, plan, training), software.layers.fused_gemms
        made = {layer: layer for layer in {*built}}
        if self.state.linear is not None:
            made = {layer: keeping_quantized(layer, self.state.linear, joined=joined) for layer in made}
        if not software.executable:  # the executor's RMSNorm has no kernel on CPUs
            made = {layer: _with_kernels(quantized) for layer, quantized in made.items()}
        model_layers = [made[layer] for layer in built]
        self.layers: list[list[LayerSpec]] = [
            [model_layers[i] for i in assignment.layer_range(stage)] for stage in range(self.num_stages)
        ]
        self._first_block = [assignment.boundaries[stage] - 1 for stage in range(self.num_stages)]
        self.brought = [brought_parameters(layers) for layers in self.layers]
        self.owned = self._elements(lambda parameter: True)
        self.trained = self._elements(lambda parameter: parameter.has_gradient)
        self.experts = self._elements(lambda parameter: parameter.expert and parameter.has_gradient)
        self._owned_experts = self._elements(lambda parameter: parameter.expert)
        self.copied = self._copied_elements()
        in_root: Collection[int] = (0, len(model_layers) - 1) if self.state.is_flat else ()
        if model.captured is not None:
            in_root = blocks_in_root(model.captured, model_layers, plan.fsdp_units)
        self.units: list[tuple[Unit, ...]] = [
            fsdp_units(
                layers,
                plan.dp_shard * plan.cp,
                keep_last=plan.pp == 1 and not self.is_second_model,
                expert_shards=plan.expert_shards,
                others_in_root=[index - assignment.boundaries[stage] for index in in_root],
            )
            if self.is_sharded
            else ()
            for stage, layers in enumerate(self.layers)
        ]
        self.scatter_gather_p2p = software.scatter_gather_p2p and plan.tp > 1 and not plan.sequence_parallel
        self.crossings = [self.leaving(layers) for layers in self.layers]
        if model.captured is not None:
            given = gradients_between(model_layers)
            for stage, leaving in enumerate(self.crossings):
                returns = given[assignment.boundaries[stage + 1] - 1]
                pairs = zip(leaving, returns, strict=True)
                self.crossings[stage] = tuple(output._replace(returns=returned) for output, returned in pairs)
        self.boundary_bytes = [sum(tensor.num_bytes for tensor in leaving) for leaving in self.crossings]
        self.batch_bytes, self.all_have_batch = _batch_bytes(job, self.state), model.captured is not None
        head = model_layers[-1]
        tied = [p for p in head.parameters if p.name in head.tied and not p.frozen]
        self.tied_bytes = sum(p.num_elements for p in tied) * self.state.gradient
        self._facts: dict[tuple[str, Recompute, int, tuple[bool, bool]], LayerFacts] = {}
        self.deals: dict[int, Deal] = {}
        self.broadcasts: dict[tuple[int, ...], tuple[Communication, ...]] = {}
        self._work: dict[tuple[int, range | tuple[int, ...], Phase, Weights], tuple[LayerWork, ...]] = {}

    def _elements(self, counts: Callable[[ParameterSpec], bool]) -> list[list[int]]:
        """Returns, per stage and layer, the elements of the selected parameters that the layer adds."""
        alike = {id(parameters): parameters for of_stage in self.brought for parameters in of_stage}
        found = {key: sum(map(self.state.elements_of, filter(counts, parameters))) for key, parameters in alike.items()}
        return [[found[id(parameters)] for parameters in of_stage] for of_stage in self.brought]

    def _copied_elements(self) -> list[list[int]]:
        """Returns ``owned`` with packed weights as elements of all-gathered ones."""
        if self.state.base is None:
            return self.owned
        num_shards, width = self.plan.dp_shard * self.plan.cp, self.state.gathered

        def saved(parameters: Iterable[ParameterSpec]) -> int:
            stored = [p for p in parameters if p.stored is not None]
            packed = sum(p.stored.gathered_bytes(p.shape, num_shards) for p in stored if p.stored is not None)
            return sum(p.num_elements for p in stored) - packed // width

        pairs = zip(self.owned, self.brought, strict=True)
        return [[n - saved(p) for n, p in zip(owned, brought, strict=True)] for owned, brought in pairs]

    def leaving(self, layers: Sequence[LayerSpec]) -> tuple[StageOutput, ...]:
        """Returns the tensors that a stage with the given layers sends to the next stage."""
        found = []
        for index, shape in enumerate(layers[-1].output_shapes if layers[-1].output_elements else ()):
            width = self.state.activation if index in layers[-1].matmul_dtype_outputs else self.state.boundary
            passes, samples = all(index in layer.passed_outputs for layer in layers), self.plan.microbatch_size
            returns = True
            if layers[-1].key.startswith(CAPTURED):  # tensors of any kind, with widths of their own
                tensor = layers[-1].tensors[layers[-1].outputs[index]]
                width, samples = tensor.bytes_per_element or width, 1 if tensor.per_microbatch else samples
                returns = tensor.name in layers[-1].needed
            found.append(StageOutput(math.prod(shape) * samples * width, passes, returns))
        return tuple(found)

    @property
    def tied_ends(self) -> tuple[int, int] | None:
        """Pipeline ranks of the two copies of a tied embedding; None if there are not two."""
        ends = self.placement[0], self.placement[self.num_stages - 1]
        return ends if self.tied_bytes and ends[0] != ends[1] else None

    @cached_property
    def shards_partial_gradients_unevenly(self) -> bool:
        """True if shards of a parameter have different numbers of gradients to sum over tensor-parallel ranks."""
        num_shards = self.plan.dp_shard * self.plan.cp
        brought = {id(parameters): parameters for of_stage in self.brought for parameters in of_stage}
        parameters = (p for each in brought.values() for p in each)
        return self.plan.shards_parameters and any(p.partial_gradient and p.shape[0] % num_shards for p in parameters)

    def stages_of(self, pp_rank: int) -> list[int]:
        """Returns the stages on a pipeline rank, ascending."""
        return sorted(stage for stage, rank in self.placement.items() if rank == pp_rank)

    def constant_bytes(self, stage: int) -> int:
        """Returns bytes of constant tables, shared by layers of a stage, and of buffers, which weights' dtypes have."""
        shared = {table for layer in self.layers[stage] for table in layer.constants}
        buffers = [table for layer in self.layers[stage] for table in (*layer.buffers, *layer.attributes)]
        return sum(table.num_bytes(self.state.activation, self.state.residual) for table in shared) + sum(
            table.elements * (table.bytes_per_element or self.state.frozen) for table in buffers
        )

    def buffers_by_dtype(self, stage: int) -> list[list[int]]:
        """Returns bytes of each buffer of a stage, those of one dtype together, in the order of their first ones."""
        found: dict[int | None, list[int]] = {}
        for layer in self.layers[stage]:
            for table in layer.buffers:
                width = table.bytes_per_element or self.state.frozen
                found.setdefault(table.bytes_per_element, []).append(table.elements * width)
        return [*found.values()]

    def quantized_weight_bytes(self, stages: Iterable[int]) -> int:
        """Returns bytes of quantized weights between steps minus those of BF16 or FP16 weights; may be negative.

        Returns 0 with FSDP, where quantized weights are smaller by the number of shards and are not counted.
        """
        if self.plan.shards_parameters:
            return 0
        return sum(persistent_weight_bytes(layer, self.state) for stage in stages for layer in self.layers[stage])

    def placeholder_bytes(self, stages: Iterable[int]) -> int:
        """Returns bytes of placeholder gradients, one per distinct matrix shape of blocks on the given stages."""
        if not self.state.placeholder:
            return 0
        blocks = {layer for stage in stages for layer in self.layers[stage] if layer.kind is LayerKind.BLOCK}
        shapes = {shape for layer in blocks for shape in _matrices(layer)}
        return sum(rows * columns for rows, columns in shapes) * self.state.placeholder

    @property
    def layer_names(self) -> dict[int, tuple[str, ...]]:
        """Names of the layers per stage: ``embedding``, ``block 3``, ``mtp 1`` or ``head``."""
        return {
            stage: tuple(
                f"{layer.title} {layer.mtp_depth or number}" if layer.kind is LayerKind.BLOCK else layer.title
                for number, layer in enumerate(layers, self._first_block[stage])
            )
            for stage, layers in enumerate(self.layers)
        }

    def work(
        self, stage: int, part: range | tuple[int, ...], phase: Phase, *, of: Weights = "all"
    ) -> tuple[LayerWork, ...]:
        """Returns a phase of some layers of a stage, over owned elements for gathering and trained ones otherwise.

        Returns the same object for equal arguments.
        """
        key = (stage, part, phase, of)
        works = self._work.get(key)
        if works is None:
            b = self.plan.microbatch_size
            experts = (self._owned_experts if phase is Phase.GATHER_COPY else self.experts)[stage]
            number = self.copied[stage] if phase is Phase.GATHER_COPY else self.trained[stage]
            rest = [each - apart for each, apart in zip(number, experts, strict=True)]
            counted = {"all": number, "experts": experts, "rest": rest}[of]
            works = self._work[key] = tuple(LayerWork(self.layers[stage][i], phase, b, counted[i]) for i in part)
        return works

    def facts(self, stage: int, position: int) -> LayerFacts:
        """Returns the saved tensors, recomputation and memory of a layer."""
        layer = self.layers[stage][position]
        number = self._first_block[stage] + position if layer.kind is LayerKind.BLOCK else 0
        # torchtitan's selective_layer recomputes every second block; other modes the first blocks, or all
        variant = number % 2 if self.plan.recompute == "selective_layer" else 0
        recomputes = self.plan.recompute != "none" or layer.loss_chunks is not None
        place = position - (self.layers[stage][0].kind is LayerKind.EMBEDDING)
        mode = recompute_of(layer, self.plan, place) if recomputes else "none"
        buffered = self.software.preallocated_receives  # otherwise a receive allocates its tensor, as a layer would
        ends = (
            buffered and position == 0 and self.crosses(stage - 1),
            buffered and position == len(self.layers[stage]) - 1 and self.crosses(stage),
        )
        key = (layer.key, mode, variant, ends)
        layer_facts = self._facts.get(key)
        if layer_facts is None:
            own = (p for p in self.layers[stage][-1].parameters if p.has_gradient)
            shares = self.trained[stage][-1] != sum(map(self.state.elements_of, own))
            left = self._left_gradient(layer) if shares or self.state.is_flat else 0
            kept = Recomputation(frozenset(tensor.name for tensor in layer.saved))
            if recomputes:
                kept = recomputation(layer, mode, number, self.plan.recompute_modules)
            layer_facts = self._facts[key] = self._layer_facts(layer, kept, ends, left)
        return layer_facts

    def _layer_facts(self, layer: LayerSpec, kept: Recomputation, ends: tuple[bool, bool], left: int) -> LayerFacts:
        """Computes facts about a layer at a position in a stage.

        Args:
            ends: True if the layer's input, and the gradient of its output, arrive in receive buffers from other ranks.
            left: See ``LayerFootprint``.
        """
        b, state = self.plan.microbatch_size, self.state
        if self.of_pass is not None:
            footprint = passing_footprint(layer, b, state)
            return LayerFacts(kept, footprint, partial(split_footprint, layer, b, state, footprint))
        footprint = layer_footprint(layer, b, state, kept)._replace(left=left, left_logits=self._left_logits(layer))
        if self.software.caches_casts:
            footprint = footprint._replace(cached=cached_copies(layer, b, state, kept))
        if ends[0]:  # the input is a receive buffer, which is counted there
            footprint = footprint._replace(activations=footprint.activations - footprint.input_bytes)
        if self.software.layers.split_backward == "matmuls":
            split = cache(partial(matmul_split_footprint, layer, b, state, footprint))
        else:
            split = cache(partial(split_footprint, layer, b, state, footprint, receives=ends[1]))
        if ends[1]:  # the output's gradient is in a receive buffer
            points = (
                point._replace(workspace=point.workspace - footprint.output_bytes) for point in footprint.backward
            )
            footprint = footprint._replace(backward=tuple(points))
        return LayerFacts(kept, footprint, split)

    def crosses(self, boundary: int) -> bool:
        """Returns True if the stages on both sides of a boundary are on different ranks."""
        return 0 <= boundary < self.num_stages - 1 and self.placement[boundary] != self.placement[boundary + 1]

    def _left_gradient(self, layer: LayerSpec) -> int:
        """Returns bytes of gradients that autograd holds between the head's and the embedding's backward.

        These are of a tied weight, or of all weights in one flat tensor with those of the embedding.
        """
        if self.state.is_flat and layer.kind is not LayerKind.BLOCK:
            held = self.trained[0][-1] * self.state.gathered
            return held if layer.kind is LayerKind.HEAD else -held
        match layer.kind:
            case LayerKind.HEAD:
                return sum(p.num_elements for p in layer.parameters if p.name in layer.tied) * self.state.residual
            case LayerKind.EMBEDDING:
                return -layer.parameters[0].num_elements * self.state.residual
            case LayerKind.BLOCK:
                return 0

    def _left_logits(self, layer: LayerSpec) -> int:
        """Returns bytes of logits that the training loop holds between the head's and the embedding's backward."""
        if not self.software.layers.holds_logits or self.num_stages > 1 or layer.kind is LayerKind.BLOCK:
            return 0
        head = self.layers[0][-1]
        logits = next((o.makes[0] for o in head.operators if isinstance(o.kernel, Gemm) and o.makes[0].logits), None)
        if logits is None or head.loss_chunks is not None:
            return 0
        num_bytes = self.plan.microbatch_size * logits.num_bytes(self.state.activation, self.state.residual)
        return num_bytes if layer.kind is LayerKind.HEAD else -num_bytes

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits of a microbatch, of a model in one stage."""
        makers = (o.makes[0] for o in self.layers[0][-1].operators if isinstance(o.kernel, Gemm) and o.makes[0].logits)
        return self.plan.microbatch_size * next(makers).num_bytes(self.state.activation, self.state.residual)

    def loss_effects(self, stage: int, *, forward: bool) -> tuple[MemoryEffect, ...]:
        """Returns memory changes of the head on the other side of its module's hooks.

        Hooks come between the module and the loss: in forward this is the module, in backward the loss.
        """
        footprint = self.facts(stage, len(self.layers[stage]) - 1).footprint
        alone = footprint._replace(forward=footprint.forward[:1], backward=footprint.backward[:1])
        return tuple(effect._replace(after_bytes=0) for effect in layers_effects([alone], forward=forward))


def _batch_bytes(job: Job, state: StateBytes) -> int:
    """Returns the bytes of the images of a step, or of all inputs of a captured model.

    The executor gives these in the dtype of the weights. FSDP2 casts them for each microbatch of a whole module;
    adapters and stages of a pipeline get them cast.
    """
    model, plan = job.model, job.plan
    num_samples = job.num_microbatches * plan.microbatch_size
    if model.captured is None:
        return num_samples * model.num_channels * model.image_size**2 * state.parameter
    inputs, shards = model.captured.inputs, plan.shards_parameters
    width = state.activation if model.lora_rank or (shards and plan.pp > 1) else state.parameter
    num_bytes = num_samples * sum(each.num_bytes(width) for each in inputs)
    if shards and width != state.activation:
        num_bytes += plan.microbatch_size * sum(each.num_bytes(state.activation) for each in inputs if each.is_cast)
    return num_bytes


def _with_kernels(layer: LayerSpec) -> LayerSpec:
    """Returns the layer without scratch of backwards that are composed of single operations.

    Its time is that of the layer, whose key it has.
    """
    key = ("kernels of backward",)
    if key not in layer.derived:
        operators = (replace(o, backward_scratch=()) if o.composed else o for o in layer.operators)
        layer.derived[key] = replace(layer, operators=tuple(operators))
    found: LayerSpec = layer.derived[key]
    return found


def _matrices(layer: LayerSpec) -> Iterator[tuple[int, int]]:
    """Yields the shapes of a layer's matrices; adjacent ones with one input count as one."""
    for apart, run in groupby(layer.kernels, key=lambda k: (k.m, k.k) if isinstance(k, Gemm) else None):
        if apart is not None:
            yield sum(kernel.n for kernel in run if isinstance(kernel, Gemm)), apart[1]


def gradients_between(layers: Sequence[LayerSpec]) -> list[tuple[bool, ...]]:
    """Returns, by layer, which of its outputs get a gradient in backward; masks and tables get none."""
    found: list[tuple[bool, ...]] = []
    for layer in layers:
        before = found[-1] if found else ()
        given = dict(zip((tensor.name for tensor in layer.inputs), before, strict=False))
        found.append(tuple(given.get(name, name in layer.needed) for name in layer.outputs))
    return found
