"""MLPs of transformer blocks, with their matrices split over tensor-parallel ranks in pairs."""

from __future__ import annotations

from simplan.spec.layer import Gemm, ParameterSpec, Pointwise, Saved
from simplan.spec.models.part import Part
from simplan.spec.share import Share, column_exchanges, row_kernels

__all__ = ["gated_mlp", "gelu_mlp", "relu_mlp"]


def gelu_mlp(source: str, share: Share, *, bias: bool) -> Part:
    """Up, GELU, down.

    Args:
        source: Name of the tensor it is applied to.
        share: Sizes.
        bias: Both matrices have one.
    """
    n, h, i = share.tokens, share.hidden, share.intermediate
    before, after = column_exchanges(source, share)
    parameters = [ParameterSpec("up.weight", (i, h)), ParameterSpec("down.weight", (h, i))]
    gradients = ["down.weight", "up.weight"]
    if bias:
        parameters.insert(1, ParameterSpec("up.bias", (i,)))
        parameters.append(ParameterSpec("down.bias", (h,), share.partial))
        gradients = ["down.bias", "down.weight", "up.bias", "up.weight"]
    return Part(
        parameters=tuple(parameters),
        kernels=(
            *before,
            Gemm("up", n, i, h),
            *after,
            Pointwise("gelu", n * i, n * i),
            Gemm("down", n, h, i),
            *row_kernels("down output", share, bias=bias),
        ),
        saved=(Saved("up output", n * i, made_by="up"), Saved("gelu output", n * i, made_by="gelu")),
        gradients=tuple(gradients),
    )


def relu_mlp(source: str, share: Share) -> Part:
    """Up, ReLU, down; no biases. The backward of ReLU needs its output only, which the last matrix needs anyway.

    Args:
        source: Name of the tensor it is applied to.
        share: Sizes.
    """
    n, h, i = share.tokens, share.hidden, share.intermediate
    before, after = column_exchanges(source, share)
    return Part(
        parameters=(ParameterSpec("up.weight", (i, h)), ParameterSpec("down.weight", (h, i))),
        kernels=(
            *before,
            Gemm("up", n, i, h),
            *after,
            Pointwise("relu", n * i, n * i),
            Gemm("down", n, h, i),
            *row_kernels("down output", share),
        ),
        saved=(Saved("relu output", n * i, made_by="relu"),),
        gradients=("down.weight", "up.weight"),
    )


def gated_mlp(source: str, share: Share, *, activation: str = "silu") -> Part:
    """Gate and up, SiLU (or another function) of the one times the other, down; no biases.

    Args:
        source: Name of the tensor it is applied to.
        share: Sizes.
        activation: Name of the function.
    """
    n, h, i = share.tokens, share.hidden, share.intermediate
    before, after = column_exchanges(source, share)
    return Part(
        parameters=(
            ParameterSpec("gate.weight", (i, h)),
            ParameterSpec("up.weight", (i, h)),
            ParameterSpec("down.weight", (h, i)),
        ),
        kernels=(
            *before,
            Gemm("gate", n, i, h),
            Gemm("up", n, i, h),
            *after,
            Pointwise(f"{activation}_multiply", 3 * n * i, 2 * n * i),
            Gemm("down", n, h, i),
            *row_kernels("down output", share),
        ),
        saved=(
            Saved("gate output", n * i, made_by="gate"),
            Saved(f"{activation} output", n * i, made_by=f"{activation}_multiply"),
            Saved("up output", n * i, made_by="up"),
            Saved("gated product", n * i, made_by=f"{activation}_multiply"),
        ),
        # tokens are gathered once for both matrices that use them, which then get their gradients in one operation
        gradients=("down.weight", *(("gate.weight", "up.weight") if share.partial else ("up.weight", "gate.weight"))),
    )
