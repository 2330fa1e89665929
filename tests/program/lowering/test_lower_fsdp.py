"""What FSDP issues, by hand: two blocks, so units are embedding, block 0, block 1 and head."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.program import HostCalls, LayerWork, MemoryCategory, Phase, Program, Stream
from simplan.sim.memory import memory_peak
from simplan.software.software import SoftwareSpec
from tests.jobs import Plan, job_of, lowered, tiny_model

TORCH = catalog.software("torch")


def model(**fields: Any) -> ModelSpec:
    return tiny_model(**{"tied_embeddings": False, **fields})


def program(plan: Plan, *, m: int = 1, level: int = 2, software: SoftwareSpec = TORCH, **fields: Any) -> Program:
    return lowered(job_of(model(**fields), plan, software=software, num_microbatches=m, precision="fp32"), level)


def issued(program: Program, rank: int = 0) -> list[str]:
    """``action: collective unit`` of everything that moves, in order of issue."""
    ops = [program.ops[index] for index in program.by_rank[rank]]
    return [
        f"{op.action}: {op.name}" for op in ops if op.communication and op.stream in (Stream.SHARD, Stream.REPLICATE)
    ]


FORWARD = [f"0F0: all_gather {unit}" for unit in ("embedding", "block 0", "block 1", "head")]
RESHARDED = [
    "0B0: all_gather block 1",  # the head stayed; the unit before it is gathered ahead
    "0B0: reduce_scatter head",
    "0B0: all_gather block 0",
    "0B0: reduce_scatter block 1",
    "0B0: all_gather embedding",
    "0B0: reduce_scatter block 0",
    "0B0: reduce_scatter embedding",
]
KEPT = [f"0B0: reduce_scatter {unit}" for unit in ("head", "block 1", "block 0", "embedding")]


def test_resharding_gathers_again_one_unit_ahead() -> None:
    assert issued(program(ParallelPlan(dp_shard=2))) == FORWARD + RESHARDED


@pytest.mark.parametrize("fields", [{"reshard_after_forward": False}, {"zero_stage": 2}])
def test_without_resharding_backward_only_reduces(fields: dict[str, Any]) -> None:
    assert issued(program(ParallelPlan(dp_shard=2, **fields))) == FORWARD + KEPT


def test_replicas_all_reduce_the_shard() -> None:
    names = issued(program(ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=2)))
    assert names[4:] == [line for kept in KEPT for line in (kept, kept.replace("reduce_scatter", "all_reduce"))]


def test_tied_weights_are_one_unit_that_stays() -> None:
    names = issued(program(ParallelPlan(dp_shard=2), tied_embeddings=True))
    assert names == [
        *(f"0F0: all_gather {unit}" for unit in ("embedding", "block 0", "block 1")),
        "0B0: all_gather block 1",
        "0B0: all_gather block 0",
        "0B0: reduce_scatter block 1",
        "0B0: reduce_scatter block 0",
        "0B0: reduce_scatter embedding",
    ]


def test_gradients_are_reduced_once_a_step_or_every_microbatch() -> None:
    once = issued(program(ParallelPlan(dp_shard=2, zero_stage=2, grad_sync="step"), m=3))
    lines = issued(program(ParallelPlan(dp_shard=2, zero_stage=2), m=3))
    assert sum("reduce_scatter" in line for line in once) == 4
    assert all(line.startswith("0B2") for line in once if "reduce_scatter" in line)
    assert sum("reduce_scatter" in line for line in lines) == 12
    assert sum("all_gather" in line for line in once) == sum("all_gather" in line for line in lines) == 12


def test_a_pipeline_gathers_stages_and_reduces_at_the_end() -> None:
    names = issued(program(ParallelPlan(pp=2, dp_shard=2, schedule="gpipe"), m=2))
    assert names == [
        "0UNSHARD: all_gather embedding",
        "0UNSHARD: all_gather block 0",
        "0REDUCE_GRAD: reduce_scatter embedding",
        "0REDUCE_GRAD: reduce_scatter block 0",
    ]


@pytest.mark.parametrize("m", [1, 3])
def test_bytes_of_a_step(m: int) -> None:
    """In a microbatch, ZeRO-3 moves every parameter twice (but the head, which stays) and every gradient once."""
    lowered = program(ParallelPlan(dp_shard=2), m=m)
    communications = [op.communication for op in lowered.ops if op.rank == 0 and op.communication]
    gathered = sum(communication.num_bytes for communication in communications if communication.kind == "all_gather")
    reduced = sum(communication.num_bytes for communication in communications if communication.kind == "reduce_scatter")
    parameters, head = model().num_parameters, model().layers[-1].num_parameters
    assert gathered == 4 * m * (2 * parameters - head)
    assert reduced == 4 * m * parameters


def test_rows_that_do_not_divide_are_padded() -> None:
    """Three shards of 256 rows hold 86 each; each of the other tensors is padded by rows of its own width."""
    lowered = program(ParallelPlan(dp_shard=3))
    layers = model().layers
    padded = sum(
        4 * -(-p.shape[0] // 3) * 3 * (p.num_elements // p.shape[0]) for layer in layers for p in layer.parameters
    )
    gathers = [
        op.communication.num_bytes
        for op in lowered.ops
        if op.rank == 0 and op.communication and "all_gather" in op.name
    ]
    assert sum(gathers[:4]) == padded
    assert lowered.persistent_bytes[0][MemoryCategory.PARAMETERS] == padded // 3


def test_whole_gradients_wait_for_reduce_grad() -> None:
    """In a pipeline gradients add up unsharded: a rank holds all of its stage's and a new one, and later its shard."""
    lowered = program(ParallelPlan(pp=2, dp_shard=2, schedule="gpipe"), m=2, vocab_size=16384)
    peak = memory_peak(lowered, 0)
    layers = model(vocab_size=16384).layers[:2]
    stage = sum(layer.num_parameters for layer in layers)
    assert peak.by_category[MemoryCategory.GRADIENTS] == 4 * (stage + 16384 * 64)


