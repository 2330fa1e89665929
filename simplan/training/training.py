"""What is trained, apart from the model and the plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from simplan.base import Count, Positive, Spec
from simplan.model.low_precision import Fp8Recipe
from simplan.training.optimizer import NOT_MODELLED, OptimizerName, UpdateName

__all__ = ["Precision", "TrainingSpec"]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


def _modelled(name: Any) -> Any:
    """Optimizers that exist and are not modelled are no misspelt names of others."""
    if isinstance(name, str) and any(part in name.lower() for part in NOT_MODELLED):
        known = ", ".join(get_args(OptimizerName))
        raise ValueError(f"is an optimizer that is not modelled yet, for it keeps other states; modelled: {known}")
    return name


class TrainingSpec(Spec):
    """Batch, precision and optimizer of one run.

    Attributes:
        global_batch_size: Sequences per optimizer step, over all devices.
        precision: Format of the linear layers' matmuls; fp16 and bf16 are mixed precision. fp8, mxfp8 and
            nvfp4 are bf16 but for the linear layers of blocks (``simplan.model.low_precision``).
        fp8_recipe: How fp8 is scaled; None for one scale a tensor (``tensorwise``), and for other precisions.
        optimizer: What it keeps, moves and needs to know is in ``simplan.training.optimizer``.
        fused_optimizer: One kernel reads and writes all of a step's tensors; false for torch's ``foreach``, one kernel
            after the other, which for Adam needs a tensor as large as all parameters of the rank. None for fused where
            there is such a kernel, which is all but LARS and LAMB.
        clip_grad_norm: Gradients of the whole model are scaled to this norm where theirs is larger; None for as they
            are.
        task: What the run is for. ``pretrain`` trains all weights, ``lora`` the adapters of ``ModelSpec.lora_rank``.
            ``sft`` computes what ``pretrain`` does: tokens of prompts and padding are masked in the loss, and their
            logits are computed all the same.
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
        """The optimizer as its step is computed; of LARS and LAMB there is one way."""
        foreach: dict[OptimizerName, UpdateName] = {
            "adam": "adam_foreach",
            "adamw": "adamw_foreach",
            "sgd": "sgd_foreach",
            "sgd_momentum": "sgd_momentum_foreach",
        }
        return foreach.get(self.optimizer, self.optimizer) if self.fused_optimizer is False else self.optimizer
