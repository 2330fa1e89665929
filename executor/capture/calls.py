"""Calls of a module's forward, which run in parts: one part for each stage of a pipeline.

A call is a function of torch, an autograd function, or a whole block: the code inside of blocks runs as it is written.
Cuts lie where the layers of the capture begin. The tensors between two parts are those that the capture lists: one for
each storage that is made before a cut and read after it. Views of them are made again after the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from simplan.errors import NotModelledError, Problem


class Value(NamedTuple):
    """An argument of a call: a tensor that a call before returned, by its number."""

    number: int


class Weight(NamedTuple):
    """An argument of a call: a parameter or a buffer of the module, by its name."""

    name: str


class Given(NamedTuple):
    """An argument of a call: a tensor of the batch, by its place among the leaves."""

    place: int


class Unread(NamedTuple):
    """An argument of a block: a tensor of which the block reads no element."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(slots=True)
class RecordedCall:
    """One call.

    Attributes:
        target: The function, or the path of a block.
        arguments: Leaves of positional and keyword arguments: a Value, a Weight, a Given, an Unread, or any Python
            object.
        structure: Structure of ``arguments``.
        results: Numbers of the tensors returned, in order.
        has_gradients: Autograd records the call.
        autocast: Type of device, and dtype of autocast; None where it is off.
        reads, makes, writes: Storages of arguments, new storages of results, and storages that the call changes.
        is_view: All tensors returned are views of arguments, and nothing else happens.
        outside: Names of weights and buffers that a block reads and does not hold.
        layer: Layer of the capture.
    """

    target: Callable[..., Any] | str
    arguments: list[Any]
    structure: TreeSpec
    results: tuple[int, ...]
    has_gradients: bool
    autocast: tuple[str, torch.dtype | None]
    reads: frozenset[int]
    makes: frozenset[int]
    writes: frozenset[int]
    is_view: bool
    outside: frozenset[str] = frozenset()
    layer: int = 0

    @property
    def name(self) -> str:
        """Name in errors."""
        return name_of(self.target)

    @property
    def values(self) -> Iterator[int]:
        """Numbers of the tensors read."""
        return (leaf.number for leaf in self.arguments if isinstance(leaf, Value))

    @property
    def weights(self) -> Iterator[str]:
        """Names of parameters and buffers read, those that a block holds excepted."""
        yield from self.outside
        yield from (leaf.name for leaf in self.arguments if isinstance(leaf, Weight))


class ValueFacts(NamedTuple):
    """A tensor that a call returned.

    Attributes:
        storage: Number of its storage, in the order in which storages appeared.
        is_whole: The tensor is all of its storage.
        order: Dimensions by descending stride, with which the tensor is contiguous.
    """

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_whole: bool
    order: tuple[int, ...]


class SentTensor(NamedTuple):
    """A tensor that a part receives from the part before, or sends to the next one.

    Attributes:
        value: Number of the tensor.
        shape: Shape as sent, in the order of its memory.
        order: Dimensions of the tensor in that order.
        is_changed: The receiver writes to it.
    """

    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...]
    is_changed: bool

    def packed(self, tensor: Tensor) -> Tensor:
        """The tensor as it is sent: contiguous.

        Raises:
            ValueError: It is not like the one that was recorded.
        """
        shape = tuple(tensor.shape[dim] for dim in self.order)
        if (shape, tensor.dtype) != (self.shape, self.dtype):
            raise ValueError(f"a tensor between stages is {tensor.dtype} {shape}, and was {self.dtype} {self.shape}")
        return tensor if self.order == tuple(range(tensor.dim())) else tensor.permute(self.order)

    def unpacked(self, tensor: Tensor) -> Tensor:
        """The tensor as the sender had it."""
        if self.is_changed:  # what is received is a leaf, which autograd does not let change
            tensor = tensor.clone()
        if self.order == tuple(range(tensor.dim())):
            return tensor
        return tensor.permute(*(self.order.index(dim) for dim in range(tensor.dim())))


