"""What the schema of published runs has no field for, of models that the catalogue knows: biases, windows, norms."""

from __future__ import annotations

from typing import Any

from simplan import catalog
from simplan.accuracy.schema import RunModel

__all__ = ["switches_of"]

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_EXPERT_SIZES = ("num_experts", "top_k", "moe_intermediate_size")
_SWITCHES = (
    "attention_bias",
    "qkv_bias",
    "qk_norm",
    "sliding_window",
    "sliding_window_pattern",
    "attention_sinks",
    "router_bias",
    "expert_bias",
    "shared_expert_gate",
)


def switches_of(model: RunModel, family: str) -> tuple[dict[str, Any], str | None]:
    """Fields of ``ModelSpec`` that models of just these sizes have, and which model says so.

    Args:
        model: As published.
        family: Of ``ModelSpec``.

    Returns:
        The fields and the name of the model; nothing where none has such sizes, or those that do differ in this.
    """
    sizes = {name: getattr(model, name) for name in _SIZES}
    if model.moe is not None:
        sizes |= {name: getattr(model.moe, name) for name in _EXPERT_SIZES}
    else:
        sizes["intermediate_size"] = model.intermediate_size
    found = {}
    for name in catalog.names("models"):
        fields = catalog.model_fields(name)
        if fields["family"] == family and all(fields.get(size) == value for size, value in sizes.items()):
            found[name] = {switch: fields[switch] for switch in _SWITCHES if switch in fields}
    ways = list(found.values())
    if not ways or not ways[0] or any(way != ways[0] for way in ways):
        return {}, None
    return ways[0], next(iter(found))
