"""Why ranks ended early: the first cause, not the ranks it pulled down."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.failure import Failure
from executor.heartbeat import Beat, RankState
from executor.out_of_memory import RankOutOfMemoryError, predicted_peak
from executor.rank import RankFiles
from executor.stalls import is_action
from simplan.program.action import Action

__all__ = ["cause_of", "read_exits"]

_SECONDARY = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out", "NCCL")


def read_exits(file: Path) -> list[dict[int, int]]:
    """Of every attempt that has failed, exit codes by rank; a negative one is a signal."""
    try:
        lines = file.read_text().splitlines(keepends=True)
        attempts = [json.loads(line) for line in lines if line.endswith(("]", "\n"))]
    except (OSError, ValueError):  # ValueError: half a line, as the agent was killed while it wrote
        return []
    return [{entry["rank"]: entry["exitcode"] for entry in attempt} for attempt in attempts]


def cause_of(
    exits: Mapping[int, int],
    files: Sequence[RankFiles],
    beats: Sequence[Beat | None],
    log_file: Path,
    attempt: int = 0,
    *,
    kernel_killed: bool = False,
    predicted_bytes: Sequence[int] = (),
) -> Failure:
    """What to say about ranks that ended early.

    A signal comes first, except SIGTERM, which torchrun sends to the ranks that are left when one has failed. Errors
    about communication come after ranks that left without a word, whose peers raise them.

    Args:
        exits: Exit codes of the ranks that failed.
        files: Of all ranks.
        beats: Their last signs of life.
        log_file: Of torchrun.
        attempt: Errors of other attempts are not looked at.
        kernel_killed: The kernel has killed processes of this host for want of memory since the ranks were started.
        predicted_bytes: By rank, what it was predicted to need; empty without a prediction.
    """
    errors = {}
    for rank, file in enumerate(files):
        error = _read_json(file.error)
        if error is not None and error.get("attempt", 0) == attempt:
            errors[rank] = error

    def is_secondary(rank: int) -> bool:
        return any(text in errors[rank]["message"] for text in _SECONDARY)

    def killed(rank: int) -> str:
        predicted = predicted_bytes[rank] if predicted_bytes else None
        by_kernel = kernel_killed and exits[rank] == -signal.SIGKILL
        by_whom = f", by the kernel for want of memory; {predicted_peak(predicted)}" if by_kernel else ""
        return f"rank {rank} was killed by signal {-exits[rank]}{_at(beats[rank])}{by_whom}"

    def left(rank: int) -> str:
        beat = beats[rank]
        if beat is not None and beat.state is RankState.FAILED:  # it could not write more than this
            return f"rank {rank} ended: {beat.doing}"
        return f"rank {rank} ended with exit code {exits[rank]}{_at(beat)}; its output is in {files[rank].log}"

    def raised(rank: int) -> str:
        message = " ".join(str(errors[rank]["message"]).split())
        trace = f"the traceback is in {files[rank].log}"
        if errors[rank]["type"] == RankOutOfMemoryError.__name__:
            return f"rank {rank} ran out of memory {_during(beats[rank])}: {message}; {trace}"
        return f"rank {rank} raised {errors[rank]['type']}: {message[:500]}{_at(beats[rank])}; {trace}"

    signalled = [rank for rank in sorted(exits) if exits[rank] < 0]
    terminated = [rank for rank in signalled if exits[rank] == -signal.SIGTERM]
    by_time = sorted(errors, key=lambda rank: float(errors[rank]["time_s"]))
    causes = (
        *(killed(rank) for rank in signalled if rank not in terminated),
        *(raised(rank) for rank in by_time if not is_secondary(rank)),
        *(left(rank) for rank in sorted(exits) if exits[rank] > 0 and rank not in errors),
    )
    consequences = (
        *(raised(rank) for rank in by_time if is_secondary(rank)),
        *(killed(rank) for rank in terminated),
        f"torchrun ended without having run the ranks; its output is in {log_file}",
    )
    return Failure(sentence=(causes or consequences)[0], consequence=not causes)


def _read_json(file: Path) -> Any:
    """None when there is no such file, or half of one: its writer may have been killed."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _at(beat: Beat | None) -> str:
    if beat is None or not is_action(beat.doing):
        return ""
    return f" in {beat.doing} of step {beat.step + 1}"


def _during(beat: Beat | None) -> str:
    """Where it was, in words for those who do not know the letters of actions."""
    if beat is None:
        return "before it had started"
    if not is_action(beat.doing):
        return f"while {beat.doing}"
    return f"in the {Action.parse(beat.doing).in_words()} ({beat.doing} of step {beat.step + 1})"
