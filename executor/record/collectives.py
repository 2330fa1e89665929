"""Communication of a step that this code did not issue: every operator of torch.distributed that torch dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import ScriptObject
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from simplan.runs.recording import RecordedCollective, RecordedKind

_PROCESS_GROUPS: dict[str, tuple[RecordedKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
"""Operators of ``torch.ops.c10d``, with the argument whose bytes count; a barrier has none."""

_FUNCTIONAL: dict[str, RecordedKind] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""Functional collectives by the beginning of their name: in place, coalesced and with an output, too. The first
argument counts; of an all-gather, times the ranks."""


class CollectiveLog(TorchDispatchMode):
    """Lists the collectives that this process issues while the mode is active, those of DDP's reducer and FSDP too.

    Attributes:
        issued: What was issued so far, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: list[RecordedCollective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the tensors inside of DTensors come next
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in _PROCESS_GROUPS:
            self._add(*_PROCESS_GROUPS[name], args, _group_of(args))
        elif func.namespace == "_c10d_functional":
            kind = next((kind for beginning, kind in _FUNCTIONAL.items() if name.startswith(beginning)), None)
            if kind is not None:
                values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
                self._add(kind, 0, args, _named_group(values["group_name"]), gathers=kind == "all_gather")
        return func(*args, **(kwargs or {}))

    def _add(
        self, kind: RecordedKind, counted: int, args: Sequence[Any], ranks: tuple[int, ...], *, gathers: bool = False
    ) -> None:
        num_bytes = sum(leaf.nbytes for leaf in tree_leaves(args[counted]) if isinstance(leaf, Tensor))
        if kind in ("send", "recv"):
            peer = ranks[args[2]]  # which operators number within the group
            ranks = (dist.get_rank(), peer) if kind == "send" else (peer, dist.get_rank())
        num_bytes *= len(ranks) if gathers else 1
        self.issued.append(RecordedCollective(kind=kind, ranks=ranks, num_bytes=num_bytes))


def _group_of(args: Sequence[Any]) -> tuple[int, ...]:
    """Global ranks of the process group among the arguments of an operator."""
    boxed = (arg for arg in args if isinstance(arg, ScriptObject))
    group = next(arg for arg in boxed if "ProcessGroup" in str(arg._type()))
    return _named_group(dist.ProcessGroup.unbox(group).group_name)


def _named_group(name: Any) -> tuple[int, ...]:
    """Global ranks of a process group, by its name or the group itself."""
    group = _resolve_process_group(GroupName(name)) if isinstance(name, str) else name
    return tuple(dist.get_process_group_ranks(group))
