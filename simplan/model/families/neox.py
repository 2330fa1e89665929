"""GPT-NeoX's architecture, also Pythia's: attention and MLP read the same hidden states, and both are added together.

Attention and MLP have separate LayerNorms. Part of the width of queries and keys is rotated. Linear layers have biases.
The head has no bias and is not tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.model.layer import LayerKind, LayerSpec, Operator, Pointwise, Role, Tensor
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import token_table
from simplan.model.parts.keys import block_key, embedding_key
from simplan.model.parts.mlp import gelu_mlp
from simplan.model.parts.part import LayerPart, NormKind, hidden_input, layer_of, norm, residual, with_role
from simplan.model.parts.prenorm import vocabulary_head
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["NEOX"]

_NORM = NormKind(statistics=2, bias=True)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    embedding = layer_of(
        embedding_key(model, share),
        LayerKind.EMBEDDING,
        [token_table(share)],
        inputs=(),
        output_shapes=share.hidden_shapes,
    )
    block = _block(model, share)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), vocabulary_head(model, share, _NORM))


def _block(model: ModelSpec, share: RankShare) -> LayerSpec:
    form = AttentionForm(fused=True, bias="all", rotated=model.partial_rotary_factor)
    return layer_of(
        block_key(model, share, f"rotated{form.rotated:g}"),
        LayerKind.BLOCK,
        [
            norm("norm1", "input", _NORM, share),
            self_attention("norm1 output", form, share),
            norm("norm2", "input", _NORM, share),
            gelu_mlp("norm2 output", share, bias=True),
            _both(share),
            residual("residual1", "input", "attention and mlp", share),
        ],
        inputs=(hidden_input(share),),
        output_shapes=share.hidden_shapes,
    )


def _both(share: RankShare) -> LayerPart:
    """The sum of the two branches."""
    own = share.own_tokens * share.hidden
    add = Operator(
        kernel=Pointwise("add branches", 2 * own, own),
        reads=("down output", "proj output"),
        makes=(Tensor("attention and mlp", own),),
        passes=True,
    )
    return with_role(LayerPart(operators=(add,)), Role.MLP)


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {"tied_embeddings": False, "partial_rotary_factor": 0.25}
    return with_wide_mlp(transformer_defaults(**fixed))(given)


NEOX = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | PACKED | {"partial_rotary_factor"},
    defaults=_defaults,
    rotary="head_dim",
)
"""Black et al. 2022 (arXiv:2204.06745), Biderman et al. 2023 (arXiv:2304.01373)."""
