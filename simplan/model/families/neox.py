"""GPT-NeoX's architecture, also Pythia's: attention and MLP read the same hidden states, and both are added together.

Attention and MLP have separate LayerNorms. Part of the width of queries and keys is rotated. Linear layers have biases.
The head has no bias and is not tied to the embedding.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.families.llama import decoder_layers
from simplan.model.layer import LayerSpec, Operator, Pointwise, Role, Tensor
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.mlp import gelu_mlp
from simplan.model.parts.part import LAYER_NORM, Block, block_key, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    return decoder_layers(model, share, LAYER_NORM, [_block(model, share)] * model.num_hidden_layers)


def _block(model: ModelSpec, share: RankShare) -> Block:
    form = AttentionForm(fused=True, bias="all", rotated=model.partial_rotary_factor)
    own = share.own_tokens * share.hidden
    both = Operator(
        kernel=Pointwise("add branches", 2 * own, own),
        reads=("down output", "proj output"),
        makes=(Tensor("attention and mlp", own),),
        passes=True,
        roles=frozenset({Role.MLP}),
    )
    return block_key(model, share, f"rotated{form.rotated:g}"), [
        norm("norm1", "input", LAYER_NORM, share),
        self_attention("norm1 output", form, share),
        norm("norm2", "input", LAYER_NORM, share),
        gelu_mlp("norm2 output", share, bias=True),
        both,
        residual("residual1", "input", "attention and mlp", share),
    ]


NEOX = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | PACKED | {"partial_rotary_factor"},
    defaults=partial(transformer_defaults, wide_mlp=True, tied_embeddings=False, partial_rotary_factor=0.25),
    rotary="head_dim",
)
"""Black et al. 2022 (arXiv:2204.06745), Biderman et al. 2023 (arXiv:2304.01373)."""
