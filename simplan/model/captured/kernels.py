"""Kernels of captured operators, from their shapes.

A matmul with a weight is a ``Gemm`` of the rows of one sample; a matmul of two activations is one of as many groups as
it has matrices. A convolution is a ``Gemm`` of its output pixels, whose inner dimension is all inputs of one output
pixel. All else moves bytes.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from simplan.model.captured.facts import CapturedOperator, Shape
from simplan.model.kernel import Attention, Gemm, Kernel, Lookup, Pointwise, PointwiseFunction

MATMULS = frozenset({"mm", "addmm", "_addmm_activation"})
"""Products of one matrix of activations and another matrix, which may be a weight."""
_BATCHED = frozenset({"bmm", "baddbmm"})
_LOOKUPS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
_MOVES = frozenset({
    "clone", "copy_", "cat", "stack", "_to_copy", "constant_pad_nd", "index", "gather", "index_select", "repeat",
    "masked_fill", "roll", "flip", "slice_scatter", "select_scatter", "contiguous",
})  # fmt: skip
"""Operators that move elements: backward moves gradients, and reads nothing of forward."""
_LIKE: dict[str, PointwiseFunction] = {
    "native_layer_norm": "layer_norm",
    "native_group_norm": "layer_norm",
    "native_batch_norm": "layer_norm",
    "cudnn_batch_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm",
    "gelu": "gelu",
    "silu": "gelu",
    "_log_softmax": "cross_entropy",
    "_softmax": "cross_entropy",
    "nll_loss_forward": "cross_entropy",
}

_OF_IMAGES = frozenset({"native_group_norm", "native_batch_norm", "cudnn_batch_norm"})
"""Norms whose statistics are of more than a row."""


class _Kind(NamedTuple):
    """Price of a kind of operator that was never fitted: an assumption, as wide as what is not known.

    Attributes:
        passes: Times that the bytes of operands and results are moved.
        relative_std: Relative standard deviation of the time.
    """

    words: frozenset[str]
    passes: float
    relative_std: float


_KINDS = (
    # two passes over blocks; along other dimensions than the last one the kernel is serial
    _Kind(frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}), 2.0, 1.0),
    # atomic additions, or a sort of the indices where results must be the same again
    _Kind(frozenset({
        "index_put", "index_put_", "_unsafe_index_put", "index_add", "index_add_", "scatter", "scatter_", "scatter_add",
        "scatter_add_", "scatter_reduce", "index_reduce", "masked_scatter",
    }), 4.0, 1.0),
    # radix sort: four digits of 8 bits, each read, counted and written with its index of 8 bytes
    _Kind(frozenset({"sort", "argsort", "topk", "kthvalue", "unique_consecutive"}), 8.0, 1.0),
    # up to three passes for long dimensions, and transposes
    _Kind(frozenset({"_fft_r2c", "_fft_c2r", "_fft_c2c"}), 3.0, 0.7),
    # windows overlap
    _Kind(frozenset({
        "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
        "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "grid_sampler_2d",
        "im2col", "col2im",
    }), 2.0, 0.5),
)  # fmt: skip
_GROUPED_CONVOLUTION_STD = 1.0
"""Kernels of depthwise and grouped convolutions differ by library and shape."""
_CONVOLUTION_STD = 0.3


def kind_of(operator: CapturedOperator) -> tuple[float, float]:
    """Passes over the bytes of a memory-bound operator, and its relative standard deviation: 1 and 0 if fitted."""
    found = next((kind for kind in _KINDS if word(operator) in kind.words), None)
    return (1.0, 0.0) if found is None else (found.passes, found.relative_std)


SUMS = frozenset({"add", "add_"})
"""Operators whose gradient is the gradient of everything that they read."""


_ELEMENTWISE = frozenset({"mul", "mul_", "div"})
PRODUCTS = MATMULS | _BATCHED | {"_grouped_mm"} | _ELEMENTWISE
"""Operators with two operands, of which each is saved for the gradient of the other."""


def word(operator: CapturedOperator) -> str:
    """Name of an operator without its namespace."""
    return operator.op.rpartition(".")[2]


def is_attention(operator: CapturedOperator) -> bool:
    """True for torch's fused attention."""
    return "scaled_dot_product" in operator.op


