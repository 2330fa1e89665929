"""First and last layers of language models: embeddings of tokens, and the output distribution with its loss."""

from __future__ import annotations

from simplan.spec.kernel import TOKEN_TABLE
from simplan.spec.layer import CollectiveKind, Exchange, Gemm, Kernel, Lookup, ParameterSpec, Pointwise, Saved
from simplan.spec.models.part import FP32_BYTES, Part
from simplan.spec.share import Share, column_exchanges, row_kernels

__all__ = ["output_distribution", "row_table", "token_lookup", "token_table"]

_INDEX_BYTES = 8
_MASK_BYTES = 1


def token_table(share: Share) -> Part:
    """The embedding ``wte``."""
    kernels, saved = token_lookup(share)
    return Part(
        parameters=(ParameterSpec("wte.weight", (share.vocab, share.hidden)),),
        kernels=kernels,
        saved=saved,
        gradients=("wte.weight",),
    )


def token_lookup(share: Share) -> tuple[tuple[Kernel, ...], tuple[Saved, ...]]:
    """What looks tokens up in the embedding, and what it keeps; each tensor-parallel rank has a part of the rows."""
    saved: tuple[Saved, ...] = ()
    if share.shard.tp > 1:
        saved = (
            Saved("tokens in the own part of the vocabulary", share.tokens, _INDEX_BYTES, made_by=TOKEN_TABLE),
            Saved("which tokens are not", share.tokens, _MASK_BYTES, made_by=TOKEN_TABLE),
        )
    lookup = Lookup(TOKEN_TABLE, share.tokens, share.hidden)
    return (lookup, *row_kernels(f"{TOKEN_TABLE} output", share, residual=True)), saved


def row_table(name: str, rows: int, share: Share, *, add: str = "add", keeps_sum: bool = False) -> Part:
    """A table of which the own tokens of every sequence have the same rows, such as positions; added to the stream.

    Args:
        name: Of the table.
        rows: All of its rows.
        share: Sizes.
        add: Name of the addition.
        keeps_sum: A norm follows, which needs it in backward.
    """
    own = share.own_tokens * share.hidden
    return Part(
        parameters=(ParameterSpec(f"{name}.weight", (rows, share.hidden), share.partial),),
        kernels=(Lookup(name, share.own_tokens, share.hidden), Pointwise(add, 2 * own, own)),
        saved=(Saved("sum of tables", own, made_by=add, residual=True),) if keeps_sum else (),
        gradients=(f"{name}.weight",),
    )


def output_distribution(
    source: str, share: Share, *, name: str = "lm_head", bias: bool = False, rows: int = 0, again: bool = False
) -> Part:
    """The output projection and the cross-entropy of its logits.

    Tensor-parallel ranks have their part of the vocabulary of all logits; the largest logit of every token, then its
    sum of exponentials together with the logit of its target, are all-reduced (Shoeybi et al. 2019, section 3).

    Args:
        source: Name of the tensor it is applied to.
        share: Sizes.
        name: Of the projection.
        bias: It has one.
        rows: Rows of logits of one sequence; 0 for as many as there are tokens.
        again: The same layer has the projection's weights already, for another source.
    """
    n, h, v = rows or share.tokens, share.hidden, share.vocab
    before, after = column_exchanges(source, share, rows=n)
    parameters = [] if again else [ParameterSpec(f"{name}.weight", (v, h))]
    if bias:
        parameters.append(ParameterSpec(f"{name}.bias", (v,)))
    loss: list[Kernel] = [Pointwise("cross_entropy", 2 * n * v, n * v)]
    if share.shard.tp > 1:
        reduce = CollectiveKind.ALL_REDUCE
        loss.insert(0, Exchange("largest logits", "tp", reduce, None, n, FP32_BYTES))
        loss.append(Exchange("targets' logits and sums", "tp", reduce, None, 2 * n, FP32_BYTES))
    return Part(
        parameters=tuple(parameters),
        kernels=(*before, Gemm(name, n, v, h), *after, *loss),
        saved=(Saved("log-probabilities", n * v, FP32_BYTES, logits=True, made_by="cross_entropy"),),
        gradients=tuple(parameter.name for parameter in reversed(parameters)),
    )
