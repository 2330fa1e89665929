"""What one tensor- and context-parallel rank has of a transformer's sizes, and what it exchanges with the others.

Tensor parallelism is Megatron's (Shoeybi et al. 2019): the first matrix of a pair is split by columns, the second by
rows. Without sequence parallelism outputs of the second are all-reduced in forward, gradients of the input of the first
in backward. With it (Korthikanti et al. 2022) tokens are gathered before the first and reduced and scattered after the
second; only the own tokens are kept for backward, which gathers them again for the gradient of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from simplan.spec.layer import Attention, CollectiveKind, Exchange, Kernel, Pointwise, Saved

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

__all__ = [
    "Share",
    "attention_constants",
    "attention_kernels",
    "attention_saved",
    "column_exchanges",
    "row_kernels",
    "share_of",
]

_STATISTICS_BYTES = 4  # softmax and norm statistics are fp32 whatever the precision
_K = CollectiveKind


class Share(NamedTuple):
    """Sizes on one rank, for one sequence.

    Attributes:
        shard: How layers are split.
        tokens: Where matrices are applied.
        own_tokens: Where norms and residuals are computed: fewer with sequence parallelism.
        hidden: Of every token, whole.
        heads, kv_heads, head_dim: Attention heads.
        intermediate: Columns of the MLP.
        vocab: Rows of the embedding.
    """

    shard: Shard
    tokens: int
    own_tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def q(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Columns of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def partial(self) -> bool:
        """Parameters that see only the own tokens have partial gradients."""
        return self.shard.sequence_parallel

    @property
    def suffix(self) -> str:
        """What a layer's key says about its split; nothing for a whole layer."""
        shard = self.shard
        parts = []
        if shard.tp > 1:
            parts += [f",tp{shard.tp}", ",sp" if shard.sequence_parallel else ""]
        if shard.cp > 1:
            parts.append(f",cp{shard.cp}:{shard.cp_comm}")
        return "".join(parts)


def share_of(model: ModelSpec, shard: Shard) -> Share:
    """The sizes of a model on one rank; the degrees divide what they split."""
    tp, tokens = shard.tp, model.seq_len // shard.cp
    for size in (model.num_attention_heads, model.num_key_value_heads, model.intermediate_size, model.vocab_size):
        assert size % tp == 0, (size, tp)
    assert shard.cp == 1 or model.seq_len % (2 * shard.cp) == 0
    split_tokens = tp if shard.sequence_parallel else 1
    assert tokens % split_tokens == 0
    return Share(
        shard,
        tokens,
        tokens // split_tokens,
        model.hidden_size,
        model.num_attention_heads // tp,
        model.num_key_value_heads // tp,
        model.head_dim,
        model.intermediate_size // tp,
        model.vocab_size // tp,
    )


def column_exchanges(name: str, share: Share) -> tuple[list[Kernel], list[Kernel]]:
    """What is exchanged before and after matrices split by columns.

    Args:
        name: Of their input.
        share: Sizes.
    """
    elements = share.tokens * share.hidden
    if share.shard.tp == 1:
        return [], []
    if not share.shard.sequence_parallel:
        return [Exchange(name, "tp", None, _K.ALL_REDUCE, elements)], []
    before = Exchange(name, "tp", _K.ALL_GATHER, _K.REDUCE_SCATTER, elements)
    return [before], [Exchange(f"{name} again", "tp", None, _K.ALL_GATHER, elements)]


def row_kernels(name: str, share: Share, *, bias: bool = False, residual: bool = False) -> list[Kernel]:
    """What follows a matrix, or an embedding, that is split by rows.

    Args:
        name: Of its output.
        share: Sizes.
        bias: A bias is added once the sum is complete.
        residual: The output is of the residual stream.
    """
    if share.shard.tp == 1:
        return []
    elements = share.tokens * share.hidden
    forward, backward = (_K.REDUCE_SCATTER, _K.ALL_GATHER) if share.shard.sequence_parallel else (_K.ALL_REDUCE, None)
    kernels: list[Kernel] = [Exchange(name, "tp", forward, backward, elements, residual=residual)]
    if bias:
        own = share.own_tokens * share.hidden
        kernels.append(Pointwise(f"{name} bias", own, own))
    return kernels


def attention_kernels(share: Share) -> list[Kernel]:
    """The attention core and the exchanges by which it gets at the keys of all tokens."""
    shard, n, kv = share.shard, share.tokens, share.tokens * share.kv
    heads, kv_heads, d = share.heads, share.kv_heads, share.head_dim
    core = Attention(heads, kv_heads, d, n)
    if shard.cp == 1:
        return [core]
    if shard.cp_comm == "all_gather":
        gathered = Exchange("k and v", "cp", _K.ALL_GATHER, _K.REDUCE_SCATTER, shard.cp * 2 * kv)
        return [gathered, Attention(heads, kv_heads, d, n, num_keys=shard.cp * n)]
    if shard.cp_comm == "a2a":
        there = Exchange("q, k and v", "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, n * share.q + 2 * kv)
        back = Exchange("attention output", "cp", _K.ALL_TO_ALL, _K.ALL_TO_ALL, n * share.q)
        return [there, Attention(heads // shard.cp, kv_heads // shard.cp, d, shard.cp * n), back]
    return _ring(core, shard.cp, 2 * kv)


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


def attention_saved(share: Share, *, fused: bool) -> list[Saved]:
    """What attention keeps: its inputs, its output, and the logarithm of the sum of exponentials of each row.

    Args:
        share: Sizes.
        fused: q, k and v are parts of one tensor, and all of it is kept when one is.
    """
    shard, n = share.shard, share.tokens
    q, kv = n * share.q, n * share.kv
    inputs, maker = ("qkv output", "qkv") if fused else ("q, k rotated and v", "rotary")
    output = Saved("attention output", q, made_by="attention")
    if shard.cp > 1 and shard.cp_comm == "a2a":
        saved = [
            Saved("exchanged q, k and v", q + 2 * kv, made_by="q, k and v"),
            Saved("attention core output", q, made_by="attention"),
        ]
        output = Saved("attention output", q, made_by="attention output")
    elif shard.cp > 1 and shard.cp_comm == "all_gather":
        own = Saved(inputs, q + 2 * kv, made_by=maker) if fused else Saved("q rotated", q, made_by=maker)
        saved = [own, Saved("gathered k and v", shard.cp * 2 * kv, made_by="k and v")]
    else:
        saved = [Saved(inputs, q + 2 * kv, made_by=maker)]
    logsumexp = Saved("attention logsumexp", n * share.heads, _STATISTICS_BYTES, made_by="attention")
    return [*saved, output, logsumexp]


def attention_constants(share: Share) -> tuple[Saved, ...]:
    """The mask of own queries against the keys of all ranks, where these are gathered."""
    if share.shard.cp == 1 or share.shard.cp_comm != "all_gather":
        return ()
    return (Saved("attention mask", share.tokens**2 * share.shard.cp),)
