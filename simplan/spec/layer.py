"""A layer: what it holds, computes and keeps for the backward pass.

A model is a list of layers; ``simplan.spec.transformer`` is one builder of such a list, another family is another.
Quantities are per sequence; a microbatch of b sequences does b times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Attention", "Gemm", "Kernel", "LayerKind", "LayerSpec", "Lookup", "ParameterSpec", "Pointwise", "Saved"]


class LayerKind(StrEnum):
    """What a layer is in the pipeline: the first, a repeated one, or the last with the loss."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One weight tensor.

    Attributes:
        name: Name inside its layer, as the executor's module calls it.
        shape: Its dimensions.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product of activations (m x k) with a weight (k x n); m counts the rows of one sequence."""

    name: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """2 m n k."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention core (two batched products and the softmax) of one sequence."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    seq_len: int
    causal: bool = True

    @property
    def full_flops(self) -> int:
        """4 s^2 d a: both products over the whole s x s square (the PaLM convention)."""
        return 4 * self.seq_len**2 * self.head_dim * self.num_heads

    @property
    def flops(self) -> int:
        """Half of ``full_flops`` when causal: what a kernel that skips the upper triangle computes."""
        return self.full_flops // 2 if self.causal else self.full_flops


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A memory-bound kernel: elements of one sequence it reads and writes."""

    name: str
    reads: int
    writes: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding lookup: rows gathered (forward) and scattered (backward) for one sequence."""

    name: str
    rows: int
    width: int


Kernel = Gemm | Attention | Pointwise | Lookup


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward.

    Attributes:
        name: What it is, for the memory breakdown.
        elements: Elements for one sequence.
        bytes_per_element: Fixed width (indices, fp32 statistics); None for the width of activations.
        logits: Belongs to the output distribution, which the breakdown shows apart.
    """

    name: str
    elements: int
    bytes_per_element: int | None = None
    logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSpec:
    """One layer.

    Attributes:
        key: Identifies shape and kind; equal keys mean equal layers (also in a calibration).
        kind: Where it stands in the model.
        parameters: Weight tensors in the order in which forward uses them.
        kernels: What forward runs, for one sequence.
        saved: What forward keeps for backward, for one sequence.
        output_elements: Elements handed to the next layer, for one sequence (0 for the head: a scalar loss).
        tied: Names of parameters that are the same tensor as the embedding's ``wte`` in another layer.
        gradient_order: Indices into ``parameters`` in the order in which backward completes their gradients.
    """

    key: str
    kind: LayerKind
    parameters: tuple[ParameterSpec, ...]
    kernels: tuple[Kernel, ...]
    saved: tuple[Saved, ...]
    output_elements: int
    tied: tuple[str, ...] = ()
    gradient_order: tuple[int, ...] = field(default=())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerSpec) and self.key == other.key

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones included."""
        return sum(p.num_elements for p in self.parameters)

    def flops(self, *, full_attention: bool = False) -> int:
        """Forward model FLOPs of one sequence: matrix products and attention.

        Args:
            full_attention: Count the whole attention square (PaLM) instead of the causal half.
        """
        total = 0
        for kernel in self.kernels:
            if isinstance(kernel, Gemm):
                total += kernel.flops
            elif isinstance(kernel, Attention):
                total += kernel.full_flops if full_attention else kernel.flops
        return total

    def saved_bytes(self, activation_bytes: int) -> tuple[int, int]:
        """``(activations, logits)`` kept for backward, bytes of one sequence."""
        totals = [0, 0]
        for tensor in self.saved:
            totals[tensor.logits] += tensor.elements * (tensor.bytes_per_element or activation_bytes)
        return totals[0], totals[1]
