"""Breakdown of a rank's step time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simplan.cost.model import CostEstimate, Limit
from simplan.explain.term import (
    ExplainedPart,
    ExplainedTerm,
    counted_formula,
    exposed_s,
    occurrences,
    parts_of,
    remainder_words,
)
from simplan.predict import Simulated
from simplan.predict.overlap_slowdown import overlap_words
from simplan.prediction import Prediction
from simplan.program.program import SPAN_KINDS, STREAMS, Program, Stream
from simplan.program.timeline import SpanKind

_Sum = Literal["busy", "exposed", "waited"]
_LEAST_WAIT = 1e-6
"""Fraction of a communication below which it does not wait for links, except by rounding."""


def time_parts(prediction: Prediction, simulated: Simulated, rank: int) -> Iterator[ExplainedTerm]:
    """Yield terms that sum to the step time of a rank: compute, exposed communication, and idle time."""
    split = prediction.splits[rank]
    spent_s = {
        SpanKind.COMPUTE: split.compute_s,
        SpanKind.RECOMPUTE: split.recompute_s,
        SpanKind.HOST: split.host_s,
        SpanKind.OPTIMIZER: split.optimizer_s,
    }
    computed = simulated.of_full_step(lambda step: _computed(step, rank))
    for kind, seconds in spent_s.items():
        group, left_s = kind.value, seconds
        for (of_kind, name, estimate), times in computed.items():
            if of_kind is not kind:
                continue
            count = occurrences(times)
            left_s -= count * estimate.seconds
            yield ExplainedTerm(
                group,
                name,
                count * estimate.seconds,
                "s",
                counted_formula(count, estimate.formula),
                provenance=str(estimate.provenance),
                relative_std=estimate.relative_std,
                parts=tuple(parts_of(estimate, count)),
            )
        if abs(left_s) > 1e-9 * prediction.step_time_s:
            yield _longer(prediction, simulated, group, seconds, left_s)
    yield from _communications(simulated, rank)
    step_s = prediction.step_time_s
    rest = remainder_words(step_s, step_s - split.wait_s)
    closed = prediction.closed_form_bubble
    ideal = f"; bubble of equal stages and zero-cost communication: {closed}" if closed else ""
    note = f"the step - all of the above{ideal}"
    yield ExplainedTerm("wait", "idle", split.wait_s, "s", rest, note)


def _longer(prediction: Prediction, simulated: Simulated, group: str, whole_s: float, seconds: float) -> ExplainedTerm:
    """Term for the slowdown of compute by overlap, shared cores, slow ranks, jitter or dropped gradients."""
    cluster, overlap_term = prediction.job.cluster, simulated.program_costs.beside
    beyond = remainder_words(whole_s, whole_s - seconds, "of the estimates above")
    causes = [
        *(["slow ranks"] if cluster.stragglers else []),
        *(["jitter"] if cluster.jitter is not None else []),
        *(["dropped gradients"] if prediction.backup_workers is not None else []),
        *(["overlap slowdown"] if overlap_term is not None else []),
    ]
    if not causes:
        note = "ranks and their communication share the cores"
        return ExplainedTerm(group, "waiting for a core", seconds, "s", beyond, note)
    if overlap_term is None or len(causes) > 1:
        return ExplainedTerm(group, " and ".join(causes), seconds, "s", beyond)
    slowdown = simulated.program_costs.overlap_slowdown
    return ExplainedTerm(
        group,
        "overlap slowdown",
        seconds,
        "s",
        overlap_words(slowdown, seconds / slowdown),
        provenance=str(overlap_term.cost_estimate.provenance),
        relative_std=overlap_term.cost_estimate.relative_std,
    )


def _computed(simulated: Simulated, rank: int) -> dict[tuple[SpanKind, str, CostEstimate], int]:
    """Occurrences of work on the compute stream of a rank, by kind, name and cost estimate."""
    program, terms = simulated.program, simulated.program_costs.by_work
    ops = program.rank_indices[program.stands_for[rank]]
    ops = ops[program.on_stream(Stream.COMPUTE, indices=ops)]
    counts: dict[tuple[SpanKind, str, CostEstimate], int] = defaultdict(int)
    for alike in _alike(program, ops):
        kind = SPAN_KINDS[program.columns.kind[alike[0]]]
        for work in program.op(int(alike[0])).work:
            if terms[work].cost_estimate.seconds:
                counts[kind, terms[work].name, terms[work].cost_estimate] += len(alike)
    return counts


def _alike(program: Program, indices: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the operations of equal work on one stream together, in the order of their first ones."""
    codes = program.columns.work[indices].astype(np.int64) * len(STREAMS) + program.columns.stream[indices]
    _, first, kinds, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    together = np.split(indices[np.argsort(kinds, kind="stable")], np.cumsum(counts)[:-1])
    yield from (together[place] for place in np.argsort(first))


