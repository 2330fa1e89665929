"""Time of a run over all restarts: the log of a node's first rank, and where the time went."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from executor.launch.faults import FaultHappened
from executor.launch.rank import LOG_FILE
from simplan.base import Natural, Spec
from simplan.runs.faults import MeasuredStop, RunTimes, StopKind

_ORDER = (
    "compute",
    "slow_device",
    "fewer_nodes",
    "checkpoint",
    "lost_work",
    "detection",
    "waiting",
    "restart",
)


class Logged(Spec):
    """End of a stretch of time of a rank; the next one begins there.

    Attributes:
        kind: ``begin``: of all that comes before the first step. ``step``, ``checkpoint``: of one.
        step: Steps done.
        end_s: On the clock that the processes of a node share.
    """

    kind: Literal["begin", "step", "checkpoint"]
    step: Natural
    end_s: float


def read_log(out_dir: Path) -> list[Logged]:
    """The log in a folder, without lines that were cut short by the end of a rank."""
    file, entries = out_dir / LOG_FILE, []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            entries.append(Logged.model_validate_json(line))
        except ValidationError:
            continue
    return entries


def forget_log(out_dir: Path) -> None:
    """Deletes the log of an earlier run."""
    (out_dir / LOG_FILE).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Launched:
    """Start of ranks.

    Attributes:
        start_s: On the clock of the log.
        num_nodes: Nodes that have work.
        ended_s: Time at which the ranks before had ended; None if it was not seen.
        failed: The ranks before had failed: it counts as a restart.
    """

    start_s: float
    num_nodes: int
    ended_s: float | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Ranks from their start to the next one.

    Attributes:
        following: Start of the ranks after them; None for the last ones.
        log: Their part of the log; empty if they ended before their first step.
        fault: Fault that ended them; None for another reason.
        kept: Steps of the training that were not done again.
    """

    launched: Launched
    following: Launched | None
    log: Sequence[Logged]
    fault: FaultHappened | None
    kept: float

    @property
    def ready_s(self) -> float:
        """Time of the first step, or of the end before it."""
        return self.log[0].end_s if self.log else self.failed_s

    @property
    def failed_s(self) -> float:
        """Time from which they did nothing more that lasts."""
        last_s = self.log[-1].end_s if self.log else self.launched.start_s
        if self.fault is not None and self.fault.fault.kind in ("kill", "stop"):
            return max(last_s, self.fault.time_s)
        return last_s

    @property
    def ended_s(self) -> float:
        """Time at which they had ended."""
        assert self.following is not None
        seen_s = self.following.ended_s
        return self.following.start_s if seen_s is None else max(self.failed_s, seen_s)

    def step_times(self) -> Iterator[tuple[Logged, float]]:
        """Entries of the steps, with their seconds."""
        for before, entry in pairwise(self.log):
            if entry.kind == "step":
                yield entry, entry.end_s - before.end_s


class _Part(NamedTuple):
    name: str
    seconds: float
    end_s: float


def run_times(
    launches: Sequence[Launched], log: Sequence[Logged], happened: Sequence[FaultHappened]
) -> RunTimes | None:
    """Parts of the time of a run; None if it has done no step.

    Args:
        launches: Starts of the leading node's ranks, in order.
        log: Log of its first rank.
        happened: Faults, in order.
    """
    attempts = _attempts(launches, log, happened)
    begun = [attempt for attempt in attempts if attempt.log]
    if not any(entry.kind == "step" for entry in log) or not begun:
        return None
    first_s, full = begun[0].ready_s, max(attempt.launched.num_nodes for attempt in attempts)
    slow = [
        (event.time_s, event.time_s + (event.fault.for_s or 0.0)) for event in happened if event.fault.kind == "slow"
    ]
    step_s = _median_steps(begun, slow)
    waterfall_s: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        for part in _parts(attempt, slow, step_s, full):
            if part.end_s > first_s:
                waterfall_s[part.name] += part.seconds
    checkpoints_s = [
        b.end_s - a.end_s for attempt in attempts for a, b in pairwise(attempt.log) if b.kind == "checkpoint"
    ]
    return RunTimes(
        initialization_s=first_s - launches[0].start_s,
        time_s=sum(waterfall_s.values()),
        waterfall_s={part: waterfall_s[part] for part in _ORDER if waterfall_s[part]},
        stops=tuple(_stop(a, b, first_s) for a, b in pairwise(attempts) if a.failed_s >= first_s),
        step_s=step_s,
        checkpoint_s=statistics.median(checkpoints_s) if checkpoints_s else None,
    )


