"""Parts, the building blocks of layers, and functions that compose them.

A part knows its own parameters, operators and constants. A layer is a sequence of parts, and a family is a builder that
chooses them. Parts name the tensor that they are applied to, and those that they make.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Pointwise, Role, Tensor
from simplan.model.share import RankShare

__all__ = [
    "FP32_BYTES",
    "INDEX_BYTES",
    "MASK_BYTES",
    "LayerPart",
    "NormKind",
    "cast",
    "concatenation",
    "hidden_input",
    "joined",
    "layer_of",
    "linear",
    "norm",
    "norm_operator",
    "residual",
    "rewired",
    "with_role",
]

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


def joined(*parts: LayerPart) -> LayerPart:
    """Several parts as one."""
    return LayerPart(
        parameters=tuple(parameter for part in parts for parameter in part.parameters),
        operators=tuple(operator for part in parts for operator in part.operators),
        constants=tuple(table for part in parts for table in part.constants),
        buffers=tuple(table for part in parts for table in part.buffers),
    )


def layer_of(
    key: str,
    kind: LayerKind,
    parts: Iterable[LayerPart],
    *,
    inputs: tuple[Tensor, ...],
    output_shapes: tuple[tuple[int, ...], ...],
    outputs: tuple[str, ...] = (),
    passed_outputs: tuple[int, ...] = (),
    product_outputs: tuple[int, ...] = (),
    tied: tuple[str, ...] = (),
    mtp_depth: int = 0,
) -> LayerSpec:
    """A layer composed of parts.

    Args:
        key, kind, inputs, output_shapes, passed_outputs, product_outputs, tied, mtp_depth: See ``LayerSpec``.
        parts: Parts in the order in which forward runs them.
        outputs: See ``LayerSpec``; empty for the last tensor that is made.
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
        product_outputs=product_outputs,
        constants=whole.constants,
        buffers=whole.buffers,
        tied=tied,
        mtp_depth=mtp_depth,
    )
    assert sorted(made.gradient_order) == list(range(len(made.parameters))), key
    assert kind is LayerKind.HEAD or len(made.outputs) == len(output_shapes), key
    return made


@dataclass(frozen=True, slots=True)
class NormKind:
    """A normalization of every token.

    Attributes:
        statistics: Numbers per row that backward needs: mean and deviation (LayerNorm), or the scale alone (RMSNorm).
        bias: The norm has a bias.
    """

    statistics: int
    bias: bool


def hidden_input(share: RankShare, name: str = "input", *, elsewhere: bool = False) -> Tensor:
    """Hidden states that a layer takes as input; ``elsewhere`` as in ``Tensor``."""
    return Tensor(name, share.own_tokens * share.hidden, residual=True, elsewhere=elsewhere)


def rewired(part: LayerPart, old: str, new: str) -> LayerPart:
    """A part applied to another tensor.

    Args:
        part: Part that reads the old tensor.
        old: Name of the old tensor.
        new: Name of the new tensor.
    """
    operators = tuple(
        replace(
            operator,
            reads=tuple(new if name == old else name for name in operator.reads),
            saves=tuple(new if name == old else name for name in operator.saves),
        )
        for operator in part.operators
    )
    return replace(part, operators=operators)


