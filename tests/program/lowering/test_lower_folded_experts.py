"""Experts on a mesh of their own beside tensor and context parallelism, by hand: one dense block, two with experts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from simplan.model.layer import CollectiveKind, Gemm
from simplan.plan.plan import ParallelPlan
from simplan.program.action import ActionKind
from simplan.program.program import Communication, LayerWork, MemoryCategory, Phase, Program, Stream
from tests.jobs import job_of, lowered, tiny_model
from tests.program.lowering.test_lower_moe import EXPERT, EXPERTS, MODEL, TOKENS, WIDTH, H, communications, program
from tests.test_random_plans import keeps_the_laws

LATENT = tiny_model(
    "deepseek", num_hidden_layers=4, hidden_size=H, num_experts=EXPERTS, top_k=2, moe_intermediate_size=WIDTH,
    shared_expert_intermediate_size=WIDTH, num_dense_layers=1, seq_len=TOKENS,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=10,
)  # fmt: skip
SPLIT = [  # plan; ranks that rank 5 of 8 exchanges tokens with, and those that sum gradients of its experts
    ({"dp_replicate": 4, "tp": 2, "ep": 4}, (4, 5, 6, 7), (1, 5)),
    ({"dp_replicate": 4, "tp": 2, "ep": 2}, (4, 5), (1, 3, 5, 7)),
    ({"dp_replicate": 4, "tp": 2}, (), tuple(range(8))),
    ({"dp_replicate": 4, "tp": 2, "ep": 2, "etp": 2}, (5, 7), (1, 5)),
    ({"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 8}, tuple(range(8)), ()),
    ({"dp_replicate": 4, "cp": 2, "cp_comm": "a2a", "ep": 2}, (4, 5), (1, 3, 5, 7)),
]


@pytest.mark.parametrize(("fields", "exchanging", "alike"), SPLIT)
def test_experts_go_over_ranks_that_split_attention(
    fields: dict[str, Any], exchanging: tuple[int, ...], alike: tuple[int, ...]
) -> None:
    """Of b sequences each rank sends its own part of the tokens; gradients of its experts are theirs alone."""
    plan = ParallelPlan.model_validate({**fields, "microbatch_size": 3})
    lowered = program(plan, m=2)
    tokens = TOKENS // (plan.tp * plan.cp)
    places = EXPERTS * math.ceil(1.5 * tokens * 2 / EXPERTS)
    sent = communications(lowered, Stream.EXPERT, rank=5)
    wanted = {Communication(CollectiveKind.ALL_TO_ALL, 4 * 3 * places * H, exchanging)} if exchanging else set()
    if plan.etp > 1:
        kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        wanted |= {Communication(kind, 4 * 3 * places * H * plan.etp, (4, 5)) for kind in kinds}
    assert {communication for _, communication in sent} == wanted
    assert len(sent) == 2 * 2 * 4 * ((plan.ep > 1) + (plan.etp > 1))  # microbatches, blocks, there and back twice
    matrix = Communication(CollectiveKind.ALL_REDUCE, 4 * (EXPERTS // plan.ep) * H * WIDTH // plan.etp, alike)
    assert communications(lowered, Stream.EXPERT_DATA, rank=5) == [("0REDUCE_GRAD", matrix)] * (6 if alike else 0)


@pytest.mark.parametrize(("fields", "exchanging", "alike"), SPLIT)
def test_every_weight_is_somewhere_once_and_so_is_its_work(
    fields: dict[str, Any], exchanging: tuple[int, ...], alike: tuple[int, ...]
) -> None:
    """Over all ranks: experts as often as ranks have the same ones; states, and products, by hand."""
    del exchanging
    plan = ParallelPlan.model_validate(fields)
    lowered = program(plan)
    experts = 2 * EXPERTS * EXPERT
    copies = max(1, len(alike))
    held = sum(resting[MemoryCategory.PARAMETERS] for resting in lowered.persistent_bytes.values()) // 4
    assert sum(_experts_of(lowered, rank) for rank in lowered.ranks) == copies * experts
    whole = [p.num_elements for layer in MODEL.layers_of(plan.shard) for p in layer.parameters if not p.expert]
    assert held == copies * experts + plan.num_devices * sum(whole)
    products = sum(
        kernel.computed_flops
        for op in lowered.ops
        for work in op.work
        if isinstance(work, LayerWork) and work.phase is Phase.FORWARD
        for index, kernel in enumerate(work.layer.kernels)
        if isinstance(kernel, Gemm) and kernel.name.startswith("experts_")
        if work.kernels is None or index in work.kernels
    )
    tokens = TOKENS // (plan.tp * plan.cp)
    places = EXPERTS * math.ceil(1.5 * tokens * 2 / EXPERTS)
    assert products == plan.num_devices * 2 * (2 * places * 3 * H * WIDTH)


def _experts_of(program: Program, rank: int) -> int:
    works = [w for index in program.by_rank[rank] for w in program.ops[index].work if isinstance(w, LayerWork)]
    updated = {id(w): w.layer for w in works if w.phase is Phase.OPTIMIZER}
    return sum(p.num_elements for layer in updated.values() for p in layer.parameters if p.expert)


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "etp"), [(2, 1, 2, 1), (2, 1, 4, 1), (2, 1, 2, 2), (2, 2, 8, 1), (1, 2, 2, 1)]
)
def test_megatron_divides_states_of_experts_on_a_mesh_of_their_own(tp: int, cp: int, ep: int, etp: int) -> None:
    """12 bytes of states a weight: of experts over dp x cp x tp / (ep x etp) ranks, of all others over dp x cp."""
    ring = {"cp": cp, "cp_comm": "a2a"} if cp > 1 else {}
    plan = ParallelPlan.model_validate({"dp_shard": 4, "zero_stage": 1, "tp": tp, "ep": ep, "etp": etp, **ring})
    program = lowered(job_of(MODEL, plan, software="megatron-core", num_microbatches=2))
    layers = MODEL.layers_of(plan.shard)
    of_experts = sum(p.num_elements for layer in layers for p in layer.parameters if p.expert)
    rest = sum(p.num_elements for layer in layers for p in layer.parameters) - of_experts
    assert of_experts * ep * etp == 2 * EXPERTS * EXPERT
    alike = 4 * cp * tp // (ep * etp)
    for resting in program.persistent_bytes.values():
        assert resting[MemoryCategory.OPTIMIZER] == pytest.approx(
            12 * (of_experts / alike + rest / (4 * cp)), abs=12 * 60
        )
    reduced = [m for _, m in communications(program, Stream.EXPERT_DATA) if m.kind is CollectiveKind.REDUCE_SCATTER]
    assert {len(m.ranks) for m in reduced} == ({alike} if alike > 1 else set())
    assert sum(m.num_bytes for m in reduced) == (4 * of_experts if alike > 1 else 0)


SHARDED = [  # plan; ranks among which rank 5 shards its experts, and those that have the same shard
    ({"dp_shard": 8, "ep": 2}, (1, 3, 5, 7), ()),
    ({"dp_shard": 4, "dp_replicate": 2, "ep": 2}, (5, 7), (1, 5)),
    ({"dp_shard": 4, "tp": 2, "ep": 4}, (1, 5), ()),
    ({"dp_shard": 4, "tp": 2}, tuple(range(8)), ()),
    ({"dp_shard": 4, "tp": 2, "ep": 2, "etp": 2}, (1, 5), ()),
    ({"dp_shard": 2, "dp_replicate": 2, "cp": 2, "cp_comm": "a2a", "ep": 2}, (5, 7), (1, 5)),
]


@pytest.mark.parametrize(("fields", "shards", "replicas"), SHARDED)
def test_fsdp_shards_experts_among_ranks_that_have_the_same(
    fields: dict[str, Any], shards: tuple[int, ...], replicas: tuple[int, ...]
) -> None:
    """torchtitan's two meshes: every expert on dp_shard x cp x tp / (ep x etp) ranks, all else on dp_shard x cp."""
    plan = ParallelPlan.model_validate(fields)
    lowered = program(plan)
    layers = MODEL.layers_of(plan.shard)
    of_experts = sum(p.num_elements for p in layers[-2].parameters if p.expert)
    rest = sum(p.num_elements for layer in layers for p in layer.parameters if not p.expert)
    assert of_experts * plan.ep * plan.etp == EXPERTS * EXPERT
    held = rest // (plan.dp_shard * plan.cp) + 2 * of_experts // len(shards)
    for resting in lowered.persistent_bytes.values():
        assert resting[MemoryCategory.PARAMETERS] == 4 * held
        assert resting[MemoryCategory.GRADIENTS] == 0  # made in backward
        assert resting[MemoryCategory.OPTIMIZER] == 8 * held
    moved = [
        communication
        for _, communication in communications(lowered, Stream.SHARD, rank=5)
        if communication.ranks == shards
    ]
    gather, scatter = (
        Communication(kind, 4 * of_experts, shards)
        for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    )
    if plan.dp_shard * plan.cp != len(shards):  # else other units have this group, too
        assert Counter(moved) == {gather: 2 * 2, scatter: 2}
    copies = [
        m for _, m in communications(lowered, Stream.REPLICATE, rank=5) if m.num_bytes == 4 * of_experts // len(shards)
    ]
    assert copies == [Communication(CollectiveKind.ALL_REDUCE, 4 * of_experts // len(shards), replicas)] * (
        2 if replicas else 0
    )
    assert not communications(lowered, Stream.EXPERT_DATA, rank=5)


def test_experts_are_gathered_after_the_rest_of_their_layer_and_reduced_before_it() -> None:
    lowered = program(ParallelPlan(dp_shard=4, ep=2))
    names = [lowered.ops[i].name for i in lowered.by_rank[0] if lowered.ops[i].stream is Stream.SHARD]
    blocks = [name for name in names if "block 1" in name or "block 2" in name]
    forward = [f"all_gather block {n}{of}" for n in (1, 2) for of in ("", " experts")]
    backward = [
        "all_gather block 2",
        "all_gather block 2 experts",
        "all_gather block 1",
        "reduce_scatter block 2 experts",
    ]
    backward += ["reduce_scatter block 2", "all_gather block 1 experts", "reduce_scatter block 1 experts"]
    assert blocks == [*forward, *backward, "reduce_scatter block 1"]


def test_in_a_pipeline_both_ways_experts_come_after_the_rest_of_their_layer() -> None:
    """torch gathers and reduces a stage's units in the order of its modules, which has parents first."""
    lowered = program(ParallelPlan(dp_shard=4, ep=2, pp=2))
    ops = [lowered.ops[i] for i in lowered.by_rank[lowered.ranks[-1]] if lowered.ops[i].stream is Stream.SHARD]
    units = ["block 2", "block 2 experts", "head"]
    assert [op.name for op in ops if op.action.kind is ActionKind.UNSHARD][-3:] == [f"all_gather {u}" for u in units]
    assert [op.name for op in ops if op.action.kind is ActionKind.REDUCE_GRAD][-3:] == [
        f"reduce_scatter {u}" for u in units
    ]


@pytest.mark.parametrize(
    "plan",
    [
        {"dp_shard": 2, "dp_replicate": 2, "tp": 2, "ep": 2, "recompute": "full"},
        pytest.param({"dp_shard": 4, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 4, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
        {"dp_shard": 2, "cp": 2, "cp_comm": "all_gather", "ep": 2, "reshard_after_forward": False},
    ],
)
def test_experts_sharded_by_fsdp_keep_the_laws(plan: dict[str, Any]) -> None:
    keeps_the_laws(job_of(MODEL, plan, num_microbatches=2))


@pytest.mark.parametrize(
    ("plan", "software"),
    [
        pytest.param(
            {"tp": 2, "dp_shard": 2, "zero_stage": 1, "ep": 4, "pp": 2, "recompute": "full"},
            "megatron-bridge",
            marks=pytest.mark.slow,
        ),
        ({"tp": 2, "ep": 2, "etp": 2, "dp_shard": 2, "zero_stage": 1}, "megatron-core"),
    ],
)
def test_latent_attention_beside_tensor_parallelism_keeps_the_laws(plan: dict[str, Any], software: str) -> None:
    keeps_the_laws(job_of(LATENT, plan, software=software, num_microbatches=3))
