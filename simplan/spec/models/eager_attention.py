"""Attention whose scores are tensors of their own: what T5 has, since fused kernels give no gradient of a bias.

Scores are products of queries and keys, plus a bias if there is one; their softmax, in fp32, weighs the values.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplan.spec.layer import Attention, Gemm, Kernel, Lookup, ParameterSpec, Saved
from simplan.spec.models.part import FP32_BYTES, Part
from simplan.spec.share import Share

__all__ = ["EagerForm", "eager_attention"]

_INDEX_BYTES = 8
_MASK_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerForm:
    """Which attention.

    Attributes:
        name: Of its core.
        prefix: Of the names of its matrices.
        causal: Each query meets the keys up to its own.
        biased: A row of a table for every pair of query and key, by their distance, is added to the scores of all heads
            (Raffel et al. 2020, section 2.1). The table is an input of the layer, whose rows every layer looks up.
    """

    name: str = "attention"
    prefix: str = ""
    causal: bool = False
    biased: bool = False


def eager_attention(form: EagerForm, share: Share, num_keys: int) -> Part:
    """Queries, keys and values without biases, the attention core, and the projection of its output.

    Args:
        form: Which attention.
        share: Sizes on the side of the queries.
        num_keys: Tokens that keys and values are made from: its own, or those of an encoder.
    """
    assert share.shard.tp == share.shard.cp == 1, "nothing is exchanged"
    n, h, q, prefix = share.tokens, share.hidden, share.q, form.prefix
    names = [f"{prefix}{name}" for name in ("q", "k", "v")]
    core = Attention(
        share.heads,
        share.heads,
        share.head_dim,
        n,
        causal=form.causal,
        num_keys=0 if num_keys == n else num_keys,
        eager=True,
        name=form.name,
    )
    bias: list[Kernel] = [Lookup(f"{form.name} bias", n * num_keys, share.heads)] if form.biased else []
    return Part(
        parameters=(
            *(ParameterSpec(f"{name}.weight", (q, h)) for name in names),
            ParameterSpec(f"{prefix}proj.weight", (h, q)),
        ),
        kernels=(
            Gemm(names[0], n, q, h),
            *(Gemm(name, num_keys, q, h) for name in names[1:]),
            *bias,
            core,
            Gemm(f"{prefix}proj", n, h, q),
        ),
        saved=(
            Saved(f"{prefix}q, k and v", (n + 2 * num_keys) * q, made_by=names[-1]),
            Saved(f"{form.name} weights", core.num_scores, FP32_BYTES, made_by=form.name),
            Saved(f"{form.name} weights in 16 bits", core.num_scores, made_by=form.name, narrowed=True),
            Saved(f"{form.name} output", n * q, made_by=form.name),
        ),
        constants=_tables(form, n, num_keys),
        gradients=(f"{prefix}proj.weight", *(f"{name}.weight" for name in reversed(names))),
    )


def _tables(form: EagerForm, num_queries: int, num_keys: int) -> tuple[Saved, ...]:
    """Which row of the table of positions each pair of query and key has, and which keys come later."""
    if not form.biased:
        return ()
    pairs = num_queries * num_keys
    if not form.causal:
        return (Saved("rows of distances", pairs, _INDEX_BYTES),)
    return Saved("rows of earlier distances", pairs, _INDEX_BYTES), Saved("later keys", pairs, _MASK_BYTES)
