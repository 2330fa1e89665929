"""Prediction of one plan as plain data: time, memory and uncertainty; made by ``predict``."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import to_jsonable_python

from simplan.cost.known import WeakestTerm
from simplan.job import Job
from simplan.plan.placement import Placement
from simplan.plan.plan import RankMapping, StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.action import Table, format_table
from simplan.program.program import MemoryCategory
from simplan.program.timeline import SpanKind, Split, Timeline
from simplan.software.loading_peaks import LoadingPeaks
from simplan.training import TrainingBudget
from simplan.units import GIB, counted, format_bytes, format_percent, format_rate, format_time

if TYPE_CHECKING:
    import pandas as pd

    from simplan.network.load import Network

PREDICTION_SCHEMA_VERSION = 2
_OF_TRAINING_RUN = (
    "days, device-hours and cost of the training: constant step time, no failures, checkpoints or restarts "
    "(`simplan goodput` has them)"
)


MemoryKind = Literal["allocated", "reserved", "device"]
"""Kind of a peak: tensors, memory of the caching allocator, or memory in use on the device."""
MemoryVerdict = Literal["fits", "may not fit", "likely does not fit", "does not fit", "unknown"]
"""``unknown``: more than the device has is predicted, for a runtime whose peaks were never compared."""
"""Verdict on device memory: in the second and third, the 90% interval of the peak reaches over the device memory."""
_LEAST_HEADROOM = 0.03
"""Fraction of the device memory below which tensors leave too little: of published runs with less, most fail."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank at its peak point.

    Attributes:
        by_category: Bytes by category at the peak; the category context is not part of ``allocated_bytes``.
        allocated_bytes: Bytes of tensors.
        reserved_bytes: Bytes of the caching allocator: allocated, rounded up, plus its reserve. Like ``device_bytes``,
            they may exceed the device memory.
        device_bytes: Bytes on the device: reserved plus context.
        peak_action: Action during the peak, as text; empty for between steps.
        activations_in_flight: By stage, the maximum number of microbatches with live activations.
        host_bytes: Peak bytes in host memory of offloaded tensors; on a CPU they count as device memory too.
        short_bytes: Bytes of the reserve for which the device has no memory. The allocator frees unused blocks and
            retries, which costs time and is no failure.
        interval_bytes: 90% interval by kind of peak: allocated, reserved, device. Lower ends are without
            ``short_bytes``.
        capacity_bytes: Memory of the rank's device; None if unknown.
        is_compared: Peaks of the framework's runtime were compared with measured ones.
        paged_bytes: Bytes of optimizer states in managed memory, which no counter of the allocator has.
        evicted_bytes: Part of these for which the device has no room, and which is on the host; not in
            ``device_bytes``.
    """

    rank: int
    by_category: dict[MemoryCategory, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    peak_action: str
    activations_in_flight: dict[int, int]
    host_bytes: int = 0
    short_bytes: int = 0
    interval_bytes: dict[MemoryKind, tuple[int, int]] = field(default_factory=dict)
    capacity_bytes: int | None = None
    is_compared: bool = True
    paged_bytes: int = 0
    evicted_bytes: int = 0

    def measurable_bytes(self, kind: MemoryKind) -> int:
        """Peak that a measurement on this device shows, where the allocator does without ``short_bytes``."""
        peak_bytes: int = getattr(self, f"{kind}_bytes")
        return peak_bytes if kind == "allocated" else peak_bytes - self.short_bytes

    @property
    def needed_bytes(self) -> int:
        """Device bytes that decide if the rank fits: ``device_bytes`` without ``short_bytes``."""
        return self.measurable_bytes("device")

    @property
    def wanted_bytes(self) -> int:
        """Device bytes to show beside the capacity: with the whole reserve if the rank fits, else ``needed_bytes``."""
        return self.device_bytes if self.fits else self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """True if tensors and context are within the device memory; None if that is unknown.

        A runtime whose peaks were never compared may need less than predicted.
        """
        if self.capacity_bytes is None:
            return None
        fits = self.needed_bytes <= self.capacity_bytes
        return fits if fits or self.is_compared else None

    @property
    def unavoidable_bytes(self) -> int:
        """Bytes of tensors and context: device bytes without blocks that the allocator can free."""
        return self.device_bytes - self.reserved_bytes + self.allocated_bytes

    @property
    def device_interval_bytes(self) -> tuple[int, int]:
        """90% interval of the device bytes that the rank needs; without width if it has none."""
        return self.interval_bytes.get("device", (self.needed_bytes, self.device_bytes))

    @property
    def interval_gib(self) -> dict[str, list[float]]:
        """90% intervals of the peak as JSON, GiB."""
        return {kind: [low / GIB, high / GIB] for kind, (low, high) in self.interval_bytes.items()}

    @property
    def peak_gib(self) -> dict[str, float]:
        """Peak memory as JSON, GiB."""
        return {
            "allocated": self.allocated_bytes / GIB,
            "reserved": self.reserved_bytes / GIB,
            "device": self.device_bytes / GIB,
        }


def worst_memory(memory: Sequence[RankMemory]) -> RankMemory:
    """Memory of the rank with the least headroom, which is the largest if all devices are equal; the lowest rank."""
    return max(memory, key=lambda m: (m.needed_bytes - (m.capacity_bytes or 0), m.short_bytes, -m.rank))


def all_fit(memory: Iterable[RankMemory]) -> bool | None:
    """True if all ranks fit, False if one does not; None if that is unknown."""
    verdicts = {rank.fits for rank in memory}
    return False if False in verdicts else None if None in verdicts else True


def busiest_host_bytes(job: Job, memory: Iterable[RankMemory]) -> int:
    """Offloaded bytes in host memory, summed over the ranks of a node, on the node with the most."""
    totals = Counter[int]()
    for rank in memory:
        if rank.host_bytes:
            totals[job.node_of(rank.rank)] += rank.host_bytes
    return max(totals.values(), default=0)


def fits_on_hosts(job: Job, memory: Iterable[RankMemory], loading: LoadingPeaks | None) -> bool | None:
    """True if offloaded tensors, and the model while it is loaded, fit in the host memory of every node.

    None if that memory is unknown.
    """
    capacity = job.cluster.host_memory_bytes
    loaded_bytes = 0 if loading is None else loading.host_bytes
    return None if capacity is None else max(busiest_host_bytes(job, memory), loaded_bytes) <= capacity


def job_fits(job: Job, memory: Sequence[RankMemory], loading: LoadingPeaks | None) -> bool | None:
    """True if a job fits on all devices and hosts, also while its model is loaded; of predictions and their summaries.

    False if one of them lacks memory; None if that is unknown.

    Args:
        memory: Memory of every rank; without offloaded tensors, of different ranks.
    """
    capacity = worst_memory(memory).capacity_bytes
    if loading is not None and capacity is not None and loading.device_bytes > capacity:
        return False
    return False if fits_on_hosts(job, memory, loading) is False else all_fit(memory)


def memory_verdict(worst: RankMemory, capacity_bytes: int | None) -> MemoryVerdict | None:
    """Verdict on the peak-memory rank of a plan; None if the memory of a device is unknown."""
    if capacity_bytes is None:
        return None
    if worst.fits is None:
        return "unknown"
    low, high = worst.device_interval_bytes
    if high <= capacity_bytes:
        return "fits"
    if low > capacity_bytes:
        return "does not fit"
    return "likely does not fit" if _leaves_too_little(worst, capacity_bytes) else "may not fit"


def _leaves_too_little(worst: RankMemory, capacity_bytes: int) -> bool:
    """True if tensors and context leave less than 3 % of the device memory, or are larger."""
    return worst.unavoidable_bytes > (1 - _LEAST_HEADROOM) * capacity_bytes


@dataclass(frozen=True, slots=True)
class Term:
    """One cost term of a step, with its source.

    Attributes:
        name: Name of the work, e.g. ``block forward``, ``all_reduce over 2 ranks (shard)``.
        kind: Part of the time split that the term counts as.
        seconds: Seconds of one occurrence.
        count: Occurrences per rank, mean over ranks.
        provenance: Source: ``datasheet``, ``published``, ``calibrated`` or ``extrapolated``.
        formula: Formula with numbers filled in.
    """

    name: str
    kind: SpanKind
    seconds: float
    count: float
    provenance: str
    relative_std: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JitteredStep:
    """Times of steps whose durations vary at random (``ClusterSpec.jitter``).

    Attributes:
        num_steps: Simulated steps.
        without_s: Seconds of a step without jitter.
        mean_s, median_s: Mean and median seconds of a step.
        range_s: Seconds that 5 % and 95 % of the steps do not exceed.
    """

    num_steps: int
    without_s: float
    mean_s: float
    median_s: float
    range_s: tuple[float, float]

    @property
    def words(self) -> str:
        """Cost of jitter, and range of step times."""
        low_s, high_s = map(format_time, self.range_s)
        more = format_percent(self.mean_s / self.without_s - 1)
        return (
            f"costs {more}: {format_time(self.without_s)} a step without, {format_time(self.mean_s)} in the mean of "
            f"{self.num_steps} seeded steps (median {format_time(self.median_s)}, 90 % take {low_s} to {high_s})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedStep:
    """Times of steps with other seeds of the hash that picks paths (ECMP).

    Attributes:
        num_seeds: Predicted seeds.
        mean_s, median_s: Mean and median seconds of a step.
        range_s: Seconds of the fastest and the slowest step.
    """

    num_seeds: int
    mean_s: float
    median_s: float
    range_s: tuple[float, float]

    @property
    def words(self) -> str:
        """Mean and range of step times."""
        low_s, high_s = map(format_time, self.range_s)
        return (
            f"{format_time(self.mean_s)} a step in the mean of {self.num_seeds} seeds of the hash (median "
            f"{format_time(self.median_s)}, {low_s} to {high_s})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupStep:
    """Effect of dropped gradients on a step (``TrainingSpec.backup_workers``).

    Attributes:
        num_dropped: Gradients that are dropped.
        num_replicas: Replicas that compute one each.
        step_time_s: Seconds of the step.
        without_s: Seconds of a step that waits for all gradients; with jitter, of the step nearest to the mean.
    """

    num_dropped: int
    num_replicas: int
    step_time_s: float
    without_s: float

    @property
    def throughput_ratio(self) -> float:
        """Used sequences per second, over those of a step that waits for all gradients."""
        return (1 - self.num_dropped / self.num_replicas) * self.without_s / self.step_time_s

    @property
    def words(self) -> str:
        """Dropped gradients, and their effect on step time and throughput."""
        change = self.throughput_ratio - 1
        step, without = format_time(self.step_time_s), format_time(self.without_s)
        last = f"{self.num_dropped} " if self.num_dropped > 1 else ""
        number = f"{format_percent(abs(change))} {'more' if change > 0 else 'fewer'}"
        return (
            f"each step drops the last {last}of {self.num_replicas} gradients: {step} a step instead of {without}, "
            f"and {number} used samples per second"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionStep:
    """Steps with compressed and with whole gradients (``ParallelPlan.compression``).

    Attributes:
        sent_bytes: Bytes that a rank sends for its gradients in a step with compression.
        whole_bytes: Bytes that it sends with whole gradients.
        step_time_s: Seconds of a step with compression.
        whole_s: Seconds of a step with whole gradients, as before compression starts.
        num_warmup: Steps before it starts, besides ``warmup_share``.
        warmup_share: Fraction of the run's steps before it starts.
    """

    sent_bytes: int
    whole_bytes: int
    step_time_s: float
    whole_s: float
    num_warmup: int
    warmup_share: float = 0.0

    def mean_step_s(self, num_steps: int) -> float:
        """Mean seconds of the steps of a run, those with whole gradients included."""
        num_warmup = self.num_warmup + math.ceil(self.warmup_share * num_steps)
        whole_share = min(1.0, num_warmup / num_steps)
        return whole_share * self.whole_s + (1 - whole_share) * self.step_time_s

    @property
    def words(self) -> str:
        """Effect on step time and bytes, and the steps before compression starts."""
        step, whole = format_time(self.step_time_s), format_time(self.whole_s)
        text = (
            f"{step} a step instead of {whole} with whole gradients; each rank sends {format_bytes(self.sent_bytes)} "
            f"of gradients instead of {format_bytes(self.whole_bytes)}"
        )
        if self.warmup_share:
            return f"{text}; whole gradients in the first {format_percent(self.warmup_share)} of the steps"
        return f"{text}; whole gradients in the first {self.num_warmup:,} steps" if self.num_warmup else text


_SMALL_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasLeft:
    """Step of a run that goes on after replicas have left (``Replication.min_replicas``).

    Attributes:
        num_replicas: Replicas that are left.
        step_time_s: Mean seconds of their optimizer step; of workers that do not wait for all others, of one update
            per worker.
        sequences_per_s: Sequences that they train on per second.
    """

    num_replicas: int
    step_time_s: float
    sequences_per_s: float

    @property
    def words(self) -> str:
        """Number of replicas, step time and throughput."""
        left = counted(self.num_replicas, "replica")
        rate = f"{self.sequences_per_s:.4g} samples per second"
        return f"with {left}, a step takes {format_time(self.step_time_s)} in the mean: {rate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationRound:
    """A round of replicas that train alone between outer steps (``Replication.has_rounds``).

    Attributes:
        inner_steps: Optimizer steps of a round.
        outer_steps: Outer steps of a round, one for each fragment.
        steps_beside: Steps during which an outer step communicates; 0 if replicas wait for it.
        mean_step_s: Mean seconds of an optimizer step.
        inner_step_s: Seconds of a step without an outer step.
        outer_s: Seconds of a step with an outer step, or of all steps beside it.
        sent_bytes: Bytes that a rank sends for the outer steps of a round, as a ring does.
        left: Steps of fewer replicas, most replicas first; empty for a run that ends with any of its replicas.
    """

    inner_steps: int
    outer_steps: int
    steps_beside: int
    mean_step_s: float
    inner_step_s: float
    outer_s: float
    sent_bytes: int
    left: tuple[ReplicasLeft, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON of the round."""
        hidden = {"round_s": self.round_s, "exposed_s": self.exposed_s, "hiding_bytes_per_s": self.hiding_bytes_per_s}
        return asdict(self) | hidden

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.inner_steps * self.mean_step_s

    @property
    def exposed_s(self) -> float:
        """Seconds of a round that outer steps add to its inner steps."""
        return max(0.0, self.round_s - self.inner_steps * self.inner_step_s)

    @property
    def hiding_bytes_per_s(self) -> float:
        """Bandwidth of a rank at which communication disappears.

        Beside steps, it is the one at which an outer step ends with them. Where replicas wait, it is the one at which
        communication takes 5 % as long as the inner steps.
        """
        if self.steps_beside:
            return self.sent_bytes / self.outer_steps / (self.steps_beside * self.inner_step_s)
        return self.sent_bytes / (_SMALL_SHARE * self.inner_steps * self.inner_step_s)

    @property
    def words(self) -> str:
        """Times of a round, its bytes, and the bandwidth at which communication disappears."""
        steps, each = counted(self.inner_steps, "inner step"), format_time(self.inner_step_s)
        many = counted(self.outer_steps, "outer step")
        waits = f"is hidden by {counted(self.steps_beside, 'further step')}" if self.steps_beside else "takes 5 %"
        return (
            f"a round takes {format_time(self.round_s)}: {steps} of {each}, and {format_time(self.exposed_s)} more for "
            f"{many}; each rank sends {format_bytes(self.sent_bytes)} a round, which {waits} at "
            f"{format_rate(self.hiding_bytes_per_s)}"
        )


