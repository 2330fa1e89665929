"""Kernels: what a layer runs, for one sequence: matrix products, attention, memory-bound passes, exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import comb
from typing import Literal, NamedTuple

__all__ = [
    "LOSS",
    "TOKEN_TABLE",
    "Attention",
    "CollectiveKind",
    "Exchange",
    "ExpertDraw",
    "Gemm",
    "Kernel",
    "Lookup",
    "Pointwise",
    "PointwiseFunction",
    "has_backward",
]

TOKEN_TABLE = "wte"
"""The ``Lookup`` of tokens in the embedding; any other one is in a smaller table."""

LOSS = "cross_entropy"
"""The ``Pointwise`` of the loss."""


PointwiseFunction = Literal["layer_norm", "rms_norm", "gelu", "silu_multiply", "rotary", "cross_entropy", "add"]


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


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product of activations (m x k) with a weight (k x n); m counts the rows of one sequence.

    Attributes:
        name: What others call it.
        m, n, k: Sizes.
        num_groups: Weights, side by side, each for as many of the rows (experts).
        model_rows: The rows that model FLOPs count; 0 for all of them. Experts compute places that no token takes, too.
        image_elements: Of a convolution, the elements of its input: m counts the pixels of its output, and k all inputs
            of one of them, so that every input is used several times; 0 for m k.
        trained: Backward makes the gradient of the weight.
        propagates: Backward makes the gradient of the input.
        streams: Where the groups are kernels of their own: on how many streams these run; 0 for one kernel of all.
        cast_before: Operands that the kernels before it make as narrow as it computes with, so that no cast does.
        joint: Products with one input and one of these words can be held as one matrix; none for alone.
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
    streams: int = 0
    cast_before: tuple[Literal["input", "gradient"], ...] = ()
    joint: str = ""

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
        soft_cap: Scores of eager attention pass through a scaled tanh: three kernels more.
        fused_softmax: Of eager attention, scaling, mask and softmax are one kernel on numbers as wide as activations;
            else the softmax is one of fp32 numbers.
        dropout: Weights of eager attention pass through dropout.
        documents: Lengths of the documents that share the sequence: a token meets those of its own only. What they
            leave of it is padding, which meets itself and counts for nothing. Each is a call of the kernel; empty for
            one call over the sequence.
        one_call: They are all in one call of the kernel.
        name: What others call it.
        propagates: It has a backward: something that is trained is in its inputs.
        eight_bits: Queries, keys and values, and gradients of the output, are quantized for it.
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
    soft_cap: bool = False
    fused_softmax: bool = False
    dropout: bool = False
    documents: tuple[int, ...] = ()
    one_call: bool = False
    name: str = "attention"
    propagates: bool = True
    eight_bits: bool = False

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
        found = tuple(count(queries, keys) * wider // narrow for queries, keys in pairs)
        return (sum(found),) if self.one_call else found

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
    """A memory-bound kernel.

    Attributes:
        name: What others call it.
        reads, writes: Elements of one sequence.
        propagates: It has a backward.
        moves: It only moves elements: backward moves their gradients back, no more than forward does. Else backward
            also reads what forward had.
        launches: Kernels that run for it one after the other, in forward and in backward.
        like: The function that comes nearest among those that a calibration times.
    """

    name: str
    reads: int
    writes: int
    propagates: bool = True
    moves: bool = False
    launches: tuple[int, int] = (1, 1)
    like: PointwiseFunction = "add"


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding lookup: rows gathered (forward) and, if it is trained, scattered (backward) for one sequence."""

    name: str
    rows: int
    width: int
    trained: bool = True


class ExpertDraw(NamedTuple):
    """A token takes some of all experts, each set of them as often as any other."""

    num_experts: int
    top_k: int

    def places(self, num_places: int) -> float:
        """Places that have some of a token's experts: R (1 - C(E - E/R, k) / C(E, k)) of R that have as many each.

        >>> ExpertDraw(8, 1).places(8), ExpertDraw(8, 8).places(4)
        (1.0, 4.0)
        """
        own = self.num_experts // num_places
        return num_places * (1 - comb(self.num_experts - own, self.top_k) / comb(self.num_experts, self.top_k))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside a layer, over its tensor-, context- or expert-parallel ranks, or those of one expert.

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
        draw: Of an exchange that brings a token to every node once, and on from there: which experts it goes to.
    """

    name: str
    axis: Literal["tp", "cp", "ep", "etp"]
    forward: CollectiveKind | None
    backward: CollectiveKind | None
    elements: int
    bytes_per_element: int | None = None
    beside_previous: bool = False
    residual: bool = False
    draw: ExpertDraw | None = None


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
