"""What a schedule is made for, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simplan.program.action import Action, ActionKind, Table

__all__ = ["PipelineShape", "Schedule", "StageTimes"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long each stage takes for one microbatch; a full backward takes its two parts together.

    Attributes:
        forward_s: Forward, by stage.
        backward_input_s: Backward for the input, by stage.
        backward_weight_s: Backward for the weights, by stage.
        send_s: From the end of an action to its result on a neighbouring rank.
    """

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    send_s: float = 0.0

    def __post_init__(self) -> None:
        """Every part has a time for every stage."""
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
        """The same times for every stage; without any, units of time and free messages."""
        n = num_stages
        return cls((forward_s,) * n, (backward_input_s,) * n, (backward_weight_s,) * n, send_s)

    @property
    def num_stages(self) -> int:
        """Stages that have times."""
        return len(self.forward_s)

    def duration_s(self, action: Action) -> float:
        """How long a compute action takes."""
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
    """A pipeline and what runs through it in a step.

    Attributes:
        num_ranks: Pipeline ranks p.
        num_microbatches: Microbatches m of a step.
        virtual_stages: Stages of each rank, v.
        times: Stage times, for the schedules that are found from them; None stands for units of time and free messages.
        kept_for_weight: Part of a microbatch's activations that a stage keeps from its I to its W (M_W / M_B in Qi et
            al., who count a half), for the schedules that are found within a memory limit.
    """

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 1
    times: StageTimes | None = None
    kept_for_weight: float = 0.5

    def __post_init__(self) -> None:
        """The times are those of this pipeline's stages."""
        assert self.times is None or self.times.num_stages == self.num_stages, self
        assert 0 <= self.kept_for_weight <= 1, self

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.num_ranks * self.virtual_stages

    @property
    def stage_times(self) -> StageTimes:
        """The times, or units of time where there are none."""
        return self.times or StageTimes.equal(self.num_stages)


Schedule = Callable[[PipelineShape], Table]
"""Gives the compute actions of every pipeline rank, in the order in which the rank does them."""
