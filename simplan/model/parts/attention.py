"""Self-attention: projections, operations on queries and keys, and the core with its collectives."""

from __future__ import annotations

from dataclasses import dataclass
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
from simplan.model.parts.part import FP32_BYTES, MASK_BYTES, LayerPart, NormKind, joined, norm_operator, with_role
from simplan.model.share import RankShare

__all__ = ["JOIN", "MASK", "SINKS", "AttentionForm", "Biases", "core_operator", "join_documents", "self_attention"]

Biases = Literal["none", "qkv", "all"]
_K = CollectiveKind
_OUTPUT = "attention output"
JOIN, MASK, SINKS = "join documents", "attention mask", "sinks"
_RMS_NORM = NormKind(statistics=1, bias=False)


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
    """Queries, keys and values, the attention core, and the projection of its output, ``proj output``.

    Args:
        source: Name of the tensor it is applied to.
        form: Variant of the attention.
        share: Sizes.
    """
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
        operators, names = [parts], dict(zip(names, (t.name for t in parts.makes), strict=True))
        if share.heads > share.kv_heads > 1:  # rows are grouped by heads of keys: queries are not evenly apart
            kernel, queries = Pointwise("line up queries", n * share.q, n * share.q), Tensor("q lined up", n * share.q)
            operators.append(Operator(kernel=kernel, reads=(names["q"],), makes=(queries,)))
            names["q"] = queries.name
        norms = LayerPart(operators=tuple(operators))
    if form.qk_norm != "none":
        each = form.qk_norm == "head"
        heads = {"q": share.heads, "k": share.kv_heads}
        parameters, operators = [], []
        for name, size in sizes.items():
            weight = ParameterSpec(f"{name}_norm.weight", (share.head_dim if each else size,), share.shard.tp > 1)
            made = Tensor(f"{name}_norm output", n * size)
            rows = n * (heads[name] if each else 1)
            operators.append(norm_operator(f"{name}_norm", names[name], _RMS_NORM, made, rows, [weight]))
            parameters.append(weight)
            names[name] = made.name
        norms = joined(norms, LayerPart(parameters=tuple(parameters), operators=tuple(operators)))
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


def core_operator(core: Attention, reads: tuple[str, ...], output: Tensor) -> Operator:
    """An attention core in one kernel, which saves its inputs, its output and a logsumexp for every row.

    Args:
        core: The kernel.
        reads: Names of queries, keys and values, or of the one tensor that they are parts of.
        output: Output tensor.
    """
    logsumexp = Tensor("attention logsumexp", core.seq_len * core.num_heads, FP32_BYTES)
    return Operator(
        kernel=core,
        reads=reads,
        makes=(output, logsumexp),
        saves=(*reads, output.name, logsumexp.name),
    )


def _parts(source: str, q: int, kv: int) -> Operator:
    """Queries, keys and values as parts of one tensor."""
    makes = tuple(Tensor(f"{name} of {source}", size) for name, size in (("q", q), ("k", kv), ("v", kv)))
    return Operator(reads=(source,), makes=makes, splits=True)


def join_documents(elements: int, source: str, share: RankShare, result: str = _OUTPUT) -> Operator:
    """Copy the outputs of packed documents into one tensor; backward copies equally many gradients of q, k and v.

    Args:
        elements: Elements of the output of one sequence.
        source: Name of the outputs.
        share: Sizes, and the documents.
        result: Name of the tensor.
    """
    assert share.documents
    kernel = Pointwise(JOIN, elements, elements)
    return Operator(kernel=kernel, reads=(source,), makes=(Tensor(result, elements),))


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
        kernel = core(share.heads, share.kv_heads, n)
        if not share.documents:
            return [core_operator(kernel, names, Tensor(_OUTPUT, q))]
        apart = Tensor("outputs of documents", q)
        return [core_operator(kernel, names, apart), join_documents(q, apart.name, share)]
    if shard.cp_comm == "all_gather":
        keys = Tensor("gathered k and v", shard.cp * 2 * kv)
        collective = LayerCollective("k and v", "cp", _K.ALL_GATHER, _K.REDUCE_SCATTER, keys.elements)
        own = Tensor("k and v", 2 * kv)
        gather = Operator(kernel=collective, reads=names[-2:], makes=(keys,), forward_scratch=(own,))
        kernel = core(share.heads, share.kv_heads, n, shard.cp * n)
        return [gather, core_operator(kernel, (names[0], keys.name), Tensor(_OUTPUT, q))]
    if shard.cp_comm == "a2a":
        packed = Tensor("exchanged q, k and v", q + 2 * kv)
        there = LayerCollective("q, k and v", "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, packed.elements)
        back = LayerCollective(_OUTPUT, "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, q)
        kernel = core(share.heads // shard.cp, share.kv_heads // shard.cp, shard.cp * n)
        made, parts = Tensor("attention core output", q), _parts(packed.name, q, kv)
        return [
            Operator(kernel=there, reads=names, makes=(packed,)),
            parts,
            core_operator(kernel, tuple(tensor.name for tensor in parts.makes), made),
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
        core_operator(last, names, output),
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
