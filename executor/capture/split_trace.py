"""One forward and backward pass of a tensor-parallel rank on fake tensors, without other ranks.

Operators of DTensors are recorded as the operators of their local tensors. torch's functional collectives appear among
these: in forward where they run, and in backward under the autograd node that runs them. A node that communicates only
in backward (a layout that is declared by ``DTensor.from_local``) becomes an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_leaves

from executor.capture.trace import Seen, SeenCollective, Trace, Tracer, as_on_gpus, modules_named
from simplan.errors import NotModelledError, Problem
from simplan.model.captured.facts import Communication

_KINDS: dict[str, Communication] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_COMMUNICATION = "c10d.", "_c10d_functional", "symm_mem."
_COPY, _WAIT = "aten.cat", "_c10d_functional.wait_tensor"
_EMBEDDING_BACKWARD = "aten.embedding_dense_backward"


def trace_split(module: nn.Module, run: Callable[[], Tensor], inputs: dict[str, Tensor]) -> Trace:
    """Runs forward, the loss and backward of a module that is split; arguments and errors as of ``trace``.

    Raises:
        NotModelledError: Something communicates in a way that is not modeled.
    """
    first = _SplitTracer(module, inputs)
    first.run(module, run)
    if not first.calls_that_communicate:
        return first.trace
    second = _SplitTracer(module, inputs, first.calls_that_communicate)
    second.run(module, run)
    return second.trace


class _SplitTracer(Tracer):
    """Records operators of local tensors.

    Args:
        apart: Numbers of calls of ``DTensor.from_local`` whose backward communicates; each gets an operator.

    Attributes:
        calls_that_communicate: Numbers of such calls that were found.
    """

    def __init__(self, module: nn.Module, inputs: dict[str, Tensor], apart: frozenset[int] = frozenset()) -> None:
        super().__init__(module, inputs)
        self.calls_that_communicate: frozenset[int] = frozenset()
        self._apart, self._num_calls = apart, 0
        self._is_paused = self._in_backward = self._enters = False
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._owners: dict[int, Seen | int] = {}  # by id of an autograd node: its operator, or its number as a call
        self._groups: list[tuple[int, int, Seen]] = []  # operators of one DTensor operator, and the one with its node

    def run(self, module: nn.Module, run: Callable[[], Tensor]) -> None:
        """One pass; ``trace`` is complete afterwards."""
        with modules_named(module, self), as_on_gpus(), self._watching(), loss_parallel(), self:
            loss = run()
            self.settle()
            if not loss.requires_grad:
                raise ValueError("no gradient flows from the loss to a parameter")
            self._in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
        for first, end, final in self._groups:
            self._complete(self.trace.operators[first:end], final)
        for seen in self.trace.operators:
            if seen.name.startswith(_COMMUNICATION) and seen.collective is None and not seen.is_left_out:
                raise NotModelledError(_unmodelled(seen.module or "the model", seen.name))
        self.leave_out_dead(loss)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and records it."""
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            if self._enters or self._in_backward:
                self._enters = False
                return NotImplemented  # its local tensors come next
            return self._of_dtensors(func, args, kwargs or {})
        if self._in_backward:
            return self._backward(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    # forward

    def _of_dtensors(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = len(self.trace.operators)
        with self:
            self._enters = True
            out = func(*args, **kwargs)
        self._group(first, out)
        return out

    def _group(self, first: int, out: Any) -> None:
        """Notes that operators from ``first`` on are one for autograd, whose node is that of a result."""
        operators, final = self.trace.operators, None
        for leaf in tree_leaves(out):
            if isinstance(leaf, DTensor):
                number = self.number(leaf)
                makers = (seen for seen in reversed(operators[first:]) if number in (*seen.makes, *seen.writes))
                final = next(makers, None)
                if final is not None:
                    self.open(final, (leaf,))
        if final is not None:
            self._groups.append((first, len(operators), final))

    def number(self, tensor: Tensor) -> int:
        """See ``Tracer.number``."""
        return super().number(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)

    def read_node(self, seen: Seen, tensors: Sequence[Tensor]) -> bool:
        """See ``Tracer.read_node``."""
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                self._owners.setdefault(id(tensor.grad_fn), seen)
        return super().read_node(seen, tensors)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Sees changes of layout, and not the operators by which DTensor finds shapes."""
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached
        from_local, redistribute = DTensor.from_local, DTensor.redistribute

        def unseen(propagator: Any, *args: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            try:
                return propagate(propagator, *args)
            finally:
                self._is_paused = before

        def placed(local: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not local.requires_grad or self._in_backward:
                return from_local(local, *args, **kwargs)
            call = self._num_calls
            self._num_calls += 1
            owner: Seen | int = call
            if call in self._apart:
                local = local.clone()
                owner = self.trace.operators[-1]
                owner.is_alias = True
            out = from_local(local, *args, **kwargs)
            self.keep(out.grad_fn)
            self._owners[id(out.grad_fn)] = owner
            return out

        def moved(dtensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            first = len(self.trace.operators)
            out = redistribute(dtensor, *args, **kwargs)
            if not self._in_backward and len(self.trace.operators) > first:
                self._group(first, out)
            return out

        with (
            patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
            patch.object(DTensor, "from_local", placed),
            patch.object(DTensor, "redistribute", moved),
        ):
            yield

    def _complete(self, operators: Sequence[Seen], final: Seen) -> None:
        """Gives the operators of one DTensor operator what autograd tells of all of them.

        Args:
            final: The one of them that has the autograd node.
        """
        for place, seen in enumerate(operators):
            kind = _KINDS.get(seen.name.rpartition(".")[2]) if seen.name.startswith("_c10d_functional.") else None
            if kind is not None and id(final) in _joined(kind, seen, operators[:place], operators[place + 1 :]):
                final = seen
        if not final.has_gradient:
            return
        gradients = self.trace.needs_gradient
        for seen in operators:
            reads = {operand.storage for operand in seen.reads}
            is_real = any(result.dtype.is_floating_point for result in seen.results)
            if seen is not final and is_real and not gradients.isdisjoint(reads):
                seen.has_gradient, seen.num_gradients, seen.passes = True, 1, True
                gradients.update(seen.makes)
        final.function = ""  # the node is that of a change of layout, which saves nothing
        final.passes = final.collective is not None and not final.collective.backward

    # backward

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        kind = _KINDS.get(func.overloadpacket.__name__) if func.namespace == "_c10d_functional" else None
        if kind is not None:
            self._communicates(kind, out if kind == "all_gather" else args[0])
        elif name.startswith(_COMMUNICATION) and name != _WAIT:
            raise NotModelledError(_unmodelled("the model", f"{name} in backward"))
        elif name == _EMBEDDING_BACKWARD:
            owner = self._owners.get(id(torch._C._current_autograd_node()))
            if isinstance(owner, Seen):
                owner.backward_elements = out.numel()
        return out

    def _is_layout(self, seen: Seen) -> bool:
        """True for an operator that is a change of layout, without a collective in backward so far."""
        is_final = any(final is seen for _, _, final in self._groups)
        return seen.collective is None and (seen.is_alias or is_final)

    def _communicates(self, kind: Communication, buffer: Tensor) -> None:
        node = torch._C._current_autograd_node()
        leaf = getattr(node.next_functions[0][0], "variable", None) if node.next_functions else None
        owner = self._owners.get(id(node))
        if leaf is not None and id(leaf) in self._names and kind == "all_reduce" and owner is None:
            self.trace.partial.add(self._names[id(leaf)])
            return
        if owner is None or (isinstance(owner, Seen) and not self._is_layout(owner)):
            where = "the model" if leaf is None else self._names.get(id(leaf), "the model")
            raise NotModelledError(_unmodelled(where, f"{kind} in the backward of {node.name()}"))
        if isinstance(owner, int):
            self.calls_that_communicate |= {owner}
            return
        owner.collective = SeenCollective("", kind, self.operand(buffer))


def _unmodelled(where: str, what: str) -> Problem:
    rule, fix = f"communicates by {what}, which is not modeled yet", "declare layouts by styles of the plan"
    return Problem(field="--tp-plan", value=where, rule=rule, fix=fix)


def _joined(kind: Communication, seen: Seen, before: Sequence[Seen], after: Sequence[Seen]) -> frozenset[int]:
    """Joins a collective with the wait for it, and with copies that put parts of ranks in order; gives ids of these."""
    joined, reorders, backward = {id(seen)}, False, "" if seen.collective is None else seen.collective.backward
    buffer = seen.results[0] if kind == "all_gather" else seen.reads[0]
    for copy in (other for other in before if other.name == _COPY and seen.reads[0].storage in other.makes):
        seen.reads, reorders = copy.reads[:1], True
        copy.leave_out()
    for other in after:
        if other.name in (_WAIT, _COPY) and other.reads[0].storage in seen.makes:
            seen.makes, seen.results = other.makes, other.results
            seen.has_gradient, seen.num_gradients = other.has_gradient, other.num_gradients
            reorders |= other.name == _COPY
            backward = other.collective.backward if other.collective is not None else backward
            other.leave_out()
            joined.add(id(other))
    seen.collective = SeenCollective(kind, backward, buffer, reorders)
    return frozenset(joined)
