"""Parts: what layers are put together from, and how.

A part knows its own parameters, kernels, saved tensors and constants, and in which order backward completes its
gradients. A layer is a sequence of parts, and a family is a builder that chooses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from simplan.spec.layer import Kernel, LayerKind, LayerSpec, ParameterSpec, Pointwise, Saved
from simplan.spec.share import Share

__all__ = ["FP32_BYTES", "NormKind", "Part", "block_input", "concatenation", "layer_of", "norm", "residual"]

FP32_BYTES = 4  # statistics of norms and softmax, and the cross-entropy, are fp32 whatever the precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a layer; forward runs the pieces in order, backward in reverse.

    Attributes:
        parameters, kernels, saved, constants, buffers: As of ``LayerSpec``.
        gradients: Names of its parameters in the order in which backward completes their gradients.
    """

    parameters: tuple[ParameterSpec, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    saved: tuple[Saved, ...] = ()
    constants: tuple[Saved, ...] = ()
    buffers: tuple[Saved, ...] = ()
    gradients: tuple[str, ...] = ()


def layer_of(
    key: str,
    kind: LayerKind,
    parts: Iterable[Part],
    *,
    output_shapes: tuple[tuple[int, ...], ...],
    passed_outputs: tuple[int, ...] = (),
    product_outputs: tuple[int, ...] = (),
    tied: tuple[str, ...] = (),
    mtp_depth: int = 0,
) -> LayerSpec:
    """A layer of parts.

    Args:
        key, kind, output_shapes, passed_outputs, product_outputs, tied, mtp_depth: As of ``LayerSpec``.
        parts: In the order in which forward runs them.
    """
    whole = list(parts)
    parameters = tuple(parameter for part in whole for parameter in part.parameters)
    place = {parameter.name: index for index, parameter in enumerate(parameters)}
    completed = [name for part in reversed(whole) for name in part.gradients]
    assert sorted(completed) == sorted(place), (completed, place)
    return LayerSpec(
        key=key,
        kind=kind,
        parameters=parameters,
        kernels=tuple(kernel for part in whole for kernel in part.kernels),
        saved=tuple(tensor for part in whole for tensor in part.saved),
        output_elements=0 if kind is LayerKind.HEAD else sum(math.prod(shape) for shape in output_shapes),
        output_shapes=output_shapes,
        passed_outputs=passed_outputs,
        product_outputs=product_outputs,
        constants=tuple(table for part in whole for table in part.constants),
        buffers=tuple(table for part in whole for table in part.buffers),
        tied=tied,
        gradient_order=tuple(place[name] for name in completed),
        mtp_depth=mtp_depth,
    )


@dataclass(frozen=True, slots=True)
class NormKind:
    """A normalization of every token.

    Attributes:
        statistics: Numbers a row that backward needs: mean and deviation (LayerNorm), or the scale alone (RMSNorm).
        bias: It has one.
    """

    statistics: int
    bias: bool


def block_input(share: Share, *, residual: bool = True) -> Part:
    """The input of a layer, kept as it is.

    Args:
        share: Sizes.
        residual: It is kept as a part of the residual stream. Without, it is kept for matrix products, in their
            precision: a copy where that is another one.
    """
    return Part(saved=(Saved("input", share.own_tokens * share.hidden, residual=residual),))


def norm(name: str, kind: NormKind, share: Share, *, keeps_output: bool = True) -> Part:
    """A norm over the hidden size of the own tokens; its input is kept by whoever makes it.

    Args:
        name: Of its weights.
        kind: Which norm.
        share: Sizes.
        keeps_output: A matrix product follows; else the output is the next layer's input.
    """
    h, own = share.hidden, share.own_tokens * share.hidden
    parameters = [ParameterSpec(f"{name}.weight", (h,), share.partial)]
    if kind.bias:
        parameters.append(ParameterSpec(f"{name}.bias", (h,), share.partial))
    saved = [Saved(f"{name} statistics", kind.statistics * share.own_tokens, FP32_BYTES, made_by=name)]
    if keeps_output:
        saved.append(Saved(f"{name} output", own, made_by=name))
    return Part(
        parameters=tuple(parameters),
        kernels=(Pointwise(name, own, own),),
        saved=tuple(saved),
        gradients=tuple(parameter.name for parameter in parameters),
    )


def concatenation(name: str, number: int, share: Share) -> Part:
    """Puts several tensors as wide as the hidden states side by side, for a matrix product.

    Args:
        name: Of the result.
        number: How many.
        share: Sizes.
    """
    elements = number * share.own_tokens * share.hidden
    kernel = Pointwise("concatenate", elements, elements, moves=True)
    return Part(kernels=(kernel,), saved=(Saved(name, elements, made_by=kernel.name),))


def residual(name: str, share: Share, *, keeps_sum: bool) -> Part:
    """Adds the output of a branch to the residual stream.

    Args:
        name: Of the sum.
        share: Sizes.
        keeps_sum: A norm of the same layer follows, which needs it in backward.
    """
    own = share.own_tokens * share.hidden
    saved = (Saved(name, own, made_by=name, residual=True),) if keeps_sum else ()
    return Part(kernels=(Pointwise(name, 2 * own, own),), saved=saved)
