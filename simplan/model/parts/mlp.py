"""MLPs of transformer blocks, with their matrices split over tensor-parallel ranks in pairs."""

from __future__ import annotations

from simplan.model.layer import Operator, Pointwise, Role, Tensor
from simplan.model.parts.part import LayerPart, joined, linear, with_role
from simplan.model.share import RankShare, for_columns, sum_of_rows


def gelu_mlp(source: str, share: RankShare, *, bias: bool) -> LayerPart:
    """MLP of up, GELU and down, applied to the tensor ``source``."""
    n, i = share.tokens, share.intermediate
    mlp = joined(
        column_linears({"up": i}, source, share, bias=bias),
        activated("gelu", "up output", n * i),
        row_linear("down", "gelu output", i, share, bias=bias),
    )
    return with_role(mlp, Role.MLP)


def relu_mlp(source: str, share: RankShare) -> LayerPart:
    """MLP of up, ReLU and down; no biases. Backward of ReLU needs its output, which the last matrix saves anyway."""
    n, i = share.tokens, share.intermediate
    mlp = joined(
        column_linears({"up": i}, source, share),
        activated("relu", "up output", n * i, saves="relu output"),
        row_linear("down", "relu output", i, share),
    )
    return with_role(mlp, Role.MLP)


def gated_mlp(source: str, share: RankShare, *, activation: str = "silu") -> LayerPart:
    """MLP of gate and up, SiLU (or another function) of gate times up, and down; no biases."""
    n, i = share.tokens, share.intermediate
    mlp = joined(
        column_linears({"gate": i, "up": i}, source, share),
        gated("", n * i, activation),
        row_linear("down", "gated product", i, share),
    )
    return with_role(mlp, Role.MLP)


def activated(name: str, source: str, elements: int, *, saves: str = "") -> Operator:
    """A function of every element of ``source``, whose backward needs the tensor ``saves``, or else its input."""
    kernel = Pointwise(name, elements, elements, like="gelu")
    made = Tensor(f"{name} output", elements)
    return Operator(kernel=kernel, reads=(source,), makes=(made,), saves=(saves or source,))


def gated(prefix: str, elements: int, activation: str = "silu") -> LayerPart:
    """The activation of ``{prefix}gate output`` times ``{prefix}up output``, each with ``elements``; one kernel."""
    gate, up = f"{prefix}gate output", f"{prefix}up output"
    made = Tensor(f"{prefix}{activation} output", elements)
    function = Operator(
        kernel=Pointwise(f"{prefix}{activation}_multiply", 3 * elements, 2 * elements, like="silu_multiply"),
        reads=(gate,),
        makes=(made,),
        saves=(gate,),
        gates=True,
    )
    multiply = Operator(
        reads=(made.name, up),
        makes=(Tensor(f"{prefix}gated product", elements),),
        saves=(made.name, up),
        saves_for=((made.name, up), (up, made.name)),
    )
    return LayerPart(operators=(function, multiply))


def column_linears(
    widths: dict[str, int], source: str, share: RankShare, *, bias: bool = False, inner: int = 0
) -> LayerPart:
    """Matrices of one input, split by columns; the result of each is ``{name} output``.

    Args:
        widths: Columns of each matrix on this rank, by name.
        source: Name of the input with a rank's own tokens.
        inner: Columns of the input; 0 for the hidden size.
    """
    gathers, gathered = for_columns(source, share, width=inner)
    k = inner or share.hidden
    joint = "+".join(widths) if len(widths) > 1 else ""
    linears = (
        linear(name, gathered, (share.tokens, width, k), bias=bias, joint=joint) for name, width in widths.items()
    )
    return joined(*gathers, with_role(joined(*linears), Role.COLUMN_PARALLEL))


def row_linear(name: str, source: str, inner: int, share: RankShare, *, bias: bool = False) -> LayerPart:
    """A matrix split by rows, whose partial results are summed over ranks; its result is ``{name} output``.

    The input has ``inner`` columns on this rank. Every rank adds its share of a bias to its part (torch's DTensor).
    """
    result = f"{name} output"
    parts = f"parts of {result}" if share.shard.tp > 1 else result
    part = linear(name, source, (share.tokens, share.hidden, inner), bias=bias, result=parts)
    part = with_role(part, Role.ROW_PARALLEL)
    return part if share.shard.tp == 1 else joined(part, sum_of_rows(parts, result, share))
