"""Recorder of a training loop that the user wrote: step times, peaks, states and the communication of one step."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from executor.distributed.mesh import local
from executor.profiling.memory import AllocationTrace, forget_peaks, peak_memory
from executor.profiling.recorder import Stamp
from executor.profiling.results import environment
from executor.record.collectives import CollectiveLog
from simplan.errors import Problem, RunError, SpecError
from simplan.io import write_whole
from simplan.program.program import MemoryCategory
from simplan.runs.recording import RankRecording, Recording
from simplan.units import counted, format_bytes, format_time

NUM_LOOKED_AT = 3
"""First steps, which are looked at and do not count. Optimizer states exist after the first, and DDP's final buckets
from the second on: communication is listed in the last of them."""

_C = MemoryCategory
_active: list[LoopRecorder] = []


@contextmanager
def record(
    file: str | os.PathLike[str],
    *,
    samples_per_step: int | None = None,
    module: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    look: bool = True,
) -> Iterator[LoopRecorder]:
    """Records the steps of the block, for ``simplan compare PREDICTION FILE``.

    Every rank enters and leaves the block, after ``init_process_group`` and before ``destroy_process_group``. An
    exception in the block passes through, and nothing is written.

    Args:
        file: JSON file that rank 0 writes at the end; see ``simplan.runs.recording.Recording``.
        samples_per_step: Samples of all ranks between two updates, for the throughput and to check the batch.
        module: Module of this rank; its parameters are compared, and on a CPU its tensors.
        optimizer: Optimizer of this rank, whose states are compared.
        device: Device of this rank, ``cpu`` or ``cuda``; None for that of the module, else CUDA if the process uses it.
        look: False to count all steps and to look at none: for loops that a torch profiler traces, of which a process
            has one at a time. Communication and, on a CPU, allocated bytes are then unknown.

    Yields:
        The recorder, whose ``step()`` the loop calls after every update.

    Raises:
        SpecError: The file cannot be written there, an argument is wrong, or another recording or profiler is open.
        RunError: At the end, too few steps were recorded, ranks differ in their number, or the process group is gone.
    """
    recorder = LoopRecorder(
        file, samples_per_step=samples_per_step, module=module, optimizer=optimizer, device=device, look=look
    )
    recorder.start()
    try:
        yield recorder
    except BaseException:
        recorder.cancel()
        raise
    recorder.finish()


class LoopRecorder:
    """Recorder of one loop. ``record`` makes it; callbacks of trainers call it themselves.

    A step costs the host one time stamp, on CUDA an event on the current stream: nothing is synchronized.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        samples_per_step: int | None = None,
        module: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
        look: bool = True,
    ) -> None:
        self._file = Path(file)
        self._samples_per_step = samples_per_step
        self._module, self._optimizer = module, optimizer
        self._device = _device_of(device, module)
        self._num_looked_at = NUM_LOOKED_AT if look else 0
        self._looking = ExitStack()
        self._trace: AllocationTrace | None = None
        self._log: CollectiveLog | None = None
        self._states: dict[MemoryCategory, int] = {}
        self._held_bytes = 0
        self._steps: list[tuple[Stamp, Stamp]] = []
        self._begin: Stamp = 0.0
        self._has_group = False
        _check(self._file, samples_per_step)

    @property
    def num_steps(self) -> int:
        """Steps so far, those that do not count included."""
        return len(self._steps)

    def start(self) -> None:
        """Begins the recording and its first step; forgets the device's peaks of before.

        Raises:
            SpecError: Another recording is open in this process, or a profiler, of which torch has one at a time.
        """
        if _active:
            rule = f"begins inside of the recording {_active[0]._file}, and a process has one at a time"
            raise SpecError(Problem(field="record", value=str(self._file), rule=rule, fix="leave that one first"))
        if self._traces and torch._C._autograd._profiler_enabled():
            rule, fix = (
                "traces allocations, and a torch profiler is on already",
                "use look=False, or leave the profiler",
            )
            raise SpecError(Problem(field="record", value=str(self._file), rule=rule, fix=fix))
        _active.append(self)
        self._has_group = dist.is_initialized()
        self._held_bytes = self._num_module_bytes() + sum(_bytes_of(self._optimizer_states()))
        forget_peaks(self._device)
        if self._traces:
            self._trace = self._looking.enter_context(AllocationTrace())
        self.begin_step()

    def begin_step(self) -> None:
        """Begins a step here, after work that is none: an evaluation, or a checkpoint. Else a step follows the last."""
        self._begin = _stamp(self._device)

    def step(self) -> None:
        """Ends a step; to be called after every update of the optimizer."""
        if self not in _active:
            rule = "was called outside of its recording"
            raise SpecError(Problem(field="step()", rule=rule, fix="call it inside of `with record(...) as run:`"))
        end = _stamp(self._device)
        self._steps.append((self._begin, end))
        if len(self._steps) == self._num_looked_at - 1:
            self._log = self._looking.enter_context(CollectiveLog())
            if self._optimizer is not None:
                hook = _innermost(self._optimizer).register_step_pre_hook(self._see_gradients)
                self._looking.callback(hook.remove)
        if len(self._steps) == self._num_looked_at:
            self._looking.close()
            forget_peaks(self._device)
            end = _stamp(self._device)
        self._begin = end

    def cancel(self) -> None:
        """Ends the recording without a file."""
        self._looking.close()
        if self in _active:
            _active.remove(self)

    def finish(self) -> None:
        """Ends the recording: gathers those of all ranks, and writes the file on rank 0.

        Raises:
            RunError: See ``record``; on every rank alike.
        """
        self.cancel()
        recordings, nums_steps = self._gathered()
        _check_steps(nums_steps, self._num_looked_at, self._file)
        if self._rank != 0:
            return
        times_s = [statistics.fmean(step) for step in zip(*(rank.step_times_s for rank in recordings), strict=True)]
        cuda = self._device.type == "cuda"
        num_local = sum(rank.node == recordings[0].node for rank in recordings)
        facts = environment(num_local, cuda=cuda) | {"num_nodes": len({rank.node for rank in recordings})}
        if not cuda:
            facts["threads_per_rank"] = torch.get_num_threads()
        recording = Recording(
            step_times_s=tuple(times_s),
            first_step=self._num_looked_at + 1,
            samples_per_step=self._samples_per_step,
            ranks=tuple(recordings),
            environment=facts,
        )
        write_whole(self._file, recording.model_dump_json(indent=1))
        _say(recording, self._file)

    def _rank_recording(self) -> RankRecording:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        memory, has_looked = peak_memory(self._device), len(self._steps) >= self._num_looked_at > 0
        if self._trace is not None and has_looked:
            allocated_bytes = self._held_bytes + self._trace.peak_bytes()
            memory = memory.model_copy(update={"allocated_bytes": allocated_bytes})
        states = self._states
        if self._module is not None:
            states = {_C.PARAMETERS: sum(_bytes_of(self._module.parameters())), **states}
        if self._optimizer is not None:
            states = {**states, _C.OPTIMIZER: sum(_bytes_of(self._optimizer_states()))}
        return RankRecording(
            rank=self._rank,
            node=socket.gethostname(),
            step_times_s=tuple(_seconds(*step) for step in self._steps[self._num_looked_at :]),
            peak_memory=memory,
            states_bytes=states,
            collectives=tuple(self._log.issued) if self._log is not None and has_looked else None,
        )

    @property
    def _traces(self) -> bool:
        """True if allocations of the first steps are traced."""
        return self._num_looked_at > 0 and self._device.type == "cpu" and self._module is not None

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _gathered(self) -> tuple[list[RankRecording], list[int]]:
        """Recordings of all ranks, in order, and their numbers of steps."""
        if not dist.is_initialized():
            if self._has_group or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise RunError(
                    f"{self._file} is not written: at its end there is no process group to gather the recordings of "
                    "all ranks; leave it before destroy_process_group, and enter it after init_process_group"
                )
            return [self._rank_recording()], [len(self._steps)]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self._rank_recording().model_dump_json(), len(self._steps)))
        texts, nums_steps = zip(*gathered, strict=True)
        return [RankRecording.model_validate_json(text) for text in texts], list(nums_steps)

    def _see_gradients(self, *_: object) -> None:
        if self._module is not None:
            gradients = (parameter.grad for parameter in self._module.parameters() if parameter.grad is not None)
            self._states[_C.GRADIENTS] = sum(_bytes_of(gradients))

    def _num_module_bytes(self) -> int:
        """Bytes of the module's tensors, gradients included."""
        if self._module is None:
            return 0
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return sum(_bytes_of([*parameters, *gradients, *self._module.buffers()]))

    def _optimizer_states(self) -> Iterator[Tensor]:
        """States on the device: of CUDA devices, Adam's numbers of steps are on the host."""
        if self._optimizer is not None:
            for leaf in tree_leaves(dict(_innermost(self._optimizer).state)):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                    yield leaf


