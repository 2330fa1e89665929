"""One plan: its prediction, and where the step of a rank goes, exposed communication by tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.calibration.store import default_path, load
from simplan.explain.exposure import exposed_s
from simplan.io import json_text
from simplan.plan.plan import RankMapping
from simplan.predict import Simulated, predict_step
from simplan.prediction import Prediction
from simplan.program.program import Stream
from simplan.program.timeline import Span, Split, Timeline
from simplan.scenario import parse_scenario

__all__ = [
    "PlanResult",
    "StepPart",
    "plan_result",
    "predicted",
    "predicted_step",
    "prediction_text",
    "step_parts",
    "tier_of",
]

WITHIN, BETWEEN, HOST = "within nodes", "between nodes", "to and from the host"


@dataclass(frozen=True, slots=True)
class StepPart:
    """A share of a rank's step.

    Attributes:
        name: For people.
        group: One of the six shares that exclude each other.
        seconds: They sum to the step.
    """

    name: str
    group: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Data of the page Plan.

    Attributes:
        prediction: Prediction without the spans of its timeline, to save memory.
        steps: Parts of the step, per simulated rank.
        busiest: Simulated rank with the longest compute time; the lowest of several.
    """

    prediction: Prediction
    steps: Mapping[int, tuple[StepPart, ...]]
    busiest: int


def plan_result(text: str, calibrated_at: int) -> PlanResult:
    """Predicts the plan of a scenario.

    Args:
        text: The scenario's YAML.
        calibrated_at: When this machine's calibration was written, for caches.

    Raises:
        SpecError: As ``predict``.
    """
    prediction = predicted(text, calibrated_at)
    steps = {rank: step_parts(prediction, rank, spans) for rank, spans in sorted(prediction.timeline.by_rank().items())}
    by_rank = {memory.rank: split for memory, split in zip(prediction.memory, prediction.splits, strict=True)}
    busiest = max(steps, key=lambda rank: (_busy_s(by_rank[rank]), -rank))
    bare = Timeline((), prediction.timeline.num_ranks, prediction.timeline.step_time_s)
    return PlanResult(replace(prediction, timeline=bare), steps, busiest)


def prediction_text(text: str, calibrated_at: int) -> str:
    """Output file of ``simplan predict``."""
    return json_text(predicted(text, calibrated_at).to_json())


def predicted(text: str, calibrated_at: int) -> Prediction:
    """The prediction of a scenario, with its timeline."""
    return predicted_step(text, calibrated_at)[0]


@lru_cache(maxsize=4)
def predicted_step(text: str, calibrated_at: int) -> tuple[Prediction, Simulated]:
    """Prediction together with the simulated step."""
    asked = parse_scenario(text)
    on_cores = asked.job.cluster.cores_per_node is not None
    calibration = load(default_path()) if on_cores else None
    return predict_step(asked.job, name=asked.name, calibration=calibration)


def step_parts(prediction: Prediction, rank: int, spans: Sequence[Span]) -> tuple[StepPart, ...]:
    """Parts of a rank's step that sum to the step time, without parts that take no time.

    Args:
        prediction: The prediction.
        rank: The rank.
        spans: Its spans.
    """
    split = prediction.splits[[memory.rank for memory in prediction.memory].index(rank)]
    mapping = RankMapping.of(prediction.job.plan)
    computing = [(s.start_s, s.end_s) for s in spans if s.stream == Stream.COMPUTE and s.end_s > s.start_s]
    moving = [
        (tier_of(s, mapping, prediction.job.cluster), (s.start_s, s.end_s))
        for s in spans
        if s.stream != Stream.COMPUTE and s.end_s > s.start_s
    ]
    exposed = exposed_s(computing, moving)
    parts = [
        StepPart("compute", "compute", split.compute_s),
        StepPart("recompute", "recompute", split.recompute_s),
        *(
            StepPart(f"exposed {tier}", "exposed communication", exposed.get(tier, 0.0))
            for tier in (WITHIN, BETWEEN, HOST)
        ),
        StepPart("wait", "wait", split.wait_s),
        StepPart("host", "host", split.host_s),
        StepPart("optimizer", "optimizer", split.optimizer_s),
    ]
    return tuple(part for part in parts if part.seconds > 1e-9 * prediction.step_time_s)


def tier_of(span: Span, mapping: RankMapping, cluster: ClusterSpec) -> str:
    """Links of a communication span: host link, inside of nodes, or between nodes."""
    if span.stream in (Stream.TO_HOST, Stream.FROM_HOST):
        return HOST
    group = (span.rank, span.peer) if span.peer is not None else _group(span, mapping)
    return WITHIN if len({cluster.node_of(rank) for rank in group}) == 1 else BETWEEN


def _group(span: Span, mapping: RankMapping) -> tuple[int, ...]:
    """Ranks that take part in a collective, by the stream it runs on."""
    rank = span.rank
    match span.stream:
        case Stream.TENSOR:
            return mapping.tp_group(rank)
        case Stream.CONTEXT:
            return mapping.cp_group(rank)
        case Stream.SHARD:
            return mapping.shard_group(rank)
        case Stream.REPLICATE:
            return mapping.replicate_group(rank)
        case Stream.EXPERT:
            return mapping.ep_group(rank)
        case Stream.EXPERT_DATA:
            return mapping.expert_group(rank)
        case Stream.TIED:
            return (mapping.pp_group(rank)[0], mapping.pp_group(rank)[-1])
    return mapping.dp_group(rank)


def _busy_s(split: Split) -> float:
    return split.compute_s + split.recompute_s + split.optimizer_s