def with_role(part: LayerPart, *roles: Role) -> LayerPart:
    """A part whose operators have additional roles."""
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
        name: Name of the matrix.
        source: Name of the tensor.
        gemm: Rows of one sequence, columns of the result, columns of the input.
        bias: The layer has a bias.
        partial: Flags of partial gradients for weight and bias (``ParameterSpec``).
        result: Name of the result; empty for ``{name} output``.
        joint: Fusion group (``Gemm``).
    """
    m, n, k = gemm
    weight = ParameterSpec(f"{name}.weight", (n, k), partial[0])
    parameters = (weight, ParameterSpec(f"{name}.bias", (n,), partial[1])) if bias else (weight,)
    operator = Operator(
        kernel=Gemm(name, m, n, k, joint=joint),
        reads=(source,),
        makes=(Tensor(result or f"{name} output", m * n),),
        saves=(source,),
        parameters=tuple(parameter.name for parameter in reversed(parameters)),
    )
    return LayerPart(parameters=parameters, operators=(operator,))


def norm(name: str, source: str, kind: NormKind, share: RankShare, *, for_matmuls: bool = True) -> LayerPart:
    """A norm over the hidden size of a rank's own tokens.

    Args:
        name: Name of the norm and its weights.
        source: Name of the tensor it is applied to.
        kind: Kind of the norm.
        share: Sizes.
        for_matmuls: The result, ``{name} output``, goes into matmuls, in their precision; else it belongs to the
            residual stream.
    """
    h, own = share.hidden, share.own_tokens * share.hidden
    parameters = [ParameterSpec(f"{name}.weight", (h,), share.partial)]
    if kind.bias:
        parameters.append(ParameterSpec(f"{name}.bias", (h,), share.partial))
    normed = Tensor(f"{name} result" if for_matmuls else f"{name} output", own, residual=True)
    operators = [norm_operator(name, source, kind, normed, kind.statistics * share.own_tokens, parameters)]
    if for_matmuls:
        operators = [replace(operators[0], roles=frozenset({Role.NORM}))]
        operators.append(cast(normed.name, Tensor(f"{name} output", own)))
    return LayerPart(parameters=tuple(parameters), operators=tuple(operators))


def norm_operator(
    name: str, source: str, kind: NormKind, result: Tensor, num_statistics: int, parameters: Iterable[ParameterSpec]
) -> Operator:
    """The operator of a norm, whose backward needs its input and statistics.

    LayerNorm's backward is one kernel. RMSNorm's is composed of single operations where torch has no kernel for it. At
    worst these store the normalized input, its gradient and a product of both in FP32, in addition to the result.
    """
    statistics = Tensor(f"{name} statistics", num_statistics, FP32_BYTES)
    wide = Tensor(f"{name} scratch", result.elements, FP32_BYTES)
    composed = (wide,) * _NORM_SCRATCH + (Tensor(f"{name} scratch", result.elements, FP32_BYTES, widened=True),)
    return Operator(
        kernel=Pointwise(
            name, result.elements, result.elements, like="rms_norm" if kind.statistics == 1 else "layer_norm"
        ),
        reads=(source,),
        makes=(result, statistics),
        saves=(source, statistics.name),
        parameters=tuple(parameter.name for parameter in parameters),
        composed=kind.statistics == 1,
        backward_scratch=composed if kind.statistics == 1 else (),
    )


def concatenation(name: str, sources: tuple[str, ...], share: RankShare) -> LayerPart:
    """Concatenation of several tensors of the hidden size, for a matmul.

    Args:
        name: Name of the result.
        sources: Names of the tensors.
        share: Sizes.
    """
    elements = len(sources) * share.own_tokens * share.hidden
    kernel = Pointwise("concatenate", elements, elements, moves=True)
    return LayerPart(operators=(Operator(kernel=kernel, reads=sources, makes=(Tensor(name, elements),)),))


def residual(name: str, stream: str, branch: str, share: RankShare) -> LayerPart:
    """Addition of a branch's output to the residual stream.

    Args:
        name: Name of the sum.
        stream: Name of the tensor it is added to.
        branch: Name of the output of the branch.
        share: Sizes.
    """
    own = share.own_tokens * share.hidden
    add = Operator(
        kernel=Pointwise(name, 2 * own, own),
        reads=(stream, branch),
        makes=(Tensor(name, own, residual=True),),
        passes=True,
        roles=frozenset({Role.RESIDUAL}),
        forward_scratch=(Tensor(f"{branch}, upcast", own, residual=True, widened=True),),
    )
    return LayerPart(operators=(add,))
