"""Self-attention: projections, what is done to queries and keys, and the core with its exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simplan.spec.layer import Attention, CollectiveKind, Exchange, Gemm, Kernel, ParameterSpec, Pointwise, Saved
from simplan.spec.models.documents import join_kernels, join_saved
from simplan.spec.models.part import FP32_BYTES, Part
from simplan.spec.share import Share, column_exchanges, row_kernels

__all__ = ["AttentionForm", "Biases", "self_attention"]

Biases = Literal["none", "qkv", "all"]
_K = CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Which self-attention.

    Attributes:
        fused: q, k and v come from one matrix; all of its output is kept when a part of it is.
        bias: Biases of no matrix, of q, k and v, or of the projection too.
        causal: Each query meets the keys up to its own.
        rotary: Queries and keys are rotated by their positions (Su et al. 2021).
        qk_norm: Heads of queries, and of keys, have an RMSNorm of one weight for all of them; or all heads together
            have one, before they are heads.
        window: As of ``Attention``.
        alibi: A bias that grows with the distance is added to the scores (Press et al. 2022).
        sinks: Each head has a score of its own that takes part in the softmax and in nothing else (gpt-oss).
    """

    fused: bool
    bias: Biases = "none"
    causal: bool = True
    rotary: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    window: int = 0
    alibi: bool = False
    sinks: bool = False

    @property
    def masked(self) -> bool:
        """A table says what counts: torch's own kernels know the causal mask only."""
        return self.alibi or self.window > 0


def self_attention(source: str, form: AttentionForm, share: Share) -> Part:
    """Queries, keys and values, the attention core, and the projection of its output.

    Args:
        source: Name of the tensor it is applied to.
        form: Which attention.
        share: Sizes.
    """
    changed = form.rotary or form.qk_norm != "none"
    assert not (form.fused and changed), "q, k and v would no longer be parts of one tensor"
    n, h, q, kv = share.tokens, share.hidden, share.q, share.kv
    widths = {"qkv": q + 2 * kv} if form.fused else {"q": q, "k": kv, "v": kv}
    parameters, matrices = [], []
    for name, width in widths.items():
        weight, bias = ParameterSpec(f"{name}.weight", (width, h)), ParameterSpec(f"{name}.bias", (width,))
        parameters += [weight] if form.bias == "none" else [weight, bias]
        matrices.append(Gemm(name, n, width, h))
    before, after = column_exchanges(source, share)
    sinks = _sinks(share) if form.sinks else Part()
    norms, turned = _on_queries_and_keys(form, share)
    projection = [ParameterSpec("proj.weight", (h, q))]
    if form.bias == "all":
        projection.append(ParameterSpec("proj.bias", (h,), share.partial))
    return Part(
        parameters=(*parameters, *norms.parameters, *sinks.parameters, *projection),
        kernels=(
            *before,
            *matrices,
            *after,
            *norms.kernels,
            *turned.kernels,
            *_core_kernels(form, share),
            *sinks.kernels,
            Gemm("proj", n, h, q),
            *row_kernels("proj output", share, bias=form.bias == "all"),
        ),
        saved=(*norms.saved, *_core_saved(form, share), *sinks.saved),
        constants=(*turned.constants, *_tables(form, share)),
        gradients=(
            *reversed([parameter.name for parameter in projection]),
            *sinks.gradients,
            *norms.gradients,
            *_projected(list(widths), form, share),
        ),
    )


def _projected(names: list[str], form: AttentionForm, share: Share) -> list[str]:
    """Gradients of the matrices before the core, the last one's first; biases before weights.

    With sequence parallelism tokens are gathered once for all matrices that use them, which then get their gradients in
    one operation, and biases are added after it.
    """
    biases = [f"{name}.bias" for name in reversed(names)] if form.bias != "none" else []
    if share.partial:
        return [*biases, *(f"{name}.weight" for name in names)]
    kinds = ("bias", "weight") if biases else ("weight",)
    return [f"{name}.{kind}" for name in reversed(names) for kind in kinds]


def _on_queries_and_keys(form: AttentionForm, share: Share) -> tuple[Part, Part]:
    """Their norms, which keep what comes in, and their rotation, which keeps nothing."""
    n, both = share.tokens, share.tokens * (share.q + share.kv)
    norms = rotation = Part()
    if form.qk_norm != "none":
        each = form.qk_norm == "head"
        widths = (share.head_dim,) * 2 if each else (share.q, share.kv)
        rows = (share.heads, share.kv_heads) if each else (1, 1)
        norms = Part(
            parameters=(
                ParameterSpec("q_norm.weight", (widths[0],), share.shard.tp > 1),
                ParameterSpec("k_norm.weight", (widths[1],), share.shard.tp > 1),
            ),
            kernels=(
                Pointwise("q_norm", n * share.q, n * share.q),
                Pointwise("k_norm", n * share.kv, n * share.kv),
            ),
            saved=(
                Saved("q output", n * share.q, made_by="q"),
                Saved("k output", n * share.kv, made_by="k"),
                Saved("q_norm statistics", n * rows[0], FP32_BYTES, made_by="q_norm"),
                Saved("k_norm statistics", n * rows[1], FP32_BYTES, made_by="k_norm"),
            ),
            gradients=("k_norm.weight", "q_norm.weight"),
        )
    if form.rotary:
        rotation = Part(
            kernels=(Pointwise("rotary", 2 * both, 2 * both),),
            constants=(Saved("rotary tables", 2 * n * share.head_dim, FP32_BYTES),),
        )
    return norms, rotation


