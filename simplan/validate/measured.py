"""Timelines out of files: of a measurement, and of a prediction's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplan.program.action import Action, ActionKind
from simplan.program.measurement import Measurement
from simplan.program.timeline import Span, SpanKind, Timeline

__all__ = ["measured_timeline", "predicted_timeline"]


def measured_timeline(measurement: Measurement) -> Timeline:
    """The representative step of a measurement.

    Actions are on the compute stream. A message is drawn from its issue to the moment its completion was seen, on a
    stream of its own kind; messages whose completion was not seen are left out.
    """
    spans = []
    for rank in measurement.ranks:
        spans += [
            Span(rank.rank, "compute", span.action, span.action, span.kind, span.start_s, span.end_s)
            for span in rank.actions
        ]
        bucket = 0
        for message in rank.collectives:
            stream: str = message.kind
            name, peer = message.action, None
            if message.kind == "all_reduce":
                action = Action.parse(message.action)
                stream = "tied" if action.kind is ActionKind.OPTIM else "grad"
                name = "all_reduce tied embedding" if stream == "tied" else f"bucket {bucket}"
                bucket += stream == "grad"
            else:
                stream = Action.parse(message.action).kind.value.lower()
                peer = next((r for r in message.ranks if r != rank.rank), None)
            if message.end_s is not None:
                spans.append(
                    Span(
                        rank.rank,
                        stream,
                        name,
                        message.action,
                        SpanKind.COMMUNICATION,
                        message.start_s,
                        message.end_s,
                        message.num_bytes,
                        peer,
                    )
                )
    end_s = max((span.end_s for span in spans if span.stream == "compute"), default=0.0)
    return Timeline(tuple(spans), len(measurement.ranks), end_s)


def predicted_timeline(prediction: Mapping[str, Any]) -> Timeline:
    """The timeline inside a prediction's JSON document."""
    spans = tuple(
        Span(
            rank=span["rank"],
            stream=span["stream"],
            name=span["name"],
            action=span["action"],
            kind=SpanKind(span["kind"]),
            start_s=span["start_s"],
            end_s=span["end_s"],
            num_bytes=span["num_bytes"],
            peer=span["peer"],
        )
        for span in prediction["timeline"]
    )
    return Timeline(spans, len({span.rank for span in spans}), prediction["step_time_s"])
