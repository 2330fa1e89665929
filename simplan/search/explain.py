"""Why a plan takes as long as it does, and what would help most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simplan.cluster.hardware import LinkSpec
from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.predict import predict
from simplan.search.evaluate import Evaluator, evaluate
from simplan.search.result import SearchExplanation
from simplan.search.statistics import Waiting

__all__ = ["MORE", "explain_plan", "more_memory"]

MORE = 1.1
"""How much of a resource there would be, over what there is."""

_MOST_TRIED = 32  # plans
_NOTICED = 1e-4  # a smaller share of the step is nothing that anybody would pay for


def explain_plan(name: str, job: Job, calibration: Calibration | None) -> SearchExplanation:
    """The prediction of a plan, and the step time again with 10 % more of every resource.

    Args:
        name: For people.
        job: With the plan, on as many devices as it needs.
        calibration: Timings of the device, if there are any.
    """
    prediction = predict(job, name=name, calibration=calibration)
    busiest = min(range(len(prediction.splits)), key=lambda rank: (prediction.splits[rank].wait_s, rank))
    split = prediction.splits[busiest]
    worst = prediction.worst_memory
    shares = {
        "compute": split.compute_s,
        "recompute": split.recompute_s,
        "exposed_communication": split.exposed_communication_s,
        "wait": split.wait_s,
        "host": split.host_s,
        "optimizer": split.optimizer_s,
    }
    return SearchExplanation(
        step_time_interval_s=prediction.step_time_interval_s,
        mfu=prediction.mfu,
        allocated_bytes=worst.allocated_bytes,
        reserved_bytes=worst.reserved_bytes,
        worst_rank=worst.rank,
        busiest_rank=prediction.memory[busiest].rank,
        shares={key: seconds / prediction.step_time_s for key, seconds in shares.items()},
        saved=_saved(job, calibration, prediction.step_time_s),
    )


def more_memory(evaluator: Evaluator, step_time_s: float, nearly: list[Waiting], capacity: int) -> float:
    """Share of the step time that 10 % more memory saves: by the fastest plan that would then fit.

    Args:
        evaluator: Of the same job.
        step_time_s: Of the best plan that fits.
        nearly: Plans that would fit then, as far as bounds tell; a few are tried.
        capacity: Memory of a device that plans may use, bytes.
    """
    least_s = step_time_s
    for waiting in sorted(nearly, key=lambda one: one.step_time_s)[:_MOST_TRIED]:
        if waiting.step_time_s >= least_s:
            break
        [(_, found_s)] = evaluator.numbers([waiting.plan], int(MORE * capacity))
        least_s = min(least_s, found_s or least_s)
    return 1 - least_s / step_time_s


def _saved(job: Job, calibration: Calibration | None, step_time_s: float) -> dict[str, float]:
    """By resource, the share of the step that more of it saves; nothing where ranks share cores."""
    if job.cluster.cores_per_node is not None:
        return {}
    saved = {}
    for resource, richer in _richer(job):
        _, less_s = evaluate(richer, calibration)
        assert less_s is not None
        share = 1 - less_s / step_time_s
        if share > _NOTICED:
            saved[resource] = share
    return saved


def _richer(job: Job) -> Iterator[tuple[str, Job]]:
    """The job with 10 % more of each resource."""
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
