"""What a search may choose from: the section ``search:`` of a scenario."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from simplan.base import Count, Positive, Spec
from simplan.errors import NotModelledError, Problem
from simplan.plan.plan import Recompute, RecomputeModule
from simplan.problems import render_value
from simplan.software.software import SoftwareSpec
from simplan.wording import either

__all__ = ["OBJECTIVES", "RANGES", "Objective", "SearchSpace", "given_ranges", "that_it_has"]

Objective = Literal["step_time", "tokens_per_s_per_device", "num_devices", "memory", "cost"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

_Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe-v"
]
_Counts = Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)]
_Modules = Annotated[tuple[tuple[RecomputeModule, ...], ...], Field(min_length=1, max_length=100)]


class SearchSpace(Spec):
    """Which plans to compare, and what makes one better. A range that is not given is the default one.

    A range holds where a plan has that choice: ``schedule`` for pipelines, ``sequence_parallel`` where tp > 1,
    ``zero_stage`` where there are several shards, ``reshard_after_forward`` at ZeRO-3, ``grad_sync`` where several
    microbatches of a step follow each other without a pipeline. One value may be written without brackets.

    Attributes:
        objective: What is best: ``step_time``, ``tokens_per_s_per_device``, ``num_devices``, ``memory`` of the worst
            device, or ``cost`` of ``token_budget`` tokens.
        objectives: Two of them: the Pareto front; plans are ranked by the first.
        top: Plans to rank.
        max_memory_fraction: Share of the device memory that a plan may need by the prediction, the allocator's reserve
            included; at 1 it is what ``predict`` calls fitting, but for what it calls fitting tightly.
        max_step_time_s: The deadline of a step.
        dollars_per_device_hour, token_budget: What ``cost`` needs: the user's price, and how many tokens to train on.
        num_devices: Numbers of devices to compare; else the cluster's.
        tp_across_nodes: Tensor-parallel groups may span nodes.
        recompute_layers: ``least``: where plans fit with full recomputation and without any they do not, those that run
            as few blocks of every stage again as fit are compared, too, the most promising ones. ``all``: they are not.
        recompute_modules: What selective recomputation may run again: lists of modules, or one list. By default the
            attention core alone.
        tp, cp, cp_comm, ep, pp, virtual_stages, schedule, dp_replicate, dp_shard, zero_stage, reshard_after_forward,
            sequence_parallel, microbatch_size, recompute, grad_sync: Ranges of the plan's keys of the same names.
    """

    objective: Objective = "step_time"
    objectives: Annotated[tuple[Objective, ...], Field(min_length=2, max_length=2)] | None = None
    top: Annotated[int, Field(ge=1, le=1000)] = 5
    max_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_step_time_s: Positive | None = None
    dollars_per_device_hour: Positive | None = None
    token_budget: Positive | None = None
    num_devices: _Counts | None = None
    tp_across_nodes: bool = False
    recompute_layers: Literal["least", "all"] = "least"
    tp: _Counts | None = None
    cp: _Counts | None = None
    cp_comm: tuple[Literal["ring", "all_gather", "a2a"], ...] | None = None
    ep: _Counts | None = None
    pp: _Counts | None = None
    virtual_stages: _Counts | None = None
    schedule: tuple[_Schedule, ...] | None = None
    dp_replicate: _Counts | None = None
    dp_shard: _Counts | None = None
    zero_stage: tuple[Annotated[int, Field(ge=0, le=3)], ...] | None = None
    reshard_after_forward: tuple[bool, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    microbatch_size: _Counts | None = None
    recompute: tuple[Recompute, ...] | None = None
    recompute_modules: _Modules | None = None
    grad_sync: tuple[Literal["step", "microbatch"], ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        """One value is a list of one; a file has lists, and strict mode wants tuples."""
        if not isinstance(data, dict):
            return data

        def listed(key: str, value: Any) -> Any:
            if key not in (*RANGES, "num_devices", "objectives") or value is None or isinstance(value, dict):
                return value
            values = tuple(value) if isinstance(value, list | tuple) else (value,)
            if key != "recompute_modules":
                return values
            one = values and all(isinstance(module, str) for module in values)  # modules that run again together
            return (values,) if one else tuple(tuple(each) if isinstance(each, list) else each for each in values)

        found = {key: listed(key, value) for key, value in data.items()}
        goals = found.get("objectives")
        if isinstance(goals, tuple) and "objective" not in found and goals[:1] and goals[0] in OBJECTIVES:
            found["objective"] = goals[0]  # the first, so that a copy, which has every field, goes together too
        return found

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.objectives is not None:
            if "objective" in self.model_fields_set and self.objective != self.objectives[0]:
                raise ValueError("has objective and objectives; keep one of the two")
            if len(set(self.objectives)) == 1:
                raise ValueError(f"has {self.objectives[0]} twice in objectives; use objective, or two different ones")
        if "cost" in self.goals and (self.dollars_per_device_hour is None or self.token_budget is None):
            raise ValueError("asks for the cost; give dollars_per_device_hour and token_budget")
        return self

    @property
    def goals(self) -> tuple[Objective, ...]:
        """The objective, or both."""
        return self.objectives or (self.objective,)

    @property
    def narrowed(self) -> tuple[str, ...]:
        """Ranges that are given."""
        return tuple(name for name in RANGES if getattr(self, name) is not None)


RANGES = (
    "tp", "sequence_parallel", "cp", "cp_comm", "ep", "pp", "schedule", "virtual_stages", "dp_replicate", "dp_shard",
    "zero_stage", "reshard_after_forward", "microbatch_size", "recompute", "recompute_modules",
    "grad_sync",
)  # fmt: skip
"""Keys of a plan that a search varies."""


def that_it_has(software: SoftwareSpec, space: SearchSpace) -> SearchSpace:
    """The space without what the software does not have; what was asked for by name is refused by name.

    Raises:
        NotModelledError: A range has values that the software does not.
    """
    allowed: dict[str, tuple[int, ...]] = {"zero_stage": software.zero_stages}
    if software.layers.attention == "unfused":
        allowed["cp"] = (1,)
    if not software.sequence_parallelism:
        allowed["sequence_parallel"] = (False,)
    problems, ranges = [], {}
    for field, values in allowed.items():
        asked = getattr(space, field)
        if any(value not in values for value in asked or ()):
            rule = f"{software.id} has {field} {either(map(render_value, values))} only, as far as it is modelled"
            left = [value for value in asked if value in values] or list(values)
            fix = f"write {render_value(left)}, or remove it"
            problems.append(Problem(field=f"search.{field}", value=render_value(list(asked)), rule=rule, fix=fix))
        elif asked is None and (field != "zero_stage" or values != (0, 1, 2, 3)):
            ranges[field] = values
    if problems:
        raise NotModelledError(problems)
    return space.model_copy(update=ranges) if ranges else space


def given_ranges(software: SoftwareSpec, space: SearchSpace) -> tuple[str, ...]:
    """The narrowed ranges of a space of ``that_it_has`` that are not as the software alone would have them."""
    whole = that_it_has(software, space.model_copy(update=dict.fromkeys(space.narrowed)))
    return tuple(name for name in space.narrowed if getattr(space, name) != getattr(whole, name))
