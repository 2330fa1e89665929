"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters beside matrices, all other weights frozen.

The layers of a family are transformed: a matrix W (n x k) that is a target gets A (r x k) and B (n x r), and gives
y = x W^T + scale (x A^T) B^T (equation 3). What backward then has to compute and keep is what torch's autograd does: a
frozen matrix needs no product for its weight and keeps no input; what nothing trained is below of has no gradient at
all. The embedding is frozen, so that in the first block this holds for all before its first adapter.

Under tensor parallelism B of a matrix that is split by columns is split as well and A is whole, of which every rank has
a part of the gradient; of one that is split by rows A is split and B whole. No exchange is added: the product of the
adapter is summed over ranks together with that of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.spec.layer import (
    Attention,
    Exchange,
    Gemm,
    Kernel,
    LayerKind,
    LayerSpec,
    Lookup,
    ParameterSpec,
    Pointwise,
    Saved,
)

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

__all__ = ["GROUPS", "adapted_layers", "adapted_matrices", "matrices_of"]

_ATTENTION = ("qkv", "q", "k", "v", "proj")
_MLP = ("gate", "up", "down")
_BY_ROWS = ("proj", "down")

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": _ATTENTION + _MLP,
    "attention": _ATTENTION,
    "qkv": ("qkv", "q", "k", "v"),
    "mlp": _MLP,
}
"""Names in ``ModelSpec.lora_targets`` that stand for several matrices, as far as a family has them."""

_READS: Mapping[str, tuple[str, ...]] = {
    "norm1": ("input",),
    **dict.fromkeys(("qkv", "q", "k", "v"), ("norm1",)),
    "q_norm": ("q",),
    "k_norm": ("k",),
    "rotary": ("q", "k"),
    "attention": ("qkv", "q", "k", "v"),
    "join documents": ("attention",),
    "proj": ("attention",),
    "residual1": ("input", "proj"),
    "norm2": ("residual1",),
    **dict.fromkeys(("gate", "up"), ("norm2",)),
    "gelu": ("up",),
    "silu_multiply": ("gate", "up"),
    "down": ("gelu", "silu_multiply"),
    "residual2": ("residual1", "down"),
    "norm": ("input",),
    "lm_head": ("norm",),
    "cross_entropy": ("lm_head",),
}
"""By kernel of a pre-norm block or a head, the kernels whose results it uses, as far as there are such."""

_BEFORE_CORE = ("qkv output", "q, k and v", "q, k rotated and v", "q rotated", "own q")
_OF_CORE = (
    "gathered k and v",
    "exchanged q, k and v",
    "attention core output",
    "attention logsumexp",
    "outputs of documents",
)
_NEEDED_FOR: Mapping[str, str] = {
    "input": "input",
    "norm1 statistics": "input",
    "q output": "q",
    "q_norm statistics": "q",
    "k output": "k",
    "k_norm statistics": "k",
    **dict.fromkeys((*_BEFORE_CORE, *_OF_CORE), "attention"),
    "residual1": "residual1",
    "norm2 statistics": "residual1",
    "gate output": "gate",
    "silu output": "up",
    "norm statistics": "input",
    "log-probabilities": "cross_entropy",
}
"""By saved tensor, the result whose gradient, if there is one, takes it."""

_INPUT_OF: Mapping[str, tuple[str, ...]] = {
    "norm1 output": ("qkv", "q", "k", "v"),
    "attention output": ("proj",),
    "norm2 output": ("gate", "up"),
    "gelu output": ("down",),
    "gated product": ("down",),
    "norm output": (),
}
"""By saved tensor, the matrices whose input it is: an adapter keeps it."""


