"""Torch's own account of one rank's memory: its Trainer run on tensors without data, every allocation written down.

One process is any rank of a job of any size: torch's fake process group moves nothing and FakeTensorMode computes
nothing, but tensors are made, kept and let go as in a real run.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor import ddp, trainer
from executor.clock import make_clock
from executor.groups import make_groups
from executor.heartbeat import Heartbeat
from executor.recorder import Recorder
from executor.trainer import Trainer
from simplan.program.action import Action
from simplan.program.job import Job
from simplan.program.program import MemoryCategory
from simplan.spec.plan import RankMapping

__all__ = ["Account", "account", "fake_trainer"]

_C = MemoryCategory
_MAKERS: tuple[tuple[str, str, MemoryCategory], ...] = (
    # file, function, what it makes; the innermost frame that is listed decides
    ("_fsdp_param.py", "init_all_gather_outputs", _C.GATHERED),
    ("_fsdp_param.py", "to_accumulated_grad_if_needed", _C.GRADIENTS),
    ("_fsdp_collectives.py", "foreach_all_gather", _C.BUFFERS),
    ("_fsdp_collectives.py", "foreach_reduce", _C.BUFFERS),
    ("stage.py", "_create_act_recv_info", _C.BUFFERS),
    ("stage.py", "_create_grad_recv_info", _C.BUFFERS),
    ("stage.py", "_allocate_recv_buffer", _C.BUFFERS),
    ("loss.py", "cross_entropy", _C.LOGITS),
)


@dataclass(slots=True, eq=False)
class _Allocation:
    """A storage: its bytes now, who made it, in which action, and the first action after it that outlived it."""

    num_bytes: int
    maker: MemoryCategory | None
    where: str
    born: int
    died: int | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """The worst moment of a rank.

    Attributes:
        total_bytes: All tensors at that moment.
        by_category: The same by what they are.
        action: During which it was.
        largest: The largest tensors that then were no states: bytes, category, where they were made.
    """

    total_bytes: int
    by_category: dict[MemoryCategory, int]
    action: str
    largest: tuple[tuple[int, str, str], ...]


class _Ledger(TorchDispatchMode):
    """Follows the storages of all tensors made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = self.peak_bytes = 0
        self.action_number = 0
        self.on_peak: Callable[[], None] | None = None
        self.alive: dict[int, _Allocation] = {}
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come next
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have a new size."""
        allocation = self.alive.get(storage._cdata)
        if allocation is not None and self._known.get(storage._cdata) is storage:
            self._grow(storage.nbytes() - allocation.num_bytes, allocation)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if self._known.get(key) is storage:
            return
        self._known[key] = storage
        maker, where = _made_by()
        allocation = self.alive[key] = _Allocation(0, maker, where, self.action_number)
        weakref.finalize(storage, self._gone, key, allocation)
        self._grow(storage.nbytes(), allocation)

    def _grow(self, num_bytes: int, allocation: _Allocation) -> None:
        allocation.num_bytes += num_bytes
        self.total_bytes += num_bytes
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes
            if self.on_peak is not None:
                self.on_peak()

    def _gone(self, key: int, allocation: _Allocation) -> None:
        self.total_bytes -= allocation.num_bytes
        allocation.died = self.action_number
        if self.alive.get(key) is allocation:
            del self.alive[key]


def _made_by() -> tuple[MemoryCategory | None, str]:
    frame = sys._getframe(2)
    first = ""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not first and ((file.parts[-2] == "executor" != file.parts[-3:-2] and file != Path(__file__)) or file.name.startswith(("_fsdp", "stage"))):
            first = f"{file.name}:{frame.f_lineno}"
        for name, function, category in _MAKERS:
            if file.name == name and frame.f_code.co_name == function:
                return category, f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None, first


class _NoHeartbeat(Heartbeat):
    def __init__(self) -> None: ...

    def beat(self, *args: Any, **kwargs: Any) -> None: ...


class _MarkingRecorder(Recorder):
    """Counts actions for the ledger."""

    def __init__(self, row: Sequence[Action], ledger: _Ledger) -> None:
        super().__init__(row, make_clock(torch.device("cpu")), _NoHeartbeat())
        self._ledger = ledger
        self.action: Action = row[0]

    def begin(self, action: Action) -> None:
        super().begin(action)
        self.action = action
        self._ledger.action_number += 1

    def close(self) -> None:
        super().close()
        self._ledger.action_number += 1


@contextmanager
def fake_trainer(job: Job, rank: int, recorder_of: Callable[[Sequence[Action]], Recorder]) -> Iterator[Trainer]:
    """A rank's trainer on fake tensors, alone in this process."""
    mapping = RankMapping.of(job.plan)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mapping.world_size)
    try:
        table = job.parsed_table()
        groups = make_groups(job.plan, table, rank, tied=job.model.tied_embeddings)
        with FakeTensorMode(), _real_meshes(), _held_sends():
            yield Trainer(job, rank, torch.device("cpu"), groups, recorder_of(table[mapping.place(rank).pp]))
    finally:
        dist.destroy_process_group()


