"""Liveness of the tensors of a layer: one pass over its operators, forward and backward, as autograd runs them.

A tensor is allocated by its operator and freed after its last reader. A tensor saved for backward is freed after the
backward of the operator that needs it last. Backward visits the operators in reverse. While gradients of an operator's
inputs are computed, the gradient of its result, its saved tensors and its scratch are resident. The gradient of a
weight is freed immediately, since it is added to the accumulated one. Two gradients of one tensor are added in place,
unless another operator still holds the first one. Dropped tensors are recomputed by forward's operators just before the
first backward that needs them. Under autocast the gradient of a weight is computed in BF16 or FP16 and then cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from simplan.model.layer import Gemm, LayerCollective, LayerKind, Lookup, Operator
from simplan.model.recompute import RecomputeGroup
from simplan.program.memory.low_precision_footprint import backward_scratch
from simplan.program.memory.tensors import LayerTensors


class PeakPoint(NamedTuple):
    """Bytes at one point of a pass through a layer, in addition to the layer's saved bytes.

    Attributes:
        workspace: Activations and their gradients; negative if more of the saved bytes is already free.
        logits: Logits and their gradients.
        gradients: Gradients of weights that are not yet added to the accumulated ones.
    """

    workspace: int = 0
    logits: int = 0
    gradients: int = 0


Points = Iterator[tuple[int, PeakPoint]]
"""Pairs of operator index and point, in the order of the pass."""


def forward_points(tensors: LayerTensors) -> Points:
    """Yields points of forward. The input is resident at its start, saved tensors and the output at its end."""
    layer, memory = tensors.layer, _Memory(tensors)
    for tensor in layer.inputs:
        if not tensor.elsewhere:
            memory.hold(tensor.name, tensors.bytes_of(tensor.name))
    # the caller of a head's module, or torchtitan's loop over chunks, holds its output while the loss is computed
    heads = [o for o in layer.operators if isinstance(o.kernel, Gemm) and o.makes[0].logits]
    is_held = layer.loss_chunks is None or layer.loss_chunks.in_place
    logits = [operator.makes[0].name for operator in heads if is_held]
    stays = {*tensors.saved, *(tensors.roots[name] for name in (*layer.outputs, *logits[:1]))}
    yield from _run(tensors, memory, range(len(layer.operators)), stays, copies=tensors.saves_copies)


def backward_points(tensors: LayerTensors) -> Points:
    """Yields points of backward. The gradients of the layer's outputs are resident at its start."""
    return _Backward(tensors).run()


def input_backward(tensors: LayerTensors, *, receives: bool) -> tuple[list[PeakPoint], dict[int, Storage]]:
    """Computes the half of backward for gradients of activations.

    Args:
        receives: True if the gradients of the layer's outputs are in receive buffers and counted there.

    Returns:
        Peak points, and operator with weights -> gradient that remains for the weight half.
    """
    backward = _Backward(tensors, leaves=True, receives=receives)
    return [point for _, point in backward.run()], backward.left


class Storage:
    """Memory of a tensor or a gradient, with the number of its holders, and whether they hold a view of it.

    Attributes:
        counted_bytes: Size in bytes; 0 if it is counted elsewhere.
    """

    __slots__ = ("counted_bytes", "holders", "is_view", "logits", "num_bytes")

    def __init__(self, num_bytes: int, *, logits: bool, is_view: bool = False) -> None:
        self.num_bytes, self.logits, self.is_view, self.holders = num_bytes, logits, is_view, 0
        self.counted_bytes = num_bytes


