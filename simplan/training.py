"""Batch, precision and optimizer of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from simplan.base import Count, Positive, Spec
from simplan.model.low_precision import Fp8Recipe

OptimizerName = Literal["adam", "adamw", "sgd", "sgd_momentum", "lars", "lamb"]
_Foreach = Literal["adam_foreach", "adamw_foreach", "sgd_foreach", "sgd_momentum_foreach"]
UpdateName = OptimizerName | _Foreach
"""An optimizer and the kernels of its step; ``_foreach`` for a sequence of kernels over lists of all tensors."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        num_states: Tensors stored per parameter, each as wide as ``StateBytes.moment``.
        streamed_bytes: Bytes read and written per FP32 parameter by one step, zeroing the gradient included.
        num_norms: Norms computed per parameter tensor; ranks with shards of a tensor sum the squares.
        num_temporaries: Temporary tensors of a step, each as large as all parameters.
    """

    num_states: int
    streamed_bytes: int
    num_norms: int = 0
    num_temporaries: int = 0


OPTIMIZERS: dict[UpdateName, OptimizerFacts] = {
    # in fused kernels all read weight and gradient, write the weight and zero the gradient; a state is read and written
    "sgd": OptimizerFacts(0, 16),
    "sgd_momentum": OptimizerFacts(1, 24),
    "adam": OptimizerFacts(2, 32),
    "adamw": OptimizerFacts(2, 32),
    "lars": OptimizerFacts(1, 32, 2),  # weight and gradient once more, for their norms
    "lamb": OptimizerFacts(2, 44, 2),  # the update is written in place of the gradient, and read with the weight
}
"""Optimizers by name: SGD (with momentum 0.9), Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), LARS (You
et al. 2017, arXiv:1708.03888), LAMB (You et al. 2020, arXiv:1904.00962)."""

UPDATES: dict[UpdateName, OptimizerFacts] = {
    **OPTIMIZERS,
    # torch 2.13, optim/sgd.py: weight += gradient, or momentum *= and += before it
    "sgd_foreach": OptimizerFacts(0, 12 + 4),
    "sgd_momentum_foreach": OptimizerFacts(1, 8 + 12 + 12 + 4),
    # torch 2.13, optim/adam.py: lerp, mul, addcmul, a root in a separate tensor, its div and add, addcdiv
    "adam_foreach": OptimizerFacts(2, 12 + 8 + 12 + 8 + 8 + 8 + 16 + 4, num_temporaries=1),
    "adamw_foreach": OptimizerFacts(2, 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16 + 4, num_temporaries=1),  # and decay
}
"""Optimizers with fused kernels, and with torch's sequence of kernels (``foreach``), whose bytes are summed."""

NOT_MODELLED = ("8bit", "8-bit", "4bit", "paged", "adafactor", "muon", "lion", "shampoo", "soap", "sophia", "galore")
"""Parts of the names of optimizers with other states, to tell them from misspelt names."""

LAYERWISE = frozenset(name for name, facts in OPTIMIZERS.items() if facts.num_norms)
"""Optimizers whose step depends on norms."""


Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


def _modelled(name: Any) -> Any:
    """Tell optimizers that are not modeled from misspelt names."""
    if isinstance(name, str) and any(part in name.lower() for part in NOT_MODELLED):
        known = ", ".join(get_args(OptimizerName))
        raise ValueError(f"is an optimizer that is not modeled yet, for it keeps other states; modeled: {known}")
    return name


class TrainingSpec(Spec):
    """Batch, precision and optimizer of one run.

    Attributes:
        global_batch_size: Sequences per optimizer step, over all devices.
        precision: Format of the linear layers' matmuls. FP16 and BF16 are mixed precision. ``fp8``, ``mxfp8`` and
            ``nvfp4`` are BF16 except for the linear layers of blocks (``simplan.model.low_precision``).
        fp8_recipe: FP8 scaling recipe; None for per-tensor scaling (``tensorwise``), and for other precisions.
        optimizer: Optimizer; ``simplan.training`` has its states, traffic and norms.
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