def kernel_of(operator: CapturedOperator, name: str) -> Kernel:
    """Kernel of an operator.

    Args:
        name: Name of the kernel, unique in its layer.
    """
    kind = word(operator)
    if kind in MATMULS or kind in _BATCHED or kind == "_grouped_mm":
        return _matmul(operator, name)
    if kind == "convolution":
        return _convolution(operator, name)
    if is_attention(operator):
        return _attention(operator, name)
    if kind in _LOOKUPS:
        return Lookup(name, prod(operator.operands[1]), operator.operands[0][-1], trained=operator.trains)
    passes, relative_std = kind_of(operator)
    return Pointwise(
        name,
        sum(prod(shape) for place, shape in enumerate(operator.operands) if place not in operator.weights),
        sum(prod(shape) for shape in operator.results),
        propagates=(operator.propagates or operator.trains) and not operator.passes,
        moves=kind in _MOVES,
        like=_LIKE.get(kind, "add"),
        passes=passes,
        sums=_sums(operator),
        fusion="none" if passes != 1 else "results" if kind in _OF_IMAGES else "all",
        relative_std=relative_std,
    )


def _sums(operator: CapturedOperator) -> int:
    """See ``Pointwise.sums``; a sum along rows alone is part of the kernel that makes the gradient."""
    kind = word(operator)
    if (
        not operator.trains or kind not in SUMS | _ELEMENTWISE or not operator.results
    ):  # one gradient: of the larger one
        return 0
    (result,) = operator.results[:1]
    others = [shape for place, shape in enumerate(operator.operands) if place not in operator.weights]
    of_rows = (*result[:-1], 1)
    if not any(
        prod(shape) < prod(result) and _aligned(shape, result) != of_rows for shape in others if prod(shape) > 1
    ):
        return 0
    return 2 if kind in _ELEMENTWISE else 1


def _aligned(shape: Shape, result: Shape) -> Shape:
    """A shape with as many dimensions as the result."""
    return (*(1,) * (len(result) - len(shape)), *shape)


def _matmul(operator: CapturedOperator, name: str) -> Gemm:
    first = 0 if word(operator) == "_grouped_mm" else len(operator.operands) - 2
    left, right = operator.operands[first : first + 2]
    num_groups = max(1, prod(right[:-2]))
    m, n, k = prod(left[:-1]), right[-1], left[-1]
    is_weight = [first + side in operator.weights for side in (0, 1)]
    if is_weight == [True, False] and num_groups == 1:  # a weight times activations
        m, n = n, m
    trained, propagates = operator.trains, operator.propagates
    if not any(is_weight):  # the second one is as a weight: if one gradient is computed, it is that one's
        trained, propagates = propagates, trained
    return Gemm(
        name,
        m,
        n,
        k,
        num_groups=num_groups,
        trained=trained,
        propagates=propagates,
    )


def _convolution(operator: CapturedOperator, name: str) -> Gemm:
    image, weight, result = operator.operands[0], operator.operands[1], operator.results[0]
    groups = operator.settings.get("groups", 1)
    assert isinstance(groups, int)
    if operator.settings.get("transposed"):
        pixels, columns, inner = prod(image[2:]), prod(weight[1:]) * groups, weight[0] // groups
    else:
        pixels, columns, inner = prod(result[2:]), weight[0], prod(weight[1:])
    return Gemm(
        name,
        pixels * max(1, image[0] if len(image) > 2 else 1),
        columns,
        inner,
        image_elements=prod(image),
        trained=operator.trains,
        propagates=operator.propagates,
        relative_std=_GROUPED_CONVOLUTION_STD if groups > 1 else _CONVOLUTION_STD,
    )


def _attention(operator: CapturedOperator, name: str) -> Attention:
    queries, keys, values = operator.operands[:3]
    return Attention(
        queries[-3],
        keys[-3],
        queries[-1],
        queries[-2] * prod(queries[:-3]),
        causal=bool(operator.settings.get("is_causal", False)),
        num_keys=keys[-2],
        value_head_dim=values[-1],
        masked=len(operator.operands) > _UNMASKED,
        propagates=operator.propagates,
        name=name,
    )


_UNMASKED = 3


def one_sample(two: Shape, three: Shape) -> Shape:
    """Shape of one sample, from the shapes of two and of three: a dimension that grows is as long as it grew."""
    return tuple(more - less or less for less, more in zip(two, three, strict=True))
