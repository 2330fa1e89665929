"""Batch, precision and optimizer of a training run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from simplan.base import Count, Positive, Spec
from simplan.model.low_precision import Fp8Recipe
from simplan.training.optimizer import NOT_MODELLED, UPDATES, OptimizerName, UpdateName

__all__ = ["Precision", "TrainingSpec"]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


def _modelled(name: Any) -> Any:
    """Tell optimizers that are not modeled from misspelt names."""
    if isinstance(name, str) and any(part in name.lower() for part in NOT_MODELLED):
        known = ", ".join(get_args(OptimizerName))
        raise ValueError(f"is an optimizer that is not modelled yet, for it keeps other states; modelled: {known}")
    return name


class TrainingSpec(Spec):
    """Batch, precision and optimizer of one run.

    Attributes:
        global_batch_size: Sequences per optimizer step, over all devices.
        precision: Format of the linear layers' matmuls. FP16 and BF16 are mixed precision. ``fp8``, ``mxfp8`` and
            ``nvfp4`` are BF16 except for the linear layers of blocks (``simplan.model.low_precision``).
        fp8_recipe: FP8 scaling recipe; None for per-tensor scaling (``tensorwise``), and for other precisions.
        optimizer: Optimizer; ``simplan.training.optimizer`` has its states, traffic and norms.
        fused_optimizer: One kernel reads and writes all tensors of a step; false for torch's ``foreach``, a sequence of
            kernels, which for Adam needs a tensor as large as all parameters of the rank. None for fused where there is
            such a kernel, which is all except LARS and LAMB.
        clip_grad_norm: Norm to which gradients of the full model are scaled if theirs is larger; None for no clipping.
        task: Purpose of the run. ``pretrain`` trains all weights, ``lora`` the adapters of ``ModelSpec.lora_rank``.
            ``sft`` computes the same as ``pretrain``: tokens of prompts and padding are masked in the loss, but their
            logits are computed.
    """

    global_batch_size: Count
    precision: Precision = "bf16"
    fp8_recipe: Fp8Recipe | None = None
    optimizer: Annotated[OptimizerName, BeforeValidator(_modelled)] = "adamw"
    fused_optimizer: bool | None = None
    clip_grad_norm: Positive | None = None
    task: Literal["pretrain", "sft", "lora"] = "pretrain"

    @property
    def update(self) -> UpdateName:
        """The optimizer with the kernels of its step; LARS and LAMB have one variant."""
        name = self.optimizer if self.fused_optimizer is not False else f"{self.optimizer}_foreach"
        return next((update for update in UPDATES if update == name), self.optimizer)
