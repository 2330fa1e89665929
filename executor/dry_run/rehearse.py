"""Dry run of one rank of a job of any size, on the one device here or on none.

On a real device the rank's own kernels and allocator run, and no peer exists. FakeTensorMode computes nothing, but
allocates, saves and frees tensors as in a real run: so the memory of a rank, and what it issues, can be determined on
any machine, in seconds and without allocating it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from executor.checks import check_rehearsal
from executor.distributed.mesh import ParallelDims, RecordedGroup
from executor.distributed.precision import allow_tf32
from executor.dry_run.memory_tracker import NUM_STEPS, MemoryTracker
from executor.models.model import Stage
from executor.profiling.memory import forget_peaks, peak_memory
from executor.profiling.recorder import Recorder, StepRecord
from executor.profiling.results import environment
from executor.train.trainer import Trainer
from executor.worker import use_device
from simplan.errors import RunError
from simplan.runs.measurement import ActionTime, IssuedKind, PeakMemory, Rehearsal
from simplan.runs.run_spec import RunSpec

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""

_CPU = torch.device("cpu")
_NO_PEERS: dict[str, str | int | float | None] = {"backend": "fake"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_c10d = torch.ops._c10d_functional
_FUNCTIONAL_COLLECTIVES: dict[Any, IssuedKind] = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
}


def rehearse(job: RunSpec, rank: int, *, fake: bool, on_progress: Progress | None = None) -> Rehearsal:
    """Runs one rank alone in this process.

    Args:
        job: The job; its device is used unless ``fake``.
        fake: Run on fake tensors, without compute or allocations.

    Raises:
        SpecError, ProgramError: The job cannot be rehearsed here; nothing was started.
        RunError: The device has too little memory; the error names the action.
    """
    check_rehearsal(job, rank, fake=fake)
    if fake:
        return _fake(job, rank)
    return _real(job, rank, on_progress or (lambda done, of: None))


def _fake(job: RunSpec, rank: int) -> Rehearsal:
    tracker = MemoryTracker(job, rank, _CPU)
    with fake_rank(job, rank, tracker) as trainer:
        peak = tracker.run_steps(trainer)
        record = tracker.record(*tracker.end_step(), losses=())
    return Rehearsal(
        job=job,
        rank=rank,
        fake=True,
        peak_memory=PeakMemory(allocated_bytes=peak.total_bytes),
        peak_by_category=peak.by_category,
        peak_action=peak.action,
        collectives=record.collectives,
        environment=environment(1, cuda=False) | _NO_PEERS | {"device": "none: tensors without data"},
    )


def _real(job: RunSpec, rank: int, on_progress: Progress) -> Rehearsal:
    num_steps = NUM_STEPS + job.num_all_steps
    device = use_device(job.device, 1 if torch.cuda.is_available() else job.plan.num_devices)
    allow_tf32(allowed=job.training.precision == "tf32")
    recorder = MemoryTracker(job, rank, device)
    try:
        with as_single_rank(rank, job, recorder, device.type) as dims:
            exchanging = {peers.ranks for peers in (dims.tp, dims.cp, dims.ep) if peers.size > 1}
            with recorder.storages.counting():
                trainer = Trainer(job, rank, device, dims, recorder)
                forget_peaks(device)
                peak_point = recorder.run_steps(trainer)
            on_progress(NUM_STEPS, num_steps)
            records = []
            for step in range(NUM_STEPS, num_steps):
                records.append(_timed_step(trainer, recorder, step))
                on_progress(step + 1, num_steps)
            peak = peak_memory(device)
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        raise RunError(f"rank {rank} needs more memory than this device has, in {recorder.current}: {said}") from None
    if device.type == "cpu":  # without an allocator that counts
        peak = peak.model_copy(update={"allocated_bytes": peak_point.total_bytes})
    return Rehearsal(
        job=job,
        rank=rank,
        fake=False,
        peak_memory=peak,
        peak_by_category=peak_point.by_category,
        peak_action=peak_point.action,
        actions=_action_times(records[-job.num_steps :], exchanging if device.type == "cuda" else None),
        collectives=records[-1].collectives,
        environment=environment(job.plan.num_devices, cuda=device.type == "cuda") | _NO_PEERS,
    )


def _timed_step(trainer: Trainer, recorder: Recorder, step: int) -> StepRecord:
    batch = trainer.batch(step)
    recorder.begin_step(step)
    losses = trainer.step(*batch)
    start_s, end_s = recorder.end_step()
    return recorder.record(start_s, end_s, list(map(float, losses)))


def _action_times(
    records: Sequence[StepRecord], exchanging: Collection[tuple[int, ...]] | None
) -> tuple[ActionTime, ...]:
    """Durations of each action, without the time of the fake process group inside of its span.

    Args:
        exchanging: Groups whose collectives run on the compute stream; None for all groups. On CUDA, data-parallel
            collectives run on separate streams.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for record in records:
        moved = [
            (c.start_s, c.end_s)
            for c in record.collectives
            if c.end_s is not None and c.kind in _COLLECTIVES and (exchanging is None or c.ranks in exchanging)
        ]
        for span in record.spans:
            inside = [end_s - start_s for start_s, end_s in moved if span.start_s <= start_s and end_s <= span.end_s]
            seconds[span.action].append(max(0.0, span.end_s - span.start_s - sum(inside)))
    return tuple(ActionTime(action=action, seconds=tuple(times_s)) for action, times_s in seconds.items())


