"""Hypotheses on a run that was slower, faster or larger than predicted: the job predicted again with one change each.

A log names no cause. Each hypothesis changes one thing that a scenario may describe wrongly (compilation,
recomputation, the attention kernel), or that it does not describe at all (a slow rank, a slow link, a busy host). Those
that bring the prediction closer to the measurement are candidates. Several may explain the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.cost.program_costs import ProgramCosts
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict.sensitivity import Resource, improved
from simplan.predict.simulated import sources_of_error
from simplan.predict.step_summary import StepSummary, summarize_step, summarized_step
from simplan.prediction import MemoryKind
from simplan.problems import parse_model
from simplan.program.program import Program
from simplan.rules import violations
from simplan.software.rates import AttentionKernel
from simplan.training import TrainingSpec
from simplan.units import GIB

_SAME = 0.02  # relative difference of a truncated step from the whole prediction, far below what is explained
_LESS = 0.9  # of the original error: what explains less than a tenth of it is left out
_SLOWER = (1.1, 1.2, 1.3, 1.4, 1.5)
_MORE_HOST_WORK = (2, 5, 10, 20)
_RECOMPUTE = ("none", "selective", "selective_op", "full")
_MICROBATCHES = (2, 4, 8, 16)  # times as large, or as small
_OTHER_NETWORK: dict[str, Any] = {
    f"cluster.{key}": None
    for key in ("inter_link_gbit_per_device", "inter_link_gbit_per_node", "nics_per_node", "nic_gbit")
}
"""Settings that remove the keys of a network which ``cluster.inter_link`` replaces."""
_TCP_GBIT = (100, 50, 25, 10)  # of one card per node
_PARTS = {
    "compute": ("compiled", "attention", "plan.recompute", "training.fused_optimizer"),
    "exposed communication": (
        Resource.INTRA_LINK,
        Resource.INTER_LINK,
        "plan.grad_sync",
        "plan.zero_stage",
        "plan.reshard_after_forward",
    ),
    "idle": ("host",),
}
"""Part of a profiled step that a kind of change moves; a slow rank is compute on itself and a wait on others."""
_PART_OF = {kind: part for part, kinds in _PARTS.items() for kind in kinds}
_SCANNED = ("rank", "host")  # of any size, so they fit almost any slower log


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One change of the predicted job.

    Attributes:
        change: Setting with its value as in a scenario file, or words for what no scenario says.
        step_time_s: Predicted step time with the change, in seconds.
        step_time_interval_s: Its 90% interval.
        step_error: (predicted - measured) / measured step time; None without a measured one.
        peak_gib: Predicted peak with the change, in the compared column of memory, GiB; None if none is compared.
        peak_error: (predicted - measured) / measured peak; None without a measured one.
        explains: True if all measured quantities lie in the 90% intervals of the changed prediction.
        settings: New values by key of a scenario, None to remove a key; empty for what no scenario says.
    """

    change: str
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    step_error: float | None
    peak_gib: float | None
    peak_error: float | None
    explains: bool
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def distance(self) -> float:
        """Distance from the measurement: root of the sum of squared errors of step time and peak memory."""
        return _distance(self.step_error, self.peak_error)


@dataclass(frozen=True, slots=True)
class MeasuredTotals:
    """Measured step time and peak that hypotheses are compared with.

    Attributes:
        step_time_s: Measured step time in seconds; None if the log has none.
        column: Compared column of memory; None if the log has none.
        peak_gib: Measured peak in that column, GiB.
        longer_s: Measured minus predicted seconds of the parts of a profiled step; empty without a trace.
    """

    step_time_s: float | None = None
    column: MemoryKind | None = None
    peak_gib: float = 0.0
    longer_s: Mapping[str, float] = field(default_factory=dict)


def job_of_prediction(prediction: Mapping[str, Any]) -> Job | None:
    """Job of a prediction's JSON document; None if the document does not say the settings of its software."""
    inputs = prediction["inputs"]
    settings = inputs.get("software_settings")
    if not isinstance(settings, dict) or "preset" not in settings:
        return None
    options = {key: value for key, value in settings.items() if key != "preset"}
    software = catalog.software(settings["preset"])
    return Job(
        parse_model(ModelSpec, inputs["model"]),
        parse_model(ClusterSpec, inputs["cluster"]),
        parse_model(TrainingSpec, inputs["training"]),
        parse_model(ParallelPlan, inputs["plan"]),
        software.with_changes(**options) if options else software,
    )


