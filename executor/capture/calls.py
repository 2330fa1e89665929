"""Forward of a user's module as a list of calls, which run again in parts: one part for each stage of a pipeline.

One forward pass on fake tensors is recorded. A call is a function of torch, an autograd function, or a whole block: the
code inside of blocks runs as it is written. Cuts lie where the layers of the capture begin. The tensors between two
parts are those that the capture lists: one for each storage that is made before a cut and read after it. Views of them
are made again after the cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from executor.capture.capture import Loss, fake_module, fake_tensor, loss_of
from executor.capture.trace import without_data
from simplan.errors import NotModelledError, Problem

_EFFECTS = frozenset({"__set__", "register_hook", "retain_grad"})
"""Functions that change tensors, but neither their numbers nor their storage."""


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
class Call:
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
        batch: Shape and dtype of each tensor of the batch, and each leaf that is no tensor.
    """

    calls: tuple[Call, ...]
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
        given = tree_leaves(batch)
        if (found := _shapes(given)) != self.batch:
            raise ValueError(f"the batch has {found}, and the module was cut for {self.batch}")
        values = {sent.value: sent.unpacked(tensor) for sent, tensor in zip(self.received, received, strict=True)}
        for call, gone in zip(self.calls, self._gone, strict=True):
            _run(call, module, values, given)
            for number in gone:
                del values[number]
        packed = map(SentTensor.packed, self.sent, (values[sent.value] for sent in self.sent))
        return tuple(x.clone() if copies_views and x._is_view() else x for x in packed)

    @property
    def _gone(self) -> list[tuple[int, ...]]:
        """By call, the numbers of the tensors that no later call reads."""
        needed = {sent.value for sent in self.sent}
        gone = []
        for call in reversed(self.calls):
            numbers = {*call.values, *call.results} - needed
            gone.append(tuple(numbers))
            needed |= numbers
        return gone[::-1]


def _run(call: Call, module: nn.Module, values: dict[int, Tensor], given: Sequence[Any]) -> None:
    """Runs a call, and notes its results."""

    def argument(leaf: Any) -> Any:
        match leaf:
            case Value(number):
                return values[number]
            case Weight(name):
                owner, _, attribute = name.rpartition(".")
                return getattr(module.get_submodule(owner), attribute)
            case Given(place):
                return given[place]
            case Unread(shape, dtype, device_type):
                return torch.zeros((), dtype=dtype, device=device_type).expand(shape)
            case _:
                return leaf

    args, kwargs = tree_unflatten([argument(leaf) for leaf in call.arguments], call.structure)
    target = module.get_submodule(call.target) if isinstance(call.target, str) else call.target
    with _as_recorded(call):
        result = target(*args, **kwargs)
    values.update(zip(call.results, _tensors(result), strict=True))


@contextmanager
def _as_recorded(call: Call) -> Iterator[None]:
    """Context in which autograd and autocast are as they were for the recorded call."""
    kind, dtype = call.autocast
    with ExitStack() as stack:
        if call.has_gradients != torch.is_grad_enabled():
            stack.enter_context(torch.set_grad_enabled(call.has_gradients))
        if dtype != _autocast(kind):
            stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        yield


