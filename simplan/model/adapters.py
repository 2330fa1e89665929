"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters next to matrices, all other weights frozen.

The layers of a family are transformed: a target matrix W (n x k) gets A (r x k) and B (n x r), and gives y = x W^T +
scale (x A^T) B^T (equation 3). Backward computes and saves what torch's autograd does. A frozen matrix needs no weight
gradient and saves no input. A tensor that depends on no trained weight has no gradient. The embedding is frozen, so the
first block has no gradients before its first adapter.

Under tensor parallelism, a matrix split by columns has B split and A replicated; every rank has a partial gradient of
A. A matrix split by rows has A split and B replicated. No collective is added: the adapter's result is summed over
ranks together with that of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.model.kernel import Gemm, Kernel, LayerCollective, Lookup, Pointwise
from simplan.model.layer import LayerKind, LayerSpec, Operator, ParameterSpec, Role, Tensor

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

MODULES: Mapping[str, str] = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "all-linear": "all",
}
"""PEFT's ``target_modules`` for transformers' Llama, and models like it -> names in ``ModelSpec.lora_targets``."""


def adapter_targets(layers: Sequence[LayerSpec]) -> Mapping[str, tuple[str, ...]]:
    """Matrices of a model's blocks, by the names that ``ModelSpec.lora_targets`` accepts.

    Each matrix has its own name. ``attention`` and ``mlp`` select the matrices of these parts, ``all`` both, and
    ``qkv`` the matrices that make queries, keys and values.
    """
    block = next(layer for layer in layers if layer.kind is LayerKind.BLOCK)
    matrices = {
        operator.kernel.name: operator.roles for operator in block.operators if isinstance(operator.kernel, Gemm)
    }

    def named(*roles: Role) -> tuple[str, ...]:
        return tuple(name for name, having in matrices.items() if not having.isdisjoint(roles))

    by_rows = named(Role.ROW_PARALLEL)
    groups = {
        "all": named(Role.ATTENTION, Role.MLP),
        "attention": named(Role.ATTENTION),
        "qkv": tuple(name for name in named(Role.ATTENTION) if name not in by_rows),
        "mlp": named(Role.MLP),
    }
    return {name: (name,) for name in matrices} | {word: names for word, names in groups.items() if names}


