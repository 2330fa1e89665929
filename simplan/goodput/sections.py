"""Sections of a scenario about its whole run: length, failures, checkpoints, recovery, evaluations, price and power.

::

    run: {num_steps: 100000}                         # or num_tokens, num_samples
    reliability: {device_mtbf_h: 50000, detection_s: 60}
    checkpoint: {interval_s: 1800, blocking_s: 30}   # interval_s: best; bandwidths in place of blocking_s
    recovery: {restart_s: 600, spares: 2, repair_h: 24}
    price: {device_hour: 2.5}

A section that is left out means that nothing of its kind happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from simplan.base import Count, Line, Natural, NonNegative, Positive, Spec
from simplan.goodput.batch_scaling import SamplesAtBatch
from simplan.training import NumTokens, Price

MAX_HOURS = 1e9
Hours = Annotated[float, Field(gt=0, le=MAX_HOURS, allow_inf_nan=False)]
"""Hours, above zero."""
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Slowdown = Annotated[float, Field(gt=1, le=1000, allow_inf_nan=False)]
_BytesPerS = Annotated[float, Field(ge=1, le=1e15, allow_inf_nan=False)]

Unit = Literal["device", "node", "link", "job"]
"""Part of a cluster whose failures are counted: its number multiplies the rate."""
Scope = Literal["process", "node", "rack", "pod"]
"""Part of a job that a failure takes away. After a failure of a process its node goes on."""
Policy = Literal["restart", "shrink", "continue"]


class RunLength(Spec):
    """The section ``run``: length of the run, in one of three units, or as a law of the batch.

    Attributes:
        num_steps: Optimizer steps.
        num_tokens: Tokens, padding included; rounded up to whole steps.
        num_samples: Sequences or images; rounded up to whole steps.
        samples_at_batch: Sequences or images to a target, which depend on the batch of the plan.
    """

    num_steps: Count | None = Field(None, description="optimizer steps of the run")
    num_tokens: NumTokens | None = Field(None, description="tokens of the run, padding included")
    num_samples: NumTokens | None = Field(None, description="sequences or images of the run")
    samples_at_batch: SamplesAtBatch | None = Field(None, description="sequences or images to a target, by batch")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        lengths = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(lengths) != 1:
            raise ValueError("needs one of num_steps, num_tokens, num_samples and samples_at_batch")
        return self


class DetectionShares(Spec):
    """Fractions of failures by the way in which they are noticed; the rest is noticed by heartbeat."""

    at_once: _Share = Field(0.0, description="fraction noticed immediately: the process ends with an error")
    timeout: _Share = Field(0.0, description="fraction noticed by the timeout of a collective (NCCL's watchdog)")

    @model_validator(mode="after")
    def _at_most_all(self) -> Self:
        if self.at_once + self.timeout > 1:
            raise ValueError(f"at_once + timeout = {self.at_once + self.timeout:g} must be at most 1")
        return self


class Cause(Spec):
    """Failures of one cause.

    The failures of all units are a power-law process (Crow 1974; a Weibull rate with minimal repair): the expected
    number of failures of one unit up to age t is (t / mtbf_h) ** shape. With shape 1 they are a Poisson process.

    Attributes:
        name: Cause in words, unique in the section.
        per: Unit whose failures ``mtbf_h`` counts.
        mtbf_h: Mean time between failures of one unit; with another shape than 1, age up to which one is expected.
        shape: Shape of the rate over age: below 1 it falls (infant mortality), above 1 it rises (wear).
        age_h: Age of the units at the start of the run.
        scope: Part that is lost with the unit. ``rack`` and ``pod`` lose all of the job's nodes of one such group.
        detected: Fractions by the way in which failures are noticed; None for those of the section.
        repair_h: Time to repair a lost node; None for that of the recovery.
        planned: True for announced stops: the job writes a checkpoint first, and nothing is lost.
    """

    name: Annotated[Line, Field(min_length=1, max_length=100)]
    per: Unit = Field("device", description="unit whose failures mtbf_h counts")
    mtbf_h: Hours = Field(description="hours between failures of one unit")
    shape: Annotated[float, Field(ge=0.1, le=10, allow_inf_nan=False)] = Field(
        1.0, description="Weibull shape of the rate over age; below 1 infant mortality, above 1 wear"
    )
    age_h: NonNegative = Field(0.0, description="age of the units at the start of the run")
    scope: Scope = Field("node", description="part that is lost with the unit; a process restarts on its node")
    detected: DetectionShares | None = Field(None, description="fractions noticed immediately or by timeout")
    repair_h: NonNegative | None = Field(None, description="hours to repair a lost node")
    planned: bool = Field(False, description="announced: the job writes a checkpoint first")


class SilentCorruption(Spec):
    """Silent data corruption: wrong numbers that are found later; the run goes back to a checkpoint before them."""

    device_mtbf_h: Hours = Field(description="hours of one device between corruptions")
    found_h: NonNegative = Field(description="mean hours until a corruption is found (exponential)")


class FailSlow(Spec):
    """Devices that become slow, with all that wait for them, until they are found and their node is replaced."""

    device_mtbf_h: Hours = Field(description="hours of one device until it becomes slow")
    slowdown: _Slowdown = Field(1.34, description="factor on the step time while a device is slow")
    found_h: NonNegative = Field(description="mean hours until a slow device is found (exponential)")


class Maintenance(Spec):
    """Windows at fixed times in which no node runs; a checkpoint is written before each."""

    every_h: Hours = Field(description="hours between the starts of two windows")
    duration_h: Hours = Field(description="hours of a window")

    @model_validator(mode="after")
    def _shorter(self) -> Self:
        if self.duration_h >= self.every_h:
            raise ValueError(f"duration_h = {self.duration_h:g} must be below every_h = {self.every_h:g}")
        return self


class Reliability(Spec):
    """The section ``reliability``: failures, how they are noticed, and what is slow or wrong.

    Attributes:
        preset: Name of published rates (``simplan show reliability``); other keys are added to it or replace its own.
        device_mtbf_h, node_mtbf_h, link_mtbf_h: Short forms of causes with the name of their unit, scope node for
            devices and nodes, and process for links.
        detection_s: Time until a failure is noticed by heartbeat, which is the rule.
        timeout_s: Time until a failure is noticed by timeout.
        detected: Fractions that are noticed at once or by timeout.
    """

    preset: str | None = Field(None, description="name of published rates")
    device_mtbf_h: Hours | None = Field(None, description="hours of one device between failures")
    node_mtbf_h: Hours | None = Field(None, description="hours of one node between failures")
    link_mtbf_h: Hours | None = Field(None, description="hours of one network card's link between failures")
    causes: tuple[Cause, ...] = Field((), description="failures by cause")
    detection_s: NonNegative = Field(0.0, description="seconds until a failure is noticed by heartbeat")
    timeout_s: NonNegative = Field(600.0, description="seconds until a failure is noticed by a collective's timeout")
    detected: DetectionShares = Field(DetectionShares(), description="fractions noticed immediately or by timeout")
    silent_corruption: SilentCorruption | None = Field(None, description="wrong numbers that are found later")
    fail_slow: FailSlow | None = Field(None, description="devices that become slow")
    maintenance: Maintenance | None = Field(None, description="windows at fixed times")

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [cause.name for cause in self.causes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"causes has {twice} twice; use one entry for each cause")
        return self

    @property
    def all_causes(self) -> tuple[Cause, ...]:
        """Causes, those of the short forms first."""
        units: tuple[tuple[Unit, Scope, float | None], ...] = (
            ("device", "node", self.device_mtbf_h),
            ("node", "node", self.node_mtbf_h),
            ("link", "process", self.link_mtbf_h),
        )
        short = (
            Cause(name=f"{unit} failure", per=unit, mtbf_h=hours, scope=scope) for unit, scope, hours in units if hours
        )
        return (*short, *self.causes)


class MemoryTier(Spec):
    """Checkpoints in memory of a neighbor or on a local disk: fast, and lost with a rack, a pod or the job."""

    interval_s: Positive | None = Field(None, description="seconds of training between two checkpoints in memory")
    interval_steps: Count | None = Field(None, description="steps between them, in place of interval_s")
    blocking_s: NonNegative = Field(description="seconds that training waits for one")
    load_s: NonNegative = Field(0.0, description="seconds to load one after a failure")

    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        if (self.interval_s is None) == (self.interval_steps is None):
            raise ValueError("needs interval_s or interval_steps")
        return self


def _interval(value: Any) -> Any:
    """An interval; one sentence about a value that is neither of both types."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    if value not in (None, "best") and not is_number:
        raise ValueError("must be seconds above 0, or best")
    return value


