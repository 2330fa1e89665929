"""What expert parallelism exchanges, reduces and holds, by hand: one dense block, two with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simplan import catalog
from simplan.model.layer import CollectiveKind
from simplan.model.low_precision import linears
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.predict.build import cost_model
from simplan.program.folding import fold
from simplan.program.lowering.fsdp_units import padded_elements, shard_dimension
from simplan.program.lowering.lower import Lowering
from simplan.program.memory.low_precision_footprint import keeping_quantized, kept_weight_bytes, persistent_weight_bytes
from simplan.program.program import Communication, LayerWork, MemoryCategory, Phase, Program, Stream
from simplan.program.timeline import SpanKind
from simplan.training import TrainingSpec
from tests.jobs import job_of, lowered, problems, states_at_update, tiny_model
from tests.test_random_plans import keeps_the_laws

H, WIDTH, EXPERTS, TOKENS = 64, 48, 8, 16
MODEL = tiny_model(
    "moe", num_hidden_layers=3, hidden_size=H, num_experts=EXPERTS, top_k=2, moe_intermediate_size=WIDTH,
    num_dense_layers=1, capacity_factor=1.5, seq_len=TOKENS,
)  # fmt: skip
EXPERT = 3 * H * WIDTH  # weights of one
PLACES = EXPERTS * 6  # of a sequence: each expert has 1.5 times its even share of 16 x 2 / 8


def program(plan: ParallelPlan, *, m: int = 1, level: int = 2, folded: bool = False, **fields: Any) -> Program:
    folding = fold(RankMapping.of(plan), [np.arange(plan.num_devices) // 4]) if folded else None
    job = job_of(MODEL.model_copy(update=fields), plan, num_microbatches=m, precision="fp32")
    return lowered(job, Lowering(level, folding))


def communications(program: Program, stream: Stream, rank: int = 0) -> list[tuple[str, Communication]]:
    """By action, in order of issue."""
    ops = [program.ops[index] for index in program.by_rank[rank] if program.ops[index].stream is stream]
    return [(str(op.action), op.communication) for op in ops if op.communication]


def test_every_block_with_experts_exchanges_twice_each_way() -> None:
    sent = communications(program(ParallelPlan(dp_replicate=4, ep=2, microbatch_size=3), m=2), Stream.EXPERT, rank=3)
    assert [action for action, _ in sent] == [a for a in ("0F0", "0B0", "0F1", "0B1") for _ in range(4)]
    assert {communication for _, communication in sent} == {
        Communication(CollectiveKind.ALL_TO_ALL, 4 * 3 * PLACES * H, (2, 3))
    }


@pytest.mark.parametrize(("recompute", "collectives"), [("full", 8), ("selective", 4)])
def test_recomputed_layers_communicate_again(recompute: Any, collectives: int) -> None:
    """In backward: two blocks, each there and back, and with full recomputation there and back before that."""
    sent = communications(program(ParallelPlan(dp_replicate=2, ep=2, recompute=recompute)), Stream.EXPERT)
    assert [action for action, _ in sent].count("0B0") == collectives


def test_expert_outputs_are_recomputed_before_backward_weighs_them() -> None:
    """The last block's backward does the sum of the residual stream, runs forward again, and only then goes on."""
    lowered = program(ParallelPlan(dp_replicate=2, ep=2, recompute="full"))
    passes = [op for op in lowered.ops if op.rank == 0 and str(op.action) == "0B0" and op.name.startswith("block 2")]
    works = [(op.kind, work) for op in passes for work in op.work if isinstance(work, LayerWork)]
    (first, work), (second, _) = works[:2]
    assert (first, second) == (SpanKind.COMPUTE, SpanKind.RECOMPUTE)
    assert [work.layer.kernels[index].name for index in work.kernels or ()] == ["residual2"]


