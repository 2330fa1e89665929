"""Multi-token prediction: layers after the last block, each of which predicts one token further ahead (DeepSeek-V3).

Depth d takes the hidden states of depth d - 1 (for d = 1 of the last block) and the embeddings of the tokens d places
further on. Both are normed, put side by side and projected back to the hidden size; then comes a block like the last
one of the model, and then the head once more, with a norm of its own but the model's output projection (DeepSeek-AI
2024, arXiv:2412.19437, section 2.2). The embedding is the model's, too: the last stage of a pipeline, which has all of
these layers, holds a copy of it, and the gradients of both are all-reduced every step.

As Megatron Core runs it (NVIDIA/Megatron-LM at d98e8a6, megatron/core/transformer/multi_token_prediction.py):
tensor-parallel ranks split the projection by columns and gather what it gives. It norms the last block's output before
the first of these layers instead of after all of them, which is as much work and as much to keep. What it does to
tokens, labels and losses, and to count hits for the log, is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.model.layer import CollectiveKind, Exchange, LayerKind, LayerSpec, Operator, ParameterSpec, Tensor
from simplan.model.parts.embedding_and_head import output_distribution, token_lookup
from simplan.model.parts.part import (
    LayerPart,
    NormKind,
    concatenation,
    hidden_input,
    joined,
    layer_of,
    linear,
    norm,
    rewired,
)
from simplan.model.share import RankShare, for_columns

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

__all__ = ["MTP", "depth_heads", "depth_layers", "later_inputs"]

MTP = frozenset({"mtp_num_layers"})
"""Fields of families whose models can have such layers."""

_LOOKED_UP, _CONCATENATED, _PROJECTED = "wte output", "concatenated norms", "eh_proj output"


def depth_layers(
    model: ModelSpec, share: RankShare, kind: NormKind, key: str, block: Sequence[LayerPart]
) -> Iterator[LayerSpec]:
    """The layers, which hand on the hidden states of all depths before them beside their own.

    Args:
        model: The model.
        share: Sizes.
        kind: Of all norms.
        key: Of the model's last block.
        block: Its parts.
    """
    projected = [rewired(part, "input", _PROJECTED) for part in block]
    for depth in range(1, model.mtp_num_layers + 1):
        before = tuple(
            hidden_input(share, f"hidden states of depth {number}", elsewhere=True) for number in range(depth - 1)
        )
        passed = (*(tensor.name for tensor in before), "input")
        yield layer_of(
            f"{key},mtp{depth}",
            LayerKind.BLOCK,
            [*_later_tokens(kind, share), *projected],
            inputs=(*before, hidden_input(share)),
            outputs=(*passed, projected[-1].operators[-1].makes[0].name),
            output_shapes=share.hidden_shapes * (depth + 1),
            passed_outputs=tuple(range(depth)),
            mtp_depth=depth,
        )


def later_inputs(model: ModelSpec, share: RankShare) -> tuple[Tensor, ...]:
    """Hidden states of all depths but the last, which the head gets besides."""
    numbers = range(model.mtp_num_layers)
    return tuple(hidden_input(share, f"hidden states of depth {number}", elsewhere=True) for number in numbers)


def _later_tokens(kind: NormKind, share: RankShare) -> Iterator[LayerPart]:
    """Embeddings of later tokens, both norms, the projection. The embedding is a parameter of the head."""
    own, h, tp = share.own_tokens * share.hidden, share.hidden, share.shard.tp
    yield LayerPart(operators=tuple(token_lookup(share, _LOOKED_UP)))
    for name, source in (("enorm", _LOOKED_UP), ("hnorm", "input")):
        yield norm(name, source, kind, share, for_matmuls=False)
    yield concatenation(_CONCATENATED, ("enorm output", "hnorm output"), share)
    gathered = for_columns(_CONCATENATED, share, width=2 * h)
    parts = _PROJECTED if tp == 1 else f"parts of {_PROJECTED}"
    matrix = linear("eh_proj", gathered.name, (share.tokens, h // tp, 2 * h), result=parts)
    exchange = []
    if tp == 1:
        matrix = replace(matrix, operators=tuple(_of_stream(operator) for operator in matrix.operators))
    else:  # with sequence parallelism every rank goes on with its own tokens
        backward = CollectiveKind.ALL_GATHER if share.shard.sequence_parallel else None
        gather = Exchange(_PROJECTED, "tp", CollectiveKind.ALL_GATHER, backward, share.tokens * h, residual=True)
        made = Tensor(_PROJECTED, own, residual=True)
        exchange.append(Operator(kernel=gather, reads=(parts,), makes=(made,)))
    yield joined(LayerPart(operators=gathered.before), matrix, LayerPart(operators=tuple(exchange)))


def _of_stream(operator: Operator) -> Operator:
    """A matmul whose result is of the residual stream."""
    return replace(operator, makes=tuple(replace(tensor, residual=True) for tensor in operator.makes))


def depth_heads(model: ModelSpec, share: RankShare, kind: NormKind) -> tuple[list[LayerPart], list[LayerPart]]:
    """What the head has before and after what it has without such layers; nothing without.

    Before, the copy of the embedding, unless its output projection is one. It counts where the model's embedding is on
    another stage, and its gradient comes last. After, once for each depth, the head.

    Args:
        model: The model.
        share: Sizes.
        kind: Of the norms.
    """
    if not model.mtp_num_layers:
        return [], []
    copy = ParameterSpec("mtp_wte.weight", (share.vocab, share.hidden))
    held = Operator(parameters=(copy.name,))
    before = [] if model.tied_embeddings else [LayerPart(parameters=(copy,), operators=(held,))]
    after = []
    for depth in range(1, model.mtp_num_layers + 1):
        name = f"mtp_norm{depth}"
        source = f"hidden states of depth {depth - 1}"
        after += [norm(name, source, kind, share), output_distribution(f"{name} output", share, again=f"{name} ")]
    return before, after