def _sinks(share: Share) -> Part:
    """The output of the core, scaled by what the sinks leave of it: sigmoid(logsumexp - sink)."""
    elements = share.tokens * share.q
    return Part(
        parameters=(ParameterSpec("sinks.weight", (share.heads,)),),
        kernels=(Pointwise("sinks", elements, elements),),
        saved=(Saved("scaled attention output", elements, made_by="sinks"),),
        gradients=("sinks.weight",),
    )


def _core_kernels(form: AttentionForm, share: Share) -> list[Kernel]:
    """The attention core and the exchanges by which it gets at the keys of all tokens."""
    shard, n, kv = share.shard, share.tokens, share.tokens * share.kv

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
        return [core(share.heads, share.kv_heads, n), *join_kernels(n * share.q, share)]
    if shard.cp_comm == "all_gather":
        gathered = Exchange("k and v", "cp", _K.ALL_GATHER, _K.REDUCE_SCATTER, shard.cp * 2 * kv)
        return [gathered, core(share.heads, share.kv_heads, n, shard.cp * n)]
    if shard.cp_comm == "a2a":
        there = Exchange("q, k and v", "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, n * share.q + 2 * kv)
        back = Exchange("attention output", "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, n * share.q)
        return [there, core(share.heads // shard.cp, share.kv_heads // shard.cp, shard.cp * n), back]
    assert not form.masked, "which scores count would differ from part to part"
    return _ring(core(share.heads, share.kv_heads, n), shard.cp, 2 * kv)


def _ring(core: Attention, cp: int, elements: int) -> list[Kernel]:
    """Ring attention (Liu et al. 2023): each rank attends to one part of the keys after the other.

    A part costs as much as the own, causal one: with early and late tokens on every rank half of its scores are masked.
    Keys and values move cp - 1 times in forward and again in backward, their gradients cp times: the last brings them
    home. What backward sends while it works on part j are the keys of part j - 1 and the gradients of part j + 1.
    """
    kernels: list[Kernel] = [
        Exchange("gradients of k and v, home", "cp", None, _K.RING, elements),
        Exchange("gradients of k and v", "cp", None, _K.RING, elements, beside_previous=True),
        core,
    ]
    for part in range(1, cp):
        if part == cp - 1:
            kernels.append(Exchange("k and v", "cp", _K.RING, _K.RING, elements, beside_previous=True))
        else:
            kernels.append(Exchange("k and v", "cp", _K.RING, None, elements, beside_previous=True))
            name = "k and v and their gradients"
            kernels.append(Exchange(name, "cp", None, _K.RING, 2 * elements, beside_previous=True))
        kernels.append(core)
    return kernels


def _core_saved(form: AttentionForm, share: Share) -> list[Saved]:
    """What attention keeps: its inputs, its output, and the logarithm of the sum of exponentials of each row."""
    shard, n = share.shard, share.tokens
    q, kv = n * share.q, n * share.kv
    inputs, maker = ("qkv output", "qkv") if form.fused else ("q, k and v", "v")
    queries = "own q"
    if form.rotary:
        inputs, queries, maker = "q, k rotated and v", "q rotated", "rotary"
    output = Saved("attention output", q, made_by="join documents" if share.documents else "attention")
    if shard.cp > 1 and shard.cp_comm == "a2a":
        saved = [
            Saved("exchanged q, k and v", q + 2 * kv, made_by="q, k and v"),
            Saved("attention core output", q, made_by="attention"),
        ]
        output = Saved("attention output", q, made_by="attention output")
    elif shard.cp > 1 and shard.cp_comm == "all_gather":
        own = Saved(inputs, q + 2 * kv, made_by=maker) if form.fused else Saved(queries, q, made_by=maker)
        saved = [own, Saved("gathered k and v", shard.cp * 2 * kv, made_by="k and v")]
    else:
        saved = [Saved(inputs, q + 2 * kv, made_by=maker)]
    logsumexp = Saved("attention logsumexp", n * share.heads, FP32_BYTES, made_by="attention")
    return [*saved, *join_saved(q, share), output, logsumexp]


def _tables(form: AttentionForm, share: Share) -> tuple[Saved, ...]:
    """What is added to the scores of own queries and all keys they meet: for every head (ALiBi), or for all alike."""
    shard, n = share.shard, share.tokens
    if share.documents and form.masked:  # the table of the longest has those of all others in its corner
        longest = max(*share.documents, n - sum(share.documents))
        return (Saved("attention mask", (share.heads if form.alibi else 1) * longest**2),)
    gathers = shard.cp > 1 and shard.cp_comm == "all_gather"
    if not (form.masked or (gathers and form.causal)):
        return ()
    by_heads = shard.cp > 1 and shard.cp_comm == "a2a"
    queries = n * shard.cp if by_heads else n
    heads = (share.heads // shard.cp if by_heads else share.heads) if form.alibi else 1
    return (Saved("attention mask", heads * queries * n * shard.cp),)
