"""A layer: what it holds, computes and keeps for the backward pass.

A model is a list of layers; each family in ``simplan.model.families`` is one builder of such a list.
Quantities are per sequence; a microbatch of b sequences does b times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from simplan.model.kernel import (
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
from simplan.model.operator import (
    Operator,
    Role,
    Tensor,
    gradient_order,
    kernel_places,
    kernels_of,
    needs_gradient,
    saved_tensors,
    storages,
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
    "Operator",
    "ParameterSpec",
    "Pointwise",
    "Role",
    "Tensor",
    "has_backward",
]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """One layer.

    Attributes:
        key: Identifies shape and kind; equal keys mean equal layers (also in a calibration).
        kind: Where it stands in the model.
        parameters: Weight tensors in the order in which forward uses them.
        operators: What forward runs, in order, for one sequence.
        inputs: Tensors that it gets from the layer before, of one sequence.
        outputs: Names of the tensors that it gives to the next one (none for the head: a scalar loss).
        output_shapes: Their shapes, of one sequence; of the head, those of the logits.
        passed_outputs: Which of them are inputs that it only hands on.
        product_outputs: Which of them are for matrix products alone, in their precision, not of the residual stream.
        constants: Tables that are made once and that all layers of this key on a rank share.
        buffers: Tables of its own that are neither weights nor kept for backward.
        tied: Names of parameters that are the same tensor as the embedding's ``wte`` in another layer.
        compiled: It is one function for torch.compile, whose backward gives all gradients of weights at its end.
        reruns_to_end: What backward runs again of it, it runs to its end, though nothing asks for the last results.
        late_savers: Matmuls that save their input when they have run, as autograd functions do.
        mtp_depth: It follows the last block, for tokens so many places further on (``simplan.model.families.mtp``).
        needs_input_gradient: Something before it is trained.
    """

    key: str
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    passed_outputs: tuple[int, ...] = ()
    product_outputs: tuple[int, ...] = ()
    constants: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    tied: tuple[str, ...] = ()
    compiled: bool = False
    reruns_to_end: bool = False
    late_savers: tuple[str, ...] = ()
    mtp_depth: int = 0
    needs_input_gradient: bool = True

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """What forward runs and what is priced, in order, for one sequence."""
        return kernels_of(self.operators)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """By operator, the index of its kernel."""
        return kernel_places(self.operators)

    @cached_property
    def roles(self) -> tuple[frozenset[Role], ...]:
        """By kernel, the roles of its operator."""
        return tuple(operator.roles for operator in self.operators if operator.kernel is not None)

    def kernels_with(self, role: Role) -> tuple[int, ...]:
        """Indices of the kernels with a role."""
        return tuple(index for index, roles in enumerate(self.roles) if role in roles)

    @cached_property
    def needed(self) -> frozenset[str]:
        """Names of the tensors that backward makes gradients of."""
        inputs = (
            tensor.name for tensor in self.inputs if self.needs_input_gradient and self.kind is not LayerKind.EMBEDDING
        )
        return needs_gradient(self.operators, inputs)

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """What forward saves for backward, for one sequence."""
        found = saved_tensors(self.operators, self.inputs, self.needed)
        given = {*self.outputs} & {*self.makers}  # which the next layer saves, and counts
        return tuple(tensor for tensor in found if tensor.handed_on or tensor.name not in given)

    @cached_property
    def makers(self) -> dict[str, int]:
        """By tensor that it makes, the index of the kernel that does."""
        pairs = zip(self.operators, self.places, strict=True)
        return {tensor.name: place for operator, place in pairs for tensor in operator.makes}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        made = (tensor for operator in self.operators for tensor in operator.makes)
        return {tensor.name: tensor for tensor in (*self.inputs, *made)}

    @cached_property
    def gradient_order(self) -> tuple[int, ...]:
        """Indices into ``parameters`` in the order in which backward completes their gradients."""
        place = {parameter.name: index for index, parameter in enumerate(self.parameters)}
        trained = (name for name in gradient_order(self.operators) if not self.parameters[place[name]].frozen)
        return tuple(place[name] for name in trained)

    @cached_property
    def output_elements(self) -> int:
        """Elements handed to the next layer, for one sequence (0 for the head)."""
        return 0 if self.kind is LayerKind.HEAD else sum(math.prod(shape) for shape in self.output_shapes)

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

    def storages(self, activation_bytes: int, residual_bytes: int) -> dict[str, Tensor]:
        """By tensor, the one whose memory it has at these widths."""
        return storages(self.operators, self.inputs, activation_bytes, residual_bytes)

    def saved_bytes(self, activation_bytes: int) -> tuple[int, int]:
        """``(activations, logits)`` kept for backward, bytes of one sequence."""
        totals = [0, 0]
        found = self.storages(activation_bytes, activation_bytes)
        for tensor in {found[tensor.name].name: found[tensor.name] for tensor in self.saved}.values():
            totals[tensor.logits] += 0 if tensor.elsewhere else tensor.num_bytes(activation_bytes, activation_bytes)
        return totals[0], totals[1]