def test_zero_1_deals_out_all_but_the_experts() -> None:
    """What the ranks of a shard group update: every shared weight once, all experts, each by the rank that has it."""
    lowered = program(ParallelPlan(dp_shard=2, zero_stage=1, ep=2))
    works = [w for op in lowered.ops for w in op.work if isinstance(w, LayerWork) and w.phase is Phase.OPTIMIZER]
    assert sum(work.num_parameters for work in works) == MODEL.num_parameters
    of_experts = 2 * EXPERTS * EXPERT // 2
    for rank in (0, 1):
        resting = lowered.persistent_bytes[rank]
        assert resting[MemoryCategory.OPTIMIZER] >= 8 * of_experts
        assert resting[MemoryCategory.PARAMETERS] == 4 * (MODEL.num_parameters - of_experts)


@pytest.mark.parametrize(
    ("plan", "group", "experts"),
    [
        (ParallelPlan(dp_replicate=4, ep=2), (1, 3), 4),
        (ParallelPlan(dp_replicate=4, ep=4), None, 2),
        (ParallelPlan(dp_shard=4, ep=4), None, 2),
        (ParallelPlan(dp_replicate=2, dp_shard=2, ep=2), (1, 3), 4),
        (ParallelPlan(dp_replicate=2, dp_shard=2, ep=4), None, 2),
        (ParallelPlan(dp_replicate=4), None, 0),
    ],
)
def test_experts_are_averaged_over_the_ranks_that_have_them(
    plan: ParallelPlan, group: tuple[int, ...] | None, experts: int
) -> None:
    sent = communications(program(plan, m=2), Stream.EXPERT_DATA, rank=1)
    matrix = Communication(CollectiveKind.ALL_REDUCE, 4 * experts * H * WIDTH, group or ())
    assert sent == [("0REDUCE_GRAD", matrix)] * (6 if group else 0)


def test_fsdp_gathers_and_reduces_all_but_the_experts() -> None:
    """The router has 8 rows, and all others divide by 4, too: nothing is padded."""
    whole = MODEL.num_parameters - 2 * EXPERTS * EXPERT
    sent = communications(program(ParallelPlan(dp_shard=4, ep=4)), Stream.SHARD)
    for kind, passes in (("all_gather", 2), ("reduce_scatter", 1)):
        moved = sum(communication.num_bytes for _, communication in sent if communication.kind == kind)
        kept = MODEL.layers[-1].num_parameters if kind == "all_gather" else 0  # the head stays from forward to backward
        assert moved == 4 * (passes * whole - kept)


@pytest.mark.parametrize(
    ("plan", "sharded"),
    [(ParallelPlan(dp_replicate=4, ep=4), 1), (ParallelPlan(dp_shard=4, ep=4), 4), (ParallelPlan(dp_shard=4), 4)],
)
def test_states_are_those_of_own_experts_and_own_shards(plan: ParallelPlan, sharded: int) -> None:
    experts = 2 * EXPERTS * EXPERT
    rest = MODEL.num_parameters - experts
    held = rest // sharded + experts // 4 if plan.ep > 1 else MODEL.num_parameters // 4
    lowered = program(plan)
    resting = lowered.persistent_bytes[0]
    assert resting[MemoryCategory.PARAMETERS] == 4 * held
    assert resting[MemoryCategory.GRADIENTS] == 0, "they come later"
    assert resting[MemoryCategory.OPTIMIZER] == 8 * held
    assert states_at_update(lowered) == 16 * held
    if not plan.shards_parameters:  # DDP's buckets have no experts
        assert resting[MemoryCategory.BUFFERS] == 4 * rest


def test_ddp_rebuilds_buckets_without_experts() -> None:
    whole = MODEL.num_parameters - 2 * EXPERTS * EXPERT
    changes = {"software.gradient_as_bucket_view": True, "software.zero_grad_set_to_none": False}
    job = job_of(MODEL, ParallelPlan(dp_replicate=4, ep=2), precision="fp32").with_changes(changes)
    assert lowered(job).rebuild_bytes[0] == 4 * whole


