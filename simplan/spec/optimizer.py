"""What optimizers keep, move and need to know of each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LAYERWISE", "OPTIMIZERS", "OptimizerFacts", "OptimizerName"]

OptimizerName = Literal["adam", "adamw", "sgd", "sgd_momentum", "lars", "lamb"]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        num_states: Tensors that it keeps for each parameter, each as wide as ``StateBytes.moment`` says.
        streamed_bytes: Read and written for each fp32 parameter by one step in fused kernels, zeroing the gradient
            included.
        num_norms: Norms that it takes over each parameter tensor; where ranks have parts of a tensor they sum up the
            squares.
    """

    num_states: int
    streamed_bytes: int
    num_norms: int = 0


OPTIMIZERS: dict[OptimizerName, OptimizerFacts] = {
    # all read weight and gradient, write the weight and zero the gradient; a state is read and written
    "sgd": OptimizerFacts(0, 16),
    "sgd_momentum": OptimizerFacts(1, 24),
    "adam": OptimizerFacts(2, 32),
    "adamw": OptimizerFacts(2, 32),
    "lars": OptimizerFacts(1, 32, 2),  # weight and gradient once more, for their norms
    "lamb": OptimizerFacts(2, 44, 2),  # the update is written in place of the gradient, and read with the weight
}
"""By name: SGD (with momentum 0.9), Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), LARS (You et al.
2017, arXiv:1708.03888), LAMB (You et al. 2020, arXiv:1904.00962)."""

LAYERWISE = frozenset(name for name, facts in OPTIMIZERS.items() if facts.num_norms)
"""Those whose step depends on norms."""