def _autocast(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@dataclass
class Recording:
    """Calls of one forward pass and the loss, and where layers begin among them.

    Attributes:
        values: Facts about tensors, by number.
        loss: Number of the loss.
        batch: See ``CallsPart``.
    """

    calls: list[Call]
    values: list[ValueFacts]
    loss: int
    batch: tuple[Any, ...]
    _makers: dict[int, Call] = field(default_factory=dict)
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
        found = [s for s, call in self._makers.items() if call.layer < layer <= self._readers.get(s, -1)]
        found.sort(key=lambda s: (self._readers[s] <= self._makers[s].layer + 1, s))
        changed = {s for call in self.calls if layer <= call.layer < after for s in call.writes}
        sent = []
        for storage in found:
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
        made = f"{_name(maker.target)} returns a part of a larger tensor, which layer {layer} or a later one reads"
        raise _refused(made, "return a copy of the part: contiguous() or clone()")

    def _part(self, layers: range, received: tuple[SentTensor, ...], sent: tuple[SentTensor, ...]) -> CallsPart:
        needed, there = {each.value for each in sent}, {each.value for each in received}
        kept: list[Call] = []
        for call in reversed(self.calls):
            if call.layer >= layers.stop:
                continue
            is_read = not needed.isdisjoint({*call.results} - there)
            if (call.layer in layers and not call.is_view) or (is_read and call.is_view):
                kept.append(call)
                needed.update(call.values)
            elif is_read:
                what = f"layer {layers.start} or a later one reads a view that {_name(call.target)} returns"
                raise _refused(what, "return the whole tensor, and take views of it where it is read")
        return CallsPart(tuple(reversed(kept)), received, sent, self.batch)

    def _check_writes(self, boundaries: Sequence[int]) -> None:
        """Raises a NotModelledError for what one part changes and another one has a copy of."""
        stage_of = {layer: stage for stage, span in enumerate(pairwise(boundaries)) for layer in range(*span)}
        for call in self.calls:
            for storage in call.writes - self._makers.keys():
                readers = {stage_of[c.layer] for c in self.calls if storage in c.reads and not c.is_view}
                if readers - {stage_of[call.layer]}:
                    what = f"{_name(call.target)} changes a buffer or a tensor of the batch that other stages read"
                    raise _refused(what, "use a tensor of its own")


def _refused(rule: str, fix: str) -> NotModelledError:
    return NotModelledError(Problem(field="plan.pp", rule=f"the module cannot be cut: {rule}", fix=f"{fix}; or use 1"))


def record_calls(
    module: nn.Module,
    batch: Any,
    loss: Loss | None,
    *,
    blocks: Sequence[str],
    starts: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None = None,
    casts_inputs: bool = False,
) -> Recording:
    """Records one forward pass and the loss, on tensors without data.

    Args:
        module: The module, which is not changed.
        batch: Arguments of forward, for as many samples as later batches have.
        blocks: Paths of blocks.
        starts: By layer, how it starts (``CapturedModel.starts``).
        dtype: Dtype of weights, and of numbers in floating point of the batch.
        device: Device on which the calls will run.
        autocast: Dtype of autocast; None without.
        casts_inputs: Blocks cast their inputs to ``dtype``, as FSDP does.

    Raises:
        NotModelledError: A layer starts nowhere, or a tensor comes from somewhere else than the calls.
    """
    originals: dict[int, Tensor] = {}
    with active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_module(module, dtype, device, originals)
        given = tree_map(lambda leaf: fake_tensor(leaf, dtype, device) if isinstance(leaf, Tensor) else leaf, batch)
        recorder = _Recorder(fake, given, originals, device.type)
        args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
        with (
            recorder.watching(fake, blocks, dtype if casts_inputs else None),
            without_data(),
            torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None),
            recorder,
        ):
            result = loss_of(fake(*args, **kwargs), loss)
        return recorder.recording(result, starts)


