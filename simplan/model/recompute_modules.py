"""Modules of a block that backward recomputes separately: their saved tensors, and when they are recomputed.

The names are Megatron Core's (NVIDIA/Megatron-LM at d98e8a6, 2026-08: megatron/core/transformer/transformer_config.py,
recompute_modules). A module that discards its output (``CheckpointWithoutOutput``) is recomputed when the gradient of a
consumer of that output arrives, and yields only that output. A module with ordinary checkpointing saves its input, and
is re-executed to its end when the gradient of its output arrives.

===============  ==================================================================================================
core_attn        the attention core; of a fused kernel only the sums that it saves for backward are gone
mla_up_proj      of latent attention, the matmuls from latent vectors to heads, and the rotation (output discarded)
layernorm        norms that are not fused into the matmul after them: before latent attention, and before experts
                 (output discarded)
moe_act          the activation between the grouped GEMMs of experts (output discarded)
mlp              the second half of a block without experts
moe              the second half of a block with experts, including dispatch and combine
shared_experts   the expert that all tokens go to
===============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from simplan.model.kernel import TOKEN_TABLE
from simplan.model.layer import Attention, Gemm, Kernel, LayerCollective, LayerSpec, Lookup, Operator, Role
from simplan.model.operator import saved_by
from simplan.plan.plan import RecomputeModule


class RecomputeGroup(NamedTuple):
    """Kernels that backward recomputes together.

    Attributes:
        kernels: Indices into ``LayerSpec.kernels`` of the recomputed kernels, in order.
        needed_by: Index of the kernel before whose backward they run: the first that needs a tensor that was not saved.
            Backward of the kernels after it comes first.
    """

    kernels: tuple[int, ...]
    needed_by: int


class Recomputation(NamedTuple):
    """Saved tensors and recomputed kernels of a layer.

    Attributes:
        reruns: Groups of recomputed kernels, in the order in which backward reaches them.
        from_start: The layer is recomputed from its input on, except for saved tensors; else only parts of it are.
    """

    saved: frozenset[str]
    reruns: tuple[RecomputeGroup, ...] = ()
    from_start: bool = False

    @property
    def kernels(self) -> tuple[int, ...]:
        """Indices of all recomputed kernels, in the order of forward."""
        return tuple(sorted(index for rerun in self.reruns for index in rerun.kernels))


class _Part(NamedTuple):
    """Effect of recomputing one module: tensors that are not saved, and the kernels that restore them."""

    dropped: frozenset[str]
    rerun: RecomputeGroup


def has_module(layer: LayerSpec, module: RecomputeModule) -> bool:
    """True if a block has a module."""
    return any(True for _ in _MODULES[module](layer))


def recomputed_modules(layer: LayerSpec, modules: Sequence[RecomputeModule]) -> Recomputation:
    """Saved tensors and recomputed kernels of a block for single modules; modules that it lacks are ignored."""
    parts = [part for module in modules for part in _MODULES[module](layer)]
    dropped = {name for part in parts for name in part.dropped}
    together: dict[int, set[int]] = {}
    for part in parts:
        together.setdefault(part.rerun.needed_by, set()).update(part.rerun.kernels)
    again = tuple(RecomputeGroup(tuple(sorted(together[place])), place) for place in sorted(together, reverse=True))
    places = {index for rerun in again for index in rerun.kernels}
    read = {name for operator, place in _placed(layer) if place in places for name in operator.reads}
    inputs = {name for name in read if layer.makers.get(name) not in places}  # of the recomputed kernels
    return Recomputation(frozenset({tensor.name for tensor in layer.saved} - dropped | inputs), again)


def _core_attn(layer: LayerSpec) -> Iterator[_Part]:
    """Drop tensors that only the attention core needs. The projection saves the core's output if that is its input."""
    cores = kernels_where(
        layer, lambda kernel: isinstance(kernel, Attention | Lookup)
    )  # a bias is looked up for its core
    cores -= token_lookups(layer)
    if all(isinstance(core := layer.kernels[index], Attention) and not core.propagates for index in cores):
        return
    for group in _cores(layer, cores):
        first, last = min(group), max(group)
        again = [index for index in range(first, last + 1) if index in group or _is_collective(layer, index)]
        # torch.compile computes the projection's input again as well
        others = () if layer.compiled else (o for o, place in _placed(layer) if place not in group)
        elsewhere = {name for operator in others for name in saved_by(operator, layer.needed)}
        yield _Part(_made_at(layer, group) - elsewhere, RecomputeGroup(tuple(again), last))


def _cores(layer: LayerSpec, cores: set[int]) -> Iterator[set[int]]:
    """Kernels of each attention core, with the lookups before it."""
    group: set[int] = set()
    places = sorted(cores)
    for index, following in zip(places, [*places[1:], None], strict=True):
        kernel = layer.kernels[index]
        group.add(index)
        if isinstance(kernel, Attention) and (following is None or layer.kernels[following].name != kernel.name):
            yield group
            group = set()


def token_lookups(layer: LayerSpec) -> set[int]:
    """Indices of the kernels of a token lookup in a block: the lookup, and the sum of its ranks' parts."""
    return kernels_where(layer, lambda kernel: kernel.name in (TOKEN_TABLE, f"{TOKEN_TABLE} output"))


