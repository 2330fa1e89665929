"""A layer: its parameters, operators and the tensors saved for backward.

A model is a list of layers; each family in ``simplan.model.families`` is one builder of such a list. Quantities are per
sequence; a microbatch of b sequences has b times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from simplan.model.kernel import (
    Attention,
    Chunks,
    CollectiveKind,
    ExpertDraw,
    Gemm,
    Kernel,
    LayerCollective,
    Lookup,
    Pointwise,
    has_backward,
)
from simplan.model.operator import Operator, Role, Tensor, saved_by, storages
from simplan.model.weight_format import WeightFormat

__all__ = [
    "Attention",
    "CollectiveKind",
    "ExpertDraw",
    "Gemm",
    "Kernel",
    "LayerCollective",
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


MAX_BOUNDARY_TENSORS = 63
"""Most tensors that a pipeline stage hands to the next one."""


class LayerKind(StrEnum):
    """Position of a layer in the pipeline: the first, a repeated one, or the last with the loss."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One weight tensor.

    Attributes:
        name: Name inside its layer, as in the executor's module.
        shape: Dimensions on one rank.
        partial_gradient: Every tensor-parallel rank holds the full weight but sees only some of the tokens (sequence
            parallelism) or heads. Complete gradients are summed over these ranks.
        expert: Expert weight: every expert-parallel rank holds different experts, and only ranks with the same experts
            average its gradients.
        frozen: The weight is not trained: no optimizer states, and no gradient unless ``is_flat``.
        in_root: The weight is outside of the layer's module, so that FSDP has it in its root unit.
        stored: Stored form of a frozen weight of few bits; None for a weight of the usual width.
        is_copy: A trained copy of a frozen weight, as wide as that one.
        is_flat: A frozen weight in one tensor with trained ones, of which autograd makes one gradient (FSDP1).
    """

    name: str
    shape: tuple[int, ...]
    partial_gradient: bool = False
    expert: bool = False
    frozen: bool = False
    in_root: bool = False
    stored: WeightFormat | None = None
    is_copy: bool = False
    is_flat: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def has_gradient(self) -> bool:
        """True if backward computes a gradient of the weight."""
        return not self.frozen or self.is_flat


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """One layer.

    Attributes:
        key: Identifier of shape and kind; equal keys mean equal layers (also in a calibration).
        parameters: Weight tensors in the order in which forward uses them.
        operators: Operators of forward, in order, for one sequence.
        inputs: Tensors from the layer before, of one sequence.
        outputs: Names of the tensors for the next layer (none for the head: a scalar loss).
        output_shapes: Shapes of ``outputs``, of one sequence; for the head, the shape of the logits.
        passed_outputs: Indices of outputs that are inputs passed on unchanged.
        matmul_dtype_outputs: Indices of outputs in the precision of matmuls instead of that of the residual stream.
        constants: Lookup tables made once and shared by all layers of this key on a rank.
        buffers: Tables of this layer alone that are neither weights nor saved for backward.
        attributes: Tables of modules that are no buffers, which DDP does not broadcast.
        tied: Names of parameters that are the same tensor as the embedding's ``wte`` in another layer.
        compiled: The layer is one torch.compile function, whose backward returns all gradients of weights at its end.
        full_recompute_pass: Recomputation re-executes the layer to its end (no early stop), although nothing needs the
            last results.
        late_savers: Names of matmuls that save their input after they ran, as autograd functions do.
        mtp_depth: Multi-token prediction depth: the layer follows the last block and predicts this many tokens further
            ahead (``simplan.model.families.mtp``); 0 for other layers.
        needs_input_gradient: Something before the layer is trained.
        in_root: The layer is no module, so that FSDP has its weights in its root unit.
    """

    key: str
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    passed_outputs: tuple[int, ...] = ()
    matmul_dtype_outputs: tuple[int, ...] = ()
    constants: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    attributes: tuple[Tensor, ...] = ()
    tied: tuple[str, ...] = ()
    compiled: bool = False
    full_recompute_pass: bool = False
    late_savers: tuple[str, ...] = ()
    mtp_depth: int = 0
    needs_input_gradient: bool = True
    in_root: bool = False

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels with a cost estimate, in the order of forward, for one sequence."""
        return tuple(operator.kernel for operator in self.operators if operator.kernel is not None)

    @cached_property
    def unfitted(self) -> dict[str, float]:
        """Relative standard deviations of kernels of kinds that were never fitted, by name."""
        priced = (kernel for kernel in self.kernels if isinstance(kernel, Gemm | Pointwise))
        return {kernel.name: kernel.relative_std for kernel in priced if kernel.relative_std}

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Index of each operator's kernel: its own, or that of the operator it is fused into."""
        numbers = accumulate(operator.kernel is not None for operator in self.operators)
        return tuple(max(0, number - 1) for number in numbers)

    @cached_property
    def roles(self) -> tuple[frozenset[Role], ...]:
        """Roles of each kernel's operator."""
        return tuple(operator.roles for operator in self.operators if operator.kernel is not None)

    def kernels_with(self, role: Role) -> tuple[int, ...]:
        """Indices of the kernels with a role."""
        return tuple(index for index, roles in enumerate(self.roles) if role in roles)

    @cached_property
    def needed(self) -> frozenset[str]:
        """Names of the tensors whose gradients backward computes.

        Matmuls that share one all-gather of tokens are one autograd function: all of their results have gradients if
        one has.
        """
        has_gradients = self.needs_input_gradient and self.kind is not LayerKind.EMBEDDING
        found = {tensor.name for tensor in self.inputs if has_gradients}
        gathered = {operator.regathers for operator in self.operators if operator.regathers}
        together = {o.reads[0] for o in self.operators if o.trains and gathered.intersection(o.reads[:1])}
        for operator in self.operators:
            reads_needed = not (found | together).isdisjoint(operator.reads)
            if not operator.detached and (operator.trains or reads_needed):
                found.update(tensor.name for tensor in operator.makes)
        return frozenset(found)

    @cached_property
    def derived(self) -> dict[tuple[object, ...], Any]:
        """Results that other modules derive from the operators, by arguments. Layers with equal keys may differ."""
        return {}

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """Tensors that forward saves for backward, for one sequence, each once, in the order in which they are made."""
        names = {name for operator in self.operators for name in saved_by(operator, self.needed)}
        names -= {*self.outputs} & {*self.makers}  # which the next layer saves, and counts
        return tuple(t for t in self.tensors.values() if t.forwarded or (t.name in names and not t.elsewhere))

    @cached_property
    def makers(self) -> dict[str, int]:
        """Index of the kernel that makes each tensor, by name."""
        pairs = zip(self.operators, self.places, strict=True)
        return {tensor.name: place for operator, place in pairs for tensor in operator.makes}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        made = (tensor for operator in self.operators for tensor in operator.makes)
        return {tensor.name: tensor for tensor in (*self.inputs, *made)}

    @cached_property
    def gradient_order(self) -> tuple[int, ...]:
        """Indices into ``parameters`` in the order in which backward completes their gradients.

        Matmuls whose tokens backward gathers again are one autograd function, which returns the gradients of all their
        weights at its end. Biases are added after that function, so their gradients come first.
        """
        gathered = {operator.regathers for operator in self.operators if operator.regathers}
        names: list[str] = []
        waiting: list[str] = []  # weights of one such function
        for index in range(len(self.operators) - 1, -1, -1):
            operator = self.operators[index]
            source = operator.reads[:1]
            if gathered.isdisjoint(source) or not operator.parameters:
                names += operator.parameters
                continue
            *biases, weight = operator.parameters
            names += biases
            waiting.insert(0, weight)
            if all(other.reads[:1] != source or not other.parameters for other in self.operators[:index]):
                names += waiting
                waiting.clear()
        places = {parameter.name: index for index, parameter in enumerate(self.parameters)}
        return tuple(places[name] for name in names if not self.parameters[places[name]].frozen)

    @cached_property
    def output_elements(self) -> int:
        """Elements passed to the next layer, for one sequence (0 for the head)."""
        return 0 if self.kind is LayerKind.HEAD else sum(math.prod(shape) for shape in self.output_shapes)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerSpec) and self.key == other.key

    @cached_property
    def loss_chunks(self) -> Chunks | None:
        """Chunks of the output projection and the loss; None for a layer without, or for all tokens at once."""
        return next((k.chunks for k in self.kernels if isinstance(k, Gemm) and k.chunks is not None), None)

    @property
    def title(self) -> str:
        """Display name: the kind, or ``mtp`` for multi-token prediction."""
        return "mtp" if self.mtp_depth else str(self.kind)

    def output_bytes(self, activation_bytes: int, residual_bytes: int) -> tuple[int, int]:
        """Bytes ``(made, passed on)`` of one sequence that the next layer gets."""
        totals = [0, 0]
        for index, shape in enumerate(self.output_shapes if self.output_elements else ()):
            width = activation_bytes if index in self.matmul_dtype_outputs else residual_bytes
            totals[index in self.passed_outputs] += math.prod(shape) * width
        return totals[0], totals[1]

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones included."""
        return sum(p.num_elements for p in self.parameters)

    @property
    def num_trained(self) -> int:
        """Elements of the weights that have gradients."""
        return sum(p.num_elements for p in self.parameters if p.has_gradient)

    def flops(self, *, full_attention: bool = False) -> int:
        """Forward model FLOPs of one sequence; attention counts as the causal half, or as the full square (PaLM)."""
        return sum(
            kernel.full_flops if full_attention and isinstance(kernel, Attention) else kernel.flops
            for kernel in self.kernels
            if isinstance(kernel, Gemm | Attention)
        )

    def backward_flops(self, *, full_attention: bool = False) -> int:
        """Backward model FLOPs of one sequence: twice forward if all weights are trained."""
        total = 0
        for kernel in self.kernels:
            if isinstance(kernel, Gemm):
                total += kernel.backward_matmuls * kernel.flops
            elif isinstance(kernel, Attention) and kernel.propagates:
                total += 2 * (kernel.full_flops if full_attention else kernel.flops)
        return total

    def storages(self, activation_bytes: int, residual_bytes: int) -> dict[str, Tensor]:
        """Map each tensor to the tensor whose memory it uses at these widths."""
        return storages(self.operators, self.inputs, activation_bytes, residual_bytes)

    def saved_bytes(self, activation_bytes: int, residual_bytes: int | None = None) -> tuple[int, int]:
        """Bytes ``(activations, logits)`` of one sequence saved for backward.

        Args:
            activation_bytes, residual_bytes: Bytes per element of activations, and of the residual stream; None for
                those of activations.
        """
        totals, widths = [0, 0], (activation_bytes, residual_bytes or activation_bytes)
        found = self.storages(*widths)
        for tensor in {found[tensor.name].name: found[tensor.name] for tensor in self.saved}.values():
            totals[tensor.logits] += 0 if tensor.elsewhere else tensor.num_bytes(*widths)
        return totals[0], totals[1]
