"""First and last layers of language models: embeddings of tokens, and the output distribution with its loss."""

from __future__ import annotations

from dataclasses import replace

from simplan.model.kernel import LOSS, TOKEN_TABLE
from simplan.model.layer import CollectiveKind, LayerCollective, Lookup, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, MASK_BYTES, LayerPart, cast, joined, linear
from simplan.model.share import RankShare, for_columns, sum_of_rows

__all__ = ["output_distribution", "row_table", "token_lookup", "token_table"]


def token_table(share: RankShare) -> LayerPart:
    """The embedding ``wte``; its result is ``wte output``."""
    weight = ParameterSpec("wte.weight", (share.vocab, share.hidden))
    lookup, *summed = token_lookup(share, f"{TOKEN_TABLE} output", parameters=(weight.name,))
    return LayerPart(parameters=(weight,), operators=(lookup, *summed))


def token_lookup(share: RankShare, result: str, parameters: tuple[str, ...] = ()) -> list[Operator]:
    """Operators of a token lookup in the embedding; each tensor-parallel rank has a part of the rows.

    Args:
        share: Sizes.
        result: Name of the hidden states.
        parameters: Names of parameters (``Operator``).
    """
    split = share.shard.tp > 1
    made = Tensor(f"parts of {result}" if split else result, share.tokens * share.hidden, residual=True)
    own = Tensor("tokens in the own part of the vocabulary", share.tokens, INDEX_BYTES)
    foreign = Tensor("which tokens are not", share.tokens, MASK_BYTES)
    masks = (own, foreign) if split else ()
    lookup = Operator(
        kernel=Lookup(TOKEN_TABLE, share.tokens, share.hidden),
        makes=(made, *masks),
        saves=tuple(tensor.name for tensor in masks),
        parameters=parameters,
    )
    if not split:
        return [lookup]
    (summed, *_) = sum_of_rows(made.name, result, share, residual=True)
    return [lookup, summed]


def row_table(name: str, source: str, rows: int, share: RankShare, *, add: str = "add") -> LayerPart:
    """A learned table whose rows (such as positions) are the same for every sequence; added to the residual stream.

    Args:
        name: Name of the table.
        source: Name of the residual stream.
        rows: Number of rows of the full table.
        share: Sizes.
        add: Name of the addition, and of its result.
    """
    own = share.own_tokens * share.hidden
    found = Tensor(f"{name} output", own, residual=True, per_microbatch=True)
    weight = ParameterSpec(f"{name}.weight", (rows, share.hidden), share.partial)
    lookup = Lookup(name, share.own_tokens, share.hidden)
    return LayerPart(
        parameters=(weight,),
        operators=(
            Operator(kernel=lookup, makes=(found,), parameters=(weight.name,)),
            Operator(
                kernel=Pointwise(add, 2 * own, own),
                reads=(source, found.name),
                makes=(Tensor(add, own, residual=True),),
                passes=True,
            ),
        ),
    )


def output_distribution(
    source: str, share: RankShare, *, name: str = "lm_head", bias: bool = False, rows: int = 0, again: str = ""
) -> LayerPart:
    """The output projection and the cross-entropy of its logits.

    Each tensor-parallel rank has its part of the vocabulary. The largest logit of every token, its sum of exponentials
    and the logit of its target are all-reduced (Shoeybi et al. 2019, section 3). Temporaries are those of torch 2.13
    (torch/distributed/tensor/parallel/loss.py): shifted logits and their exponentials in forward, and in backward the
    sum of two tensors times the gradient of the loss.

    Args:
        source: Name of the tensor it is applied to.
        share: Sizes.
        name: Name of the projection.
        bias: The projection has a bias.
        rows: Rows of logits of one sequence; 0 for ``share.tokens``.
        again: Prefix of tensor names for another use of the same projection; empty for the first one.
    """
    n, h, v = rows or share.tokens, share.hidden, share.vocab
    gathered = for_columns(source, share, rows=n)
    logits = f"{again}logits"
    matrix = linear(name, gathered.name, (n, v, h), bias=bias, result=logits)
    if again:  # its weights are there already
        matrix = LayerPart(operators=tuple(replace(operator, parameters=()) for operator in matrix.operators))
    matrix = replace(matrix, operators=tuple(_of_logits(operator) for operator in matrix.operators))
    wide = Tensor(f"{logits} in FP32", n * v, FP32_BYTES, logits=True)
    kept = Tensor(f"{again}log-probabilities", n * v, FP32_BYTES, logits=True)
    split = share.shard.tp > 1
    loss = Operator(
        kernel=Pointwise(LOSS, 2 * n * v, n * v, like="cross_entropy"),
        reads=(wide.name,),
        makes=(kept,),
        saves=(kept.name,),
        forward_scratch=(wide,) * split,
        # torch's loss consists of two functions, each with a gradient of the size of the logits
        backward_scratch=(wide,) * (1 + split),
    )
    collectives: list[tuple[Operator, ...]] = [(), ()]
    if split:
        reduce = CollectiveKind.ALL_REDUCE
        largest = LayerCollective("largest logits", "tp", reduce, None, n, FP32_BYTES)
        sums, targets = (replace(largest, name=name) for name in ("sums of exponentials", "targets' logits"))
        collectives = [(Operator(kernel=largest),), (Operator(kernel=sums), Operator(kernel=targets))]
    after, before = collectives[1], collectives[0]
    operators = (*before, loss_cast(logits, wide), loss, *after)
    return joined(LayerPart(operators=gathered.before), matrix, LayerPart(operators=operators))


def loss_cast(logits: str, wide: Tensor) -> Operator:
    """The FP32 copy of logits from which the loss is computed."""
    return cast(logits, wide)


def _of_logits(operator: Operator) -> Operator:
    """A matmul whose result belongs to the output distribution."""
    return replace(operator, makes=tuple(replace(tensor, logits=True) for tensor in operator.makes))
