"""Liveness of the tensors of a layer: one walk over its operators, forward and backward, as autograd runs them.

A tensor is made by its operator and freed after its last reader, or, where it is saved for backward, after the backward
of the last operator that saved it. Backward comes to the operators in reverse. Gradients of an operator's inputs are
made beside the gradient of its result, what it saved and its scratch; the gradient of a weight is freed at once, since
it is added to the accumulated one. Two gradients of one tensor are added in place, unless another operator still holds
the first one. What recomputation dropped is made again by running forward's operators once more, just before the first
backward that needs them. Under autocast the gradient of a weight is made in 16 bits and then cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from simplan.model.layer import Exchange, Gemm, LayerKind, Lookup, Operator
from simplan.model.recompute import Rerun
from simplan.program.memory.low_precision_footprint import backward_scratch
from simplan.program.memory.tensors import LayerTensors

__all__ = ["InputBackward", "PeakPoint", "backward_points", "forward_points", "input_backward"]


class PeakPoint(NamedTuple):
    """Bytes at one point of a pass through a layer, beside what the layer saves for backward.

    Attributes:
        workspace: Activations and their gradients; less than nothing where more of what is saved is free again.
        logits: The same, of the output distribution.
        gradients: Gradients of weights that are not added to the accumulated ones yet.
    """

    workspace: int = 0
    logits: int = 0
    gradients: int = 0


Points = Iterator[tuple[int, PeakPoint]]
"""By operator, in the order in which a pass comes to them."""


class InputBackward(NamedTuple):
    """The first part of a split backward.

    Attributes:
        points: Its points.
        gradients, logits_gradients: Bytes of the gradients that it leaves, each tensor once.
        left: The same by operator with weights.
    """

    points: tuple[PeakPoint, ...]
    gradients: int
    logits_gradients: int
    left: dict[int, int]


def forward_points(tensors: LayerTensors) -> Points:
    """Points of forward. The layer's input is there at its start, what is saved and its output at its end."""
    layer, memory = tensors.layer, _Memory(tensors)
    for tensor in layer.inputs:
        if not tensor.elsewhere:
            memory.hold(tensor.name, tensors.bytes_of(tensor.name))
    # what the module of a head gives its caller holds while the loss is computed
    logits = [o.makes[0].name for o in layer.operators if isinstance(o.kernel, Gemm) and o.makes[0].logits]
    stays = {*tensors.saved, *(tensors.roots[name] for name in (*layer.outputs, *logits[:1]))}
    yield from _run(tensors, memory, range(len(layer.operators)), stays, copies=tensors.saves_copies)


def backward_points(tensors: LayerTensors) -> Points:
    """Points of backward. The gradients of the layer's outputs are there at its start."""
    return _Backward(tensors).run()


def input_backward(tensors: LayerTensors, *, receives: bool) -> InputBackward:
    """The part of backward that makes gradients of activations alone, and what it leaves for those of weights.

    Args:
        tensors: Of the layer.
        receives: The gradients of the layer's outputs are in receive buffers, which are counted there.
    """
    backward = _Backward(tensors, leaves=True, receives=receives)
    points = tuple(point for _, point in backward.run())
    left = {id(storage): storage for storage in backward.left.values()}.values()
    return InputBackward(
        points,
        sum(storage.counted_bytes for storage in left if not storage.logits),
        sum(storage.counted_bytes for storage in left if storage.logits),
        {index: storage.num_bytes for index, storage in backward.left.items()},
    )


class _Storage:
    """Memory of a tensor or a gradient, with the number of its holders, and whether these have it as a view.

    Attributes:
        num_bytes: Its size.
        counted_bytes: The same, or none where others count it.
    """

    __slots__ = ("counted_bytes", "holders", "is_view", "logits", "num_bytes")

    def __init__(self, num_bytes: int, *, logits: bool, is_view: bool = False) -> None:
        self.num_bytes, self.logits, self.is_view, self.holders = num_bytes, logits, is_view, 0
        self.counted_bytes = num_bytes


