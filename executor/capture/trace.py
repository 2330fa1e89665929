"""One forward pass of a module on fake tensors: what each operator reads, makes, and saves for backward.

A ``TorchDispatchMode`` sees every operator below autograd. A tensor is identified by its storage, so views cost nothing
and need no list: an operator that makes no storage and writes to none is one. What an operator saves for backward is
read from its node in the autograd graph, as soon as the node exists: an operator in place replaces it.

Dropout and attention are seen as GPUs run them, which have one kernel for each where torch on CPUs has several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from os import environ
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, _meta_registrations, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.capture.values import Values
from simplan.errors import Problem, SpecError

_IGNORED = frozenset({"prim"})
_DROPOUT = 4  # place of the argument of attention
_USUAL_DROPOUT = 0.5  # default of torch.nn.functional.dropout
_MOST_OPERATORS = 50_000
_NO_WORK = frozenset(
    {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided"}
)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument or result of an operator: number of its storage, shape and dtype."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SeenCollective(NamedTuple):
    """Communication of tensor-parallel ranks.

    Attributes:
        forward, backward: Kind in each direction; empty for none.
        buffer: The tensor that ``simplan.model.kernel.CollectiveKind`` counts.
        reorders: Parts of ranks are copied to be in order.
    """

    forward: str
    backward: str
    buffer: Operand
    reorders: bool = False


@dataclass(slots=True)
class Seen:
    """One dispatched operator.

    Attributes:
        name: Namespace and name, such as ``aten.mm``.
        module: Path of the innermost module that runs; empty for the whole model.
        settings: Arguments that are not tensors, by name.
        reads: Tensor arguments, in order.
        results: Tensors returned, in order.
        makes: Storages that did not exist before.
        writes: Storages of arguments that the operator writes to.
        saves: Storages that backward reads.
        has_gradient: Autograd records the operator, and its results reach the loss.
        num_gradients: Tensors read whose gradients backward computes.
        function: Name of the autograd function written in Python that ends with the operator; empty for none.
        collective: What tensor-parallel ranks communicate; None for all other operators.
        passes: Backward hands gradients on and runs no kernel.
        is_alias: The result stands for the tensor read, whose memory it has.
        is_left_out: The operator is part of another one.
        backward_elements: Elements of a gradient that backward makes for all tensor-parallel ranks; 0 for none.
    """

    name: str
    module: str
    settings: dict[str, Any]
    reads: tuple[Operand, ...]
    results: tuple[Operand, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    saves: tuple[int, ...] = ()
    has_gradient: bool = False
    num_gradients: int = 0
    function: str = ""
    collective: SeenCollective | None = None
    passes: bool = False
    is_alias: bool = False
    is_left_out: bool = False
    backward_elements: int = 0

    def leave_out(self) -> None:
        """Makes the operator part of another one."""
        self.reads = self.makes = self.writes = self.saves = ()
        self.has_gradient, self.is_left_out = False, True


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: the operators ``begin`` to ``end``, without the last."""

    module: str
    begin: int
    end: int = 0


@dataclass(slots=True)
class Trace:
    """Record of one forward pass.

    Attributes:
        operators: In the order in which they ran.
        calls: Calls of modules, in the order of their beginnings.
        sizes: Bytes of each storage, by number.
        dtypes: Dtype of the tensor that a storage was made for, by number.
        parameters, buffers: Names by number of storage; the first name of one that is shared.
        inputs: Names by number of storage.
        needs_gradient: Storages through which gradients flow.
        partial: Names of parameters of whose gradients each tensor-parallel rank has a part.
    """

    operators: list[Seen] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, str] = field(default_factory=dict)
    needs_gradient: set[int] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)