def hypotheses(job: Job, predicted_s: float, measured: MeasuredTotals) -> tuple[Hypothesis, ...] | None:
    """Predict a job with one change at a time, and return the changes that explain a part of the error.

    Args:
        job: The predicted job.
        predicted_s: Its predicted step time in seconds, to check that the job can be predicted again from its file.
        measured: The measurement.

    Returns:
        Changes that shrink the error by at least a tenth; of several values of one setting, the nearest. Those that
        explain the measurement come first, settings before a slow rank and a busy host, and then the nearest. Changes
        of a part that a trace shows to have moved the other way are left out. None if the job cannot be predicted
        again: its ranks share cores, or a calibration was used.
    """
    if job.cluster.cores_per_node is not None:
        return None
    base = summarize_step(job)
    if abs(base.step_time_s / predicted_s - 1) > _SAME:
        return None
    error = _compared(_Change("", ""), base, measured).distance
    nearest: dict[str, Hypothesis] = {}
    for change, summary in _changed(job, base):
        kind = change.kind
        longer_s = measured.longer_s.get(_PART_OF.get(kind, ""))
        if longer_s is not None and longer_s * (summary.step_time_s - base.step_time_s) < 0:
            continue
        hypothesis = _compared(change, summary, measured)
        best = nearest.get(kind)
        if hypothesis.distance <= _LESS * error and (best is None or hypothesis.distance < best.distance):
            nearest[kind] = hypothesis
    kinds = sorted(nearest, key=lambda kind: (not nearest[kind].explains, kind in _SCANNED, nearest[kind].distance))
    return tuple(nearest[kind] for kind in kinds)


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of a job.

    Attributes:
        kind: Kind of change, of which the best is a hypothesis.
        words: ``Hypothesis.change``.
        settings: ``Hypothesis.settings``.
    """

    kind: str
    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _compared(change: _Change, summary: StepSummary, measured: MeasuredTotals) -> Hypothesis:
    low_s, high_s = summary.step_time_interval_s
    explains, step_error, peak_gib, peak_error = True, None, None, None
    if measured.step_time_s is not None:
        step_error = summary.step_time_s / measured.step_time_s - 1
        explains = low_s <= measured.step_time_s <= high_s
    if measured.column is not None:
        peak_gib = summary.measurable_bytes[measured.column] / GIB
        peak_error = peak_gib / measured.peak_gib - 1
        low, high = summary.peak_interval_bytes[measured.column]
        explains = explains and low <= measured.peak_gib * GIB <= high
    return Hypothesis(
        change=change.words,
        step_time_s=summary.step_time_s,
        step_time_interval_s=summary.step_time_interval_s,
        step_error=step_error,
        peak_gib=peak_gib,
        peak_error=peak_error,
        explains=explains,
        settings=change.settings,
    )


def _distance(step_error: float | None, peak_error: float | None) -> float:
    """Errors as logarithms, so that half and double are equally far."""
    return math.hypot(*(math.log1p(error) for error in (step_error, peak_error) if error is not None))


def _changed(job: Job, base: StepSummary) -> Iterator[tuple[_Change, StepSummary]]:
    """Yield changes, and the changed prediction."""
    for change, changed in _jobs(job):
        if violations(changed):
            continue
        try:
            yield change, summarize_step(changed)
        except SpecError:  # a cost of it is unknown
            continue
    for change, step_time_s in _slowed(job):
        ratio = step_time_s / base.step_time_s
        low_s, high_s = base.step_time_interval_s
        yield change, replace(base, step_time_s=step_time_s, step_time_interval_s=(low_s * ratio, high_s * ratio))


def _jobs(job: Job) -> Iterator[tuple[_Change, Job]]:
    """Yield jobs with another setting, or on slower links."""
    yield from _software_changes(job)
    for change in _setting_changes(job):
        (setting, value), *_ = change.items()
        shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        try:
            yield _Change(setting, f"{setting}: {shown}", change), job.with_changes(change)
        except SpecError:
            continue
    if (slower := improved(job.cluster, Resource.INTRA_LINK, 0.5)) is not None and slower.num_devices > 1:
        words = "half of the bandwidth inside nodes"
        yield _Change(Resource.INTRA_LINK, words, _link_settings(slower, "intra_link")), replace(job, cluster=slower)
    for words, settings, cluster in _slower_networks(job.cluster):
        yield _Change(Resource.INTER_LINK, words, settings), replace(job, cluster=cluster)


def _slower_networks(cluster: ClusterSpec) -> Iterator[tuple[str, dict[str, Any], ClusterSpec]]:
    """Yield what runs between nodes instead of a full network: half of it, one card of a node, or TCP on one card.

    A collective library that finds no RDMA takes TCP without an error.
    """
    link, per_node = cluster.inter_link, cluster.devices_per_node
    if link is None or cluster.num_nodes < 2:
        return
    cards = cluster.network_ports_per_node
    factors = [(0.5, "half of the bandwidth between nodes")]
    if cards > 2:
        factors.append((1 / cards, f"1/{cards} of the bandwidth between nodes (one network card of {cards})"))
    for factor, change in factors:
        if (slower := improved(cluster, Resource.INTER_LINK, factor)) is not None:
            yield change, _link_settings(slower, "inter_link"), slower
    for gbit in _TCP_GBIT:
        name = f"tcp-{gbit}gbit"
        slower_link = catalog.network_of_node(name, per_node)
        if slower_link is not None and slower_link.bytes_per_s < link.bytes_per_s:
            settings = {} if cluster.node_groups else _OTHER_NETWORK | {"cluster.inter_link": name}
            yield f"cluster.inter_link: {name}", settings, _with_network(cluster, slower_link)


def _link_settings(cluster: ClusterSpec, key: Literal["intra_link", "inter_link"]) -> dict[str, Any]:
    """Settings of a scenario that give equal nodes their link, in place of any other keys of it; none for groups."""
    link: LinkSpec | None = getattr(cluster, key)
    if link is None or cluster.node_groups:
        return {}
    fields = link.model_dump(mode="json", exclude={"sources", "fitted_on"}, exclude_defaults=True)
    return (_OTHER_NETWORK if key == "inter_link" else {}) | {f"cluster.{key}": fields}


def _with_network(cluster: ClusterSpec, link: LinkSpec) -> ClusterSpec:
    """The cluster with one card of another network per node."""
    groups = tuple(group.model_copy(update={"inter_link": link}) for group in cluster.node_groups)
    return cluster.model_copy(update={"inter_link": link, "nics_per_node": 1, "node_groups": groups})


def _software_changes(job: Job) -> Iterator[tuple[_Change, Job]]:
    software = job.software
    if "compiled" in software.options:
        flipped = not software.compiled
        words = f"software.compiled: {'true' if flipped else 'false'}"
        compiled = replace(job, software=software.model_copy(update={"compiled": flipped}))
        yield _Change("compiled", words, {"software.compiled": flipped}), compiled
    other = "unfused" if software.layers.attention == "fused" else "fused"
    layers = software.layers.model_copy(update={"attention": other})
    unfused = replace(job, software=software.model_copy(update={"layers": layers}))
    yield _Change("attention", f"{other} attention"), unfused
    if software.layers.attention == "fused":
        for kernel in get_args(AttentionKernel):
            if kernel != software.rates.attention_kernel:
                rates = software.rates.model_copy(update={"attention_kernel": kernel})
                changed = replace(job, software=software.model_copy(update={"rates": rates}))
                yield _Change("attention", f"attention kernel of FlashAttention {kernel[-1]}"), changed


def _setting_changes(job: Job) -> Iterator[dict[str, Any]]:
    """Yield settings of plan and training with another value; the first one names the change."""
    plan, training = job.plan, job.training
    for mode in _RECOMPUTE:
        if mode != plan.recompute:
            yield {"plan.recompute": mode, "plan.recompute_modules": None, "plan.recompute_layers": None}
    if plan.dp > 1 and job.num_microbatches > 1:
        yield {"plan.grad_sync": "step" if plan.reduces_every_microbatch else "microbatch"}
    if plan.dp_shard > 1:
        for stage in job.software.zero_stages:
            if stage != plan.zero_stage:
                yield {"plan.zero_stage": stage}
        if plan.zero_stage == 3:
            yield {"plan.reshard_after_forward": not plan.reshard_after_forward}
    for factor in _MICROBATCHES:
        yield {"plan.microbatch_size": plan.microbatch_size * factor}
        if plan.microbatch_size % factor == 0:
            yield {"plan.microbatch_size": plan.microbatch_size // factor}
    if plan.tp > 1:
        yield {"plan.sequence_parallel": not plan.sequence_parallel}
    if training.fused_optimizer is not None or training.optimizer in ("adam", "adamw"):
        yield {"training.fused_optimizer": training.fused_optimizer is False}


def _slowed(job: Job) -> Iterator[tuple[_Change, float]]:
    """Yield steps of the same Program with slower compute of one rank, or with more work of the host."""

    def others(program: Program, costs: ProgramCosts) -> list[NDArray[np.float64]]:
        by_source, durations_s = sources_of_error(program), costs.durations_s
        of_rank = np.zeros(len(durations_s), dtype=bool)
        of_rank[program.rank_indices[program.ranks[0]]] = True
        slow = [np.where(by_source["compute"] & of_rank, durations_s * factor, durations_s) for factor in _SLOWER]
        busy = [np.where(by_source["host"], durations_s * factor, durations_s) for factor in _MORE_HOST_WORK]
        return [*slow, *busy]

    unchanged_s, *found_s = summarized_step(job, steps_overlap=False).seconds(others).tolist()
    for factor, step_time_s in zip(_SLOWER, found_s, strict=False):
        words = f"a rank that computes {factor:g} times as slowly (clock, power cap)"
        settings = {} if job.cluster.stragglers else {"cluster.stragglers": [{"rank": 0, "slowdown": factor}]}
        yield _Change("rank", words, settings), step_time_s
    for factor, step_time_s in zip(_MORE_HOST_WORK, found_s[len(_SLOWER) :], strict=True):
        if step_time_s > unchanged_s:
            words = f"{factor} times the host work between steps (data loading, logging)"
            yield _Change("host", words), step_time_s
