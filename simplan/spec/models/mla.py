"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

Keys and values of all heads come from one narrow vector a token, perhaps queries from another one. A part of queries
and keys is rotated by position, and that part of the keys is the same for all heads. Values are narrower than keys;
they are padded to their width, since torch's fused kernels want both alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simplan.spec.layer import Attention, Gemm, Kernel, ParameterSpec, Pointwise, Saved
from simplan.spec.models.documents import join_kernels
from simplan.spec.models.part import FP32_BYTES, Part
from simplan.spec.share import Share, column_exchanges, row_kernels

if TYPE_CHECKING:
    from simplan.spec.model import ModelSpec

__all__ = ["LatentForm", "latent_attention", "latent_form"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """Which multi-head latent attention.

    Attributes:
        q_rank: Width of the vector that queries come from; 0 for the hidden states themselves.
        kv_rank: The same of keys and values.
        plain: Width of a head's queries and keys that is not rotated.
        rotated: Width that is.
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
        """What tells layers of this form from others."""
        return f"qr{self.q_rank},kvr{self.kv_rank},nope{self.plain},rope{self.rotated},dv{self.value}"


def latent_form(model: ModelSpec) -> LatentForm:
    """The attention of a model that has this one."""
    return LatentForm(
        q_rank=model.q_lora_rank or 0,
        kv_rank=model.kv_lora_rank,
        plain=model.qk_nope_head_dim,
        rotated=model.qk_rope_head_dim,
        value=model.v_head_dim,
    )


def latent_attention(form: LatentForm, share: Share) -> Part:
    """Queries, the vectors behind keys and values, the attention core, and the projection of its output.

    Tensor-parallel ranks have some of the heads each. The matrices that make the narrow vectors are whole on all of
    them and see the own tokens only; what is gathered are these vectors, not the hidden states (NVIDIA/Megatron-LM at
    23e00ed, megatron/core/transformer/multi_latent_attention.py).

    Args:
        form: Which attention.
        share: Sizes; sequences are not split over context-parallel ranks.
    """
    n, own, h, a = share.tokens, share.own_tokens, share.hidden, share.heads
    assert share.shard.cp == 1
    queries = _queries(form, share)
    d, wide = form.head, n * a * form.head
    keys = a * (form.plain + form.value)
    latent = form.kv_rank + form.rotated
    rotated = n * (a + 1) * form.rotated
    assemble = Pointwise("assemble heads", 3 * n * a * (form.plain + form.rotated + form.value), 3 * wide)
    before, after = column_exchanges("kv_a_norm output", share, width=form.kv_rank)
    turned = column_exchanges("rotated part of keys", share, width=form.rotated)[0]
    return Part(
        parameters=(
            *queries.parameters,
            ParameterSpec("kv_a.weight", (latent, h), share.partial),
            ParameterSpec("kv_a_norm.weight", (form.kv_rank,), share.partial),
            ParameterSpec("kv_b.weight", (keys, form.kv_rank)),
            ParameterSpec("proj.weight", (h, a * form.value)),
        ),
        kernels=(
            *queries.kernels,
            Gemm("kv_a", own, latent, h),
            Pointwise("kv_a_norm", own * form.kv_rank, own * form.kv_rank),
            *turned,
            *before,
            Gemm("kv_b", n, keys, form.kv_rank),
            *after,
            Pointwise("rotary", 2 * rotated, 2 * rotated),
            assemble,
            Attention(a, a, d, n, value_head_dim=form.value, padded=form.value < d, documents=share.documents),
            *join_kernels(wide, share),
            Pointwise("cut values", n * a * form.value, n * a * form.value),
            Gemm("proj", n, h, a * form.value),
            *row_kernels("proj output", share),
        ),
        saved=(
            *queries.saved,
            Saved("kv_a output", own * latent, made_by="kv_a"),
            Saved("kv_a_norm statistics", own, FP32_BYTES, made_by="kv_a_norm"),
            Saved("kv_a_norm output", own * form.kv_rank, made_by="kv_a_norm"),
            Saved("q, k and padded v", 3 * wide, made_by="assemble heads"),
            Saved("padded attention output", wide, made_by="attention"),
            Saved("attention logsumexp", n * a, FP32_BYTES, made_by="attention"),
            Saved("attention output", n * a * form.value, made_by="cut values"),
        ),
        constants=(Saved("rotary tables", 2 * n * form.rotated, FP32_BYTES),),
        gradients=("proj.weight", "kv_b.weight", "kv_a_norm.weight", "kv_a.weight", *queries.gradients),
    )


def _queries(form: LatentForm, share: Share) -> Part:
    n, own, h, q = share.tokens, share.own_tokens, share.hidden, share.heads * form.head
    if not form.q_rank:
        before, after = column_exchanges("norm1 output", share)
        kernels: tuple[Kernel, ...] = (*before, Gemm("q", n, q, h), *after)
        return Part(parameters=(ParameterSpec("q.weight", (q, h)),), kernels=kernels, gradients=("q.weight",))
    before, after = column_exchanges("q_a_norm output", share, width=form.q_rank)
    kernels = (
        Gemm("q_a", own, form.q_rank, h),
        Pointwise("q_a_norm", own * form.q_rank, own * form.q_rank),
        *before,
        Gemm("q_b", n, q, form.q_rank),
        *after,
    )
    return Part(
        parameters=(
            ParameterSpec("q_a.weight", (form.q_rank, h), share.partial),
            ParameterSpec("q_a_norm.weight", (form.q_rank,), share.partial),
            ParameterSpec("q_b.weight", (q, form.q_rank)),
        ),
        kernels=kernels,
        saved=(
            Saved("q_a output", own * form.q_rank, made_by="q_a"),
            Saved("q_a_norm statistics", own, FP32_BYTES, made_by="q_a_norm"),
            Saved("q_a_norm output", own * form.q_rank, made_by="q_a_norm"),
        ),
        gradients=("q_b.weight", "q_a_norm.weight", "q_a.weight"),
    )
