"""Record of one rank's step: actions with start and end, and collectives and P2P sends in issue order."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from executor.launch.watchdog import Heartbeat, RankState
from simplan.base import Spec
from simplan.errors import RunError
from simplan.program.action import Action, ActionKind
from simplan.program.timeline import SpanKind
from simplan.runs.measurement import IssuedKind, MeasuredCollective, MeasuredSpan, MeasuredUpdate

Stamp = float | torch.cuda.Event
_MAX_CLOCK_S = 1e9  # 31 years


class Clock:
    """Takes stamps now and turns them into seconds later; on the CPU work is done when its call returns."""

    def begin_step(self) -> None:
        """To be called before the first stamp of a step."""

    def stamp(self) -> Stamp:
        """Marks this point in the work of the calling thread."""
        return time.perf_counter()

    def settle(self) -> None:
        """Waits until everything stamped so far has happened."""

    def seconds(self, stamp: Stamp) -> float:
        """The time of a settled stamp of this step, on the monotonic clock that all processes of a host share."""
        assert isinstance(stamp, float)
        return stamp


class CudaClock(Clock):
    """On a CUDA device stamps are events on the current stream, tied to the host's clock at each step's start."""

    def __init__(self) -> None:
        self._anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._anchor_s = 0.0

    def begin_step(self) -> None:
        """Maps stream time to the host's clock, while the device is idle."""
        torch.cuda.synchronize()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()

    def stamp(self) -> Stamp:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def seconds(self, stamp: Stamp) -> float:
        """Anchor plus the device's own measure of the time since then."""
        assert isinstance(stamp, torch.cuda.Event)
        return self._anchor_s + float(self._anchor.elapsed_time(stamp)) * 1e-3


def make_clock(device: torch.device) -> Clock:
    """The clock for ranks on this kind of device."""
    return CudaClock() if device.type == "cuda" else Clock()


_RECEIVE_FOR = {
    ActionKind.FORWARD: ActionKind.RECV_F,
    ActionKind.BACKWARD: ActionKind.RECV_B,
    ActionKind.BACKWARD_INPUT: ActionKind.RECV_B,
}


class StepRecord(Spec):
    """One step of one rank; all times are on the clock that the processes of a node share.

    Attributes:
        step: Index in the run, warmup steps included.
        is_warmup: True for the first steps after the ranks started, which are not measured.
        start_s: Time when this rank left the barrier before the step.
        end_s: Time when the last action of this rank ended.
        losses: Loss of each microbatch whose loss this rank computes, in order of microbatches.
        reruns: Spans of recomputed forwards inside of the actions, one per block or attention core.
        reference_s: Duration of the reference matmul right before the step, in seconds; with backup workers, of workers
            that do not wait for all others, and with communication between steps, right before the first step of the
            process.
        updates: Of a worker that does not wait for all others, the update by each server.
        kept: With backup workers, ranks whose gradients the step used, in order of their arrival; else empty.
        arrived_s: With backup workers, time when this rank completed its gradients or left its passes; else None.
        members: Of replicas that may leave, those whose pseudo-gradients were averaged after the step; empty for a step
            without an outer step.
    """

    step: int
    is_warmup: bool = False
    start_s: float
    end_s: float
    losses: tuple[float, ...]
    spans: tuple[MeasuredSpan, ...]
    reruns: tuple[MeasuredSpan, ...] = ()
    collectives: tuple[MeasuredCollective, ...]
    reference_s: Annotated[float, Field(gt=0, le=_MAX_CLOCK_S)] | None = None
    updates: tuple[MeasuredUpdate, ...] = ()
    kept: tuple[int, ...] = ()
    arrived_s: float | None = None
    members: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _goes_forward(self) -> Self:
        if not -_MAX_CLOCK_S <= self.start_s < self.end_s <= _MAX_CLOCK_S:
            raise ValueError("ends before it starts, or beyond the range of clocks")
        return self


@dataclass(slots=True)
class _Issued:
    kind: IssuedKind
    action: Action
    ranks: tuple[int, ...]
    num_bytes: int
    start: Stamp
    end: Stamp | None = None


