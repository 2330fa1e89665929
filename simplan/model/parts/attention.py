"""Self-attention: projections, operations on queries and keys, and the core with its collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from simplan.model.implementations.eager_attention import eager_core
from simplan.model.layer import (
    Attention,
    CollectiveKind,
    LayerCollective,
    Operator,
    ParameterSpec,
    Pointwise,
    Role,
    Tensor,
)
from simplan.model.parts.mlp import column_linears, row_linear
from simplan.model.parts.part import FP32_BYTES, MASK_BYTES, RMS_NORM, LayerPart, joined, norm_of, with_role
from simplan.model.share import RankShare

Biases = Literal["none", "qkv", "all"]
_K = CollectiveKind
_OUTPUT = "attention output"
JOIN, MASK, SINKS = "join documents", "attention mask", "sinks"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Variant of self-attention.

    Attributes:
        fused: One matrix makes q, k and v. Its full output stays in memory while a part of it is saved.
        bias: Biases of no matrix, of q, k and v, or of the projection too.
        causal: Each query attends to the keys up to its own.
        rotated: Fraction of the width of queries and keys that is rotated by position (Su et al. 2021); 0 for none.
        soft_cap: Scores pass through a scaled tanh, so that no fused kernel computes them (Gemma 2).
        qk_norm: RMSNorm of queries and keys: one weight shared by all heads (``head``), or one norm over all heads
            before they are split (``projection``).
        window: Sliding window; 0 for none (``Attention``).
        alibi: A bias that grows with the distance is added to the scores (Press et al. 2022).
        sinks: Each head has a learned score that takes part in the softmax and in nothing else (gpt-oss).
    """

    fused: bool
    bias: Biases = "none"
    causal: bool = True
    rotated: float = 0.0
    soft_cap: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    window: int = 0
    alibi: bool = False
    sinks: bool = False

    @property
    def masked(self) -> bool:
        """True if a mask tensor is needed: torch's own kernels support the causal mask only."""
        return self.alibi or self.window > 0


def self_attention(source: str, form: AttentionForm, share: RankShare) -> LayerPart:
    """Queries, keys and values of the tensor ``source``, the attention core, and the projection, ``proj output``."""
    widths = {"qkv": share.q + 2 * share.kv} if form.fused else {"q": share.q, "k": share.kv, "v": share.kv}
    projected = column_linears(widths, source, share, bias=form.bias != "none")
    norms, turned, names = _on_queries_and_keys(form, share)
    core = LayerPart(operators=tuple(_core(form, share, names)), constants=_tables(form, share))
    sinks, output = _sinks(share) if form.sinks else (LayerPart(), _OUTPUT)
    projection = row_linear("proj", output, share.q, share, bias=form.bias == "all")
    projected, projection = with_role(projected, Role.ATTENTION), with_role(projection, Role.ATTENTION)
    return joined(projected, norms, turned, core, sinks, projection)


