"""Breakdown of a rank's step time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from simplan.cost.model import CostEstimate
from simplan.cost.program_costs import CostTerm
from simplan.explain.term import ExplainedTerm, exposed_s
from simplan.predict import Simulated
from simplan.prediction import Prediction
from simplan.program.program import STREAMS, Program, Stream, Work
from simplan.program.timeline import SpanKind
from simplan.units import counted, format_percent, format_time


def time_parts(prediction: Prediction, simulated: Simulated, rank: int) -> Iterator[ExplainedTerm]:
    """Yield terms that sum to the step time of a rank: compute, exposed communication, and idle time."""
    split = prediction.splits[rank]
    written_out = simulated.program.stands_for[rank]
    spent_s = {
        SpanKind.COMPUTE: split.compute_s,
        SpanKind.RECOMPUTE: split.recompute_s,
        SpanKind.HOST: split.host_s,
        SpanKind.OPTIMIZER: split.optimizer_s,
    }
    for kind, seconds in spent_s.items():
        group, left_s = kind.value, seconds
        counts = _computed(simulated.program, written_out, kind)
        for name, count, cost_estimate in _merged(counts, simulated.program_costs.by_work):
            left_s -= count * cost_estimate.seconds
            formula = f"{count} x {format_time(cost_estimate.seconds)}; each {cost_estimate.formula}"
            yield ExplainedTerm(
                group,
                name,
                count * cost_estimate.seconds,
                "s",
                formula,
                str(cost_estimate.provenance),
                cost_estimate.relative_std,
            )
        if abs(left_s) > 1e-9 * prediction.step_time_s:
            yield _longer(prediction, simulated, group, left_s)
    yield from _communications(simulated, written_out)
    yield ExplainedTerm("wait", "idle", split.wait_s, "s", _idle_formula(prediction))


def _longer(prediction: Prediction, simulated: Simulated, group: str, seconds: float) -> ExplainedTerm:
    """Term for the slowdown of compute by overlap, shared cores, slow ranks, jitter or dropped gradients."""
    cluster = prediction.job.cluster
    if cluster.stragglers or cluster.jitter is not None or prediction.backup_workers is not None:
        causes = [
            *(["slow ranks"] if cluster.stragglers else []),
            *(["jitter"] if cluster.jitter is not None else []),
            *(["dropped gradients"] if prediction.backup_workers is not None else []),
            *(["overlap slowdown"] if simulated.program_costs.beside is not None else []),
        ]
        return ExplainedTerm(group, " and ".join(causes), seconds, "s", "time beyond the estimates above")
    beside = simulated.program_costs.beside
    if beside is None:
        rule = "ranks and their communication share the cores: time beyond that alone"
        return ExplainedTerm(group, "waiting for a core", seconds, "s", rule)
    rule = (
        f"communication that overlaps it takes {format_percent(simulated.program_costs.overlap_slowdown)} of the device"
    )
    return ExplainedTerm(
        group,
        "overlap slowdown",
        seconds,
        "s",
        rule,
        str(beside.cost_estimate.provenance),
        beside.cost_estimate.relative_std,
    )


def _merged(counts: Counter[Work], terms: Mapping[Work, CostTerm]) -> list[tuple[str, int, CostEstimate]]:
    """Merge work with the same name and cost estimate; name, count and estimate of each."""
    found: dict[tuple[str, CostEstimate], int] = {}
    for work, count in counts.items():
        term = terms[work]
        if term.cost_estimate.seconds:
            key = (term.name, term.cost_estimate)
            found[key] = found.get(key, 0) + count
    return [(name, count, cost_estimate) for (name, cost_estimate), count in found.items()]


def _computed(program: Program, rank: int, kind: SpanKind) -> Counter[Work]:
    """Work of one kind on the compute stream of a rank."""
    own = program.rank_indices[rank]
    own = own[program.on_stream(Stream.COMPUTE, indices=own) & program.of_kind(kind, indices=own)]
    counts: Counter[Work] = Counter()
    for alike in _alike(program, own):
        for work in program.op(int(alike[0])).work:
            counts[work] += len(alike)
    return counts


def _alike(program: Program, indices: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the operations of equal work on one stream together, in the order of their first ones."""
    codes = program.columns.work[indices].astype(np.int64) * len(STREAMS) + program.columns.stream[indices]
    _, first, kinds, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    together = np.split(indices[np.argsort(kinds, kind="stable")], np.cumsum(counts)[:-1])
    yield from (together[place] for place in np.argsort(first))


