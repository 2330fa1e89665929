"""Data of one plan: key numbers, full prediction, and step breakdown with exposed communication by network tier.

Functions that take the text of a scenario run in worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from simplan.cost.calibration.format import Calibration
from simplan.cost.calibration.store import default_path, load
from simplan.explain.term import exposed_s
from simplan.io import json_text
from simplan.plan.plan import RankMapping
from simplan.predict import Simulated, predict_step
from simplan.predict.memory import device_memory
from simplan.prediction import MemoryVerdict, Prediction, TrainingRun, memory_verdict, training_run
from simplan.program.program import Stream
from simplan.program.timeline import Span, Timeline
from simplan.report.text import split_parts
from simplan.scenario import Scenario, parse_scenario
from simplan.search.fixes import Fix, fixes

WITHIN, BETWEEN, HOST = "within nodes", "between nodes", "to and from the host"


@dataclass(frozen=True, slots=True)
class Headline:
    """Key numbers of a prediction.

    Attributes:
        step_time_s: Time of one optimizer step.
        step_time_interval_s: 90 % interval of the step time; None until the full prediction is computed.
        memory_verdict: Verdict on the peak memory; None when the capacity is unknown.
        worst_rank: Peak-memory rank; None until the full prediction is computed.
        device_bytes: Peak device memory of that rank, in bytes.
        device_interval_bytes: 90 % interval of ``device_bytes``.
        capacity_bytes: Memory of a device in bytes; None when unknown.
        samples_per_s: Sequences or images per second, all devices together.
        tokens_per_s: Tokens per second, all devices together; 0 for images.
        mfu: Model FLOPs utilization, causal attention counted half; None when the peak FLOP/s is unknown.
        short_bytes: Additional bytes that the rank's allocator would reserve on a larger device.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    memory_verdict: MemoryVerdict | None
    worst_rank: int | None
    device_bytes: int
    device_interval_bytes: tuple[int, int]
    capacity_bytes: int | None
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    short_bytes: int = 0


def quick_headline(scenario: Scenario) -> Headline | None:
    """Headline from step time and memory as a search computes them, in milliseconds; None if ranks share cores."""
    from simplan.predict.step_summary import summarized_step  # imports numba

    job = scenario.job
    if job.cluster.cores_per_node is not None:
        return None
    step = summarized_step(job, steps_overlap=False)
    step_time_s = float(step.seconds()[0])
    memory = [device_memory(peaks, job, rank=rank) for rank, peaks in step.peaks().items()]
    worst = max(memory, key=lambda rank: rank.wanted_bytes - (rank.capacity_bytes or 0))
    samples_per_s = job.training.global_batch_size / step_time_s
    capacity = worst.capacity_bytes
    peak_flop_per_s = job.cluster.peak_flop_per_s.get(job.training.precision)
    flop_per_s = samples_per_s * job.model.flops_per_sequence(full_attention=False)
    return Headline(
        step_time_s=step_time_s,
        step_time_interval_s=None,
        memory_verdict=memory_verdict(worst, capacity),
        worst_rank=None,
        device_bytes=worst.device_bytes,
        device_interval_bytes=worst.device_interval_bytes,
        capacity_bytes=capacity,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * job.model.seq_len,
        mfu=None if peak_flop_per_s is None else flop_per_s / peak_flop_per_s,
        short_bytes=worst.short_bytes,
    )


def headline_of_prediction(prediction: Prediction) -> Headline:
    """Headline from a full prediction."""
    devices = prediction.job.cluster.num_devices
    worst = prediction.worst_memory
    return Headline(
        step_time_s=prediction.step_time_s,
        step_time_interval_s=prediction.step_time_interval_s,
        memory_verdict=prediction.memory_verdict,
        worst_rank=worst.rank,
        device_bytes=worst.device_bytes,
        device_interval_bytes=worst.device_interval_bytes,
        capacity_bytes=prediction.capacity_bytes,
        samples_per_s=prediction.samples_per_s_per_device * devices,
        tokens_per_s=prediction.tokens_per_s_per_device * devices,
        mfu=prediction.mfu,
        short_bytes=worst.short_bytes,
    )