class CheckpointPolicy(Spec):
    """The section ``checkpoint``: when checkpoints are written, and how long that takes.

    Training waits ``blocking_s``. If that is left out it follows from the bytes and the slowest of the bandwidths that
    are given. Asynchronous writing blocks for a copy to the host only, and a checkpoint counts when it is written.

    Attributes:
        interval_s: Seconds of training between two checkpoints, rounded to whole steps, or ``best`` for the interval
            with the shortest mean time.
        interval_steps: Steps between two checkpoints, in place of ``interval_s``.
        blocking_s: Seconds that training waits for one checkpoint.
        async_save: True if training goes on while a checkpoint is written.
        write_s: For asynchronous writing, seconds from the copy until the checkpoint counts; None for the seconds from
            bytes and bandwidths.
        num_bytes: Bytes of a checkpoint; None for those of parameters and optimizer states of the plan.
        writers: Ranks that write: all, each its shard; one of each node; or one of the job.
        device_bytes_per_s, node_bytes_per_s, storage_bytes_per_s: Write bandwidth of one device, of one node, and of
            the storage system.
        read_bytes_per_s: Bandwidth of the storage system to load a checkpoint; None for that of writing.
        load_s: Seconds to load a checkpoint; None for those from bytes and bandwidths, or zero without any.
        copy_bytes_per_s: For asynchronous writing, bandwidth of a device's copy to its host.
        keep: Checkpoints that are kept; None for all. Silent corruption goes back to one before it.
        storage_bytes: Capacity of the storage; None for no limit.
        memory_tier: Checkpoints in memory in addition.
    """

    interval_s: Annotated[Positive | Literal["best"] | None, BeforeValidator(_interval)] = Field(
        None, description="seconds of training between checkpoints, or best"
    )
    interval_steps: Count | None = Field(None, description="steps between checkpoints, in place of interval_s")
    blocking_s: NonNegative | None = Field(None, description="seconds that training waits for a checkpoint")
    async_save: bool = Field(False, description="training goes on while a checkpoint is written")
    write_s: NonNegative | None = Field(None, description="async_save: seconds until the checkpoint counts")
    num_bytes: Annotated[float, Field(ge=1, le=1e18)] | None = Field(None, description="bytes of a checkpoint")
    writers: Literal["all", "node", "one"] = Field("all", description="ranks that write")
    device_bytes_per_s: _BytesPerS | None = Field(None, description="write bandwidth of a device")
    node_bytes_per_s: _BytesPerS | None = Field(None, description="write bandwidth of a node")
    storage_bytes_per_s: _BytesPerS | None = Field(None, description="write bandwidth of the storage system")
    read_bytes_per_s: _BytesPerS | None = Field(None, description="read bandwidth of the storage system")
    load_s: NonNegative | None = Field(None, description="seconds to load a checkpoint")
    copy_bytes_per_s: _BytesPerS = Field(20e9, description="async_save: bandwidth of a device's copy to its host")
    keep: Count | None = Field(None, description="checkpoints that are kept")
    storage_bytes: Annotated[float, Field(ge=1, le=1e21)] | None = Field(None, description="capacity of the storage")
    memory_tier: MemoryTier | None = Field(None, description="checkpoints in memory or on local disks in addition")

    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        if (self.interval_s is None) == (self.interval_steps is None):
            raise ValueError("needs interval_s (seconds, or best) or interval_steps")
        if self.write_s is not None and not self.async_save:
            raise ValueError("write_s is for async_save: true; use blocking_s")
        bandwidths = (self.device_bytes_per_s, self.node_bytes_per_s, self.storage_bytes_per_s)
        if not any(bandwidths) and (self.blocking_s is None or (self.async_save and self.write_s is None)):
            needs = "write_s" if self.blocking_s is not None else "blocking_s"
            raise ValueError(f"needs {needs}, or a bandwidth such as storage_bytes_per_s")
        return self


