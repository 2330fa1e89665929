"""Copies to and from the host: their bytes, what they wait for, and what memory they save, against closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplan.job import Job
from simplan.predict.build import cost_model
from simplan.predict.simulated import simulate_program
from simplan.program.action import Action
from simplan.program.lower import Lowering, lower
from simplan.program.offload import backward_follows
from simplan.program.partition import assign_stage_layers
from simplan.program.program import HostCopy, MemoryCategory, Op, Program, Stream
from simplan.program.table import plan_table
from simplan.sim.engine import simulate
from simplan.sim.memory import host_peak_bytes, memory_peak
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from tests.jobs import job_to_lower

GPT = ModelSpec(family="gpt", num_hidden_layers=6, hidden_size=64, num_attention_heads=4, vocab_size=512, seq_len=32)
BLOCK_ELEMENTS = 12 * 64 * 64 + 13 * 64
# in fp32, what torch keeps of a block (see test_memory_accounting): 8 + 2 x 4 hidden states of tokens, sums of both
# norms, and the attention's log-sum-exp of each head
KEPT_BYTES = 4 * (16 * 32 * 64 + 4 * 32 + 4 * 32)


def program(microbatches: int = 1, level: int = 2, **plan: Any) -> Program:
    spec = ParallelPlan(**plan)
    training = TrainingSpec(global_batch_size=microbatches * spec.dp, precision="fp32")
    layers = {1: (6,), 2: (3, 3)}[spec.num_stages]
    how = Lowering(level=level)
    table = plan_table(spec, microbatches)
    return lower(
        job_to_lower(GPT, training, spec, catalogue.software("torch")), assign_stage_layers(layers), table, how
    )


def copies(found: Program, rank: int = 0) -> list[Op]:
    return [op for op in (found.ops[i] for i in found.by_rank[rank]) if op.stream in (Stream.TO_HOST, Stream.FROM_HOST)]


def moved(ops: list[Op]) -> list[tuple[str, int]]:
    return [(op.name, work.num_bytes) for op in ops for work in op.work if isinstance(work, HostCopy)]


def test_all_blocks_but_the_last_go_and_come_back_in_reverse_order() -> None:
    """Forward of microbatch 0 is followed at once by its backward, so the last block has no reason to go."""
    blocks = range(1, 6)
    assert moved(copies(program(offload_activations=True))) == [
        *((f"offload block {i - 1}", KEPT_BYTES) for i in blocks),
        *((f"fetch block {i - 1}", KEPT_BYTES) for i in reversed(blocks)),
    ]


def test_the_device_holds_two_blocks_of_forward_and_the_host_the_others() -> None:
    on, off = program(offload_activations=True), program()
    # the peak is in the backward of the last block: beside it are five blocks, or the one that is asked for
    saved = memory_peak(off, 0).by_category[MemoryCategory.ACTIVATIONS]
    saved -= memory_peak(on, 0).by_category[MemoryCategory.ACTIVATIONS]
    assert saved == 4 * KEPT_BYTES
    assert host_peak_bytes(on, 0) == 5 * KEPT_BYTES
    assert host_peak_bytes(off, 0) == 0


@pytest.mark.parametrize("num_moved", [1, 2, 4])
def test_of_some_blocks_on_the_host_the_device_holds_the_others(num_moved: int) -> None:
    """(num_layers - num_offloaded_layers) x what a layer keeps (Transformer Engine, cpu_offload.py)."""
    on, off = program(offload_activations=True, offload_layers=num_moved), program()
    saved = memory_peak(off, 0).by_category[MemoryCategory.ACTIVATIONS]
    saved -= memory_peak(on, 0).by_category[MemoryCategory.ACTIVATIONS]
    assert saved == num_moved * KEPT_BYTES
    assert host_peak_bytes(on, 0) == num_moved * KEPT_BYTES
    assert [name for name, _ in moved(copies(on))][:num_moved] == [f"offload block {i}" for i in range(num_moved)]


def test_what_is_in_one_memory_is_counted_whole() -> None:
    """On a CPU nothing is saved: the host pool is device memory."""
    on = replace(program(offload_activations=True), one_memory=True)
    assert memory_peak(on, 0).total_bytes >= memory_peak(program(), 0).total_bytes


def test_forward_waits_for_the_copy_of_the_second_last_block() -> None:
    """With a link so slow that copies are all there is: block i+2 begins when the copy of block i has ended."""
    found = program(offload_activations=True)
    durations_s = [10.0 if op.stream is Stream.TO_HOST else 1.0 if op.work else 0.0 for op in found.ops]
    times = simulate(found, durations_s)
    ends = {op.name: times.end_s[i] for i, op in enumerate(found.ops) if op.stream is Stream.TO_HOST}
    starts = {
        op.name: times.start_s[i]
        for i, op in enumerate(found.ops)
        if str(op.action) == "0F0" and op.work and op.stream is Stream.COMPUTE
    }
    assert [starts[f"block {i + 2}"] for i in range(4)] == [ends[f"offload block {i}"] for i in range(4)]
    assert starts["head"] == ends["offload block 4"]


def test_backward_asks_for_one_block_ahead() -> None:
    """Copies back as long as a backward: the first is beside the last block's backward, so none is seen."""
    found = program(offload_activations=True)
    durations_s = [0.0] * len(found.ops)
    for i, op in enumerate(found.ops):
        if op.stream is Stream.FROM_HOST or (op.stream is Stream.COMPUTE and op.work and str(op.action) == "0B0"):
            durations_s[i] = 1.0
    assert simulate(found, durations_s).step_time_s == pytest.approx(8)  # embedding, six blocks, head