def adapted_layers(layers: Sequence[LayerSpec], model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    """Layers of a model with adapters next to the matrices of its blocks, and everything else frozen."""
    known = adapter_targets(layers)
    targets = frozenset(name for target in model.lora_targets for name in known.get(target, ()))
    assert targets, model.lora_targets
    embedding, first, *others = layers
    made = {layer: _adapted(layer, targets, model.lora_rank, shard) for layer in {embedding, *others}}
    # nothing before the first block is trained
    adapted_first = _adapted(first, targets, model.lora_rank, shard, first=True)
    return (made[embedding], adapted_first, *(made[layer] for layer in others))


def _adapted(layer: LayerSpec, targets: frozenset[str], rank: int, shard: Shard, *, first: bool = False) -> LayerSpec:
    frozen = tuple(replace(p, frozen=True, partial_gradient=False) for p in layer.parameters)
    if layer.kind is LayerKind.EMBEDDING:
        operators = tuple(
            replace(operator, kernel=_without_backward(operator.kernel), parameters=()) for operator in layer.operators
        )
        return replace(layer, key=f"{layer.key},frozen", parameters=frozen, operators=operators)
    if layer.kind is LayerKind.HEAD:
        targets = frozenset()
    named = f"lora{rank}:{'+'.join(kernel.name for kernel in layer.kernels if kernel.name in targets)}"
    return replace(
        layer,
        key=f"{layer.key},{named if targets else 'frozen'}{',first' if first else ''}",
        parameters=tuple(_with_adapters(layer, frozen, targets, rank, shard)),
        operators=tuple(_operators(layer, targets, rank, first=first)),
        needs_input_gradient=not first,
    )


def _with_adapters(
    layer: LayerSpec, parameters: Sequence[ParameterSpec], targets: frozenset[str], rank: int, shard: Shard
) -> Iterator[ParameterSpec]:
    """Insert the adapters of a module after its own weight and bias."""
    split = shard.tp > 1
    row_parallel = {layer.kernels[index].name for index in layer.kernels_with(Role.ROW_PARALLEL)}
    for parameter, following in zip(parameters, [*parameters[1:], None], strict=True):
        yield parameter
        name = parameter.name.rpartition(".")[0]
        if name not in targets or (following is not None and following.name == f"{name}.bias"):
            continue
        n, k = next(p.shape for p in parameters if p.name == f"{name}.weight")
        by_rows = name in row_parallel
        yield ParameterSpec(f"{name}.lora_a.weight", (rank, k), partial_gradient=split and not by_rows)
        yield ParameterSpec(f"{name}.lora_b.weight", (n, rank), partial_gradient=split and by_rows)


def _operators(layer: LayerSpec, targets: frozenset[str], rank: int, *, first: bool) -> Iterator[Operator]:
    """Operators with adapters next to matrices; operators that depend on no trained weight have no backward."""
    needed = set() if first else {tensor.name for tensor in layer.inputs}
    followers: dict[int, set[str]] = {}  # names that the operators of each kernel read
    for operator, place in zip(layer.operators, layer.places, strict=True):
        followers.setdefault(place, set()).update(operator.reads)
    for operator, place in zip(layer.operators, layer.places, strict=True):
        kernel, brings = operator.kernel, not needed.isdisjoint(operator.reads)
        trains = isinstance(kernel, Gemm) and kernel.name in targets
        if isinstance(kernel, Gemm):
            operators = list(_matrix(operator, kernel, rank if kernel.name in targets else 0, propagates=brings))
        else:
            whole = brings or (isinstance(kernel, Pointwise) and not needed.isdisjoint(followers[place]))
            whole &= not (operator.passes and operator.parameters)  # a frozen bias: gradients pass it by
            operators = [replace(operator, kernel=kernel if whole else _without_backward(kernel), parameters=())]
        yield from operators
        if brings or trains:
            needed.update(tensor.name for each in operators for tensor in each.makes)


def _matrix(operator: Operator, kernel: Gemm, rank: int, *, propagates: bool) -> Iterator[Operator]:
    """A frozen matrix and, with a rank, its adapter: A, then B, whose result is scaled and added."""
    frozen = replace(operator, kernel=replace(kernel, trained=False, propagates=propagates), parameters=(), saves=())
    if not rank:
        yield frozen
        return
    name, m, n, k, joint = kernel.name, kernel.m, kernel.n, kernel.k, kernel.joint
    roles = operator.roles | {Role.ADAPTER}
    (result,) = operator.makes
    base_output, low = Tensor(f"{name} product", m * n), Tensor(f"{name}.lora_a output", m * rank)
    adapted, scaled = Tensor(f"{name}.lora_b output", m * n), Tensor(f"{name}.lora_b output, scaled", m * n)
    yield replace(frozen, makes=(base_output,))
    yield replace(
        operator,
        kernel=Gemm(f"{name}.lora_a", m, rank, k, propagates=propagates, joint=joint and f"{joint}.lora_a"),
        makes=(low,),
        parameters=(f"{name}.lora_a.weight",),
        roles=roles,
    )
    yield Operator(
        kernel=Gemm(f"{name}.lora_b", m, n, rank, joint=joint and f"{joint}.lora_b"),
        reads=(low.name,),
        makes=(adapted,),
        saves=(low.name,),
        parameters=(f"{name}.lora_b.weight",),
        roles=roles,
    )
    # the sum scales the adapter's result; its backward makes a scaled copy of the gradient
    yield Operator(reads=(adapted.name,), makes=(scaled,), in_place=True)
    yield Operator(
        kernel=Pointwise(f"{name}.lora_sum", 2 * m * n, m * n),
        reads=(base_output.name, scaled.name),
        makes=(result,),
        passes=True,
        roles=roles,
    )


def _without_backward(kernel: Kernel | None) -> Kernel | None:
    match kernel:
        case None:
            return None
        case Gemm():
            return replace(kernel, trained=False, propagates=False)
        case Lookup():
            return replace(kernel, trained=False)
        case LayerCollective():
            return replace(kernel, backward=None)
        case _:
            return replace(kernel, propagates=False)