@contextmanager
def _real_meshes() -> Iterator[None]:
    """A mesh is made of real numbers."""
    from executor import fsdp

    make = fsdp._mesh

    def really(*args: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return make(*args)

    with patch.object(fsdp, "_mesh", really):
        yield


@contextmanager
def _held_sends() -> Iterator[None]:
    """Gloo's and NCCL's works hold what they send until they are waited for; the fake group's do not."""
    held: list[Any] = []
    post, wait = schedules._batch_p2p, schedules._wait_batch_p2p

    def holding(ops: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
        works = post(ops, *args, **kwargs)
        tensors = [op.tensor for op in ops]
        held.append((works, tensors))
        return works

    def letting_go(works: Any) -> None:
        wait(works)
        held[:] = [entry for entry in held if entry[0] is not works]

    with patch.object(schedules, "_batch_p2p", holding), patch.object(schedules, "_wait_batch_p2p", letting_go):
        yield


class _KeptBuckets:
    """A reducer that keeps the buckets it has: it would send round their order, which takes numbers."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _wrap_ddp(*args: Any) -> Any:
    wrapped: Any = ddp.wrap_ddp(*args)
    wrapped.reducer = _KeptBuckets(wrapped.reducer)
    return wrapped


class _WithFutures:
    """``torch.distributed`` whose all-reduces have futures with values."""

    @staticmethod
    def all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
        dist.all_reduce(tensor, **kwargs)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)


def account(job: Job, rank: int) -> Account:
    """Runs two steps of one rank; the states of the optimizer exist from the first on."""
    ledger = _Ledger()
    recorders: list[_MarkingRecorder] = []

    def recorder_of(row: Sequence[Action]) -> Recorder:
        recorders.append(_MarkingRecorder(row, ledger))
        return recorders[0]

    with fake_trainer_under(job, rank, recorder_of, ledger) as built:
        (recorder,) = recorders
        worst: list[tuple[list[tuple[_Allocation, int, MemoryCategory | None]], Action, int]] = []

        def on_peak() -> None:
            states = _states(built)
            held = [(a, a.num_bytes, states.get(key)) for key, a in ledger.alive.items()]
            worst[:] = [(held, recorder.action, ledger.action_number)]

        for step in range(2):
            batch = built.batch(step)
            if step:
                ledger.peak_bytes, ledger.on_peak = 0, on_peak
            built.step(*batch)
        held, action, number = worst[0]
        by_category: Counter[MemoryCategory] = Counter()
        largest = []
        for allocation, num_bytes, state in held:
            category = state or _category(allocation, number)
            by_category[category] += num_bytes
            if state is None:
                largest.append((num_bytes, str(category), allocation.where))
    largest.sort(reverse=True)
    return Account(ledger.peak_bytes, dict(by_category), str(action), tuple(largest[:12]))


@contextmanager
def fake_trainer_under(job: Job, rank: int, recorder_of: Any, ledger: _Ledger) -> Iterator[Trainer]:
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        resize(storage, size)
        ledger.resized(storage)

    mapping = RankMapping.of(job.plan)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mapping.world_size)
    try:
        table = job.parsed_table()
        groups = make_groups(job.plan, table, rank, tied=job.model.tied_embeddings)
        with (
            patch.object(torch.UntypedStorage, "resize_", resize_and_tell),
            FakeTensorMode(),
            ledger,
            patch.object(nn.Module, "to", lambda module, **_: module),  # fp32 on the CPU is what it is already
            _real_meshes(),
            _held_sends(),
            patch.object(ddp, "dist", _WithFutures),
            patch.object(PipelineStage, "_warmup_forward_vote", lambda *_, **__: None),
            patch.object(PipelineStage, "_warmup_backward_result", lambda *_, **__: SimpleNamespace(item=lambda: 1)),
            patch.object(trainer, "wrap_ddp", _wrap_ddp),
        ):
            yield Trainer(job, rank, torch.device("cpu"), groups, recorder_of(table[mapping.place(rank).pp]))
    finally:
        dist.destroy_process_group()


def _states(trainer: Trainer) -> dict[int, MemoryCategory]:
    """What the storages of parameters, gradients and optimizer states are."""
    found: dict[int, MemoryCategory] = {}

    def note(tensor: Any, category: MemoryCategory) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, Tensor):
            found[tensor.untyped_storage()._cdata] = category

    optimizer: Any = getattr(trainer.optimizer, "_inner", trainer.optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            note(value, _C.OPTIMIZER)
    for stage in trainer.stages.values():
        for parameter in stage.parameters():
            note(parameter.grad, _C.GRADIENTS)
            if isinstance(parameter, DTensor):
                note(parameter, _C.PARAMETERS)
        for module in stage.modules():
            state = getattr(module, "_fsdp_state", None) or getattr(module, "_get_fsdp_state", lambda: None)()
            for group in getattr(state, "_fsdp_param_groups", ()):
                for parameter in group.fsdp_params:
                    note(parameter._sharded_param_data, _C.PARAMETERS)
                    note(parameter.sharded_param.grad, _C.GRADIENTS)
                    note(parameter.unsharded_accumulated_grad, _C.GRADIENTS)
                    if hasattr(parameter, "_unsharded_param"):
                        note(parameter._unsharded_param.grad, _C.GRADIENTS)
        if not any(hasattr(m, "_get_fsdp_state") for m in stage.modules()):
            for parameter in stage.parameters():
                note(parameter, _C.PARAMETERS)
    return found


def _category(allocation: _Allocation, worst: int) -> MemoryCategory:
    if allocation.maker is _C.LOGITS:
        return _C.LOGITS if _outlives(allocation) else _C.WORKSPACE
    if allocation.maker is not None:
        return allocation.maker
    return _C.ACTIVATIONS if _outlives(allocation) else _C.WORKSPACE


def _outlives(allocation: _Allocation) -> bool:
    """It is there after the action in which it was made."""
    return allocation.died is None or allocation.died > allocation.born
