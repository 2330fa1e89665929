"""A bound on memory that costs nothing: weights and optimizer states of an average rank."""

from __future__ import annotations

from simplan.search.candidate import Candidate
from simplan.search.question import Question
from simplan.spec.shard import Shard

__all__ = ["MemoryFloor"]


class MemoryFloor:
    """Bytes that the worst device of a candidate needs at least.

    The worst pipeline rank holds no less than the average, and the worst shard no less than an even one. Gradients,
    activations and buffers are left out; a weight that two layers share counts once.

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._parameters: dict[tuple[int, int], int] = {}
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        if question.cluster.cores_per_node is not None:  # a calibration says how much
            self._context_bytes = 0
        software, precision = question.software, question.training.precision
        optimizer = question.training.optimizer
        self._widths = []
        for widths in (software.state_bytes, software.sharded_state_bytes):
            state = next((state for name, state in widths.items() if name == precision), None)
            self._widths.append((0, 0) if state is None else (state.parameter, state.optimizer_bytes(optimizer)))

    def bytes(self, candidate: Candidate) -> int:
        """At least so many."""
        num_parameters = self._of_replica(candidate.tp, candidate.ep) / candidate.pp
        num_shards = candidate.dp_shard * candidate.cp
        sharded = candidate.shards_parameters
        parameter_bytes, optimizer_bytes = self._widths[sharded]
        weights = num_parameters * parameter_bytes / (num_shards if sharded else 1)
        states = num_parameters * optimizer_bytes / (num_shards if candidate.zero_stage else 1)
        return self._context_bytes + int(weights + states)

    def _of_replica(self, tp: int, ep: int) -> int:
        """Weights of all layers that one tensor- and expert-parallel rank has, tied ones once."""
        if (tp, ep) not in self._parameters:
            layers = self._question.model.layers_of(Shard(tp=tp, ep=ep))
            tied = sum(p.num_elements for layer in layers for p in layer.parameters if p.name in layer.tied)
            self._parameters[tp, ep] = sum(layer.num_parameters for layer in layers) - tied
        return self._parameters[tp, ep]
