"""Timelines from files: of a measurement, and of a prediction's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.plan.plan import RankMapping
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.optimizer_step import NORM_BYTES
from simplan.program.program import Stream
from simplan.program.timeline import Span, SpanKind, Timeline
from simplan.runs.measurement import MeasuredCollective, MeasuredSpan, Measurement, RankMeasurement


def measured_timeline(measurement: Measurement) -> Timeline:
    """Timeline of the representative step of a measurement.

    Actions are on the compute stream. A collective or P2P send lasts from its issue to its observed completion, on the
    stream of its kind. Communication without an observed completion is omitted.
    """
    spans = []
    mapping = RankMapping.of(measurement.job.plan)
    for rank in measurement.ranks:
        for span in computed_spans(rank):
            name = f"{span.action} recompute" if span.kind is SpanKind.RECOMPUTE else span.action
            spans.append(Span(rank.rank, Stream.COMPUTE, name, span.action, span.kind, span.start_s, span.end_s))
        for communication in rank.collectives:
            if communication.end_s is None:
                continue
            stream = stream_of(communication, rank.rank, mapping)
            between_two = communication.kind in ("send", "recv")
            name = communication.action if between_two else communication.kind
            times = SpanKind.COMMUNICATION, communication.start_s, communication.end_s
            peer = next((r for r in communication.ranks if r != rank.rank), None) if between_two else None
            spans.append(Span(rank.rank, stream, name, communication.action, *times, communication.num_bytes, peer))
    end_s = max((span.end_s for span in spans if span.stream == Stream.COMPUTE), default=0.0)
    return Timeline(tuple(spans), len(measurement.ranks), end_s)


def times_recomputation(measurement: Measurement) -> bool:
    """True if recomputation is recorded separately from backward, or there is no recomputation."""
    return measurement.job.plan.recompute == "none" or all(rank.reruns is not None for rank in measurement.ranks)


def computed_spans(rank: RankMeasurement) -> Iterator[MeasuredSpan]:
    """Yield a rank's actions, split around recomputation."""
    for span in rank.actions:
        now_s = span.start_s
        for rerun in rank.reruns or ():
            if rerun.action == span.action and rerun.start_s >= now_s:
                yield span.model_copy(update={"start_s": now_s, "end_s": rerun.start_s})
                yield rerun
                now_s = rerun.end_s
        yield span.model_copy(update={"start_s": now_s})


def is_between_stages(communication: MeasuredCollective) -> bool:
    """True for one end of a P2P transfer between stages; False also for transfers to and from parameter servers."""
    is_end = communication.kind in ("send", "recv")
    return is_end and Action.parse(communication.action).kind is not ActionKind.OPTIM


def stream_of(communication: MeasuredCollective, rank: int, mapping: RankMapping) -> Stream:
    """Level 2 stream of a collective or P2P send."""
    action = Action.parse(communication.action)
    if communication.kind in ("send", "recv"):
        return Stream(action.kind.value.lower()) if is_between_stages(communication) else Stream.REPLICATE
    members = tuple(sorted(communication.ranks))
    groups = {
        Stream.TENSOR: mapping.group("tp", rank),
        Stream.CONTEXT: mapping.group("cp", rank),
        Stream.SHARD: mapping.group("shard", rank),
        Stream.REPLICATE: mapping.group("replicate", rank),
        Stream.DATA: mapping.group("dp", rank),
    }
    if action.kind is ActionKind.OPTIM and communication.kind == "all_reduce":
        # with two stages, a tied embedding has the group of the norm
        if set(members) <= set(mapping.group("pp", rank)):
            return Stream.PIPELINE if communication.num_bytes == NORM_BYTES else Stream.TIED
        if mapping.ep > 1 and members == mapping.group("ep", rank) != groups[Stream.SHARD]:
            return Stream.EXPERT
    if mapping.ep > 1 and communication.kind == "all_to_all" and members == mapping.group("ep", rank):
        return Stream.EXPERT
    splits_layers = members in (groups[Stream.TENSOR], groups[Stream.CONTEXT])
    is_of_shards = communication.kind in ("all_gather", "reduce_scatter") and not splits_layers
    if is_of_shards and members == mapping.group("expert_shard", rank):
        return Stream.SHARD
    completes = action.kind is ActionKind.REDUCE_GRAD and communication.kind == "all_reduce"
    if mapping.ep > 1 and completes and members == mapping.group("expert", rank):
        return Stream.EXPERT_DATA
    if communication.kind == "all_reduce":
        # replicas that train alone reduce gradients among the ranks of one of them
        of_replica = members == groups[Stream.SHARD] and action.kind is not ActionKind.OPTIM
        if of_replica or members == groups[Stream.DATA] != groups[Stream.REPLICATE]:
            return Stream.DATA
    return next((stream for stream, ranks in groups.items() if ranks == members), Stream.DATA)


def predicted_timeline(prediction: Mapping[str, Any]) -> Timeline:
    """Timeline in a prediction's JSON document.

    Raises:
        SpecError: The document was written without it.
    """
    if not prediction["timeline"]:
        raise SpecError(
            Problem(field="timeline", rule="is empty", fix="write the file again with `simplan predict -o`")
        )
    names = [field.name for field in fields(Span)]
    spans = tuple(
        Span(**{name: span[name] for name in names} | {"kind": SpanKind(span["kind"])})
        for span in prediction["timeline"]
    )
    # of replicas that train alone, the step with an outer step, or the steps beside it
    step_time_s = prediction["replication"]["outer_s"] if "replication" in prediction else prediction["step_time_s"]
    return Timeline(spans, len({span.rank for span in spans}), step_time_s)
