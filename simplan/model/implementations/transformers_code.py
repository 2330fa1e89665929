"""Layers as in Hugging Face transformers 5.23, where they differ from the layers that families build.

- Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE: RMSNorm is single operations in FP32. Backward needs the input in FP32 and
  the normalized input in addition to one number per row (models/llama/modeling_llama.py, LlamaRMSNorm).
- Under autocast every matrix casts its input separately: queries, keys and values have three copies of one input.
- GPT-2: GELU is ``gelu_new``, eight operations whose backward needs four tensors (activations.py, NewGELUActivation);
  matrices are stored as (inputs, outputs) (pytorch_utils.py, Conv1D).
- Mixtral, Qwen3's experts: gate and up of an expert are one matrix. Tokens are sorted by expert and multiplied by one
  grouped GEMM without capacity: exactly ``top_k`` rows per token (integrations/moe.py, grouped_mm_experts_forward, the
  default). Mixtral weighs results in FP32, Qwen3 in the dtype of the router's scores (models/qwen3_moe/
  modeling_qwen3_moe.py, Qwen3MoeTopKRouter).

Parameters are in the order in which transformers' modules register them, under this package's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from simplan.model.kernel import Gemm, Pointwise
from simplan.model.layer import LayerKind, LayerSpec, Operator, ParameterSpec, Role, Tensor
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, cast

_ENDS_BYTES = 4
_GELU_LAUNCHES = (8, 20)
_NORM_LAUNCHES = (6, 16)
_CONV1D = ("qkv.weight", "proj.weight", "up.weight", "down.weight")


def as_transformers(layer: LayerSpec) -> LayerSpec:
    """An unsharded layer of GPT-2, Llama, Qwen2, Qwen3, Mixtral or Qwen3-MoE as in transformers."""
    operators = tuple(found for operator in layer.operators for found in _operators(operator))
    parameters = layer.parameters
    if layer.kind is LayerKind.BLOCK:
        is_gpt = any(parameter.name == "qkv.weight" for parameter in parameters)
        if any(parameter.name == "router.weight" for parameter in parameters):
            operators, parameters = _grouped_experts(operators, parameters)
        operators = tuple(_cast_apart(_norms_of_heads_first(operators)))
        parameters = _conv1d(parameters) if is_gpt else _attention_mlp_norms(parameters)
    # rotary tables have the width of hidden states
    tables = tuple(replace(table, bytes_per_element=None, residual=True) for table in layer.constants)
    key = f"{layer.key},transformers"
    return replace(layer, key=key, operators=operators, parameters=parameters, constants=tables)


def _operators(operator: Operator) -> Iterator[Operator]:
    """Single operations of an operator."""
    match operator.kernel:
        case Pointwise(like="rms_norm"):
            yield from rms_norm(operator, operator.kernel)
        case Pointwise(name="gelu"):
            yield from _gelu_new(operator, operator.kernel)
        case _:
            yield operator


def rms_norm(operator: Operator, kernel: Pointwise) -> Iterator[Operator]:
    """Single operations of an RMSNorm.

    x32 = x in FP32; r = rsqrt(mean(x32^2) + eps); y = x32 r in the precision of x; y times the weight.
    """
    (source,), (result, statistics), size = operator.reads, operator.makes, kernel.writes
    name = kernel.name
    wide = Tensor(f"{name} input in FP32", size, FP32_BYTES)
    normed_wide = Tensor(f"{name} normalized in FP32", size, FP32_BYTES)
    # heads that autocast downcast to 16 bits are downcast again after normalization
    normed = Tensor(f"{name} normalized", size, residual=result.residual)
    scratch = Tensor(f"{name} scratch", size, FP32_BYTES)
    trains = bool(operator.parameters)  # a frozen weight needs no product of gradient and normalized input
    yield cast(source, wide)
    yield Operator(
        kernel=replace(kernel, reads=4 * size, writes=3 * size, launches=_NORM_LAUNCHES),
        reads=(wide.name,),
        makes=(normed_wide, statistics),
        saves=(wide.name, statistics.name),
        forward_scratch=(scratch,),
        backward_scratch=(scratch, scratch),
        roles=operator.roles,
    )
    yield cast(normed_wide.name, normed)
    yield Operator(
        reads=(normed.name,),
        makes=(replace(result, residual=True),),  # multiplied by weights in FP32
        saves=(normed.name,) if trains else (),
        parameters=operator.parameters,
        backward_scratch=(replace(result, name=f"{name} weight scratch", residual=True),) if trains else (),
        roles=operator.roles,
    )


def _gelu_new(operator: Operator, kernel: Pointwise) -> Iterator[Operator]:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))); autocast computes the power in FP32, and so everything after it."""
    (source,), size = operator.reads, kernel.writes
    half = Tensor("gelu half input", size)
    cubed = Tensor("gelu input for the cube", size, residual=True)
    tanh, one = (Tensor(f"gelu {word}", size, residual=True) for word in ("tanh", "1 + tanh"))
    gelu = Tensor("gelu product", size, residual=True)
    scratch = Tensor("gelu scratch", size, residual=True)
    yield Operator(
        kernel=replace(kernel, reads=10 * size, writes=8 * size, launches=_GELU_LAUNCHES),
        reads=(source,),
        makes=(half,),
        roles=operator.roles,
    )
    yield cast(source, cubed)
    yield Operator(
        reads=(cubed.name, source),
        makes=(tanh,),
        saves=(cubed.name, tanh.name),
        forward_scratch=(scratch,),
        backward_scratch=(scratch,),
        roles=operator.roles,
    )
    yield Operator(reads=(tanh.name,), makes=(one,), passes=True, roles=operator.roles)
    yield Operator(
        reads=(half.name, one.name),
        makes=(gelu,),
        saves=(half.name, one.name),
        saves_for=((half.name, one.name), (one.name, half.name)),
        backward_scratch=(replace(scratch, widened=True),),
        roles=operator.roles,
    )
    yield cast(gelu.name, operator.makes[0])