class Recovery(Spec):
    """The section ``recovery``: from the notice of a failure until training goes on.

    Attributes:
        policy: ``restart``: all ranks restart from the last checkpoint once all nodes are there. ``shrink``: without a
            spare they restart on the nodes that are left, at the same batch, and again on more when a node is repaired.
            ``continue``: the replica groups without the lost node go on after ``reconfigure_s`` and lose the step in
            progress; a group that is complete again joins (as torchft).
        restart_s: Seconds from then until the first step, without loading: processes, communicators, compilation.
        init_s_per_device: Seconds more per device of the job.
        warmup_s: Seconds more that the first steps take.
        diagnosis_s: Seconds from the notice until the lost nodes are known.
        spares: Nodes that wait for a lost one.
        takeover_s: Restart time when spares are hot and replace all lost nodes; None for cold spares.
        repair_h: Hours until a lost node is a spare again. Zero: it is back at the restart.
        repair_distribution: ``fixed``, or ``exponential`` with that mean.
        min_nodes: For ``shrink`` and ``continue``, nodes (of whole replica groups) below which the job waits.
        reconfigure_s: For ``continue``, seconds that the others wait when a group leaves.
        join_s: For ``continue``, seconds that the others wait when a group joins.
    """

    policy: Policy = Field("restart", description="restart, shrink to the nodes that are left, or continue without")
    restart_s: NonNegative = Field(0.0, description="seconds until the first step, without loading")
    init_s_per_device: NonNegative = Field(0.0, description="seconds more per device of the job")
    warmup_s: NonNegative = Field(0.0, description="seconds more that the first steps take")
    diagnosis_s: NonNegative = Field(0.0, description="seconds until the lost nodes are known")
    spares: Natural = Field(0, description="nodes that wait for a lost one")
    takeover_s: NonNegative | None = Field(None, description="restart time with hot spares, in place of restart_s")
    repair_h: NonNegative = Field(0.0, description="hours until a lost node is a spare")
    repair_distribution: Literal["fixed", "exponential"] = Field("fixed", description="distribution of repair times")
    min_nodes: Count | None = Field(None, description="nodes below which the job waits")
    reconfigure_s: NonNegative = Field(0.0, description="continue: wait of the others when a group leaves")
    join_s: NonNegative = Field(0.0, description="continue: wait of the others when a group joins")

    @model_validator(mode="after")
    def _of_policy(self) -> Self:
        if self.policy == "restart" and self.min_nodes is not None:
            raise ValueError("min_nodes is for policy: shrink or continue; restart waits for all nodes")
        if self.policy != "continue" and (self.reconfigure_s or self.join_s):
            raise ValueError("reconfigure_s and join_s are for policy: continue")
        if self.takeover_s is not None and not self.spares:
            raise ValueError("takeover_s is the restart time with hot spares; set spares to 1 or more")
        return self


