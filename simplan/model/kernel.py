"""Kernels of a layer, for one sequence: matmuls, attention, memory-bound kernels, lookups and collectives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import comb
from typing import Literal, NamedTuple

from simplan.model.weight_format import WeightFormat

TOKEN_TABLE = "wte"
"""Name of the ``Lookup`` of tokens in the embedding; any other ``Lookup`` reads a smaller table."""

LOSS = "cross_entropy"
"""Name of the ``Pointwise`` of the loss."""


PointwiseFunction = Literal["layer_norm", "rms_norm", "gelu", "silu_multiply", "rotary", "cross_entropy", "add"]


Fusion = Literal["all", "results", "none"]


class CollectiveKind(StrEnum):
    """Communication operations. Each member states which buffer ``num_bytes`` measures, as in nccl-tests."""

    ALL_REDUCE = "all_reduce"
    """Buffer of each rank."""
    ALL_GATHER = "all_gather"
    """Gathered buffer."""
    REDUCE_SCATTER = "reduce_scatter"
    """Buffer before it is scattered."""
    ALL_TO_ALL = "all_to_all"
    """Buffer of each rank."""
    BROADCAST = "broadcast"
    """Buffer of the root, which comes first among the ranks."""
    RING = "ring"
    """Buffer that each rank sends to the next rank of its group while it receives an equal one from the previous
    rank."""
    SEND = "send"
    """Buffer of a P2P send; the ranks are source and destination."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of tokens in which an output projection and its loss run one after the other.

    Attributes:
        rows: Tokens of one sequence.
        number: Number of equal chunks; None for one of the others.
        size: Tokens per chunk, of all sequences of a microbatch; None for one of the others.
        shrink: Tokens of a microbatch over those of a chunk, whose size is then rounded up to a power of two.
        fours_of: Tokens of a microbatch up to which it is one chunk; more of them are a multiple of four chunks of at
            most so many. None for one of the others.
        in_forward: Backward of a chunk follows its loss, so that forward computes all gradients.
        in_place: These gradients of the weight are added to those of earlier microbatches; else they are one tensor,
            which backward returns.
        fused: One kernel replaces the logits of a chunk by their gradients.
    """

    rows: int
    number: int | None = None
    size: int | None = None
    shrink: int = 1
    in_forward: bool = False
    in_place: bool = False
    fused: bool = False
    fours_of: int | None = None

    def tokens(self, b: int) -> int:
        """Returns the tokens of the largest chunk of a microbatch of b sequences."""
        total = b * self.rows
        if self.number is not None:
            return -(-total // self.number)
        if self.size is not None:
            return min(total, self.size)
        if self.fours_of is not None:
            return total if total <= self.fours_of else -(-total // (4 * -(-total // (4 * self.fours_of))))
        return min(total, 1 << (-(-total // self.shrink) - 1).bit_length())

    def count(self, b: int) -> int:
        """Returns the number of chunks of a microbatch of b sequences."""
        return -(-b * self.rows // self.tokens(b))


@dataclass(frozen=True, slots=True)
class OperandKernels:
    """Kernels that make the operands of one matmul, per microbatch: rounded ones, or a matrix of trained parameters.

    Attributes:
        weights, activations: Bytes read and written per element of the weight, and of the input, in forward and in
            backward; None for an operand that is used as it is.
        weight_kernels, activation_kernels: Their kernels.
    """

    weights: tuple[int, int]
    activations: tuple[int, int] | None
    weight_kernels: tuple[int, int]
    activation_kernels: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matmul of activations (m x k) with a weight (k x n); m counts the rows of one sequence.

    Attributes:
        m, n, k: Rows of the input, columns of the result, inner dimension.
        num_groups: Weight matrices of a grouped GEMM (experts), each for m / num_groups rows; 1 for a plain GEMM.
        model_rows: Rows counted in model FLOPs; 0 for all of them. Experts also compute capacity slots that no token
            fills.
        image_elements: Elements of a convolution's input. m then counts output pixels and k all inputs of one output
            pixel, so that every input is used several times. 0 for a matmul, whose input has m k elements.
        trained: Backward computes the gradient of the weight (wgrad).
        propagates: Backward computes the gradient of the input (dgrad).
        streams: CUDA streams over which separate kernels of the groups run; 0 for one grouped kernel.
        cast_before: Operands that preceding kernels write in the precision of this matmul, so that no separate cast
            runs.
        joint: Fusion group: matmuls with one input and the same word can be fused (QKV, gate-up); empty for none.
        chunks: Chunks of tokens of separate matmuls; None for one matmul of all tokens.
        relative_std: Relative standard deviation of the time of a kind that was never fitted; 0 for that of the device.
        stored: Stored form of a frozen weight that every matmul unpacks first; None for a weight that is used as it is.
        full_precision: The matmul is in FP32, regardless of the precision of the run.
        norm_rank: Rank of the adapter (DoRA) with which forward computes the norms of the weight's rows once per
            microbatch; 0 for none.
        merged_rank: Rank of the adapters that forward adds to the weights of experts or a router once per microbatch.
            The weights are frozen, and the sum has a gradient; 0 for none.
        operands: Kernels that make the operands, of a weight with a gradient; None for operands that are there.
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
    chunks: Chunks | None = None
    relative_std: float = 0.0
    stored: WeightFormat | None = None
    full_precision: bool = False
    norm_rank: int = 0
    merged_rank: int = 0
    operands: OperandKernels | None = None

    @property
    def flops(self) -> int:
        """Model FLOPs of forward: 2 m n k, with ``model_rows`` for m where given."""
        return 2 * (self.model_rows or self.m) * self.n * self.k

    @property
    def backward_matmuls(self) -> int:
        """Matmuls of backward (dgrad, wgrad), each as large as the forward matmul."""
        return self.has_weight_gradient + self.propagates

    @property
    def has_weight_gradient(self) -> bool:
        """True if backward computes the gradient of the weight, or of what forward makes of it."""
        return self.trained or self.merged_rank > 0 or self.operands is not None

    @property
    def computed_flops(self) -> int:
        """FLOPs that the forward kernel computes: 2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def input_elements(self) -> int:
        """Elements of the input, without weights."""
        return self.image_elements or self.m * self.k

    @property
    def weight_elements(self) -> int:
        """Elements of all ``num_groups`` weights."""
        return self.num_groups * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention core (two batched matmuls and the softmax) of one sequence.

    Attributes:
        num_heads, num_key_value_heads, head_dim: Query heads, key and value heads, and width of a head, on one rank.
        seq_len: Queries, on one rank.
        causal: Each query attends to the keys up to its own, which is half of the scores.
        num_keys: Keys per query before masking; 0 for ``seq_len``.
        value_head_dim: Width of a value head; 0 for ``head_dim``.
        window: Sliding window: keys up to its own that each query attends to; 0 for no window.
        masked: A mask tensor (a bias, or minus infinity) is added to the scores, so that the kernel skips no keys.
        padded: Values are padded to the width of keys, and the padding is computed.
        eager: Scores and softmax results are materialized as tensors (unfused attention).
        soft_cap: Scores of eager attention pass through a scaled tanh: three more kernels.
        fused_softmax: In eager attention, scaling, mask and softmax are one kernel in the precision of activations;
            else the softmax is a separate kernel in FP32.
        dropout: Attention weights of eager attention pass through dropout.
        documents: Lengths of the documents packed into the sequence; empty for one document. A token attends only to
            its own document. The rest of the sequence is padding, which attends to itself and counts for no model
            FLOPs. Each document is a separate kernel call.
        one_call: All documents are one kernel call.
        propagates: Attention has a backward, because a trained weight is upstream of its inputs.
        eight_bits: Queries, keys, values and gradients of the output are quantized to FP8.
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
        """Query-key pairs over all heads, q k a."""
        return sum(queries * keys for queries, keys in self._counted) * self.num_heads

    @property
    def full_flops(self) -> int:
        """2 q k a (d + d_v): both matmuls over all queries and keys of each document (the PaLM convention)."""
        return sum(self._full_flops(queries, keys) for queries, keys in self._counted)

    @property
    def flops(self) -> int:
        """Model FLOPs: half of ``full_flops`` if causal; with a window of w of k keys, w (2 k - w) / (2 k^2) of it."""
        return sum(self._flops(queries, keys) for queries, keys in self._counted)

    @property
    def computed_flops(self) -> int:
        """FLOPs that the kernels compute: all scores if masked or eager, else ``flops``.

        Padding of values and of the sequence is computed, too.
        """
        return sum(self.calls)

    @property
    def calls(self) -> tuple[int, ...]:
        """``computed_flops`` of each kernel call."""
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
        """Numbers of queries and keys counted in model FLOPs: per document, or of the whole sequence."""
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
        reads, writes: Elements read and written for one sequence.
        moves: The kernel only moves elements: backward moves as many gradients. Otherwise backward also reads tensors
            of forward.
        launches: Kernels launched in sequence, in forward and in backward.
        like: Most similar function among those that a calibration times.
        chunks: Chunks of tokens of separate kernels; None for one kernel of all tokens.
        passes: Times that the bytes are moved, of kernels that need several passes or move them slowly.
        fusion: What a compiler puts into one kernel with neighbors: ``all``; the ``results``, after a kernel for
            statistics of whole images or batches, which reads the input first; or ``none``.
        sums: Tensors as large as the result that backward moves besides, to sum the gradient of an operand that was
            broadcast over rows: the gradient of the result, and the other operand of a product.
        relative_std: As of ``Gemm``.
    """

    name: str
    reads: int
    writes: int
    propagates: bool = True
    moves: bool = False
    launches: tuple[int, int] = (1, 1)
    like: PointwiseFunction = "add"
    chunks: Chunks | None = None
    passes: float = 1.0
    fusion: Fusion = "all"
    sums: int = 0
    relative_std: float = 0.0


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding lookup for one sequence: forward gathers rows; backward scatters gradients of a trained table."""

    name: str
    rows: int
    width: int
    trained: bool = True