class Recorder:
    """Collects one step at a time.

    Args:
        heartbeat: Heartbeat that gets the rank's current action and wait.
    """

    def __init__(self, row: Sequence[Action], clock: Clock, heartbeat: Heartbeat) -> None:
        self._clock = clock
        self._heartbeat = heartbeat
        received = {action for action in row if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)}
        self._next: dict[Action, tuple[RankState, str]] = {}
        told = [action for action in row if action.kind not in (ActionKind.UNSHARD, ActionKind.RESHARD)]
        for action, following in pairwise(told):
            needed = _RECEIVE_FOR.get(following.kind)
            waits = needed is not None and Action(following.stage, needed, following.microbatch) in received
            self._next[action] = (RankState.WAITING if waits else RankState.RUNNING, str(following))
        self._step = 0
        self._start: Stamp = 0.0
        self._opened: Stamp = 0.0
        self._current: Action = told[0]
        self._spans: list[tuple[Action, Stamp, Stamp]] = []
        self._reruns: list[tuple[Action, Stamp, Stamp]] = []
        self._issued: list[_Issued] = []

    @property
    def step(self) -> int:
        """Index in the run of the step that runs or ran last."""
        return self._step

    @property
    def current(self) -> Action:
        """The action that runs or ran last."""
        return self._current

    def waiting(self, doing: str, step: int) -> None:
        """The rank waits for the others outside of any action."""
        self._heartbeat.beat(RankState.WAITING, doing, step)

    def begin_step(self, step: int) -> None:
        """Starts a step, right after the barrier."""
        self._step = step
        self._spans.clear()
        self._reruns.clear()
        self._issued.clear()
        self._clock.begin_step()
        self._start = self._clock.stamp()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Times the block as this action."""
        self.open(action)
        yield
        self.close()

    def open(self, action: Action) -> None:
        """The action starts now."""
        self.begin(action)
        self._opened = self._clock.stamp()

    def close(self) -> None:
        """The opened action ends now."""
        self._spans.append((self._current, self._opened, self._clock.stamp()))
        self.end(self._current)

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Times the block as recomputation in the current action (from any thread)."""
        start = self._clock.stamp()
        try:
            yield
        finally:  # torch ends it by an exception once all is there that backward needs
            self._reruns.append((self._current, start, self._clock.stamp()))

    def begin(self, action: Action) -> None:
        """The rank is at this action."""
        self._current = action
        self._heartbeat.beat(RankState.RUNNING, str(action))

    def end(self, action: Action) -> None:
        """Ends the action; the next action may have to wait for a P2P receive."""
        if action in self._next:
            self._heartbeat.beat(*self._next[action])

    def issue(self, kind: IssuedKind, ranks: tuple[int, ...], num_bytes: int, action: Action | None = None) -> int:
        """Records the issue of a collective or P2P send; returns a handle for ``complete``.

        Args:
            kind, ranks, num_bytes: See ``MeasuredCollective``.
            action: Action that the collective is part of; None for the current action.
        """
        self._issued.append(_Issued(kind, action or self._current, ranks, num_bytes, self._clock.stamp()))
        return len(self._issued) - 1

    def complete(self, handle: int) -> None:
        """Records the end of a collective or P2P send (from any thread)."""
        self._issued[handle].end = self._clock.stamp()

    def end_step(self) -> tuple[float, float]:
        """Ends the step once its work is done; gives its start and end."""
        end = self._clock.stamp()
        self._clock.settle()
        return self._clock.seconds(self._start), self._clock.seconds(end)

    def record(
        self,
        start_s: float,
        end_s: float,
        losses: Sequence[float],
        *,
        is_warmup: bool = False,
        reference_s: float | None = None,
    ) -> StepRecord:
        """The ended step as data.

        Raises:
            RunError: A loss is not finite: the steps after it would compute on infinities.
        """
        seconds = self._clock.seconds
        if wrong := [loss for loss in losses if not math.isfinite(loss)]:
            raise RunError(f"the loss of step {self._step} is {wrong[0]}: try precision fp32 or bf16")

        def measured(ran: tuple[Action, Stamp, Stamp], kind: SpanKind) -> MeasuredSpan:
            action, start, end = ran
            return MeasuredSpan(action=str(action), kind=kind, start_s=seconds(start), end_s=seconds(end))

        return StepRecord(
            step=self._step,
            is_warmup=is_warmup,
            reference_s=reference_s,
            start_s=start_s,
            end_s=end_s,
            losses=tuple(losses),
            spans=tuple(
                measured(span, SpanKind.OPTIMIZER if span[0].kind is ActionKind.OPTIM else SpanKind.COMPUTE)
                for span in self._spans
            ),
            reruns=tuple(measured(span, SpanKind.RECOMPUTE) for span in self._reruns),
            collectives=tuple(
                MeasuredCollective(
                    kind=issued.kind,
                    action=str(issued.action),
                    ranks=issued.ranks,
                    num_bytes=issued.num_bytes,
                    start_s=seconds(issued.start),
                    end_s=None if issued.end is None else seconds(issued.end),
                )
                for issued in self._issued
            ),
        )
