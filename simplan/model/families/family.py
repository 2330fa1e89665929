"""What a family of models is: its builder, the fields that describe its models, and what it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from simplan.model.layer import LayerSpec

if TYPE_CHECKING:  # the model unfolds into layers and so imports this package
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = [
    "LORA",
    "PACKED",
    "TOKENS",
    "TRANSFORMER",
    "Defaults",
    "Family",
    "longest",
    "transformer_defaults",
    "with_wide_mlp",
]

Defaults = Callable[[Mapping[str, Any]], dict[str, Any]]

TRANSFORMER = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "seq_len",
})  # fmt: skip
"""Fields of every transformer."""

TOKENS = frozenset({"vocab_size", "max_position_embeddings", "tied_embeddings"})
"""Fields of every language model."""

LORA = frozenset({"lora_rank", "lora_targets"})
"""Fields of families whose blocks can have adapters (``simplan.model.adapters``)."""

PACKED = frozenset({"document_lengths"})
"""Fields of language models whose sequences may hold several documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        layers: Unfolds a model into its layers, of which one tensor- and context-parallel rank has some part.
        fields: Fields of ``ModelSpec`` that describe its models; any other is refused by name.
        defaults: From the fields that were given, as the user wrote them, the values of others.
        inputs: What its first layer takes; of pairs, the tokens of the encoder and then those of the decoder.
        task: What its head is trained for: the next token of every position, the tokens that were masked, the tokens of
            the decoder, or the class of the input.
        causal: Tokens attend to those before them only.
        rotary: Field of the width of queries and keys that is rotated by position; empty for none.
        soft_cap: Scores of attention pass through a scaled tanh (Gemma 2).
        alibi: A bias that grows with the distance is added to the scores of attention (Press et al. 2022).
        position_rows: Positions are rows of a table, which ends the sequences.
        whole_layers: What its layers are, where tensor and context parallelism of them are not modelled.
        whole_attention: What its attention is, where context parallelism of it is not modelled.
        gated_mlp: Its MLPs, or those of its experts, have a gate. Of a family whose models may have one or not, which
            takes the field of the same name, this says nothing.
    """

    layers: Callable[[ModelSpec, Shard], tuple[LayerSpec, ...]]
    fields: frozenset[str]
    defaults: Defaults
    inputs: Literal["tokens", "token_pairs", "images"] = "tokens"
    task: Literal["next_token", "masked_token", "target_tokens", "class"] = "next_token"
    causal: bool = True
    rotary: str = ""
    soft_cap: bool = False
    alibi: bool = False
    position_rows: bool = False
    whole_layers: str = ""
    whole_attention: str = ""
    gated_mlp: bool = False


def transformer_defaults(**fixed: Any) -> Defaults:
    """Defaults of a transformer: as many key heads as heads, which share the hidden size.

    Args:
        fixed: Defaults of the family that depend on nothing.
    """

    def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
        heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
        found = dict(fixed)
        if isinstance(heads, int) and heads > 0:
            found["num_key_value_heads"] = heads
            if isinstance(hidden, int) and hidden % heads == 0:
                found["head_dim"] = hidden // heads
        return found | longest(given)

    return defaults


def longest(given: Mapping[str, Any]) -> dict[str, Any]:
    """As many positions as tokens. A ``seq_len`` that cannot be is an error of its own, and not one of this as well."""
    if "seq_len" not in given:
        return {}
    length = given["seq_len"]
    return {"max_position_embeddings": length if isinstance(length, int) and length > 0 else 1}


def with_wide_mlp(defaults: Defaults) -> Defaults:
    """The same, and an MLP four times as wide as the hidden size."""

    def wider(given: Mapping[str, Any]) -> dict[str, Any]:
        hidden = given.get("hidden_size")
        return defaults(given) | ({"intermediate_size": 4 * hidden} if isinstance(hidden, int) else {})

    return wider
