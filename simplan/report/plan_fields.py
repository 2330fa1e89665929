"""Fields of ``plan:`` with values, default and description."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from simplan.plan.compression import CompressionKind
from simplan.plan.placement import AXES
from simplan.plan.plan import ParallelPlan
from simplan.plan.replication import ReplicationKind

_DEFAULTS = {
    "zero_stage": "3 where dp_shard > 1, or cp > 1 with software that shards over both, else 0",
    "sequence_parallel": "true where tp > 1, else false",
    "schedule": "1f1b where pp > 1, else none",
    "virtual_stages": "1, or the number of the schedule",
    "grad_sync": "microbatch for FSDP without a pipeline, else step",
    "placement": "tp, cp, dp_shard, dp_replicate, pp",
}
"""Defaults that depend on other fields, or are None."""
_VALUES = {
    "schedule": "`simplan show schedules`",
    "placement": f"list of {', '.join(AXES)}",
    "fsdp_units": "list of names of classes, or a number of parameters",
    "compression": ", ".join(get_args(CompressionKind)),
    "replication": ", ".join(get_args(ReplicationKind)),
    "collectives": "mapping of all_reduce, all_gather, reduce_scatter, all_to_all, parameter_servers, "
    "parameter_placement",
}
"""Values that types do not tell."""


def plan_fields() -> list[dict[str, str]]:
    """Every key of ``plan:`` in the order of ``ParallelPlan``."""
    return [
        {
            "name": name,
            "default": _DEFAULTS.get(name, word_of(field.default)),
            "description": field.description or "",
            "values": _VALUES.get(name) or values_of(field.annotation, field.metadata),
        }
        for name, field in ParallelPlan.model_fields.items()
    ]


def values_of(annotation: Any, metadata: Sequence[Any]) -> str:
    """Allowed values of a pydantic field as text: choices, true or false, a name, a range of numbers, or a list."""
    if get_origin(annotation) in (Union, UnionType):
        annotation, *others = [part for part in get_args(annotation) if part is not NoneType]
        if others:
            return ", or ".join(values_of(part, metadata) for part in (annotation, *others))
    if hasattr(annotation, "__metadata__"):
        annotation, metadata = annotation.__origin__, annotation.__metadata__
    if get_origin(annotation) is tuple:
        return f"list of {values_of(get_args(annotation)[0], [])}"
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if annotation in (bool, str):
        return "true, false" if annotation is bool else "name"
    limits = {name: value for part in metadata for name, value in _limits(part)}
    if "gt" in limits:
        return f"more than {limits['gt']:g}"
    least, limit = limits.get("ge"), limits.get("le")
    return f"{least} to {limit}" if limit is not None and limit < 100 else f"{1 if least is None else least} and more"


def _limits(constraint: Any) -> Iterator[tuple[str, Any]]:
    """Limits gt, ge and le of a constraint, or of the constraints inside of a pydantic field."""
    for part in (constraint, *getattr(constraint, "metadata", ())):
        for name in ("gt", "ge", "le"):
            if getattr(part, name, None) is not None:
                yield name, getattr(part, name)


def word_of(value: object) -> str:
    """A default in the notation of a file; empty for None."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