def training_of(headline: Headline, num_devices: int, budget: float, price: float | None) -> TrainingRun:
    """Days, device-hours and cost to train on a budget, as ``simplan predict`` computes them.

    Args:
        headline: Headline with the throughput.
        num_devices: Number of devices that are paid for.
        budget: Number of tokens, or of images for models without tokens.
        price: Price per device and hour, in any currency; None for no cost.
    """
    per_s = headline.tokens_per_s or headline.samples_per_s
    return training_run(
        budget,
        headline.step_time_s,
        headline.step_time_interval_s,
        tokens_per_step=round(per_s * headline.step_time_s),
        num_devices=num_devices,
        price_per_device_hour=price,
    )


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a rank's step; the parts sum to the step time.

    Attributes:
        name: Label, with the network tier for exposed communication.
        group: Key of the six exclusive parts of ``Split``, in words.
        seconds: Time of the part.
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
        calibrated_at: Modification time of this machine's calibration, a cache key.
    """
    prediction = predicted(text, calibrated_at)
    steps = {rank: step_parts(prediction, rank, spans) for rank, spans in sorted(prediction.timeline.by_rank().items())}
    splits = {memory.rank: split for memory, split in zip(prediction.memory, prediction.splits, strict=True)}
    busy_s = {rank: splits[rank].compute_s + splits[rank].recompute_s + splits[rank].optimizer_s for rank in steps}
    busiest = max(steps, key=lambda rank: (busy_s[rank], -rank))
    bare = Timeline((), prediction.timeline.num_ranks, prediction.timeline.step_time_s)
    return PlanResult(replace(prediction, timeline=bare), steps, busiest)


def plan_fixes(text: str, calibrated_at: int) -> tuple[Fix, ...]:
    """Smallest changes with which the plan of a scenario fits; empty if it fits already."""
    return fixes(predicted(text, calibrated_at), _calibration(parse_scenario(text)))


def prediction_text(text: str, calibrated_at: int) -> str:
    """Output file of ``simplan predict``."""
    return json_text(predicted(text, calibrated_at).to_json())


def predicted(text: str, calibrated_at: int) -> Prediction:
    """The prediction of a scenario, with its timeline."""
    return predicted_step(text, calibrated_at)[0]


@lru_cache(maxsize=4)
def predicted_step(text: str, calibrated_at: int) -> tuple[Prediction, Simulated]:
    """Prediction together with the simulated step."""
    scenario = parse_scenario(text)
    prediction, simulated = predict_step(scenario.job, name=scenario.name, calibration=_calibration(scenario))
    return prediction.with_budget(scenario.budget), simulated


def _calibration(scenario: Scenario) -> Calibration | None:
    """Timings of this machine, if the scenario runs on it."""
    return load(default_path()) if scenario.job.cluster.cores_per_node is not None else None


def step_parts(prediction: Prediction, rank: int, spans: Sequence[Span]) -> tuple[StepPart, ...]:
    """Parts of a rank's step that take time.

    Args:
        prediction: Prediction of the step.
        rank: Global rank.
        spans: Spans of the rank.
    """
    split = prediction.splits[[memory.rank for memory in prediction.memory].index(rank)]
    mapping = RankMapping.of(prediction.job.plan)
    computing = [(s.start_s, s.end_s) for s in spans if s.stream == Stream.COMPUTE and s.end_s > s.start_s]
    moving = [
        (tier_of(s, mapping, prediction.job.node_of), (s.start_s, s.end_s))
        for s in spans
        if s.stream != Stream.COMPUTE and s.end_s > s.start_s
    ]
    exposed = exposed_s(computing, moving)
    parts = []
    for name, seconds in split_parts(split).items():
        if name == "exposed communication":
            parts += [StepPart(f"exposed {tier}", name, exposed.get(tier, 0.0)) for tier in (WITHIN, BETWEEN, HOST)]
        else:
            parts.append(StepPart(name, name, seconds))
    return tuple(part for part in parts if part.seconds > 1e-9 * prediction.step_time_s)


def tier_of(span: Span, mapping: RankMapping, node_of: Callable[[int], int]) -> str:
    """Links of a communication span: host link, inside of nodes, or between nodes."""
    if span.stream in (Stream.TO_HOST, Stream.FROM_HOST):
        return HOST
    group = (span.rank, span.peer) if span.peer is not None else _group(span, mapping)
    return WITHIN if len({node_of(rank) for rank in group}) == 1 else BETWEEN


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
