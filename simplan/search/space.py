"""Search space: the section ``search:`` of a scenario, and what a job must satisfy to be searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from simplan.base import Count, NumDevices, Positive, Spec
from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.job import Job
from simplan.model.implementations.loss_in_chunks import LossMode
from simplan.model.weight_format import WeightFormatName
from simplan.optimizers import OptimizerName
from simplan.plan.compression import CompressionKind, CompressionSection
from simplan.plan.placement import PlacedAxis, check_searched_placement
from simplan.plan.plan import ParallelPlan, Recompute, RecomputeModule
from simplan.plan.replication import ReplicationKind, ReplicationSection
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.problems import render_value
from simplan.rules import RULES, check_job
from simplan.software.software import SoftwareSpec
from simplan.wording import either

Objective = Literal["step_time", "tokens_per_s_per_device", "num_devices", "memory", "cost"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def _check_schedule(name: str) -> str:
    if name in SCHEDULE_FACTS:
        return name
    raise ValueError(f"is not a schedule that is searched; {did_you_mean(name, SCHEDULE_FACTS)}")


_Schedule = Annotated[str, AfterValidator(_check_schedule), Field(json_schema_extra={"enum": list(SCHEDULE_FACTS)})]
_Counts = Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)]
_Switch = Annotated[tuple[bool, ...], Field(min_length=1)]
_Modules = Annotated[tuple[tuple[RecomputeModule, ...], ...], Field(min_length=1, max_length=100)]
_Placements = Annotated[
    tuple[Annotated[tuple[PlacedAxis, ...] | tuple[int, ...], BeforeValidator(check_searched_placement)], ...],
    Field(min_length=1, max_length=100),
]


class SearchSpace(Spec):
    """Ranges and objective of a search; a missing range has its default.

    A range applies only where a plan has the choice: ``schedule`` for pipelines, ``sequence_parallel`` for tp > 1,
    ``zero_stage`` for several shards, ``reshard_after_forward`` for ZeRO-3, ``grad_sync`` for several microbatches
    without a pipeline. A single value needs no brackets.

    Attributes:
        objective: Objective to rank by: ``step_time``, ``tokens_per_s_per_device``, ``num_devices``, ``memory`` of the
            worst device, or ``cost`` of ``token_budget`` tokens.
        objectives: Two objectives for a Pareto front; plans are ranked by the first.
        top: Number of plans to rank.
        max_memory_fraction: Maximum predicted device memory of a plan as a fraction of the device memory, including the
            allocator reserve. The default keeps 5% free, about as much as a predicted peak may be too small.
        max_step_time_s: Deadline of a step, in seconds.
        dollars_per_device_hour, token_budget: Price, and number of training tokens; required by ``cost``.
        num_devices: Device counts to compare; by default the cluster's.
        tp_across_nodes: Allow tensor-parallel groups to span nodes.
        recompute_layers: ``least`` also tries the fewest recomputed blocks per stage that fit, for promising plans that
            fit only with full recomputation; ``all`` does not.
        recompute_modules: Modules that selective recomputation recomputes: a list, or lists to compare. By default the
            attention core.
        tp, cp, cp_comm, ep, pp, virtual_stages, schedule, dp_replicate, dp_shard, zero_stage, reshard_after_forward,
            sequence_parallel, microbatch_size, recompute, grad_sync: Ranges of the plan's keys of the same names.
        microbatch_sizes: ``balanced`` for shares of the batch in proportion to the speed of devices, null for equal
            ones, or both. By default both for a cluster of different nodes.
        placement: Placements to compare: orders of axes, each innermost first, or devices by rank; one, or a list of
            them. By default that of the mesh.
        replication, compression: Ways to train that change the mathematics, each searched with all other ranges;
            ``dp_replicate`` then has all values above 1 by default.
        samples_factor: By kind of these, the samples that it needs for the same loss, relative to synchronous training
            with whole gradients; or ``published``. A way is ranked among other plans only with it.
        compiled, loss, offload_activations, offload_optimizer, optimizer, base_weights, lora_rank: Values of the keys
            of ``OPTION_KEYS`` to compare; by default the job's own. The last three change the mathematics.
    """

    objective: Objective = Field(
        "step_time", description="step_time, tokens_per_s_per_device, num_devices, memory, cost"
    )
    objectives: Annotated[tuple[Objective, ...], Field(min_length=2, max_length=2)] | None = Field(
        None, description="two objectives: Pareto front, ranked by the first"
    )
    top: Annotated[int, Field(ge=1, le=1000)] = Field(5, description="plans to rank")
    max_memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.95,
        description=(
            "maximum fraction of the device memory of a plan, allocator reserve included; 1 keeps no memory free"
        ),
    )
    max_step_time_s: Positive | None = Field(None, description="deadline of a step")
    dollars_per_device_hour: Positive | None = Field(
        None, description="your price, for the objective cost; default: cluster.price_per_device_hour"
    )
    token_budget: Positive | None = Field(
        None, description="tokens to train on, for the objective cost; default: training.num_tokens"
    )
    num_devices: Annotated[tuple[NumDevices, ...], Field(min_length=1, max_length=1000)] | None = Field(
        None, description="numbers of devices to compare"
    )
    tp_across_nodes: bool = Field(False, description="tensor-parallel groups may span nodes")
    recompute_layers: Literal["least", "all"] = Field(
        "least",
        description=(
            "plans that need full recomputation, also with the fewest blocks per stage that fit; or all: only with all"
        ),
    )
    tp: _Counts | None = Field(
        None,
        description=(
            "must also divide key-value heads, MLP and any vocabulary that is not padded; 1 for mixtures of experts"
        ),
    )
    cp: _Counts | None = None
    cp_comm: tuple[Literal["ring", "all_gather", "a2a"], ...] | None = Field(None, description="where cp > 1")
    ep: _Counts | None = Field(None, description="mixtures of experts")
    pp: _Counts | None = None
    virtual_stages: _Counts | None = Field(None, description="where pp > 1; those of the schedule")
    schedule: tuple[_Schedule, ...] | None = Field(None, description="where pp > 1")
    dp_replicate: _Counts | None = Field(None, description="dp_replicate x dp_shard x tp x cp x pp = devices")
    dp_shard: _Counts | None = None
    zero_stage: tuple[Annotated[int, Field(ge=0, le=3)], ...] | None = Field(
        None, description="where there are several shards; 0 only where dp_shard = 1"
    )
    reshard_after_forward: tuple[bool, ...] | None = Field(
        None, description="at zero_stage 3; ZeRO-3 that does not reshard is ZeRO-2, listed as that"
    )
    sequence_parallel: tuple[bool, ...] | None = Field(None, description="where tp > 1")
    microbatch_size: _Counts | None = Field(None, description="global_batch_size / (dp_replicate x dp_shard)")
    microbatch_sizes: tuple[Literal["balanced"] | None, ...] | None = Field(
        None, description="balanced, null for equal ones, or both: [null, balanced]"
    )
    recompute: tuple[Recompute, ...] | None = None
    recompute_modules: _Modules | None = Field(
        None, description="of recompute selective: lists of modules to recompute together, where the software has them"
    )
    grad_sync: tuple[Literal["step", "microbatch"], ...] | None = Field(
        None, description="where pp = 1, a step has several microbatches and the software has both"
    )
    placement: _Placements | None = Field(
        None,
        description=(
            "placements to compare: orders of axes from inside of nodes outwards, devices by rank, hostfiles, network"
        ),
    )
    compiled: _Switch | None = Field(None, description="true, false to compare both, where the software has the option")
    loss: Annotated[tuple[LossMode, ...], Field(min_length=1)] | None = Field(
        None, description="whole and losses in chunks to compare, where the software has them"
    )
    offload_activations: _Switch | None = Field(None, description="activations on the host or not, or both to compare")
    offload_optimizer: _Switch | None = Field(
        None, description="parameters and optimizer states on the host or not, or both to compare (FSDP)"
    )
    optimizer: Annotated[tuple[OptimizerName, ...], Field(min_length=1)] | None = Field(
        None, description="optimizers to compare, e.g. adamw and adamw_8bit; another one is another update"
    )
    base_weights: Annotated[tuple[WeightFormatName | Literal["none"], ...], Field(min_length=1)] | None = Field(
        None, description="formats of frozen weights to compare, e.g. none and nf4; fewer bits round weights"
    )
    lora_rank: _Counts | None = Field(None, description="ranks of adapters to compare; a rank bounds their update")

    replication: Annotated[tuple[ReplicationSection, ...], Field(min_length=1)] | None = Field(
        None, description="ways of replicas to compare: kinds, or mappings as in plan.replication"
    )
    compression: Annotated[tuple[CompressionSection, ...], Field(min_length=1)] | None = Field(
        None, description="gradient compression to compare: kinds, or mappings as in plan.compression"
    )
    samples_factor: Mapping[ReplicationKind | CompressionKind, Positive | Literal["published"]] | None = Field(
        None, description="by kind of these, samples for the same loss relative to synchronous training; or published"
    )

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        """Turn single values and lists of a file into the tuples that strict mode requires."""
        if not isinstance(data, dict):
            return data

        def listed(key: str, value: Any) -> Any:
            if (
                key not in (*RANGES, *OPTION_RANGES, *WAYS, "num_devices", "objectives")
                or value is None
                or (isinstance(value, dict) and key not in WAYS)
            ):
                return value
            values = tuple(value) if isinstance(value, list | tuple) else (value,)
            if key not in ("recompute_modules", "placement"):
                return values
            if key == "placement" and isinstance(value, str):
                return (value,)  # with commas
            is_one_list = values and all(
                isinstance(word, str | int) for word in values
            )  # one list without brackets around it
            return (
                (values,) if is_one_list else tuple(tuple(item) if isinstance(item, list) else item for item in values)
            )

        lists = {key: listed(key, value) for key, value in data.items()}
        goals = lists.get("objectives")
        if isinstance(goals, tuple) and "objective" not in lists and goals[:1] and goals[0] in OBJECTIVES:
            lists["objective"] = goals[0]  # so that a copy, in which every field is set, is valid too
        return lists

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

    @model_validator(mode="after")
    def _factors_of_ways(self) -> Self:
        asked = {way.kind for ways in (self.replication, self.compression) for way in ways or ()}
        unasked = [kind for kind in self.samples_factor or () if kind not in asked]
        if unasked:
            raise ValueError(f"has samples_factor.{unasked[0]}, and compares no such way; add it, or remove that")
        return self

    @property
    def goals(self) -> tuple[Objective, ...]:
        """The objective, or both objectives."""
        return self.objectives or (self.objective,)


RANGES = (
    "tp", "sequence_parallel", "cp", "cp_comm", "ep", "pp", "schedule", "virtual_stages", "dp_replicate", "dp_shard",
    "zero_stage", "reshard_after_forward", "microbatch_size", "microbatch_sizes", "recompute", "recompute_modules",
    "grad_sync", "placement",
)  # fmt: skip
"""Plan fields that a search varies."""

WAYS = ("replication", "compression")
"""Plan fields that a search compares one value after the other, since they change the mathematics."""

OPTION_KEYS: Mapping[str, str] = {
    "compiled": "software.compiled",
    "loss": "software.loss",
    "offload_activations": "plan.offload_activations",
    "offload_optimizer": "plan.offload_optimizer",
    "optimizer": "training.optimizer",
    "base_weights": "training.base_weights",
    "lora_rank": "model.lora_rank",
}
OPTION_RANGES = tuple(OPTION_KEYS)
"""Options besides the ranges of plans that a search varies on request, and their keys in a scenario."""
SOFTWARE_RANGES = tuple(name for name, key in OPTION_KEYS.items() if key.startswith("software."))
"""Searched options that the software must have."""

SearchedOptions = tuple[tuple[str, Any], ...]
"""Names and values of the searched options of one candidate; empty where no option is searched."""
NOT_QUANTIZED = "none"
"""Value of ``base_weights`` for weights as wide as the precision."""


def searched_options(space: SearchSpace) -> list[SearchedOptions]:
    """Combinations of the searched options; one empty combination if none is searched."""
    asked = {name: getattr(space, name) for name in OPTION_RANGES}
    ranges = [[(name, value) for value in dict.fromkeys(values)] for name, values in asked.items() if values]
    return list(product(*ranges))


def with_options(job: Job, options: SearchedOptions) -> Job:
    """Copy of a job with other options; weights keep the rest of ``base_weights`` if their format stays."""
    changes = {OPTION_KEYS[name]: _value(job, name, value) for name, value in options}
    return job.with_changes(changes) if changes else job


def option_of(job: Job, name: str) -> Any:
    """Value of a searched option as a search names it."""
    value = attrgetter(OPTION_KEYS[name])(job)
    if name == "base_weights":
        return NOT_QUANTIZED if value is None else value.format
    return value


def _value(job: Job, name: str, value: Any) -> Any:
    if name != "base_weights":
        return value
    base = job.training.base_weights
    if base is not None and base.format == value:
        return base
    return None if value == NOT_QUANTIZED else value


def that_it_has(software: SoftwareSpec, space: SearchSpace) -> SearchSpace:
    """Restrict the default ranges of a space to values that the software supports.

    Raises:
        NotModelledError: A range that is set has values that the software does not support.
    """
    allowed: dict[str, tuple[int, ...]] = {"zero_stage": software.zero_stages}
    if software.layers.attention == "unfused":
        allowed["cp"] = (1,)
    if not software.sequence_parallelism:
        allowed["sequence_parallel"] = (False,)
    options = [name for name in SOFTWARE_RANGES if getattr(space, name) is not None]
    problems = [_unknown_option(software, space, name) for name in options if name not in software.options]
    losses = ("whole", *software.chunked_losses)
    if "loss" in software.options and any(loss not in losses for loss in space.loss or ()):
        rule, value = f"{software.id} has {either(losses)} only", render_value(list(space.loss or ()))
        fix = f"write {render_value([loss for loss in space.loss or () if loss in losses] or list(losses))}"
        problems.append(Problem(field="search.loss", value=value, rule=rule, fix=fix))
    ranges = {}
    for field, values in allowed.items():
        asked = getattr(space, field)
        if any(value not in values for value in asked or ()):
            rule = f"{software.id} has {field} {either(map(render_value, values))} only, as far as it is modeled"
            left = [value for value in asked if value in values] or list(values)
            fix = f"write {render_value(left)}, or remove it"
            problems.append(Problem(field=f"search.{field}", value=render_value(list(asked)), rule=rule, fix=fix))
        elif asked is None and (field != "zero_stage" or values != (0, 1, 2, 3)):
            ranges[field] = values
    if problems:
        raise NotModelledError(problems)
    return space.model_copy(update=ranges) if ranges else space


def _unknown_option(software: SoftwareSpec, space: SearchSpace, name: str) -> Problem:
    known = f"its options are {', '.join(software.options)}" if software.options else "it has no options"
    value, rule = render_value(list(getattr(space, name))), f"is no option of {software.id}"
    return Problem(field=f"search.{name}", value=value, rule=rule, fix=f"{known}; remove it")


def given_ranges(software: SoftwareSpec, space: SearchSpace) -> tuple[str, ...]:
    """Names of the ranges that the user set and that differ from the software's own restrictions."""
    whole = that_it_has(software, space.model_copy(update=dict.fromkeys(RANGES)))
    ranges = ((name, getattr(space, name), getattr(whole, name)) for name in RANGES)
    return tuple(name for name, values, restricted in ranges if values is not None and values != restricted)


