"""Moments of most memory in the head of a language model: logits, their loss and their gradients."""

from __future__ import annotations

from simplan.program.expert_footprint import copied_weight_bytes
from simplan.program.moment import Moment
from simplan.spec.layer import CollectiveKind, Exchange, Gemm, LayerSpec
from simplan.spec.software import StateBytes

__all__ = ["head_moments", "scatter_elements"]

_LOSS_BYTES = 4


def head_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """Forward has the logits beside what the loss keeps, and an fp32 copy of them where it is not what is kept.

    Backward has the gradients after and, unless the vocabulary is split, before the softmax; or, where probabilities
    become gradients in place, a narrower copy of them; or they are there. Then, with what was kept gone, it has the
    gradients of logits, of their matrix and of its input. A head that runs several times, for later tokens, too, does
    so one after the other: what it keeps of all is counted apart, and this is of one.
    """
    narrow = state.activation
    matrix = next(k for k in reversed(layer.kernels) if isinstance(k, Gemm))
    logits, weight, hidden = b * matrix.m * matrix.n, matrix.n * matrix.k, b * matrix.m * matrix.k
    exchanges = {k.backward for k in layer.kernels if isinstance(k, Exchange)}
    if CollectiveKind.REDUCE_SCATTER in exchanges:
        hidden = scatter_elements(hidden, b * _input_elements(layer), b)
    kept = next(tensor for tensor in layer.saved if tensor.logits)
    gone = logits * (kept.bytes_per_element or narrow)
    cast = logits * narrow if narrow < _LOSS_BYTES else 0
    match kept.name:
        case "log-probabilities":
            loss = logits * (narrow + (_LOSS_BYTES if cast else 0))
            loss_gradients = logits * _LOSS_BYTES * (1 if exchanges else 2)
        case "log-probabilities of parts":
            loss = logits * (narrow + (2 * _LOSS_BYTES if exchanges else _LOSS_BYTES * bool(cast)))
            loss_gradients = logits * _LOSS_BYTES * (3 if exchanges else 2)
        case "probabilities":
            loss = loss_gradients = cast
        case "gradients of logits":
            loss = loss_gradients = 0
        case "logits":
            loss, loss_gradients = 0, logits * narrow
        case _:
            raise AssertionError(kept)
    made = weight * (state.product or state.placeholder) * matrix.trained
    products = [Moment(hidden * narrow, logits * narrow - gone, made)]
    if copied_weight_bytes(layer, matrix, state):
        products.append(Moment(hidden * narrow, -gone, weight * state.gradient))
    whole = b * _input_elements(layer)
    if hidden < whole:  # gradients of all tokens after and before the norm, if any, of which the matrix uses a few
        has_norm = any(parameter.name.startswith("norm.") for parameter in layer.parameters)
        products.append(Moment((1 + has_norm) * whole * state.residual, -gone))
    forward = Moment(logits=logits * narrow - gone), Moment(logits=loss)
    return forward, (Moment(logits=loss_gradients), *products)


def _input_elements(layer: LayerSpec) -> int:
    """Of one sequence."""
    return sum(t.elements for t in layer.saved if not t.made_by)


def scatter_elements(whole: int, part: int, b: int) -> int:
    """Elements that a reduce-scatter of tokens holds: input, the same in the order of ranks (if it differs), result."""
    return whole * (2 if b > 1 else 1) + part
