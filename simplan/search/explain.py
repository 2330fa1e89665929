"""Bottleneck of a plan, and sensitivity of its step time to each resource."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from simplan.cluster.hardware import LinkSpec
from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.predict import predict
from simplan.predict.step_summary import evaluate_step
from simplan.rules import violations
from simplan.search.evaluate import Evaluator
from simplan.search.result import OtherSoftware, SearchExplanation
from simplan.search.space import SoftwareOptions, with_options
from simplan.search.statistics import MORE, Waiting

_SHARES = ("compute", "recompute", "exposed_communication", "wait", "host", "optimizer")
_MAX_TRIED = 32  # plans
_NOTICED = 1e-4  # smallest reported fraction of the step time


def explain_plan(
    job: Job, calibration: Calibration | None, others: Iterable[SoftwareOptions] = (), capacity: int | None = None
) -> SearchExplanation:
    """Predict a plan, its step time with 10% more of each resource, and the plan with other software.

    Args:
        job: Job with the plan, on the devices that the plan needs.
        others: Other combinations of the searched options of the software.
        capacity: Usable device memory, bytes; None if it is unknown.
    """
    prediction = predict(job, calibration=calibration)
    busiest = min(range(len(prediction.splits)), key=lambda rank: (prediction.splits[rank].wait_s, rank))
    split = prediction.splits[busiest]
    worst = prediction.worst_memory
    return SearchExplanation(
        step_time_interval_s=prediction.step_time_interval_s,
        mfu=prediction.mfu,
        allocated_bytes=worst.allocated_bytes,
        reserved_bytes=worst.reserved_bytes,
        device_interval_bytes=worst.device_interval_bytes,
        memory_verdict=prediction.memory_verdict,
        worst_rank=worst.rank,
        busiest_rank=prediction.memory[busiest].rank,
        shares={name: getattr(split, f"{name}_s") / prediction.step_time_s for name in _SHARES},
        saved=_saved(job, calibration, prediction.step_time_s),
        other_software=tuple(_with_others(job, calibration, others, capacity)),
    )


def _with_others(
    job: Job, calibration: Calibration | None, others: Iterable[SoftwareOptions], capacity: int | None
) -> Iterator[OtherSoftware]:
    """Yield the plan with other software, where that has the plan."""
    for options in others:
        other = with_options(job, options)
        if any(violations(other)):
            continue
        size, step_time_s = evaluate_step(other, calibration, whole=True)
        assert step_time_s is not None
        fits = capacity is None or size <= capacity
        yield OtherSoftware(software=dict(options), step_time_s=step_time_s, device_bytes=size, fits=fits)


def more_memory(
    evaluators: Mapping[SoftwareOptions, Evaluator], step_time_s: float, nearly: list[Waiting], capacity: int
) -> float:
    """Fraction of the step time saved by the fastest plan that fits with 10% more memory.

    Args:
        evaluators: Evaluator by searched options of the software.
        step_time_s: Step time of the best plan that fits.
        nearly: Plans that fit with 10% more memory by their bounds; the 32 with the lowest bounds on time are tried.
        capacity: Usable device memory, bytes.
    """
    least_s = step_time_s
    for waiting in sorted(nearly, key=lambda one: one.step_time_s)[:_MAX_TRIED]:
        if waiting.step_time_s >= least_s:
            break
        [(_, found_s)] = evaluators[waiting.options].numbers([waiting.plan], int(MORE * capacity))
        least_s = min(least_s, found_s or least_s)
    return 1 - least_s / step_time_s


def _saved(job: Job, calibration: Calibration | None, step_time_s: float) -> dict[str, float]:
    """By resource, the fraction of the step time that 10% more of it saves; empty if ranks share cores."""
    if job.cluster.cores_per_node is not None:
        return {}
    saved = {}
    for resource, richer in _richer(job):
        _, less_s = evaluate_step(richer, calibration)
        assert less_s is not None
        share = 1 - less_s / step_time_s
        if share > _NOTICED:
            saved[resource] = share
    return saved


def _richer(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the name of each resource, and the job with 10% more of it."""
    cluster = job.cluster
    device = cluster.device

    def on(**update: object) -> Job:
        return replace(job, cluster=cluster.model_copy(update=update))

    rates = {
        "peak_flop_per_s": {dtype: MORE * rate for dtype, rate in device.peak_flop_per_s.items()},
        "matmul_flop_per_s": {dtype: MORE * rate for dtype, rate in device.matmul_flop_per_s.items()},
    }
    yield "flop_per_s", on(device=device.model_copy(update=rates))
    if device.memory_bandwidth_bytes_per_s is not None:
        faster = {"memory_bandwidth_bytes_per_s": MORE * device.memory_bandwidth_bytes_per_s}
        yield "memory_bandwidth", on(device=device.model_copy(update=faster))
    if cluster.intra_link is not None:
        yield "intra_link", on(intra_link=_faster(cluster.intra_link))
    if cluster.inter_link is not None:
        yield "inter_link", on(inter_link=_faster(cluster.inter_link))


def _faster(link: LinkSpec) -> LinkSpec:
    return link.model_copy(update={"bytes_per_s": MORE * link.bytes_per_s})