class Spot(Spec):
    """The section ``spot``: nodes that their provider takes back.

    Attributes:
        preemptions_per_h: Preemptions of one node per hour; None with a trace.
        trace: CSV file with columns time_s and available (nodes), times rising; the run starts at a random point of
            it, and goes on at its start after its end.
        notice_s: Seconds between the notice and the loss of the node. If a checkpoint can be written in that time,
            nothing is lost.
        wait_h: Mean hours until another spot node is there (exponential); None with a trace.
        fallback: ``on_demand`` if a node on demand replaces a lost one at once, until a spot node is there.
        zone: Name of a published rate (``simplan show reliability``), in place of preemptions_per_h and wait_h.
    """

    preemptions_per_h: Positive | None = Field(None, description="preemptions of one node per hour")
    trace: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None, description="CSV file of nodes that are available over time"
    )
    notice_s: NonNegative = Field(0.0, description="seconds between the notice and the loss")
    wait_h: NonNegative | None = Field(None, description="mean hours until another spot node is there")
    fallback: Literal["wait", "on_demand"] = Field("wait", description="what replaces a lost node")
    zone: str | None = Field(None, description="name of published rates of one zone")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("preemptions_per_h", "trace", "zone") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError("needs one of preemptions_per_h, trace and zone")
        if self.wait_h is not None and self.preemptions_per_h is None:
            raise ValueError(f"wait_h goes with preemptions_per_h; {sources[0]} says when nodes are there")
        return self