class ExpertDraw(NamedTuple):
    """Random routing: a token uses ``top_k`` of ``num_experts`` experts, and every such set is equally likely."""

    num_experts: int
    top_k: int

    def places(self, num_places: int) -> float:
        """Expected ranks (or nodes) that a token goes to: R (1 - C(E - E/R, k) / C(E, k)) of R with E/R experts each.

        >>> ExpertDraw(8, 1).places(8), ExpertDraw(8, 8).places(4)
        (1.0, 4.0)
        """
        own = self.num_experts // num_places
        return num_places * (1 - comb(self.num_experts - own, self.top_k) / comb(self.num_experts, self.top_k))


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """A collective inside a layer, over its tensor-, context- or expert-parallel ranks, or the ranks of one expert.

    Attributes:
        name: Name of the tensor that is communicated.
        axis: Mesh axis whose ranks take part.
        forward, backward: Collective in each direction; None for none.
        elements: Elements of the buffer for one sequence (``CollectiveKind`` states which buffer).
        bytes_per_element: Fixed bytes per element; None for the width of activations.
        beside_previous: The collective depends on none of the kernels since the last collective and overlaps them where
            the device can. Ring attention sends keys on while it computes with them.
        residual: The tensor belongs to the residual stream, which autocast keeps in FP32.
        reorders: Parts of ranks that are gathered or scattered along tokens are copied to be in order.
        draw: Routing of an expert all-to-all that sends a token to every node once and forwards it there; None for
            others.
    """

    name: str
    axis: Literal["tp", "cp", "ep", "etp"]
    forward: CollectiveKind | None
    backward: CollectiveKind | None
    elements: int
    bytes_per_element: int | None = None
    beside_previous: bool = False
    residual: bool = False
    reorders: bool = True
    draw: ExpertDraw | None = None


Kernel = Gemm | Attention | Pointwise | Lookup | LayerCollective


def in_forward(kernel: Kernel) -> bool:
    """True if forward also runs the backward of a kernel."""
    return isinstance(kernel, Gemm | Pointwise) and kernel.chunks is not None and kernel.chunks.in_forward


def num_chunks(kernel: Kernel, b: int) -> int:
    """Returns the number of times that a kernel runs for b sequences, each time for some of their tokens."""
    chunks = kernel.chunks if isinstance(kernel, Gemm | Pointwise) else None
    return 1 if chunks is None else chunks.count(b)


def has_backward(kernel: Kernel) -> bool:
    """True if backward runs something for a kernel: a trained weight is in the kernel or upstream of it."""
    if in_forward(kernel):
        return False
    match kernel:
        case Gemm():
            return kernel.backward_matmuls > 0
        case Attention() | Pointwise():
            return kernel.propagates
        case Lookup():
            return kernel.trained
        case LayerCollective():
            return kernel.backward is not None