def trace(
    module: nn.Module, run: Callable[[], Tensor], inputs: dict[str, Tensor], values: Values | None = None
) -> Trace:
    """Runs forward and the loss once.

    Args:
        module: The module, on fake tensors.
        run: Runs it and gives the loss.
        inputs: Tensors of the batch, by name.
        values: Runs what follows from the batch alone on its data; None for a batch without data.

    Raises:
        SpecError: The module runs too many operators.
        ValueError: Nothing is trained.
    """
    tracer = Tracer(module, inputs, values)
    with modules_named(module, tracer), as_on_gpus(), tracer:
        loss = run()
    tracer.settle()
    if not loss.requires_grad:
        raise ValueError("no gradient flows from the loss to a parameter")
    tracer.leave_out_dead(loss)
    return tracer.trace


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators; every tensor is kept alive, so that a storage's address means one storage."""

    def __init__(self, module: nn.Module, inputs: dict[str, Tensor], values: Values | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.path = Trace(), [""]
        self._values = values
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._open: list[tuple[Seen, tuple[Tensor, ...]]] = []  # operators whose node autograd has not made yet
        self._nodes: set[int] = set()
        for name, parameter in module.named_parameters():
            number = self.number(parameter)
            self.trace.parameters.setdefault(number, name)
            if parameter.requires_grad:
                self.trace.needs_gradient.add(number)
        for name, buffer in module.named_buffers():
            self.trace.buffers.setdefault(self.number(buffer), name)
        for name, tensor in inputs.items():
            self.trace.inputs.setdefault(self.number(tensor), name)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and records it."""
        del types
        kwargs = kwargs or {}
        if func.namespace in _IGNORED:
            return func(*args, **kwargs)
        if not func.is_view:  # a node saves its result as a view, and autograd holds a lock where it makes views anew
            self._settle_last()
        known = len(self.trace.sizes)
        reads = self._operands((args, kwargs))
        out = func(*args, **kwargs) if self._values is None else self._values.run(func, args, kwargs)
        tensors = tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        known = max(known, *(operand.storage + 1 for operand in reads)) if reads else known
        results = self._operands(out)
        makes = tuple(dict.fromkeys(r.storage for r in results if r.storage >= known))
        writes = tuple(self._written(func, args, kwargs))
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if not (makes or writes):
            return out  # a view
        if name in _NO_WORK:
            reads = ()
        arguments = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        settings = {key: value for key, value in arguments.items() if _is_plain(value)}
        seen = Seen(name, self.path[-1], settings, reads, results, makes, writes)
        self.trace.operators.append(seen)
        if len(self.trace.operators) > _MOST_OPERATORS:
            raise SpecError(_too_many(seen))
        self.open(seen, tensors)
        return out

    def settle(self) -> None:
        """Reads nodes that autograd made later than the operator: those of functions written in Python."""
        self._settle_last()
        for seen, tensors in self._open:
            self.read_node(seen, tensors)
        self._open.clear()

    def leave_out_dead(self, loss: Tensor) -> None:
        """Takes gradients and saved tensors from operators whose results never reach the loss: autograd frees them."""
        live = {self.number(loss)}
        for seen in reversed(self.trace.operators):
            if live.isdisjoint(seen.makes) and live.isdisjoint(seen.writes):
                seen.has_gradient, seen.saves = False, ()
            else:
                live.update(operand.storage for operand in seen.reads)
        self.trace.needs_gradient &= live

    def _settle_last(self) -> None:
        if self._open:
            seen, tensors = self._open[-1]
            if self.read_node(seen, tensors):
                self._open.pop()

    def open(self, seen: Seen, tensors: tuple[Tensor, ...]) -> None:
        """Reads the node of an operator's results as soon as autograd has made it."""
        self._open.append((seen, tensors))

    def keep(self, value: Any) -> None:
        """Keeps an object alive, so that its address means one object."""
        self._kept.append(value)

    def read_node(self, seen: Seen, tensors: Sequence[Tensor]) -> bool:
        """True if the operator has a node; its saved tensors are then known."""
        has_node = False
        for tensor in tensors:
            node = tensor.grad_fn
            if not tensor.requires_grad or node is None:
                continue
            has_node = seen.has_gradient = True
            self.trace.needs_gradient.add(self.number(tensor))
            if id(node) in self._nodes:
                continue
            self._nodes.add(id(node))
            self._kept.append(node)
            if _is_python(node):
                seen.function = type(node).__name__.removesuffix("Backward")
            seen.num_gradients = sum(function is not None for function, _ in node.next_functions)
            saved = (self.number(kept) for kept in _saved_tensors(node))
            seen.saves = tuple(dict.fromkeys((*seen.saves, *saved)))
        return has_node

    def _operands(self, tree: Any) -> tuple[Operand, ...]:
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        return tuple(map(self.operand, tensors))

    def operand(self, tensor: Tensor) -> Operand:
        """A tensor as operators name it."""
        return Operand(self.number(tensor), tuple(map(int, tensor.shape)), tensor.dtype)

    def number(self, tensor: Tensor) -> int:
        """Number of a tensor's storage, in the order in which storages appear."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            self._kept.append((tensor, storage))
            self._numbers[address] = len(self.trace.sizes)
            self.trace.sizes.append(storage.nbytes())
            self.trace.dtypes.append(tensor.dtype)
        return self._numbers[address]

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield self.number(leaf)


def _too_many(seen: Seen) -> Problem:
    rule = f"runs more than {_MOST_OPERATORS:,} operators in one forward pass, as a loop over tokens in Python does"
    fix = "use fewer tokens, or the form of the module that scans with one kernel"
    return Problem(field="module", value=seen.module or "the model", rule=rule, fix=fix)


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Operators as GPUs run them, on tensors without data.

    Dropout is one kernel with a mask of bools; attention drops out inside of its kernel.
    """
    attention = functional.scaled_dot_product_attention

    def dropped(*args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        is_on = arguments.get("training", arguments.get("train", True)) and arguments.get("p", _USUAL_DROPOUT) > 0
        return (
            torch.native_dropout(arguments["input"], arguments.get("p", _USUAL_DROPOUT), True)[0]
            if is_on
            else arguments["input"]
        )

    def attended(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > _DROPOUT:
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
        return attention(*args, **({**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs))

    with (
        without_data(),
        patch.object(functional, "dropout", dropped),
        patch.object(torch, "dropout", dropped),
        patch.object(functional, "scaled_dot_product_attention", attended),
    ):
        yield


@contextmanager
def without_data() -> Iterator[None]:
    """Context in which modules run on tensors without data as on others.

    Grouped matmuls have any precision, where torch tells their shapes for BF16 alone. Transformers checks no values.
    """
    grouped_shape = _meta_registrations._meta_grouped_mm_common

    def grouped(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        if left.dtype is torch.bfloat16:
            return grouped_shape(left, right, **kwargs)  # type: ignore[no-any-return]
        result: Tensor = grouped_shape(left.bfloat16(), right.bfloat16(), **kwargs)
        return result.to(left.dtype)

    with (
        patch.dict(environ, {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}),
        _without_masks(),
        patch.object(_meta_registrations, "_meta_grouped_mm_common", grouped),
    ):
        yield


@contextmanager
def _without_masks() -> Iterator[None]:
    """A sample of transformers is one document without padding, unless values say otherwise.

    With tensors without data it would make masks that no run makes, and attention would not be causal.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return

    def without_padding(function: Callable[..., bool]) -> Callable[..., bool]:
        return lambda padding_mask, *args, **kwargs: function(_with_data(padding_mask), *args, **kwargs)

    packed = masking.find_packed_sequence_indices
    with (
        patch.object(
            masking, "find_packed_sequence_indices", lambda ids: None if _with_data(ids) is None else packed(ids)
        ),
        patch.object(masking, _CAUSAL, without_padding(getattr(masking, _CAUSAL))),
        patch.object(masking, _BIDIRECTIONAL, without_padding(getattr(masking, _BIDIRECTIONAL))),
    ):
        yield


def _with_data(tensor: Tensor | None) -> Tensor | None:
    return None if isinstance(tensor, FakeTensor) or (tensor is not None and tensor.is_meta) else tensor


_CAUSAL, _BIDIRECTIONAL = "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"


@contextmanager
def modules_named(module: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Tells the tracer which module runs."""
    names = {id(part): name for name, part in reversed([*module.named_modules()])}
    calls: list[ModuleCall] = []

    def enters(part: nn.Module, args: Any) -> None:
        if id(part) in names:
            call = ModuleCall(names[id(part)], len(tracer.trace.operators))
            tracer.trace.calls.append(call)
            calls.append(call)
            tracer.path.append(call.module)

    def leaves(part: nn.Module, args: Any, output: Any) -> None:
        if id(part) in names:
            calls.pop().end = len(tracer.trace.operators)
            tracer.path.pop()

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enters),
        hooks.register_module_forward_hook(leaves, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _saved_tensors(node: Any) -> Iterator[Tensor]:
    """Tensors that a node of the autograd graph keeps."""
    if _is_python(node):
        yield from (tensor for tensor in node.saved_tensors if isinstance(tensor, Tensor))
        return
    for name in _saved_names(type(node)):  # type: ignore[arg-type]  # types are hashable
        yield from (leaf for leaf in tree_leaves(getattr(node, name)) if isinstance(leaf, Tensor))


def _is_python(node: Any) -> bool:
    return hasattr(node, "saved_tensors")


@cache
def _saved_names(node: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith("_saved_"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, bool | int | float) for item in value)
    return isinstance(value, bool | int | float | str)