def _grouped_experts(
    operators: Sequence[Operator], parameters: Sequence[ParameterSpec]
) -> tuple[tuple[Operator, ...], tuple[ParameterSpec, ...]]:
    """The router's choice, and experts without capacity."""
    names = [operator.kernel.name if operator.kernel else "" for operator in operators]
    first = names.index("routing")
    last = next(i for i, o in enumerate(operators) if any(t.name == "combined output" for t in o.makes))
    gate, down = operators[names.index("experts_gate")].kernel, operators[names.index("experts_down")].kernel
    assert isinstance(gate, Gemm)
    assert isinstance(down, Gemm)
    one = next(parameter for parameter in parameters if parameter.name == "experts_gate.weight")
    experts, width, hidden = one.shape
    both = replace(one, name="experts_gate_up.weight", shape=(experts, 2 * width, hidden))
    chosen = sum(t.elements for t in operators[first].makes if t.name == "their weights")
    tokens = operators[last].makes[0].elements // gate.k
    wide = not any(parameter.name == "q_norm.weight" for parameter in parameters)  # Mixtral
    gate, down = (replace(matrix, m=chosen, model_rows=0) for matrix in (gate, down))
    made = tuple(_of_experts(tokens, chosen, gate, down, wide=wide))
    kept = [p for p in parameters if p.name not in ("experts_gate.weight", "experts_up.weight")]
    kept.insert(next(i for i, p in enumerate(kept) if p.name == "experts_down.weight"), both)
    if not wide:  # the router is registered after the experts
        router = next(i for i, p in enumerate(kept) if p.name == "router.weight")
        kept.insert(next(i for i, p in enumerate(kept) if p.name == "experts_down.weight"), kept.pop(router))
    return (*operators[:first], *made, *operators[last + 1 :]), tuple(kept)


