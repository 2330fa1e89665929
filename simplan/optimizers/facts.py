"""Facts about an optimizer: formats of states, temporaries, kernels, and bytes by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Package = Literal[
    "torch", "simplan", "bitsandbytes", "torchao", "transformers", "adam_mini", "galore_torch", "apollo_torch", "badam"
]
"""Library that has the optimizer; ``simplan`` for the executor's own, where torch has none."""
Situation = Literal["fsdp2", "tp", "ep", "experts", "on_host", "no_cuda", "replication"]
"""Property of a job under which an optimizer may not work; ``simplan.rules.optimizers`` decides which a job has."""


class StoredTensor(NamedTuple):
    """A parameter, or the shard or flat buffer of it, of which a rank holds optimizer states.

    Attributes:
        shape: Dimensions on the rank; one for a part of a flat buffer.
        is_embedding: The tensor is a lookup table.
        is_matrix: The tensor is a matrix of a block, or a stack of matrices (experts).
        whole_shape: Dimensions before sharding over data-parallel ranks.
    """

    shape: tuple[int, ...]
    is_embedding: bool = False
    is_matrix: bool = False
    whole_shape: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements on the rank."""
        return math.prod(self.shape)


class Widths(NamedTuple):
    """Bytes per element of a run, as far as states depend on them (``StateBytes``).

    Attributes:
        moment, second_moment: States as wide as the framework has them.
        parameter: Weights.
        trainer: Hugging Face's Trainer makes the optimizer.
        rank: Rank of projected gradients; 0 for none.
    """

    moment: int
    second_moment: int
    parameter: int
    trainer: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Storage of one state.

    Attributes:
        element_bytes: Bytes per element; 0 for as wide as the framework has states.
        block: Elements with a scale in FP32 of their own; 0 for no scales.
        table_bytes: Lookup table that every tensor has.
        least_elements: Tensors with fewer elements are stored in ``otherwise_bytes`` each.
        whole_blocks: Tensors that are no whole number of blocks are, too.
        otherwise_bytes: Bytes per element of tensors outside of the format; 0 for as wide as the weights.
        wide_embeddings: Hugging Face's Trainer keeps the states of lookup tables in FP32 (``trainer.py``,
            ``create_optimizer``).
        factored: Tensors of two or more dimensions have one number per row and one per column.
        by_row: Tensors of two or more dimensions have one number per row, others one.
        paged_elements: Tensors with at least as many elements are in managed memory; 0 for none.
        projected: Of matrices, the state is that of the projected ``gradient``, as long as the longer side, or the
            ``projection`` itself, as long as the shorter one; empty for a state of the tensor.
    """

    element_bytes: float = 0.0
    block: int = 0
    table_bytes: int = 0
    least_elements: int = 0
    whole_blocks: bool = False
    otherwise_bytes: int = 4
    wide_embeddings: bool = False
    factored: bool = False
    by_row: bool = False
    paged_elements: int = 0
    projected: Literal["", "gradient", "projection"] = ""

    def num_bytes(self, tensor: StoredTensor, wide_bytes: int, widths: Widths) -> int:
        """Bytes of the state of a tensor.

        Args:
            wide_bytes: Bytes per element of a state of the framework.
        """
        if self.projected and widths.rank:
            tensor = tensor._replace(shape=_projected(tensor.shape, widths.rank, of=self.projected))
        number = tensor.num_elements
        element_bytes = self.element_bytes or wide_bytes
        if self.by_row:
            return int(element_bytes * (number // tensor.shape[-1] if len(tensor.shape) >= 2 else 1)) if number else 0
        if self.factored and len(tensor.shape) >= 2:
            rows, columns = tensor.shape[-2:]
            return int(element_bytes * (number // columns + number // rows)) if number else 0
        if not self.block:
            return int(element_bytes * number)
        if self._is_outside(tensor, widths):
            return number * (self.otherwise_bytes or widths.parameter)
        return math.ceil(self.element_bytes * number) + 4 * math.ceil(number / self.block) + self.table_bytes

    def paged_bytes(self, tensor: StoredTensor, wide_bytes: int, widths: Widths) -> int:
        """Bytes of the state in managed memory; scales are outside of it."""
        number = tensor.num_elements
        if not self.paged_elements or number < self.paged_elements:
            return 0
        scaled = self.block and not self._is_outside(tensor, widths)
        return math.ceil(self.element_bytes * number) if scaled else self.num_bytes(tensor, wide_bytes, widths)

    def least_bytes(self, wide_bytes: int, widths: Widths) -> float:
        """Lower bound of the bytes per element, over all tensors."""
        if self.factored or self.by_row or self.projected:
            return 0.0
        element_bytes = self.element_bytes or wide_bytes
        return (
            min(element_bytes + 4 / self.block, self.otherwise_bytes or widths.parameter)
            if self.block
            else element_bytes
        )

    def _is_outside(self, tensor: StoredTensor, widths: Widths) -> bool:
        number = tensor.num_elements
        uneven = self.whole_blocks and number % self.block != 0
        return (
            number < self.least_elements or uneven or (self.wide_embeddings and widths.trainer and tensor.is_embedding)
        )


def _projected(shape: tuple[int, ...], rank: int, *, of: str) -> tuple[int, ...]:
    """Shape of a matrix's gradient after its projection along the shorter side, or that of the projection."""
    *stack, rows, columns = shape
    side = max(rows, columns) if of == "gradient" else min(rows, columns)
    return (*stack, side, min(rank, rows, columns))


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Temporaries of the update of one tensor after the other, of which those of the largest tensor count.

    Attributes:
        element_bytes: Bytes per element of a tensor whose weight has 32 bits.
        narrow_bytes: The same for a weight of 16 bits.
        square_bytes: Bytes per element of a square matrix with the shorter side of a matrix.
        whole_bytes: Both per element of the whole tensor, where it is gathered from shards; zeros where it is not.
        of_matrices: Only matrices of blocks have them.
    """

    element_bytes: int
    narrow_bytes: int
    square_bytes: int = 0
    whole_bytes: tuple[int, int] = (0, 0)
    of_matrices: bool = False

    def num_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of the temporaries of one tensor."""
        if self.of_matrices and not tensor.is_matrix:
            return 0
        sizes, shape = (self.element_bytes, self.narrow_bytes), tensor.shape
        if any(self.whole_bytes) and tensor.whole_shape not in ((), shape):
            sizes, shape = self.whole_bytes, tensor.whole_shape
        element_bytes = sizes[widths.parameter == 2]
        side = min(shape[-2:], default=0) if len(shape) >= 2 else 0
        stacked = math.prod(shape[:-2])
        return element_bytes * math.prod(shape) + self.square_bytes * side * side * stacked


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        states: Format of each state.
        streamed_bytes: Bytes that a step reads and writes per FP32 weight, zeroing the gradient included. With
            ``by_tensor``, without states, each of which is read and written once in addition.
        narrow_streamed_bytes: The same per weight of 16 bits; 0 for half of it.
        num_norms: Norms computed per parameter tensor; ranks with shards of a tensor sum the squares.
        num_temporaries: Temporary tensors of a step, each as large as all parameters.
        package: See ``Package``.
        kind: Class in a package other than torch.
        like: Optimizer with the same rule of learning rates; empty for one of its own.
        by_tensor: Tensors are updated one after another, and the bytes of their states depend on their shapes.
        host_calls: With ``by_tensor``, operations that the host issues for a tensor.
        synchronizes: With ``by_tensor``, the host waits for the device after every tensor.
        temporaries: With ``by_tensor``, temporaries of the largest tensor; None for none.
        orthogonalizes: Updates of matrices of blocks are orthogonalized.
        updates_copies: The framework's weights stay as they are, and FP32 copies of the trained ones are updated.
        projects_back: The update of a projected gradient is projected back.
        note: Sentence on what a prediction leaves out; empty for none.
        others: Optimizer of the tensors that are no matrices of blocks; None for the same.
        gathers: Tensors that ranks all-gather under FSDP2: updates of ``matrices`` of blocks, or gradients and weights
            of ``all``; empty for none.
        refused_under: Situation -> why the optimizer does not work in it, and what does.
        software: Frameworks in which the optimizer runs; empty for all.
    """

    states: tuple[StateFormat, ...]
    streamed_bytes: int
    num_norms: int = 0
    num_temporaries: int = 0
    narrow_streamed_bytes: int = 0
    package: Package = "torch"
    kind: str = ""
    like: str = ""
    by_tensor: bool = False
    host_calls: int = 0
    synchronizes: bool = False
    temporaries: Temporaries | None = None
    orthogonalizes: bool = False
    updates_copies: bool = False
    projects_back: bool = False
    note: str = ""
    others: OptimizerFacts | None = None
    gathers: Literal["", "matrices", "all"] = ""
    refused_under: Mapping[Situation, tuple[str, str]] | None = None
    software: tuple[str, ...] = ()

    @property
    def num_states(self) -> int:
        """Tensors stored per parameter."""
        return len(self.states)

    @property
    def projects(self) -> bool:
        """True if states are those of projected gradients of matrices."""
        return any(state.projected for state in self.states)

    def scratch_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of temporaries of the update of one tensor alone."""
        if self.others is not None and not tensor.is_matrix:
            return self.others.scratch_bytes(tensor, widths)
        if not self.by_tensor:
            return self.num_temporaries * tensor.num_elements * widths.moment
        return 0 if self.temporaries is None else self.temporaries.num_bytes(tensor, widths)

    @property
    def is_paged(self) -> bool:
        """True if states are in managed memory."""
        return any(state.paged_elements for state in self.states)

    def _states_of(self, tensor: StoredTensor) -> Iterable[tuple[StateFormat, int]]:
        """Formats of a tensor's states with the index of each."""
        facts = self if tensor.is_matrix or self.others is None else self.others
        return zip(facts.states, range(len(facts.states)), strict=True)

    def state_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of the states of a tensor; where all tensors are gathered, every rank has the states of whole ones."""
        if self.gathers == "all" and tensor.whole_shape:
            tensor = tensor._replace(shape=tensor.whole_shape)
        return sum(state.num_bytes(tensor, widths[index], widths) for state, index in self._states_of(tensor))

    def paged_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of the states of a tensor in managed memory, which no counter of torch's allocator has."""
        return sum(state.paged_bytes(tensor, widths[index], widths) for state, index in self._states_of(tensor))

    def least_state_bytes(self, widths: Widths) -> float:
        """Lower bound of the bytes of the states per parameter, whatever the shapes; exact unless ``by_tensor``."""
        return sum(state.least_bytes(widths[index], widths) for index, state in enumerate(self.states))

    def update_bytes(self, fraction: float, widths: Widths) -> float:
        """Lower bound of the bytes that a step streams per parameter; exact unless ``by_tensor``.

        Args:
            fraction: See ``StateBytes.update_fraction``.
        """
        if not self.by_tensor:
            return int(self.streamed_bytes * fraction)
        streamed_bytes = self._own_bytes(fraction) + 2 * self.least_state_bytes(widths)
        return (
            streamed_bytes if self.others is None else min(streamed_bytes, self.others.update_bytes(fraction, widths))
        )

    def _own_bytes(self, fraction: float) -> float:
        """Bytes streamed per weight, without states."""
        narrow = self.narrow_streamed_bytes if fraction < 1 else 0
        return narrow or self.streamed_bytes * fraction

    def tensor_bytes(self, tensor: StoredTensor, fraction: float, widths: Widths) -> int:
        """Bytes that the step of one tensor streams; see ``update_bytes``."""
        if self.others is not None and not tensor.is_matrix:
            return int(self.others.update_bytes(fraction, widths) * tensor.num_elements)
        return int(self._own_bytes(fraction) * tensor.num_elements) + 2 * self.state_bytes(tensor, widths)