class _Memory:
    """Memory in use, by name; its points exclude the layer's saved bytes."""

    def __init__(self, tensors: LayerTensors) -> None:
        self._saved = tensors.saved_bytes, tensors.saved_logits
        self._held: dict[str, Storage] = {}
        self._bytes = [0, 0]

    def hold(self, name: str, num_bytes: int, *, logits: bool = False) -> None:
        """Allocates a tensor, unless it exists."""
        if name not in self._held:
            self.attach(name, Storage(num_bytes, logits=logits))

    def attach(self, name: str, storage: Storage) -> None:
        """Assigns memory to a name."""
        assert name not in self._held, name
        self._held[name] = storage
        if not storage.holders:
            self._bytes[storage.logits] += storage.counted_bytes
        storage.holders += 1

    def get(self, name: str) -> Storage | None:
        """Returns the memory of a name; None for none."""
        return self._held.get(name)

    def names(self) -> set[str]:
        """Returns the names in use."""
        return set(self._held)

    def free(self, name: str) -> None:
        """Releases a name's hold on its memory, which is freed with its last name."""
        storage = self._held.pop(name, None)
        if storage is None:
            return
        storage.holders -= 1
        if not storage.holders:
            self._bytes[storage.logits] -= storage.counted_bytes

    def point(self, *, scratch: int = 0, logits: int = 0, gradients: int = 0) -> PeakPoint:
        """Returns the bytes in use in addition to saved bytes."""
        (others, of_logits), (saved, saved_logits) = self._bytes, self._saved
        return PeakPoint(others + scratch - saved, of_logits + logits - saved_logits, gradients)


def _run(
    tensors: LayerTensors,
    memory: _Memory,
    order: Sequence[int],
    stays: set[str],
    *,
    copies: bool,
    last_use: Mapping[str, int] = MappingProxyType({}),
) -> Points:
    """Runs operators forward, and frees tensors without remaining use.

    Args:
        stays: Roots of tensors to keep.
        copies: True if copies of weights are created and kept.
        last_use: Saved tensor -> operator after which it is freed.
    """
    layer, roots = tensors.layer, tensors.roots
    last_reader = {roots[name]: index for index in order for name in layer.operators[index].reads}
    for index in order:
        operator = layer.operators[index]
        for name in (name for name, last in last_use.items() if last < index):
            memory.free(name)
        made = [roots[tensor.name] for tensor in operator.makes]
        for root in made:
            if not layer.tensors[root].elsewhere:
                memory.hold(root, tensors.bytes_of(root), logits=tensors.is_logits(root))
        kernel = operator.kernel
        if copies and isinstance(kernel, Gemm) and kernel.name in tensors.weight_copies:
            memory.hold(_copy(kernel.name), tensors.weight_copies[kernel.name])
        yield index, memory.point(scratch=tensors.scratch_bytes(operator, forward=True))
        for root in (*(roots[name] for name in operator.reads), *made):
            if root not in stays and last_reader.get(root, -1) <= index:
                memory.free(root)


