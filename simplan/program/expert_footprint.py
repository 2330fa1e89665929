"""Moments of most memory in a block with experts, whose places are many more rows than there are tokens.

In the words of ``simplan.spec.models.experts``: places are the rows that experts work on, chosen are the rows that
tokens take back from them. The attention and the shared expert need less than the experts, which are done by then; but
where tensor-parallel ranks gather the tokens of all of them for these, and experts work on own ones, they may not.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplan.program.low_precision_footprint import kept_weight_bytes
from simplan.program.moment import Moment
from simplan.spec.layer import Exchange, Gemm, LayerSpec, Pointwise
from simplan.spec.low_precision import quantized_linears
from simplan.spec.recompute import Recomputation
from simplan.spec.software import StateBytes

__all__ = ["copied_weight_bytes", "expert_moments", "has_experts"]


def has_experts(layer: LayerSpec) -> bool:
    """Whether the layer is a block with experts."""
    return any(kernel.name == "experts_down" for kernel in layer.kernels)


def copied_weight_bytes(layer: LayerSpec, kernel: Gemm, state: StateBytes) -> int:
    """The copy of a matrix that forward makes, in the precision of the activations, and keeps for backward.

    FSDP gathers weights in that precision; experts that it leaves alone are copied. Frozen weights are in it already,
    and a weight that backward makes no gradient with is not kept. Linear layers in a lower precision quantize weights
    as they are.
    """
    if state.linear is not None and kernel in quantized_linears(layer, state.linear):
        return kept_weight_bytes(state.linear, kernel)
    if not (kernel.trained and kernel.propagates):
        return 0
    spread = not state.gathers_experts and any(p.expert and p.name == f"{kernel.name}.weight" for p in layer.parameters)
    narrows = spread and state.gathered != state.parameter
    return kernel.weight_elements * (state.weight_copy or (state.gathered if narrows else 0))


def expert_moments(
    layer: LayerSpec, b: int, state: StateBytes, recomputation: Recomputation
) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """Moments of forward, beside what it keeps, and of backward, beside what was kept.

    Forward has the results of all places beside the chosen rows that it keeps of them, and weighs these. Backward has
    gradients of the chosen rows, twice when it comes to their weights; of all places; of the last matrix; then of the
    three tensors around the product of gate and up. Exchanges hold what is sent beside what is received, and once more
    where several experts have places for several ranks, whose order differs. What runs again in backward has the
    shared expert's output beside that, and what was kept of an exchange until it comes to it.

    Args:
        layer: The block.
        b: Sequences of a microbatch.
        state: Element widths.
        recomputation: What of the block is kept; where it runs again as a whole, forward keeps none of this.
    """
    drops = recomputation.from_start
    wide, narrow = state.residual, state.activation
    down = next(k for k in layer.kernels if isinstance(k, Gemm) and k.name == "experts_down")
    kernels = {kernel.name: kernel for kernel in layer.kernels}
    places, inner = b * down.m * down.n * narrow, b * down.m * down.k * narrow
    chosen = b * sum(t.elements for t in layer.saved if t.name == "outputs of chosen experts") * narrow
    output = b * layer.made_elements
    copied = copied_weight_bytes(layer, down, state)
    axes = {kernel.axis for kernel in layer.kernels if isinstance(kernel, Exchange)}
    exchanges = not axes.isdisjoint(("ep", "etp"))
    sent = b * sum(k.writes for k in layer.kernels if isinstance(k, Pointwise) and k.name == "dispatch") * narrow
    held_twice = (places + (sent if "sort by rank" in kernels or "etp" in axes else 0)) if exchanges else 0

    kept = 0 if drops else chosen
    ending = output * (wide + narrow + (wide if narrow < wide else 0))
    forward = [places + held_twice - kept, (places if not exchanges else 0) + chosen - kept, chosen, ending]
    if drops:
        forward += [places + 3 * inner, 2 * places + inner + copied, 2 * places + held_twice]
    incoming = output * (wide + (narrow if narrow < wide else 0))
    left = incoming - chosen  # the chosen rows are gone
    weight = down.weight_elements * narrow
    moments = [
        Moment(incoming + 2 * chosen),
        Moment(left + chosen + places),
        Moment(left + places + held_twice),
        Moment(left + places + inner, gradients=weight),
        Moment(left - copied + inner),
        Moment(left - copied - inner + 3 * inner),
    ]
    if drops:
        shared = output * narrow if "shared_down" in kernels else 0
        waiting = any(tensor.made_by == "expert outputs" for tensor in recomputation.saved) and "etp" in axes
        moments.append(Moment(left + places + held_twice + shared + (sent if waiting else 0)))
    gathers = list(_gathering(layer, b, state))
    forward += [gathered - (0 if drops else later) for gathered, later in gathers]
    moments += [Moment(left + 2 * gathered - later) for gathered, later in gathers]
    if copied:
        moments.append(Moment(left - copied, gradients=weight + down.weight_elements * state.gradient))
    return (Moment(max(forward)),), tuple(moments)


def _gathering(layer: LayerSpec, b: int, state: StateBytes) -> Iterator[tuple[int, int]]:
    """Of each exchange of tensor-parallel ranks: what is gathered, and what the kernels after it keep.

    Backward has gathered the gradient of a matrix's output, or its input again, beside the gradient that it makes;
    what kernels after it kept is gone by then, as forward does not have it yet.
    """
    for index, kernel in enumerate(layer.kernels):
        if isinstance(kernel, Exchange) and kernel.axis == "tp":
            after = {other.name for other in layer.kernels[index + 1 :]}
            later = sum(t.num_bytes(state.activation, state.residual) for t in layer.saved if t.made_by in after)
            yield b * kernel.elements * state.activation, b * later