def _communications(simulated: Simulated, rank: int) -> Iterator[ExplainedTerm]:
    """Yield exposed communication by name, with the cost estimates of its operations."""
    seconds = simulated.of_full_step(lambda step: _moved(step, rank))
    for label in dict.fromkeys(label for label, _ in seconds):
        counts = [
            (e, occurrences(n))
            for (of_label, e), n in seconds.items()
            if of_label == label and isinstance(e, CostEstimate)
        ]
        counts.sort(key=lambda item: -item[0].seconds * item[1])
        busy_s, exposed, waited_s = seconds[label, "busy"], seconds[label, "exposed"], seconds[label, "waited"]
        alone_s, first = busy_s - waited_s, counts[0][0]
        exposed_wait_s = exposed * waited_s / busy_s if waited_s > _LEAST_WAIT * busy_s else 0.0
        exposed_alone_s = exposed - exposed_wait_s
        parts = tuple(part for estimate, count in counts for part in parts_of(estimate, count))
        yield ExplainedTerm(
            "exposed communication",
            label,
            exposed_alone_s,
            "s",
            remainder_words(alone_s, max(0.0, alone_s - exposed_alone_s), "overlapped with other work"),
            provenance=str(first.provenance),
            relative_std=first.relative_std,
            parts=(*parts, *_over_distance(simulated, alone_s, parts)),
        )
        if waited_s > _LEAST_WAIT * busy_s:
            yield ExplainedTerm(
                "exposed communication",
                f"{label}, waiting for links",
                exposed_wait_s,
                "s",
                remainder_words(waited_s, max(0.0, waited_s - exposed_wait_s), "overlapped with other work"),
                "longer than alone, since links are full",
            )


def _over_distance(simulated: Simulated, alone_s: float, parts: Sequence[ExplainedPart]) -> Iterator[ExplainedPart]:
    """Yield the latency of long-distance links, and the time that their round trips leave links idle."""
    estimated_s = sum(part.value for part in parts)
    if simulated.contention is not None and alone_s - estimated_s > _LEAST_WAIT * alone_s:
        words = remainder_words(alone_s, estimated_s, "of the rows above")
        yield ExplainedPart("long distance", str(Limit.LATENCY), alone_s - estimated_s, words)


def _moved(simulated: Simulated, rank: int) -> dict[tuple[str, CostEstimate | _Sum], float]:
    """Seconds of the communications of a rank by name, and occurrences by cost estimate.

    The seconds are those of all, those exposed, and those by which waiting for links makes all of them longer.
    """
    program, times, costs = simulated.program, simulated.times, simulated.program_costs
    by_work, alone_s = costs.by_work, costs.durations_s if costs.uncontended_s is None else costs.uncontended_s
    ops = program.rank_indices[program.stands_for[rank]]
    ops = ops[times.end_s[ops] > times.start_s[ops]]
    on_compute = program.on_stream(Stream.COMPUTE, indices=ops)
    seconds_of: dict[tuple[str, CostEstimate | _Sum], float] = defaultdict(int)
    moving_s: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for alike in _alike(program, ops[~on_compute]):
        # one operation may be several collectives in sequence
        op, start_s = program.op(int(alike[0])), times.start_s[alike]
        whole_s = times.end_s[alike] - start_s
        waited_s = float((costs.durations_s[alike] - alone_s[alike]).sum())
        total_s = sum(by_work[work].cost_estimate.seconds for work in op.work)
        for work in op.work:
            term = by_work[work]
            label = f"{term.name} ({op.stream})"
            share = term.cost_estimate.seconds / total_s if total_s else 1 / len(op.work)
            seconds = whole_s * share
            seconds_of[label, "waited"] += waited_s * share
            moving_s[label].append(np.array([start_s, start_s + seconds]))
            start_s = start_s + seconds
            seconds_of[label, term.cost_estimate] += len(alike)
    computing_s = np.array([times.start_s[ops[on_compute]], times.end_s[ops[on_compute]]])
    joined_s = [np.concatenate(parts_s, axis=1) for parts_s in moving_s.values()]
    labels = np.repeat(np.arange(len(joined_s)), [each_s.shape[1] for each_s in joined_s])
    exposed = exposed_s(computing_s, np.concatenate([np.empty((2, 0)), *joined_s], axis=1), labels, len(joined_s))
    for label, each_s, seconds in zip(moving_s, joined_s, exposed.tolist(), strict=True):
        seconds_of[label, "busy"], seconds_of[label, "exposed"] = float((each_s[1] - each_s[0]).sum()), seconds
    return seconds_of
