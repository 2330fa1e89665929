"""The first cause of ranks that ended early, as one sentence that names rank and cause."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from executor.launch.rank import unfinished_error_file
from executor.launch.watchdog import Beat, Beats, RankState, is_action
from executor.profiling.memory import process_bytes
from simplan.errors import RunError
from simplan.program.action import Action
from simplan.units import format_bytes

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "timed out",
    "NCCL",
    "PeerStopped",
)
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_OUT_OF_MEMORY_IN_NCCL = re.compile(r"(Cuda failure|CUDA error)[^\n]{0,40}out of memory")
"""NCCL makes communicators in the first step, when memory is fullest: ``Cuda failure 2 'out of memory'``."""
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.ASCII)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class RanksError(RunError):
    """Ranks of this node failed.

    Attributes:
        is_consequence: The cause may be on another node.
    """

    def __init__(self, sentence: str, *, is_consequence: bool = False) -> None:
        super().__init__(sentence)
        self.is_consequence = is_consequence


class RunOverError(RanksError):
    """The run has ended while this node had no ranks: it was a spare, or came too late."""


class RankOutOfMemoryError(RunError):
    """A rank ran out of memory; the error compares its memory with the prediction."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Traces of the ranks of a node that have ended.

    Attributes:
        beats: Last heartbeats.
        error_files, logs: torchrun's, by global rank.
        exits: Exit codes of failed ranks, negative for a signal; None before a restart, where torchrun has none.
        kernel_killed: Linux has killed processes of this host for lack of memory since the ranks started.
        predicted_bytes: Predicted peak memory by rank; empty without a prediction.
    """

    beats: Beats
    error_files: Mapping[int, Path]
    logs: Mapping[int, Path]
    exits: Mapping[int, int] | None = None
    kernel_killed: bool = False
    predicted_bytes: tuple[int, ...] = ()
    _errors: dict[int, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads time and message from the error files."""
        for rank, file in self.error_files.items():
            try:
                message = json.loads(file.read_text())["message"]
            except (OSError, ValueError, KeyError):
                continue
            text = message if isinstance(message, str) else str(message.get("message"))
            self._errors[rank] = (file.stat().st_mtime, text)

    def cause(self) -> RanksError:
        """Finds the first cause.

        A signal comes first, except SIGTERM, which torchrun sends to the other ranks when one has failed. Errors about
        communication come after ranks that left silently, because their peers raise such errors.
        """
        exits = self._silent() if self.exits is None else self.exits
        # a rank that was ended while it wrote its error had that error because of another rank
        terminated = [
            rank
            for rank in sorted(exits)
            if exits[rank] in (-signal.SIGTERM, 128 + signal.SIGTERM) or self._was_writing(rank)
        ]
        by_time = sorted(self._errors, key=lambda rank: self._errors[rank][0])
        lost_peer = [rank for rank in by_time if _is_about_a_peer(self._errors[rank][1])]
        others = [rank for rank in sorted(exits) if rank not in terminated]
        causes = [
            *(self._killed(rank, exits[rank]) for rank in others if exits[rank] < 0),
            *(self._raised(rank) for rank in by_time if rank not in lost_peer),
            *(self._left(rank, exits[rank]) for rank in others if exits[rank] > 0 and rank not in self._errors),
        ]
        if causes:
            return RanksError(causes[0])
        consequences = [
            *(self._raised(rank) for rank in lost_peer),
            *(f"rank {rank} was terminated{_at(self.beats.get(rank))}" for rank in terminated),
            self._without_a_trace(),
        ]
        return RanksError(consequences[0], is_consequence=True)

    def _without_a_trace(self) -> str:
        steps = max((beat.step for beat in self.beats.values() if beat is not None), default=0)
        ended = f"the ranks ended after step {steps}, and none says why"
        where = f"their output is in {next(iter(self.logs.values()), '-')}"
        return f"{ended if steps else 'torchrun ended without having run the ranks'}; {where}"

    def _was_writing(self, rank: int) -> bool:
        beat = self.beats.get(rank)
        could_write = beat is None or beat.state is not RankState.FAILED
        return could_write and rank not in self._errors and unfinished_error_file(self.error_files[rank]).is_file()

    def _silent(self) -> dict[int, int]:
        """Before a restart: ranks without an error file were killed, except those that torchrun has ended."""
        return {
            rank: -signal.SIGKILL
            for rank, beat in self.beats.items()
            if rank not in self._errors and not (beat is not None and beat.state is RankState.FINISHED)
        }

    def _killed(self, rank: int, exit_code: int) -> str:
        number = "" if self.exits is None else f" by signal {-exit_code}"
        sentence = f"rank {rank} was killed{number}{_at(self.beats.get(rank))}"
        if self.kernel_killed and exit_code == -signal.SIGKILL:
            predicted = self.predicted_bytes[rank] if self.predicted_bytes else None
            sentence += f", by the kernel for want of memory; {_predicted_peak(predicted)}"
        return sentence

    def _left(self, rank: int, exit_code: int) -> str:
        beat = self.beats.get(rank)
        if beat is not None and beat.state is RankState.FAILED:  # the rank could not write its error file
            return f"rank {rank} ended: {beat.doing}"
        return f"rank {rank} ended with exit code {exit_code}{_at(beat)}; its output is in {self.logs[rank]}"

    def _raised(self, rank: int) -> str:
        text = " ".join(self._errors[rank][1].split())
        kind, _, message = text.partition(": ")
        beat, trace = self.beats.get(rank), f"the traceback is in {self.logs[rank]}"
        if kind == RankOutOfMemoryError.__name__:
            return f"rank {rank} ran out of memory {_during(beat)}: {message}; {trace}"
        return f"rank {rank} raised {kind}: {message[:500]}{_at(beat)}; {trace}"


