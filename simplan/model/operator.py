"""The operator graph of a layer: operators that read and make named tensors, and what each saves for backward.

A family builds the operators of its layers from parts (``simplan.model.parts.part``). All else follows from them: the
kernels with a cost estimate, the tensors saved for backward, and the order in which gradients of weights are complete.
One walk (``simplan.program.memory.liveness``) gives the memory of forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from simplan.model.kernel import Chunks, Gemm, Kernel, Lookup


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor inside a layer, or one of its inputs or outputs.

    Attributes:
        elements: Elements for one sequence.
        bytes_per_element: Fixed width (indices, FP32 statistics); None for the width of activations.
        residual: Part of the residual stream, which autocast keeps in FP32.
        logits: Part of the output distribution, which a memory breakdown shows separately.
        per_microbatch: One tensor for all sequences of a microbatch.
        forwarded: An output that later layers save; its memory is counted in the layer that makes it.
        elsewhere: An input whose memory is counted elsewhere: in an earlier layer, or as the batch.
        chunks: Chunks of tokens, of which one exists at a time; None for a tensor that exists as a whole.
        gradient_chunks: The same of the tensor's gradient.
        widened: An upcast scratch copy of a tensor that the operator reads; absent if none of these is narrower.
    """

    name: str
    elements: int
    bytes_per_element: int | None = None
    residual: bool = False
    logits: bool = False
    per_microbatch: bool = False
    forwarded: bool = False
    elsewhere: bool = False
    chunks: Chunks | None = None
    gradient_chunks: Chunks | None = None
    widened: bool = False

    def width(self, activation_bytes: int, residual_bytes: int) -> int:
        """Bytes per element, given the widths of activations and of the residual stream."""
        return self.bytes_per_element or (residual_bytes if self.residual else activation_bytes)

    def num_bytes(self, activation_bytes: int, residual_bytes: int) -> int:
        """Bytes of one sequence, given the widths of activations and of the residual stream."""
        return self.elements * self.width(activation_bytes, residual_bytes)


class Role(StrEnum):
    """Function of an operator in its block, for frameworks that treat some operators differently."""

    NORM = "norm"
    """A norm of the residual stream, whose result goes into matmuls."""
    RESIDUAL = "residual"
    """The sum of a branch and the residual stream."""
    ATTENTION = "attention"
    """A projection before or after an attention core."""
    UP_PROJECTION = "up_projection"
    """An operator of latent attention that makes queries, keys and values of all heads from low-rank vectors."""
    MLP = "mlp"
    """Any operator of the branch that is an MLP or a mixture of experts."""
    EXPERTS = "experts"
    """A grouped GEMM of experts, or the activation between two of them."""
    SHARED_EXPERT = "shared_expert"
    """Any operator of the expert that processes all tokens."""
    GATING = "gating"
    """A matmul that makes the scores that weight expert outputs."""
    COLUMN_PARALLEL = "column_parallel"
    """A matmul whose matrix tensor-parallel ranks split by columns."""
    ROW_PARALLEL = "row_parallel"
    """A matmul whose matrix tensor-parallel ranks split by rows."""
    ADAPTER = "adapter"
    """An operator of a low-rank adapter."""
    UNQUANTIZED = "unquantized"
    """A matmul that is no linear layer, or one of a size that low precision has no kernel for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, as autograd sees it.

    Attributes:
        kernel: Kernel with a cost estimate; None for an operator that is part of the kernel before it.
        reads: Names of the tensors read, inputs of the layer among them.
        makes: Tensors made; some of them only for backward (statistics, masks).
        saves: Names of the tensors that backward reads.
        saves_for: Pairs of a saved tensor and the only tensor whose gradient needs it.
        parameters: Names of parameters, in the order in which backward completes their gradients.
        is_cast: Only the dtype changes: with equal widths, the result shares the memory of the tensor read.
        in_place: The result overwrites the first tensor read.
        splits: The results are parts of the tensor read, whose gradients backward joins.
        joins: Names of tensors of which parts are read as views: backward joins the gradients of the parts.
        passes: The gradient of the result is the gradient of every tensor read, cast where widths differ.
        gradients_into: Pairs of a tensor read and the saved tensor whose memory its gradient takes, empty for memory of
            its own. If the gradient exists already, it is added to by the same kernel.
        gates: Activation of a gate, which a fused kernel computes together with the multiplication after it.
        composed: Backward is composed of single operations, whose tensors are its scratch, unless the framework has a
            fused kernel.
        forward_scratch, backward_scratch: Tensors that exist only while the operator runs.
        detached: Autograd does not see the operator: its backward, if any, is part of forward.
        regathers: Name of the tensor that this all-gather restores in backward, because forward did not save it; empty
            for other operators.
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
    joins: tuple[str, ...] = ()
    passes: bool = False
    gradients_into: tuple[tuple[str, str], ...] = ()
    gates: bool = False
    composed: bool = False
    forward_scratch: tuple[Tensor, ...] = ()
    backward_scratch: tuple[Tensor, ...] = ()
    detached: bool = False
    regathers: str = ""
    roles: frozenset[Role] = frozenset()

    @property
    def trains(self) -> bool:
        """True if backward computes gradients of parameters."""
        if self.detached:
            return False
        match self.kernel:
            case Gemm(trained=trained) | Lookup(trained=trained):
                return trained
            case _:
                return bool(self.parameters)


def storages(
    operators: Iterable[Operator],
    inputs: Iterable[Tensor],
    activation_bytes: int,
    residual_bytes: int,
    *,
    of_gradients: bool = False,
) -> dict[str, Tensor]:
    """Map each tensor to the tensor whose memory it uses.

    A tensor uses its own memory, except for the result of a cast between equal widths, of an operator in place, and of
    a split.

    Args:
        activation_bytes, residual_bytes: Bytes per element of activations and of the residual stream.
        of_gradients: Map gradients instead of tensors: gradients of parts have memory of their own.
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


def saved_by(operator: Operator, needed: frozenset[str]) -> tuple[str, ...]:
    """Names of the tensors that an operator saves for backward; ``needed`` are those whose gradients it computes."""
    if operator.detached or (not operator.trains and needed.isdisjoint(operator.reads)):
        return ()
    only_for = dict(operator.saves_for)
    return tuple(name for name in operator.saves if name not in only_for or only_for[name] in needed)


def bypassed(operators: Iterable[Operator], kernel: str) -> tuple[Operator, ...]:
    """Remove operators with a kernel of this name; readers of their results read their first inputs instead."""
    instead: dict[str, str] = {}
    found = []
    for operator in operators:
        reads = tuple(instead.get(name, name) for name in operator.reads)
        saves = tuple(instead.get(name, name) for name in operator.saves)
        if operator.kernel is not None and operator.kernel.name == kernel:
            instead.update((tensor.name, reads[0]) for tensor in operator.makes)
            continue
        found.append(replace(operator, reads=reads, saves=saves))
    return tuple(found)
