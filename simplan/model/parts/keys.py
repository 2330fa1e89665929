"""Keys of layers, which identify every property of a layer, so that equal keys mean equal layers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

__all__ = ["block_key", "embedding_key", "head_key"]


def embedding_key(model: ModelSpec, share: RankShare, *more: str) -> str:
    """Key of the embedding of tokens.

    Args:
        model: The model.
        share: Sizes on one rank.
        more: Additional distinguishing properties.
    """
    sizes = [f"h{model.hidden_size}", f"v{model.vocab_size}", *more, f"s{model.seq_len}"]
    return f"{model.family}-embedding:{','.join(sizes)}{share.suffix}"


def block_key(model: ModelSpec, share: RankShare, *more: str) -> str:
    """Key of a block; arguments as in ``embedding_key``."""
    heads = [f"a{model.num_attention_heads}", f"kv{model.num_key_value_heads}", f"d{model.head_dim}"]
    sizes = [f"h{model.hidden_size}", *heads, f"i{model.intermediate_size}", f"s{model.seq_len}", *more]
    if share.documents:  # their order changes neither work nor memory
        counts = sorted(Counter(share.documents).items(), reverse=True)
        sizes.append("docs" + "+".join(f"{number}x{length}" for length, number in counts))
    return f"{model.family}-block:{','.join(sizes)}{share.suffix}"


def head_key(model: ModelSpec, share: RankShare, *more: str) -> str:
    """Key of the head of a language model; arguments as in ``embedding_key``."""
    sizes = [f"h{model.hidden_size}", f"v{model.vocab_size}", *more, f"s{model.seq_len}"]
    return f"{model.family}-head:{','.join(sizes)}{share.suffix}"