_UNEVEN = 1.2
"""Ratio of updates of the fastest and the slowest worker from which both are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationWorkers:
    """Steps of workers that do not wait for all others (``Replication.has_workers``), simulated beside each other.

    Attributes:
        num_workers: Workers; the predicted step time is that of as many updates.
        num_steps: Simulated steps of all workers, without the first ones, in which queues fill.
        updates_per_s: Gradients that are applied per second.
        least_share, most_share: Fraction of the updates by the slowest and by the fastest worker.
        staleness_mean, staleness_p90: Mean and 90 % quantile of the updates of other workers that a server applied
            between a worker's pull of parameters and the update by the gradient that it computed with them.
        staleness_shares: By staleness, the fraction of updates that had it.
        queued_s: Mean seconds for which an update waited for those before it at its server, or for the lock.
        held_s: Mean seconds of a step for which a worker waited for slower ones (SSP).
        most_ahead: Largest number of steps by which a worker was ahead of the slowest.
        pushed_bytes, pulled_bytes: Bytes between a worker and all servers per step; 0 on shared memory.
        busiest_link_share: Fraction of the time for which the busiest link is full; None if no links are shared.
        server_bytes: Bytes of parameters, optimizer states and the gradients of every worker on the largest server.
        left: See ``ReplicationRound``.
    """

    num_workers: int
    num_steps: int
    updates_per_s: float
    least_share: float
    most_share: float
    staleness_mean: float
    staleness_p90: float
    staleness_shares: dict[int, float]
    queued_s: float
    held_s: float
    most_ahead: int
    pushed_bytes: int
    pulled_bytes: int
    busiest_link_share: float | None
    server_bytes: int
    left: tuple[ReplicasLeft, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON of the workers."""
        return asdict(self) | {"staleness_shares": {str(key): share for key, share in self.staleness_shares.items()}}

    @property
    def words(self) -> str:
        """Rate of updates, staleness, waiting and bytes."""
        waits = f", waits {format_time(self.queued_s)} for its turn" if self.queued_s else ""
        uneven = self.most_share > _UNEVEN * self.least_share
        shares = (
            f", {format_percent(self.least_share)} to {format_percent(self.most_share)} of the updates each"
            if uneven
            else ""
        )
        held = f" and {format_time(self.held_s)} for slower workers" if self.held_s else ""
        text = (
            f"{self.updates_per_s:.4g} updates per second of {counted(self.num_workers, 'worker')}{shares}; an update "
            f"is {self.staleness_mean:.3g} updates stale in the mean, 90 % up to {self.staleness_p90:.0f}{waits}{held}"
        )
        if not self.pushed_bytes:
            return text
        link = (
            ""
            if self.busiest_link_share is None
            else f"; the busiest link is full {self.busiest_link_share:.0%} of the time"
        )
        return (
            f"{text}; each worker pushes {format_bytes(self.pushed_bytes)} and pulls {format_bytes(self.pulled_bytes)} "
            f"per step{link}; a server has {format_bytes(self.server_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A full training at a constant step time, without failures, checkpoints and restarts.

    Attributes:
        num_tokens: Tokens, padding included; images for image models.
        num_steps: Optimizer steps; the last one may need fewer tokens.
        days: Wall time in days.
        days_interval: 90 % interval of ``days``, from that of the step time; None if that is unknown.
        device_hours: Hours of all devices together.
        cost: ``device_hours`` x ``price_per_device_hour``; None without a price.
        cost_interval: 90 % interval of ``cost``; None without a price or an interval of the step time.
        price_per_device_hour: Price of one device for one hour, in any currency.
    """

    num_tokens: float
    num_steps: int
    days: float
    days_interval: tuple[float, float] | None
    device_hours: float
    cost: float | None
    cost_interval: tuple[float, float] | None
    price_per_device_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroupStep:
    """A step on the ranks of one node group.

    Attributes:
        device: Name of the devices.
        ranks: Ranks on the nodes of the group.
        pipeline_ranks: Pipeline ranks with a rank on these nodes.
        microbatch_sizes: Different numbers of sequences per microbatch, ascending.
        wait_s: Seconds of a step in which a rank waits for others or has no work, mean over ranks.
        limits: True if the rank that waits least is in this group, so that a faster device would shorten the step.
        worst: Memory of the rank with the least headroom.
    """

    device: str
    ranks: tuple[int, ...]
    pipeline_ranks: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    wait_s: float
    limits: bool
    worst: RankMemory

    @property
    def memory_verdict(self) -> MemoryVerdict | None:
        """Verdict on the memory of the group's devices; None if that is unknown."""
        return memory_verdict(self.worst, self.worst.capacity_bytes)

    def to_json(self) -> dict[str, Any]:
        """JSON of the group."""
        capacity = self.worst.capacity_bytes
        return {
            "device": self.device,
            "num_ranks": len(self.ranks),
            "first_rank": self.ranks[0],
            "pipeline_ranks": list(self.pipeline_ranks),
            "microbatch_sizes": list(self.microbatch_sizes),
            "wait_s": self.wait_s,
            "limits_step": self.limits,
            "peak_memory_gib": self.worst.peak_gib,
            "capacity_gib": None if capacity is None else capacity / GIB,
            "fits": self.worst.fits,
        }


def training_run(
    num_tokens: float,
    step_time_s: float,
    step_time_interval_s: tuple[float, float] | None,
    *,
    tokens_per_step: int,
    num_devices: int,
    price_per_device_hour: float | None,
) -> TrainingRun:
    """Days, device-hours and cost of a full training.

    Args:
        num_tokens: Tokens to train on; images for image models.
        step_time_s: Seconds of one optimizer step.
        step_time_interval_s: 90 % interval of the step time in seconds; None if unknown.
        tokens_per_step: Tokens of an optimizer step, padding included; images for image models.
        num_devices: Devices that are paid for.
        price_per_device_hour: Price of one device for one hour, in any currency; None for no cost.
    """
    num_steps = math.ceil(num_tokens / tokens_per_step)
    price = price_per_device_hour
    hours = num_steps * step_time_s / 3600
    interval = None
    if step_time_interval_s is not None:
        low_s, high_s = step_time_interval_s
        interval = (num_steps * low_s / 3600, num_steps * high_s / 3600)
    return TrainingRun(
        num_tokens=num_tokens,
        num_steps=num_steps,
        days=hours / 24,
        days_interval=None if interval is None else (interval[0] / 24, interval[1] / 24),
        device_hours=hours * num_devices,
        cost=None if price is None else hours * num_devices * price,
        cost_interval=None
        if price is None or interval is None
        else (interval[0] * num_devices * price, interval[1] * num_devices * price),
        price_per_device_hour=price,
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction:
    """Prediction of one job with a plan.

    Attributes:
        table: Action table, one row per pipeline rank.
        step_time_s: Seconds of one optimizer step (Level 2).
        step_time_interval_s: 90% interval of the step time in seconds, from the uncertainty of the cost estimates.
        weakest_term: What is known least, for its effect on the interval; None without uncertainty.
        action_level: Simulates ``action_level_step_time_s``, which few ask for.
        bubble_fraction: Idle fraction of compute streams between the first and the last compute of any rank, mean over
            ranks. The optimizer step is excluded.
        capacity_bytes: Memory of one device, of the peak-memory rank if devices differ; None if unknown.
        fits: True if every rank's tensors and context are within the memory of its device, and offloaded tensors within
            that of their host, in the step and while the model is loaded; None if unknown (``job_fits``). The caching
            allocator's unused blocks do not count, since it frees them before it fails (``RankMemory.short_bytes``).
        splits: Time split per rank, in the order of ``memory``.
        tokens_per_s_per_device: Throughput, including padding of packed sequences; 0 for image models, which have no
            tokens.
        mfu: Model FLOPs utilization, with causal attention counted half; None if the device peak is unknown.
        mfu_full_attention: Model FLOPs utilization with full attention counted (PaLM, most papers); None as for
            ``mfu``.
        hfu: Hardware FLOPs utilization: ``mfu`` with recomputed FLOPs counted; None as for ``mfu``.
        assumptions: Assumptions, as sentences for the reader.
        reference_s: Seconds of the executor's reference matmul during calibration; None if not timed.
        training_run: The full training; None without a number of tokens.
        network: Load of the links of the cluster's topology, and what contention costs; None without a topology.
        jitter: Times of steps with jitter, of which the predicted one is the nearest to the mean; None without jitter.
        hashing: Times of steps with other seeds of the hash of ECMP; None for one seed.
        backup_workers: Effect of dropped gradients, which count neither in throughput nor in MFU; None if none are.
        compression: Steps before gradient compression starts, and what it saves; None without compression.
        loading: Memory while the model is loaded; None for a job that begins with random weights, and where it is not
            modeled.
        replication: A round of replicas that train alone, of which ``step_time_s`` is the mean step; or workers that do
            not wait for all others, where it is the time of as many updates as there are workers. None without.
    """

    name: str
    job: Job
    assignment: StageAssignment
    table: Table
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    action_level: Callable[[], float] = field(compare=False)
    bubble_fraction: float
    capacity_bytes: int | None
    fits: bool | None
    memory: tuple[RankMemory, ...]
    splits: tuple[Split, ...]
    tokens_per_s_per_device: float
    mfu: float | None
    mfu_full_attention: float | None
    hfu: float | None
    terms: tuple[Term, ...]
    timeline: Timeline
    assumptions: tuple[str, ...] = ()
    reference_s: float | None = None
    training_run: TrainingRun | None = None
    network: Network | None = None
    jitter: JitteredStep | None = None
    backup_workers: BackupStep | None = None
    hashing: HashedStep | None = None
    compression: CompressionStep | None = None
    replication: ReplicationRound | ReplicationWorkers | None = None
    weakest_term: WeakestTerm | None = None
    loading: LoadingPeaks | None = None

    def __repr__(self) -> str:
        """Step time, memory of the worst rank and MFU, in one line."""
        low_s, high_s = self.step_time_interval_s
        time = f"{format_time(self.step_time_s)} a step ({format_time(low_s)} to {format_time(high_s)})"
        worst = self.worst_memory
        memory = format_bytes(worst.wanted_bytes)
        if self.capacity_bytes is not None:
            memory = f"{self.memory_verdict}: {memory} of {format_bytes(self.capacity_bytes)}"
        mfu = "" if self.mfu is None else f", MFU {format_percent(self.mfu)}"
        return f"Prediction({self.name}: {time}, {memory}{mfu})"

    @property
    def action_level_step_time_s(self) -> float:
        """Step time at Level 1: actions as units, without overlap inside them, and without contention and jitter."""
        return self.action_level()

    @property
    def closed_form_bubble(self) -> str:
        """Bubble fraction of equal stages and zero-cost communication, ``(p-1)/(m+p-1) = 3/11 = 27.3 %``.

        Empty for a schedule without a closed form.
        """
        plan, facts = self.job.plan, SCHEDULE_FACTS.get(self.job.plan.schedule)
        if facts is None or facts.bubble is None:
            return ""
        idle, whole = facts.bubble.parts(plan.pp, self.job.num_microbatches, plan.virtual_stages)
        return f"{facts.bubble.formula} = {idle}/{whole} = {format_percent(idle / whole)}"

    @property
    def worst_rank(self) -> int:
        """Peak-memory rank; the lowest of equal ranks."""
        return self.worst_memory.rank

    @property
    def worst_memory(self) -> RankMemory:
        """Memory of the peak-memory rank; of unequal devices, of the rank with the least headroom."""
        return worst_memory(self.memory)

    @property
    def memory_verdict(self) -> MemoryVerdict | None:
        """Verdict on devices and hosts, also while the model is loaded; None if the memory of a device is unknown."""
        verdict, capacity = memory_verdict(self.worst_memory, self.capacity_bytes), self.capacity_bytes
        if self.fails_to_load or self.host_fits is False:
            return "does not fit"
        if self.loading is None or capacity is None:
            return verdict
        has_little = self.loading.device_bytes > (1 - _LEAST_HEADROOM) * capacity
        return "may not fit" if verdict == "fits" and has_little else verdict

    @property
    def fails_to_load(self) -> bool:
        """True if the model does not fit while it is loaded, on a device or in the memory of a node."""
        loading, host = self.loading, self.job.cluster.host_memory_bytes
        return loading is not None and not loading.fits(self.capacity_bytes, host)

    @property
    def node_groups(self) -> tuple[NodeGroupStep, ...]:
        """The step on every node group; empty for a cluster of equal nodes."""
        job, members = self.job, defaultdict[int, list[int]](list)
        for place, memory in enumerate(self.memory):
            if (group := job.group_of(memory.rank)) is not None:
                members[group].append(place)
        least_s = min(split.wait_s for split in self.splits)
        return tuple(self._node_group(group, places, least_s) for group, places in sorted(members.items()))

    def _node_group(self, group: int, places: Sequence[int], least_s: float) -> NodeGroupStep:
        job, memory = self.job, [self.memory[place] for place in places]
        waits = [self.splits[place].wait_s for place in places]
        mapping, sizes = (
            RankMapping.of(job.plan),
            job.plan.sizes_of_ranks,
        )
        return NodeGroupStep(
            device=job.cluster.node_groups[group].device.id,
            ranks=tuple(each.rank for each in memory),
            pipeline_ranks=tuple(rank for rank, groups in enumerate(job.stage_groups) if group in groups),
            microbatch_sizes=tuple(sorted({sizes[mapping.dp_rank(each.rank)] for each in memory})),
            wait_s=sum(waits) / len(waits),
            limits=min(waits) <= least_s,
            worst=worst_memory(memory),
        )

    @property
    def worst_host_bytes(self) -> int:
        """See ``busiest_host_bytes``."""
        return busiest_host_bytes(self.job, self.memory)

    @property
    def host_fits(self) -> bool | None:
        """See ``fits_on_hosts``."""
        return fits_on_hosts(self.job, self.memory, self.loading)

    @property
    def samples_per_s_per_device(self) -> float:
        """Throughput per device, in sequences or images per second."""
        return self.job.sequences_per_step / self.step_time_s / self.job.cluster.num_devices

    @property
    def document_tokens_per_s_per_device(self) -> float:
        """Throughput per device, in tokens of packed documents per second, without padding."""
        source = self.job.model.packs or self.job.model
        return self.tokens_per_s_per_device * source.document_share

    def report(self) -> str:
        """The text that ``simplan predict`` prints."""
        from simplan.report.text import prediction_text

        return prediction_text(self)

    def to_dataframe(self) -> pd.DataFrame:
        """Table with one row per rank: ``split`` in seconds, memory in GiB by category, and microbatches in flight.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        return pd.DataFrame(
            {
                "rank": memory.rank,
                **asdict(split),
                **{f"{category}_gib": size / GIB for category, size in memory.by_category.items()},
                "allocated_gib": memory.allocated_bytes / GIB,
                "reserved_gib": memory.reserved_bytes / GIB,
                "device_gib": memory.device_bytes / GIB,
                "activations_in_flight": max(memory.activations_in_flight.values(), default=0),
            }
            for memory, split in zip(self.memory, self.splits, strict=True)
        )

    def mean_step_s(self, num_steps: int) -> float:
        """Mean seconds of the steps of a run, in the first of which gradients may be whole (``compression``)."""
        return self.step_time_s if self.compression is None else self.compression.mean_step_s(num_steps)

    def with_budget(self, budget: TrainingBudget) -> Prediction:
        """Copy with the full training; this prediction if the budget has no length."""
        job = self.job
        num_steps = budget.steps(job.sequences_per_step, job.model.seq_len)
        if num_steps is None:
            return self
        tokens_per_step = job.sequences_per_step * (1 if job.model.sample != "sequence" else job.model.seq_len)
        factor = self.mean_step_s(num_steps) / self.step_time_s
        low_s, high_s = self.step_time_interval_s
        run = training_run(
            num_steps * tokens_per_step if budget.num_tokens is None else budget.num_tokens,
            factor * self.step_time_s,
            (factor * low_s, factor * high_s),
            tokens_per_step=tokens_per_step,
            num_devices=self.job.cluster.num_devices,
            price_per_device_hour=budget.price_per_device_hour,
        )
        return replace(self, training_run=run, assumptions=(*self.assumptions, _OF_TRAINING_RUN))

    def to_json(self, *, timeline: bool = True) -> dict[str, Any]:
        """JSON document of the prediction; without ``timeline``, it lacks the spans, which are most of it."""
        worst, job, placement = self.worst_memory, self.job, self.job.placement
        return {
            "schema_version": PREDICTION_SCHEMA_VERSION,
            "kind": "prediction",
            "name": self.name,
            "inputs": {
                **to_jsonable_python({part: getattr(job, part) for part in ("model", "cluster", "training", "plan")}),
                "software": job.software.title,
                "software_settings": job.software.settings,
            },
            "step_work": asdict(job.step_work),
            "links": job.cluster.links,
            **({} if self.network is None else {"network": self.network.to_json()}),
            **({} if self.jitter is None else {"jitter": asdict(self.jitter)}),
            **({} if self.hashing is None else {"hashing": asdict(self.hashing)}),
            **({} if self.backup_workers is None else {"backup_workers": asdict(self.backup_workers)}),
            **({} if self.compression is None else {"compression": asdict(self.compression)}),
            **({} if self.replication is None else {"replication": self.replication.to_json()}),
            **({"node_groups": [group.to_json() for group in self.node_groups]} if job.cluster.is_mixed else {}),
            "stage_boundaries": list(self.assignment.boundaries),
            "num_microbatches": job.num_microbatches,
            "num_parameters": job.model.num_parameters,
            "num_trained_parameters": job.model.num_trained_parameters,
            "table": format_table(self.table),
            "step_time_s": self.step_time_s,
            "step_time_interval_s": list(self.step_time_interval_s),
            "weakest_term": None if self.weakest_term is None else asdict(self.weakest_term),
            "action_level_step_time_s": self.action_level_step_time_s,
            "bubble_fraction": self.bubble_fraction,
            "reference_s": self.reference_s,
            "fits": self.fits,
            "memory_verdict": self.memory_verdict,
            "capacity_gib": None if self.capacity_bytes is None else self.capacity_bytes / GIB,
            "peak_memory_gib": worst.peak_gib,
            "peak_memory_interval_gib": worst.interval_gib,
            "reserve_short_gib": worst.short_bytes / GIB,
            "host_memory_gib": {
                "rank": max(memory.host_bytes for memory in self.memory) / GIB,
                "node": self.worst_host_bytes / GIB,
                "capacity": None if (host := job.cluster.host_memory_bytes) is None else host / GIB,
            },
            "host_fits": self.host_fits,
            **({} if self.loading is None else {"loading": self.loading.to_json()}),
            "worst_rank": self.worst_rank,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "document_tokens_per_s_per_device": self.document_tokens_per_s_per_device,
            "samples_per_s_per_device": self.samples_per_s_per_device,
            "mfu": self.mfu,
            "mfu_full_attention": self.mfu_full_attention,
            "hfu": self.hfu,
            **({} if self.training_run is None else {"training_run": to_jsonable_python(self.training_run)}),
            "ranks": [
                {
                    "rank": memory.rank,
                    **({} if placement is None else _place_json(job, placement, memory.rank)),
                    "split": {name.removesuffix("_s"): seconds for name, seconds in asdict(split).items()},
                    "memory_gib": {str(key): value / GIB for key, value in memory.by_category.items()},
                    "peak_memory_gib": memory.peak_gib,
                    "peak_memory_interval_gib": memory.interval_gib,
                    "reserve_short_gib": memory.short_bytes / GIB,
                    "host_memory_gib": memory.host_bytes / GIB,
                    "peak_action": memory.peak_action,
                    "activations_in_flight": {str(k): v for k, v in memory.activations_in_flight.items()},
                }
                for memory, split in zip(self.memory, self.splits, strict=True)
            ],
            "terms": to_jsonable_python(self.terms),
            "timeline": to_jsonable_python([*self.timeline.spans]) if timeline else [],
            "assumptions": list(self.assumptions),
        }


def _place_json(job: Job, placement: Placement, rank: int) -> dict[str, int]:
    """Node of a rank, and its device in that node."""
    node, device = divmod(placement.device_of(rank), job.cluster.devices_per_node)
    return {"node": job.cluster.fabric_nodes[node], "device": device}
