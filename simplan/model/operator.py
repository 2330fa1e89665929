"""The operator graph of a layer: operators that read and make named tensors, and what each saves for backward.

A family builds the operators of its layers from parts (``simplan.model.parts.part``). All else follows from them: the
kernels that are priced, the tensors saved for backward, the order in which gradients of weights are complete, and, by
one walk (``simplan.program.memory.liveness``), the memory that forward and backward need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from simplan.model.kernel import Gemm, Kernel, Lookup

__all__ = [
    "Operator",
    "Role",
    "Tensor",
    "bypassed",
    "gradient_order",
    "kernel_places",
    "kernels_of",
    "needs_gradient",
    "saved_by",
    "saved_tensors",
    "storages",
]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor inside a layer, or one that a layer takes or gives.

    Attributes:
        name: Its name in the layer.
        elements: Elements for one sequence.
        bytes_per_element: Fixed width (indices, FP32 statistics); None for the width of activations.
        residual: Part of the residual stream, which autocast keeps in FP32.
        logits: Belongs to the output distribution, which a breakdown of memory shows apart.
        of_microbatch: One for all sequences of a microbatch.
        handed_on: An output that later layers save; counted where it is made.
        elsewhere: An input whose memory is counted elsewhere: that of an earlier layer, or the batch.
        widened: A scratch copy of what the operator reads: none where nothing that it reads is narrower.
    """

    name: str
    elements: int
    bytes_per_element: int | None = None
    residual: bool = False
    logits: bool = False
    of_microbatch: bool = False
    handed_on: bool = False
    elsewhere: bool = False
    widened: bool = False

    def width(self, activation_bytes: int, residual_bytes: int) -> int:
        """Bytes of an element, by the widths of activations and of the residual stream."""
        return self.bytes_per_element or (residual_bytes if self.residual else activation_bytes)

    def num_bytes(self, activation_bytes: int, residual_bytes: int) -> int:
        """Bytes of one sequence, likewise."""
        return self.elements * self.width(activation_bytes, residual_bytes)


class Role(StrEnum):
    """What an operator is in its block, for frameworks that treat it otherwise than others."""

    NORM = "norm"
    """A norm of the residual stream, whose result goes into matmuls."""
    RESIDUAL = "residual"
    """The sum of a branch and the residual stream."""
    ATTENTION = "attention"
    """A projection before or after an attention core."""
    UP_PROJECTION = "up_projection"
    """Of latent attention, what makes queries, keys and values of all heads from narrow vectors."""
    MLP = "mlp"
    """Any of the branch that is an MLP or a mixture of experts."""
    EXPERTS = "experts"
    """A grouped product of experts, or the activation between two of them."""
    SHARED_EXPERT = "shared_expert"
    """Any of the expert that all tokens go to."""
    GATING = "gating"
    """A product that makes scores by which outputs of experts are weighed."""
    COLUMN_PARALLEL = "column_parallel"
    """A product whose matrix tensor-parallel ranks split by columns."""
    ROW_PARALLEL = "row_parallel"
    """The same by rows."""
    ADAPTER = "adapter"
    """Of a low-rank adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, as autograd has it.

    Attributes:
        kernel: What is priced; None for an operator that is part of the kernel before it.
        reads: Names of the tensors that it reads, inputs of the layer among them.
        makes: Tensors that it makes; some of them for its backward alone (statistics, masks).
        saves: Names of the tensors that its backward reads.
        saves_for: Some of these, each with the tensor whose gradient alone needs it.
        parameters: Names of its parameters, in the order in which backward completes their gradients.
        is_cast: It changes the width alone: where widths are equal, its result is what it reads.
        in_place: Its result takes the memory of the first tensor that it reads.
        splits: Its results are parts of what it reads, whose gradients backward joins.
        passes: Gradients of what it reads are the gradient of its result, cast where widths differ.
        gates: It is the activation of a gate, which a fused kernel computes together with the product after it.
        composed: Its backward is composed of single operations, whose tensors are its scratch, unless software has a
            kernel for it.
        forward_scratch, backward_scratch: Tensors that exist only while it runs.
        regathers: An all-gather in backward that brings this tensor back, which forward did not save.
        roles: What it is in its block.
    """

    kernel: Kernel | None = None
    reads: tuple[str, ...] = ()
    makes: tuple[Tensor, ...] = ()
    saves: tuple[str, ...] = ()
    saves_for: tuple[tuple[str, str], ...] = ()
    parameters: tuple[str, ...] = ()
    is_cast: bool = False
    in_place: bool = False
    splits: bool = False
    passes: bool = False
    gates: bool = False
    composed: bool = False
    forward_scratch: tuple[Tensor, ...] = ()
    backward_scratch: tuple[Tensor, ...] = ()
    regathers: str = ""
    roles: frozenset[Role] = frozenset()

    @property
    def trains(self) -> bool:
        """Whether it makes gradients of parameters."""
        match self.kernel:
            case Gemm(trained=trained) | Lookup(trained=trained):
                return trained
            case _:
                return bool(self.parameters)


