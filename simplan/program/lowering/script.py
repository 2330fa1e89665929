"""Compute and collectives of a rank in a pass through layers: split at the collectives, or merged.

A pass is a forward, a backward, or one half of a split backward (zero-bubble schedules). The first half computes
gradients of activations, which other stages wait for; the second computes gradients of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar

from simplan.model.layer import (
    Attention,
    CollectiveKind,
    ExpertDraw,
    Gemm,
    Kernel,
    LayerCollective,
    LayerKind,
    LayerSpec,
    Role,
)
from simplan.model.recompute import Recomputation
from simplan.program.lowering.stage import LayerFacts, Stages
from simplan.program.memory.footprint import layers_effects
from simplan.program.memory.split_footprint import SplitFootprint, split_effects
from simplan.program.program import Communication, LayerWork, MemoryCategory, MemoryEffect, Phase
from simplan.software.software import StateBytes

_T = TypeVar("_T")
_FORWARD = (Phase.FORWARD, Phase.RECOMPUTE)
_SPLIT = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
_OTHER_PASS = {Phase.FORWARD: Phase.BACKWARD, Phase.BACKWARD: Phase.FORWARD}


class IssuedCollective(NamedTuple):
    """A collective between kernels.

    Attributes:
        axis: Axis of the mesh whose ranks take part.
        kind, num_bytes, draw: See ``Communication``.
        beside: True if the collective overlaps with the segment before it.
    """

    axis: Literal["tp", "cp", "ep", "etp"]
    kind: CollectiveKind
    num_bytes: int
    beside: bool
    draw: ExpertDraw | None = None

    def among(self, ranks: tuple[int, ...]) -> Communication:
        """Returns the communication of one group."""
        return Communication(self.kind, self.num_bytes, ranks, self.draw)


class Segment(NamedTuple):
    """A segment of a pass through a layer: kernels, or a collective between them.

    Attributes:
        work: Kernels to run; empty for a collective.
        recompute: True if the work recomputes forward.
        collective: The collective; None for kernels.
        beside: For a collective, compute that it and the collectives after it overlap with: adjacent GEMMs or, for
            expert dispatch, the layer's other pass for another microbatch. None for collectives without overlap and for
            kernels.
    """

    work: tuple[LayerWork, ...] = ()
    recompute: bool = False
    memory: tuple[MemoryEffect, ...] = ()
    collective: IssuedCollective | None = None
    beside: LayerWork | None = None


def in_order(layers: Sequence[_T], phase: Phase) -> Sequence[_T]:
    """Returns layers in the order of a pass: torch computes gradients of weights in the order of forward."""
    return layers if phase in (Phase.FORWARD, Phase.BACKWARD_WEIGHT) else layers[::-1]


class Scripts:
    """Segments of the layers of all stages, each computed once."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._of_layer: dict[tuple[int, int, Phase], tuple[Segment, ...]] = {}
        self._merged: dict[tuple[int, Phase], tuple[Segment, ...]] = {}
        # for equal layers: their segments, and those of passes through all layers of a stage
        self._of_alike: dict[tuple[str, int, Phase], tuple[Segment, ...]] = {}
        self._merged_alike: dict[Hashable, tuple[Segment, ...]] = {}

    def layer(self, stage: int, position: int, phase: Phase) -> tuple[Segment, ...]:
        """Returns a pass through one layer, split at its collectives."""
        key = (stage, position, phase)
        if key not in self._of_layer:
            self._of_layer[key] = self._cut(stage, position, phase)
        return self._of_layer[key]

    def computed(self, stage: int, position: int, phase: Phase) -> tuple[Segment, ...]:
        """Returns the segments of a pass through one layer, without memory changes."""
        layer, kept = self._stages.layers[stage][position], self._stages.facts(stage, position).kept
        key = layer.key, id(kept), phase  # facts, and their recomputation, are kept alive by the stages
        if key not in self._of_alike:
            self._of_alike[key] = self._with_overlap(layer, self._computed(layer, kept, phase), phase)
        return self._of_alike[key]

    def merged(self, stage: int, phase: Phase) -> tuple[Segment, ...]:
        """Returns a pass through the layers of a stage as merged compute, followed by the collectives."""
        if (stage, phase) not in self._merged:
            facts = [self._stages.facts(stage, position) for position in range(len(self._stages.layers[stage]))]
            alike = tuple([(layer.key, id(of)) for layer, of in zip(self._stages.layers[stage], facts, strict=True)])
            if (alike, phase) not in self._merged_alike:
                self._merged_alike[alike, phase] = self._merge(stage, facts, phase)
            self._merged[stage, phase] = self._merged_alike[alike, phase]
        return self._merged[stage, phase]

    def _with_overlap(self, layer: LayerSpec, segments: list[Segment], phase: Phase) -> tuple[Segment, ...]:
        """Returns the segments, the first expert dispatch with the other pass that it overlaps with."""
        other = _OTHER_PASS.get(phase)
        first = next(
            (i for i, s in enumerate(segments) if s.collective is not None and s.collective.axis == "ep"), None
        )
        if self._stages.software.expert_overlap and other is not None and first is not None:
            work = LayerWork(layer, other, self._stages.plan.microbatch_size, layer.num_parameters)
            segments[first] = segments[first]._replace(beside=work)
        return tuple(segments)

    def _merge(self, stage: int, facts: Sequence[LayerFacts], phase: Phase) -> tuple[Segment, ...]:
        order = in_order(range(len(facts)), phase)
        segments = [segment for position in order for segment in self.computed(stage, position, phase)]
        again = tuple(work for segment in segments if segment.recompute for work in segment.work)
        once = tuple(work for segment in segments if not segment.recompute for work in segment.work)
        if phase in _SPLIT:
            effects = split_effects([facts[position].split() for position in order], phase)
        else:
            footprints = [facts[position].footprint for position in order]
            effects = layers_effects(footprints, forward=phase is Phase.FORWARD)
        return (
            *([Segment(again, recompute=True)] if again else []),
            Segment(once, memory=effects),
            *(segment for segment in segments if segment.collective is not None),
        )

    def _effects(self, stage: int, position: int, phase: Phase) -> tuple[MemoryEffect, ...]:
        """Returns memory changes of a pass through one layer.

        The loss is excluded if an FSDP hook separates it from its module (``Stages.loss_effects``).
        """
        if phase in _SPLIT:
            return self._split_effects(stage, position, phase)
        plan, footprint = self._stages.plan, self._stages.facts(stage, position).footprint
        has_loss = self._stages.layers[stage][position].kind is LayerKind.HEAD
        if has_loss and self._stages.is_sharded and plan.pp == 1:
            footprint = footprint._replace(forward=footprint.forward[1:], backward=footprint.backward[1:])
        return layers_effects([footprint], forward=phase is Phase.FORWARD)

    def _split_effects(self, stage: int, position: int, phase: Phase) -> tuple[MemoryEffect, ...]:
        """Returns memory changes of a split backward; tensors that outlive their layer are freed at the stage's end."""
        splits = [self._stages.facts(stage, each).split() for each in range(len(self._stages.layers[stage]))]
        effects = split_effects([splits[position]], phase)
        end = 0 if phase is Phase.BACKWARD_INPUT else len(splits) - 1
        freed = [split for each, split in enumerate(splits) if each != end] if position == end else []
        delayed = [splits[position]] if position != end else []
        for place, category in enumerate((MemoryCategory.ACTIVATIONS, MemoryCategory.LOGITS)):
            change = sum(_freed_at_end(split, phase)[place] for split in delayed)
            change -= sum(_freed_at_end(split, phase)[place] for split in freed)
            effects = _changed(effects, category, change)
        return effects

    def _cut(self, stage: int, position: int, phase: Phase) -> tuple[Segment, ...]:
        segments = list(self.computed(stage, position, phase))
        computing = [index for index, segment in enumerate(segments) if segment.collective is None]
        first, last = computing[0], computing[-1]
        effects = self._effects(stage, position, phase)
        if first == last or phase is Phase.FORWARD:
            segments[first] = segments[first]._replace(memory=effects)
        else:  # temporaries of backward count from its beginning; memory is freed at its end
            segments[first] = segments[first]._replace(memory=tuple(e._replace(after_bytes=0) for e in effects))
            segments[last] = segments[last]._replace(memory=tuple(e._replace(during_bytes=0) for e in effects))
        return tuple(segments)

    def _computed(self, layer: LayerSpec, kept: Recomputation, phase: Phase) -> list[Segment]:
        end = len(layer.kernels)
        if phase is Phase.FORWARD:
            return self._pieces(layer, range(end), phase)
        if phase is Phase.BACKWARD_WEIGHT:
            again = [
                self._collective_segment(layer, k, k.backward)
                for k in layer.kernels
                if isinstance(k, LayerCollective) and _of_weights(k)
            ]
            return [*again, self._computing(layer, range(end), phase)]
        # compute that does not need the dropped tensors runs before they are recomputed, except compute that overlaps
        # with a GEMM that needs them
        overlaps, segments = self._overlaps(layer, phase), list[Segment]()
        for rerun in kept.reruns:
            needed_by = rerun.needed_by
            while (
                needed_by + 1 < end
                and isinstance(then := layer.kernels[needed_by + 1], LayerCollective)
                and overlaps(then)
            ):
                needed_by += 1
            segments += self._pieces(layer, range(end - 1, needed_by, -1), phase)
            segments += self._pieces(layer, rerun.kernels, Phase.RECOMPUTE)
            end = needed_by + 1
        return segments + self._pieces(layer, range(end - 1, -1, -1), phase)

    def _pieces(self, layer: LayerSpec, order: Sequence[int], phase: Phase) -> list[Segment]:
        """Returns segments for kernels in the given order; kernels without a collective between them are merged."""
        segments: list[Segment] = []
        run: list[int] = []

        def flush() -> None:
            if run:
                segments.append(self._computing(layer, sorted(run), phase))
                run.clear()

        ring = any(isinstance(kernel, LayerCollective) and kernel.beside_previous for kernel in layer.kernels)
        overlaps = self._overlaps(layer, phase)
        for together, indices in groupby(order, key=lambda index: overlaps(layer.kernels[index])):
            group = list(indices)
            kernels = [layer.kernels[index] for index in group]
            beside = (
                together
                and any(isinstance(k, Gemm) for k in kernels)
                and any(isinstance(k, LayerCollective) for k in kernels)
            )
            if beside:
                flush()
                run += [index for index in group if isinstance(layer.kernels[index], Gemm)]
                flush()
                segments[-1] = self._split_gemms(segments[-1], kernels, phase)
            for index in group:
                kernel = layer.kernels[index]
                if not isinstance(kernel, LayerCollective):
                    if beside:
                        continue
                    if ring and isinstance(kernel, Attention):
                        flush()  # only the attention core overlaps with a hop, which transfers its input
                    run.append(index)
                    continue
                kind = _kind(kernel, phase)
                if kind is None or (phase is Phase.BACKWARD_INPUT and _of_weights(kernel)):
                    continue
                flush()
                overlapped = segments[-1].work[0] if beside and segments[-1].work else None
                segments.append(
                    self._collective_segment(layer, kernel, kind, beside=beside)._replace(beside=overlapped)
                )
        flush()
        return segments

    def _split_gemms(self, gemms: Segment, kernels: Sequence[Kernel], phase: Phase) -> Segment:
        """Returns the GEMMs, split into chunks for the given collectives if the framework does so."""
        if not self._stages.software.splits_gemms(self._stages.state):
            return gemms
        cuts = sum(_kind(kernel, phase) is not None for kernel in kernels if isinstance(kernel, LayerCollective))
        return gemms._replace(work=tuple(work._replace(cuts=cuts) for work in gemms.work))

    def _overlaps(self, layer: LayerSpec, phase: Phase) -> Callable[[Kernel], bool]:
        """Returns a predicate: True for GEMMs of a block and for the collectives that overlap with adjacent GEMMs."""
        way = self._stages.software.tensor_overlap(self._stages.state)
        phases = {"none": (), "backward": (Phase.BACKWARD,)}.get(way, (*_FORWARD, Phase.BACKWARD))
        if layer.kind is not LayerKind.BLOCK or phase not in phases:
            return lambda kernel: False

        def overlaps(kernel: Kernel) -> bool:
            if not isinstance(kernel, LayerCollective):
                return isinstance(kernel, Gemm)
            if kernel.axis != "tp" or kernel.bytes_per_element is not None:
                return False
            match way:
                case "gathers":
                    return _kind(kernel, phase) is CollectiveKind.ALL_GATHER
                case "backward":
                    return kernel.forward is None or kernel.forward is CollectiveKind.ALL_GATHER
                case _:
                    return True

        return overlaps

    def _computing(self, layer: LayerSpec, indices: Sequence[int], phase: Phase) -> Segment:
        kernels = None if len(indices) == len(layer.kernels) else tuple(indices)
        work = LayerWork(layer, phase, self._stages.plan.microbatch_size, layer.num_parameters, kernels)
        return Segment((work,), recompute=phase is Phase.RECOMPUTE)

    def _gathers_quantized(self, layer: LayerSpec) -> bool:
        """Returns True if operands of a layer's matmuls are all-gathered quantized; adapters read them in BF16."""
        is_wide = layer.kind is not LayerKind.BLOCK or any(Role.ADAPTER in roles for roles in layer.roles)
        return not is_wide and self._stages.software.gathers_quantized(self._stages.state)

    def _collective_segment(
        self, layer: LayerSpec, kernel: LayerCollective, kind: CollectiveKind | None, *, beside: bool = False
    ) -> Segment:
        assert kind is not None
        state = self._stages.state
        width: float = kernel.bytes_per_element or (state.residual if kernel.residual else state.activation)
        if kernel.axis == "tp" and kind is CollectiveKind.ALL_GATHER and self._gathers_quantized(layer):
            width = _quantized_width(kernel, state)
        num_bytes = math.ceil(kernel.elements * self._stages.plan.microbatch_size * width)
        return Segment(
            collective=IssuedCollective(kernel.axis, kind, num_bytes, beside or kernel.beside_previous, kernel.draw)
        )


