"""Pipeline shapes and stage times, and the ends and spans of action tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simplan.program.action import Action, ActionKind, Table
from simplan.program.tables.complete import run_rows


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Compute times of each stage for one microbatch, in seconds; a full backward takes the sum of its two halves.

    Attributes:
        forward_s: ``(stages,)`` Forward.
        backward_input_s: ``(stages,)`` Backward for the input (I).
        backward_weight_s: ``(stages,)`` Backward for the weights (W).
        send_s: Seconds from the end of an action to the arrival of its result on a neighboring rank.
    """

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    send_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks that every part has a time for every stage."""
        assert len(self.forward_s) == len(self.backward_input_s) == len(self.backward_weight_s), self

    @classmethod
    def equal(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        backward_input_s: float = 1.0,
        backward_weight_s: float = 1.0,
        send_s: float = 0.0,
    ) -> StageTimes:
        """Returns equal times for every stage; the defaults are unit times and zero-cost communication."""
        n = num_stages
        return cls((forward_s,) * n, (backward_input_s,) * n, (backward_weight_s,) * n, send_s)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)

    def duration_s(self, action: Action) -> float:
        """Returns the time of a compute action in seconds."""
        match action.kind:
            case ActionKind.FORWARD:
                return self.forward_s[action.stage]
            case ActionKind.BACKWARD:
                return self.backward_input_s[action.stage] + self.backward_weight_s[action.stage]
            case ActionKind.BACKWARD_INPUT:
                return self.backward_input_s[action.stage]
            case ActionKind.BACKWARD_WEIGHT:
                return self.backward_weight_s[action.stage]
        raise AssertionError(f"{action} computes nothing")


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Dimensions of a pipeline and of a step: p ranks with v (virtual) stages each, and m microbatches.

    Attributes:
        times: Stage times, for schedules built from them; None for unit times and zero-cost communication.
        kept_for_weight: Fraction of a microbatch's activations that a stage holds from its I to its W (M_W / M_B in Qi
            et al., who assume a half), for schedules built within a memory limit.
    """

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 1
    times: StageTimes | None = None
    kept_for_weight: float = 0.5

    @property
    def num_stages(self) -> int:
        """Total number of stages."""
        return self.num_ranks * self.virtual_stages

    @property
    def stage_times(self) -> StageTimes:
        """The stage times; unit times if there are none."""
        assert self.times is None or self.times.num_stages == self.num_stages, self
        return self.times or StageTimes.equal(self.num_stages)


Schedule = Callable[[PipelineShape], Table]
"""Returns the compute actions of every pipeline rank, in the order in which the rank runs them."""

_Step = tuple[ActionKind, int]
"""Kind of action and stage; the action applies to the next microbatch in turn."""


def number_microbatches(steps: Iterable[_Step], num_microbatches: int) -> tuple[Action, ...]:
    """Returns the steps with microbatches: each kind takes those of a stage in order; a B counts as an I and a W.

    Steps past the last microbatch are dropped. A table without deadlock stays so without them.
    """
    done: Counter[_Step] = Counter()
    row = []
    for kind, stage in steps:
        parts = [kind]
        if kind is ActionKind.BACKWARD:
            parts = [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
        microbatch = done[parts[0], stage]
        done.update((part, stage) for part in parts)
        if microbatch < num_microbatches:
            row.append(Action(stage, kind, microbatch))
    return tuple(row)


def action_ends_s(compute: Table, times: StageTimes) -> dict[Action, float]:
    """Returns the end of every compute action; ranks run their rows in order, each action once its input has arrived.

    An input from another rank arrives ``send_s`` after it was computed. Sends wait for nothing and cost ranks no time.

    Raises:
        ProgramError: The actions wait for each other, or a stage is in two rows.
    """
    return {ran.action: ran.end for ran in run_rows(compute, times.duration_s, times.send_s)}


def longest_span_s(compute: Table, times: StageTimes) -> float:
    """Returns the longest time of a rank from the start of its first action to the end of its last.

    This is the cost of a step if each rank continues with its next step independently (Qi et al. 2024,
    arXiv:2401.10241, section 5.3, which defines this cost). The time from the first start to the last end would also
    include the wait for the first microbatch, and idle time at the end.
    """
    ends_s = action_ends_s(compute, times)
    return max(ends_s[row[-1]] - ends_s[row[0]] + times.duration_s(row[0]) for row in compute)
