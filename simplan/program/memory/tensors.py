"""Tensors of a layer: their storage, size in bytes, and the tensors that forward saves for backward.

Sizes follow from the precision: a cast between equal dtypes creates no tensor. Under autocast a matmul saves a copy of
its weight in addition to its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from simplan.model.captured.layers import CAPTURED
from simplan.model.layer import (
    CollectiveKind,
    Gemm,
    LayerCollective,
    LayerKind,
    LayerSpec,
    Operator,
    ParameterSpec,
    Tensor,
)
from simplan.model.low_precision import quantized_linears
from simplan.model.operator import saved_by, storages
from simplan.model.recompute import Recomputation
from simplan.optimizers import UPDATES, StoredTensor
from simplan.program.lowering.fsdp_units import shard_elements
from simplan.program.memory.low_precision_footprint import forward_scratch_bytes, kept_weight_bytes
from simplan.software.software import StateBytes

_EXPERT_DIMENSIONS = 3
_REORDERED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def stored_tensor(parameter: ParameterSpec, layer: LayerSpec, num_shards: int) -> StoredTensor:
    """Returns the part of a parameter that shard 0 holds; FSDP2 shards rows, and experts along other dimensions."""
    whole, number = parameter.shape, shard_elements(parameter.shape, num_shards)
    row = math.prod(whole[1:])
    shape = (number // row, *whole[1:]) if row and number % row == 0 else (number,)
    is_embedding = layer.kind is LayerKind.EMBEDDING and len(whole) == 2
    is_matrix = layer.kind is LayerKind.BLOCK and 2 <= len(whole) <= 3
    return StoredTensor(shape if num_shards > 1 else whole, is_embedding, is_matrix, whole)


class LayerTensors:
    """Tensors of one layer for one microbatch. Tensors that share memory are identified by one of them, their root.

    Args:
        microbatch_size: Microbatch size b, in sequences.
        state: Bytes per element of tensors.
        recomputation: Tensors saved for backward, and kernels to recompute.

    Attributes:
        roots: Tensor -> its root.
        gradient_roots: Tensor -> root of its gradient.
        needed: Roots of the gradients that backward computes.
        saved: Root -> bytes that the layer saves for backward and counts.
        weight_copies: Matmul -> bytes of the copy of its weight that forward makes.
        saved_copies: ``weight_copies`` that are saved for backward.
        saves_copies: True if forward saves these copies; otherwise they are created again.
        last_savers: Root -> first operator that saves it, whose backward needs it last.
    """

    def __init__(self, layer: LayerSpec, microbatch_size: int, state: StateBytes, recomputation: Recomputation) -> None:
        self.layer, self.microbatch_size, self.state, self.recomputation = layer, microbatch_size, state, recomputation
        widths = state.activation, state.residual
        self.roots = {name: tensor.name for name, tensor in layer.storages(*widths).items()}
        apart = storages(layer.operators, layer.inputs, *widths, of_gradients=True)
        self.gradient_roots = {name: tensor.name for name, tensor in apart.items()}
        self.needed = frozenset(self.gradient_roots[name] for name in layer.needed)
        counted = self._counted_elsewhere()
        kept = {self.roots[name] for name in recomputation.saved}
        self.saved = {root: self.bytes_of(root) for root in sorted(kept) if root not in counted}
        copies = {k.name: _copied_weight_bytes(layer, k, state) for k in layer.kernels if isinstance(k, Gemm)}
        self.weight_copies = {name: num_bytes for name, num_bytes in copies.items() if num_bytes}
        chunked = {k.name for k in layer.kernels if isinstance(k, Gemm) and k.chunks is not None}
        self.saved_copies = {name: size for name, size in self.weight_copies.items() if name not in chunked}
        self.saves_copies = not recomputation.from_start
        self.last_savers = {
            root: index for index in reversed(range(len(layer.operators))) for root in self.saved_roots(index)
        }

    @property
    def saved_logits(self) -> int:
        """Bytes of logits saved for backward."""
        return sum(size for root, size in self.saved.items() if self.is_logits(root))

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward without logits, including copies of weights."""
        copies = sum(self.saved_copies.values()) if self.saves_copies else 0
        return sum(self.saved.values()) - self.saved_logits + copies

    @property
    def input_bytes(self) -> int:
        """Bytes of the layer's inputs that are saved for backward."""
        return sum(self.saved.get(tensor.name, 0) for tensor in self.layer.inputs)

    def update_bytes(self, operator: Operator) -> Iterator[tuple[int, int]]:
        """Yields the gradient of each weight of an operator and the temporaries of its update in backward, in bytes."""
        state = self.state
        if state.updated_by is None:
            return
        facts = UPDATES[state.updated_by]
        for parameter in self.layer.parameters if operator.parameters else ():
            if parameter.name in operator.parameters and not (parameter.frozen or parameter.name in self.layer.tied):
                scratch = facts.scratch_bytes(stored_tensor(parameter, self.layer, 1), state.widths())
                yield parameter.num_elements * state.gradient, scratch

    def _counted_elsewhere(self) -> frozenset[str]:
        """Returns inputs whose memory is counted elsewhere, and outputs, which the next layer saves."""
        layer = self.layer
        inputs = {tensor.name for tensor in layer.inputs if tensor.elsewhere}
        forwarded = {self.roots[name] for name, tensor in layer.tensors.items() if tensor.forwarded}
        outputs = {self.roots[name] for name in layer.outputs if name in layer.makers} - forwarded
        return frozenset(inputs | outputs)

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of a tensor, or of a gradient that exists as a whole."""
        return self._bytes(self.layer.tensors[name])

    def gradient_bytes_of(self, name: str) -> int:
        """Returns the bytes of a tensor's gradient, or of a chunk of it."""
        tensor = self.layer.tensors[name]
        return self._bytes(tensor if tensor.gradient_chunks is None else replace(tensor, chunks=tensor.gradient_chunks))

    def is_logits(self, name: str) -> bool:
        """Returns True if a tensor holds logits."""
        return self.layer.tensors[name].logits

    def saved_roots(self, index: int) -> Iterator[str]:
        """Returns the roots of tensors that an operator saves for backward."""
        return (self.roots[name] for name in saved_by(self.layer.operators[index], self.layer.needed))

    def scratch_bytes(self, operator: Operator, *, forward: bool) -> int:
        """Returns bytes that exist only while an operator runs, without logits."""
        tensors = operator.forward_scratch if forward else operator.backward_scratch
        narrowest = min((self._width(self.layer.tensors[name]) for name in operator.reads), default=0)
        there = (t for t in tensors if not t.logits and (not t.widened or narrowest < self._width(t)))
        found = sum(self._bytes(tensor) for tensor in there)
        kernel = operator.kernel
        if isinstance(kernel, LayerCollective):
            found += self._reordered_bytes(kernel, kernel.forward if forward else kernel.backward, forward=forward)
        elif isinstance(kernel, Gemm) and forward and self.state.linear is not None:
            found += forward_scratch_bytes(self.layer, kernel, self.microbatch_size, self.state)
        unpacks_again = isinstance(kernel, Gemm) and kernel.propagates and not kernel.merged_rank
        if isinstance(kernel, Gemm) and kernel.stored is not None and (forward or unpacks_again):
            rows, width = self.microbatch_size * kernel.m, self._unpacked_width
            sizes = kernel.n, kernel.k, rows, width
            found += kernel.stored.scratch_bytes(*sizes, forward=forward, experts=kernel.num_groups)
        return found

    def logits_scratch_bytes(self, operator: Operator) -> int:
        """Returns bytes of logits that exist only while the backward of an operator runs."""
        return sum(self._bytes(tensor) for tensor in operator.backward_scratch if tensor.logits)

    @property
    def _unpacked_width(self) -> int:
        """Bytes per element of weights that matmuls unpack."""
        assert self.state.base is not None
        return self.state.base.compute_bytes

    def _width(self, tensor: Tensor) -> int:
        return tensor.width(self.state.activation, self.state.residual)

    def _bytes(self, tensor: Tensor) -> int:
        elements = (1 if tensor.per_microbatch else self.microbatch_size) * tensor.elements
        if tensor.chunks is not None:
            elements = tensor.elements // tensor.chunks.rows * tensor.chunks.tokens(self.microbatch_size)
        return elements * self._width(tensor)

    def _reordered_bytes(self, kernel: LayerCollective, kind: CollectiveKind | None, *, forward: bool) -> int:
        """Returns bytes that a collective along tokens copies to reorder tokens by rank, or back."""
        whole = kernel.elements * self.microbatch_size * self.state.activation
        if kind is CollectiveKind.ALL_TO_ALL:
            return 2 * whole if kernel.axis == "cp" and forward else 0  # autograd frees sources of copied gradients
        along_tokens = kernel.axis in ("tp", "cp") and kind in _REORDERED and self.microbatch_size > 1
        return whole if along_tokens and kernel.reorders else 0


