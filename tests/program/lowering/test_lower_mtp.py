"""Layers for multi-token prediction in a pipeline: what its last rank holds, keeps and exchanges, by hand."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from simplan import catalog
from simplan.model.layer import CollectiveKind
from simplan.model.recompute import recomputation
from simplan.plan.plan import ParallelPlan
from simplan.predict import cost_model, predict
from simplan.predict.build import assign_layers
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.memory.footprint import layer_footprint
from simplan.program.memory.liveness import PeakPoint
from simplan.program.program import Communication, MemoryCategory, Program, Stream
from simplan.program.tables.plan_table import plan_table
from simplan.training import TrainingSpec
from tests.jobs import job_of, tiny_model
from tests.test_random_plans import keeps_the_laws

H, TOKENS, VOCAB, WIDTH = 64, 32, 128, 32
MODEL = tiny_model(
    "moe", num_hidden_layers=6, num_attention_heads=8, num_experts=8, top_k=2, moe_intermediate_size=WIDTH,
    vocab_size=VOCAB, seq_len=TOKENS,
)  # fmt: skip
CORE = catalog.software("megatron-core")
BLOCK = 4 * H * H + 2 * H + 8 * H + 8 * 3 * H * WIDTH
DEPTH = BLOCK + 2 * H * H + 3 * H  # with the norm of its head


def peak(points: Iterable[PeakPoint]) -> int:
    return max(map(sum, points))


def program(plan: ParallelPlan, depths: int, **fields: Any) -> Program:
    model = MODEL.model_copy(update={"mtp_num_layers": depths, **fields})
    job = job_of(model, plan, software=CORE, num_microbatches=4)
    assignment = assign_layers(job, cost_model(job, None))
    return lower(job, assignment, plan_table(plan, 4), Lowering(2))


def held(program: Program, rank: int) -> list[int]:
    """Bytes of weights, gradients and optimizer states."""
    categories = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
    return [program.persistent_bytes[rank][category] for category in categories]


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize(("pp", "tied"), [(1, False), (1, True), (2, False), (2, True)])
def test_the_last_rank_holds_them_and_one_copy_of_the_embedding(pp: int, tied: bool, depths: int) -> None:
    """Where the embedding is on another rank and the output projection is not a copy of it."""
    plan = ParallelPlan(pp=pp, stage_layers=(3, 3) if pp == 2 else None)
    without, with_heads = (program(plan, number, tied_embeddings=tied) for number in (0, depths))
    more = depths * DEPTH + (VOCAB * H if pp == 2 and not tied else 0)
    widths = (2, 4, 12)  # bf16 weights, fp32 gradients, fp32 copies and two moments
    assert [a - b for a, b in zip(held(with_heads, pp - 1), held(without, pp - 1), strict=True)] == [
        w * more for w in widths
    ]
    if pp == 2:
        assert held(with_heads, 0) == held(without, 0)
    sums = [op.communication for op in with_heads.ops if op.stream is Stream.TIED]
    assert sums == [Communication(CollectiveKind.ALL_REDUCE, 4 * VOCAB * H, (0, 1))] * (2 if pp == 2 else 0)


@pytest.mark.parametrize(("pp", "virtual_stages"), [(1, 1), (2, 1), (3, 2)])
def test_they_are_in_the_last_stage(pp: int, virtual_stages: int) -> None:
    lowered = program(ParallelPlan(pp=pp, virtual_stages=virtual_stages), 2)
    last = pp * virtual_stages - 1
    names = {op.name: (op.rank, op.action.stage) for op in lowered.ops if op.name.startswith(("mtp", "head"))}
    assert names == dict.fromkeys(("mtp 1", "mtp 2", "head"), (pp - 1, last))


def test_a_stage_may_have_no_block_beside_them() -> None:
    """As Megatron Bridge's layout "Et|(tt|)*30mL" has it."""
    model, plan = MODEL.model_copy(update={"mtp_num_layers": 1}), {"pp": 2, "virtual_stages": 2}
    prediction = predict(job_of(model, {**plan, "stage_layers": (2, 2, 2, 0)}, software=CORE))
    assert [b - a for a, b in pairwise(prediction.assignment.boundaries)] == [3, 2, 2, 2]
    assert {"mtp forward", "mtp backward"} <= {term.name for term in prediction.terms}


def test_a_pass_needs_what_one_through_a_block_does_beside_gradients_of_what_it_hands_on() -> None:
    """Of the hidden states that the head, or the next of them, takes as well."""
    state = CORE.state(TrainingSpec(global_batch_size=1, precision="bf16"), ParallelPlan())
    model = MODEL.model_copy(update={"mtp_num_layers": 2})
    block, *later = (
        layer_footprint(layer, 3, state, recomputation(layer, "none"))
        for layer in (model.layers[1], *model.layers[-3:-1])
    )
    forwarded = 3 * TOKENS * H * 2
    assert [peak(layer.forward) for layer in later] == [peak(block.forward)] * 2
    assert [peak(layer.backward) - peak(block.backward) for layer in later] == [forwarded, 2 * forwarded]


def test_the_head_keeps_logits_of_every_depth_and_computes_those_of_one_at_a_time() -> None:
    state = CORE.state(TrainingSpec(global_batch_size=1, precision="bf16"), ParallelPlan())
    heads = [
        CORE.layers_of(MODEL.model_copy(update={"mtp_num_layers": depths}), ParallelPlan())[-1] for depths in (0, 2)
    ]
    alone, several = (layer_footprint(head, 3, state, recomputation(head, "none")) for head in heads)
    assert several.logits == 3 * alone.logits == 3 * (3 * TOKENS * VOCAB * 2)
    assert peak(several.forward) == peak(alone.forward)
    assert peak(several.backward) <= peak(alone.backward)


PLANS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "1f1b, whole layers again": (1, False, {"pp": 2, "dp_shard": 2, "zero_stage": 1, "recompute": "full"}),
    "interleaved, tied": (1, True, {"pp": 2, "virtual_stages": 2, "stage_layers": (1, 2, 2, 1)}),
    "experts apart beside tensor parallelism": (2, False, {"dp_shard": 2, "zero_stage": 1, "ep": 2, "tp": 2, "etp": 1}),
    "context parallelism, modules again": (1, False, {"cp": 2, "cp_comm": "a2a", "pp": 2, "recompute": "selective"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_keep_the_laws(name: str) -> None:
    depths, tied, fields = PLANS[name]
    model = MODEL.model_copy(update={"mtp_num_layers": depths, "tied_embeddings": tied})
    keeps_the_laws(job_of(model, fields, software=CORE, num_microbatches=3))
