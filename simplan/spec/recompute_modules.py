"""Modules of a block that backward runs again alone: what they keep of forward, and when they run.

The names are Megatron Core's (NVIDIA/Megatron-LM at d98e8a6, 2026-08: megatron/core/transformer/transformer_config.py,
recompute_modules). A module that discards its output (``CheckpointWithoutOutput``) runs again when the gradient of what
was made of that output arrives, and gives only what it made; one that is checkpointed as usual keeps its input, and
runs again to its end when the gradient of its output arrives.

===============  ==================================================================================================
core_attn        the attention core; of a fused kernel only the sums that it keeps for backward are gone
mla_up_proj      of latent attention, the products from narrow vectors to heads, and the rotation (output discarded)
layernorm        norms that are no part of the product after them: before latent attention, and before experts (output
                 discarded)
moe_act          the activation between the products of experts (output discarded)
mlp              the second half of a block without experts
moe              the second half of a block with experts, with what is sent to them and back
shared_experts   the expert that all tokens go to
===============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from simplan.spec.kernel import TOKEN_TABLE
from simplan.spec.layer import Attention, Exchange, Kernel, LayerSpec, Lookup, Operator, Pointwise
from simplan.spec.operator import saved_by
from simplan.spec.plan import RecomputeModule

__all__ = ["Recomputation", "Rerun", "has_module", "recomputed_modules", "token_lookups"]

_UP_PROJECTIONS = ("q", "q_b", "kv_b", "rotary", "assemble heads")
_UP_PROJECTION_INPUTS = ("q_a_norm output", "kv_a_norm output")  # of all ranks, which a product gathers
_EXPERTS_IN, _EXPERTS_OUT = ("experts_gate", "experts_up"), "experts_down"
_SHARED = "shared_"
_NORMS = (("norm1", "residual1", ("q", "q_a", "kv_a")), ("norm2", "residual2", ("shared_gate", "shared_up")))
"""Where the branch of each ends, and which products read it."""


class Rerun(NamedTuple):
    """What runs again in backward at one time.

    Attributes:
        kernels: Indices into ``LayerSpec.kernels`` of what runs again, in order.
        needed_by: Index of the kernel before whose backward they run: the first that asks for a tensor that was not
            kept. Backward of the kernels after it comes first.
    """

    kernels: tuple[int, ...]
    needed_by: int


class Recomputation(NamedTuple):
    """What recomputation makes of a layer.

    Attributes:
        saved: Names of the tensors that forward saves for backward.
        reruns: What runs again, in the order in which backward comes to it.
        from_start: The layer runs again from its input on, but for what was kept; else parts of it alone.
    """

    saved: frozenset[str]
    reruns: tuple[Rerun, ...] = ()
    from_start: bool = False

    @property
    def kernels(self) -> tuple[int, ...]:
        """Indices of all that runs again, in the order of forward."""
        return tuple(sorted(index for rerun in self.reruns for index in rerun.kernels))


class _Part(NamedTuple):
    """What one module makes of a block: tensors that are not kept, and what runs again for them."""

    dropped: frozenset[str]
    rerun: Rerun


def has_module(layer: LayerSpec, module: RecomputeModule) -> bool:
    """Whether a block has such a module."""
    return any(True for _ in _MODULES[module](layer))


def recomputed_modules(layer: LayerSpec, modules: Sequence[RecomputeModule]) -> Recomputation:
    """What a block keeps and repeats when single modules of it run again; those that it does not have are none.

    Args:
        layer: The block.
        modules: Their names.
    """
    parts = [part for module in modules for part in _MODULES[module](layer)]
    dropped = {name for part in parts for name in part.dropped}
    together: dict[int, set[int]] = {}
    for part in parts:
        together.setdefault(part.rerun.needed_by, set()).update(part.rerun.kernels)
    reruns = (Rerun(tuple(sorted(together[needed_by])), needed_by) for needed_by in sorted(together, reverse=True))
    again = tuple(reruns)
    places = {index for rerun in again for index in rerun.kernels}
    read = {name for operator, place in _placed(layer) if place in places for name in operator.reads}
    inputs = {name for name in read if layer.makers.get(name) not in places}  # of what runs again
    return Recomputation(frozenset({tensor.name for tensor in layer.saved} - dropped | inputs), again)


def _core_attn(layer: LayerSpec) -> Iterator[_Part]:
    """Drops what only the attention core needs; its output is kept by the projection, where it is its input."""
    cores = _where(layer, lambda kernel: isinstance(kernel, Attention | Lookup))  # a bias is looked up for its core
    cores -= token_lookups(layer)
    if all(isinstance(core := layer.kernels[index], Attention) and not core.propagates for index in cores):
        return
    for group in _cores(layer, cores):
        first, last = min(group), max(group)
        again = [index for index in range(first, last + 1) if index in group or _is_exchange_of_forward(layer, index)]
        # torch.compile computes the projection's input again as well
        others = () if layer.compiled else (o for o, place in _placed(layer) if place not in group)
        elsewhere = {name for operator in others for name in saved_by(operator, layer.needed)}
        yield _Part(_made_at(layer, group) - elsewhere, Rerun(tuple(again), last))


def _cores(layer: LayerSpec, cores: set[int]) -> Iterator[set[int]]:
    """The kernels of each attention core, with what is looked up for it before."""
    group: set[int] = set()
    for index in sorted(cores):
        kernel, following = layer.kernels[index], min((other for other in cores if other > index), default=None)
        group.add(index)
        name = kernel.name if isinstance(kernel, Attention) else ""
        if name and (following is None or layer.kernels[following].name != name):
            yield group
            group = set()


def token_lookups(layer: LayerSpec) -> set[int]:
    """Indices of what looks tokens up in a block: the lookup, and what adds up the parts of its ranks."""
    return _where(layer, lambda kernel: kernel.name in (TOKEN_TABLE, f"{TOKEN_TABLE} output"))


def _mla_up_proj(layer: LayerSpec) -> Iterator[_Part]:
    """Its results are gone when the attention core has used them, and are made again for the core's backward."""
    names = {kernel.name for kernel in layer.kernels}
    if "kv_b" not in names:
        return
    core = max(_where(layer, lambda kernel: isinstance(kernel, Attention)))
    inputs = (*_UP_PROJECTION_INPUTS, *(["norm1 output"] if "q" in names else []))
    again = [
        index
        for index, kernel in enumerate(layer.kernels[:core])
        if kernel.name in _UP_PROJECTIONS or (kernel.name in inputs and _is_exchange_of_forward(layer, index))
    ]
    yield _Part(_made_at(layer, again), Rerun(tuple(again), core))