@contextmanager
def as_single_rank(rank: int, job: RunSpec, recorder: Recorder, device_type: str = _CPU.type) -> Iterator[ParallelDims]:
    """Context in which this process is one rank of the job with a fake process group; yields the rank's mesh axes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.plan.num_devices)
    try:
        yield ParallelDims.of(job, rank, recorder, device_type=device_type, alone=True)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_rank(job: RunSpec, rank: int, recorder: Recorder) -> Iterator[Trainer]:
    """Context with a rank's trainer on fake tensors; the trainer may only be used inside of the block.

    Args:
        job: The job, whose device is the CPU.
        recorder: Recorder of the rank; a ``MemoryTracker`` tracks all tensors of the rank.
    """
    counting = recorder.storages.counting() if isinstance(recorder, MemoryTracker) else nullcontext()
    training = job.training.model_copy(update={"data": "random"})  # samples that can be learned depend on numbers
    job = job.model_copy(update={"training": training})
    with (
        as_single_rank(rank, job, recorder) as dims,
        _meshes_with_numbers(),
        FakeTensorMode(),
        counting,
        _Listening(recorder),
    ):
        yield _FakeTrainer(job, rank, _CPU, dims, recorder)


@contextmanager
def _meshes_with_numbers() -> Iterator[None]:
    """Lets FSDP join its mesh and a DTensor's mesh, whose ranks are real numbers while all other tensors are fake."""
    join = DeviceMesh._concatenate

    def join_numbers(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(meshes)

    DeviceMesh._concatenate = staticmethod(join_numbers)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign]


class _Listening(TorchDispatchMode):
    """Records DTensor's collectives, which do not reach a process group for fake tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come next
        result = func(*args, **(kwargs or {}))
        if (kind := _FUNCTIONAL_COLLECTIVES.get(func)) is not None:
            whole = result if kind == "all_gather" else args[0]
            group = _resolve_process_group(args[-1])
            assert isinstance(group, RecordedGroup)
            self._recorder.complete(self._recorder.issue(kind, group.ranks, whole.nbytes))
        return result


class _FakeTrainer(Trainer):
    def _wrap(self, stage: Stage) -> nn.Module:
        module = super()._wrap(stage)
        if isinstance(module, DistributedDataParallel):
            module.reducer = _KeptBuckets(module.reducer)  # type: ignore[assignment]
        return module


class _KeptBuckets:
    """DDP's reducer without rebuilt buckets: rebuilding broadcasts their order, which needs real tensors."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
