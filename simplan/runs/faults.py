"""Faults that a run is to meet, what it is expected to lose by them, and what it has lost.

The launcher of the leading node has the clock of the faults. It hits ranks and nodes from outside, by signals, so that
they meet a fault unprepared; other launchers hear of theirs through the store of the run. A run that has faults ends
with a waterfall of its time, in the parts of ``simplan.goodput.setup.WATERFALL``:

- ``compute``: steps that count, each from the end of the stretch before it;
- ``checkpoint``: from the end of a step to that of the checkpoint after it;
- ``lost_work``: steps that were done again, and the step in progress when ranks failed;
- ``detection``: from a fault until the ranks of the leading node have ended;
- ``waiting``: from then until ranks start again: for the other nodes, a spare, or a repair;
- ``restart``: from then until their first step;
- ``slow_device`` and ``fewer_nodes``: the excess of steps over the median of all other steps that count.

The time of a run is that from the start of its first step to the end of its last one: the clock of MLPerf, too, starts
after initialization.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simplan.base import Count, Natural, NonNegative, Positive, Spec

FaultKind = Literal["kill", "stop", "slow", "preempt"]


class Fault(Spec):
    """A fault of a rank or a node.

    Attributes:
        kind: ``kill``: SIGKILL, as a crash or a power cut. ``stop``: SIGSTOP, as a hang, which ``--timeout`` finds.
            ``slow``: stopped for a share of every 50 ms. ``preempt``: SIGTERM, and SIGKILL after ``notice_s``.
        at_step: Steps of the training after which it happens.
        at_s: Time at which it happens, in seconds since the first step during which ranks run or start, without the
            time from a fault to the start of ranks after it.
        rank: Rank that is hit. Where fewer are there, they are counted from the first again; so are nodes.
        node: Node that is hit with all its ranks and its launcher: 1 is the first one besides that at the endpoint,
            which has the store of the run.
        slowdown: For ``slow``, factor on the time of the rank.
        for_s: For ``slow``, seconds until it is over. For a node that is killed or preempted, seconds until it starts
            the command again; None if it stays away.
        notice_s: For ``preempt``, seconds between both signals.
    """

    kind: FaultKind
    at_step: Count | None = None
    at_s: NonNegative | None = None
    rank: Natural | None = None
    node: Count | None = None
    slowdown: Annotated[float, Field(gt=1, le=1000, allow_inf_nan=False)] | None = None
    for_s: Positive | None = None
    notice_s: NonNegative | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for key, other in (("at_step", "at_s"), ("rank", "node")):
            if (getattr(self, key) is None) == (getattr(self, other) is None):
                raise ValueError(f"needs one of {key} and {other}")
        if (self.kind == "slow") != (self.slowdown is not None):
            raise ValueError("slowdown goes with kind: slow, which needs it")
        if (self.kind == "preempt") != (self.notice_s is not None):
            raise ValueError("notice_s goes with kind: preempt, which needs it")
        if self.kind == "slow" and self.for_s is None:
            raise ValueError("kind: slow needs for_s")
        if self.for_s is not None and self.kind != "slow" and (self.node is None or self.kind == "stop"):
            raise ValueError("for_s goes with kind: slow, and with a node that is killed or preempted")
        return self


class FaultSchedule(Spec):
    """Content of a file for ``simplan run --fail``."""

    faults: Annotated[tuple[Fault, ...], Field(min_length=1, max_length=10_000)]


class ExpectedRun(Spec):
    """Prediction of a run with faults, made before it starts.

    Attributes:
        goodput: Steps that count, at the speed of all nodes, over the time of the run: 5 %, 50 % and 95 % quantile.
        time_s: Mean time of the run.
        waterfall_s: Mean seconds of each part; they sum to ``time_s``.
        interruptions: Mean number of stops.
        num_runs: Simulated runs.
    """

    goodput: tuple[float, float, float]
    time_s: Positive
    waterfall_s: dict[str, float]
    interruptions: NonNegative
    num_runs: Count


StopKind = Literal["kill", "stop", "preempt", "failure", "nodes"]
"""Reason of a stop: a fault by its kind, a failure that no fault has made, or nodes that came or left."""


class MeasuredStop(Spec):
    """A stop of all ranks, and their start.

    Attributes:
        at_s: Seconds since the first step of the run.
        detection_s, waiting_s, restart_s: Seconds of these parts of the waterfall.
        node: True where a node was lost.
        num_nodes: Nodes afterwards.
    """

    kind: StopKind
    node: bool = False
    at_s: NonNegative
    detection_s: NonNegative
    waiting_s: NonNegative
    restart_s: NonNegative
    num_nodes: Count


class RunTimes(Spec):
    """Time of a run with checkpoints, and where it went; see the module.

    Attributes:
        initialization_s: Seconds from the start of the ranks to their first step, which are before the time.
        time_s: From the start of the first step to the end of the last one.
        waterfall_s: Seconds of each part; they sum to ``time_s``.
        stops: Stops in order; a failure in a restart is one more.
        step_s: By number of nodes, median seconds of a step, with what is done between steps.
        checkpoint_s: Median seconds for which a checkpoint held training up; None without any.
    """

    initialization_s: NonNegative
    time_s: Positive
    waterfall_s: dict[str, float]
    stops: tuple[MeasuredStop, ...] = ()
    step_s: dict[int, Positive] = Field(default_factory=dict)
    checkpoint_s: NonNegative | None = None

    @property
    def goodput(self) -> float:
        """Fraction of the time that went into steps that count, as fast as on all nodes."""
        return self.waterfall_s["compute"] / self.time_s

    @property
    def interruptions(self) -> dict[str, int]:
        """Number of stops by kind, without those for nodes that came."""
        return dict(Counter(stop.kind for stop in self.stops if stop.kind != "nodes"))