def _is_about_a_peer(text: str) -> bool:
    return any(sign in text for sign in _LOST_PEER) and not _says_out_of_memory(text)


def _at(beat: Beat | None) -> str:
    return f" in {beat.doing} of step {beat.step + 1}" if beat is not None and is_action(beat.doing) else ""


def _during(beat: Beat | None) -> str:
    """Position of a rank in words, for readers who do not know the letters of actions."""
    if beat is None:
        return "before it had started"
    if not is_action(beat.doing):
        return f"while {beat.doing}"
    return f"in the {Action.parse(beat.doing).in_words()} ({beat.doing} of step {beat.step + 1})"


def num_kernel_kills() -> int:
    """Processes that Linux has killed on this host for lack of memory since boot; 0 where a container hides them."""
    file = Path("/proc/vmstat")
    counts = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
    return int(counts.get("oom_kill", 0))


@contextmanager
def out_of_memory_explained(device: torch.device, predicted_bytes: int | None) -> Iterator[None]:
    """Turns errors of the block that mean a lack of memory into a RankOutOfMemoryError.

    Args:
        predicted_bytes: Predicted peak memory of this rank; None without a prediction.

    Raises:
        RankOutOfMemoryError: The block ran out of memory; the cause is torch's own error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        cause: BaseException | None = error
        while cause is not None and not _is_out_of_memory(cause):
            cause = cause.__cause__ or cause.__context__  # torch's pipelines wrap the errors of stages
        if cause is None:
            raise
        held, capacity, what = _memory_in_use(device)
        num_bytes = requested_bytes(str(cause))
        more = "" if num_bytes is None else f" and asked for {format_bytes(num_bytes)} more"
        said = f"it held {format_bytes(held)}{more}, where {what} {format_bytes(capacity)}"
        raise RankOutOfMemoryError(f"{said}; {_predicted_peak(predicted_bytes)}") from error


def requested_bytes(message: str) -> int | None:
    """Bytes that could not be allocated, from torch's message; None when the message has no number."""
    match = _REQUESTED.search(message)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _says_out_of_memory(str(error))


def _says_out_of_memory(text: str) -> bool:
    return any(sign in text for sign in _OUT_OF_MEMORY) or _OUT_OF_MEMORY_IN_NCCL.search(text) is not None


def _predicted_peak(predicted_bytes: int | None) -> str:
    if predicted_bytes is None:
        return "no peak was predicted for it"
    return f"a peak of {format_bytes(predicted_bytes)} was predicted for it"


def _memory_in_use(device: torch.device) -> tuple[int, int, str]:
    """Bytes in use, the limit, and the words that the limit follows."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_reserved(device), total, "the device has"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return process_bytes("VmSize"), limit, "a process may map (ulimit -v)"
    return process_bytes("VmRSS"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the host has"
