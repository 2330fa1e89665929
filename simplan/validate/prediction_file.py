"""Prediction files: the parts that ``compare`` reads, checked before it computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from simplan.base import Natural, NonNegative, Positive
from simplan.errors import Problem, SpecError
from simplan.io import MAX_JSON_BYTES, parse_json, parse_model, read_text
from simplan.prediction import PREDICTION_SCHEMA_VERSION
from simplan.program.program import Stream
from simplan.program.timeline import SpanKind

_Rank = Annotated[int, Field(ge=0, lt=10**6)]


class _Part(BaseModel):
    """A part of the document; keys that ``compare`` does not read are free."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _RankPart(_Part):
    rank: _Rank
    memory_gib: dict[str, NonNegative]
    peak_memory_gib: dict[str, NonNegative]


class _TermPart(_Part):
    kind: SpanKind
    seconds: NonNegative
    count: NonNegative
    relative_std: NonNegative


class _SpanPart(_Part):
    rank: _Rank
    stream: Stream
    name: str
    action: str
    kind: SpanKind
    start_s: NonNegative
    end_s: NonNegative
    num_bytes: Natural
    peer: _Rank | None


class _InputsPart(_Part):
    model: dict[str, Any]
    cluster: dict[str, Any]
    training: dict[str, Any]
    plan: dict[str, Any]
    software: str


class _PredictionPart(_Part):
    inputs: _InputsPart
    stage_boundaries: tuple[Natural, ...]
    table: tuple[tuple[str, ...], ...]
    step_time_s: Positive
    step_time_interval_s: tuple[Positive, Positive]
    reference_s: Positive | None
    capacity_gib: Positive | None
    tokens_per_s_per_device: Positive | None
    ranks: Annotated[tuple[_RankPart, ...], Field(min_length=1)]
    terms: tuple[_TermPart, ...]
    timeline: tuple[_SpanPart, ...]


_COLUMNS = ("allocated", "reserved", "device")


def read_prediction(file: str | Path) -> dict[str, Any]:
    """Read the JSON document that ``simplan predict -o`` writes.

    Raises:
        SpecError: The file is no such document, or was changed.
    """
    return parse_prediction(read_text(file, MAX_JSON_BYTES), str(file))


def parse_prediction(text: str, file: str) -> dict[str, Any]:
    """Parse the text of a prediction file; ``file`` is its name for errors.

    Raises:
        SpecError: As ``read_prediction``.
    """
    document = parse_json(text, file, schema_version=PREDICTION_SCHEMA_VERSION, kind="prediction")
    check_prediction(document, file)
    return document


def check_prediction(document: Mapping[str, Any], file: str) -> None:
    """Check a prediction's JSON document; ``file`` is its name for errors.

    Raises:
        SpecError: The document lacks a part that a comparison reads, or was changed.
    """
    part = parse_model(_PredictionPart, document, file=file)
    ranks = {rank.rank for rank in part.ranks}
    for index, rank in enumerate(part.ranks):
        if missing := [column for column in _COLUMNS if column not in rank.peak_memory_gib]:
            raise _changed(f"ranks.{index}.peak_memory_gib", f"has no {missing[0]}", file)
    for index, span in enumerate(part.timeline):
        if span.rank not in ranks:
            raise _changed(f"timeline.{index}.rank", f"is {span.rank}, which is none of the ranks", file)
        if span.end_s < span.start_s:
            raise _changed(f"timeline.{index}.end_s", "is before its start_s", file)


def _changed(field: str, rule: str, file: str) -> SpecError:
    return SpecError(Problem(field=field, rule=rule, fix="write the file again with `simplan predict -o`"), file=file)
