"""Families of models: the builder of a family, the fields that describe its models, and its training task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from simplan.model.layer import LayerSpec

if TYPE_CHECKING:  # the model unfolds into layers and so imports this package
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

Defaults = Callable[[Mapping[str, Any]], dict[str, Any]]

TRANSFORMER = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "seq_len",
})  # fmt: skip
"""Fields of every transformer."""

TOKENS = frozenset({"vocab_size", "max_position_embeddings", "tied_embeddings"})
"""Fields of every language model."""

ADAPTERS = frozenset({"lora_rank", "lora_targets"})
"""Fields of models whose linear layers can have adapters."""

LORA = ADAPTERS | {
    "lora_rank_pattern", "lora_dropout", "lora_dora", "lora_oft", "lora_modules_to_save", "frozen",
    "input_require_grads",
}  # fmt: skip
"""Fields of families of which parts can be trained (``simplan.model.adapters``)."""

PACKED = frozenset({"document_lengths"})
"""Fields of language models with packed sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
        layers: Builder of a model's layers, as one tensor- and context-parallel rank holds them.
        fields: Fields of ``ModelSpec`` that describe models of the family; any other field is rejected.
        defaults: Function from the fields that the user gave to the default values of others.
        inputs: Input of the first layer. For ``token_pairs``, tokens of the encoder and then tokens of the decoder.
        task: Training target of the head: the next token of every position, the masked tokens, the tokens of the
            decoder, the class of the input, or the model's own.
        causal: Tokens attend only to themselves and earlier tokens.
        rotary: Name of the field with the width of queries and keys that is rotated by position; empty for none.
        soft_cap: Attention scores pass through a scaled tanh (Gemma 2).
        alibi: A bias that grows with the distance is added to attention scores (Press et al. 2022).
        position_rows: Positions are rows of a learned table, whose length limits sequences.
        whole_layers: Name of the layers for which tensor and context parallelism are not modeled; empty for none.
        whole_attention: Name of the attention for which context parallelism is not modeled; empty for none.
        gated_mlp: MLPs, or those of experts, have a gate. Without meaning for a family that takes the field
            ``gated_mlp``.
    """

    layers: Callable[[ModelSpec, Shard], tuple[LayerSpec, ...]]
    fields: frozenset[str]
    defaults: Defaults
    inputs: Literal["tokens", "token_pairs", "images", "captured"] = "tokens"
    task: Literal["next_token", "masked_token", "target_tokens", "class", "own"] = "next_token"
    causal: bool = True
    rotary: str = ""
    soft_cap: bool = False
    alibi: bool = False
    position_rows: bool = False
    whole_layers: str = ""
    whole_attention: str = ""
    gated_mlp: bool = False


def transformer_defaults(given: Mapping[str, Any], *, wide_mlp: bool = False, **fixed: Any) -> dict[str, Any]:
    """Defaults: ``fixed`` ones, one key and value head per query head, and heads that share the hidden size.

    With ``wide_mlp``, the MLP is four times as wide as the hidden size.
    """
    heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
    found = fixed | longest(given)
    if isinstance(heads, int) and heads > 0:
        found["num_key_value_heads"] = heads
        if isinstance(hidden, int) and hidden % heads == 0:
            found["head_dim"] = hidden // heads
    if wide_mlp and isinstance(hidden, int):
        found["intermediate_size"] = 4 * hidden
    return found


def longest(given: Mapping[str, Any]) -> dict[str, Any]:
    """Default ``max_position_embeddings``: ``seq_len``, or 1 if ``seq_len`` is invalid, which is a separate error."""
    if "seq_len" not in given:
        return {}
    length = given["seq_len"]
    return {"max_position_embeddings": length if isinstance(length, int) and length > 0 else 1}
