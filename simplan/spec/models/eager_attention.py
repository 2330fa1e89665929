"""Attention whose scores are tensors of their own: what T5 has, since fused kernels give no gradient of a bias.

Scores are products of queries and keys, plus a bias if there is one; their softmax, in FP32, weighs the values.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplan.spec.layer import Attention, Lookup, Operator, Role, Tensor
from simplan.spec.models.mlp import row_linear
from simplan.spec.models.part import FP32_BYTES, INDEX_BYTES, MASK_BYTES, Part, cast, joined, linear, with_role
from simplan.spec.share import Share

__all__ = ["EagerForm", "eager_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerForm:
    """Which attention.

    Attributes:
        name: Of its core.
        prefix: Of the names of its matrices.
        causal: Each query meets the keys up to its own.
        table: The tensor of which a row for every pair of query and key, by their distance, is added to the scores of
            all heads (Raffel et al. 2020, section 2.1); an input of the layer. Empty for none.
    """

    name: str = "attention"
    prefix: str = ""
    causal: bool = False
    table: str = ""


def eager_attention(form: EagerForm, source: str, keys: str, share: Share, num_keys: int) -> Part:
    """Queries, keys and values without biases, the attention core, and the projection, ``{prefix}proj output``.

    Args:
        form: Which attention.
        source: Name of the tensor that queries are made from.
        keys: Name of the tensor that keys and values are made from.
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
    joint = "+".join(names if keys == source else names[1:])
    matrices = [linear(names[0], source, (n, q, h), joint=joint if keys == source else "")]
    matrices += [linear(name, keys, (num_keys, q, h), joint=joint) for name in names[1:]]
    return joined(
        with_role(joined(*matrices), Role.ATTENTION, Role.COLUMN_PARALLEL),
        Part(operators=tuple(_core(form, core, names)), constants=_tables(form, n, num_keys)),
        with_role(row_linear(f"{prefix}proj", f"{form.name} output", q, share), Role.ATTENTION),
    )


def _core(form: EagerForm, core: Attention, names: list[str]) -> list[Operator]:
    """Scores, their bias, the softmax in FP32, and the products of weights and values."""
    (q, k, v), scores = (f"{name} output" for name in names), Tensor(f"{form.name} scores", core.num_scores)
    wide = Tensor(f"{form.name} scores in FP32", core.num_scores, FP32_BYTES)
    weights = Tensor(f"{form.name} weights", core.num_scores, FP32_BYTES)
    narrow = Tensor(f"{form.name} weights in 16 bits", core.num_scores)
    output = Tensor(f"{form.name} output", core.seq_len * core.num_heads * core.head_dim)
    bias = Tensor(f"{form.name} bias", core.num_scores, residual=True, of_microbatch=True)
    head = core.num_heads * core.head_dim
    keys = (core.num_keys or core.seq_len) * head
    copies = tuple(
        Tensor(f"{name} in the order of heads", size) for name, size in ((q, core.seq_len * head), (k, keys), (v, keys))
    )
    a, b, c = (tensor.name for tensor in copies)
    found = [
        Operator(kernel=core, reads=(q, k, v), makes=copies),
        Operator(reads=(a, b), makes=(scores,), saves=(a, b), saves_for=((a, b), (b, a))),
    ]
    if form.table:
        lookup = Lookup(bias.name, core.num_scores // core.num_heads, core.num_heads)
        biased = Tensor(f"{form.name} scores with bias", core.num_scores)
        found.insert(0, Operator(kernel=lookup, reads=(form.table,), makes=(bias,)))
        found.append(Operator(reads=(scores.name, bias.name), makes=(biased,), in_place=True, passes=True))
        scores = biased
    found.append(cast(scores.name, wide))
    found.append(Operator(reads=(wide.name,), makes=(weights,), saves=(weights.name,)))
    found.append(cast(weights.name, narrow))
    operands = (narrow.name, c)
    found.append(
        Operator(reads=operands, makes=(output,), saves=operands, saves_for=((narrow.name, c), (c, narrow.name)))
    )
    return found


def _tables(form: EagerForm, num_queries: int, num_keys: int) -> tuple[Tensor, ...]:
    """Which row of the table of positions each pair of query and key has, and which keys come later."""
    if not form.table:
        return ()
    pairs = num_queries * num_keys
    if not form.causal:
        return (Tensor("rows of distances", pairs, INDEX_BYTES),)
    return Tensor("rows of earlier distances", pairs, INDEX_BYTES), Tensor("later keys", pairs, MASK_BYTES)
