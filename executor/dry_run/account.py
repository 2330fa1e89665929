"""Memory of a rank at its peak point, by category, from tracking every storage that its steps allocate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from executor.launch.watchdog import Unwatched
from executor.profiling.ledger import Allocation, Ledger, storage_key
from executor.profiling.recorder import Clock, Recorder
from executor.train.trainer import Trainer
from simplan.program.action import Action
from simplan.program.program import MemoryCategory
from simplan.runs.run_spec import RunSpec

__all__ = ["Account", "CountingRecorder", "counted_steps"]

_C = MemoryCategory
_MADE_IN = {
    ("_fsdp_param.py", "init_all_gather_outputs"): _C.GATHERED,
    ("_fsdp_param.py", "to_accumulated_grad_if_needed"): _C.GRADIENTS,
    ("_fsdp_collectives.py", "foreach_all_gather"): _C.BUFFERS,
    ("_fsdp_collectives.py", "foreach_reduce"): _C.BUFFERS,
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

_NUM_STEPS = 2  # optimizer states exist from the end of the first on


@dataclass(frozen=True, slots=True)
class Account:
    """Peak point of a rank's memory in a step.

    Attributes:
        total_bytes: Bytes of all tensors at the peak point, including tensors on the host.
        by_category: ``total_bytes`` by memory category.
        action: Action at the peak point, in text form.
    """

    total_bytes: int
    by_category: dict[MemoryCategory, int]
    action: str


class CountingRecorder(Recorder):
    """Recorder that starts a new period of a ledger at every action and at every gap between two actions.

    Args:
        row: The rank's actions.
        clock: See ``Recorder``.
        ledger: Storage tracker.
    """

    def __init__(self, row: Sequence[Action], clock: Clock, ledger: Ledger) -> None:
        super().__init__(row, clock, Unwatched())
        self._ledger = ledger

    def begin(self, action: Action) -> None:
        """See ``Recorder``; also starts a new period."""
        super().begin(action)
        self._ledger.period += 1

    def close(self) -> None:
        """See ``Recorder``; also starts a new period."""
        super().close()
        self._ledger.period += 1


def counted_steps(job: RunSpec, built: Trainer, recorder: Recorder, ledger: Ledger) -> Account:
    """Runs two steps of a trainer that was built inside of a ledger, and returns the peak point of the second step.

    Args:
        job: Job of the trainer.
        built: The trainer.
        recorder: Recorder of the trainer.
        ledger: Ledger that tracks the trainer's tensors.
    """
    worst: list[tuple[Allocation, int, MemoryCategory | None]] = []
    actions: list[Action] = []

    def on_peak() -> None:
        known = _known(built, on_host=job.plan.offload_optimizer)
        worst[:] = [(held, held.num_bytes, known.get(key)) for key, held in ledger.alive.items()]
        actions[:] = [recorder.current]

    for step in range(_NUM_STEPS):
        batch = built.batch(step)
        ledger.peak_bytes, ledger.on_peak = 0, on_peak if step else None
        recorder.begin_step(step)
        built.step(*batch)
    ledger.on_peak = None
    shapes = _Shapes.of(job)
    by_category: Counter[MemoryCategory] = Counter()
    for held, num_bytes, category in worst:
        by_category[category or shapes.category(held)] += num_bytes
    return Account(ledger.peak_bytes, dict(by_category), str(actions[0]))


def _known(built: Trainer, *, on_host: bool) -> dict[int, MemoryCategory]:
    """Storages of parameters, gradients, optimizer states and tensors that are being sent.

    Args:
        built: The trainer.
        on_host: Optimizer states and FSDP's shards are on the host.
    """
    weights, gradients, states = [_C.HOST] * 3 if on_host else (_C.PARAMETERS, _C.GRADIENTS, _C.OPTIMIZER)
    found: dict[int, MemoryCategory] = {}

    def note(category: MemoryCategory, *tensors: Tensor | None) -> None:
        found.update((storage_key(tensor), category) for tensor in tensors if tensor is not None)

    note(_C.BUFFERS, *built.sent)
    for optimizer in built.local_optimizers:
        note(states, *(value for state in optimizer.state.values() for value in state.values()))
    for stage in built.stages.values():
        sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        gathered = set()
        for held in (held for module in sharded for group in _parameter_groups(module) for held in group.fsdp_params):
            whole = getattr(held, "_unsharded_param", None)
            gathered.add(id(whole))
            gathered.add(id(held.sharded_param))
            note(weights, held._sharded_param_data)
            note(gradients, held.sharded_param.grad)
            note(_C.GRADIENTS, held.unsharded_accumulated_grad, getattr(whole, "grad", None))
        for parameter in stage.parameters():
            if id(parameter) not in gathered:
                note(_C.PARAMETERS, parameter)
                note(_C.GRADIENTS, parameter.grad)
    return found


def _parameter_groups(module: Any) -> list[Any]:
    """FSDP's own, of which a module has one up to torch 2.12 and a list from 2.13 on."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes that identify gradients of matrices, and tensors over the vocabulary."""

    matrices: frozenset[tuple[int, ...]]
    vocab: int

    @classmethod
    def of(cls, job: RunSpec) -> _Shapes:
        layers = job.model.layers_of(job.plan.shard)
        shapes = {p.shape for layer in layers for p in layer.parameters if len(p.shape) > 1}
        return cls(frozenset(shapes | {shape[::-1] for shape in shapes}), layers[-1].parameters[-1].shape[0])

    def category(self, held: Allocation) -> MemoryCategory:
        """Memory category of a storage that is not persistent state."""
        for function in held.made_in:
            if function in _MADE_IN:
                return _MADE_IN[function]
        if held.shape in self.matrices and not held.outlives_its_period:
            return _C.GRADIENTS
        if held.shape and held.shape[-1] == self.vocab and held.shape not in self.matrices:
            return _C.LOGITS
        return _C.ACTIVATIONS if held.outlives_its_period else _C.WORKSPACE
