"""What is trained, apart from the model and the plan."""

from __future__ import annotations

from typing import Literal

from simplan.spec.base import Count, Spec

__all__ = ["Precision", "TrainingSpec"]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


class TrainingSpec(Spec):
    """Batch, precision and optimizer of one run.

    Attributes:
        global_batch_size: Sequences per optimizer step, over all devices.
        precision: Format of the linear layers' matmuls; fp16 and bf16 are mixed precision.
        optimizer: ``adam`` and ``adamw`` keep two fp32 states, ``sgd`` none.
        task: ``pretrain`` trains all weights, ``lora`` the adapters of ``ModelSpec.lora_rank``; ``sft`` is
            not modelled.
    """

    global_batch_size: Count
    precision: Precision = "bf16"
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    task: Literal["pretrain", "sft", "lora"] = "pretrain"