def _mla_up_proj(layer: LayerSpec) -> Iterator[_Part]:
    """Drop the up-projection's results after the attention core; recompute them for the core's backward."""
    again = _forward_of(layer, layer.kernels_with(Role.UP_PROJECTION))
    if again:
        core = max(kernels_where(layer, lambda kernel: isinstance(kernel, Attention)))
        yield _Part(_made_at(layer, again), RecomputeGroup(again, core))


def _layernorm(layer: LayerSpec) -> Iterator[_Part]:
    """Recompute each norm when the gradient of the branch that begins with it arrives.

    Other norms are fused into the matmul after them (TELayerNormColumnParallelLinear,
    megatron/core/models/gpt/gpt_layer_specs.py) and are not recomputed.
    """
    sums = layer.kernels_with(Role.RESIDUAL)
    for norm in layer.kernels_with(Role.NORM):
        readers = list(_readers(layer, norm))
        if all(Role.COLUMN_PARALLEL in operator.roles for operator in readers):
            continue
        matmuls = [operator.kernel.name for operator in readers if isinstance(operator.kernel, Gemm)]
        dropped = _made_at(layer, {norm}) | _quantized_inputs(layer, matmuls)
        yield _Part(dropped, RecomputeGroup((norm,), min(index for index in sums if index > norm) - 1))


def _moe_act(layer: LayerSpec) -> Iterator[_Part]:
    """Recompute the activation of experts; if it is fused into a GEMM, the fused backward kernel recomputes it."""
    inside = layer.kernels_with(Role.EXPERTS)
    matmuls = [index for index in inside if isinstance(layer.kernels[index], Gemm)]
    if not matmuls:
        return
    *_, before, end = matmuls
    again = tuple(index for index in inside if before < index < end)
    (last,) = (operator for operator, place in _placed(layer) if place == end and operator.kernel is not None)
    activation = {last.reads[0]} & {tensor.name for tensor in layer.saved}
    dropped = activation | _quantized_inputs(layer, [layer.kernels[end].name]) | _made_at(layer, again)
    yield _Part(frozenset(dropped), RecomputeGroup(again, end))


def _branch(layer: LayerSpec, role: Role, *, with_experts: bool) -> Iterator[_Part]:
    """Recompute all kernels with a role when the gradient of their branch arrives, if the block has (no) experts."""
    places = layer.kernels_with(role)
    if places and with_experts == bool(layer.kernels_with(Role.EXPERTS)):
        end = max(layer.kernels_with(Role.MLP))
        yield _Part(_made_at(layer, places), RecomputeGroup(_forward_of(layer, places), end))


_MODULES: dict[RecomputeModule, Callable[[LayerSpec], Iterator[_Part]]] = {
    "core_attn": _core_attn,
    "mla_up_proj": _mla_up_proj,
    "layernorm": _layernorm,
    "moe_act": _moe_act,
    "mlp": partial(_branch, role=Role.MLP, with_experts=False),
    "moe": partial(_branch, role=Role.MLP, with_experts=True),
    "shared_experts": partial(_branch, role=Role.SHARED_EXPERT, with_experts=True),
}


def _forward_of(layer: LayerSpec, places: Iterable[int]) -> tuple[int, ...]:
    """Indices of kernels that run in forward."""
    return tuple(i for i in places if not isinstance(layer.kernels[i], LayerCollective) or _is_collective(layer, i))


def _readers(layer: LayerSpec, place: int) -> Iterator[Operator]:
    """Operators that read the result of a kernel, also after a cast or a tensor-parallel collective."""
    names = {t.name for operator, index in _placed(layer) if index == place for t in operator.makes}
    for operator, index in _placed(layer):
        if index == place or names.isdisjoint(operator.reads):
            continue
        if operator.is_cast or (isinstance(operator.kernel, LayerCollective) and operator.kernel.axis == "tp"):
            names.update(tensor.name for tensor in operator.makes)
        else:
            yield operator


def _quantized_inputs(layer: LayerSpec, matmuls: Sequence[str]) -> frozenset[str]:
    """Names of the quantized inputs that matmuls save, which are not saved if the inputs are recomputed.

    (``set_save_original_input``, megatron/core/transformer/transformer_layer.py and moe/experts.py.)
    """
    return frozenset(t.name for t in layer.saved if t.name.startswith(tuple(f"{name} input in " for name in matmuls)))


def _made_at(layer: LayerSpec, places: Iterable[int]) -> frozenset[str]:
    """Names of the saved tensors that some kernels make."""
    wanted = {*places}
    return frozenset(tensor.name for tensor in layer.saved if layer.makers.get(tensor.name) in wanted)


def _placed(layer: LayerSpec) -> Iterator[tuple[Operator, int]]:
    return zip(layer.operators, layer.places, strict=True)


def _is_collective(layer: LayerSpec, index: int) -> bool:
    """True for a collective of forward."""
    return getattr(layer.kernels[index], "forward", None) is not None


def kernels_where(layer: LayerSpec, holds: Callable[[Kernel], bool]) -> set[int]:
    """Indices of the kernels for which ``holds`` is true."""
    return {index for index, kernel in enumerate(layer.kernels) if holds(kernel)}