def _quantized_width(kernel: LayerCollective, state: StateBytes) -> float:
    """Returns the bytes per element of an all-gather of a quantized operand.

    An output gradient is needed along rows and along columns, and gathered in both, unless its scale is one.
    """
    form = state.linear
    assert form is not None
    both = kernel.forward is CollectiveKind.REDUCE_SCATTER and not form.has_one_scale
    return form.bytes_per_element * (2 if both else 1)


def _freed_at_end(split: SplitFootprint, phase: Phase) -> tuple[int, int]:
    """Returns bytes of activations and logits of a layer that are freed only when its stage is done."""
    if phase is Phase.BACKWARD_INPUT:
        return split.dropped, split.dropped_logits
    return split.between_activations - split.released, split.between_logits


def _changed(effects: tuple[MemoryEffect, ...], category: MemoryCategory, change: int) -> tuple[MemoryEffect, ...]:
    """Returns the effects with ``change`` more bytes of a category after the operation."""
    if not change:
        return effects
    others = tuple(effect for effect in effects if effect.category is not category)
    memory_effect = next((effect for effect in effects if effect.category is category), MemoryEffect(category, 0, 0))
    return (*others, memory_effect._replace(after_bytes=memory_effect.after_bytes + change))


def _kind(collective: LayerCollective, phase: Phase) -> CollectiveKind | None:
    """Returns the collective of a pass; None for none."""
    return collective.forward if phase in _FORWARD else collective.backward


def _of_weights(collective: LayerCollective) -> bool:
    """Returns True for an all-gather of a GEMM's input that only the weight gradient needs."""
    return collective.forward is None and collective.backward is CollectiveKind.ALL_GATHER
