"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

Keys and values of all heads come from one latent vector per token, and queries perhaps from another one. A part of
queries and keys is rotated by position, and that part of the keys is the same for all heads. Values are narrower than
keys; they are padded to the width of keys, since torch's fused kernels need equal widths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.model.layer import Attention, Operator, Pointwise, Role, Tensor
from simplan.model.parts.attention import core_operators
from simplan.model.parts.mlp import column_linears, row_linear
from simplan.model.parts.part import FP32_BYTES, RMS_NORM, LayerPart, joined, linear, norm_of, with_role
from simplan.model.share import RankShare, for_columns

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

CUT_VALUES = "cut values"


def latent_key(model: ModelSpec) -> str:
    """Part of a layer's key that identifies latent attention."""
    ranks = f"qr{model.q_lora_rank or 0},kvr{model.kv_lora_rank}"
    return f"{ranks},nope{model.qk_nope_head_dim},rope{model.qk_rope_head_dim},dv{model.v_head_dim}"


def latent_attention(model: ModelSpec, share: RankShare) -> LayerPart:
    """Queries, the latent vectors of keys and values, the attention core, and the projection of its output.

    Each tensor-parallel rank has some of the heads. The matrices that make latent vectors are replicated on all ranks
    and see a rank's own tokens only. These vectors are all-gathered, not the hidden states (NVIDIA/Megatron-LM at
    23e00ed, megatron/core/transformer/multi_latent_attention.py).
    """
    n, own, h, a = share.tokens, share.own_tokens, share.hidden, share.heads
    assert share.shard.cp == 1
    nope, rope, value, rank = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim, model.kv_lora_rank
    d = nope + rope
    wide, rotated = n * a * d, n * (a + 1) * rope
    query = "q_b output" if model.q_lora_rank else "q output"
    narrow = linear("kv_a", "norm1 output", (own, rank + rope, h), partial=(share.partial, False))
    cut = Operator(reads=("kv_a output",), makes=(Tensor("rotated part of keys", own * rope),), in_place=True)
    gathers, turned = for_columns("rotated part of keys", share, width=rope)
    rotate = Operator(
        kernel=Pointwise("rotary", 2 * rotated, 2 * rotated, like="rotary"),
        reads=(query, turned),
        makes=(Tensor("rotated parts", rotated),),
        roles=frozenset({Role.UP_PROJECTION}),
    )
    assembled = Tensor("q, k and padded v", 3 * wide)
    assemble = Operator(
        kernel=Pointwise("assemble heads", 3 * n * a * (d + value), 3 * wide),
        reads=(query, "kv_b output", "rotated parts"),
        makes=(assembled,),
        roles=frozenset({Role.UP_PROJECTION}),
    )
    padded, output = Tensor("padded attention output", wide), Tensor("attention output", n * a * value)
    core = Attention(a, a, d, n, value_head_dim=value, padded=value < d, documents=share.documents)
    cut_values = Operator(
        kernel=Pointwise(CUT_VALUES, n * a * value, n * a * value), reads=(padded.name,), makes=(output,)
    )
    keys = column_linears({"kv_b": a * (nope + value)}, "kv_a_norm output", share, inner=rank)
    return joined(
        with_role(_queries(model, share, a * d), Role.ATTENTION),
        with_role(narrow, Role.ATTENTION),
        _latent_norm("kv_a", rank, share),
        cut,
        *gathers,
        with_role(keys, Role.ATTENTION, Role.UP_PROJECTION),
        LayerPart(
            operators=(rotate, assemble, *core_operators(core, (assembled.name,), padded), cut_values),
            constants=(Tensor("rotary tables", 2 * n * rope, FP32_BYTES),),
        ),
        with_role(row_linear("proj", output.name, a * value, share), Role.ATTENTION),
    )


def _queries(model: ModelSpec, share: RankShare, columns: int) -> LayerPart:
    """Queries of all heads, ``q output`` or ``q_b output``."""
    rank = model.q_lora_rank
    if not rank:
        return with_role(column_linears({"q": columns}, "norm1 output", share), Role.UP_PROJECTION)
    narrow = linear("q_a", "norm1 output", (share.own_tokens, rank, share.hidden), partial=(share.partial, False))
    wide = column_linears({"q_b": columns}, "q_a_norm output", share, inner=rank)
    return joined(narrow, _latent_norm("q_a", rank, share), with_role(wide, Role.UP_PROJECTION))


def _latent_norm(name: str, width: int, share: RankShare) -> LayerPart:
    """The norm of a latent vector, the first columns of a matrix's output."""
    own = share.own_tokens
    made = Tensor(f"{name}_norm output", own * width)
    return norm_of(f"{name}_norm", f"{name} output", RMS_NORM, made, (own, width), partial=share.partial)
