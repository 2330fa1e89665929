"""Blocks that backward runs again, in full or but for the products that are kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from simplan.spec.plan import Recompute

__all__ = ["RECOMPUTES", "BlockRecompute", "of_block", "run_block"]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "selective_op", "selective_layer", "full")
"""The modes of a plan that the executor has; with ``selective`` the attention core alone sees to it."""

BlockRecompute = Literal["none", "full", "selective_op"]
"""What is done with one block: it keeps all it needs, its input, or that and some products."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_ATTENTIONS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def of_block(mode: Recompute, number: int) -> BlockRecompute:
    """What a plan's mode is for one of the model's blocks, counted from 0."""
    assert mode in RECOMPUTES, mode
    match mode:
        case "full" | "selective_op":
            return mode
        case "selective_layer":
            return "full" if number % 2 else "none"
        case _:
            return "none"


def run_block(block: Callable[..., Tensor], *inputs: Tensor, recompute: BlockRecompute) -> Tensor:
    """What a block makes of its inputs.

    To be called inside of its module, so that FSDP's hooks run once around forward and once around backward.
    """
    if recompute == "none":
        return block(*inputs)
    again = partial(checkpoint, block, *inputs, use_reentrant=False, preserve_rng_state=False)
    out: Tensor = again(context_fn=_keep_every_second_product) if recompute == "selective_op" else again()
    return out


def _keep_every_second_product() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Torchtitan's per-op policy: the first matrix product is kept, the second not, and so on; attention is kept."""
    num_products = 0

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal num_products
        del context, args, kwargs
        num_products += operation in _PRODUCTS
        keeps = operation in _ATTENTIONS or (operation in _PRODUCTS and num_products % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