class Evaluation(Spec):
    """The section ``evaluation``: pauses of training for evaluations."""

    every_steps: Count = Field(description="steps between two evaluations")
    time_s: NonNegative = Field(description="seconds of one evaluation")


class RunPrice(Spec):
    """The section ``price``: price of one device for one hour, in any currency.

    Attributes:
        device_hour: Price on demand, of all devices without a ``spot`` section.
        spot_device_hour: Price of spot devices; None for ``device_hour``.
        idle_device_hour: Price of the devices of spares; None for ``device_hour``.
    """

    device_hour: Price = Field(description="price of one device for one hour")
    spot_device_hour: Price | None = Field(None, description="price of a spot device")
    idle_device_hour: NonNegative | None = Field(None, description="price of a spare's device")


class Power(Spec):
    """The section ``power``: energy and its emissions.

    Attributes:
        device_w: Power of one device under load, with its part of the node.
        idle_w: Power of one device that waits, likewise; None for ``device_w``.
        pue: Power usage effectiveness of the site.
        co2_g_per_kwh: Emissions of the electricity; None for no emissions in the result.
    """

    device_w: Annotated[float, Field(gt=0, le=1e5)] = Field(description="watts of a device under load")
    idle_w: Annotated[float, Field(ge=0, le=1e5)] | None = Field(None, description="watts of a device that waits")
    pue: Annotated[float, Field(ge=1, le=10)] = Field(1.0, description="power usage effectiveness of the site")
    co2_g_per_kwh: Annotated[float, Field(ge=0, le=1e4)] | None = Field(None, description="grams of CO2 per kWh")


class RunSections(Spec):
    """All sections of a whole run; None for a section that the scenario does not have.

    The length and the price may stand elsewhere (``TrainingBudget``).
    """

    run: RunLength | None = None
    reliability: Reliability | None = None
    checkpoint: CheckpointPolicy | None = None
    recovery: Recovery | None = None
    spot: Spot | None = None
    evaluation: Evaluation | None = None
    price: RunPrice | None = None
    power: Power | None = None


SECTIONS: Mapping[str, type[Spec]] = {
    "run": RunLength,
    "reliability": Reliability,
    "checkpoint": CheckpointPolicy,
    "recovery": Recovery,
    "spot": Spot,
    "evaluation": Evaluation,
    "price": RunPrice,
    "power": Power,
}
"""Sections of a whole run by their key in a scenario."""
