"""Fields of ``plan:`` with values, default and description."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from simplan.plan.plan import ParallelPlan

__all__ = ["plan_fields", "values_of", "word_of"]

_MEANINGS: dict[str, str] = {
    "dp_replicate": "replicas of the model, or of its shards (DDP, HSDP)",
    "dp_shard": "data-parallel ranks that share what zero_stage shards",
    "zero_stage": "what they share: 1 optimizer states, 2 gradients too, 3 weights too (FSDP)",
    "reshard_after_forward": "ZeRO-3 frees unsharded weights between forward and backward",
    "tp": "ranks that split every matrix and its heads",
    "sequence_parallel": "they split the tokens of norms and sums as well",
    "cp": "ranks that split every sequence",
    "cp_comm": "attention over their tokens: ring, all-gather of keys and values, or all-to-all (Ulysses)",
    "ep": "groups of ranks that have different experts; they fold into dp, cp and tp",
    "etp": "ranks that split every expert: 1 or tp",
    "pp": "pipeline ranks",
    "virtual_stages": "stages of each of them",
    "schedule": "order of forwards and backwards; or a CSV file with a table of one's own",
    "microbatch_size": "sequences (or images) of a microbatch",
    "recompute": "modules recomputed in backward; selective_op and _layer are torchtitan's, the last two MaxText's",
    "recompute_modules": "of selective: modules of a block, as Megatron Core names them; else the attention core",
    "recompute_layers": "of full: how many blocks of every stage, the first ones; else all",
    "stage_layers": "blocks of every stage, in order; else equal under Megatron and NeMo, balanced elsewhere",
    "grad_sync": "when sharded gradients are reduced: once a step, or often, so that whole ones take no room",
    "grad_dtype": "of gradients when they are reduced; else the software's own",
    "bucket_bytes": "gradients that are reduced together; else the software's own",
    "offload_optimizer": "FSDP's CPUOffloadPolicy: its shards, their gradients and the optimizer are on the host",
    "offload_activations": "what blocks keep for backward is in memory of the host",
    "offload_layers": "of how many blocks, the first ones; else all",
}
_DEFAULTS = {
    "zero_stage": "3 where dp_shard > 1, else 0",
    "sequence_parallel": "true where tp > 1, else false",
    "schedule": "1f1b where pp > 1, else none",
    "virtual_stages": "1, or what the schedule takes",
}
"""Where a default depends on other fields."""


def plan_fields() -> list[dict[str, str]]:
    """Every key of ``plan:`` in the order of ``ParallelPlan``."""
    return [
        {
            "name": name,
            "default": _DEFAULTS.get(name, word_of(field.default)),
            "what for": _MEANINGS[name],
            "values": "`simplan show schedules`" if name == "schedule" else values_of(field.annotation, field.metadata),
        }
        for name, field in ParallelPlan.model_fields.items()
    ]


def values_of(annotation: Any, metadata: list[Any]) -> str:
    """Allowed values of a field as text: choices, true or false, a name, a range of numbers, or a list.

    Args:
        annotation, metadata: Attributes of a pydantic field.
    """
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not NoneType]
    base, metadata = (annotation, metadata) if not hasattr(annotation, "__metadata__") else _unwrapped(annotation)
    if get_origin(base) is tuple:
        inner = get_args(base)[0]
        return f"list of {values_of(inner, [])}"
    if get_origin(base) is Literal:
        return ", ".join(map(str, get_args(base)))
    if base is bool:
        return "true, false"
    if base is str:
        return "name"
    above = next((part.gt for part in _parts(metadata) if getattr(part, "gt", None) is not None), None)
    if above is not None:
        return f"more than {above:g}"
    least = next((part.ge for part in _parts(metadata) if getattr(part, "ge", None) is not None), None)
    most = next((part.le for part in _parts(metadata) if getattr(part, "le", None) is not None), None)
    return f"{least} to {most}" if most is not None and most < 100 else f"{1 if least is None else least} and more"


def _unwrapped(annotation: Any) -> tuple[Any, list[Any]]:
    return annotation.__origin__, list(annotation.__metadata__)


def _parts(metadata: list[Any]) -> list[Any]:
    """Constraints, including the constraints inside of a pydantic field."""
    return [inner for part in metadata for inner in (part, *getattr(part, "metadata", ()))]


def word_of(value: object) -> str:
    """A default as a file has it; nothing for None."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
