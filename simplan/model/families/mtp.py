"""Multi-token prediction: layers after the last block, each of which predicts one token further ahead (DeepSeek-V3).

Depth d takes the hidden states of depth d - 1 (for d = 1 of the last block) and the embeddings of the tokens d
positions further on. Both are normed, concatenated and projected back to the hidden size. A block like the model's last
one follows, and then the head once more, with a separate norm but the model's output projection (DeepSeek-AI 2024,
arXiv:2412.19437, section 2.2). The embedding is the model's, too. The last pipeline stage, which has all of these
layers, holds a copy of the embedding, and the gradients of both are all-reduced every step.

Implemented as in Megatron Core (NVIDIA/Megatron-LM at d98e8a6, megatron/core/transformer/multi_token_prediction.py):
tensor-parallel ranks split the projection by columns and all-gather its result. Megatron Core norms the last block's
output before the first of these layers instead of after all of them, with equal work and memory. Its changes to tokens,
labels and losses, and its hit counts for the log, are not modeled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.model.kernel import CollectiveKind, LayerCollective, Pointwise
from simplan.model.layer import LayerKind, LayerSpec, Operator, ParameterSpec, Tensor
from simplan.model.parts.embedding_and_head import head_layer, output_distribution, token_lookup
from simplan.model.parts.part import Block, LayerPart, NormKind, hidden_input, joined, layer_of, linear, norm, rewired
from simplan.model.share import RankShare, for_columns

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

MTP = frozenset({"mtp_num_layers"})
"""Fields of families with multi-token prediction."""

_LOOKED_UP, _CONCATENATED, _PROJECTED = "wte output", "concatenated norms", "eh_proj output"


def depth_layers(model: ModelSpec, share: RankShare, kind: NormKind, last: Block) -> Iterator[LayerSpec]:
    """Layers of multi-token prediction, which pass on the hidden states of all earlier depths with their own.

    ``kind`` is that of all norms, ``last`` the model's last block.
    """
    key, parts = last
    projected = rewired(joined(*parts), "input", _PROJECTED)
    for depth in range(1, model.mtp_num_layers + 1):
        before = later_inputs(share, depth - 1)
        yield layer_of(
            f"{key},mtp{depth}",
            LayerKind.BLOCK,
            [*_later_tokens(kind, share), projected],
            inputs=(*before, hidden_input(share)),
            outputs=(*(tensor.name for tensor in before), "input", projected.operators[-1].makes[0].name),
            output_shapes=share.hidden_shapes * (depth + 1),
            passed_outputs=tuple(range(depth)),
            mtp_depth=depth,
        )


def later_inputs(share: RankShare, depths: int) -> tuple[Tensor, ...]:
    """Hidden states of the first ``depths`` depths, as additional inputs of a layer."""
    return tuple(hidden_input(share, f"hidden states of depth {number}", elsewhere=True) for number in range(depths))


def _later_tokens(kind: NormKind, share: RankShare) -> Iterator[LayerPart | Operator]:
    """Embeddings of later tokens, both norms and the projection. The embedding is a parameter of the head."""
    own, h, tp = share.own_tokens * share.hidden, share.hidden, share.shard.tp
    yield from token_lookup(share, _LOOKED_UP)
    for name, source in (("enorm", _LOOKED_UP), ("hnorm", "input")):
        yield norm(name, source, kind, share, for_matmuls=False)
    yield Operator(
        kernel=Pointwise("concatenate", 2 * own, 2 * own, moves=True),
        reads=("enorm output", "hnorm output"),
        makes=(Tensor(_CONCATENATED, 2 * own),),
    )
    gathers, gathered = for_columns(_CONCATENATED, share, width=2 * h)
    yield from gathers
    parts, projected = f"parts of {_PROJECTED}", Tensor(_PROJECTED, own, residual=True)
    matrix = linear("eh_proj", gathered, (share.tokens, h // tp, 2 * h), result=parts)
    if tp == 1:
        yield replace(matrix, operators=(replace(matrix.operators[0], makes=(projected,)),))
        return
    yield matrix  # with sequence parallelism every rank goes on with its own tokens
    backward = CollectiveKind.ALL_GATHER if share.shard.sequence_parallel else None
    gather = LayerCollective(_PROJECTED, "tp", CollectiveKind.ALL_GATHER, backward, share.tokens * h, residual=True)
    yield Operator(kernel=gather, reads=(parts,), makes=(projected,))


def depth_head(model: ModelSpec, share: RankShare, kind: NormKind, own: Sequence[LayerPart]) -> LayerSpec:
    """The model's head with that of each depth.

    It holds a copy of the embedding, unless the output projection is tied to it: the copy counts where the model's
    embedding is on another stage, and its gradient comes last. It saves only the last of its inputs: earlier layers
    make the others and save them.

    Args:
        kind: Kind of the norms.
        own: Parts of the model's head.
    """
    copy = ParameterSpec("mtp_wte.weight", (share.vocab, share.hidden))
    held = LayerPart(parameters=(copy,), operators=(Operator(parameters=(copy.name,)),))
    parts = [*own] if model.tied_embeddings else [held, *own]
    depths = model.mtp_num_layers
    for depth in range(1, depths + 1):
        name = f"mtp_norm{depth}"
        source = f"hidden states of depth {depth - 1}"
        parts += [norm(name, source, kind, share), output_distribution(f"{name} output", share, again=f"{name} ")]
    return head_layer(model, share, parts, f"mtp{depths}", inputs=later_inputs(share, depths), tied=(copy.name,))
