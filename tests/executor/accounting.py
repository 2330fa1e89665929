"""Torch's own account of one rank's memory: its Trainer run on tensors without data, every allocation written down.

One process is any rank of a job of any size: torch's fake process group moves nothing and FakeTensorMode computes
nothing, but tensors are made, kept and let go as in a real run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor import ddp, fsdp, trainer
from executor.clock import make_clock
from executor.groups import make_groups
from executor.heartbeat import Heartbeat
from executor.recorder import Recorder
from executor.trainer import Trainer
from simplan.program.action import Action
from simplan.program.job import Job
from simplan.program.lower import Lowering, lower
from simplan.program.program import MemoryCategory, Program
from simplan.sim.memory import MemoryPeak, memory_peak
from simplan.spec.plan import RankMapping
from tests.executor.ledger import Allocation, Ledger, storage_key

__all__ = [
    "Account",
    "MakeRecorder",
    "SilentRecorder",
    "account",
    "fake_trainer",
    "predicted_peak",
    "predicted_program",
]

_C = MemoryCategory
_MADE_IN = {
    ("_fsdp_param.py", "init_all_gather_outputs"): _C.GATHERED,
    ("_fsdp_param.py", "to_accumulated_grad_if_needed"): _C.GRADIENTS,
    ("_fsdp_collectives.py", "foreach_all_gather"): _C.BUFFERS,
    ("_fsdp_collectives.py", "foreach_reduce"): _C.BUFFERS,
    ("stage.py", "_create_act_recv_info"): _C.BUFFERS,
    ("stage.py", "_create_grad_recv_info"): _C.BUFFERS,
    ("stage.py", "_allocate_recv_buffer"): _C.BUFFERS,
    ("host_link.py", "host_buffer"): _C.HOST,
    ("activation_offload.py", "fetch"): _C.ACTIVATIONS,
}
MakeRecorder = Callable[[Sequence[Action]], Recorder]


@dataclass(frozen=True, slots=True)
class Account:
    """The worst moment of a rank in a step.

    Attributes:
        total_bytes: All tensors at that moment.
        by_category: The same by what they are.
        action: During which it was, text form.
    """

    total_bytes: int
    by_category: dict[MemoryCategory, int]
    action: str


def predicted_program(job: Job, *, gloo: bool = False) -> Program:
    """What an account is compared with; all tensors are in the memory of this process, those on the host among them.

    Args:
        job: Of the account.
        gloo: With what gloo copies and DDP's second buckets, neither of which there is in the fake process group.
    """
    how = Lowering(host_waits=gloo)
    program = lower(job.model, job.training, job.plan, job.software, job.assignment, job.parsed_table(), how)
    if not gloo:
        program.rebuild_bytes.update(dict.fromkeys(program.ranks, 0))
    return replace(program, one_memory=True)


def predicted_peak(job: Job, rank: int, *, gloo: bool = False) -> MemoryPeak:
    """The peak of one rank; arguments as above."""
    return memory_peak(predicted_program(job, gloo=gloo), rank)


def account(job: Job, rank: int) -> Account:
    """Runs two steps of one rank and looks at the second: optimizer states exist from the end of the first on."""
    ledger = Ledger()
    recorders: list[_CountingRecorder] = []

    def make_recorder(row: Sequence[Action]) -> Recorder:
        recorders.append(_CountingRecorder(row, ledger))
        return recorders[0]

    worst: list[tuple[Allocation, int, MemoryCategory | None]] = []
    actions: list[Action] = []

    with fake_trainer(job, rank, make_recorder, ledger) as built:

        def on_peak() -> None:
            states = _states(built)
            worst[:] = [(held, held.num_bytes, states.get(key)) for key, held in ledger.alive.items()]
            actions[:] = [recorders[0].action]

        for step in range(2):
            batch = built.batch(step)
            ledger.peak_bytes, ledger.on_peak = 0, on_peak if step else None
            built.step(*batch)

    shapes = _Shapes.of(job)
    by_category: Counter[MemoryCategory] = Counter()
    for held, num_bytes, state in worst:
        by_category[state or shapes.category(held)] += num_bytes
    return Account(ledger.peak_bytes, dict(by_category), str(actions[0]))


@contextmanager
def fake_trainer(job: Job, rank: int, make_recorder: MakeRecorder, ledger: Ledger | None = None) -> Iterator[Trainer]:
    """A rank's trainer on fake tensors, alone in this process.

    Args:
        job: The job, whose device is the CPU.
        rank: Which rank.
        make_recorder: Makes its recorder from its row of the table.
        ledger: Counts its tensors, from the first on.
    """
    mapping = RankMapping.of(job.plan)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mapping.world_size)
    try:
        table = job.parsed_table()
        groups = make_groups(job.plan, table, rank, tied=job.model.tied_embeddings)
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode())
            if ledger is not None:
                stack.enter_context(ledger.counting())
            for change in _changes(ledger):
                stack.enter_context(change)
            yield Trainer(job, rank, torch.device("cpu"), groups, make_recorder(table[mapping.place(rank).pp]))
    finally:
        dist.destroy_process_group()


def _changes(ledger: Ledger | None) -> list[Any]:
    """What tensors without data do not do, done otherwise."""
    make_mesh, post, wait = fsdp._mesh, schedules._batch_p2p, schedules._wait_batch_p2p
    under_way: list[tuple[Any, list[Tensor]]] = []

    def mesh_of_numbers(*args: Any) -> Any:
        with unset_fake_temporarily():
            return make_mesh(*args)

    def post_and_hold(ops: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
        """Works of gloo and NCCL hold what they send until they are waited for; those of the fake group do not."""
        works, tensors = post(ops, *args, **kwargs), [op.tensor for op in ops]
        under_way.append((works, tensors))
        if ledger is not None:
            for tensor in tensors:
                ledger.alive[storage_key(tensor)].label = _C.BUFFERS
        return works

    def wait_and_let_go(works: Any) -> None:
        wait(works)
        under_way[:] = [entry for entry in under_way if entry[0] is not works]

    return [
        patch.object(nn.Module, "to", lambda module, **_: module),  # weights are fp32 and on the CPU already
        patch.object(fsdp, "_mesh", mesh_of_numbers),
        patch.object(ddp, "dist", _WithFutures),
        patch.object(trainer, "wrap_ddp", _wrap_ddp),
        patch.object(schedules, "_batch_p2p", post_and_hold),
        patch.object(schedules, "_wait_batch_p2p", wait_and_let_go),
        # ranks vote on whether shapes are known; they are
        patch.object(PipelineStage, "_warmup_forward_vote", lambda *_, **__: None),
        patch.object(PipelineStage, "_warmup_backward_result", lambda *_, **__: SimpleNamespace(item=lambda: 1)),
    ]


class _WithFutures:
    """``torch.distributed`` whose all-reduces have futures with values."""

    @staticmethod
    def all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
        dist.all_reduce(tensor, **kwargs)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)


class _KeptBuckets:
    """DDP's reducer, but it keeps its first buckets: their new order would be sent round, which takes numbers."""

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


