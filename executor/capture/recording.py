"""Recording of a module's forward as calls (``executor.capture.calls``), on tensors without data.

A ``TorchFunctionMode`` sees every function of torch that the user's code calls, and hooks where blocks begin and end.
Inside of a block it only checks that the block reads nothing but its arguments, weights, and what it makes itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from executor.capture.calls import (
    Given,
    PassRecording,
    RecordedCall,
    Unread,
    Value,
    ValueFacts,
    Weight,
    autocast_dtype,
    name_of,
    refused,
    shapes_of,
    tensors_of,
)
from executor.capture.capture import Loss, fake_module, fake_tensor, loss_of
from executor.capture.trace import without_data

_EFFECTS = frozenset({"__set__", "register_hook", "retain_grad"})
"""Functions that change tensors, but neither their numbers nor their storage."""


def record_calls(
    module: nn.Module,
    batch: Any,
    loss: Loss | None,
    *,
    blocks: Sequence[str],
    starts: Sequence[str],
    dtype: torch.dtype,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device,
    autocast: torch.dtype | None = None,
    casts_inputs: bool = False,
) -> PassRecording:
    """Records one forward pass and the loss, on tensors without data.

    Args:
        module: The module, which is not changed.
        batch: Arguments of forward, for as many samples as later batches have.
        blocks: Paths of blocks.
        starts: By layer, how it starts (``CapturedModel.starts``).
        dtype: Dtype of weights, and of numbers in floating point of the batch.
        buffer_dtype: Dtype of buffers; None for ``dtype``.
        device: Device on which the calls will run.
        autocast: Dtype of autocast; None without.
        casts_inputs: Blocks cast their inputs to ``dtype``, as FSDP does.

    Raises:
        NotModelledError: A layer starts nowhere, or a tensor comes from somewhere else than the calls.
    """
    originals: dict[int, Tensor] = {}
    with active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_module(module, dtype, device, originals, buffer_dtype)
        inputs = tree_map(lambda leaf: fake_tensor(leaf, dtype, device) if isinstance(leaf, Tensor) else leaf, batch)
        recorder = _Recorder(fake, inputs, originals, device.type)
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
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
        self.calls: list[RecordedCall] = []
        self._originals, self._device_type = originals, device_type
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._weights = {id(tensor): name for name, tensor in reversed(named)}
        leaves = tree_leaves(batch)
        self._given = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._batch = shapes_of(leaves)
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
        context = torch.is_grad_enabled(), autocast_dtype(self._device_type)
        return _Begun(leaves, structure, tensors, [x._version for x in tensors], reads, len(self._storages), *context)

    def _end(self, begun: _Begun, target: Callable[..., Any] | str, result: Any) -> None:
        """Adds a call, unless it is for a shape, a dtype or the like."""
        returned = tensors_of(result)
        triples = zip(begun.tensors, begun.versions, begun.reads, strict=True)
        writes = frozenset(storage for tensor, version, storage in triples if tensor._version != version)
        has_effect = getattr(target, "__name__", "") in _EFFECTS
        if not (returned or writes or has_effect):
            return
        is_block = isinstance(target, str)
        storages = frozenset(map(self._storage, returned))
        makes = frozenset(storage for storage in storages if storage >= begun.num_storages)
        reads = frozenset(begun.reads) & (self._read | writes | storages) if is_block else frozenset(begun.reads)
        arguments = [self._argument(leaf, name_of(target), reads) for leaf in begun.leaves]
        self.calls.append(
            RecordedCall(
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
                raise refused(rule, "give it as an argument of forward")
            name = self._weights.get(id(leaf))
            if name is not None and not name.startswith(f"{self._inside}."):
                self._outside.add(name)
        begun = self._begin(args, kwargs)
        result = func(*args, **kwargs)
        made = {self._storage(tensor) for tensor in tensors_of(result)}  # numbered here by their age
        writes = any(x._version != version for x, version in zip(begun.tensors, begun.versions, strict=True))
        if writes or not made <= {*begun.reads}:  # else a view, or a shape
            self._read.update(begun.reads)
        return result

    def _argument(self, leaf: Any, reader: str, reads: frozenset[int]) -> Any:
        if not isinstance(leaf, Tensor):
            if _holdstensors_of(leaf):  # it may also keep some for the next call
                raise refused(f"{reader} takes a {type(leaf).__name__} with tensors inside", "give it the tensors")
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
            raise refused(f"{reader} is under torch.func outside of blocks", "write it without")
        if isinstance(leaf, FakeTensor):
            rule = f"{reader} reads a tensor that a block has made and not returned"
            raise refused(rule, "return it from the forward of the block")
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

    def recording(self, loss: Any, starts: Sequence[str]) -> PassRecording:
        """The calls, and the layer of each.

        Args:
            starts: See ``record_calls``.
        """
        begins = [0, *(self._place(layer, start) for layer, start in enumerate(starts) if layer)]
        for number, call in enumerate(self.calls):
            call.layer = bisect_right(begins, number) - 1
        values = [self._facts(tensor) for tensor in self._tensors]
        return PassRecording(self.calls, values, self._numbers[id(loss)], self._batch)

    def _place(self, layer: int, start: str) -> int:
        """Number of the first call of a layer."""
        how, _, path = start.partition(" ")
        places = self._entered if how == "enter" else self._left
        if not start or path not in places:
            raise refused(f"no module begins or ends where layer {layer} begins", "put the layers into modules")
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


def _holdstensors_of(held: Any, depth: int = 3) -> bool:
    """True for a tensor, a module, and an object with tensors or modules inside."""
    if isinstance(held, Tensor):
        return True
    if isinstance(held, nn.Module):
        return any(True for _ in (*held.parameters(), *held.buffers()))
    if depth == 0 or callable(held) or not hasattr(held, "__dict__"):
        return False
    return any(_holdstensors_of(leaf, depth - 1) for leaf in tree_leaves([*vars(held).values()]))


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
