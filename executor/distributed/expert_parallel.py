"""Experts spread over ranks, or split over tensor-parallel ranks, and how tokens come to them.

Hand-written, since torch has no expert parallelism of its own; the all-to-all is torch's functional collective.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from executor.distributed.context_parallel import exchange
from executor.distributed.mesh import ParallelDims
from executor.distributed.tensor_parallel import gather_parts, scatter_sum
from executor.models.moe import ExpertMlp, GroupedLinear

_EXPERTS, _ROWS = 0, 1  # the dimensions of capacity slots
_WIDTHS = {"experts_gate": 1, "experts_up": 1, "experts_down": 2}
"""Dimension of each matrix (experts, outputs, inputs) that ranks split which split every expert."""


def split_experts(layer: nn.Module, dims: ParallelDims) -> None:
    """Keeps only this rank's experts, or its shards of them, in place.

    Args:
        layer: Layer with all experts, which may be on the meta device.
    """
    if dims.shard.ep == dims.shard.etp == 1:
        return
    for module in layer.modules():
        if isinstance(module, ExpertMlp):
            for name in _WIDTHS:
                matrices = module.get_submodule(name)
                assert isinstance(matrices, GroupedLinear)
                matrices.weight = nn.Parameter(own_experts(matrices.weight.detach(), name, dims).clone())
            module.to_experts, module.from_experts = partial(_given, dims=dims), partial(_returned, dims=dims)


def own_experts(whole: Tensor, name: str, dims: ParallelDims) -> Tensor:
    """This rank's shard of the matrices of all experts.

    Args:
        whole: Unsharded matrices, (experts, outputs, inputs).
    """
    part = whole.chunk(dims.ep.size, 0)[dims.ep.rank]
    return dims.own_part(part, _WIDTHS[name]) if dims.shard.etp > 1 else part


def _given(x: Tensor, dims: ParallelDims) -> Tensor:
    """Expert dispatch: from slots of all experts with local tokens to slots of local experts with all ranks' tokens."""
    if dims.ep.size > 1:
        x = exchange(x, dims.ep, _EXPERTS, _ROWS)
    return gather_parts(x, dims.tp) if dims.shard.etp > 1 else x


def _returned(x: Tensor, dims: ParallelDims) -> Tensor:
    """Expert combine: the inverse of dispatch; expert-tensor-parallel ranks sum their partial results."""
    if dims.shard.etp > 1:
        x = scatter_sum(x, dims.tp)
    return exchange(x, dims.ep, _ROWS, _EXPERTS) if dims.ep.size > 1 else x
