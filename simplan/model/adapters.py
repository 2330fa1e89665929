"""Weights that are not trained, and LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters next to frozen matrices.

The layers of a family are transformed. Backward computes and saves what torch's autograd does: a frozen matrix needs no
weight gradient and saves no input, and a tensor that depends on no trained weight has no gradient. So backward ends at
the lowest trained weight, unless the embedding's result has a gradient all the same (``input_require_grads``).

FSDP1 with ``use_orig_params=True`` makes the weights of a unit views of one flat tensor, whose gradient is that of all
of them: where one of them is trained, backward computes and saves what it does for trained weights (torch 2.13,
distributed/fsdp/fully_sharded_data_parallel.py: "higher than expected gradient memory usage"). All that is outside of
blocks is one unit.

A target matrix W (n x k) gets A (r x k) and B (n x r), and gives y = x W^T + scale (x A^T) B^T (equation 3). An
embedding E (v x n) gets A (r x v) and B (n x r): rows of A^T are looked up, and multiplied by B. With dropout, A has a
copy of x of its own, and backward a mask (PEFT, tuners/lora/layer.py). A module to save is trained in place of the
original, which stays in memory (PEFT, utils/other.py, ``ModulesToSaveWrapper``).

Experts held as one tensor have adapters of one rank per expert: A (r e x k) and B (n x r e). Every forward adds their
products to the weights, which are then used as they are (PEFT 0.21, tuners/lora/layer.py, ``ParamWrapper``).

DoRA (Liu et al. 2024, arXiv:2402.09353) has a magnitude m of n numbers besides, and gives y = x W^T + (s - 1) x W^T +
s scale (x A^T) B^T with s = m / |W + scale B A|, row by row (equation 5; no gradient flows through the norms, section
4.3). PEFT (tuners/lora/dora.py) and torchtune multiply A and B with an identity of k x k once per microbatch, and add
the product to the weight in FP32; all of it stays until the result is there.

OFT (Qiu et al. 2023, arXiv:2306.07280; OFTv2, Qiu et al. 2025, arXiv:2506.19847) rotates the input of a matrix instead
and adds nothing to it: y = (x R) W^T, where R has k / r blocks of r x r, each made of r (r - 1) / 2 numbers by the
Cayley-Neumann series I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4 of a skew-symmetric Q. PEFT 0.21 (tuners/oft/layer.py,
``OFTRotationModule``) makes R once per microbatch in FP32, copies the input to FP32, rotates it, and copies the result
back; under autocast the matmuls have 16 bits.

Under tensor parallelism, a matrix split by columns has B split and A replicated; every rank has a partial gradient of
A. A matrix split by rows has A split and B replicated. No collective is added: the adapter's result is summed over
ranks together with that of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simplan.model.kernel import Gemm, Kernel, LayerCollective, Lookup, OperandKernels, Pointwise
from simplan.model.layer import LayerKind, LayerSpec, Operator, ParameterSpec, Role, Tensor
from simplan.model.module_names import PartName, matrices, modules, numbered, part_name
from simplan.model.parts.embedding_and_head import SCORE
from simplan.model.parts.part import FP32_BYTES, MASK_BYTES, cast

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

NORMED_WEIGHT = "weight for norms"
"""End of the name of the FP32 copy of a weight whose rows have norms; there is none of a weight in FP32."""
_END_MATRICES = {"embedding": "wte", "head": "lm_head"}
"""Kind of a layer at an end of the model -> its matrix."""


@dataclass(frozen=True, slots=True)
class _Training:
    """The parts of one layer that are trained.

    Attributes:
        ranks: Matrices with adapters, with their ranks.
        frozen: Names of modules that are frozen; None for all of them.
        saved: Name of a module that is trained while its original stays; empty for none.
        dropout: The input of adapters passes through dropout.
        dora: Adapters have magnitudes.
        oft: Adapters rotate the input; the ranks are the sizes of blocks.
        is_flat: Frozen weights have gradients, as they are in one tensor with trained ones.
    """

    ranks: tuple[tuple[str, int], ...]
    frozen: frozenset[str] | None
    saved: str
    dropout: bool
    dora: bool = False
    oft: bool = False
    is_flat: bool = False

    def freezes(self, parameter: str) -> bool:
        """True for a parameter that is not trained."""
        module = parameter.rpartition(".")[0]
        return module != self.saved and (self.frozen is None or module in self.frozen)

    @property
    def words(self) -> str:
        """The addition to the key of a layer."""
        if self.frozen is None:
            names: dict[int, list[str]] = {}
            for name, rank in self.ranks:
                names.setdefault(rank, []).append(name)
            adapters = ";".join(f"lora{rank}:{'+'.join(of_rank)}" for rank, of_rank in names.items())
            words = (adapters or "frozen") + (",dora" * self.dora + ",oft" * self.oft) * bool(adapters)
        else:
            words = f"frozen:{'+'.join(sorted(self.frozen))}" if self.frozen else ""
        words += ",dropout" * (self.dropout and bool(self.ranks))
        return f"{words}{f',saved:{self.saved}' if self.saved else ''}{',flat' * self.is_flat}"


def partly_trained(
    layers: Sequence[LayerSpec], model: ModelSpec, shard: Shard, *, is_flat: bool = False
) -> tuple[LayerSpec, ...]:
    """Layers of a model with its adapters and its frozen weights.

    Args:
        is_flat: Weights of a block, and those outside of blocks, are one tensor each.
    """
    made: dict[tuple[str, _Training, bool], tuple[LayerSpec, bool]] = {}
    flows, found = False, []
    trainings = _trainings(layers, model)
    for layer, training in _in_flat_tensors([*trainings]) if is_flat else trainings:
        key = (layer.key, training, flows)
        if key not in made:
            made[key] = _partly_trained(layer, training, shard, flows=flows)
        changed, flows = made[key]
        found.append(changed)
        flows |= model.input_require_grads
    return tuple(found)


def _trainings(layers: Sequence[LayerSpec], model: ModelSpec) -> Iterator[tuple[LayerSpec, _Training]]:
    adapts = model.lora_rank > 0 or model.trains_nothing
    groups, inside = (matrices(layers), {}) if adapts else ({}, modules(layers))
    targets = _parts(model.lora_targets) if adapts and not model.trains_nothing else ()
    ranks = [(part, rank) for name, rank in model.lora_rank_pattern.items() for part in _parts((name,))]
    frozen = _parts(model.frozen)
    saved = {LayerKind(name) for name in model.lora_modules_to_save if not model.trains_nothing}
    tied, dropout = model.tied_embeddings, model.lora_dropout > 0
    for layer, block in numbered(layers):
        kind = layer.kind
        chosen: dict[str, int] = {}
        own = [kernel.name for kernel in layer.kernels if isinstance(kernel, Gemm | Lookup)]
        for part in targets:
            if part.has(kind, block):
                names = groups.get(part.inside, ()) if kind is LayerKind.BLOCK else (_END_MATRICES[kind],)
                chosen |= dict.fromkeys(names, model.lora_rank)
        for part, rank in reversed(ranks):  # the first one that matches decides
            if part.has(kind, block):
                names = groups.get(part.inside, ()) if kind is LayerKind.BLOCK else (_END_MATRICES[kind],)
                chosen |= dict.fromkeys(chosen.keys() & set(names), rank)
        if adapts:
            kept = _END_MATRICES[kind] if kind in saved else ""
            order = tuple((name, chosen[name]) for name in own if name in chosen)
            modules_frozen = None
            if kind is LayerKind.HEAD and model.objective in ("score", "score_and_logits"):
                # PEFT trains the new head of a reward model, and so does LLaMA-Factory
                new = _END_MATRICES[kind] if model.objective == "score" else SCORE
                modules_frozen = frozenset(p.name.rpartition(".")[0] for p in layer.parameters) - {new}
            yield layer, _Training(order, modules_frozen, kept, dropout, model.lora_dora, model.lora_oft)
            continue
        names_frozen: set[str] = set()
        for part in frozen:
            if part.has(kind, block):
                whole = {parameter.name.rpartition(".")[0] for parameter in layer.parameters}
                names_frozen |= whole if not part.inside else inside.get(part.inside, frozenset()) & whole
        if kind is LayerKind.HEAD and tied:  # the embedding's weight
            names_frozen.discard(_END_MATRICES[kind])
            if any(part.kind is LayerKind.EMBEDDING for part in frozen):
                names_frozen.add(_END_MATRICES[kind])
        yield layer, _Training((), frozenset(names_frozen), "", False)


def _in_flat_tensors(trainings: Sequence[tuple[LayerSpec, _Training]]) -> Iterator[tuple[LayerSpec, _Training]]:
    """Layers whose frozen weights have gradients if a weight in the same tensor is trained."""
    trained = [
        bool(training.ranks) or any(not training.freezes(parameter.name) for parameter in layer.parameters)
        for layer, training in trainings
    ]
    in_root = any(of for (layer, _), of in zip(trainings, trained, strict=True) if layer.kind is not LayerKind.BLOCK)
    for (layer, training), of_layer in zip(trainings, trained, strict=True):
        yield layer, replace(training, is_flat=of_layer if layer.kind is LayerKind.BLOCK else in_root)


def _parts(names: Sequence[str]) -> tuple[PartName, ...]:
    found = [part_name(name) for name in names]
    return tuple(part for part in found if part is not None)


def _partly_trained(layer: LayerSpec, training: _Training, shard: Shard, *, flows: bool) -> tuple[LayerSpec, bool]:
    """A layer, and whether its result has a gradient; ``flows`` if its input has one."""
    whole = flows or layer.kind is LayerKind.EMBEDDING
    operators, needed = _operators(layer, training, flows=flows)
    words = [training.words, "" if whole else "first"]
    if not any(words):
        return layer, True
    changed = replace(
        layer,
        key=",".join([layer.key, *filter(None, words)]),
        parameters=tuple(_parameters(layer, training, shard)),
        operators=tuple(operators),
        needs_input_gradient=whole,
    )
    return changed, layer.kind is LayerKind.HEAD or not needed.isdisjoint(layer.outputs)


def _parameters(layer: LayerSpec, training: _Training, shard: Shard) -> Iterator[ParameterSpec]:
    """Parameters of which some are frozen; the adapters of a module follow its own weight and bias."""
    split, ranks = shard.tp > 1, dict(training.ranks)
    row_parallel = {layer.kernels[index].name for index in layer.kernels_with(Role.ROW_PARALLEL)}
    for parameter, following in zip(layer.parameters, [*layer.parameters[1:], None], strict=True):
        name = parameter.name.rpartition(".")[0]
        frozen = training.freezes(parameter.name)
        is_copy = name == training.saved
        yield replace(
            parameter,
            frozen=frozen,
            partial_gradient=parameter.partial_gradient and not frozen,
            is_copy=is_copy,
            is_flat=frozen and training.is_flat,
        )
        if is_copy:
            original = replace(parameter, name=f"{name}.original_module.weight")
            yield replace(original, frozen=True, partial_gradient=False)
        if name not in ranks or (following is not None and following.name == f"{name}.bias"):
            continue
        *experts, n, k = next(p.shape for p in layer.parameters if p.name == f"{name}.weight")
        rank, by_rows = ranks[name] * math.prod(experts), name in row_parallel
        if layer.kind is LayerKind.EMBEDDING:
            n, k = k, n
        if training.oft:
            yield ParameterSpec(f"{name}.oft_r.weight", (k // rank, rank * (rank - 1) // 2))
            continue
        if training.dora:
            yield ParameterSpec(f"{name}.magnitude", (n,))
        yield ParameterSpec(f"{name}.lora_a.weight", (rank, k), partial_gradient=split and not by_rows)
        yield ParameterSpec(f"{name}.lora_b.weight", (n, rank), partial_gradient=split and by_rows)


def _operators(layer: LayerSpec, training: _Training, *, flows: bool) -> tuple[list[Operator], set[str]]:
    """Operators, without backward where nothing needs it, and the tensors with gradients."""
    needed = {tensor.name for tensor in layer.inputs} if flows else set()
    ranks = dict(training.ranks)
    found: list[Operator] = []
    followers: dict[int, set[str]] = {}  # names that the operators of each kernel read
    for operator, place in zip(layer.operators, layer.places, strict=True):
        followers.setdefault(place, set()).update(operator.reads)
    for operator, place in zip(layer.operators, layer.places, strict=True):
        kernel, brings = operator.kernel, not (operator.detached or needed.isdisjoint(operator.reads))
        own = tuple(name for name in operator.parameters if training.is_flat or not training.freezes(name))
        rank = ranks.get(kernel.name, 0) if isinstance(kernel, Gemm | Lookup) else 0
        trains = bool(own) or rank > 0
        if isinstance(kernel, Gemm) and rank and (kernel.num_groups > 1 or Role.GATING in operator.roles):
            operators = list(_merged(operator, kernel, rank, propagates=brings))
        elif isinstance(kernel, Gemm) and rank and training.oft:
            operators = list(rotated(operator, kernel, rank, propagates=brings))
        elif isinstance(kernel, Gemm) and rank and training.dora:
            operators = list(_with_magnitude(operator, kernel, rank, propagates=brings))
        elif isinstance(kernel, Gemm):
            operators = list(_matrix(operator, kernel, own, rank, propagates=brings, dropout=training.dropout))
        elif rank:
            operators = list(_table(operator, own, rank))
        else:
            whole = brings or bool(own) or (isinstance(kernel, Pointwise) and not needed.isdisjoint(followers[place]))
            passes_by = bool(operator.passes and operator.parameters and not own)  # a frozen bias
            kernel = kernel if whole and not passes_by else _without_backward(kernel)
            operators = [replace(operator, kernel=kernel, parameters=own)]
        found += operators
        if brings or trains:
            needed.update(tensor.name for each in operators for tensor in each.makes)
    return found, needed


def _matrix(
    operator: Operator, kernel: Gemm, own: tuple[str, ...], rank: int, *, propagates: bool, dropout: bool
) -> Iterator[Operator]:
    """A matrix, perhaps frozen and, with a rank, its adapter: A, then B, whose result is scaled and added.

    Args:
        own: Parameters of the matrix with gradients.
    """
    trained = bool(own)
    base = replace(
        operator,
        kernel=replace(kernel, trained=trained, propagates=propagates),
        parameters=own,
        saves=operator.saves if trained else (),
    )
    if not rank:
        yield base
        return
    name, m, n, k, joint = kernel.name, kernel.m, kernel.n, kernel.k, kernel.joint
    roles = operator.roles | {Role.ADAPTER}
    (result,) = operator.makes
    base_output, low = replace(result, name=f"{name} product"), Tensor(f"{name}.lora_a output", m * rank)
    adapted = replace(result, name=f"{name}.lora_b output")
    yield replace(base, makes=(base_output,))
    source = operator
    if dropout:
        kept = Tensor(f"{name}.lora_dropout output", m * k)
        mask = Tensor(f"{name}.lora_dropout mask", m * k, MASK_BYTES)
        yield Operator(
            kernel=Pointwise(f"{name}.lora_dropout", m * k, m * k, propagates=propagates),
            reads=operator.reads,
            makes=(kept, mask),
            saves=(mask.name,),
            roles=roles,
        )
        source = replace(operator, reads=(kept.name,), saves=(kept.name,))
    yield replace(
        source,
        kernel=Gemm(f"{name}.lora_a", m, rank, k, propagates=propagates, joint=joint and f"{joint}.lora_a"),
        makes=(low,),
        parameters=(f"{name}.lora_a.weight",),
        roles=roles,
    )
    yield from _raised(name, (m, n, rank), low, adapted, roles, joint and f"{joint}.lora_b")
    yield from _added(name, m * n, base_output, adapted, result, roles)


def _merged(operator: Operator, kernel: Gemm, rank: int, *, propagates: bool) -> Iterator[Operator]:
    """Experts or a router with adapters: the sum of each weight and its adapter, which the GEMM uses.

    Routers of transformers 5 are modules with a weight, as its experts are, and no linear layers: PEFT 0.21 wraps both
    alike (peft/tuners/lora/layer.py, ``ParamWrapper``).
    """
    name, source = kernel.name, operator.reads[0]
    total = Tensor(f"{name} merged", kernel.weight_elements, per_microbatch=True)
    parameters = f"{name}.lora_a.weight", f"{name}.lora_b.weight"
    if kernel.num_groups == 1:  # the gradients of B A come in the order of its operands
        parameters = parameters[::-1]
    roles = operator.roles | {Role.ADAPTER}
    yield Operator(makes=(total,), parameters=parameters, roles=roles)
    yield replace(
        operator,
        kernel=replace(kernel, trained=False, propagates=propagates, merged_rank=rank),
        reads=(*operator.reads, total.name),
        saves=(*operator.saves, total.name),
        saves_for=((total.name, source),),
        parameters=(),
    )


_ROTATION = OperandKernels((116, 193), None, (16, 26), (0, 0))
"""Bytes per element of R and kernels that make it, as torch dispatches them under autocast."""


def rotated(operator: Operator, kernel: Gemm, size: int, *, propagates: bool) -> Iterator[Operator]:
    """A frozen matrix whose input blocks of ``size`` rotate: R, the copies of the input, and a batched matmul."""
    name, m, k, source, roles = kernel.name, kernel.m, kernel.k, operator.reads[0], operator.roles | {Role.ADAPTER}
    elements = k * size

    def of_blocks(what: str, width: int | None = None) -> Tensor:
        return Tensor(f"{name} {what}", elements, width, per_microbatch=True)

    def of_tokens(what: str, width: int | None = None) -> Tensor:
        return Tensor(f"{name} {what}", m * k, width)

    skew, rotation = of_blocks("skew-symmetric blocks", FP32_BYTES), of_blocks("rotation in FP32", FP32_BYTES)
    yield Operator(makes=(skew,), parameters=(f"{name}.oft_r.weight",), roles=roles)
    factors = [of_blocks(f"factor {number}") for number in range(4)]  # of three products, each cast for itself
    yield from (cast(skew.name, factor) for factor in factors)
    powers, narrow = (of_blocks("second power"), of_blocks("third power")), of_blocks("rotation")
    names = tuple(tensor.name for tensor in (*factors, *powers))
    yield Operator(reads=names[:4], makes=(*powers, rotation), saves=names, roles=roles)
    yield cast(rotation.name, narrow)
    wide, copy, rotated = of_tokens("input in FP32", FP32_BYTES), of_tokens("input to rotate"), of_tokens("rotated")
    yield cast(source, wide)
    yield cast(wide.name, copy)
    yield Operator(
        kernel=Gemm(
            f"{name}.oft_r", m * k // size, size, size, num_groups=k // size, trained=False, propagates=propagates,
            operands=_ROTATION,
        ),
        reads=(copy.name, narrow.name),
        makes=(rotated,),
        saves=(copy.name, narrow.name),
        saves_for=((narrow.name, copy.name),),
        roles=roles,
    )  # fmt: skip
    result, instead = of_tokens("rotated in FP32", FP32_BYTES), of_tokens("rotated input")
    ordered = of_tokens("rotated, in order")
    yield Operator(reads=(rotated.name,), makes=(ordered,), passes=True, roles=roles)
    yield cast(ordered.name, result)
    held = (source, wide.name, rotation.name, rotated.name)  # by modules until they return
    yield Operator(reads=held, detached=True, roles=roles)
    yield cast(result.name, instead)
    yield replace(
        operator,
        kernel=replace(kernel, trained=False, propagates=True),
        reads=(instead.name, *operator.reads[1:]),
        parameters=(),
        saves=(),
    )
    yield Operator(reads=(result.name,), detached=True, roles=roles)


def _with_magnitude(operator: Operator, kernel: Gemm, rank: int, *, propagates: bool) -> Iterator[Operator]:
    """A frozen matrix with an adapter of DoRA: the norms of rows, A and B, and what PEFT makes of both results.

    Each single operation makes a tensor of its own, in FP32 as the norms are.
    """
    base, first, second, *_ = _matrix(operator, kernel, (), rank, propagates=propagates, dropout=False)
    name, m, n, k = kernel.name, kernel.m, kernel.n, kernel.k
    roles, (product,), (adapted,), (result,) = first.roles, base.makes, second.makes, operator.makes

    def made(what: str, elements: int, width: int | None = FP32_BYTES, *, once: bool = True) -> Tensor:
        return Tensor(f"{name} {what}", elements, width, per_microbatch=once)

    def of_tokens(what: str) -> Tensor:
        return made(what, m * n, once=False)

    def step(what: str, *reads: str) -> Pointwise:
        return Pointwise(f"{name}.{what}", len(reads) * m * n, m * n)

    identity, change = made("identity for norms", k * (k + rank), None), made("change of the weight", n * k)
    copied = replace(made(NORMED_WEIGHT, n * k), widened=True)
    scale, norms, less = made("magnitude scale", n), made("norms", n), made("magnitude scale less 1", n)
    yield replace(base, kernel=replace(kernel, trained=False, propagates=propagates, norm_rank=rank))
    scratch = (copied, made("scaled change", n * k), made("changed weight", n * k))
    yield Operator(reads=(product.name,), makes=(identity, change), forward_scratch=scratch, detached=True, roles=roles)
    parameters = (f"{name}.magnitude",)
    yield Operator(makes=(scale, norms, less), saves=(norms.name,), parameters=parameters, roles=roles)
    yield replace(first, forward_scratch=(copied,))
    yield replace(second, forward_scratch=(copied,))
    source = product
    if len(operator.parameters) > 1:  # a bias, which the matmul has added
        source = replace(product, name=f"{name} product without bias")
        kernel_of_bias = Pointwise(f"{name}.lora_bias", m * n, m * n, propagates=propagates)
        yield Operator(kernel=kernel_of_bias, reads=(product.name,), makes=(source,), passes=True, roles=roles)
    of_base, of_adapter, scaled = of_tokens("scaled product"), of_tokens("scaled change"), of_tokens("change")
    by_token = of_tokens("gradient of magnitudes"), replace(of_tokens("gradient in FP32"), widened=True)
    yield Operator(
        kernel=replace(step("magnitude_of_base", source.name), propagates=propagates, sums=2),
        reads=(source.name, scale.name),
        makes=(of_base,),
        saves=(source.name, less.name),
        saves_for=((less.name, source.name),),
        forward_scratch=(copied,),
        backward_scratch=by_token,
        roles=roles,
    )
    yield Operator(
        kernel=replace(step("magnitude_of_adapter", adapted.name), sums=2),
        reads=(adapted.name, scale.name),
        makes=(of_adapter,),
        saves=(adapted.name, scale.name),
        forward_scratch=(copied,),
        backward_scratch=by_token,
        roles=roles,
    )
    yield Operator(
        kernel=step("lora_scale", of_adapter.name),
        reads=(of_adapter.name,),
        makes=(scaled,),
        forward_scratch=(copied,),
        roles=roles,
    )
    change_of_result, wide = of_tokens("change of the result"), of_tokens("result in FP32")
    reads = of_base.name, scaled.name
    yield Operator(
        kernel=step("lora_sum", *reads),
        reads=reads,
        makes=(change_of_result,),
        passes=True,
        forward_scratch=(copied,),
        roles=roles,
    )
    yield Operator(reads=(adapted.name,), detached=True, roles=roles)  # a name in PEFT's function
    reads = product.name, change_of_result.name
    yield Operator(
        kernel=step("dora_sum", *reads),
        reads=(*reads, identity.name, change.name),
        makes=(wide,),
        passes=True,
        forward_scratch=(copied,),
        roles=roles,
    )
    yield cast(wide.name, result)


def _table(operator: Operator, own: tuple[str, ...], rank: int) -> Iterator[Operator]:
    """An embedding and its adapter: rows of A^T, then B, whose result is scaled and added.

    Args:
        own: Parameters of the embedding with gradients.
    """
    kernel = operator.kernel
    assert isinstance(kernel, Lookup)
    name, (result, *others) = kernel.name, operator.makes
    roles = operator.roles | {Role.ADAPTER}
    base_output, low = replace(result, name=f"{name} product"), Tensor(f"{name}.lora_a output", kernel.rows * rank)
    adapted = replace(result, name=f"{name}.lora_b output")
    base = replace(kernel, trained=bool(own))
    yield replace(operator, kernel=base, makes=(base_output, *others), parameters=own)
    yield Operator(
        kernel=Lookup(f"{name}.lora_a", kernel.rows, rank),
        makes=(low,),
        parameters=(f"{name}.lora_a.weight",),
        roles=roles,
    )
    yield from _raised(name, (kernel.rows, kernel.width, rank), low, adapted, roles)
    yield from _added(name, kernel.rows * kernel.width, base_output, adapted, result, roles)


def _raised(
    name: str, size: tuple[int, int, int], low: Tensor, adapted: Tensor, roles: frozenset[Role], joint: str = ""
) -> Iterator[Operator]:
    """The matmul with B (n x r), for m rows: its input always has a gradient, that of A."""
    m, n, rank = size
    yield Operator(
        kernel=Gemm(f"{name}.lora_b", m, n, rank, joint=joint),
        reads=(low.name,),
        makes=(adapted,),
        saves=(low.name,),
        parameters=(f"{name}.lora_b.weight",),
        roles=roles,
    )


def _added(
    name: str, elements: int, base: Tensor, adapted: Tensor, result: Tensor, roles: frozenset[Role]
) -> Iterator[Operator]:
    """The sum, which scales the adapter's result; its backward makes a scaled copy of the gradient."""
    scaled = replace(adapted, name=f"{adapted.name}, scaled")
    yield Operator(reads=(adapted.name,), makes=(scaled,), in_place=True)
    yield Operator(
        kernel=Pointwise(f"{name}.lora_sum", 2 * elements, elements),
        reads=(base.name, scaled.name),
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