class _Backward:
    """One backward of a layer.

    Args:
        leaves: True if gradients of weights are not computed, and their inputs remain.
        receives: See ``input_backward``.

    Attributes:
        left: Operator with weights -> remaining gradient of its result.
    """

    def __init__(self, tensors: LayerTensors, *, leaves: bool = False, receives: bool = False) -> None:
        self._tensors, self._layer, self._leaves = tensors, tensors.layer, leaves
        self._state, self._recomputation = tensors.state, tensors.recomputation
        self.left: dict[int, Storage] = {}
        self._brought: set[str] = set()
        self._waiting_gradients = 0  # of weights: a compiled backward returns them all at its end
        self._gathered = {operator.regathers for operator in self._layer.operators}
        self._read_by = {rerun: self._read_roots(rerun) for rerun in self._recomputation.reruns}
        self._inputs_until = dict(self._inputs_of_reruns())
        self._memory = _Memory(tensors)
        self._take_saved()
        self._take_gradients(receives=receives)

    @property
    def _is_head(self) -> bool:
        return self._layer.kind is LayerKind.HEAD

    def _take_saved(self) -> None:
        """Allocates the tensors that remain from forward when backward reaches the layer."""
        tensors, layer = self._tensors, self._layer
        forwarded = {tensors.roots[name] for name, tensor in layer.tensors.items() if tensor.forwarded}
        for root, size in tensors.saved.items():
            if root in tensors.last_savers or root not in forwarded:  # otherwise its savers are done
                self._memory.hold(root, size, logits=tensors.is_logits(root))
        for name, size in tensors.saved_copies.items() if tensors.saves_copies else ():
            self._memory.hold(_copy(name), size)
        for root in (tensors.roots[name] for name in layer.outputs if name in layer.makers):
            # an output that this layer saves as well outlives the next layer's backward
            if root not in tensors.saved and root in tensors.last_savers and not self._recomputation.from_start:
                self._memory.hold(root, tensors.bytes_of(root))

    def _take_gradients(self, *, receives: bool) -> None:
        for name in self._layer.outputs if not self._is_head else ():
            if name in self._layer.needed:
                given = Storage(self._tensors.bytes_of(name), logits=self._tensors.is_logits(name))
                if receives:  # the buffer holds it as well
                    given.counted_bytes, given.holders = 0, 1
                self._memory.attach(_gradient(self._tensors.gradient_roots[name]), given)

    def run(self) -> Points:
        """Yields points by operator, in the order of backward."""
        reruns = list(self._recomputation.reruns)
        yield len(self._layer.operators) - 1, self._memory.point()
        for index in reversed(range(len(self._layer.operators))):
            while reruns and self._asks(index, reruns[0]):
                yield from self._again(reruns.pop(0), index)
            yield from ((index, point) for point in self._operator(index, self._layer.operators[index]))
            for name in self._inputs_until.pop(index, ()):
                self._memory.free(name)
        for rerun in reruns:
            yield from self._again(rerun, -1)
        if self._layer.compiled:  # hooks of gradients run after the compiled backward
            updates = (each for operator in self._layer.operators for each in self._tensors.update_bytes(operator))
            for _, scratch in updates:
                yield 0, self._memory.point(scratch=scratch, gradients=self._waiting_gradients)

    # recomputation

    def _order_of(self, kernels: Sequence[int] | set[int]) -> list[int]:
        """Returns the operators of some kernels."""
        return [index for index, place in enumerate(self._layer.places) if place in kernels]

    def _read_roots(self, rerun: RecomputeGroup) -> frozenset[str]:
        """Returns roots of the tensors that recomputed operators read."""
        operators = (self._layer.operators[index] for index in self._order_of(rerun.kernels))
        return frozenset(self._tensors.roots[name] for operator in operators for name in operator.reads)

    def _inputs_of_reruns(self) -> Iterator[tuple[int, list[str]]]:
        """Yields, by operator, tensors saved only as inputs of recomputation, which are held until it is done."""
        tensors = self._tensors
        for rerun in self._recomputation.reruns if not self._recomputation.from_start else ():
            inputs = [r for r in self._read_by[rerun] if r in tensors.saved and r not in tensors.last_savers]
            yield min(self._order_of(rerun.kernels)), inputs

    def _is_read_again(self, root: str, index: int) -> bool:
        """Returns True if a later recomputation reads the tensor."""
        place = self._layer.places[index] if index >= 0 else -1
        return any(rerun.needed_by < place and root in read for rerun, read in self._read_by.items())

    def _asks(self, index: int, rerun: RecomputeGroup) -> bool:
        """Returns True if the backward of this operator is the first that needs the recomputed tensors."""
        operator, place = self._layer.operators[index], self._layer.places[index]
        reads = operator.kernel is not None or any(True for _ in self._tensors.saved_roots(index))
        return place < rerun.needed_by or (place == rerun.needed_by and reads)

    def _again(self, rerun: RecomputeGroup, index: int) -> Points:
        """Recomputes forward's operators; frees afterwards the tensors that only recomputation needed."""
        tensors, kernels = self._tensors, self._layer.kernels
        # an operator without work in forward may have a separate cast
        idle = {
            i for i in range(max(rerun.kernels)) if isinstance(k := kernels[i], LayerCollective) and k.forward is None
        }
        order = self._order_of(idle.union(rerun.kernels))
        if self._recomputation.from_start:  # also a cast of the input, regardless of what the first kernel saved
            before = next(i for i, operator in enumerate(self._layer.operators) if operator.kernel is not None)
            order = sorted({*range(before), *order})
        saved = {root for root, saver in tensors.last_savers.items() if saver <= index}
        passing = {name for name in self._memory.names() if self._is_for(name, rerun, index)} - saved
        resting = tensors.saved_copies if tensors.saves_copies else ()
        for name in (kernel.name for kernel in kernels[: rerun.needed_by + 1] if isinstance(kernel, Gemm)):
            if name in tensors.weight_copies and name not in resting:  # also of matmuls whose results were saved
                self._memory.hold(_copy(name), tensors.weight_copies[name])
        stays = saved | (self._memory.names() - passing)
        held = self._held_beyond(order[-1]) - stays
        last_use = {name: self._last_use(name) for name in passing}
        yield from _run(tensors, self._memory, order, stays | held, copies=False, last_use=last_use)
        for name in passing | held:
            self._memory.free(name)

    def _held_beyond(self, last: int) -> set[str]:
        """Returns roots of tensors that modules hold while a recomputation ends within them."""
        holders = (operator for operator in self._layer.operators[last + 1 :] if operator.detached)
        return {self._tensors.roots[name] for operator in holders if not operator.makes for name in operator.reads}

    def _last_use(self, root: str) -> int:
        """Returns the last operator, recomputed or not, that creates or reads a saved tensor."""
        used = ((i, n) for i, o in enumerate(self._layer.operators) for n in (*o.reads, *(t.name for t in o.makes)))
        return max(index for index, name in used if self._tensors.roots[name] == root)

    def _is_for(self, root: str, rerun: RecomputeGroup, index: int) -> bool:
        """Returns True if a saved tensor serves this recomputation alone; later tensors are not reused."""
        before = self._layer.makers.get(root, rerun.needed_by) < rerun.needed_by
        return self._recomputation.from_start and before and not self._is_read_again(root, index)

    # gradients

    def _operator(self, index: int, operator: Operator) -> Iterator[PeakPoint]:
        """Yields points of the backward of one operator: gradients of its inputs, then of its weights."""
        if operator.regathers:
            yield from self._brought_back(operator)
            return
        if operator.detached or (not operator.trains and self._layer.needed.isdisjoint(operator.reads)):
            return
        roots, memory = self._tensors.gradient_roots, self._memory
        made = dict.fromkeys(roots[tensor.name] for tensor in operator.makes)
        wanted = [
            root for root in dict.fromkeys(roots[name] for name in operator.reads) if root in self._tensors.needed
        ]
        if wanted and wanted[0] in made and len(wanted) == 1 and (operator.passes or operator.is_cast):
            if operator.backward_scratch:
                yield memory.point(scratch=self._tensors.scratch_bytes(operator, forward=False))
            return  # gradients are the same tensor, changed in place if at all
        incoming = [gradient for root in made if (gradient := memory.get(_gradient(root))) is not None]
        if self._leaves and operator.trains and operator.parameters and incoming:
            self.left[index] = incoming[0]
            memory.attach(f"left for operator {index}", incoming[0])
        for root in made:
            memory.free(_gradient(root))
        outgoing = [(root, self._gradient_of(root, operator, incoming)) for root in wanted]
        yield from self._points(operator, incoming, [gradient for _, gradient in outgoing])
        for root, gradient in outgoing:
            yield from self._add(root, gradient)
        if not self._leaves:
            yield from self._released(index, operator)

    def _gradient_of(self, root: str, operator: Operator, incoming: Sequence[Storage]) -> Storage:
        """Returns the memory of the gradient of an operator's input."""
        num_bytes = self._tensors.gradient_bytes_of(root)
        if operator.passes and incoming and incoming[0].num_bytes == num_bytes:
            return incoming[0]
        for name, saved in operator.gradients_into:
            if self._tensors.gradient_roots[name] == root:
                memory = self._memory.get(_gradient(root)) or self._memory.get(self._tensors.roots.get(saved, ""))
                if memory is not None and memory.num_bytes == num_bytes:
                    return memory
        kernel = operator.kernel  # torch's linear is a matmul of a view of its input; experts and convolutions are not
        of_view = isinstance(kernel, Gemm) and kernel.num_groups == 1 and not kernel.image_elements
        is_view = of_view and operator.reads[0] not in self._gathered
        return Storage(num_bytes, logits=self._tensors.is_logits(root), is_view=is_view)

    def _points(
        self, operator: Operator, incoming: Sequence[Storage], outgoing: Sequence[Storage]
    ) -> Iterator[PeakPoint]:
        """Yields points while an operator's backward runs, including the gradients of its weights."""
        tensors, memory, kernel = self._tensors, self._memory, operator.kernel
        # the incoming gradients have lost their names, but are resident until the operator is done
        there = {id(g): g.counted_bytes for g in incoming if not g.holders}
        new = {id(g): g.num_bytes for g in outgoing if not g.holders and g not in incoming}
        sizes, is_logits = there | new, {id(g): g.logits for g in (*incoming, *outgoing)}
        logits = sum(size for key, size in sizes.items() if is_logits[key]) + tensors.logits_scratch_bytes(operator)
        fresh = sum(size for key, size in sizes.items() if not is_logits[key])
        fresh += tensors.scratch_bytes(operator, forward=False)
        waiting = self._waiting_gradients
        yield memory.point(scratch=fresh, logits=logits, gradients=waiting + self._weight_gradient(operator))
        if isinstance(kernel, Gemm) and self._state.linear is not None:
            for scratch, weight in backward_scratch(self._layer, kernel, tensors.microbatch_size, self._state):
                yield memory.point(scratch=fresh + scratch, gradients=waiting + weight)

    def _add(self, root: str, gradient: Storage) -> Iterator[PeakPoint]:
        """Adds a gradient to the existing one; if another operator still reads that, the sum is a new tensor."""
        memory, name = self._memory, _gradient(root)
        earlier = memory.get(name)
        if earlier is None:
            memory.attach(name, gradient)
        elif earlier is gradient:
            return
        elif earlier.holders > 1 or (earlier.is_view and gradient.is_view):
            total = Storage(earlier.num_bytes, logits=earlier.logits)
            yield memory.point(scratch=(gradient.num_bytes if not gradient.holders else 0) + total.num_bytes)
            memory.free(name)
            memory.attach(name, total)

    def _weight_gradient(self, operator: Operator) -> int:
        """Returns the bytes of the gradient of an operator's weight, in the dtype in which it is computed."""
        state, kernel = self._state, operator.kernel
        if self._leaves:
            return 0
        match kernel:
            case Gemm(trained=True):
                return kernel.weight_elements * (state.matmul_gradient or (state.placeholder if self._is_head else 0))
            case Lookup(trained=True) if operator.parameters:
                weight = next(p for p in self._layer.parameters if p.name == operator.parameters[-1])
                return weight.num_elements * state.residual
            case _:
                return 0

    def _released(self, index: int, operator: Operator) -> Iterator[PeakPoint]:
        """Frees tensors that the operator saved, or created and all-gathered again; upcasts and uses its gradients."""
        tensors, memory, kernel = self._tensors, self._memory, operator.kernel
        brought_back = (tensors.roots[tensor.name] for tensor in operator.makes if tensor.name in self._brought)
        for root in (*tensors.saved_roots(index), *brought_back):
            if tensors.last_savers.get(root, index) >= index and not self._is_read_again(root, index):
                memory.free(root)
        if isinstance(kernel, Gemm):
            memory.free(_copy(kernel.name))
            if kernel.trained:
                yield from self._cast(kernel)
        for gradient, scratch in () if self._layer.compiled else tensors.update_bytes(operator):
            yield memory.point(scratch=scratch, gradients=gradient)

    def _cast(self, kernel: Gemm) -> Iterator[PeakPoint]:
        """Upcasts a weight gradient."""
        tensors, memory, state = self._tensors, self._memory, self._state
        has_copy = kernel.name in tensors.weight_copies
        if has_copy and state.weight_copy:
            both = kernel.weight_elements * (state.matmul_gradient + state.gradient)
            yield memory.point(gradients=self._waiting_gradients + both)
        if self._layer.compiled:
            self._waiting_gradients += kernel.weight_elements * (state.gradient if has_copy else state.matmul_gradient)

    def _brought_back(self, operator: Operator) -> Iterator[PeakPoint]:
        """All-gathers inputs of matmuls again, for the gradients of their weights."""
        kernel, root = operator.kernel, self._tensors.roots[operator.regathers]
        if isinstance(kernel, LayerCollective) and kernel.backward is not None:
            self._memory.hold(root, self._tensors.bytes_of(root))
            self._brought.add(operator.regathers)
            yield self._memory.point(scratch=self._tensors.scratch_bytes(operator, forward=False))


def _copy(matmul: str) -> str:
    return f"{matmul}, weight"


def _gradient(root: str) -> str:
    return f"{root}, gradient"
