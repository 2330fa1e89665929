"""A layer: what it holds, computes and keeps for the backward pass.

A model is a list of layers; each family in ``simplan.spec.models`` is one builder of such a list.
Quantities are per sequence; a microbatch of b sequences does b times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

__all__ = [
    "Attention",
    "CollectiveKind",
    "Exchange",
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


class CollectiveKind(StrEnum):
    """Ways in which bytes move. What ``num_bytes`` of a message means is said for each; nccl-tests counts alike."""

    ALL_REDUCE = "all_reduce"
    """The buffer of each rank."""
    ALL_GATHER = "all_gather"
    """The gathered buffer."""
    REDUCE_SCATTER = "reduce_scatter"
    """The buffer before it is scattered."""
    ALL_TO_ALL = "all_to_all"
    """The buffer of each rank."""
    BROADCAST = "broadcast"
    """The buffer; the root comes first among the ranks of the message."""
    RING = "ring"
    """What each rank sends to the next one of its group while it receives as much from the one before."""
    SEND = "send"
    """The message; its ranks are source and destination."""


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
class Gemm:
    """A matrix product of activations (m x k) with a weight (k x n); m counts the rows of one sequence.

    Attributes:
        name: What ``Saved.made_by`` calls it.
        m, n, k: Sizes.
        num_groups: Weights, side by side, each for as many of the rows (experts).
        model_rows: The rows that model FLOPs count; 0 for all of them. Experts compute places that no token takes, too.
        image_elements: Of a convolution, the elements of its input: m counts the pixels of its output, and k all inputs
            of one of them, so that every input is used several times; 0 for m k.
        trained: Backward makes the gradient of the weight.
        propagates: Backward makes the gradient of the input.
    """

    name: str
    m: int
    n: int
    k: int
    num_groups: int = 1
    model_rows: int = 0
    image_elements: int = 0
    trained: bool = True
    propagates: bool = True

    @property
    def flops(self) -> int:
        """2 m n k, of the rows that count."""
        return 2 * (self.model_rows or self.m) * self.n * self.k

    @property
    def backward_products(self) -> int:
        """Products of backward, each as large as that of forward."""
        return self.trained + self.propagates

    @property
    def computed_flops(self) -> int:
        """2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def input_elements(self) -> int:
        """Elements it reads, weights aside."""
        return self.image_elements or self.m * self.k

    @property
    def weight_elements(self) -> int:
        """Of all weights."""
        return self.num_groups * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention core (two batched products and the softmax) of one sequence.

    Attributes:
        num_heads, num_key_value_heads, head_dim: Shapes, on one rank.
        seq_len: Queries, on one rank.
        causal: Each query meets the keys up to its own, which is half of the scores.
        num_keys: Keys that every query meets, mask aside; 0 for as many as there are queries.
        value_head_dim: Width of a head of the values; 0 for that of the keys.
        window: Of the keys up to its own each query meets the last so many; 0 for all of them.
        masked: A table of what is added to the scores (a bias, or minus infinity) says which of them count, so that
            no kernel skips any.
        padded: Values are padded to the width of keys, which is computed, too.
        eager: Scores, and what the softmax makes of them, are tensors of their own, not only inside of one kernel.
        documents: Lengths of the documents that share the sequence: a token meets those of its own only. What they
            leave of it is padding, which meets itself and counts for nothing. Each is a call of the kernel; empty for
            one call over the sequence.
        name: What ``Saved.made_by`` calls it.
        propagates: It has a backward: something that is trained is in its inputs.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    seq_len: int
    causal: bool = True
    num_keys: int = 0
    value_head_dim: int = 0
    window: int = 0
    masked: bool = False
    padded: bool = False
    eager: bool = False
    documents: tuple[int, ...] = ()
    name: str = "attention"
    propagates: bool = True

    @property
    def num_scores(self) -> int:
        """Products of a query and a key, q k a."""
        return sum(queries * keys for queries, keys in self._counted) * self.num_heads

    @property
    def full_flops(self) -> int:
        """2 q k a (d + d_v): both products over all queries and keys (the PaLM convention), of each document."""
        return sum(self._full_flops(queries, keys) for queries, keys in self._counted)

    @property
    def flops(self) -> int:
        """What counts of ``full_flops``: half when causal; with a window of w of k keys w (2 k - w) / (2 k^2) of it."""
        return sum(self._flops(queries, keys) for queries, keys in self._counted)

    @property
    def computed_flops(self) -> int:
        """What the kernel computes: all scores where a table masks them or they are a tensor, else ``flops``.

        Padding, of values or of the sequence, is computed, too.
        """
        return sum(self.calls)

    @property
    def calls(self) -> tuple[int, ...]:
        """The same of each call of the kernel."""
        pairs = self._counted
        padding = self.seq_len - sum(self.documents)
        if self.documents and padding:
            pairs = (*pairs, (padding, padding))
        count = self._full_flops if self.masked or self.eager else self._flops
        width = self.head_dim + (self.value_head_dim or self.head_dim)
        wider, narrow = (2 * self.head_dim, width) if self.padded else (1, 1)
        return tuple(count(queries, keys) * wider // narrow for queries, keys in pairs)

    @property
    def _counted(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys that meet: of every document, or of the whole sequence."""
        if self.documents:
            return tuple((length, length) for length in self.documents)
        return ((self.seq_len, self.num_keys or self.seq_len),)

    def _full_flops(self, queries: int, keys: int) -> int:
        return 2 * queries * keys * self.num_heads * (self.head_dim + (self.value_head_dim or self.head_dim))

    def _flops(self, queries: int, keys: int) -> int:
        full = self._full_flops(queries, keys)
        if not self.causal:
            return full
        window = min(self.window or keys, keys)
        return full * window * (2 * keys - window) // (2 * keys**2)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A memory-bound kernel: elements of one sequence it reads and writes, and whether it has a backward."""

    name: str
    reads: int
    writes: int
    propagates: bool = True


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding lookup: rows gathered (forward) and, if it is trained, scattered (backward) for one sequence."""

    name: str
    rows: int
    width: int
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside a layer, over its tensor-, context- or expert-parallel ranks.

    Attributes:
        name: What is exchanged.
        axis: The axis of the mesh whose ranks take part.
        forward: What forward does; None for nothing.
        backward: What backward does in its place; None for nothing.
        elements: Elements of the buffer (see ``CollectiveKind`` for which) for one sequence.
        bytes_per_element: Fixed width; None for the width of activations.
        beside_previous: It needs only what was there before the kernels since the last exchange, and runs beside them
            where the device can (ring attention sends keys on while it works on those it has).
        residual: What is exchanged is of the residual stream, which autocast keeps in fp32.
    """

    name: str
    axis: Literal["tp", "cp", "ep"]
    forward: CollectiveKind | None
    backward: CollectiveKind | None
    elements: int
    bytes_per_element: int | None = None
    beside_previous: bool = False
    residual: bool = False


Kernel = Gemm | Attention | Pointwise | Lookup | Exchange


def has_backward(kernel: Kernel) -> bool:
    """Whether backward does something for a kernel: not where nothing that is trained is in its result."""
    match kernel:
        case Gemm():
            return kernel.backward_products > 0
        case Attention() | Pointwise():
            return kernel.propagates
        case Lookup():
            return kernel.trained
        case Exchange():
            return kernel.backward is not None


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

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerSpec) and self.key == other.key

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
