"""Framework implementations of attention cores, where they differ from the cores that families build.

Each function takes the current operators of a layer and returns them as the framework implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from simplan.model.layer import Attention, CollectiveKind, LayerCollective, LayerSpec, Operator, Pointwise, Tensor
from simplan.model.operator import bypassed
from simplan.model.parts.attention import JOIN, SINKS
from simplan.model.parts.mla import CUT_VALUES
from simplan.model.parts.part import FP32_BYTES, MASK_BYTES


def is_masked_for_gathering(layer: LayerSpec) -> bool:
    """True if attention in a layer has a mask tensor only because keys are all-gathered."""
    cores = [kernel for kernel in layer.kernels if isinstance(kernel, Attention)]
    gathers = any(isinstance(k, LayerCollective) and k.axis == "cp" for k in layer.kernels)
    return gathers and bool(cores) and not any(core.masked for core in cores)


def is_core(operator: Operator, holds: Callable[[Attention], bool] = lambda _: True) -> bool:
    """True if an operator is an attention core for which ``holds`` is true."""
    return isinstance(operator.kernel, Attention) and holds(operator.kernel)


def with_core(operator: Operator, **changes: Any) -> Operator:
    """The operator with a changed attention core; unchanged if it is none."""
    if not isinstance(operator.kernel, Attention):
        return operator
    return replace(operator, kernel=replace(operator.kernel, **changes))


def unfused(operator: Operator, *, dropout: bool, fused_softmax: bool) -> Iterator[Operator]:
    """Attention with materialized scores; one kernel does scaling, mask and softmax, and saves its result.

    Backward changes the gradient of the softmax in place. Without ``fused_softmax`` the same tensors count as memory,
    and single operations in FP32 as time.
    """
    core = operator.kernel
    if not isinstance(core, Attention) or core.eager:
        yield operator
        return
    eager = replace(core, eager=True, fused_softmax=fused_softmax, dropout=dropout)
    if not operator.makes:  # a part of ring attention
        yield replace(operator, kernel=eager)
        return
    output = operator.makes[0]
    scores, weights = (Tensor(f"{core.name} {word}", core.num_scores) for word in ("scores", "weights"))
    through = Tensor(f"{core.name} weights let through", core.num_scores, MASK_BYTES)
    after = Tensor(f"{core.name} weights after dropout", core.num_scores)
    yield Operator(kernel=eager, reads=operator.reads, makes=(scores,), saves=operator.reads)
    yield Operator(reads=(scores.name,), makes=(weights,), saves=(weights.name,), passes=True)
    if dropout:
        yield Operator(reads=(weights.name,), makes=(after, through), saves=(through.name,))
    weighing = (after if dropout else weights).name
    yield replace(
        operator, kernel=None, reads=(weighing,), makes=(output,), saves=(weighing, *operator.reads), saves_for=()
    )


def with_repeated_keys(operators: Iterable[Operator]) -> Iterator[Operator]:
    """The all-gather of keys and values expanded to all query heads, and the ring that returns their gradients."""
    found = tuple(operators)
    core = next((o.kernel for o in found if isinstance(o.kernel, Attention)), None)
    for operator in found:
        kernel = operator.kernel
        gathers = (
            isinstance(kernel, LayerCollective) and kernel.axis == "cp" and kernel.forward is CollectiveKind.ALL_GATHER
        )
        if core is None or not isinstance(kernel, LayerCollective) or not gathers:
            yield operator
            continue
        elements = kernel.elements * core.num_heads // core.num_key_value_heads
        yield replace(operator, kernel=replace(kernel, backward=CollectiveKind.ALL_GATHER, elements=elements))
        home = LayerCollective("gradients of k and v", "cp", None, CollectiveKind.RING, elements, FP32_BYTES)
        yield Operator(kernel=home)


def with_copied_keys(operator: Operator, core: Attention) -> Iterator[Operator]:
    """An attention core whose keys and values are copied for every head of queries, and saved so."""
    elements = core.seq_len * core.num_heads * core.head_dim
    copies = {name: Tensor(f"{name}, repeated", elements) for name in operator.reads[1:]}
    for name, copy in copies.items():
        yield Operator(kernel=Pointwise("repeat_interleave", elements, elements), reads=(name,), makes=(copy,))
    names = {name: copy.name for name, copy in copies.items()}
    yield replace(
        operator,
        kernel=replace(core, num_key_value_heads=core.num_heads),
        reads=tuple(names.get(name, name) for name in operator.reads),
        saves=tuple(names.get(name, name) for name in operator.saves),
    )


def in_one_call(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Attention of packed documents in one kernel call, whose outputs need no concatenation."""
    apart = bypassed(operators, JOIN)
    return tuple(with_core(o, one_call=True) if is_core(o, lambda core: bool(core.documents)) else o for o in apart)


def skipping_keys(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Attention whose kernel supports windows and sinks."""
    parameters = {name for operator in operators for name in operator.parameters if name.startswith(f"{SINKS}.")}
    found = []
    for operator in bypassed(operators, SINKS):
        windowed = with_core(operator, masked=False) if is_core(operator, lambda core: core.window > 0) else operator
        found.append(replace(windowed, parameters=(*parameters,)) if is_core(operator) and parameters else windowed)
    return tuple(found)


def with_narrow_values(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Multi-head latent attention whose kernel takes values of their own width, without padding."""
    core = next((o for o in operators if is_core(o, lambda core: core.padded)), None)
    if core is None or not isinstance(core.kernel, Attention):
        return operators
    kernel = core.kernel
    padded, value = kernel.head_dim, kernel.value_head_dim
    (source,), wide = core.reads, core.makes[0]
    narrow = {
        source: lambda tensor: replace(tensor, elements=tensor.elements * (2 * padded + value) // (3 * padded)),
        wide.name: lambda tensor: replace(tensor, elements=tensor.elements * value // padded),
    }
    for operator in operators:  # which joins documents
        if operator.reads == (wide.name,) and operator.kernel is not None and operator.kernel.name != CUT_VALUES:
            narrow[operator.makes[0].name] = narrow[wide.name]
    return tuple(
        replace(
            with_core(o, padded=False) if o.kernel is kernel else o,
            makes=tuple(narrow[t.name](t) if t.name in narrow else t for t in o.makes),
        )
        for o in bypassed(operators, CUT_VALUES)
    )
