"""Memory of a rank at its peak point, by category, from tracking every storage that its steps allocate."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from executor.distributed.mesh import local
from executor.launch.watchdog import Unwatched
from executor.profiling.recorder import Recorder, make_clock
from executor.train.trainer import Trainer
from simplan.plan.plan import RankMapping
from simplan.program.action import Action
from simplan.program.program import MemoryCategory
from simplan.runs.run_spec import RunSpec

_C = MemoryCategory
_MADE_IN = {
    ("_fsdp_param.py", "init_all_gather_outputs"): _C.GATHERED,
    ("_fsdp_param.py", "to_accumulated_grad_if_needed"): _C.GRADIENTS,
    ("_fsdp_collectives.py", "foreach_all_gather"): _C.BUFFERS,
    ("_fsdp_collectives.py", "foreach_reduce"): _C.BUFFERS,
    ("distributed.py", "_ddp_init_helper"): _C.BUFFERS,
    ("stage.py", "_setup_forward_recv_info"): _C.BUFFERS,
    ("stage.py", "_setup_backward_recv_info"): _C.BUFFERS,
    ("stage.py", "_create_act_recv_info"): _C.BUFFERS,
    ("stage.py", "_create_grad_recv_info"): _C.BUFFERS,
    ("adam.py", "_multi_tensor_adam"): _C.WORKSPACE,
    ("float8_training_tensor.py", "forward"): _C.WORKSPACE,
    ("activation_offload.py", "host_buffer"): _C.HOST,
    ("activation_offload.py", "fetch"): _C.ACTIVATIONS,
}
"""Memory category by the function that allocated a storage, as (file name, function) in torch or simplan."""

NUM_STEPS = 2
"""Steps until the peak point: optimizer states exist from the end of the first step on."""


_SHAPES_ONLY = {"_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"}
"""Functions in which DTensor derives shapes of unsharded tensors, which a real run does not allocate."""


@dataclass(slots=True, eq=False)
class Allocation:
    """One storage.

    Attributes:
        shape: Shape of the tensor that the storage was allocated for.
        callers: Code of the functions that allocated the storage, innermost first.
        born, died: ``StorageTracker.period`` of the allocation and of the release; None while the storage is alive.
        is_gradient: The storage was found to be a gradient of a weight.
    """

    num_bytes: int
    shape: tuple[int, ...]
    callers: tuple[CodeType, ...]
    born: int
    died: int | None = None
    is_gradient: bool = False

    @property
    def made_in(self) -> Iterator[tuple[str, str]]:
        """Functions that allocated the storage, innermost first, as (file name, function)."""
        return map(_function, self.callers)

    @property
    def outlives_its_period(self) -> bool:
        """True when the storage is alive after the period of its allocation."""
        return self.died is None or self.died > self.born


class StorageTracker(TorchDispatchMode):
    """Counts bytes of storages that are allocated while the mode is active.

    Attributes:
        total_bytes, peak_bytes: Current bytes, and the largest number so far.
        period: Number of the current period; its user increments it.
        on_peak: Called at every new peak; None for no call.
        alive: Live storages, by ``_storage_key``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = self.peak_bytes = self.period = 0
        self.on_peak: Callable[[], None] | None = None
        self.alive: dict[int, Allocation] = {}
        self._storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the tensors inside of DTensors and of quantized ones come next
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which allocations are tracked."""
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if self._storages.get(storage._cdata) is storage:
                self._resized(self.alive[storage._cdata], storage.nbytes())

        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._storages.get(key) is storage:
            return
        callers = _callers()
        if any(code.co_name in _SHAPES_ONLY for code in callers):
            return
        self._storages[key] = storage
        allocation = self.alive[key] = Allocation(0, tuple(tensor.shape), callers, self.period)
        weakref.finalize(storage, self._gone, key, allocation)
        self._resized(allocation, storage.nbytes())

    def _resized(self, allocation: Allocation, num_bytes: int) -> None:
        self.total_bytes += num_bytes - allocation.num_bytes
        allocation.num_bytes = num_bytes
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes
            if self.on_peak is not None:
                self.on_peak()

    def _gone(self, key: int, allocation: Allocation) -> None:
        self.total_bytes -= allocation.num_bytes
        allocation.died = self.period
        if self.alive.get(key) is allocation:
            del self.alive[key]


def _storage_key(tensor: Tensor) -> int:
    """Key of a tensor's storage, equal for tensors that share it; for a DTensor, of the local tensor."""
    key: int = local(tensor).untyped_storage()._cdata
    return key


