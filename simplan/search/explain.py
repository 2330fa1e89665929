"""Bottleneck of a plan, and sensitivity of its step time to each resource."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.sensitivity import Resource, improved
from simplan.predict.step_summary import evaluate_step
from simplan.prediction import Prediction
from simplan.rules import violations
from simplan.search.evaluation.evaluator import Evaluator
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.result import OtherSoftware, SearchExplanation
from simplan.search.space import SearchedOptions, with_options
from simplan.search.statistics import MORE, Waiting

_RESOURCES = {
    "flop_per_s": Resource.COMPUTE,
    "memory_bandwidth": Resource.MEMORY_BANDWIDTH,
    "intra_link": Resource.INTRA_LINK,
    "inter_link": Resource.INTER_LINK,
}
_SHARES = ("compute", "recompute", "exposed_communication", "wait", "host", "optimizer")
_MAX_TRIED = 32  # plans
_NOTICED = 1e-4  # smallest reported fraction of the step time


def explain_plan(
    evaluator: Evaluator, plan: ParallelPlan, others: Iterable[SearchedOptions], capacity: int | None
) -> SearchExplanation:
    """Predict a plan, its step time with 10% more of each resource, and the plan with other options.

    Args:
        evaluator: Evaluator of the job, on the devices that the plan needs.
        others: Combinations of the searched options to compare, those that differ in one.
        capacity: Usable device memory, bytes; None if it is unknown.
    """
    job, calibration = evaluator.job.with_plan(plan), evaluator.calibration
    prediction = predict(job, calibration=calibration)
    busiest = min(range(len(prediction.splits)), key=lambda rank: (prediction.splits[rank].wait_s, rank))
    split = prediction.splits[busiest]
    worst, network = prediction.worst_memory, prediction.network
    return SearchExplanation(
        step_time_interval_s=prediction.step_time_interval_s,
        weakest_term=prediction.weakest_term,
        mfu=prediction.mfu,
        allocated_bytes=worst.allocated_bytes,
        reserved_bytes=worst.reserved_bytes,
        device_interval_bytes=worst.device_interval_bytes,
        memory_verdict=prediction.memory_verdict,
        worst_rank=worst.rank,
        worst_bytes=worst.device_bytes,
        worst_capacity_bytes=worst.capacity_bytes,
        busiest_rank=prediction.memory[busiest].rank,
        shares={name: getattr(split, f"{name}_s") / prediction.step_time_s for name in _SHARES},
        saved=_saved(job, calibration, prediction),
        other_software=tuple(_with_others(job, calibration, others, capacity)),
        slowest_link="" if network is None else f"{network.label} {network.slowest_words()}",
        contention="" if network is None else network.contention_words(),
    )


def _with_others(
    job: Job, calibration: Calibration | None, others: Iterable[SearchedOptions], capacity: int | None
) -> Iterator[OtherSoftware]:
    """Yield the plan with other options, where these have the plan."""
    for options in others:
        other = with_options(job, options)
        if any(violations(other)):
            continue
        size, step_time_s = evaluate_step(other, calibration, whole=True)
        assert step_time_s is not None
        fits = capacity is None or size <= capacity
        yield OtherSoftware(software=dict(options), step_time_s=step_time_s, device_bytes=size, fits=fits)


def more_memory(
    evaluators: Mapping[SearchedOptions, Evaluator],
    step_time_s: float,
    nearly: list[Waiting],
    capacity: int,
    workers: WorkerPool,
) -> float:
    """Fraction of the step time saved by the fastest plan that fits with 10% more memory.

    Args:
        evaluators: Evaluator by searched options of the software.
        step_time_s: Step time of the best plan that fits.
        nearly: Plans that fit with 10% more memory by their bounds; the 32 with the lowest bounds on time are tried.
        capacity: Usable device memory, bytes.
        workers: Workers of the search.
    """
    least_s, more_bytes = step_time_s, int(MORE * capacity)
    first = sorted(nearly, key=lambda near: near.step_time_s)[:_MAX_TRIED]
    asked = takewhile(lambda near: near.step_time_s < least_s, first)
    calls = ((near, (evaluators[near.options], near.plan, more_bytes)) for near in asked)
    for waiting, (_, found_s) in workers.each(Evaluator.numbers, calls):
        if waiting.step_time_s >= least_s:  # since a plan was found meanwhile
            break
        least_s = min(least_s, found_s or least_s)
    return 1 - least_s / step_time_s


def _saved(job: Job, calibration: Calibration | None, prediction: Prediction) -> dict[str, float] | None:
    """By resource, the fraction of the step time that 10% more of it saves; None if ranks share cores.

    Stages stay fixed: a split that fits the faster hardware better would count as a part of the saving.
    """
    if job.cluster.cores_per_node is not None:
        return None
    if job.plan.pp > 1:
        stage_layers = prediction.assignment.stage_layers(job.model.num_last_layers)
        job = job.with_plan(job.plan.model_copy(update={"stage_layers": stage_layers}))
    saved = {}
    for name, resource in _RESOURCES.items():
        if (cluster := improved(job.cluster, resource, MORE)) is not None:
            _, less_s = evaluate_step(replace(job, cluster=cluster), calibration)
            assert less_s is not None
            share = 1 - less_s / prediction.step_time_s
            if share > _NOTICED:
                saved[name] = share
    return saved