@dataclass(frozen=True)
class CallsPart:
    """Calls of consecutive layers.

    Attributes:
        calls: The calls, in order.
        received, sent: Tensors from the part before, and for the next one; the last part sends the loss.
        batch: Shape of each tensor of the batch, and each leaf that is no tensor.
    """

    calls: tuple[RecordedCall, ...]
    received: tuple[SentTensor, ...]
    sent: tuple[SentTensor, ...]
    batch: tuple[Any, ...]

    @property
    def weights(self) -> frozenset[str]:
        """Names of the parameters and buffers read, those that a block holds excepted."""
        return frozenset(name for call in self.calls for name in call.weights)

    def run(
        self, module: nn.Module, received: Sequence[Tensor], batch: Any, *, copies_views: bool = False
    ) -> tuple[Tensor, ...]:
        """The tensors for the next part.

        Args:
            copies_views: Copy those that are views.

        Raises:
            ValueError: The batch is not like the one of the capture.
        """
        inputs = tree_leaves(batch)
        if (shapes := shapes_of(inputs)) != self.batch:
            raise ValueError(f"the batch has {shapes}, and the module was cut for {self.batch}")
        values = {sent.value: sent.unpacked(tensor) for sent, tensor in zip(self.received, received, strict=True)}
        for call, gone in zip(self.calls, self._gone, strict=True):
            _run(call, module, values, inputs)
            for number in gone:
                del values[number]
        packed = map(SentTensor.packed, self.sent, (values[sent.value] for sent in self.sent))
        return tuple(x.clone() if copies_views and x._is_view() else x for x in packed)

    @cached_property
    def _gone(self) -> list[tuple[int, ...]]:
        """By call, the numbers of the tensors that no later call reads."""
        needed = {sent.value for sent in self.sent}
        gone = []
        for call in reversed(self.calls):
            numbers = {*call.values, *call.results} - needed
            gone.append(tuple(numbers))
            needed |= numbers
        return gone[::-1]


def _run(call: RecordedCall, module: nn.Module, values: dict[int, Tensor], inputs: Sequence[Any]) -> None:
    """Runs a call, and notes its results."""

    def argument(leaf: Any) -> Any:
        match leaf:
            case Value(number):
                return values[number]
            case Weight(name):
                owner, _, attribute = name.rpartition(".")
                return getattr(module.get_submodule(owner), attribute)
            case Given(place):
                return inputs[place]
            case Unread(shape, dtype, device_type):
                return torch.zeros((), dtype=dtype, device=device_type).expand(shape)
            case _:
                return leaf

    args, kwargs = tree_unflatten([argument(leaf) for leaf in call.arguments], call.structure)
    target = module.get_submodule(call.target) if isinstance(call.target, str) else call.target
    with _as_recorded(call):
        result = target(*args, **kwargs)
    values.update(zip(call.results, tensors_of(result), strict=True))


@contextmanager
def _as_recorded(call: RecordedCall) -> Iterator[None]:
    """Context in which autograd and autocast are as they were for the recorded call."""
    kind, dtype = call.autocast
    with ExitStack() as stack:
        if call.has_gradients != torch.is_grad_enabled():
            stack.enter_context(torch.set_grad_enabled(call.has_gradients))
        if dtype != autocast_dtype(kind):
            stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        yield