def test_more_places_need_more_memory() -> None:
    """A place takes a row of h, four of an expert's width, in fp32, in each of two blocks; and an index."""

    def kept(factor: float) -> int:
        lowered = program(ParallelPlan(dp_replicate=2, ep=2), capacity_factor=factor)
        forward = [op for op in lowered.ops if op.rank == 0 and str(op.action) == "0F0"]
        effects = [effect for op in forward for effect in op.memory]
        return sum(effect.after_bytes for effect in effects if effect.category is MemoryCategory.ACTIVATIONS)

    assert kept(3.0) - kept(1.5) == 2 * PLACES * (4 * (H + 4 * WIDTH) + 8)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        pytest.param({"dp_replicate": 4, "ep": 2}, marks=pytest.mark.slow),
        {"dp_replicate": 4, "ep": 4},
        pytest.param({"dp_shard": 4}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 4, "ep": 4}, marks=pytest.mark.slow),
        {"dp_shard": 2, "dp_replicate": 2, "ep": 2, "reshard_after_forward": False},
        pytest.param({"dp_shard": 2, "dp_replicate": 2, "zero_stage": 1, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_replicate": 2, "ep": 2}, marks=pytest.mark.slow),
        {"pp": 2, "virtual_stages": 2, "dp_shard": 2, "dp_replicate": 2, "ep": 4, "zero_stage": 2},
        pytest.param({"cp": 2, "cp_comm": "a2a", "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "dp_replicate": 2, "ep": 4}, marks=pytest.mark.slow),
        {"tp": 2, "pp": 2, "ep": 2, "etp": 2, "dp_replicate": 2},
        {"tp": 2, "cp": 2, "cp_comm": "all_gather", "ep": 2},
    ],
)
def test_every_plan_keeps_the_laws(plan: dict[str, Any], recompute: str) -> None:
    plan = {**plan, "recompute": recompute, "microbatch_size": 2}
    keeps_the_laws(job_of(MODEL.model_copy(update={"num_hidden_layers": 4}), plan, num_microbatches=3))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp_replicate=8, ep=2),
        ParallelPlan(dp_replicate=8, ep=8),
        ParallelPlan(dp_replicate=2, dp_shard=4, ep=4),
        ParallelPlan(dp_replicate=2, dp_shard=2, pp=2, ep=2),
    ],
)
def test_folded_ranks_do_what_they_stand_for(plan: ParallelPlan, level: int) -> None:
    """On nodes of 4 devices: exchanges inside of one node or over both, the same for all ranks that fold."""
    whole, folded = program(plan, m=2, level=level), program(plan, m=2, level=level, folded=True)
    assert len(folded.ranks) == plan.pp
    for rank, leader in enumerate(folded.stands_for):
        for stream in (Stream.EXPERT, Stream.EXPERT_DATA):
            mine, its = communications(folded, stream, leader), communications(whole, stream, rank)
            assert [(a, m._replace(ranks=())) for a, m in mine] == [(a, m._replace(ranks=())) for a, m in its]
            assert {len(m.ranks) for _, m in mine} == {len(m.ranks) for _, m in its}


@pytest.mark.parametrize("nodes", [(0, 0, 1, 2), (0, 1, 0, 2)])
def test_groups_that_cross_nodes_unlike_do_not_fold(nodes: tuple[int, ...]) -> None:
    """Of the groups that exchange, or else of those that average, one lies in a node and the other one does not."""
    plan = ParallelPlan(dp_replicate=4, ep=2)
    assert len(fold(RankMapping.of(plan), [np.array(nodes)]).ranks) == 2


