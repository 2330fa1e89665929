"""A bound on memory that costs nothing: weights, optimizer states and inputs of blocks of an average rank."""

from __future__ import annotations

from simplan.search.candidate import Candidate
from simplan.search.question import Question
from simplan.spec.plan import ParallelPlan
from simplan.spec.shard import Shard
from simplan.spec.software import StateBytes

__all__ = ["MemoryFloor"]


class MemoryFloor:
    """Bytes that the worst device of a candidate needs at least.

    The worst pipeline rank holds no less than the average, and the worst shard no less than an even one. Between
    forward and backward of a microbatch every block keeps its input, whatever runs again. Gradients, other activations
    and buffers are left out; a weight that two layers share counts once.

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._parameters: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        if question.cluster.cores_per_node is not None:  # a calibration says how much
            self._context_bytes = 0
        self._widths: dict[bool, StateBytes] = {}
        model = question.model
        # nothing of the first block is kept before its first adapter
        self._kept_blocks = 0 if model.family in ("resnet", "t5") else model.num_blocks - (model.lora_rank > 0)

    def bytes(self, candidate: Candidate) -> int:
        """At least so many."""
        trained, frozen, experts = self._of_replica(candidate.tp, candidate.ep)
        num_shards = candidate.dp_shard * candidate.cp
        sharded = candidate.shards_parameters
        state = self._state(sharded)
        weights = (trained * state.parameter + frozen * state.frozen) / (num_shards if sharded else 1)
        optimizer_bytes = state.optimizer_bytes(self._question.training.optimizer)
        states = trained * optimizer_bytes / (num_shards if candidate.zero_stage else 1)
        if experts:  # at least one of each, over all ranks of a stage
            all_ranks = candidate.dp * candidate.cp * candidate.tp
            weights += experts * candidate.ep * state.parameter / (all_ranks if sharded else candidate.ep)
            states += experts * candidate.ep * optimizer_bytes / (all_ranks if candidate.zero_stage else candidate.ep)
        return self._context_bytes + int((weights + states + self._inputs_bytes(candidate, state)) / candidate.pp)

    def _inputs_bytes(self, c: Candidate, state: StateBytes) -> float:
        """Of one microbatch, of all blocks."""
        if not self._kept_blocks:
            return 0.0
        tokens = c.microbatch_size * self._question.model.seq_len / (c.cp * (c.tp if c.sequence_parallel else 1))
        width = 1 if state.linear is not None else min(state.activation, state.residual)
        return tokens * self._question.model.hidden_size * width * self._kept_blocks

    def _state(self, sharded: bool) -> StateBytes:
        if sharded not in self._widths:
            plan = ParallelPlan(dp_shard=2) if sharded else ParallelPlan()
            self._widths[sharded] = self._question.software.state(self._question.training, plan)
        return self._widths[sharded]

    def _of_replica(self, tp: int, ep: int) -> tuple[int, int, int]:
        """Weights of all layers that one tensor- and expert-parallel rank has, tied ones once.

        Those that are trained, those that are frozen, and experts of which other ranks have others.
        """
        if (tp, ep) not in self._parameters:
            layers = self._question.model.layers_of(Shard(tp=tp, ep=ep))
            held = [p for layer in layers for p in layer.parameters if p.name not in layer.tied]
            frozen = sum(p.num_elements for p in held if p.frozen)
            experts = sum(p.num_elements for p in held if p.expert)
            self._parameters[tp, ep] = sum(p.num_elements for p in held) - frozen - experts, frozen, experts
        return self._parameters[tp, ep]
