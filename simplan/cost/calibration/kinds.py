"""Kinds of communication that a plan uses, so that a calibration times only these."""

from __future__ import annotations

from simplan.model.layer import CollectiveKind, LayerCollective
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.training.optimizer import LAYERWISE
from simplan.training.training import TrainingSpec

__all__ = ["kinds_needed"]


def kinds_needed(plan: ParallelPlan, model: ModelSpec, training: TrainingSpec) -> frozenset[CollectiveKind]:
    """Returns the kinds of all communication of a step; norms over sharded tensors need an all-reduce."""
    kinds = _of_layers(plan, model) | _of_gradients(plan)
    if model.num_experts and plan.shard.experts_apart and plan.expert_ranks > plan.ep:
        kinds.add(CollectiveKind.ALL_REDUCE)
    if plan.pp > 1:
        kinds.add(CollectiveKind.SEND)
        if model.tied_embeddings and not model.lora_rank:
            kinds.add(CollectiveKind.ALL_REDUCE)
    split = plan.shards_parameters or plan.tp > 1
    if (training.clip_grad_norm is not None and (split or plan.pp > 1)) or (training.optimizer in LAYERWISE and split):
        kinds.add(CollectiveKind.ALL_REDUCE)
    return frozenset(kinds)


def _of_layers(plan: ParallelPlan, model: ModelSpec) -> set[CollectiveKind]:
    kinds: set[CollectiveKind] = set()
    for layer in set(model.layers_of(plan.shard)):
        for kernel in layer.kernels:
            if isinstance(kernel, LayerCollective):
                kinds.update(kind for kind in (kernel.forward, kernel.backward) if kind is not None)
        if any(parameter.partial_gradient for parameter in layer.parameters):
            kinds.add(CollectiveKind.ALL_REDUCE)
    return kinds


def _of_gradients(plan: ParallelPlan) -> set[CollectiveKind]:
    """Returns the kinds that reduce gradients and distribute updates of sharded optimizers."""
    if plan.shards_parameters:
        kinds = {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
        return kinds | {CollectiveKind.ALL_REDUCE} if plan.dp_replicate > 1 else kinds
    kinds = {CollectiveKind.ALL_REDUCE} if plan.dp * plan.cp > 1 else set()
    return kinds | {CollectiveKind.BROADCAST} if plan.shards_optimizer_only else kinds