def _of_experts(tokens: int, chosen: int, gate: Gemm, down: Gemm, *, wide: bool) -> Iterator[Operator]:
    """Routing, experts and the weighed sum of their results, with weights in FP32 if ``wide``."""
    h, width, experts = gate.k, gate.n, gate.num_groups
    rows = chosen * h

    def fp32(name: str, elements: int) -> Tensor:
        return Tensor(name, elements, FP32_BYTES)

    mlp, grouped = frozenset({Role.MLP}), frozenset({Role.MLP, Role.EXPERTS})
    scores, best = fp32("probabilities of experts", tokens * experts), fp32("probabilities of chosen experts", chosen)
    sums, weights = fp32("their sums", tokens), fp32("their weights", chosen)
    used = weights if wide else Tensor("their weights, cast", chosen)
    which = Tensor("chosen experts", chosen, INDEX_BYTES)
    yield Operator(
        kernel=Pointwise("routing", 4 * tokens * experts, 3 * tokens * experts, launches=(6, 8)),
        reads=("router output",),
        makes=(weights, scores, best, sums, which),
        saves=(scores.name, best.name, sums.name, which.name),
        roles=mlp,
    )
    if not wide:
        yield cast(weights.name, used)
    ends = Tensor("ends of experts", experts, _ENDS_BYTES, per_microbatch=True)
    selected = Tensor("tokens by expert", rows)
    rows_of = [Tensor(f"rows of {what}", chosen, INDEX_BYTES) for what in ("tokens", "weights", "results")]
    sorted_weights = replace(used, name="weights by expert")
    yield Operator(
        kernel=Pointwise("dispatch", rows, rows, moves=True, launches=(8, 2)),
        reads=("norm2 output",),
        makes=(selected, rows_of[0], ends),
        saves=(rows_of[0].name,),
        roles=mlp,
    )
    yield Operator(reads=(used.name,), makes=(sorted_weights, rows_of[1]), saves=(rows_of[1].name,), roles=mlp)
    output = Tensor("experts_gate_up output", 2 * chosen * width)
    halves = [Tensor(f"experts_{half} output", chosen * width) for half in ("gate", "up")]
    yield Operator(
        kernel=replace(gate, name="experts_gate_up", n=2 * width, joint=""),
        reads=(selected.name,),
        makes=(output,),
        saves=(selected.name, ends.name),
        parameters=("experts_gate_up.weight",),
        roles=grouped,
    )
    yield Operator(reads=(output.name,), makes=tuple(halves), splits=True, roles=grouped)
    activated, gated = (Tensor(f"experts_{word}", chosen * width) for word in ("silu output", "gated product"))
    yield Operator(
        kernel=Pointwise("experts_silu_multiply", 3 * chosen * width, 2 * chosen * width, like="silu_multiply"),
        reads=(halves[0].name,),
        makes=(activated,),
        saves=(halves[0].name,),
        gates=True,
        roles=grouped,
    )
    yield Operator(
        reads=(activated.name, halves[1].name),
        makes=(gated,),
        saves=(activated.name, halves[1].name),
        saves_for=((activated.name, halves[1].name), (halves[1].name, activated.name)),
        roles=grouped,
    )
    result = Tensor("experts_down output", rows)
    yield Operator(
        kernel=down,
        reads=(gated.name,),
        makes=(result,),
        saves=(gated.name, ends.name),
        parameters=("experts_down.weight",),
        roles=grouped,
    )
    weighed, unsorted_, scratch = (
        fp32(name, rows) if wide else Tensor(name, rows)
        for name in ("weighed results", "weighed results by token", "weighed results scratch")
    )
    upcasts = (replace(fp32("results of experts, upcast", rows), widened=True),) if wide else ()
    combined = Tensor("combined output", tokens * h)
    total = fp32("combined output in FP32", tokens * h) if wide else combined
    yield Operator(
        kernel=Pointwise("combine", 3 * rows, 2 * rows + tokens * h, launches=(5, 5)),
        reads=(result.name, sorted_weights.name),
        makes=(weighed,),
        saves=(result.name, sorted_weights.name),
        forward_scratch=upcasts,
        backward_scratch=(*upcasts, scratch),
        roles=mlp,
    )
    yield Operator(reads=(weighed.name,), makes=(unsorted_, rows_of[2]), saves=(rows_of[2].name,), roles=mlp)
    yield Operator(reads=(unsorted_.name,), makes=(total,), roles=mlp)
    if wide:
        yield cast(total.name, combined)


def _norms_of_heads_first(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Queries, their norm, keys, their norm, values: the order of transformers (Qwen3)."""
    of_norm = {
        name: [o for o in operators if any(t.name.startswith(f"{name}_norm ") for t in o.makes)] for name in "qk"
    }
    moved = {id(o) for found in of_norm.values() for o in found}
    by_source = {found[0].reads[0]: found for found in of_norm.values() if found}
    for operator in operators:
        if id(operator) in moved:
            continue
        yield operator
        for tensor in operator.makes:  # with an adapter, the sum of its product and that of the matrix
            yield from by_source.get(tensor.name, ())


def _cast_apart(operators: Iterable[Operator]) -> Iterator[Operator]:
    """Operators with a separate cast for each matrix of a shared input."""
    casts: dict[str, Operator] = {}
    used: set[str] = set()
    for operator in operators:
        if operator.is_cast:
            casts[operator.makes[0].name] = operator
        source = operator.reads[0] if operator.reads else ""
        if not isinstance(operator.kernel, Gemm) or source not in casts:
            yield operator
            continue
        if source in used:
            copy = replace(casts[source].makes[0], name=f"{source} for {operator.kernel.name}")
            yield cast(casts[source].reads[0], copy)
            operator = replace(operator, reads=(copy.name,), saves=(copy.name,))
        used.add(source)
        yield operator


def _conv1d(parameters: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Parameters of GPT-2 with matrices stored as (inputs, outputs)."""
    return tuple(replace(p, shape=p.shape[::-1]) if p.name in _CONV1D else p for p in parameters)


def _attention_mlp_norms(parameters: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Parameters in the order in which LlamaDecoderLayer registers them; LlamaAttention has norms of heads last."""
    end = next(index for index, p in enumerate(parameters) if p.name.startswith("norm2."))  # of attention

    def order(place: int) -> int:
        name = parameters[place].name
        if name.startswith(("norm1.", "norm2.")):
            return 3
        return 2 if place > end else int(name.startswith(("q_norm.", "k_norm.")))

    return tuple(parameters[place] for place in sorted(range(len(parameters)), key=order))
