"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

Keys and values of all heads come from one latent vector per token, and queries perhaps from another one. A part of
queries and keys is rotated by position, and that part of the keys is the same for all heads. Values are narrower than
keys; they are padded to the width of keys, since torch's fused kernels need equal widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simplan.model.layer import Attention, Operator, ParameterSpec, Pointwise, Role, Tensor
from simplan.model.parts.attention import core_operator, join_documents
from simplan.model.parts.mlp import column_linears, row_linear
from simplan.model.parts.part import FP32_BYTES, LayerPart, NormKind, joined, linear, norm_operator, with_role
from simplan.model.share import RankShare, for_columns

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

__all__ = ["CUT_VALUES", "LatentForm", "latent_attention", "latent_form"]

CUT_VALUES = "cut values"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """Variant of multi-head latent attention.

    Attributes:
        q_rank: Width of the latent vector of queries; 0 for the hidden states themselves.
        kv_rank: Width of the latent vector of keys and values.
        plain: Width of a head's queries and keys that is not rotated.
        rotated: Width of a head's queries and keys that is rotated.
        value: Width of a head's values.
    """

    q_rank: int
    kv_rank: int
    plain: int
    rotated: int
    value: int

    @property
    def head(self) -> int:
        """Width of a head's queries and keys."""
        return self.plain + self.rotated

    @property
    def key(self) -> str:
        """Part of a layer's key that identifies the form."""
        return f"qr{self.q_rank},kvr{self.kv_rank},nope{self.plain},rope{self.rotated},dv{self.value}"


def latent_form(model: ModelSpec) -> LatentForm:
    """The latent attention of a model."""
    return LatentForm(
        q_rank=model.q_lora_rank or 0,
        kv_rank=model.kv_lora_rank,
        plain=model.qk_nope_head_dim,
        rotated=model.qk_rope_head_dim,
        value=model.v_head_dim,
    )


def latent_attention(form: LatentForm, share: RankShare) -> LayerPart:
    """Queries, the latent vectors of keys and values, the attention core, and the projection of its output.

    Each tensor-parallel rank has some of the heads. The matrices that make latent vectors are replicated on all ranks
    and see a rank's own tokens only. These vectors are all-gathered, not the hidden states (NVIDIA/Megatron-LM at
    23e00ed, megatron/core/transformer/multi_latent_attention.py).

    Args:
        form: Variant of the attention.
        share: Sizes; sequences are not split over context-parallel ranks.
    """
    n, own, h, a = share.tokens, share.own_tokens, share.hidden, share.heads
    assert share.shard.cp == 1
    d, wide = form.head, n * a * form.head
    latent, rotated = form.kv_rank + form.rotated, n * (a + 1) * form.rotated
    queries, query = _queries(form, share), "q_b" if form.q_rank else "q"
    narrow = linear("kv_a", "norm1 output", (own, latent, h), partial=(share.partial, False))
    normed, weight = _narrow_norm("kv_a", form.kv_rank, share)
    turned = for_columns("rotated part of keys", share, width=form.rotated)
    cut = Operator(reads=("kv_a output",), makes=(Tensor("rotated part of keys", own * form.rotated),), in_place=True)
    keys = column_linears({"kv_b": a * (form.plain + form.value)}, "kv_a_norm output", share, inner=form.kv_rank)
    keys = with_role(keys, Role.ATTENTION, Role.UP_PROJECTION)
    rotate = Operator(
        kernel=Pointwise("rotary", 2 * rotated, 2 * rotated, like="rotary"),
        reads=(f"{query} output", turned.name),
        makes=(Tensor("rotated parts", rotated),),
        roles=frozenset({Role.UP_PROJECTION}),
    )
    assembled = Tensor("q, k and padded v", 3 * wide)
    assemble = Operator(
        kernel=Pointwise("assemble heads", 3 * n * a * (form.plain + form.rotated + form.value), 3 * wide),
        reads=(f"{query} output", "kv_b output", "rotated parts"),
        makes=(assembled,),
        roles=frozenset({Role.UP_PROJECTION}),
    )
    padded, output = Tensor("padded attention output", wide), Tensor("attention output", n * a * form.value)
    core = Attention(a, a, d, n, value_head_dim=form.value, padded=form.value < d, documents=share.documents)
    attended = [core_operator(core, (assembled.name,), padded)]
    if share.documents:
        attended = [core_operator(core, (assembled.name,), Tensor("outputs of documents", wide))]
        attended.append(join_documents(wide, "outputs of documents", share, padded.name))
    cut_values = Operator(
        kernel=Pointwise(CUT_VALUES, n * a * form.value, n * a * form.value), reads=(padded.name,), makes=(output,)
    )
    return joined(
        with_role(queries, Role.ATTENTION),
        with_role(narrow, Role.ATTENTION),
        LayerPart(parameters=(weight,), operators=(normed, cut, *turned.before)),
        keys,
        LayerPart(
            operators=(rotate, assemble, *attended, cut_values),
            constants=(Tensor("rotary tables", 2 * n * form.rotated, FP32_BYTES),),
        ),
        with_role(row_linear("proj", output.name, a * form.value, share), Role.ATTENTION),
    )


def _queries(form: LatentForm, share: RankShare) -> LayerPart:
    """Queries of all heads, ``q output`` or ``q_b output``."""
    own, h, q = share.own_tokens, share.hidden, share.heads * form.head
    if not form.q_rank:
        return with_role(column_linears({"q": q}, "norm1 output", share), Role.UP_PROJECTION)
    narrow = linear("q_a", "norm1 output", (own, form.q_rank, h), partial=(share.partial, False))
    normed, weight = _narrow_norm("q_a", form.q_rank, share)
    wide = column_linears({"q_b": q}, "q_a_norm output", share, inner=form.q_rank)
    wide = with_role(wide, Role.UP_PROJECTION)
    return joined(narrow, LayerPart(parameters=(weight,), operators=(normed,)), wide)


def _narrow_norm(name: str, width: int, share: RankShare) -> tuple[Operator, ParameterSpec]:
    """The norm of a latent vector, the first columns of a matrix's output."""
    weight = ParameterSpec(f"{name}_norm.weight", (width,), share.partial)
    result = Tensor(f"{name}_norm output", share.own_tokens * width)
    kind = NormKind(statistics=1, bias=False)
    return norm_operator(f"{name}_norm", f"{name} output", kind, result, share.own_tokens, [weight]), weight