def _communications(simulated: Simulated, rank: int) -> Iterator[ExplainedTerm]:
    """Yield exposed communication by name, with the cost estimates of its operations."""
    program, times, by_work = simulated.program, simulated.times, simulated.program_costs.by_work
    own = program.rank_indices[rank]
    own = own[times.end_s[own] > times.start_s[own]]
    on_compute = program.on_stream(Stream.COMPUTE, indices=own)
    moving_s: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    estimates: dict[str, dict[CostEstimate, int]] = defaultdict(lambda: defaultdict(int))
    for alike in _alike(program, own[~on_compute]):
        # one operation may be several collectives in sequence
        op, start_s = program.op(int(alike[0])), times.start_s[alike]
        whole_s = times.end_s[alike] - start_s
        total_s = sum(by_work[work].cost_estimate.seconds for work in op.work)
        for work in op.work:
            term = by_work[work]
            label = f"{term.name} ({op.stream})"
            seconds = whole_s * (term.cost_estimate.seconds / total_s if total_s else 1 / len(op.work))
            moving_s[label].append(np.array([start_s, start_s + seconds]))
            start_s = start_s + seconds
            estimates[label][term.cost_estimate] += len(alike)
    computing_s = np.array([times.start_s[own[on_compute]], times.end_s[own[on_compute]]])
    joined_s = [np.concatenate(parts_s, axis=1) for parts_s in moving_s.values()]
    labels = np.repeat(np.arange(len(joined_s)), [each_s.shape[1] for each_s in joined_s])
    exposed = exposed_s(computing_s, np.concatenate([np.empty((2, 0)), *joined_s], axis=1), labels, len(joined_s))
    for label, each_s, seconds in zip(moving_s, joined_s, exposed.tolist(), strict=True):
        busy_s = float((each_s[1] - each_s[0]).sum())
        cost_estimates = sorted(estimates[label].items(), key=lambda item: -item[0].seconds * item[1])
        shown = "; ".join(
            f"{count} x {format_time(cost_estimate.seconds)} = {cost_estimate.formula}"
            for cost_estimate, count in cost_estimates[:2]
        )
        more = f"; and {counted(len(cost_estimates) - 2, 'more size')}" if len(cost_estimates) > 2 else ""
        hidden = f"{format_time(max(0.0, busy_s - seconds))} of {format_time(busy_s)} overlapped with other work; "
        first = cost_estimates[0][0]
        yield ExplainedTerm(
            "exposed communication",
            label,
            seconds,
            "s",
            f"{hidden}{shown}{more}",
            str(first.provenance),
            first.relative_std,
        )


def _idle_formula(prediction: Prediction) -> str:
    """Formula for idle time, with the closed form of the schedule if there is one."""
    plan, m = prediction.job.plan, prediction.job.num_microbatches
    p, v = plan.pp, plan.virtual_stages
    closed = {
        "gpipe": (p - 1, m + p - 1, f"(p-1)/(m+p-1) = {p - 1}/{m + p - 1}"),
        "1f1b": (p - 1, m + p - 1, f"(p-1)/(m+p-1) = {p - 1}/{m + p - 1}"),
        "interleaved_1f1b": (p - 1, v * m + p - 1, f"(p-1)/(v m+p-1) = {p - 1}/{v * m + p - 1}"),
        "naive": (p - 1, p, f"(p-1)/p = {p - 1}/{p}"),
    }.get(plan.schedule)
    rest = "step - all of the above"
    if closed is None:
        return rest
    above, below, formula = closed
    return f"{rest}; bubble of equal stages and zero-cost communication: {formula} = {format_percent(above / below)}"
