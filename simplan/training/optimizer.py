"""What optimizers keep, move and need to know of each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LAYERWISE", "NOT_MODELLED", "OPTIMIZERS", "UPDATES", "OptimizerFacts", "OptimizerName", "UpdateName"]

OptimizerName = Literal["adam", "adamw", "sgd", "sgd_momentum", "lars", "lamb"]
_Foreach = Literal["adam_foreach", "adamw_foreach", "sgd_foreach", "sgd_momentum_foreach"]
UpdateName = OptimizerName | _Foreach
"""An optimizer and how its step is computed: ``_foreach`` for one kernel after the other over lists of all tensors."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        num_states: Tensors that it keeps for each parameter, each as wide as ``StateBytes.moment`` says.
        streamed_bytes: Read and written for each fp32 parameter by one step, zeroing the gradient included.
        num_norms: Norms that it takes over each parameter tensor; where ranks have parts of a tensor they sum up the
            squares.
        num_temporaries: Tensors as large as all parameters that it makes for its step.
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
"""By name: SGD (with momentum 0.9), Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), LARS (You et al.
2017, arXiv:1708.03888), LAMB (You et al. 2020, arXiv:1904.00962)."""

UPDATES: dict[UpdateName, OptimizerFacts] = {
    **OPTIMIZERS,
    # torch 2.13, optim/sgd.py: weight += gradient, or momentum *= and += before it
    "sgd_foreach": OptimizerFacts(0, 12 + 4),
    "sgd_momentum_foreach": OptimizerFacts(1, 8 + 12 + 12 + 4),
    # torch 2.13, optim/adam.py: lerp, mul, addcmul, a root in a tensor of its own, div and add of it, addcdiv
    "adam_foreach": OptimizerFacts(2, 12 + 8 + 12 + 8 + 8 + 8 + 16 + 4, num_temporaries=1),
    "adamw_foreach": OptimizerFacts(2, 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16 + 4, num_temporaries=1),  # and decay
}
"""The same with what torch does without fused kernels (``foreach``): bytes of one kernel after the other."""

NOT_MODELLED = ("8bit", "8-bit", "4bit", "paged", "adafactor", "muon", "lion", "shampoo", "soap", "sophia", "galore")
"""Parts of names of optimizers that keep other states than these, by which they are told from misspelt ones."""

LAYERWISE = frozenset(name for name, facts in OPTIMIZERS.items() if facts.num_norms)
"""Those whose step depends on norms."""
