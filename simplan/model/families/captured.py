"""Models captured from torch modules (``simplan.model.captured``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simplan.model.captured.adapters import with_adapters, with_frozen
from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.layers import captured_layers
from simplan.model.families.family import ADAPTERS, Family
from simplan.model.layer import LayerSpec

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    assert shard.cp == 1, "no sequence is split"
    assert model.captured is not None, "a field of the family"
    rank, captured = model.lora_rank, model.captured.of_degree(shard.tp)
    dropout = model.lora_dropout > 0
    if rank:
        captured = with_adapters(
            captured, rank, model.lora_targets, dropout=dropout, input_grads=model.input_require_grads
        )
    elif model.frozen:
        captured = with_frozen(captured, model.frozen)
    return captured_layers(captured)


def _sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    captured = given.get("captured")
    if not isinstance(captured, CapturedModel):
        return {}
    return {"num_hidden_layers": max(1, len(captured.graph.order) - 2), "seq_len": max(1, captured.tokens)}


CAPTURED = Family(
    layers=_layers,
    fields=frozenset({"captured", "num_hidden_layers", "seq_len", "lora_dropout", "frozen", "input_require_grads"})
    | ADAPTERS,
    defaults=_sizes,
    inputs="captured",
    task="own",
    causal=False,
    whole_layers="captured modules",
)
"""Any ``torch.nn.Module``; ``simplan capture`` writes the file."""