@pytest.mark.parametrize(("shards", "replicas", "pp"), [(8, 1, 1), (4, 1, 2), (4, 2, 1)])
def test_megatron_divides_states_of_experts_among_the_ranks_that_have_the_same(
    shards: int, replicas: int, pp: int
) -> None:
    """Also where experts are on fewer ranks than the optimizer is sharded over; torch's ZeRO-1 has whole tensors."""
    plan = ParallelPlan(dp_shard=shards, dp_replicate=replicas, zero_stage=1, ep=2, pp=pp)
    job = job_of(MODEL, plan, software="megatron-core", num_microbatches=4)
    keeps_the_laws(job)
    program = lowered(job)
    states = sum(resting[MemoryCategory.OPTIMIZER] for resting in program.persistent_bytes.values())
    assert states == 12 * MODEL.num_parameters * replicas - 12 * (replicas - 1) * 2 * EXPERTS * EXPERT
    last_rank = communications(program, Stream.EXPERT_DATA, rank=plan.num_devices - 1)
    reduced = {communication for _, communication in last_rank if communication.kind is CollectiveKind.REDUCE_SCATTER}
    assert {len(communication.ranks) for communication in reduced} == {plan.dp // 2}
    assert any("sharding one expert over several" in sentence for sentence in problems(MODEL, plan))


@pytest.mark.parametrize("ep", [1, 2, EXPERTS])
@pytest.mark.parametrize("shared", [0, WIDTH])
@pytest.mark.parametrize("width", [WIDTH, H])
def test_transformer_engine_quantizes_the_inputs_of_experts(ep: int, shared: int, width: int) -> None:
    """Their places and the gated products, once each; the router reads the norm's output in 16 bits, which stays."""
    software, plan = catalog.software("megatron-bridge"), ParallelPlan(dp_replicate=ep, ep=ep)
    model = MODEL.model_copy(update={"shared_expert_intermediate_size": shared, "moe_intermediate_size": width})
    training = TrainingSpec(global_batch_size=ep, precision="fp8")
    state = software.state(training, plan)
    block = keeping_quantized(software.layers_of(model, plan)[2], state.linear, joined=True)
    scale = 4
    elements_of = {tensor.name: tensor.elements - scale for tensor in block.saved if tensor.name.endswith("in fp8")}
    wanted = {
        "q input in fp8": TOKENS * H,
        "proj input in fp8": TOKENS * H,
        "experts_gate input in fp8": PLACES * H,
        "experts_down input in fp8": PLACES * width,
    }
    if shared:
        wanted |= {"shared_gate input in fp8": TOKENS * H, "shared_down input in fp8": TOKENS * WIDTH}
    assert elements_of == wanted
    names = {tensor.name for tensor in block.saved}
    assert "norm2 output" in names
    assert not names & {"norm1 output", "places of experts", "experts gated product", "shared gated product"}


def test_experts_in_8_bits_are_the_software_s_choice() -> None:
    """TE has grouped linear layers, torchao's are not grouped. Megatron Core has matrices with one input as one."""
    low: dict[str, int] = {}
    for name in ("megatron-bridge", "torch"):
        job = job_of(MODEL, software=name, precision="fp8")
        state = job.software.state(job.training, job.plan)
        work = LayerWork(job.software.layers_of(MODEL, job.plan)[2], Phase.FORWARD, 1, 0)
        low[name] = sum(" cast of the " in part.name for part in cost_model(job, None).compute(work).parts)
        resting = persistent_weight_bytes(work.layer, state)
        assert (resting != 0) == (name == "megatron-bridge")
    # an input and a weight each of q, k and v in one, proj, gate and up in one, and down; of q, k, v and proj
    assert low == {"megatron-bridge": 4 * 2, "torch": 4 * 2}
    form = catalog.software("megatron-bridge").state(job.training, job.plan).linear
    assert form is not None
    experts = next(gemm for gemm in linears(work.layer, experts=True) if gemm.name == "experts_gate")
    assert kept_weight_bytes(replace(form, weights="microbatch"), experts) == EXPERTS * (H * WIDTH + 4)


@pytest.mark.parametrize(
    ("shape", "shards", "dimension", "padded"),
    [
        ((8, 14336, 4096), 64, 1, 8 * 14336 * 4096),
        ((8, 14336, 4096), 8, 0, 8 * 14336 * 4096),
        ((8, 100, 4096), 64, 2, 8 * 100 * 4096),
        ((8, 100, 100), 64, 0, 8 * 100 * 100),  # refused of torch, which shards only the first dimension unevenly
        ((100, 4096), 64, 0, 128 * 4096),
    ],
)
def test_matrices_of_few_experts_are_not_padded(
    shape: tuple[int, ...], shards: int, dimension: int, padded: int
) -> None:
    assert (shard_dimension(shape, shards), padded_elements(shape, shards)) == (dimension, padded)
