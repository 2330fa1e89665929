"""First and last layers of language models: embeddings of tokens, and the output distribution with its loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.model.kernel import LOSS, TOKEN_TABLE, CollectiveKind, Gemm, LayerCollective, Lookup, Pointwise
from simplan.model.layer import LayerKind, LayerSpec, Operator, ParameterSpec, Tensor
from simplan.model.parts.part import (
    FP32_BYTES,
    INDEX_BYTES,
    MASK_BYTES,
    LayerPart,
    cast,
    hidden_input,
    joined,
    layer_of,
    linear,
)
from simplan.model.share import RankShare, for_columns, sum_of_rows

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec, Objective


def embedding_layer(model: ModelSpec, share: RankShare, parts: Iterable[LayerPart | Operator], *more: str) -> LayerSpec:
    """The first layer of a language model: the embedding of tokens, whose result is ``wte output``, and other parts.

    Args:
        parts: Parts after the embedding of tokens.
        more: Properties of these parts, for the layer's key.
    """
    weight = ParameterSpec("wte.weight", (share.vocab, share.hidden))
    lookup = token_lookup(share, f"{TOKEN_TABLE} output", parameters=(weight.name,))
    table = LayerPart(parameters=(weight,), operators=lookup)
    key = _key(model, share, "embedding", more)
    return layer_of(key, LayerKind.EMBEDDING, [table, *parts], output_shapes=share.hidden_shapes)


def head_layer(
    model: ModelSpec,
    share: RankShare,
    parts: Iterable[LayerPart | Operator],
    *more: str,
    inputs: tuple[Tensor, ...] = (),
    tied: tuple[str, ...] = (),
) -> LayerSpec:
    """The last layer of a language model.

    Args:
        parts: Parts from the hidden states to the loss.
        more: Properties of the parts, for the layer's key.
        inputs: Inputs before the hidden states.
        tied: Names of parameters that are tied to the embedding (``LayerSpec``) if the output projection is not.
    """
    return layer_of(
        _key(model, share, "head", more),
        LayerKind.HEAD,
        parts,
        inputs=(*inputs, hidden_input(share)),
        output_shapes=share.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else tied,
    )


def _key(model: ModelSpec, share: RankShare, kind: str, more: Iterable[str]) -> str:
    sizes = [f"h{model.hidden_size}", f"v{model.vocab_size}", *more, f"s{model.seq_len}"]
    return f"{model.family}-{kind}:{','.join(sizes)}{share.suffix}"


def token_lookup(share: RankShare, result: str, parameters: tuple[str, ...] = ()) -> tuple[Operator, ...]:
    """A token lookup in the embedding; each tensor-parallel rank has a part of the rows."""
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
    return (lookup, sum_of_rows(made.name, result, share, residual=True)) if split else (lookup,)


def row_table(name: str, source: str, rows: int, share: RankShare, *, add: str = "add") -> LayerPart:
    """A learned table whose rows (such as positions) are the same for every sequence; added to the residual stream.

    Args:
        source: Name of the residual stream.
        rows: Number of rows of the full table.
        add: Name of the addition, and of its result.
    """
    own = share.own_tokens * share.hidden
    tensor = Tensor(f"{name} output", own, residual=True, per_microbatch=True)
    weight = ParameterSpec(f"{name}.weight", (rows, share.hidden), share.partial)
    kernel = Lookup(name, share.own_tokens, share.hidden)
    lookup = Operator(kernel=kernel, makes=(tensor,), parameters=(weight.name,))
    addition = Operator(
        kernel=Pointwise(add, 2 * own, own),
        reads=(source, tensor.name),
        makes=(Tensor(add, own, residual=True),),
        passes=True,
    )
    return LayerPart(parameters=(weight,), operators=(lookup, addition))


def output_distribution(
    source: str, share: RankShare, *, name: str = "lm_head", bias: bool = False, rows: int = 0, again: str = ""
) -> LayerPart:
    """The output projection and the cross-entropy of its logits.

    Each tensor-parallel rank has its part of the vocabulary. The largest logit of every token, its sum of exponentials
    and the logit of its target are all-reduced (Shoeybi et al. 2019, section 3). Temporaries are those of torch 2.13
    (torch/distributed/tensor/parallel/loss.py): shifted logits and their exponentials in forward, and in backward the
    sum of two tensors times the gradient of the loss.

    Args:
        rows: Rows of logits of one sequence; 0 for ``share.tokens``.
        again: Prefix of tensor names for another use of the same projection; empty for the first one.
    """
    n, h, v = rows or share.tokens, share.hidden, share.vocab
    gathers, gathered = for_columns(source, share, rows=n)
    logits = f"{again}logits"
    matrix = linear(name, gathered, (n, v, h), bias=bias, result=logits)
    (matmul,) = matrix.operators
    matmul = replace(matmul, makes=(Tensor(logits, n * v, logits=True),))
    # with another use, its weights are there already
    matrix = joined(replace(matmul, parameters=())) if again else replace(matrix, operators=(matmul,))
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
    words = ("largest logits", "sums of exponentials", "targets' logits") if split else ()
    sums = [
        Operator(kernel=LayerCollective(word, "tp", CollectiveKind.ALL_REDUCE, None, n, FP32_BYTES)) for word in words
    ]
    return joined(*gathers, matrix, *sums[:1], cast(logits, wide), loss, *sums[1:])


SCORE = "v_head"
"""Module with the score of a reward model that has logits as well."""


def head_for(layer: LayerSpec, objective: Objective) -> LayerSpec:
    """The head of a language model for preference training with another output or loss.

    ``score``: one number of every token in place of logits, by a weight of its own, of which the loss reads that of the
    last token (transformers, modeling_layers.py, ``GenericForSequenceClassification``). ``score_and_logits``: that
    number next to logits and their copy in FP32, which forward computes and nothing uses (TRL before 1.0,
    models/modeling_value_head.py, ``AutoModelForCausalLMWithValueHead``, with which LLaMA-Factory trains,
    train/rm/trainer.py). ``odds_ratio``: next to the log-probabilities of all sequences, the cross-entropy of the
    chosen ones, half of a pair, has log-probabilities of its own, and its gradient is padded to the logits of all
    sequences (TRL, ``ORPOTrainer.concatenated_forward``).
    ``divergence``: next to the cross-entropy, the divergence from a reference's logits. ``logits``: no loss.
    """
    key = f"{layer.key},{objective}"
    if objective == "odds_ratio":
        return replace(layer, key=key, operators=(*layer.operators, _chosen_loss(layer)))
    if objective == "divergence":
        return replace(layer, key=key, operators=(*layer.operators, *_divergence(layer)))
    if objective == "logits":
        wide = _loss_of(layer).reads[0]
        cast_to_wide = next(i for i, o in enumerate(layer.operators) if any(made.name == wide for made in o.makes))
        return replace(layer, key=key, operators=layer.operators[:cast_to_wide])
    place = next(i for i, o in enumerate(layer.operators) if isinstance(o.kernel, Gemm) and o.makes[0].logits)
    matrix = layer.operators[place]
    kernel = matrix.kernel
    assert isinstance(kernel, Gemm)
    rows, name = kernel.m, kernel.name
    scores, reward = Tensor("scores", rows), Tensor("score of the last token", 1, FP32_BYTES)
    if objective == "score_and_logits":
        return _with_score(layer, place, kernel, key)
    matrix = replace(matrix, kernel=replace(kernel, n=1), makes=(scores,), parameters=(f"{name}.weight",))
    loss = Operator(kernel=Pointwise(LOSS, rows, 1), reads=(scores.name,), makes=(reward,), saves=(reward.name,))
    weight = ParameterSpec(f"{name}.weight", (1, kernel.k))
    others = (p for p in layer.parameters if p.name.rpartition(".")[0] != name)
    return replace(
        layer,
        key=key,
        parameters=(*others, weight),
        operators=(*layer.operators[:place], matrix, loss),
        output_shapes=((rows, 1),),
        tied=(),
    )


def _with_score(layer: LayerSpec, place: int, kernel: Gemm, key: str) -> LayerSpec:
    """A head of logits that nothing uses, and of a score."""
    (source,), name = layer.operators[place].reads, f"{kernel.name}.weight"
    loss = next(o for o in layer.operators if o.kernel is not None and o.kernel.name == LOSS)
    unused = tuple(
        replace(o, kernel=None if o.kernel is None else replace(kernel, trained=False, propagates=False), saves=(),
                parameters=(), detached=True)
        for o in layer.operators[place:]
        if o.kernel is kernel or any(tensor.name in loss.reads for tensor in o.makes)
    )  # fmt: skip
    score = linear(SCORE, source, (kernel.m, 1, kernel.k), result="scores")
    reward = Tensor("score of the last token", 1, FP32_BYTES)
    of_score = Operator(kernel=Pointwise(LOSS, kernel.m, 1), reads=("scores",), makes=(reward,), saves=(reward.name,))
    parameters = tuple(replace(p, frozen=True) if p.name == name else p for p in layer.parameters)
    return replace(
        layer,
        key=key,
        parameters=(*parameters, *score.parameters),
        operators=(*layer.operators[:place], *unused, *score.operators, of_score),
        output_shapes=((kernel.m, 1),),
    )


def _chosen_loss(layer: LayerSpec) -> Operator:
    """The cross-entropy of chosen sequences: half of a pair, so half of each sequence on the mean."""
    loss = _loss_of(layer)
    ((wide,), (kept,)) = loss.reads, loss.makes
    half, whole = replace(kept, name="log-probabilities of chosen sequences", elements=kept.elements // 2), kept
    return Operator(
        kernel=Pointwise(f"chosen {LOSS}", whole.elements, half.elements, like="cross_entropy"),
        reads=(wide,),
        makes=(half,),
        saves=(half.name,),
        backward_scratch=(replace(half, name="gradient of chosen log-probabilities"),),
    )


def _loss_of(layer: LayerSpec) -> Operator:
    return next(o for o in layer.operators if o.kernel is not None and o.kernel.name == LOSS)


def _divergence(layer: LayerSpec) -> tuple[Operator, Operator]:
    """The divergence of every token's distribution from that of a reference model, whose logits are there.

    Both logits are copied without the last token, as slices of several sequences are. Saved are log-probabilities of
    the model once more, and probabilities of the reference, in the dtype of its logits (LLaMA-Factory at ff6d4d1,
    train/trainer_utils.py, ``asft_loss_func``; torch 2.13, ``kl_div``: xlogy(q, q) - q * input, in single operations).
    """
    loss = _loss_of(layer)
    ((wide,), (kept,)) = loss.reads, loss.makes
    number = kept.elements
    log_probs = replace(kept, name="log-probabilities for the divergence")
    probs = Tensor("probabilities of the reference", number, logits=True)
    copied = Tensor("logits of the reference without the last token", number)
    names = ("logits without the last token", "q log p", "divergence of every token and word")
    scratch = tuple(Tensor(name, number, FP32_BYTES) for name in names)
    softmax = Operator(
        kernel=Pointwise("softmax of the reference", 2 * number, 2 * number, like="cross_entropy"),
        makes=(probs,),
        forward_scratch=(copied, scratch[0]),
    )
    compared = Operator(
        # copy of logits, log-softmax, xlogy, product, difference and sum, FP32 as two elements
        kernel=Pointwise("divergence", 13 * number, 9 * number, launches=(6, 3), like="cross_entropy"),
        reads=(wide, probs.name),
        makes=(log_probs,),
        saves=(log_probs.name, probs.name),
        forward_scratch=(copied, Tensor("q log q", number), *scratch),
        backward_scratch=(replace(kept, name="gradient of log-probabilities"),),
    )
    return softmax, compared