def kernels_of(operators: Iterable[Operator]) -> tuple[Kernel, ...]:
    """The kernels, in the order of forward."""
    return tuple(operator.kernel for operator in operators if operator.kernel is not None)


def kernel_places(operators: Iterable[Operator]) -> tuple[int, ...]:
    """By operator, the index of the kernel that it is, or that it is a part of."""
    found, index = [], -1
    for operator in operators:
        index += operator.kernel is not None
        found.append(max(0, index))
    return tuple(found)


def storages(
    operators: Iterable[Operator],
    inputs: Iterable[Tensor],
    activation_bytes: int,
    residual_bytes: int,
    *,
    of_gradients: bool = False,
) -> dict[str, Tensor]:
    """By tensor, the one whose memory it has.

    That is itself, what a cast between equal widths or an operator in place reads, or what it is a part of.

    Args:
        operators: Of a layer, in the order of forward.
        inputs: Tensors it takes.
        activation_bytes, residual_bytes: Widths.
        of_gradients: Of the gradients of tensors: those of parts have memory of their own.
    """
    widths = activation_bytes, residual_bytes
    found = {tensor.name: tensor for tensor in inputs}
    for operator in operators:
        for number, tensor in enumerate(operator.makes):
            parts = operator.splits and not of_gradients
            source = found[operator.reads[0]] if operator.reads and (parts or not number) else None
            same = parts or (operator.is_cast and source is not None and tensor.width(*widths) == source.width(*widths))
            found[tensor.name] = source if source is not None and (same or operator.in_place) else tensor
    return found


def needs_gradient(operators: Iterable[Operator], inputs: Iterable[str]) -> frozenset[str]:
    """The tensors that backward makes gradients of.

    Matmuls of tokens that are all-gathered once are one function to autograd: all of their results have gradients if
    one has.

    Args:
        operators: Of a layer, in the order of forward.
        inputs: Tensors it takes whose gradients are wanted.
    """
    found, operators = set(inputs), tuple(operators)
    brought = {operator.regathers for operator in operators if operator.regathers}
    together = {o.reads[0] for o in operators if o.trains and brought.intersection(o.reads[:1])}
    for operator in operators:
        if operator.trains or not (found | together).isdisjoint(operator.reads):
            found.update(tensor.name for tensor in operator.makes)
    return frozenset(found)


def saved_by(operator: Operator, needed: frozenset[str]) -> tuple[str, ...]:
    """Names of the tensors that an operator saves for backward.

    Args:
        operator: Which.
        needed: The tensors that backward makes gradients of.
    """
    if not operator.trains and needed.isdisjoint(operator.reads):
        return ()
    if isinstance(operator.kernel, Gemm) and not operator.kernel.trained:
        return ()
    only_for = dict(operator.saves_for)
    return tuple(name for name in operator.saves if name not in only_for or only_for[name] in needed)


def saved_tensors(operators: Sequence[Operator], inputs: Sequence[Tensor], needed: frozenset[str]) -> Iterator[Tensor]:
    """The tensors saved for backward, each once, in the order in which they are made.

    Args:
        operators: Of a layer, in the order of forward.
        inputs: Tensors it takes.
        needed: The tensors that backward makes gradients of.
    """
    names = {name for operator in operators for name in saved_by(operator, needed)}
    tensors = [*inputs, *(tensor for operator in operators for tensor in operator.makes)]
    return (t for t in tensors if (t.name in names and not t.elsewhere) or t.handed_on)


def gradient_order(operators: Sequence[Operator]) -> tuple[str, ...]:
    """Names of parameters in the order in which backward completes their gradients.

    Matmuls of tokens that backward gathers again are one function to autograd, which gives the gradients of all their
    weights at its end; biases are added after it, and so come before.
    """
    gathered = {operator.regathers for operator in operators if operator.regathers}
    found: list[str] = []
    waiting: list[tuple[str, ...]] = []
    for index in range(len(operators) - 1, -1, -1):
        operator = operators[index]
        source = operator.reads[0] if operator.reads else ""
        if source not in gathered or not operator.parameters:
            found += operator.parameters
            continue
        *biases, weight = operator.parameters
        found += biases
        waiting.insert(0, (weight,))
        if all(other.reads[:1] != (source,) or not other.parameters for other in operators[:index]):
            found += (name for names in waiting for name in names)
            waiting.clear()
    return tuple(found)


def bypassed(operators: Iterable[Operator], names: Iterable[str]) -> tuple[Operator, ...]:
    """The operators without some, whose readers then read what these read first.

    Args:
        operators: Of a layer, in the order of forward.
        names: Tensors that those make which are left out.
    """
    instead: dict[str, str] = {}
    wanted = frozenset(names)
    found = []
    for operator in operators:
        reads = tuple(instead.get(name, name) for name in operator.reads)
        saves = tuple(instead.get(name, name) for name in operator.saves)
        if any(tensor.name in wanted for tensor in operator.makes):
            instead.update((tensor.name, reads[0]) for tensor in operator.makes)
            continue
        found.append(replace(operator, reads=reads, saves=saves))
    return tuple(found)