def _device_of(device: torch.device | str | None, module: nn.Module | None) -> torch.device:
    """Device to record on.

    Raises:
        SpecError: It is neither a CPU nor a CUDA device.
    """
    if device is None:
        first = None if module is None else next(module.parameters(), None)
        usual = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
        device = usual if first is None else first.device
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise SpecError(Problem(field="device", value=str(device), rule="must be cpu or cuda"))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _check(file: Path, samples_per_step: int | None) -> None:
    """Raise an error for what would be noticed only at the end of a training."""
    problems = []
    if file.suffix != ".json":
        problems.append(Problem(field="file", value=str(file), rule="must end in .json"))
    elif not file.parent.is_dir():
        problems.append(Problem(field="file", value=str(file), rule="is in a folder that does not exist"))
    if samples_per_step is not None and samples_per_step < 1:
        rule, fix = "must be 1 or more", "give the samples of all ranks between two updates"
        problems.append(Problem(field="samples_per_step", value=str(samples_per_step), rule=rule, fix=fix))
    if problems:
        raise SpecError(problems)


def _check_steps(nums_steps: Sequence[int], num_looked_at: int, file: Path) -> None:
    """Raise an error unless every rank took the same number of steps, one of which counts."""
    first, *others = nums_steps
    other = next((rank for rank, number in enumerate(others, 1) if number != first), None)
    if other is not None:
        raise RunError(
            f"{file} is not written: ranks recorded different numbers of steps, {first} on rank 0 and "
            f"{nums_steps[other]} on rank {other}; call step() once after every update, on every rank"
        )
    if first == 0:
        raise RunError(f"{file} is not written: no step was recorded; call step() after every update of the optimizer")
    if first <= num_looked_at:
        raise RunError(
            f"{file} is not written: {counted(first, 'step')} recorded, and the first {num_looked_at} do not count; "
            f"record {num_looked_at + 1} or more, better {num_looked_at + 20}"
        )


def _stamp(device: torch.device) -> Stamp:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Stamp, end: Stamp) -> float:
    """Seconds between two stamps that have happened; between events of CUDA, as the device counts them."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) * 1e-3


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's, or of ZeroRedundancyOptimizer."""
    while inner := getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None):
        optimizer = inner
    return optimizer


def _bytes_of(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Bytes of tensors; of a DTensor, this rank's shard."""
    return (local(tensor.detach()).nbytes for tensor in tensors)


def _say(recording: Recording, file: Path) -> None:
    times_s = recording.step_times_s
    peaks = [max(value or 0 for _, value in rank.peak_memory) for rank in recording.ranks]
    sys.stderr.write(
        f"simplan: step time {format_time(statistics.median(times_s))}, median of {counted(len(times_s), 'step')}; "
        f"peak memory {format_bytes(max(peaks))} on rank {peaks.index(max(peaks))}; wrote {file}\n"
    )