def _attempts(
    launches: Sequence[Launched], log: Sequence[Logged], happened: Sequence[FaultHappened]
) -> Sequence[_Attempt]:
    attempts: list[_Attempt] = []
    kept, following = math.inf, None
    for launched in reversed(launches):
        until_s = math.inf if following is None else following.start_s
        mine = [entry for entry in log if launched.start_s <= entry.end_s < until_s]
        faults = [
            fault for fault in happened if launched.start_s <= fault.time_s < until_s and fault.fault.kind != "slow"
        ]
        ended_by = faults[-1] if faults and following is not None else None
        attempts.append(_Attempt(launched, following, mine, ended_by, kept))
        kept, following = min(kept, mine[0].step if mine else math.inf), launched
    return attempts[::-1]


def _median_steps(attempts: Sequence[_Attempt], slow: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Seconds of a step by number of nodes, of steps that count and meet no slow rank."""
    times_s: dict[int, list[float]] = defaultdict(list)
    for attempt in attempts:
        for entry, seconds in attempt.step_times():
            if entry.step <= attempt.kept and not _meets(entry.end_s - seconds, entry.end_s, slow):
                times_s[attempt.launched.num_nodes].append(seconds)
    return {number: statistics.median(seconds) for number, seconds in times_s.items()}


def _meets(start_s: float, end_s: float, slow: Sequence[tuple[float, float]]) -> bool:
    return any(begin_s < end_s and start_s < over_s for begin_s, over_s in slow)


def _parts(
    attempt: _Attempt, slow: Sequence[tuple[float, float]], step_s: Mapping[int, float], full: int
) -> Iterator[_Part]:
    """Parts of an attempt, without a gap from the start of its ranks to that of the next ones."""
    number = attempt.launched.num_nodes
    yield _Part("restart", attempt.ready_s - attempt.launched.start_s, attempt.ready_s)
    for before, entry in pairwise(attempt.log):
        seconds = entry.end_s - before.end_s
        if entry.kind == "checkpoint":
            yield _Part("checkpoint", seconds, entry.end_s)
        elif entry.step > attempt.kept:
            yield _Part("lost_work", seconds, entry.end_s)
        else:
            usual_s = step_s.get(number, seconds) if _meets(before.end_s, entry.end_s, slow) else seconds
            full_s = usual_s if number == full else step_s.get(full, usual_s)
            yield _Part("compute", full_s, entry.end_s)
            yield _Part("slow_device", seconds - usual_s, entry.end_s)
            yield _Part("fewer_nodes", usual_s - full_s, entry.end_s)
    if attempt.following is not None:
        if attempt.log:
            yield _Part("lost_work", attempt.failed_s - attempt.log[-1].end_s, attempt.failed_s)
        yield _Part("detection", attempt.ended_s - attempt.failed_s, attempt.ended_s)
        yield _Part("waiting", attempt.following.start_s - attempt.ended_s, attempt.following.start_s)


def _stop(attempt: _Attempt, following: _Attempt, first_s: float) -> MeasuredStop:
    fault = None if attempt.fault is None else attempt.fault.fault
    kind: StopKind = "failure" if following.launched.failed else "nodes"
    return MeasuredStop(
        kind=kind if fault is None or fault.kind == "slow" else fault.kind,
        node=fault is not None and fault.node is not None,
        at_s=attempt.failed_s - first_s,
        detection_s=attempt.ended_s - attempt.failed_s,
        waiting_s=following.launched.start_s - attempt.ended_s,
        restart_s=following.ready_s - following.launched.start_s,
        num_nodes=following.launched.num_nodes,
    )
