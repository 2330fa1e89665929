"""Lower bound on the step time: what the busiest pipeline rank computes, waits for and updates."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from simplan.cost.base import CostModel
from simplan.job import Job
from simplan.predict.build import assign_layers
from simplan.program.program import LayerWork, Message, Phase
from simplan.search.candidate import Candidate
from simplan.search.layer_sums import CostCache, Floats, LayerSumsCache, costs_of
from simplan.search.question import Question
from simplan.spec.layer import CollectiveKind, LayerSpec
from simplan.spec.plan import ParallelPlan, RankMapping
from simplan.spec.recompute import recomputation, recompute_of
from simplan.spec.schedules import SCHEDULE_FACTS, Placement
from simplan.spec.software import StateBytes

__all__ = ["StepTimeBound", "compute_bound_s"]


def _placement_of(kind: Placement, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """By stage, its rank."""
    num_stages = pp * virtual_stages
    if kind == "v":
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


class _Ranks(NamedTuple):
    """Pipeline ranks of plans that have the same stages, ``(ranks,)`` each.

    Attributes:
        before_s: Forwards of a first microbatch through the first stages of the ranks before.
        back_s: Backwards of a last one through the same, unless schedules split backwards.
        work_s: Of a microbatch on all stages of the rank.
        trained, experts: Weights that are trained but for experts, and these.
    """

    before_s: Floats
    back_s: Floats
    work_s: Floats
    trained: Floats
    experts: Floats


class StepTimeBound:
    """Seconds that a step takes at least.

    A pipeline rank begins when the first microbatch has come through the first stages of the ranks before; computes all
    microbatches with the exchanges inside of layers, one thing at a time; and ends, unless backwards are split, with a
    backward that has to go back through those stages. Then gradients are reduced, where that is not beside a backward,
    parameters updated, and gathered where ranks updated parts of them. Messages between stages, and FSDP's, are left
    out.

    Args:
        question: What every candidate shares; devices are their own and there is no calibration.
        layer_sums: Of the same question.
    """

    def __init__(self, question: Question, layer_sums: LayerSumsCache) -> None:
        self._question, self._layer_sums = question, layer_sums
        kernels, software = question.cluster.device.kernels, question.software
        self._reduces_late = not software.grad_overlap and software.waits_for_gradients == "step"
        self._shares_evenly = software.optimizer_shards == "elements"
        self._host_s = kernels.step_s if software.trainer else 0.0
        self._batch_s = kernels.batch_s if software.waits_for_batch != "none" else 0.0
        self._prices: CostCache | None = None
        self._states: dict[bool, StateBytes] = {}
        self._ranks: dict[Hashable, _Ranks] = {}
        self._after_s: dict[Hashable, tuple[Floats, float]] = {}

    def seconds(self, c: Candidate) -> float:
        """At least so many."""
        many = self._question.training.global_batch_size // (c.dp * c.microbatch_size)
        ranks, same = self._of_ranks(c)
        mesh = same, c.dp_replicate, c.dp_shard, c.zero_stage
        found = self._after_s.get(mesh)
        if found is None:
            found = self._after_s[mesh] = self._after(c, ranks)
        after_s, first_after_s = found
        done_s = ranks.before_s + many * ranks.work_s
        return float(max((done_s + after_s).max(), (done_s + ranks.back_s).max() + first_after_s)) + self._host_s

    def _of_ranks(self, c: Candidate) -> tuple[_Ranks, Hashable]:
        facts = SCHEDULE_FACTS.get(c.schedule)
        splits = facts is not None and facts.splits_backward
        in_v = facts is not None and facts.placement == "v"
        same = self._layer_sums.split_of(c), c.pp, c.virtual_stages, splits, in_v
        found = self._ranks.get(same)
        if found is None:
            found = self._ranks[same] = self._made(c, splits=splits, in_v=in_v)
        return found, same

    def _made(self, c: Candidate, *, splits: bool, in_v: bool) -> _Ranks:
        sums, bounds = self._layer_sums.of(c), self._layer_sums.boundaries(c)
        rank_of = np.array(_placement_of("v" if in_v else "loop", c.pp, c.virtual_stages))

        def of_stages(sums: Floats) -> Floats:
            return np.diff(sums[bounds])

        def of_ranks(stages: Floats) -> Floats:
            return np.bincount(rank_of, stages, c.pp).astype(np.float64)

        forward_s, backward_s = of_stages(sums.forward_s), of_stages(sums.backward_s)
        if self._batch_s:
            waits = np.ones(c.num_stages, np.bool_)
            waits[1:-1] = self._question.software.waits_for_batch == "stages"
            forward_s = forward_s + self._batch_s * waits
        before_s, back_s = (np.concatenate(([0.0], of[: c.pp].cumsum()[:-1])) for of in (forward_s, backward_s))
        return _Ranks(
            before_s,
            np.zeros(c.pp) if splits else back_s,
            of_ranks(forward_s + backward_s),
            of_ranks(of_stages(sums.trained)),
            of_ranks(of_stages(sums.experts)),
        )

    def _after(self, c: Candidate, ranks: _Ranks) -> tuple[Floats, float]:
        """Seconds of every rank after its last backward, and of the first one without reducing gradients."""
        shards, all_ranks = c.dp_shard * c.cp, c.dp * c.cp * c.tp
        shares = c.shards_optimizer_only
        dense = ranks.trained / (shards if c.zero_stage else 1)
        experts = ranks.experts / (all_ranks if c.zero_stage else 1)
        after_s = self._layer_sums.of(c).update_s * (dense + experts)
        if c.shards_parameters:
            return after_s, float(after_s[0])
        state, mapping = self._state(c), RankMapping.of(c.plan())
        shard_group = mapping.shard_group(0)
        if shares and self._shares_evenly and not self._question.software.gathers_ahead:
            after_s = after_s + self._messages_s(
                CollectiveKind.ALL_GATHER, ranks.trained * state.parameter, shard_group
            )
        first_s = float(after_s[0])
        if self._reduces_late:
            reduced_bytes, replicas = ranks.trained * state.reduced, mapping.dp_group(0)
            if shares and self._shares_evenly:
                after_s = after_s + self._messages_s(CollectiveKind.REDUCE_SCATTER, reduced_bytes, shard_group)
                reduced_bytes, replicas = reduced_bytes / shards, mapping.replicate_group(0)
            after_s = after_s + self._messages_s(CollectiveKind.ALL_REDUCE, reduced_bytes, replicas)
        return after_s, first_s

    def _messages_s(self, kind: CollectiveKind, num_bytes: Floats, group: tuple[int, ...]) -> Floats | float:
        """By rank of a pipeline, one message of all its stages: no longer than one for each."""
        if len(group) == 1:
            return 0.0
        if self._prices is None:  # of messages, which cost the same under all plans
            self._prices = costs_of(self._question, Candidate())
        prices = self._prices
        sizes, place = np.unique(num_bytes.astype(np.int64), return_inverse=True)
        return np.array([prices.message_s(Message(kind, int(size), group)) for size in sizes])[place]

    def _state(self, c: Candidate) -> StateBytes:
        found = self._states.get(c.shards_parameters)
        if found is None:
            found = self._states[c.shards_parameters] = self._question.software.state(self._question.training, c.plan())
        return found


def compute_bound_s(job: Job, cost: CostModel) -> float:
    """Seconds that a step takes at least, where prices come from a calibration.

    Over pipeline ranks, the most of: forward of one microbatch before it, all its work, backward after it.

    A rank begins with a forward of a microbatch that came through all stages before its first; and it ends, unless
    backwards are split, with a backward that still has to go back through them.
    """
    model, plan, software = job.model, job.plan, job.software
    layers = software.layers_of(model, plan)
    assignment = assign_layers(job, cost)
    facts = SCHEDULE_FACTS.get(plan.schedule)
    splits = facts is not None and facts.splits_backward
    seconds: dict[tuple[LayerSpec, tuple[int, ...]], tuple[float, float]] = {}
    stages = []
    for stage in range(plan.num_stages):
        forward_s = backward_s = 0.0
        for index in assignment.layer_range(stage):
            mode = recompute_of(layers[index], plan, assignment.place(index))
            key = layers[index], tuple(recomputation(layers[index], mode, index - 1, plan.recompute_modules).kernels)
            if key not in seconds:
                seconds[key] = _layer_s(cost, *key, plan, splits=splits)
            forward_s += seconds[key][0]
            backward_s += seconds[key][1]
        stages.append((forward_s, backward_s))
    work_s = [0.0] * plan.pp
    for stage, parts_s in enumerate(stages):
        turn, place = divmod(stage, plan.pp)
        back = facts is not None and facts.placement == "v" and turn % 2
        work_s[plan.pp - 1 - place if back else place] += job.num_microbatches * sum(parts_s)
    most_s = before_s = 0.0
    for rank, of_rank_s in enumerate(work_s):
        most_s = max(most_s, before_s + of_rank_s)
        before_s += stages[rank][0] + (0.0 if splits else stages[rank][1])
    return most_s


def _layer_s(
    cost: CostModel, layer: LayerSpec, again: tuple[int, ...], plan: ParallelPlan, *, splits: bool
) -> tuple[float, float]:
    """Forward of a layer, and its backward with what is computed again; in two parts if that is shorter."""

    def seconds(phase: Phase, kernels: tuple[int, ...] | None = None) -> float:
        return cost.compute(LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters, kernels)).seconds

    backward_s = seconds(Phase.BACKWARD)
    if splits:
        backward_s = min(backward_s, seconds(Phase.BACKWARD_INPUT) + seconds(Phase.BACKWARD_WEIGHT))
    if again:
        backward_s += seconds(Phase.RECOMPUTE, again)
    return seconds(Phase.FORWARD), backward_s
