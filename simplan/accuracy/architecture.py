"""Architecture details that the schema of published runs lacks (biases, windows, norms), from catalog models."""

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
    """Find further ``ModelSpec`` fields from a catalog model with exactly the same sizes.

    Args:
        model: Published model.
        family: Family of the ``ModelSpec``.

    Returns:
        The fields and the name of the catalog model; empty and None if no model matches, or matching models differ.
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