def test_pipelines_keep_microbatches_in_flight_on_the_host() -> None:
    """1F1B: the first of two stages has two microbatches in flight, each of three blocks."""
    found = program(4, pp=2, offload_activations=True)
    assert host_peak_bytes(found, 0) == 2 * 3 * KEPT_BYTES
    assert all(op.message is None for op in copies(found))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0B0 0F1 0B1", "0F0 0F1"),
        ("0F0 0F1 0B0 0B1", ""),
        ("1RECV_F0 1F0 1SEND_F0 1B0", "1F0"),
        ("0F0 1F0 1B0 0B0", "1F0"),
        ("0F0 0I0 0W0", ""),
    ],
)
def test_where_backward_follows_at_once(row: str, expected: str) -> None:
    actions = [Action.parse(text) for text in row.split()]
    assert backward_follows(actions) == {Action.parse(text) for text in expected.split()}


def test_states_of_every_parameter_come_and_go() -> None:
    found = copies(program(offload_optimizer=True))
    embedding = 8 * (512 + 32) * 64
    layers = [embedding, *[8 * BLOCK_ELEMENTS] * 6, 8 * 2 * 64]  # the head is tied: its norm is all it brings
    for to_host in (False, True):
        stream = Stream.TO_HOST if to_host else Stream.FROM_HOST
        assert [num_bytes for _, num_bytes in moved([op for op in found if op.stream is stream])] == layers
    resting = program(offload_optimizer=True).resting_bytes[0]
    assert (resting[MemoryCategory.OPTIMIZER], resting[MemoryCategory.HOST]) == (0, 8 * GPT.num_parameters)


def test_states_of_two_layers_are_on_the_device() -> None:
    found = program(offload_optimizer=True)
    held = most = 0
    for op in (found.ops[i] for i in found.by_rank[0]):
        for effect in op.memory:
            if effect.category is MemoryCategory.OPTIMIZER:
                most = max(most, held + effect.during_bytes)
                held += effect.after_bytes
    assert (held, most) == (0, 2 * 8 * BLOCK_ELEMENTS)


@pytest.mark.parametrize("update_s", [0.0, 0.5, 1.0])
def test_time_of_a_streamed_update(update_s: float) -> None:
    """Two buffers, each of which is filled, updated and emptied in turn: for n even, n/2 (2 t + u) + t with copies of t
    at least as long as updates of u."""
    found = program(offload_optimizer=True)
    durations_s = []
    for op in found.ops:
        copying = op.stream in (Stream.TO_HOST, Stream.FROM_HOST)
        durations_s.append(1.0 if copying else update_s if op.name.startswith("update ") else 0.0)
    num_layers = 8
    assert simulate(found, durations_s).step_time_s == pytest.approx(num_layers / 2 * (2 + update_s) + 1)


def test_shards_move_their_own_states_only() -> None:
    whole, sharded = (
        sum(num_bytes for _, num_bytes in moved(copies(program(offload_optimizer=True, **plan))))
        for plan in ({}, {"dp_shard": 4})
    )
    assert sharded * 4 == whole
    dealt = program(offload_optimizer=True, dp_shard=4, zero_stage=1)
    assert sum(num_bytes for rank in range(4) for _, num_bytes in moved(copies(dealt, rank))) == whole


def test_level_1_moves_the_same_bytes_in_one_piece() -> None:
    plan = {"offload_optimizer": True, "offload_activations": True}
    fine, coarse = (moved(copies(program(2, level, **plan))) for level in (2, 1))
    assert sum(num_bytes for _, num_bytes in fine) == sum(num_bytes for _, num_bytes in coarse)
    assert len(coarse) == 2 * 2 + 2


def test_copies_are_priced_by_the_host_link() -> None:
    cluster = catalogue.cluster("dgx-a100-80gb", num_devices=1)
    plan = ParallelPlan(offload_optimizer=True)
    training = TrainingSpec(global_batch_size=1, precision="fp32")
    cost = cost_model(Job(GPT, cluster, training, plan, catalogue.software("torch")), None)
    assert cluster.host_link is not None
    # PCIe 4 at four fifths of 31 GB/s, each way
    assert cost.host_copy(HostCopy(31 * 10**9, to_host=True)).seconds == pytest.approx(1.25, rel=1e-4)
    found = program(offload_optimizer=True)
    simulated = simulate_program(found, cost, cluster)
    priced = {term.name: term.count for term in simulated.pricing.terms if term.name.startswith("copy")}
    assert set(priced) == {"copy to host", "copy from host"}