_OF_MODULES = [rule for rule in RULES if rule.name.startswith("recompute_modules_")]


def check_without_plan(job: Job, space: SearchSpace) -> None:
    """Raise errors of a job that no plan of a space can fix.

    Args:
        job: The job; its plan is ignored.

    Raises:
        SpecError: The job is invalid for every plan; lists all problems.
        NotModelledError: The cluster has jitter, a step drops gradients, or the software cannot recompute a module of
            ``search.recompute_modules`` on its own.
    """
    plan = ParallelPlan(dp_replicate=job.cluster.num_devices)
    if job.cluster.jitter is not None:
        rule, fix = "a search compares steps without jitter", "remove it, and predict the plans that are found with it"
        raise NotModelledError(Problem(field="cluster.jitter", rule=rule, fix=fix))
    if job.training.backup_workers:
        rule, fix = "a search compares steps that wait for all gradients", "remove it, and predict a plan with it"
        raise NotModelledError(Problem(field="training.backup_workers", rule=rule, fix=fix))
    try:
        check_job(job.with_plan(plan))
    except SpecError as error:
        lasting = [p for p in error.problems if p.field.split(".")[0] != "plan" and "batch" not in p.field]
        if lasting:
            raise type(error)(lasting) from None
    _check_modules(job, space)


def _check_modules(job: Job, space: SearchSpace) -> None:
    """Check ``search.recompute_modules``, which does not depend on parallel degrees."""
    if space.recompute_modules and space.recompute is not None and "selective" not in space.recompute:
        value = render_value([list(modules) for modules in space.recompute_modules])
        asked = render_value(list(space.recompute))
        rule = f"lists modules for selective recomputation, and search.recompute = {asked} does not include it"
        fix = "add selective to it, or remove this"
        raise SpecError(Problem(field="search.recompute_modules", value=value, rule=rule, fix=fix))
    for modules in space.recompute_modules or ():
        try:
            check_job(job.with_plan(ParallelPlan(recompute="selective", recompute_modules=modules)), _OF_MODULES)
        except SpecError as error:
            raise type(error)(
                [replace(problem, field="search.recompute_modules") for problem in error.problems]
            ) from None


def capacity_bytes(job: Job, space: SearchSpace) -> int | None:
    """Usable device memory in bytes; None if the device memory is unknown."""
    memory_bytes = job.cluster.largest_memory_bytes
    return None if memory_bytes is None else int(memory_bytes * space.max_memory_fraction)
