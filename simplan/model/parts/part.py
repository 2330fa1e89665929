"""Parts, the building blocks of layers, and functions that compose them into layers.

A part knows its own parameters, operators and constants. A layer is a sequence of parts, and a family is a builder that
chooses them. Parts name the tensor that they are applied to, and those that they make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Pointwise, Role, Tensor
from simplan.model.share import RankShare

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.model.model import ModelSpec

FP32_BYTES = 4  # statistics of norms and softmax, and the cross-entropy, are FP32 in every precision
INDEX_BYTES = 8
MASK_BYTES = 1
_NORM_SCRATCH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """A piece of a layer; forward runs the pieces in order, backward in reverse.

    Attributes:
        parameters, operators, constants, buffers: See ``LayerSpec``.
    """

    parameters: tuple[ParameterSpec, ...] = ()
    operators: tuple[Operator, ...] = ()
    constants: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()


Block = tuple[str, list[LayerPart | Operator]]
"""Key and parts of a block; equal keys mean equal blocks."""


def joined(*parts: LayerPart | Operator) -> LayerPart:
    """Several parts, or operators without parameters, as one."""
    pieces = [LayerPart(operators=(part,)) if isinstance(part, Operator) else part for part in parts]
    return LayerPart(
        parameters=tuple(parameter for piece in pieces for parameter in piece.parameters),
        operators=tuple(operator for piece in pieces for operator in piece.operators),
        constants=tuple(table for piece in pieces for table in piece.constants),
        buffers=tuple(table for piece in pieces for table in piece.buffers),
    )


def layer_of(
    key: str,
    kind: LayerKind,
    parts: Iterable[LayerPart | Operator],
    *,
    inputs: tuple[Tensor, ...] = (),
    output_shapes: tuple[tuple[int, ...], ...],
    outputs: tuple[str, ...] = (),
    passed_outputs: tuple[int, ...] = (),
    matmul_dtype_outputs: tuple[int, ...] = (),
    tied: tuple[str, ...] = (),
    mtp_depth: int = 0,
) -> LayerSpec:
    """A layer composed of parts in the order of forward; without ``outputs``, the last tensor made is the output.

    Matmuls of what needs no gradient, such as images, have none to propagate.
    """
    whole = joined(*parts)
    last = tuple(tensor.name for tensor in whole.operators[-1].makes if tensor.bytes_per_element is None)
    made = LayerSpec(
        key=key,
        kind=kind,
        parameters=whole.parameters,
        operators=whole.operators,
        inputs=inputs,
        outputs=() if kind is LayerKind.HEAD else (outputs or last),
        output_shapes=output_shapes,
        passed_outputs=passed_outputs,
        matmul_dtype_outputs=matmul_dtype_outputs,
        constants=whole.constants,
        buffers=whole.buffers,
        tied=tied,
        mtp_depth=mtp_depth,
    )
    needed = made.needed
    made = replace(made, operators=tuple(_without_gradient(o, needed) for o in made.operators))
    assert sorted(made.gradient_order) == list(range(len(made.parameters))), key
    assert kind is LayerKind.HEAD or len(made.outputs) == len(output_shapes), key
    return made


def _without_gradient(operator: Operator, needed: frozenset[str]) -> Operator:
    if not isinstance(operator.kernel, Gemm) or not needed.isdisjoint(operator.reads):
        return operator
    return replace(operator, kernel=replace(operator.kernel, propagates=False))


def block_layer(key: str, parts: Iterable[LayerPart | Operator], share: RankShare) -> LayerSpec:
    """A block between hidden states."""
    shapes = share.hidden_shapes
    return layer_of(key, LayerKind.BLOCK, parts, inputs=(hidden_input(share),), output_shapes=shapes)


def block_key(model: ModelSpec, share: RankShare, *more: str) -> str:
    """Key of a block, with ``more`` properties that distinguish it: equal keys mean equal layers."""
    heads = [f"a{model.num_attention_heads}", f"kv{model.num_key_value_heads}", f"d{model.head_dim}"]
    sizes = [f"h{model.hidden_size}", *heads, f"i{model.intermediate_size}", f"s{model.seq_len}", *more]
    if share.documents:  # their order changes neither work nor memory
        counts = sorted(Counter(share.documents).items(), reverse=True)
        sizes.append("docs" + "+".join(f"{number}x{length}" for length, number in counts))
    return f"{model.family}-block:{','.join(sizes)}{share.suffix}"


class NormKind(NamedTuple):
    """A normalization of every token.

    Attributes:
        statistics: Numbers per row that backward needs: mean and deviation (LayerNorm), or the scale alone (RMSNorm).
    """

    statistics: int
    bias: bool


LAYER_NORM, RMS_NORM = NormKind(statistics=2, bias=True), NormKind(statistics=1, bias=False)


def hidden_input(share: RankShare, name: str = "input", *, elsewhere: bool = False) -> Tensor:
    """Hidden states that a layer takes as input; ``elsewhere`` as in ``Tensor``."""
    return Tensor(name, share.own_tokens * share.hidden, residual=True, elsewhere=elsewhere)


def rewired(part: LayerPart, old: str, new: str) -> LayerPart:
    """A part that reads the tensor ``new`` in place of the tensor ``old``."""

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new if name == old else name for name in names)

    operators = (replace(o, reads=renamed(o.reads), saves=renamed(o.saves)) for o in part.operators)
    return replace(part, operators=tuple(operators))


def with_role(part: LayerPart | Operator, *roles: Role) -> LayerPart:
    """A part whose operators have additional roles."""
    part = joined(part)
    return replace(part, operators=tuple(replace(o, roles=o.roles.union(roles)) for o in part.operators))


def cast(source: str, result: Tensor) -> Operator:
    """A cast of a tensor to the width of another one."""
    return Operator(reads=(source,), makes=(result,), is_cast=True)


def linear(
    name: str,
    source: str,
    gemm: tuple[int, int, int],
    *,
    bias: bool = False,
    partial: tuple[bool, bool] = (False, False),
    result: str = "",
    joint: str = "",
) -> LayerPart:
    """A linear layer: a matmul with a weight matrix, and perhaps a bias.

    Args:
        gemm: Rows of one sequence, columns of the result, columns of the input.
        partial: Flags of partial gradients for weight and bias (``ParameterSpec``).
        result: Name of the result; empty for ``{name} output``.
        joint: Fusion group (``Gemm``).
    """
    m, n, k = gemm
    weight = ParameterSpec(f"{name}.weight", (n, k), partial[0])
    parameters = (weight, ParameterSpec(f"{name}.bias", (n,), partial[1])) if bias else (weight,)
    return matmul(Gemm(name, m, n, k, joint=joint), source, parameters, result)


def matmul(kernel: Gemm, source: str, parameters: tuple[ParameterSpec, ...], result: str = "") -> LayerPart:
    """A matmul of the tensor ``source`` with its first parameter, the weight, to which a bias may follow."""
    operator = Operator(
        kernel=kernel,
        reads=(source,),
        makes=(Tensor(result or f"{kernel.name} output", kernel.m * kernel.n),),
        saves=(source,),
        parameters=tuple(parameter.name for parameter in reversed(parameters)),
    )
    return LayerPart(parameters=parameters, operators=(operator,))


def norm(name: str, source: str, kind: NormKind, share: RankShare, *, for_matmuls: bool = True) -> LayerPart:
    """A norm of the tensor ``source`` over the hidden size of a rank's own tokens; its result is ``{name} output``.

    With ``for_matmuls`` the result has the precision of matmuls; else it belongs to the residual stream.
    """
    own, h = share.own_tokens, share.hidden
    wide = Tensor(f"{name} result" if for_matmuls else f"{name} output", own * h, residual=True)
    part = norm_of(name, source, kind, wide, (own, h), partial=share.partial)
    return (
        joined(with_role(part, Role.NORM), cast(wide.name, Tensor(f"{name} output", own * h))) if for_matmuls else part
    )


def norm_of(
    name: str, source: str, kind: NormKind, result: Tensor, size: tuple[int, int], *, partial: bool
) -> LayerPart:
    """A norm of rows, whose backward needs its input and statistics.

    LayerNorm's backward is one kernel. RMSNorm's is composed of single operations where torch has no kernel for it. At
    worst these store the normalized input, its gradient and a product of both in FP32, in addition to the result.

    Args:
        size: Rows of one sequence, and width of the weights.
        partial: Gradients of the weights are partial (``ParameterSpec``).
    """
    rows, width = size
    words = ("weight", "bias") if kind.bias else ("weight",)
    parameters = tuple(ParameterSpec(f"{name}.{word}", (width,), partial) for word in words)
    composed = kind.statistics == 1
    statistics = Tensor(f"{name} statistics", kind.statistics * rows, FP32_BYTES)
    wide = Tensor(f"{name} scratch", result.elements, FP32_BYTES)
    operator = Operator(
        kernel=Pointwise(name, result.elements, result.elements, like="rms_norm" if composed else "layer_norm"),
        reads=(source,),
        makes=(result, statistics),
        saves=(source, statistics.name),
        parameters=tuple(parameter.name for parameter in parameters),
        composed=composed,
        backward_scratch=(*(wide,) * _NORM_SCRATCH, replace(wide, widened=True)) if composed else (),
    )
    return LayerPart(parameters=parameters, operators=(operator,))


def residual(name: str, stream: str, branch: str, share: RankShare) -> Operator:
    """Addition of a branch's output to the residual stream; ``name`` is that of the sum."""
    own = share.own_tokens * share.hidden
    return Operator(
        kernel=Pointwise(name, 2 * own, own),
        reads=(stream, branch),
        makes=(Tensor(name, own, residual=True),),
        passes=True,
        roles=frozenset({Role.RESIDUAL}),
        forward_scratch=(Tensor(f"{branch}, upcast", own, residual=True, widened=True),),
    )