def test_the_all_reduce_of_a_shard_does_not_hold_up_the_next_unit() -> None:
    """torch reuses the buffer of the reduce-scatter, and waits for all-reduces at the end of backward only."""
    lowered = program(ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=2))
    ops = [lowered.ops[index] for index in lowered.by_rank[0]]
    copies = [op for op in ops if str(op.action) == "0B0" and op.name.startswith("copy")]
    awaited = {lowered.ops[wait].stream for op in copies for wait in op.waits}
    assert awaited == {Stream.SHARD}
    (last,) = [op for op in ops if op.name == "wait for gradients"]
    assert Stream.REPLICATE in {lowered.ops[wait].stream for wait in last.waits}


@pytest.mark.parametrize("copies", [True, False])
def test_a_framework_without_flat_buffers_copies_nothing(copies: bool) -> None:
    software = TORCH.model_copy(update={"runtime": "torch" if copies else "xla"})
    lowered = program({"dp_shard": 4}, software=software)
    phases = {work.phase for op in lowered.ops for work in op.work if isinstance(work, LayerWork)}
    assert ({Phase.GATHER_COPY, Phase.REDUCE_COPY} <= phases) == copies
    assert copies or not {Phase.GATHER_COPY, Phase.REDUCE_COPY} & phases


def _with_lists(limit: int | None, **plan: Any) -> Program:
    """Units have 1 to 4 matrices: of a block of width h these are 3 h^2, h^2, 4 h^2 and 4 h^2, of the embedding two."""
    software = TORCH.model_copy(update={"per_rank_tensor_lists": True, "live_elements": limit})
    return program({"dp_shard": 4, **plan}, software=software)


def test_a_host_lists_the_parts_of_every_matrix_for_every_rank() -> None:
    """Gathers of 4, 4, 4 and 1 (head) matrices in forward, of all but the head again in backward, and reductions."""
    lowered = _with_lists(None)
    calls = [(op.name, w.num_calls) for op in lowered.ops if op.rank == 0 for w in op.work if isinstance(w, HostCalls)]
    of_unit = {"embedding": 2 * 4, "block 0": 4 * 4, "block 1": 4 * 4, "head": 1 * 4}
    assert all(number == of_unit[name.split(" parts ")[1]] for name, number in calls)
    assert sorted(name for name, _ in calls) == sorted(
        f"{what} parts {unit}"
        for what in ("list", "copy")
        for unit in of_unit
        for _ in range(2 if unit == "head" else 3)
    )
    assert issued(lowered) == issued(program(ParallelPlan(dp_shard=4)))


def test_weights_freed_between_second_forward_and_backward_are_gathered_again() -> None:
    """Until backward of (3, 1, 4, 4) h^2 twice what comes after them is used: (18, 16, 8, 0) h^2."""
    h2 = 64 * 64
    for limit, again in ((17 * h2, 3 * h2), (9 * h2, 4 * h2), (5 * h2, 8 * h2)):
        program = _with_lists(limit, recompute="full")
        gathered = [
            op.communication.num_bytes for op in program.ops if op.rank == 0 and "again" in op.name and op.communication
        ]
        assert gathered == [again * 4] * 2


def test_beside_a_matrix_that_leaves_no_room_nothing_is_gathered() -> None:
    """Then every gather waits for all that was computed before it."""
    for limit, alone in ((64 * 64 * 4, True), (64 * 256 * 4, False)):
        program = _with_lists(limit)
        gathers = [i for i, op in enumerate(program.ops) if op.rank == 0 and op.name == "all_gather block 1"]
        forward = program.ops[gathers[0]]
        block_0 = next(i for i, op in enumerate(program.ops) if op.rank == 0 and op.name == "block 0")
        assert any(wait >= block_0 for wait in forward.waits) == alone


def test_copies_are_launched_while_a_gather_moves_bytes_and_before_a_reduction() -> None:
    """A gather waits for the views of its parts, a reduction for the copies too, and the host for the reduction."""
    program = _with_lists(64 * 64 * 4)
    ops = [program.ops[index] for index in program.by_rank[0]]
    names = {index: program.ops[index].name for index in program.by_rank[0]}
    gather = next(op for op in ops if op.name == "all_gather block 1")
    assert "list parts block 1" in {names[wait] for wait in gather.waits}
    order = [op.name for op in ops if "block 1" in op.name and "forward" not in op.name]
    assert order.index("list parts block 1") < order.index("all_gather block 1") < order.index("copy parts block 1")
    last = len(order) - 1 - order[::-1].index("reduce_scatter block 1")
    assert order[last - 3 : last - 1] == ["list parts block 1", "copy parts block 1"]
    after = next(op for op in ops if any(names[wait] == "reduce_scatter block 1" for wait in op.waits))
    assert "block 0" in after.name


def test_a_ring_sends_keys_once_they_are_made() -> None:
    """A hop waits for the projections of its own block, and runs beside the attention core only."""
    lowered = program(ParallelPlan(cp=4), seq_len=32)
    ops = [lowered.ops[index] for index in lowered.by_rank[0]]
    hops = [op for op in ops if op.stream is Stream.CONTEXT and str(op.action) == "0F0" and "ring" in op.name]
    assert len(hops) == 2 * 3
    for hop in hops:
        assert {lowered.ops[wait].name for wait in hop.waits if lowered.ops[wait].stream is Stream.COMPUTE} == {
            hop.name.removeprefix("ring ")
        }