def _layernorm(layer: LayerSpec) -> Iterator[_Part]:
    """Each is made again when the gradient of the branch that begins with it arrives.

    Others are part of the product after them (TELayerNormColumnParallelLinear, megatron/core/models/gpt/
    gpt_layer_specs.py), and do not run again.
    """
    names = [kernel.name for kernel in layer.kernels]
    apart = {"norm1": "kv_b" in names, "norm2": _has_experts(layer)}
    for norm, end, readers in _NORMS:
        if apart[norm] and norm in names:
            dropped = _made_at(layer, {names.index(norm)}) | _quantized_inputs(layer, readers)
            yield _Part(dropped, Rerun((names.index(norm),), names.index(end) - 1))


def _moe_act(layer: LayerSpec) -> Iterator[_Part]:
    """Where the activation is part of the product before it, the backward of the fused kernels computes it again."""
    names = [kernel.name for kernel in layer.kernels]
    if _EXPERTS_OUT not in names:
        return
    begin, end = 1 + max(names.index(name) for name in _EXPERTS_IN if name in names), names.index(_EXPERTS_OUT)
    again = tuple(index for index in range(begin, end) if isinstance(layer.kernels[index], Pointwise))
    product = {"experts_gated product"} & {tensor.name for tensor in layer.saved}
    dropped = product | _quantized_inputs(layer, (_EXPERTS_OUT,)) | _made_at(layer, again)
    yield _Part(frozenset(dropped), Rerun(again, end))


def _mlp(layer: LayerSpec) -> Iterator[_Part]:
    if not _has_experts(layer):
        yield _second_half(layer)


def _moe(layer: LayerSpec) -> Iterator[_Part]:
    if _has_experts(layer):
        yield _second_half(layer)


def _shared_experts(layer: LayerSpec) -> Iterator[_Part]:
    again = _where(layer, lambda kernel: kernel.name.startswith(_SHARED))
    if again:
        inside = (i for i in range(min(again), max(again) + 1) if i in again or _is_exchange_of_forward(layer, i))
        dropped = _made_at(layer, again)
        yield _Part(dropped, Rerun(tuple(inside), _end_of_second_half(layer)))


_MODULES: dict[RecomputeModule, Callable[[LayerSpec], Iterator[_Part]]] = {
    "core_attn": _core_attn,
    "mla_up_proj": _mla_up_proj,
    "layernorm": _layernorm,
    "moe_act": _moe_act,
    "mlp": _mlp,
    "moe": _moe,
    "shared_experts": _shared_experts,
}


def _second_half(layer: LayerSpec) -> _Part:
    """All between the second norm and the sum at a block's end, to its end."""
    names = [kernel.name for kernel in layer.kernels]
    end = _end_of_second_half(layer)
    again = range(names.index("norm2") + 1, end + 1)
    runs = (i for i in again if not isinstance(layer.kernels[i], Exchange) or _is_exchange_of_forward(layer, i))
    return _Part(_made_at(layer, again), Rerun(tuple(runs), end))


def _end_of_second_half(layer: LayerSpec) -> int:
    """Index of the last kernel before the sum at a block's end."""
    return [kernel.name for kernel in layer.kernels].index("residual2") - 1


def _has_experts(layer: LayerSpec) -> bool:
    return any(kernel.name == _EXPERTS_OUT for kernel in layer.kernels)


def _quantized_inputs(layer: LayerSpec, products: Sequence[str]) -> frozenset[str]:
    """What products keep of their inputs in 8 or 4 bits: nothing where the inputs are made again, from which it is.

    (``set_save_original_input``, megatron/core/transformer/transformer_layer.py and moe/experts.py.)
    """
    return frozenset(t.name for t in layer.saved if t.name.startswith(tuple(f"{name} input in " for name in products)))


def _made_at(layer: LayerSpec, places: Iterable[int]) -> frozenset[str]:
    """Names of the saved tensors that some kernels make."""
    wanted = {*places}
    return frozenset(tensor.name for tensor in layer.saved if layer.makers.get(tensor.name) in wanted)


def _placed(layer: LayerSpec) -> Iterator[tuple[Operator, int]]:
    return zip(layer.operators, layer.places, strict=True)


def _is_exchange_of_forward(layer: LayerSpec, index: int) -> bool:
    return getattr(layer.kernels[index], "forward", None) is not None


def _where(layer: LayerSpec, holds: Callable[[Kernel], bool]) -> set[int]:
    return {index for index, kernel in enumerate(layer.kernels) if holds(kernel)}
