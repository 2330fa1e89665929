"""The model, in Hugging Face's words, and the list of layers it unfolds into."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from simplan.spec.base import Count, Spec
from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.shard import Shard
from simplan.spec.transformer import gpt_layers, llama_layers

__all__ = ["ModelSpec"]


class ModelSpec(Spec):
    """A dense decoder of the GPT or the Llama family.

    Both are pre-norm decoders. ``gpt``: learned positions, LayerNorm, biases, a two-matrix GELU MLP (GPT-2).
    ``llama``: rotary positions, RMSNorm, no biases, a gated SiLU MLP, grouped queries.
    The keys are those of Hugging Face's ``config.json``. Defaults: ``num_key_value_heads`` as many as heads,
    ``intermediate_size`` four times ``hidden_size`` (gpt only), ``head_dim = hidden_size / num_attention_heads``,
    ``tied_embeddings`` true for gpt and false for llama, ``max_position_embeddings`` = ``seq_len``.

    Attributes:
        name: For people; has no effect.
        seq_len: Tokens of one sequence.
        vocab_size: Rows of the embedding, padding included.
        tied_embeddings: Input embedding and output head share one weight. With a pipeline each end holds a copy,
            and their gradients are all-reduced every step.
        sources: Field name -> where its value comes from.
    """

    name: str = "inline"
    family: Literal["gpt", "llama"]
    # the limits are written inside Annotated: after an equals sign they would lose against Count's own
    num_hidden_layers: Annotated[Count, Field(le=2_000)]
    hidden_size: Annotated[Count, Field(le=10**6)]
    num_attention_heads: Annotated[Count, Field(le=10**5)]
    num_key_value_heads: Annotated[Count, Field(le=10**5)]
    head_dim: Annotated[Count, Field(le=10**5)]
    intermediate_size: Annotated[Count, Field(le=10**7)]
    vocab_size: Annotated[Count, Field(le=10**8)]
    seq_len: Annotated[Count, Field(le=10**8)]
    max_position_embeddings: Annotated[Count, Field(le=10**8)]
    tied_embeddings: bool
    sources: dict[str, str] = Field(default_factory=dict)

    if TYPE_CHECKING:  # fields without a default may be left out when others imply them

        def __init__(self, **fields: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
        if isinstance(heads, int) and heads > 0:
            filled.setdefault("num_key_value_heads", heads)
            if isinstance(hidden, int) and hidden % heads == 0:
                filled.setdefault("head_dim", hidden // heads)
        if filled.get("family") == "gpt":
            if isinstance(hidden, int):
                filled.setdefault("intermediate_size", 4 * hidden)
            filled.setdefault("tied_embeddings", True)
        if filled.get("family") == "llama":
            filled.setdefault("tied_embeddings", False)
        if "seq_len" in filled:
            filled.setdefault("max_position_embeddings", filled["seq_len"])
        return filled

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Embedding, ``num_hidden_layers`` equal blocks, and the head with the loss; all of each."""
        return self.layers_of(Shard())

    def layers_of(self, shard: Shard) -> tuple[LayerSpec, ...]:
        """The same layers, but only what one tensor- and context-parallel rank holds and does of each.

        Args:
            shard: How layers are split; the degrees divide what they split (``simplan.spec.rules``).
        """
        return gpt_layers(self, shard) if self.family == "gpt" else llama_layers(self, shard)

    @cached_property
    def num_parameters(self) -> int:
        """Weights of the model, a tied embedding counted once."""
        tied = sum(p.num_elements for layer in self.layers for p in layer.parameters if p.name in layer.tied)
        return sum(layer.num_parameters for layer in self.layers) - tied

    def flops_per_sequence(self, *, full_attention: bool = False) -> int:
        """Model FLOPs of one sequence, forward and backward (three times forward), no recomputation."""
        return 3 * sum(layer.flops(full_attention=full_attention) for layer in self.layers)

    def block_indices(self) -> range:
        """Indices of the transformer blocks in ``layers``."""
        assert self.layers[1].kind is LayerKind.BLOCK
        return range(1, 1 + self.num_hidden_layers)