def _copied_weight_bytes(layer: LayerSpec, kernel: Gemm, state: StateBytes) -> int:
    """Returns the bytes of the copy of a matrix that forward creates in the activation dtype and saves for backward.

    FSDP all-gathers weights in that dtype; experts that it does not shard are copied. Frozen weights are stored in that
    dtype, unless the framework made them FP32. A copy that backward does not need for a gradient is not saved.
    Low-precision linear layers quantize the weights directly.
    """
    if state.linear is not None and kernel in quantized_linears(layer, state.linear):
        return kept_weight_bytes(state.linear, kernel)
    own = [p for p in layer.parameters if p.name == f"{kernel.name}.weight"]
    shapes = (p.shape for p in own)
    # a convolution always saves its weight
    saved = kernel.propagates or (kernel.trained and any(len(shape) > _EXPERT_DIMENSIONS for shape in shapes))
    if kernel.stored is not None or kernel.full_precision or not saved:
        return 0
    if any(p.is_copy for p in own) and state.frozen == state.activation:
        return 0
    if not kernel.trained:  # autocast narrows what is FP32; a capture has that as a tensor of its own
        if layer.key.startswith(CAPTURED):
            return 0
        return kernel.weight_elements * (state.weight_copy if state.frozen > state.weight_copy else 0)
    spread = not state.gathers_experts and any(p.expert and p.name == f"{kernel.name}.weight" for p in layer.parameters)
    narrows = spread and state.gathered != state.parameter
    return kernel.weight_elements * (state.weight_copy or (state.gathered if narrows else 0))