def matrices_of(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Names of the matrices of a model's blocks, in the order of forward."""
    block = next(layer for layer in layers if layer.kind is LayerKind.BLOCK)
    return tuple(kernel.name for kernel in block.kernels if isinstance(kernel, Gemm))


def adapted_matrices(targets: Sequence[str], matrices: Sequence[str]) -> frozenset[str]:
    """Those of some matrices that targets name; names that are not known are passed over."""
    return frozenset(name for target in targets for name in GROUPS.get(target, (target,)) if name in matrices)


def adapted_layers(layers: Sequence[LayerSpec], model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    """The layers of a model with adapters beside the matrices of its blocks, and all else frozen.

    Args:
        layers: As its family makes them.
        model: Its ``lora_rank`` is at least 1.
        shard: How layers are split.
    """
    targets = adapted_matrices(model.lora_targets, matrices_of(layers))
    assert targets, model.lora_targets
    made: dict[tuple[str, bool], LayerSpec] = {}
    adapted = []
    for index, layer in enumerate(layers):
        first = index == 1  # after the embedding, which is frozen
        if (layer.key, first) not in made:
            made[layer.key, first] = _adapted(layer, targets, model.lora_rank, shard, first=first)
        adapted.append(made[layer.key, first])
    return tuple(adapted)


def _adapted(layer: LayerSpec, targets: frozenset[str], rank: int, shard: Shard, *, first: bool) -> LayerSpec:
    frozen = tuple(replace(p, frozen=True, partial_gradient=False) for p in layer.parameters)
    if layer.kind is LayerKind.EMBEDDING:
        return replace(
            layer,
            key=f"{layer.key},frozen",
            parameters=frozen,
            kernels=tuple(_without_backward(kernel) for kernel in layer.kernels),
            saved=(),
            gradient_order=(),
        )
    if layer.kind is LayerKind.HEAD:
        targets = frozenset()
    given = targets
    if shard.sequence_parallel:  # products of tokens that are gathered once are one function for torch's autograd
        given |= {
            name for name in _READS for target in targets if _READS[name] == _READS.get(target, ()) != ("attention",)
        }
    needs = _gradients_needed(layer, given, first=first)
    parameters = tuple(_with_adapters(frozen, targets, rank, shard))
    order = [parameters.index(p) for p in _completed(parameters, layer, shard)]
    named = f"lora{rank}:{'+'.join(kernel.name for kernel in layer.kernels if kernel.name in targets)}"
    return replace(
        layer,
        key=f"{layer.key},{named if targets else 'frozen'}{',first' if first else ''}",
        parameters=parameters,
        kernels=tuple(_kernels(layer, targets, rank, needs)),
        saved=tuple(_saved(layer, targets, rank, needs)),
        gradient_order=tuple(order),
    )


def _gradients_needed(layer: LayerSpec, targets: frozenset[str], *, first: bool) -> frozenset[str]:
    """The kernels, and ``input``, whose results have a gradient: something that is trained is in them."""
    found = set() if first else {"input"}
    for kernel in layer.kernels:
        if kernel.name in targets or not found.isdisjoint(_READS.get(kernel.name, ())):
            found.add(kernel.name)
    return frozenset(found)


def _with_adapters(
    parameters: Sequence[ParameterSpec], targets: frozenset[str], rank: int, shard: Shard
) -> Iterator[ParameterSpec]:
    """A module's adapters come after its own weight and bias."""
    split = shard.tp > 1
    for parameter, following in zip(parameters, [*parameters[1:], None], strict=True):
        yield parameter
        name = parameter.name.rpartition(".")[0]
        if name not in targets or (following is not None and following.name == f"{name}.bias"):
            continue
        n, k = next(p.shape for p in parameters if p.name == f"{name}.weight")
        by_rows = name in _BY_ROWS
        yield ParameterSpec(f"{name}.lora_a.weight", (rank, k), partial_gradient=split and not by_rows)
        yield ParameterSpec(f"{name}.lora_b.weight", (n, rank), partial_gradient=split and by_rows)


def _completed(parameters: Sequence[ParameterSpec], layer: LayerSpec, shard: Shard) -> Iterator[ParameterSpec]:
    """Adapters as backward completes their gradients: the last matrix first, of each B and then A.

    With sequence parallelism tokens are gathered once for all matrices that use them, and for their adapters' A, which
    get their gradients in one operation.
    """
    by_name = {p.name: p for p in parameters}
    matrices = [k.name for k in layer.kernels if isinstance(k, Gemm) and f"{k.name}.lora_a.weight" in by_name]
    together = [name for group in (("qkv", "q", "k", "v"), ("gate", "up")) for name in group]
    waiting: list[str] = []
    for position in range(len(matrices) - 1, -1, -1):
        name = matrices[position]
        yield by_name[f"{name}.lora_b.weight"]
        if not (shard.sequence_parallel and name in together):
            yield by_name[f"{name}.lora_a.weight"]
            continue
        waiting.insert(0, name)
        before = matrices[position - 1] if position else ""
        if before not in together or _READS[before] != _READS[name]:
            yield from (by_name[f"{other}.lora_a.weight"] for other in waiting)
            waiting.clear()


def _kernels(layer: LayerSpec, targets: frozenset[str], rank: int, needs: frozenset[str]) -> Iterator[Kernel]:
    for kernel in layer.kernels:
        match kernel:
            case Gemm(name=name, m=m, n=n, k=k):
                propagates = not needs.isdisjoint(_READS[name])
                yield replace(kernel, trained=False, propagates=propagates)
                if name in targets:
                    yield Gemm(f"{name}.lora_a", m, rank, k, propagates=propagates)
                    yield Gemm(f"{name}.lora_b", m, n, rank)
                    yield Pointwise(f"{name}.lora_sum", 2 * m * n, m * n)
            case Exchange():
                yield kernel if _brings_gradients(kernel, targets, needs) else _without_backward(kernel)
            case Pointwise(name=name) | Attention(name=name):
                yield kernel if name in needs else _without_backward(kernel)
            case Lookup():
                yield _without_backward(kernel)


def _brings_gradients(exchange: Exchange, targets: frozenset[str], needs: frozenset[str]) -> bool:
    """Whether an exchange has its part in backward.

    Tokens are gathered again for gradients of weights, which adapters alone have.
    """
    if exchange.name.endswith(" again"):
        return not targets.isdisjoint(_INPUT_OF[exchange.name.removesuffix(" again")])
    if exchange.axis == "cp":
        return "attention" in needs
    return exchange.name.removesuffix(" output") in needs


def _without_backward(kernel: Kernel) -> Kernel:
    match kernel:
        case Gemm():
            return replace(kernel, trained=False, propagates=False)
        case Lookup():
            return replace(kernel, trained=False)
        case Exchange():
            return replace(kernel, backward=None)
        case _:
            return replace(kernel, propagates=False)


def _saved(layer: LayerSpec, targets: frozenset[str], rank: int, needs: frozenset[str]) -> Iterator[Saved]:
    """What is kept of a layer, and the results of the adapters' A, which their B keep."""
    gated = any(kernel.name == "silu_multiply" for kernel in layer.kernels)
    for tensor in layer.saved:
        kept = not targets.isdisjoint(_INPUT_OF.get(tensor.name, ()))
        if tensor.name == "up output":
            kept = ("gate" if gated else "up") in needs
        elif tensor.name == "attention output" and tensor.made_by == "attention":
            kept = kept or "attention" in needs  # the core takes it too
        elif tensor.name in _NEEDED_FOR:
            kept = _NEEDED_FOR[tensor.name] in needs
        else:
            assert tensor.name in _INPUT_OF, f"{layer.key}: nothing says what keeps {tensor.name}"
        if kept:
            yield tensor
    for kernel in layer.kernels:
        if kernel.name in targets and isinstance(kernel, Gemm):
            yield Saved(f"{kernel.name}.lora_a output", kernel.m * rank, made_by=f"{kernel.name}.lora_a")