class _Recorder(TorchFunctionMode):
    """Records calls of torch's functions outside of blocks, and of blocks as a whole.

    Attributes:
        calls: The calls so far.
    """

    def __init__(self, module: nn.Module, batch: Any, originals: Mapping[int, Tensor], device_type: str) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._originals, self._device_type = originals, device_type
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._weights = {id(tensor): name for name, tensor in reversed(named)}
        leaves = tree_leaves(batch)
        self._given = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._batch = _shapes(leaves)
        self._numbers: dict[int, int] = {}  # of values, by id
        self._tensors: list[Tensor] = []  # by number
        self._storages: dict[int, int] = {}
        self._kept: list[Tensor] = [*(tensor for _, tensor in named), *(x for x in leaves if isinstance(x, Tensor))]
        self._inside: str | None = None  # block, whose calls are not recorded
        self._own: set[int] = set()  # ids of the tensors that it was given
        self._read: set[int] = set()  # storages that it has read
        self._outside: set[str] = set()  # see Call.outside
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        for tensor in self._kept:
            self._storage(tensor)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs a function and records it."""
        del types
        kwargs = kwargs or {}
        if self._inside is not None:
            return self._run_inside(func, args, kwargs)
        if func is Tensor.__iter__:
            with self:
                return iter(args[0].unbind(0))
        begun = self._begin(args, kwargs)
        result = func(*args, **kwargs)
        self._end(begun, func, result)
        return result

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Begun:
        leaves, structure = tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        reads = [self._storage(tensor) for tensor in tensors]
        context = torch.is_grad_enabled(), _autocast(self._device_type)
        return _Begun(leaves, structure, tensors, [x._version for x in tensors], reads, len(self._storages), *context)

    def _end(self, begun: _Begun, target: Callable[..., Any] | str, result: Any) -> None:
        """Adds a call, unless it is for a shape, a dtype or the like."""
        returned = _tensors(result)
        triples = zip(begun.tensors, begun.versions, begun.reads, strict=True)
        writes = frozenset(storage for tensor, version, storage in triples if tensor._version != version)
        has_effect = getattr(target, "__name__", "") in _EFFECTS
        if not (returned or writes or has_effect):
            return
        is_block = isinstance(target, str)
        storages = frozenset(map(self._storage, returned))
        makes = frozenset(storage for storage in storages if storage >= begun.num_storages)
        reads = frozenset(begun.reads) & (self._read | writes | storages) if is_block else frozenset(begun.reads)
        arguments = [self._argument(leaf, _name(target), reads) for leaf in begun.leaves]
        self.calls.append(
            Call(
                target,
                arguments,
                begun.structure,
                tuple(map(self._number, returned)),
                begun.has_gradients,
                (self._device_type, begun.autocast),
                reads,
                makes,
                writes,
                is_view=not (is_block or makes or writes or has_effect),
                outside=frozenset(self._outside) if is_block else frozenset(),
            )
        )

    def _run_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function inside of a block, which may read what it was given, makes, or holds."""
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor) or id(leaf) in self._own:
                continue
            if id(leaf) in self._numbers or id(leaf) in self._given:
                rule = f"block {self._inside} reads a tensor that is not among its arguments"
                raise _refused(rule, "give it as an argument of forward")
            name = self._weights.get(id(leaf))
            if name is not None and not name.startswith(f"{self._inside}."):
                self._outside.add(name)
        begun = self._begin(args, kwargs)
        result = func(*args, **kwargs)
        made = {self._storage(tensor) for tensor in _tensors(result)}  # numbered here by their age
        writes = any(x._version != version for x, version in zip(begun.tensors, begun.versions, strict=True))
        if writes or not made <= {*begun.reads}:  # else a view, or a shape
            self._read.update(begun.reads)
        return result

    def _argument(self, leaf: Any, reader: str, reads: frozenset[int]) -> Any:
        if not isinstance(leaf, Tensor):
            if _holds_tensors(leaf):  # it may also keep some for the next call
                raise _refused(f"{reader} takes a {type(leaf).__name__} with tensors inside", "give it the tensors")
            return leaf
        if self._storage(leaf) not in reads:
            return Unread(tuple(leaf.shape), leaf.dtype, self._device_type)
        if id(leaf) in self._numbers:
            return Value(self._numbers[id(leaf)])
        if id(leaf) in self._weights:
            return Weight(self._weights[id(leaf)])
        if id(leaf) in self._given:
            return Given(self._given[id(leaf)])
        if id(leaf) in self._originals:
            return self._originals[id(leaf)]
        if torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise _refused(f"{reader} is under torch.func outside of blocks", "write it without")
        if isinstance(leaf, FakeTensor):
            rule = f"{reader} reads a tensor that a block has made and not returned"
            raise _refused(rule, "return it from the forward of the block")
        return leaf  # a constant of the user's code

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[id(tensor)]

    def _storage(self, tensor: Tensor) -> int:
        address = tensor.untyped_storage()._cdata
        if address not in self._storages:
            self._kept.append(tensor)
        return self._storages.setdefault(address, len(self._storages))

    @contextmanager
    def watching(self, module: nn.Module, blocks: Sequence[str], dtype: torch.dtype | None) -> Iterator[None]:
        """Context in which the recorder knows where blocks and other modules begin and end, and autograd functions.

        Args:
            dtype: Blocks cast their inputs to it; None for as they are.
        """
        begun: dict[str, _Begun] = {}

        def enters(name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
            self._entered[name] = len(self.calls)
            if name in blocks:
                begun[name] = self._begin(args, kwargs)
                self._inside, self._own = name, {*map(id, begun[name].tensors)}
                self._read, self._outside = set(), set()

        def leaves(name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in blocks:
                self._inside = None
                self._end(begun.pop(name), name, output)
            self._left.setdefault(name, len(self.calls))

        for name, part in module.named_modules():
            part.register_forward_pre_hook(_unseen(partial(enters, name)), with_kwargs=True)
            part.register_forward_hook(_unseen(partial(leaves, name)), with_kwargs=True)
            if name in blocks and dtype is not None:
                part.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)
        original = torch.autograd.Function.__dict__["apply"].__func__

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:
                return original(function, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                begun = self._begin(args, kwargs)
                result = original(function, *args, **kwargs)
                self._end(begun, partial(_applied, function), result)
            return result

        with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def recording(self, loss: Any, starts: Sequence[str]) -> Recording:
        """What was recorded.

        Args:
            starts: See ``record_calls``.
        """
        begins = [0, *(self._place(layer, start) for layer, start in enumerate(starts) if layer)]
        for number, call in enumerate(self.calls):
            call.layer = bisect_right(begins, number) - 1
        values = [self._facts(tensor) for tensor in self._tensors]
        return Recording(self.calls, values, self._numbers[id(loss)], self._batch)

    def _place(self, layer: int, start: str) -> int:
        """Number of the first call of a layer."""
        how, _, path = start.partition(" ")
        places = self._entered if how == "enter" else self._left
        if not start or path not in places:
            raise _refused(f"no module begins or ends where layer {layer} begins", "put the layers into modules")
        return places[path]

    def _facts(self, tensor: Tensor) -> ValueFacts:
        order = tuple(
            sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
        )
        num_bytes = tensor.numel() * tensor.element_size()
        is_whole = tensor.untyped_storage().nbytes() == num_bytes and tensor.permute(order).is_contiguous()
        return ValueFacts(
            self._storage(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_whole, order
        )


class _Begun(NamedTuple):
    """A call that has begun: its arguments, and the state around it."""

    leaves: list[Any]
    structure: TreeSpec
    tensors: list[Tensor]
    versions: list[int]
    reads: list[int]
    num_storages: int
    has_gradients: bool
    autocast: torch.dtype | None


def _holds_tensors(held: Any, depth: int = 3) -> bool:
    """True for a tensor, a module, and an object with tensors or modules inside."""
    if isinstance(held, Tensor):
        return True
    if isinstance(held, nn.Module):
        return any(True for _ in (*held.parameters(), *held.buffers()))
    if depth == 0 or callable(held) or not hasattr(held, "__dict__"):
        return False
    return any(_holds_tensors(leaf, depth - 1) for leaf in tree_leaves([*vars(held).values()]))


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Result of an autograd function."""
    return function.apply(*args, **kwargs)


def _cast(dtype: torch.dtype, part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Inputs of a block, numbers in floating point in a dtype."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))


def _unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook whose own reads of tensors are not recorded."""

    def run(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            hook(*args)

    return run


def _name(target: Callable[..., Any] | str) -> str:
    """How errors name a function or a block."""
    if isinstance(target, str):
        return f"block {target}"
    function = target.args[0] if isinstance(target, partial) else target
    return str(getattr(function, "__name__", function))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Shape of each tensor, and all other leaves."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
