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
from typing import TYPE_CHECKING

from simplan.spec.layer import CollectiveKind, Exchange, Gemm, Kernel, LayerKind, LayerSpec, ParameterSpec, Saved
from simplan.spec.models.ends import output_distribution, token_lookup
from simplan.spec.models.part import NormKind, Part, concatenation, layer_of, norm
from simplan.spec.share import Share, column_exchanges

if TYPE_CHECKING:
    from simplan.spec.model import ModelSpec

__all__ = ["MTP", "depth_heads", "depth_layers"]

MTP = frozenset({"mtp_num_layers"})
"""Fields of families whose models can have such layers."""

_CONCATENATED, _PROJECTED = "concatenated norms", "eh_proj output"


def depth_layers(
    model: ModelSpec, share: Share, kind: NormKind, key: str, block: Sequence[Part]
) -> Iterator[LayerSpec]:
    """The layers, which hand on the hidden states of all depths before them beside their own.

    Args:
        model: The model.
        share: Sizes.
        kind: Of all norms.
        key: Of the model's last block.
        block: Its parts, its input first.
    """
    hidden_states, *rest = block
    for depth in range(1, model.mtp_num_layers + 1):
        yield layer_of(
            f"{key},mtp{depth}",
            LayerKind.BLOCK,
            [hidden_states, *_later_tokens(kind, share), *rest],
            output_shapes=share.hidden_shapes * (depth + 1),
            passed_outputs=tuple(range(depth)),
            mtp_depth=depth,
        )


def _later_tokens(kind: NormKind, share: Share) -> Iterator[Part]:
    """Embeddings of later tokens, both norms, the projection. The embedding is a parameter of the head."""
    own, h, tp = share.own_tokens * share.hidden, share.hidden, share.shard.tp
    kernels, saved = token_lookup(share)
    looked_up = Saved("embeddings of later tokens", own, made_by=kernels[-1].name, residual=True)
    yield Part(kernels=kernels, saved=(*saved, looked_up))
    for name in ("enorm", "hnorm"):
        yield norm(name, kind, share, keeps_output=False)
    yield concatenation(_CONCATENATED, 2, share)
    before, after = column_exchanges(_CONCATENATED, share, width=2 * h)
    projection: list[Kernel] = [*before, Gemm("eh_proj", share.tokens, h // tp, 2 * h), *after]
    if tp > 1:  # with sequence parallelism every rank goes on with its own tokens
        backward = CollectiveKind.ALL_GATHER if share.shard.sequence_parallel else None
        elements = share.tokens * h
        projection.append(Exchange(_PROJECTED, "tp", CollectiveKind.ALL_GATHER, backward, elements, residual=True))
    yield Part(
        parameters=(ParameterSpec("eh_proj.weight", (h // tp, 2 * h)),),
        kernels=tuple(projection),
        saved=(Saved(_PROJECTED, own, made_by=projection[-1].name, residual=True),),
        gradients=("eh_proj.weight",),
    )


def depth_heads(model: ModelSpec, share: Share, kind: NormKind) -> tuple[list[Part], list[Part]]:
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
    before = [] if model.tied_embeddings else [Part(parameters=(copy,), gradients=(copy.name,))]
    after = []
    for depth in range(1, model.mtp_num_layers + 1):
        name = f"mtp_norm{depth}"
        after += [norm(name, kind, share), output_distribution(f"{name} output", share, again=True)]
    return before, after
