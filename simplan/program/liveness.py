"""Liveness of the tensors of a layer: one walk over its operators, forward and backward, as autograd runs them.

A tensor is made by its operator and freed after its last reader, or, where it is saved for backward, after the backward
of the last operator that saved it. Backward comes to the operators in reverse. Gradients of an operator's inputs are
made beside the gradient of its result, what it saved and its scratch; the gradient of a weight is freed at once, since
it is added to the accumulated one. Two gradients of one tensor are added in place, unless another operator still holds
the first one. What recomputation dropped is made again by running forward's operators once more, just before the first
backward that needs them.

Widths follow from the precision: casts between equal widths make no tensor. Under autocast a matmul saves a copy of its
weight, and the gradient of the weight is made in 16 bits and then cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from simplan.program.low_precision_footprint import backward_scratch, copied_weight_bytes, forward_scratch_bytes
from simplan.spec.layer import CollectiveKind, Exchange, Gemm, LayerKind, LayerSpec, Lookup, Operator, Tensor
from simplan.spec.operator import saved_by, storages
from simplan.spec.recompute import Recomputation, Rerun
from simplan.spec.software import StateBytes

__all__ = ["InputBackward", "Liveness", "PeakPoint"]

_REORDERED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


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


class InputBackward(NamedTuple):
    """The first part of a split backward.

    Attributes:
        points: Its points, as of ``Liveness.backward``.
        gradients, logits_gradients: Bytes of the gradients that it leaves, each tensor once.
        left: The same by operator with weights.
    """

    points: tuple[PeakPoint, ...]
    gradients: int
    logits_gradients: int
    left: dict[int, int]


class _Storage:
    """Memory of a tensor or a gradient, with the number of its holders, and whether these have it as a view."""

    __slots__ = ("counted_bytes", "holders", "is_view", "logits", "num_bytes")

    def __init__(self, num_bytes: int, *, logits: bool, is_view: bool = False) -> None:
        self.num_bytes, self.logits, self.is_view, self.holders = num_bytes, logits, is_view, 0
        self.counted_bytes = num_bytes  # fewer where others count it


class Liveness:
    """Tensors of one layer for one microbatch.

    Args:
        layer: The layer.
        microbatch_size: Sequences b.
        state: Element widths.
        recomputation: What of the layer is saved, and what is made again.

    Attributes:
        saved: By root tensor, bytes that the layer saves for backward and counts.
        weight_copies: By matmul, bytes of the copy of its weight that it saves.
        state: Element widths.
        last_savers: By root tensor, the first operator that saves it: the last one that backward needs it for.
    """

    def __init__(self, layer: LayerSpec, microbatch_size: int, state: StateBytes, recomputation: Recomputation) -> None:
        self._layer, self._b, self.state, self._recomputation = layer, microbatch_size, state, recomputation
        found = layer.storages(state.activation, state.residual)
        self._roots = {name: tensor.name for name, tensor in found.items()}
        widths = state.activation, state.residual
        apart = storages(layer.operators, layer.inputs, *widths, of_gradients=True)
        self._gradients = {name: tensor.name for name, tensor in apart.items()}
        kept = {self._roots[name] for name in recomputation.saved}
        counted = self._counted_elsewhere()
        self.saved = {root: self._bytes_of(root) for root in sorted(kept) if root not in counted}
        copies = {k.name: copied_weight_bytes(layer, k, state) for k in layer.kernels if isinstance(k, Gemm)}
        self.weight_copies = {name: num_bytes for name, num_bytes in copies.items() if num_bytes}
        self._copies_kept = not recomputation.from_start  # else they are made again
        self.last_savers = self._last_savers()

    @property
    def saved_logits(self) -> int:
        """Bytes saved of the output distribution."""
        return sum(size for root, size in self.saved.items() if self._tensor(root).logits)

    @property
    def saved_bytes(self) -> int:
        """All other bytes saved for backward, copies of weights among them."""
        copies = sum(self.weight_copies.values()) if self._copies_kept else 0
        return sum(self.saved.values()) - self.saved_logits + copies

    @property
    def input_bytes(self) -> int:
        """Of these, the inputs of the layer themselves."""
        inputs = {tensor.name for tensor in self._layer.inputs}
        return sum(size for root, size in self.saved.items() if root in inputs)

    # tensors and their memory

    def _tensor(self, name: str) -> Tensor:
        return self._layer.tensors[name]

    def _width(self, tensor: Tensor) -> int:
        return tensor.width(self.state.activation, self.state.residual)

    def _bytes(self, tensor: Tensor) -> int:
        return (1 if tensor.of_microbatch else self._b) * tensor.elements * self._width(tensor)

    def _bytes_of(self, name: str) -> int:
        return self._bytes(self._tensor(name))

    def _counted_elsewhere(self) -> frozenset[str]:
        """Inputs whose memory others count, and outputs, which the next layer saves."""
        layer = self._layer
        inputs = {tensor.name for tensor in layer.inputs if tensor.elsewhere}
        handed_on = {self._roots[name] for name, tensor in layer.tensors.items() if tensor.handed_on}
        outputs = {self._roots[name] for name in layer.outputs if name in layer.makers} - handed_on
        return frozenset(inputs | outputs)

    def _last_savers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for index in range(len(self._layer.operators) - 1, -1, -1):
            for name in saved_by(self._layer.operators[index], self._layer.needed):
                found[self._roots[name]] = index
        return found

    def saved_roots(self, operator: Operator) -> Iterator[str]:
        """What an operator saves for backward."""
        return (self._roots[name] for name in saved_by(operator, self._layer.needed))

    def weight_scratch(self, operator: Operator) -> int:
        """Bytes beside gradients while W makes the gradients of an operator's weights: those of the whole of a norm."""
        if isinstance(operator.kernel, Gemm | Lookup) or not operator.backward_scratch:
            return 0
        return self._scratch(operator, forward=False) + sum(self._bytes_of(self._roots[n]) for n in operator.reads)

    # forward

    def forward(self) -> Iterator[tuple[int, PeakPoint]]:
        """Points of forward by operator; the layer's input is there, and at the end what is saved and its output."""
        live = _Live(self._base())
        for tensor in self._layer.inputs:
            if not tensor.elsewhere:
                live.hold(tensor.name, self._bytes(tensor), logits=False)
        kept = {*self.saved, *(self._roots[name] for name in (*self._layer.outputs, *self._logits()))}
        yield from self._run(range(len(self._layer.operators)), live, kept, copies=self._copies_kept)

    def _logits(self) -> tuple[str, ...]:
        """What the module of a head gives, which its caller holds while the loss is computed."""
        found = (o.makes[0].name for o in self._layer.operators if isinstance(o.kernel, Gemm) and o.makes[0].logits)
        return (*found,)[:1]

    def _base(self) -> tuple[int, int]:
        return self.saved_bytes, self.saved_logits

    def _run(
        self,
        order: Sequence[int],
        live: _Live,
        needed: set[str],
        *,
        copies: bool,
        last_use: Mapping[str, int] = MappingProxyType({}),
    ) -> Iterator[tuple[int, PeakPoint]]:
        """Runs operators forward, and frees what nothing needs any more.

        Args:
            order: Which operators.
            live: Memory in use.
            needed: Tensors that stay.
            copies: Copies of weights are made and stay.
            last_use: By saved tensor, the operator after which it goes.
        """
        layer = self._layer
        last_reader = {self._roots[name]: index for index in order for name in layer.operators[index].reads}
        for index in order:
            operator = layer.operators[index]
            for name in (name for name, last in last_use.items() if last < index):
                live.free(name)
            for tensor in operator.makes:
                root = self._roots[tensor.name]
                if not self._tensor(root).elsewhere:
                    live.hold(root, self._bytes_of(root), logits=self._tensor(root).logits)
            kernel = operator.kernel
            if copies and isinstance(kernel, Gemm) and kernel.name in self.weight_copies:
                live.hold(_copy_of(kernel), self.weight_copies[kernel.name], logits=False)
            yield index, live.point(scratch=self._scratch(operator, forward=True))
            for name in (*operator.reads, *(tensor.name for tensor in operator.makes)):
                root = self._roots[name]
                if root not in needed and last_reader.get(root, -1) <= index:
                    live.free(root)

    def _scratch(self, operator: Operator, *, forward: bool) -> int:
        """Bytes that exist only while an operator runs, logits aside."""
        tensors = operator.forward_scratch if forward else operator.backward_scratch
        narrowest = min((self._width(self._tensor(name)) for name in operator.reads), default=0)
        there = (t for t in tensors if not t.logits and (not t.widened or narrowest < self._width(t)))
        found = sum(self._bytes(tensor) for tensor in there)
        kernel = operator.kernel
        if isinstance(kernel, Exchange):
            found += self._reordered(kernel, kernel.forward if forward else kernel.backward)
        elif isinstance(kernel, Gemm) and forward:
            found += forward_scratch_bytes(self._layer, kernel, self._b, self.state)
        return found

    def _reordered(self, kernel: Exchange, kind: CollectiveKind | None) -> int:
        """What a collective along tokens copies into the order of ranks, or out of it."""
        whole = kernel.elements * self._b * self.state.activation
        if kind is CollectiveKind.ALL_TO_ALL:
            return 2 * whole if kernel.axis == "cp" else 0
        along_tokens = kernel.axis in ("tp", "cp") and kind in _REORDERED and self._b > 1
        return whole if along_tokens else 0

    # backward

    def backward(self) -> Iterator[tuple[int, PeakPoint]]:
        """Points of backward by operator; the gradients of the layer's outputs are there."""
        return _Backward(self).run()

    def input_backward(self, *, receives: bool) -> InputBackward:
        """The part of backward that makes gradients of activations alone, and what it leaves for those of weights.

        Args:
            receives: The gradients of the layer's outputs are in receive buffers, which are counted there.
        """
        backward = _Backward(self, leaves=True, receives=receives)
        points = tuple(point for _, point in backward.run())
        storages = {id(storage): storage for storage in backward.left.values()}
        own = [storage for storage in storages.values() if storage.counted_bytes]
        return InputBackward(
            points,
            sum(storage.num_bytes for storage in own if not storage.logits),
            sum(storage.num_bytes for storage in own if storage.logits),
            {index: storage.num_bytes for index, storage in backward.left.items()},
        )


