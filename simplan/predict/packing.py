"""Assumptions on packed sequences: variation between packs, and a bound on the cost of imbalance."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.cost.model import CostModel
from simplan.job import Job
from simplan.model.layer import Attention, LayerSpec
from simplan.model.packing import PackStatistics
from simplan.model.recompute import recomputation, recompute_of
from simplan.plan.plan import ParallelPlan, Recompute, StageAssignment
from simplan.program.action import Table
from simplan.program.program import LayerWork, Phase
from simplan.units import format_percent

__all__ = ["attention_s", "fullest_excess", "packing_assumptions"]


def packing_assumptions(job: Job, attention_share: float) -> Iterator[str]:
    """Yield sentences on packed sequences; none if sequences are not packed.

    Args:
        job: Predicted job.
        attention_share: Fraction of the step time spent in attention cores, on the rank with the largest.
    """
    model = job.model
    if not model.document_lengths:
        return
    yield "attention of packed documents is one call of the kernel for each; padding is computed like other tokens"
    packs = model.packs
    if packs is None:
        yield "all sequences are packed alike"
        return
    yield (
        f"{packs.num_documents:,} documents were drawn (seed {packs.seed}) and packed ({packs.packing}) into "
        f"{packs.num_packs:,} sequences: {packs.documents_per_pack:.3g} documents each, which are "
        f"{format_percent(packs.document_share)} of the tokens; predicted is the pack whose attention is nearest to "
        "the mean"
    )
    if packs.cut_share:
        yield f"{format_percent(packs.cut_share)} of the documents were longer than allowed, and were cut"
    spread = f"packs differ by +/- {format_percent(packs.relative_std)} in attention"
    ranks, each = _waiting(job.plan, job.num_microbatches)
    if ranks == 1:
        yield f"{spread}; one rank waits for no other"
        return
    excess = fullest_excess(packs, ranks, each)
    yield (
        f"{spread}; waiting for the fullest one is not in the step time: at most "
        f"{format_percent(attention_share * excess)} of it, for attention is {format_percent(attention_share)} of the "
        f"step, and the fullest of {ranks:,} is expected to be at most {format_percent(excess)} above the mean"
    )


def fullest_excess(packs: PackStatistics, num_ranks: int, packs_each: int) -> float:
    """Upper bound on the expected excess of the fullest of several ranks, relative to the mean.

    The largest of n independent samples of any distribution is expected at most (n - 1) / sqrt(2 n - 1) standard
    deviations above the mean (Hartley and David 1954, Gumbel 1954). The fullest of all packs is a second bound.

    Args:
        packs: Statistics of the packs.
        num_ranks: Ranks that wait for each other.
        packs_each: Packs of each rank between two waits.
    """
    deviations = (num_ranks - 1) / (2 * num_ranks - 1) ** 0.5
    return float(min(deviations * packs.relative_std / packs_each**0.5, packs.relative_excess))


def attention_s(job: Job, assignment: StageAssignment, table: Table, cost: CostModel) -> float:
    """Seconds of attention cores in a step, on the pipeline rank with the most."""
    plan = job.plan
    layers = job.software.layers_of(job.model, plan)
    found: dict[tuple[object, Recompute, int], float] = {}

    def of_layer(index: int) -> float:
        layer = layers[index]
        mode = recompute_of(layer, plan, assignment.place(index))
        key = (layer.key, mode, (index - 1) % 2)  # selective_layer has two kinds of blocks
        if key not in found:
            found[key] = _core_s(layer, plan, cost, mode, index - 1)
        return found[key]

    by_row = [
        sum(of_layer(index) for stage in {a.stage for a in row} for index in assignment.layer_range(stage))
        for row in table
    ]
    return job.num_microbatches * max(by_row)


def _core_s(layer: LayerSpec, plan: ParallelPlan, cost: CostModel, mode: Recompute, block: int) -> float:
    """Attention-core seconds of one layer and microbatch."""
    cores = tuple(index for index, kernel in enumerate(layer.kernels) if isinstance(kernel, Attention))
    if not cores:
        return 0.0
    again = set(cores) & set(recomputation(layer, mode, block, plan.recompute_modules).kernels)
    phases = (Phase.FORWARD, Phase.BACKWARD, *([Phase.RECOMPUTE] * bool(again)))
    works = [LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters, cores) for phase in phases]
    return sum(cost.compute(work).seconds for work in works)


def _waiting(plan: ParallelPlan, microbatches: int) -> tuple[int, int]:
    """Number of parts of a step that may wait for each other, and packs per part.

    Ranks that only reduce gradients wait once per step. Ranks with collectives inside layers wait in every microbatch.
    A pipeline is at most as slow as if all microbatches were as full as the fullest.
    """
    b = plan.microbatch_size
    if plan.pp > 1:
        return plan.dp * microbatches, b
    every = plan.shards_parameters or plan.grad_sync == "microbatch" or plan.ep > 1
    return plan.dp, b if every else b * microbatches
