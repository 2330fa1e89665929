"""Gates of MLPs whose activation and multiplication are one function, which saves what it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simplan.model.layer import Operator, Pointwise, Tensor


def with_fused_gates(operators: Sequence[Operator], *, narrow: bool) -> tuple[Operator, ...]:
    """Operators with fused gates; ``narrow`` if these save what they read in FP8."""
    fused = tuple(fused_gates(operators))
    return tuple(_with_narrow_gate_inputs(fused)) if narrow else fused


def fused_gates(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators, with a gate's activation and the multiplication after it as one that saves both inputs."""
    last: Operator | None = None
    for operator in operators:
        if last is not None and last.gates and operator.kernel is None and last.makes[0].name in operator.reads:
            gate, other = last.reads[0], next(name for name in operator.reads if name != last.makes[0].name)
            both = (gate, other)
            yield replace(operator, kernel=last.kernel, reads=both, saves=both, saves_for=((other, gate),))
            last = None
            continue
        if last is not None:
            yield last
        last = operator
    if last is not None:
        yield last


def _with_narrow_gate_inputs(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators, with fused gates that save their inputs in FP8, cast by a kernel of their own."""
    elements = {tensor.name: tensor.elements for operator in operators for tensor in operator.makes}
    for operator in operators:
        both = operator.saves
        if len(both) != 2 or both != operator.reads or operator.saves_for != (both[::-1],):
            yield operator
            continue
        copies = {name: Tensor(f"{name} in FP8", elements[name], 1) for name in both}
        total = sum(copy.elements for copy in copies.values())
        cast = Pointwise("inputs of the gate to FP8", total, total // 2)  # results have half of the width
        yield Operator(kernel=cast, reads=both, makes=tuple(copies.values()), detached=True, roles=operator.roles)
        yield replace(
            operator,
            reads=(*both, *(copy.name for copy in copies.values())),
            saves=tuple(copy.name for copy in copies.values()),
            saves_for=tuple((copies[name].name, needs) for name, needs in operator.saves_for),
        )