def _callers() -> tuple[CodeType, ...]:
    """Call stack above the caller, innermost first; code objects only, as this runs for every tensor."""
    codes: list[CodeType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(codes)


@cache
def _function(code: CodeType) -> tuple[str, str]:
    return Path(code.co_filename).name, code.co_name


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """Peak point of a rank's memory in a step.

    Attributes:
        total_bytes: Bytes of all tensors at the peak point, including tensors on the host.
        by_category: ``total_bytes`` by memory category.
        action: Action at the peak point, in text form.
    """

    total_bytes: int
    by_category: dict[MemoryCategory, int]
    action: str


class MemoryTracker(Recorder):
    """Recorder that starts a new period of a storage tracker at every action and at every gap between two actions."""

    def __init__(self, job: RunSpec, rank: int, device: torch.device) -> None:
        row = job.parsed_table()[RankMapping.of(job.plan).place(rank).pp]
        super().__init__(row, make_clock(device), Unwatched())
        self._job = job
        self.storages = StorageTracker()

    def begin(self, action: Action) -> None:
        """See ``Recorder``; also starts a new period."""
        super().begin(action)
        self.storages.period += 1

    def close(self) -> None:
        """See ``Recorder``; also starts a new period."""
        super().close()
        self.storages.period += 1

    def run_steps(self, trainer: Trainer) -> MeasuredPeak:
        """Runs steps of a trainer that was built while ``storages`` counted; returns the last one's peak point."""
        job, storages = self._job, self.storages
        worst: list[tuple[Allocation, int, MemoryCategory | None]] = []
        actions: list[Action] = []

        def on_peak() -> None:
            known = _known(trainer, on_host=job.plan.offload_optimizer)
            worst[:] = [(held, held.num_bytes, known.get(key)) for key, held in storages.alive.items()]
            actions[:] = [self.current]

        for step in range(NUM_STEPS):
            if step and job.model.captured is not None:  # the first step has made FSDP's unsharded parameters
                self._watch_gradients(trainer)
            batch = trainer.batch(step)
            storages.peak_bytes, storages.on_peak = 0, on_peak if step else None
            self.begin_step(step)
            trainer.step(*batch)
        storages.on_peak = None
        shapes = _Shapes.of(job)
        by_category: Counter[MemoryCategory] = Counter()
        for held, num_bytes, category in worst:
            by_category[category or shapes.category(held)] += num_bytes
        return MeasuredPeak(storages.peak_bytes, dict(by_category), str(actions[0]))

    def _watch_gradients(self, trainer: Trainer) -> None:
        """Notes each gradient of a weight before it is added to those of other microbatches."""

        def comes(gradient: Tensor) -> None:
            if (held := self.storages.alive.get(_storage_key(gradient))) is not None:
                held.is_gradient = True

        for stage in trainer.stages.values():
            unsharded = (getattr(held, "_unsharded_param", None) for held in _fsdp_parameters(stage))
            for parameter in (*stage.parameters(), *unsharded):
                if parameter is not None and parameter.requires_grad:
                    parameter.register_hook(comes)


def _known(trainer: Trainer, *, on_host: bool) -> dict[int, MemoryCategory]:
    """Storages of parameters, gradients, optimizer states and tensors that are being sent.

    Args:
        on_host: Optimizer states and FSDP's shards are on the host.
    """
    weights, gradients, states = [_C.HOST] * 3 if on_host else (_C.PARAMETERS, _C.GRADIENTS, _C.OPTIMIZER)
    categories: dict[int, MemoryCategory] = {}

    def note(category: MemoryCategory, *tensors: Tensor | None) -> None:
        categories.update((_storage_key(tensor), category) for tensor in tensors if tensor is not None)

    note(_C.BUFFERS, *trainer.sent)
    for optimizer in trainer.local_optimizers:
        note(states, *(value for state in optimizer.state.values() for value in state.values()))
    second = [] if trainer.second_model is None else [trainer.second_model]
    for module in [*trainer.stages.values(), *second]:
        gathered = set()
        for held in _fsdp_parameters(module):
            whole = getattr(held, "_unsharded_param", None)
            gathered.add(id(whole))
            gathered.add(id(held.sharded_param))
            note(weights, held._sharded_param_data)
            note(gradients, held.sharded_param.grad)
            note(_C.GRADIENTS, held.unsharded_accumulated_grad, getattr(whole, "grad", None))
        for parameter in module.parameters():
            if id(parameter) not in gathered:
                note(_C.PARAMETERS, parameter)
                note(_C.GRADIENTS, parameter.grad)
    return categories


def _fsdp_parameters(whole: nn.Module) -> Iterator[Any]:
    """FSDP's own objects for the parameters of a stage, or of a second model."""
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            yield from (held for group in _parameter_groups(module) for held in group.fsdp_params)


def _parameter_groups(module: Any) -> list[Any]:
    """FSDP's own, of which a module has one up to torch 2.12 and a list from 2.13 on."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes that identify gradients of matrices, and tensors over the vocabulary; none of a captured module."""

    matrices: frozenset[tuple[int, ...]] = frozenset()
    vocab: int = -1

    @classmethod
    def of(cls, job: RunSpec) -> _Shapes:
        if job.model.captured is not None:
            return cls()
        layers = job.model.layers_of(job.plan.shard)
        shapes = {p.shape for layer in layers for p in layer.parameters if len(p.shape) > 1}
        vocab = next((p.shape[0] for p in reversed(layers[-1].parameters) if p.shape), 0)
        return cls(frozenset(shapes | {shape[::-1] for shape in shapes}), vocab)

    def category(self, held: Allocation) -> MemoryCategory:
        """Memory category of a storage that is not persistent state."""
        for function in held.made_in:
            if function in _MADE_IN:
                return _MADE_IN[function]
        if held.is_gradient or (held.shape in self.matrices and not held.outlives_its_period):
            return _C.GRADIENTS
        if held.shape and held.shape[-1] == self.vocab and held.shape not in self.matrices:
            return _C.LOGITS
        return _C.ACTIVATIONS if held.outlives_its_period else _C.WORKSPACE