@dataclass
class PassRecording:
    """Calls of one forward pass and the loss, and where layers begin among them.

    Attributes:
        values: Facts about tensors, by number.
        loss: Number of the loss.
        batch: See ``CallsPart``.
    """

    calls: list[RecordedCall]
    values: list[ValueFacts]
    loss: int
    batch: tuple[Any, ...]
    _makers: dict[int, RecordedCall] = field(default_factory=dict)
    _readers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.calls:
            self._makers.update(dict.fromkeys(call.makes, call))
            if not call.is_view:
                self._readers.update(dict.fromkeys(call.reads | call.writes, call.layer))

    def parts(self, boundaries: Sequence[int]) -> list[CallsPart]:
        """Parts of the layers between boundaries.

        Raises:
            NotModelledError: The calls cannot be cut there.
        """
        self._check_writes(boundaries)
        between = [self._between(layer, after) for layer, after in pairwise(boundaries)]
        loss = self.values[self.loss]
        last = SentTensor(self.loss, loss.shape, loss.dtype, loss.requires_grad, loss.order, is_changed=False)
        ends = zip(pairwise(boundaries), between, [*between[1:], (last,)], strict=True)
        return [self._part(range(*span), received, sent) for span, received, sent in ends]

    def _between(self, layer: int, after: int) -> tuple[SentTensor, ...]:
        """Tensors sent to a part that begins with a layer: those that are passed on first, then by age."""
        if layer == 0:
            return ()
        storages = [s for s, call in self._makers.items() if call.layer < layer <= self._readers.get(s, -1)]
        storages.sort(key=lambda s: (self._readers[s] <= self._makers[s].layer + 1, s))
        changed = {s for call in self.calls if layer <= call.layer < after for s in call.writes}
        sent = []
        for storage in storages:
            number = self._whole(storage, layer)
            facts = self.values[number]
            shape = tuple(facts.shape[dim] for dim in facts.order)
            sent.append(SentTensor(number, shape, facts.dtype, facts.requires_grad, facts.order, storage in changed))
        return tuple(sent)

    def _whole(self, storage: int, layer: int) -> int:
        """Number of the tensor that is all of a storage, as the call that made it returned it."""
        maker = self._makers[storage]
        for number in maker.results:
            if self.values[number].storage == storage and self.values[number].is_whole:
                return number
        made = f"{maker.name} returns a part of a larger tensor, which layer {layer} or a later one reads"
        raise refused(made, "return a copy of the part: contiguous() or clone()")

    def _part(self, layers: range, received: tuple[SentTensor, ...], sent: tuple[SentTensor, ...]) -> CallsPart:
        needed, there = {tensor.value for tensor in sent}, {tensor.value for tensor in received}
        kept: list[RecordedCall] = []
        for call in reversed(self.calls):
            if call.layer >= layers.stop:
                continue
            is_read = not needed.isdisjoint({*call.results} - there)
            if (call.layer in layers and not call.is_view) or (is_read and call.is_view):
                kept.append(call)
                needed.update(call.values)
            elif is_read:
                what = f"layer {layers.start} or a later one reads a view that {call.name} returns"
                raise refused(what, "return the whole tensor, and take views of it where it is read")
        return CallsPart(tuple(reversed(kept)), received, sent, self.batch)

    def _check_writes(self, boundaries: Sequence[int]) -> None:
        """Raises a NotModelledError for what one part changes and another one has a copy of."""
        stage_of = {layer: stage for stage, span in enumerate(pairwise(boundaries)) for layer in range(*span)}
        for call in self.calls:
            for storage in call.writes - self._makers.keys():
                readers = {stage_of[c.layer] for c in self.calls if storage in c.reads and not c.is_view}
                if readers - {stage_of[call.layer]}:
                    what = f"{call.name} changes a buffer or a tensor of the batch that other stages read"
                    raise refused(what, "use a tensor of its own")


def refused(rule: str, fix: str) -> NotModelledError:
    """Error for a module that cannot be cut."""
    return NotModelledError(Problem(field="plan.pp", rule=f"the module cannot be cut: {rule}", fix=f"{fix}; or use 1"))


def name_of(target: Callable[..., Any] | str) -> str:
    """Name of a function or a block in errors."""
    if isinstance(target, str):
        return f"block {target}"
    function = target.args[0] if isinstance(target, partial) else target
    return str(getattr(function, "__name__", function))


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Dtype of autocast; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def tensors_of(tree: Any) -> list[Tensor]:
    """Tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Shape of each tensor, and all other leaves."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