def _on_queries_and_keys(form: AttentionForm, share: RankShare) -> tuple[LayerPart, LayerPart, tuple[str, ...]]:
    """Norms and rotation (which saves nothing) of queries and keys, and the names of the core's inputs."""
    n, sizes = share.tokens, {"q": share.q, "k": share.kv}
    names = {name: f"{name} output" for name in (*sizes, "v")}
    norms = rotation = LayerPart()
    if form.fused:
        parts = _parts("qkv output", n * share.q, n * share.kv)
        norms, names = joined(parts), dict(zip(names, (t.name for t in parts.makes), strict=True))
        if share.heads > share.kv_heads > 1:  # rows are grouped by heads of keys: queries are not evenly apart
            kernel, queries = Pointwise("line up queries", n * share.q, n * share.q), Tensor("q lined up", n * share.q)
            norms = joined(norms, Operator(kernel=kernel, reads=(names["q"],), makes=(queries,)))
            names["q"] = queries.name
    if form.qk_norm != "none":
        for name, size in sizes.items():
            width = share.head_dim if form.qk_norm == "head" else size
            made, weights = Tensor(f"{name}_norm output", n * size), (n * size // width, width)
            of_name = norm_of(f"{name}_norm", names[name], RMS_NORM, made, weights, partial=share.shard.tp > 1)
            norms = joined(norms, of_name)
            names[name] = made.name
    if form.rotated:
        both = n * (share.q + share.kv)
        touched = both + round(form.rotated * both)
        wide = Tensor("rotary scratch", round(form.rotated * n * share.q), FP32_BYTES)
        rotated = {name: Tensor(f"{name} rotated", n * size) for name, size in sizes.items()}
        operator = Operator(
            kernel=Pointwise("rotary", touched, touched, like="rotary"),
            reads=tuple(names[name] for name in sizes),
            makes=tuple(rotated.values()),
            forward_scratch=(wide, wide),
            backward_scratch=(wide, wide),
        )
        tables = (Tensor("rotary tables", 2 * n * round(form.rotated * share.head_dim), FP32_BYTES),)
        rotation = LayerPart(operators=(operator,), constants=tables)
        names |= {name: tensor.name for name, tensor in rotated.items()}
    return norms, rotation, tuple(names.values())


def _sinks(share: RankShare) -> tuple[LayerPart, str]:
    """The output of the core scaled for the sinks by sigmoid(logsumexp - sink), and its name."""
    elements = share.tokens * share.q
    scaled = Tensor("scaled attention output", elements)
    weight = ParameterSpec(f"{SINKS}.weight", (share.heads,))
    operator = Operator(
        kernel=Pointwise(SINKS, elements, elements),
        reads=(_OUTPUT,),
        makes=(scaled,),
        saves=(_OUTPUT,),
        parameters=(weight.name,),
    )
    return LayerPart(parameters=(weight,), operators=(operator,)), scaled.name


def core_operators(core: Attention, reads: tuple[str, ...], output: Tensor) -> list[Operator]:
    """An attention core in one kernel, which saves its inputs, its output and a logsumexp for every row.

    Outputs of packed documents are copied into one tensor; backward copies equally many gradients of q, k and v.

    Args:
        reads: Names of queries, keys and values, or of the one tensor that they are parts of.
    """
    logsumexp = Tensor("attention logsumexp", core.seq_len * core.num_heads, FP32_BYTES)
    made = replace(output, name="outputs of documents") if core.documents else output
    saves = (*reads, made.name, logsumexp.name)
    operators = [Operator(kernel=core, reads=reads, makes=(made, logsumexp), saves=saves)]
    if core.documents:
        join = Pointwise(JOIN, output.elements, output.elements)
        operators.append(Operator(kernel=join, reads=(made.name,), makes=(output,)))
    return operators


def _parts(source: str, q: int, kv: int) -> Operator:
    """Queries, keys and values as parts of one tensor."""
    makes = tuple(Tensor(f"{name} of {source}", size) for name, size in (("q", q), ("k", kv), ("v", kv)))
    return Operator(reads=(source,), makes=makes, splits=True)


def _core(form: AttentionForm, share: RankShare, names: tuple[str, ...]) -> list[Operator]:
    """The attention core and the collectives that bring it the keys of all tokens."""
    shard, n, q, kv = share.shard, share.tokens, share.tokens * share.q, share.tokens * share.kv
    if form.soft_cap:
        assert shard.cp == 1
        assert not share.documents
        capped = Attention(
            share.heads, share.kv_heads, share.head_dim, n, eager=True, soft_cap=True, window=form.window
        )
        return eager_core(capped, names, _OUTPUT, masked=True)

    def core(heads: int, kv_heads: int, queries: int, keys: int = 0) -> Attention:
        return Attention(
            heads,
            kv_heads,
            share.head_dim,
            queries,
            num_keys=keys,
            causal=form.causal,
            window=form.window,
            masked=form.masked,
            documents=share.documents,
        )

    if shard.cp == 1:
        return core_operators(core(share.heads, share.kv_heads, n), names, Tensor(_OUTPUT, q))
    if shard.cp_comm == "all_gather":
        keys = Tensor("gathered k and v", shard.cp * 2 * kv)
        collective = LayerCollective("k and v", "cp", _K.ALL_GATHER, _K.REDUCE_SCATTER, keys.elements)
        own = Tensor("k and v", 2 * kv)
        gather = Operator(kernel=collective, reads=names[-2:], makes=(keys,), forward_scratch=(own,))
        kernel = core(share.heads, share.kv_heads, n, shard.cp * n)
        return [gather, *core_operators(kernel, (names[0], keys.name), Tensor(_OUTPUT, q))]
    if shard.cp_comm == "a2a":
        packed = Tensor("q, k and v by heads", q + 2 * kv)
        there = LayerCollective("q, k and v", "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, packed.elements)
        back = LayerCollective(_OUTPUT, "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, q)
        kernel = core(share.heads // shard.cp, share.kv_heads // shard.cp, shard.cp * n)
        made, parts = Tensor("attention core output", q), _parts(packed.name, q, kv)
        return [
            Operator(kernel=there, reads=names, makes=(packed,)),
            parts,
            *core_operators(kernel, tuple(tensor.name for tensor in parts.makes), made),
            Operator(kernel=back, reads=(made.name,), makes=(Tensor(_OUTPUT, q),)),
        ]
    assert not form.masked, "which scores count would differ from part to part"
    return _ring(core(share.heads, share.kv_heads, n), shard.cp, 2 * kv, names)


def _ring(core: Attention, cp: int, elements: int, names: tuple[str, ...]) -> list[Operator]:
    """Ring attention (Liu et al. 2023): each rank attends sequentially to the keys of every rank.

    Each part costs the same as the rank's own, causal part: with early and late tokens on every rank, half of its
    scores are masked. Keys and values move cp - 1 times in forward and again in backward. Their gradients move cp
    times: the last move returns them. While backward computes part j, it sends the keys of part j - 1 and the gradients
    of part j + 1.
    """
    kernels: list[LayerCollective | Attention] = [
        LayerCollective("gradients of k and v, home", "cp", None, _K.RING, elements),
        LayerCollective("gradients of k and v", "cp", None, _K.RING, elements, beside_previous=True),
        core,
    ]
    for part in range(1, cp):
        if part == cp - 1:
            kernels.append(LayerCollective("k and v", "cp", _K.RING, _K.RING, elements, beside_previous=True))
        else:
            kernels.append(LayerCollective("k and v", "cp", _K.RING, None, elements, beside_previous=True))
            name = "k and v and their gradients"
            kernels.append(LayerCollective(name, "cp", None, _K.RING, 2 * elements, beside_previous=True))
        kernels.append(core)
    output = Tensor(_OUTPUT, core.seq_len * core.num_heads * core.head_dim)
    *others, last = kernels
    assert isinstance(last, Attention)
    return [
        *(Operator(kernel=kernel, reads=names, passes=True) for kernel in others),
        *core_operators(last, names, output),
    ]


def _tables(form: AttentionForm, share: RankShare) -> tuple[Tensor, ...]:
    """Mask tensors added to the scores of a rank's queries: one per head (ALiBi), or one for all heads."""
    shard, n = share.shard, share.tokens
    if share.documents and form.masked:  # the mask of the longest document contains those of all others
        longest = max(*share.documents, n - sum(share.documents))
        return (Tensor(MASK, (share.heads if form.alibi else 1) * longest**2),)
    if form.soft_cap:  # true where a key does not count
        return (Tensor(f"{MASK} of a window" if form.window else MASK, n**2, MASK_BYTES),)
    gathers = shard.cp > 1 and shard.cp_comm == "all_gather"
    if not (form.masked or (gathers and form.causal)):
        return ()
    by_heads = shard.cp > 1 and shard.cp_comm == "a2a"
    queries = n * shard.cp if by_heads else n
    heads = (share.heads // shard.cp if by_heads else share.heads) if form.alibi else 1
    return (Tensor(MASK, heads * queries * n * shard.cp),)