class _Memory:
    """Memory in use, by name, of which points leave out what the layer saves."""

    def __init__(self, tensors: LayerTensors) -> None:
        self._saved = tensors.saved_bytes, tensors.saved_logits
        self._held: dict[str, _Storage] = {}
        self._bytes = [0, 0]

    def hold(self, name: str, num_bytes: int, *, logits: bool = False) -> None:
        """Makes a tensor, unless it is there."""
        if name not in self._held:
            self.attach(name, _Storage(num_bytes, logits=logits))

    def attach(self, name: str, storage: _Storage) -> None:
        """Gives memory to a name."""
        assert name not in self._held, name
        self._held[name] = storage
        if not storage.holders:
            self._bytes[storage.logits] += storage.counted_bytes
        storage.holders += 1

    def get(self, name: str) -> _Storage | None:
        """The memory of a name."""
        return self._held.get(name)

    def names(self) -> set[str]:
        """All that is there."""
        return set(self._held)

    def free(self, name: str) -> None:
        """Takes a name off its memory, which is gone with the last one."""
        storage = self._held.pop(name, None)
        if storage is None:
            return
        storage.holders -= 1
        if not storage.holders:
            self._bytes[storage.logits] -= storage.counted_bytes

    def point(self, *, scratch: int = 0, logits: int = 0, gradients: int = 0) -> PeakPoint:
        """What there is beside what is saved."""
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
    """Runs operators forward, and frees what nothing needs any more.

    Args:
        tensors: Of the layer.
        memory: In use.
        order: Which operators.
        stays: Roots of tensors that stay.
        copies: Copies of weights are made and stay.
        last_use: By saved tensor, the operator after which it goes.
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
        tensors: Of the layer.
        leaves: It makes no gradients of weights, and leaves what these are made from.
        receives: As of ``input_backward``.

    Attributes:
        left: By operator with weights, the gradient of its result, where it is left.
    """

    def __init__(self, tensors: LayerTensors, *, leaves: bool = False, receives: bool = False) -> None:
        self._tensors, self._layer, self._leaves = tensors, tensors.layer, leaves
        self._state, self._recomputation = tensors.state, tensors.recomputation
        self.left: dict[int, _Storage] = {}
        self._brought: set[str] = set()
        self._waiting_gradients = 0  # of weights: a compiled backward gives them all at its end
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
        """What is there from forward when backward comes to the layer."""
        tensors, layer = self._tensors, self._layer
        handed_on = {tensors.roots[name] for name, tensor in layer.tensors.items() if tensor.handed_on}
        for root, size in tensors.saved.items():
            if root in tensors.last_savers or root not in handed_on:  # else those that saved it are done
                self._memory.hold(root, size, logits=tensors.is_logits(root))
        for name, size in tensors.weight_copies.items() if tensors.saves_copies else ():
            self._memory.hold(_copy(name), size)
        for root in (tensors.roots[name] for name in layer.outputs if name in layer.makers):
            # an output that this layer saves, too, outlives the next layer's backward
            if root not in tensors.saved and root in tensors.last_savers and not self._recomputation.from_start:
                self._memory.hold(root, tensors.bytes_of(root))

    def _take_gradients(self, *, receives: bool) -> None:
        for name in self._layer.outputs if not self._is_head else ():
            if name in self._layer.needed:
                given = _Storage(self._tensors.bytes_of(name), logits=self._tensors.is_logits(name))
                if receives:  # the buffer holds it, too
                    given.counted_bytes, given.holders = 0, 1
                self._memory.attach(_gradient(self._tensors.gradient_roots[name]), given)

    def run(self) -> Points:
        """Points by operator, in the order in which backward comes to them."""
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

    # what runs again

    def _order_of(self, kernels: Sequence[int] | set[int]) -> list[int]:
        """The operators of some kernels."""
        return [index for index, place in enumerate(self._layer.places) if place in kernels]

    def _read_roots(self, rerun: Rerun) -> frozenset[str]:
        """Roots of what the operators that run again read."""
        operators = (self._layer.operators[index] for index in self._order_of(rerun.kernels))
        return frozenset(self._tensors.roots[name] for operator in operators for name in operator.reads)

    def _inputs_of_reruns(self) -> Iterator[tuple[int, list[str]]]:
        """By operator, what is saved only so that parts of the layer run again: it is there until they are done."""
        tensors = self._tensors
        for rerun in self._recomputation.reruns if not self._recomputation.from_start else ():
            inputs = [r for r in self._read_by[rerun] if r in tensors.saved and r not in tensors.last_savers]
            yield min(self._order_of(rerun.kernels)), inputs

    def _is_read_again(self, root: str, index: int) -> bool:
        """Whether something that runs again later reads it."""
        place = self._layer.places[index] if index >= 0 else -1
        return any(rerun.needed_by < place and root in read for rerun, read in self._read_by.items())

    def _asks(self, index: int, rerun: Rerun) -> bool:
        """Whether the backward of an operator is the first that needs what runs again."""
        operator, place = self._layer.operators[index], self._layer.places[index]
        reads = operator.kernel is not None or any(True for _ in self._tensors.saved_roots(index))
        return place < rerun.needed_by or (place == rerun.needed_by and reads)

    def _again(self, rerun: Rerun, index: int) -> Points:
        """Runs forward's operators once more; what only they needed is gone afterwards."""
        tensors, kernels = self._tensors, self._layer.kernels
        # what does nothing in forward may have a cast of its own
        idle = {i for i in range(max(rerun.kernels)) if isinstance(k := kernels[i], Exchange) and k.forward is None}
        order = self._order_of(idle.union(rerun.kernels))
        if self._recomputation.from_start:  # also a cast of the input, whatever was kept of the first kernel
            before = next(i for i, operator in enumerate(self._layer.operators) if operator.kernel is not None)
            order = sorted({*range(before), *order})
        saved = {root for root, saver in tensors.last_savers.items() if saver <= index}
        passing = {name for name in self._memory.names() if self._is_for(name, rerun, index)} - saved
        if not tensors.saves_copies:  # also of matmuls whose results were kept
            for name in (kernel.name for kernel in kernels[: rerun.needed_by + 1] if isinstance(kernel, Gemm)):
                if name in tensors.weight_copies:
                    self._memory.hold(_copy(name), tensors.weight_copies[name])
        stays = saved | (self._memory.names() - passing)
        last_use = {name: self._last_use(name) for name in passing}
        yield from _run(tensors, self._memory, order, stays, copies=False, last_use=last_use)
        for name in passing:
            self._memory.free(name)

    def _last_use(self, root: str) -> int:
        """The last operator, also of those that do not run again, that a saved tensor is made or read by."""
        used = ((i, n) for i, o in enumerate(self._layer.operators) for n in (*o.reads, *(t.name for t in o.makes)))
        return max(index for index, name in used if self._tensors.roots[name] == root)

    def _is_for(self, root: str, rerun: Rerun, index: int) -> bool:
        """Whether a saved tensor serves this rerun alone; nobody takes up those that are made after its end."""
        before = self._layer.makers.get(root, rerun.needed_by) < rerun.needed_by
        return self._recomputation.from_start and before and not self._is_read_again(root, index)

    # gradients

    def _operator(self, index: int, operator: Operator) -> Iterator[PeakPoint]:
        """The backward of one operator: gradients of its inputs, then of its weights."""
        if operator.regathers:
            yield from self._brought_back(operator)
            return
        if not operator.trains and self._layer.needed.isdisjoint(operator.reads):
            return
        roots, memory = self._tensors.gradient_roots, self._memory
        made = dict.fromkeys(roots[tensor.name] for tensor in operator.makes)
        wanted = [
            root for root in dict.fromkeys(roots[name] for name in operator.reads) if root in self._tensors.needed
        ]
        if wanted and wanted[0] in made and len(wanted) == 1 and (operator.passes or operator.is_cast):
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

    def _gradient_of(self, root: str, operator: Operator, incoming: Sequence[_Storage]) -> _Storage:
        """Memory of the gradient of something that an operator reads."""
        num_bytes = self._tensors.bytes_of(root)
        if operator.passes and incoming and incoming[0].num_bytes == num_bytes:
            return incoming[0]
        kernel = operator.kernel  # torch's linear is a matmul of a view of its input, but for experts and convolutions
        of_view = isinstance(kernel, Gemm) and kernel.num_groups == 1 and not kernel.image_elements
        is_view = of_view and operator.reads[0] not in self._gathered
        return _Storage(num_bytes, logits=self._tensors.is_logits(root), is_view=is_view)

    def _points(
        self, operator: Operator, incoming: Sequence[_Storage], outgoing: Sequence[_Storage]
    ) -> Iterator[PeakPoint]:
        """While it runs, the gradients of its weights among what it makes."""
        tensors, memory, kernel = self._tensors, self._memory, operator.kernel
        # names were taken off the incoming gradients, which are there until it is done
        there = {id(g): g.counted_bytes for g in incoming if not g.holders}
        new = {id(g): g.num_bytes for g in outgoing if not g.holders and g not in incoming}
        sizes, is_logits = there | new, {id(g): g.logits for g in (*incoming, *outgoing)}
        logits = sum(size for key, size in sizes.items() if is_logits[key]) + tensors.logits_scratch_bytes(operator)
        fresh = sum(size for key, size in sizes.items() if not is_logits[key])
        fresh += tensors.scratch_bytes(operator, forward=False)
        waiting = self._waiting_gradients
        yield memory.point(scratch=fresh, logits=logits, gradients=waiting + self._weight_gradient(operator))
        if isinstance(kernel, Gemm):
            for scratch, weight in backward_scratch(self._layer, kernel, tensors.microbatch_size, self._state):
                yield memory.point(scratch=fresh + scratch, gradients=waiting + weight)

    def _add(self, root: str, gradient: _Storage) -> Iterator[PeakPoint]:
        """Adds a gradient to the one that is there; where something else still reads that, the sum is a new tensor."""
        memory, name = self._memory, _gradient(root)
        earlier = memory.get(name)
        if earlier is None:
            memory.attach(name, gradient)
        elif earlier.holders > 1 or (earlier.is_view and gradient.is_view):
            total = _Storage(earlier.num_bytes, logits=earlier.logits)
            yield memory.point(scratch=(gradient.num_bytes if not gradient.holders else 0) + total.num_bytes)
            memory.free(name)
            memory.attach(name, total)

    def _weight_gradient(self, operator: Operator) -> int:
        """Bytes of the gradient of its weight, as it is made."""
        state, kernel = self._state, operator.kernel
        if self._leaves:
            return 0
        match kernel:
            case Gemm(trained=True):
                return kernel.weight_elements * (state.product or (state.placeholder if self._is_head else 0))
            case Lookup(trained=True) if operator.parameters:
                weight = next(p for p in self._layer.parameters if p.name == operator.parameters[-1])
                return weight.num_elements * state.residual
            case _:
                return 0

    def _released(self, index: int, operator: Operator) -> Iterator[PeakPoint]:
        """What it saved goes, and what it made and was brought back; a gradient in 16 bits is cast to the wide one."""
        tensors, memory, state, kernel = self._tensors, self._memory, self._state, operator.kernel
        brought_back = (tensors.roots[tensor.name] for tensor in operator.makes if tensor.name in self._brought)
        for root in (*tensors.saved_roots(index), *brought_back):
            if tensors.last_savers.get(root, index) >= index and not self._is_read_again(root, index):
                memory.free(root)
        if not isinstance(kernel, Gemm):
            return
        memory.free(_copy(kernel.name))
        if not kernel.trained:
            return
        has_copy = kernel.name in tensors.weight_copies
        if has_copy and state.weight_copy:
            both = kernel.weight_elements * (state.product + state.gradient)
            yield memory.point(gradients=self._waiting_gradients + both)
        if self._layer.compiled:
            self._waiting_gradients += kernel.weight_elements * (state.gradient if has_copy else state.product)

    def _brought_back(self, operator: Operator) -> Iterator[PeakPoint]:
        """An all-gather of what matmuls read, for the gradients of their weights."""
        kernel, root = operator.kernel, self._tensors.roots[operator.regathers]
        if isinstance(kernel, Exchange) and kernel.backward is not None:
            self._memory.hold(root, self._tensors.bytes_of(root))
            self._brought.add(operator.regathers)
            yield self._memory.point(scratch=self._tensors.scratch_bytes(operator, forward=False))


def _copy(matmul: str) -> str:
    return f"{matmul}, weight"


def _gradient(root: str) -> str:
    return f"{root}, gradient"
