"""A layer: what it holds, computes and keeps for the backward pass.

A model is a list of layers; each family in ``simplan.spec.models`` is one builder of such a list.
Quantities are per sequence; a microbatch of b sequences does b times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from simplan.spec.kernel import (
    Attention,
    CollectiveKind,
    Exchange,
    ExpertDraw,
    Gemm,
    Kernel,
    Lookup,
    Pointwise,
    has_backward,
)

__all__ = [
    "Attention",
    "CollectiveKind",
    "Exchange",
    "ExpertDraw",
    "Gemm",
    "Kernel",
    "LayerKind",
    "LayerSpec",
    "Lookup",
    "ParameterSpec",
    "Pointwise",
    "Saved",
    "has_backward",
]

_FP32_BYTES = 4


class LayerKind(StrEnum):
    """What a layer is in the pipeline: the first, a repeated one, or the last with the loss."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One weight tensor.

    Attributes:
        name: Name inside its layer, as the executor's module calls it.
        shape: Its dimensions, on one rank.
        partial_gradient: Every tensor-parallel rank holds all of it but sees only a part of the tokens (sequence
            parallelism) or heads, so that its gradients are summed over these ranks once they are complete.
        expert: Every expert-parallel rank holds another part of it (its own experts), so that only ranks with the same
            experts average its gradients.
        frozen: It is not trained: no gradient, no optimizer states.
    """

    name: str
    shape: tuple[int, ...]
    partial_gradient: bool = False
    expert: bool = False
    frozen: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward.

    Attributes:
        name: What it is, for the memory breakdown.
        elements: Elements for one sequence.
        bytes_per_element: Fixed width (indices, fp32 statistics); None for the width of activations.
        logits: Belongs to the output distribution, which the breakdown shows apart.
        made_by: Name of the kernel that makes it; empty for the layer's input.
        residual: Part of the residual stream, which autocast keeps in fp32.
        narrowed: A copy of something in fp32 that is kept as well, for matrix products: none where these are in fp32.
        handed_on: It is what the layer gives, kept for layers after it.
        as_given: The input of a layer after one that gives it in the width of activations: no copy.
        of_microbatch: One for all sequences of a microbatch.
    """

    name: str
    elements: int
    bytes_per_element: int | None = None
    logits: bool = False
    made_by: str = ""
    residual: bool = False
    narrowed: bool = False
    handed_on: bool = False
    as_given: bool = False
    of_microbatch: bool = False

    def num_bytes(self, activation_bytes: int, residual_bytes: int) -> int:
        """Of one sequence, by the widths of activations and of the residual stream."""
        if self.narrowed and activation_bytes >= _FP32_BYTES:
            return 0
        return self.elements * (self.bytes_per_element or (residual_bytes if self.residual else activation_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSpec:
    """One layer.

    Attributes:
        key: Identifies shape and kind; equal keys mean equal layers (also in a calibration).
        kind: Where it stands in the model.
        parameters: Weight tensors in the order in which forward uses them.
        kernels: What forward runs, for one sequence.
        saved: What forward keeps for backward, for one sequence.
        output_elements: Elements handed to the next layer, for one sequence (0 for the head: a scalar loss).
        output_shapes: Shapes of the tensors that its module gives, of one sequence; of the head, those of the logits.
        passed_outputs: Which of them are inputs that it only hands on.
        product_outputs: Which of them are for matrix products alone, in their precision, not of the residual stream.
        constants: Tables that are made once and that all layers of this key on a rank share.
        buffers: Tables of its own that are neither weights nor kept for backward.
        tied: Names of parameters that are the same tensor as the embedding's ``wte`` in another layer.
        gradient_order: Indices into ``parameters`` in the order in which backward completes their gradients.
        compiled: It is one function for torch.compile, whose backward gives all gradients of weights at its end.
        reruns_to_end: What backward runs again of it, it runs to its end, though nothing asks for the last results.
        mtp_depth: It follows the last block, for tokens so many places further on (``simplan.spec.models.mtp``).
    """

    key: str
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...]
    kernels: tuple[Kernel, ...]
    saved: tuple[Saved, ...]
    output_elements: int
    output_shapes: tuple[tuple[int, ...], ...] = ()
    passed_outputs: tuple[int, ...] = ()
    product_outputs: tuple[int, ...] = ()
    constants: tuple[Saved, ...] = ()
    buffers: tuple[Saved, ...] = ()
    tied: tuple[str, ...] = ()
    gradient_order: tuple[int, ...] = field(default=())
    compiled: bool = False
    reruns_to_end: bool = False
    mtp_depth: int = 0

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerSpec) and self.key == other.key

    @property
    def title(self) -> str:
        """What it is called: its kind, or ``mtp`` of one for later tokens."""
        return "mtp" if self.mtp_depth else str(self.kind)

    def output_bytes(self, activation_bytes: int, residual_bytes: int) -> tuple[int, int]:
        """``(made, passed on)``: bytes of one sequence that the next layer gets."""
        totals = [0, 0]
        for index, shape in enumerate(self.output_shapes if self.output_elements else ()):
            width = activation_bytes if index in self.product_outputs else residual_bytes
            totals[index in self.passed_outputs] += math.prod(shape) * width
        return totals[0], totals[1]

    @property
    def made_elements(self) -> int:
        """Of ``output_elements``, those that are not only handed on."""
        passed = sum(math.prod(self.output_shapes[index]) for index in self.passed_outputs)
        return self.output_elements - passed

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones included."""
        return sum(p.num_elements for p in self.parameters)

    @property
    def num_trained(self) -> int:
        """Elements of the weights that are not frozen."""
        return sum(p.num_elements for p in self.parameters if not p.frozen)

    def flops(self, *, full_attention: bool = False) -> int:
        """Forward model FLOPs of one sequence: matrix products and attention.

        Args:
            full_attention: Count the whole attention square (PaLM) instead of the causal half.
        """
        total = 0
        for kernel in self.kernels:
            if isinstance(kernel, Gemm):
                total += kernel.flops
            elif isinstance(kernel, Attention):
                total += kernel.full_flops if full_attention else kernel.flops
        return total

    def backward_flops(self, *, full_attention: bool = False) -> int:
        """The same of backward: as many products as have to be made, which is twice forward where all is trained."""
        total = 0
        for kernel in self.kernels:
            if isinstance(kernel, Gemm):
                total += kernel.backward_products * kernel.flops
            elif isinstance(kernel, Attention) and kernel.propagates:
                total += 2 * (kernel.full_flops if full_attention else kernel.flops)
        return total

    def saved_bytes(self, activation_bytes: int) -> tuple[int, int]:
        """``(activations, logits)`` kept for backward, bytes of one sequence."""
        totals = [0, 0]
        for tensor in self.saved:
            totals[tensor.logits] += tensor.num_bytes(activation_bytes, activation_bytes)
        return totals[0], totals[1]