class SilentRecorder(Recorder):
    """Without a heartbeat.

    Attributes:
        action: The one that runs or ran last.
    """

    def __init__(self, row: Sequence[Action]) -> None:
        super().__init__(row, make_clock(torch.device("cpu")), _NoHeartbeat())
        self.action = row[0]

    def begin(self, action: Action) -> None:
        super().begin(action)
        self.action = action


class _NoHeartbeat(Heartbeat):
    def __init__(self) -> None: ...

    def beat(self, *args: Any, **kwargs: Any) -> None: ...


class _CountingRecorder(SilentRecorder):
    """Every action is a period of the ledger."""

    def __init__(self, row: Sequence[Action], ledger: Ledger) -> None:
        super().__init__(row)
        self._ledger = ledger

    def begin(self, action: Action) -> None:
        super().begin(action)
        self._ledger.period += 1

    def close(self) -> None:
        super().close()
        self._ledger.period += 1


def _states(built: Trainer) -> dict[int, MemoryCategory]:
    """Storages of parameters, gradients and optimizer states."""
    found: dict[int, MemoryCategory] = {}

    def note(category: MemoryCategory, *tensors: Tensor | None) -> None:
        found.update((storage_key(tensor), category) for tensor in tensors if tensor is not None)

    optimizer: Any = getattr(built.optimizer, "_inner", built.optimizer)
    note(_C.OPTIMIZER, *(value for state in optimizer.state.values() for value in state.values()))
    for stage in built.stages.values():
        sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for parameter in stage.parameters() if not sharded else ():
            note(_C.PARAMETERS, parameter)
            note(_C.GRADIENTS, parameter.grad)
        for group in (group for module in sharded for group in module._get_fsdp_state()._fsdp_param_groups):
            for held in group.fsdp_params:
                note(_C.PARAMETERS, held._sharded_param_data)
                note(_C.GRADIENTS, held.sharded_param.grad, held.unsharded_accumulated_grad)
                note(_C.GRADIENTS, getattr(getattr(held, "_unsharded_param", None), "grad", None))
    return found


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes by which gradients of matrices, and tensors over the vocabulary, are told from others."""

    matrices: frozenset[tuple[int, ...]]
    vocab: int

    @classmethod
    def of(cls, job: Job) -> _Shapes:
        layers = job.model.layers_of(job.plan.shard)
        shapes = {p.shape for layer in layers for p in layer.parameters if len(p.shape) > 1}
        return cls(frozenset(shapes | {shape[::-1] for shape in shapes}), layers[-1].parameters[-1].shape[0])

    def category(self, held: Allocation) -> MemoryCategory:
        """Of something that is not a state between steps."""
        if held.label:
            return _C(held.label)
        for function in held.made_in:
            if function in _MADE_IN:
                return _MADE_IN[function]
        if held.shape in self.matrices and not held.outlives_its_period:
            return _C.GRADIENTS
        if held.shape and held.shape[-1] == self.vocab and held.shape not in self.matrices:
            return _C.LOGITS
        return _C.ACTIVATIONS if held.outlives_its_period else _C.WORKSPACE