def _copy_of(gemm: Gemm) -> str:
    return f"{gemm.name}, weight"


class _Live:
    """Memory in use, by name, and the part of it that is counted apart, as saved."""

    def __init__(self, base: tuple[int, int]) -> None:
        self._base = base
        self._held: dict[str, _Storage] = {}
        self._bytes = [0, 0]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def hold(self, name: str, num_bytes: int, *, logits: bool) -> None:
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

    def names(self) -> list[str]:
        """All that is there."""
        return list(self._held)

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
        others, of_logits = self._bytes
        return PeakPoint(others + scratch - self._base[0], of_logits + logits - self._base[1], gradients)


class _Backward:
    """One backward of a layer."""

    def __init__(self, of: Liveness, *, leaves: bool = False, receives: bool = False) -> None:
        self._of, self._layer, self._leaves = of, of._layer, leaves
        self.left: dict[int, _Storage] = {}
        self._brought: set[str] = set()
        self._inputs_until = dict(self._inputs_of_reruns())
        self._gathered = {operator.regathers for operator in self._layer.operators}
        self._live = _Live(of._base())
        handed_on = {of._roots[name] for name, tensor in self._layer.tensors.items() if tensor.handed_on}
        for root, size in of.saved.items():
            if root in of.last_savers or root not in handed_on:  # else those that saved it are done
                self._live.hold(root, size, logits=of._tensor(root).logits)
        if of._copies_kept:
            for name, size in of.weight_copies.items():
                self._live.hold(f"{name}, weight", size, logits=False)
        for name in (name for name in self._layer.outputs if name in self._layer.makers):
            root = of._roots[name]  # an output that this layer saves, too, outlives the next layer's backward
            if root not in of.saved and root in of.last_savers and not of._recomputation.from_start:
                self._live.hold(root, of._bytes_of(root), logits=False)
        for name in self._layer.outputs:
            if name in self._layer.needed and not self._is_head:
                tensor = of._tensor(name)
                given = _Storage(of._bytes(tensor), logits=tensor.logits)
                if receives:  # the buffer holds it, too
                    given.counted_bytes, given.holders = 0, 1
                self._live.attach(_gradient(of._gradients[name]), given)
        self._held_gradients = 0  # a compiled backward gives them all at its end

    @property
    def _is_head(self) -> bool:
        return self._layer.kind is LayerKind.HEAD

    def run(self) -> Iterator[tuple[int, PeakPoint]]:
        """Points by operator, in the order in which backward comes to them."""
        reruns = list(self._of._recomputation.reruns)
        yield len(self._layer.operators) - 1, self._live.point()
        for index in range(len(self._layer.operators) - 1, -1, -1):
            while reruns and self._asks(index, reruns[0]):
                yield from self._again(reruns.pop(0), index)
            yield from ((index, point) for point in self._operator(index, self._layer.operators[index]))
            for name in self._inputs_until.pop(index, ()):
                self._live.free(name)
        for rerun in reruns:
            yield from self._again(rerun, -1)

    def _inputs_of_reruns(self) -> Iterator[tuple[int, list[str]]]:
        """By operator, what is saved only so that parts of the layer run again: it is there until they are done."""
        layer, of = self._layer, self._of
        for rerun in of._recomputation.reruns if not of._recomputation.from_start else ():
            order = [i for i, place in enumerate(layer.places) if place in rerun.kernels]
            read = {of._roots[name] for index in order for name in layer.operators[index].reads}
            yield min(order), [name for name in read if name in of.saved and name not in of.last_savers]

    def _asks(self, index: int, rerun: Rerun) -> bool:
        """Whether the backward of an operator is the first that needs what runs again."""
        operator, place = self._layer.operators[index], self._layer.places[index]
        reads = operator.kernel is not None or bool(saved_by(operator, self._layer.needed))
        return place < rerun.needed_by or (place == rerun.needed_by and reads)

    def _again(self, rerun: Rerun, index: int) -> Iterator[tuple[int, PeakPoint]]:
        """Runs forward's operators once more; what only they needed is gone afterwards."""
        again = set(rerun.kernels)
        kernels = self._layer.kernels  # what does nothing in forward may have a cast of its own
        again |= {i for i in range(max(again)) if isinstance(k := kernels[i], Exchange) and k.forward is None}
        order = [i for i, place in enumerate(self._layer.places) if place in again]
        saved = {root for root, saver in self._of.last_savers.items() if saver <= index}
        passing = {name for name in self._live.names() if self._is_for(name, rerun, index)} - saved
        if not self._of._copies_kept:  # also of matmuls whose results were kept
            for gemm in self._layer.kernels[: rerun.needed_by + 1]:
                if isinstance(gemm, Gemm) and gemm.name in self._of.weight_copies:
                    self._live.hold(_copy_of(gemm), self._of.weight_copies[gemm.name], logits=False)
        last_use = {name: self._last_use(name) for name in passing}
        kept = saved | ({*self._live.names()} - passing)
        yield from self._of._run(order, self._live, kept, copies=False, last_use=last_use)
        for name in passing:
            self._live.free(name)

    def _last_use(self, name: str) -> int:
        """The last operator, also of those that do not run again, that a saved tensor is made or read by."""
        roots = self._of._roots
        names = ((i, n) for i, o in enumerate(self._layer.operators) for n in (*o.reads, *(t.name for t in o.makes)))
        return max(i for i, n in names if roots[n] == name)

    def _is_for(self, name: str, rerun: Rerun, index: int) -> bool:
        """Whether a saved tensor serves this rerun alone; nobody takes up those that are made after its end."""
        before = self._layer.makers.get(name, rerun.needed_by) < rerun.needed_by
        return self._of._recomputation.from_start and before and not self._is_read_again(name, index)

    def _reads_of(self, index: int) -> Iterable[str]:
        return self._layer.operators[index].reads

    def _still_to_run(self, index: int) -> Iterator[int]:
        """Operators of reruns that come later."""
        for rerun in self._of._recomputation.reruns:
            if rerun.needed_by < (self._layer.places[index] if index >= 0 else -1):
                yield from (i for i, place in enumerate(self._layer.places) if place in rerun.kernels)

    def _operator(self, index: int, operator: Operator) -> Iterator[PeakPoint]:
        """The backward of one operator: gradients of its inputs, then of its weights."""
        of, live = self._of, self._live
        if operator.regathers:
            yield from self._brought_back(operator)
            return
        if not operator.trains and self._layer.needed.isdisjoint(operator.reads):
            return
        roots = [of._gradients[tensor.name] for tensor in operator.makes]
        incoming = [g for root in dict.fromkeys(roots) if (g := live.get(_gradient(root))) is not None]
        reads = [n for n in dict.fromkeys(of._gradients[name] for name in operator.reads) if self._needs(n)]
        skipped = reads and reads[0] in roots and (operator.passes or operator.is_cast)
        if skipped and len(reads) == 1:
            return  # gradients are the same tensor, changed in place if at all
        if self._leaves and operator.trains and operator.parameters and incoming:
            self.left[index] = incoming[0]
            live.attach(f"left for operator {index}", incoming[0])
        for root in dict.fromkeys(roots):
            live.free(_gradient(root))
        made = [(name, self._gradient_of(name, operator, incoming)) for name in reads]
        scratch, of_logits = of._scratch(operator, forward=False), self._logits_scratch(operator)
        held = sum(g.counted_bytes for g in {*incoming} if not g.holders and not g.logits)
        held_logits = sum(g.counted_bytes for g in {*incoming} if not g.holders and g.logits)
        new = {g for _, g in made if not g.holders and g not in incoming}
        fresh = sum(g.num_bytes for g in new if not g.logits) + held + scratch
        fresh_logits = sum(g.num_bytes for g in new if g.logits) + held_logits + of_logits
        yield from self._points(operator, fresh, fresh_logits)
        for name, gradient in made:
            earlier = live.get(_gradient(name))
            if earlier is None:
                live.attach(_gradient(name), gradient)
            elif earlier.holders > 1 or (
                earlier.is_view and gradient.is_view
            ):  # something else still reads it: the sum is another tensor
                total = _Storage(earlier.num_bytes, logits=earlier.logits)
                yield live.point(scratch=(gradient.num_bytes if not gradient.holders else 0) + total.num_bytes)
                live.free(_gradient(name))
                live.attach(_gradient(name), total)
        if not self._leaves:
            yield from self._released(index, operator)

    def _points(self, operator: Operator, fresh: int, logits: int) -> Iterator[PeakPoint]:
        """While it runs, the gradients of its weights among what it makes."""
        of, kernel, state = self._of, operator.kernel, self._of.state
        gradient = self._weight_gradient(operator)
        yield self._live.point(scratch=fresh, logits=logits, gradients=self._held_gradients + gradient)
        if isinstance(kernel, Gemm):
            for scratch, weight in backward_scratch(self._layer, kernel, of._b, state):
                yield self._live.point(scratch=fresh + scratch, gradients=self._held_gradients + weight)

    def _weight_gradient(self, operator: Operator) -> int:
        state, kernel = self._of.state, operator.kernel
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
        of, live, kernel = self._of, self._live, operator.kernel
        brought_back = (tensor.name for tensor in operator.makes if tensor.name in self._brought)
        for name in (*saved_by(operator, self._layer.needed), *brought_back):
            root = of._roots[name]
            if of.last_savers.get(root, index) >= index and not self._is_read_again(root, index):
                live.free(root)
        if not isinstance(kernel, Gemm):
            return
        live.free(_copy_of(kernel))
        if not kernel.trained:
            return
        width = of.state.gradient if kernel.name in of.weight_copies else of.state.product
        if kernel.name in of.weight_copies and of.state.weight_copy:
            narrow = kernel.weight_elements * of.state.product
            wide = kernel.weight_elements * of.state.gradient
            yield live.point(gradients=self._held_gradients + narrow + wide)
        if self._layer.compiled:
            self._held_gradients += kernel.weight_elements * width

    def _is_read_again(self, root: str, index: int) -> bool:
        """Whether something that runs again later reads it."""
        return any(root == self._of._roots[name] for i in self._still_to_run(index) for name in self._reads_of(i))

    def _brought_back(self, operator: Operator) -> Iterator[PeakPoint]:
        """An all-gather of what matmuls read, for the gradients of their weights."""
        kernel, root = operator.kernel, self._of._roots[operator.regathers]
        if isinstance(kernel, Exchange) and kernel.backward is not None:
            self._live.hold(root, self._of._bytes_of(root), logits=False)
            self._brought.add(operator.regathers)
            yield self._live.point(scratch=self._of._scratch(operator, forward=False))

    def _needs(self, root: str) -> bool:
        return any(name in self._layer.needed for name, found in self._of._gradients.items() if found == root)

    def _gradient_of(self, root: str, operator: Operator, incoming: Sequence[_Storage]) -> _Storage:
        """Memory of the gradient of something that an operator reads."""
        tensor = self._of._tensor(root)
        num_bytes = self._of._bytes(tensor)
        if operator.passes and incoming and incoming[0].num_bytes == num_bytes:
            return incoming[0]
        kernel = operator.kernel  # torch's linear is a matmul of a view of its input, but for experts and convolutions
        of_view = isinstance(kernel, Gemm) and kernel.num_groups == 1 and not kernel.image_elements
        return _Storage(num_bytes, logits=tensor.logits, is_view=of_view and operator.reads[0] not in self._gathered)

    def _logits_scratch(self, operator: Operator) -> int:
        return sum(self._of._bytes(tensor) for tensor in operator.backward_scratch if tensor.logits)


def _gradient(name: str) -> str:
    return f"{name}, gradient"
