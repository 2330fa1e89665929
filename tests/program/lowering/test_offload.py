"""Copies to and from the host: their bytes, what they wait for, and what memory they save, against closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplan import catalog
from simplan.cost.communication.host_link import host_memory_rate
from simplan.model.layer import CollectiveKind
from simplan.predict import predict
from simplan.predict.build import cost_model
from simplan.predict.simulated import StepContext, simulate_program
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.lower import Lowering
from simplan.program.lowering.offload import backward_follows
from simplan.program.program import Communication, HostCopy, LayerWork, MemoryCategory, Op, Program, Stream
from simplan.program.timeline import Times
from simplan.sim.engine import simulate
from simplan.sim.memory import host_peak_bytes, memory_peak
from tests.jobs import job_of, lowered, tiny_model

GPT = tiny_model(num_hidden_layers=6, vocab_size=512, seq_len=32)
BLOCK_ELEMENTS = 12 * 64 * 64 + 13 * 64
# in fp32, what torch keeps of a block (see test_memory_accounting): 8 + 2 x 4 hidden states of tokens, sums of both
# norms, and the attention's log-sum-exp of each head
KEPT_BYTES = 4 * (16 * 32 * 64 + 4 * 32 + 4 * 32)


def program(
    microbatches: int = 1,
    *,
    how: Lowering | None = None,
    precision: str = "fp32",
    fused_optimizer: bool | None = None,
    untied: bool = False,
    keeps_gradients: bool = False,
    **plan: Any,
) -> Program:
    """Gradients that are kept have no part in where the peak is."""
    model = GPT.model_copy(update={"tied_embeddings": not untied})
    training: dict[str, Any] = {"precision": precision, "fused_optimizer": fused_optimizer}
    job = job_of(model, plan, num_microbatches=microbatches, **training)
    return lowered(job.with_changes({"software.zero_grad_set_to_none": not keeps_gradients}), how or Lowering())


def copies(program: Program, rank: int = 0) -> list[Op]:
    return [
        op for op in (program.ops[i] for i in program.by_rank[rank]) if op.stream in (Stream.TO_HOST, Stream.FROM_HOST)
    ]


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
    on, off = program(offload_activations=True, keeps_gradients=True), program(keeps_gradients=True)
    # the peak is in the backward of the last block: beside it are five blocks, or the one that is asked for
    saved = memory_peak(off, 0).by_category[MemoryCategory.ACTIVATIONS]
    saved -= memory_peak(on, 0).by_category[MemoryCategory.ACTIVATIONS]
    assert saved == 4 * KEPT_BYTES
    assert host_peak_bytes(on, 0) == 5 * KEPT_BYTES
    assert host_peak_bytes(off, 0) == 0


@pytest.mark.parametrize("num_moved", [1, 2, 4])
def test_of_some_blocks_on_the_host_the_device_holds_the_others(num_moved: int) -> None:
    """(num_layers - num_offloaded_layers) x what a layer keeps (Transformer Engine, cpu_offload.py)."""
    on = program(offload_activations=True, offload_layers=num_moved, keeps_gradients=True)
    off = program(keeps_gradients=True)
    saved = memory_peak(off, 0).by_category[MemoryCategory.ACTIVATIONS]
    saved -= memory_peak(on, 0).by_category[MemoryCategory.ACTIVATIONS]
    assert saved == num_moved * KEPT_BYTES
    assert host_peak_bytes(on, 0) == num_moved * KEPT_BYTES
    assert [name for name, _ in moved(copies(on))][:num_moved] == [f"offload block {i}" for i in range(num_moved)]


def test_shared_memory_is_counted_whole() -> None:
    """On a CPU nothing is saved: the host pool is device memory."""
    on = replace(program(offload_activations=True), one_memory=True)
    assert memory_peak(on, 0).total_bytes >= memory_peak(program(), 0).total_bytes


def test_forward_waits_for_the_copy_of_the_second_last_block() -> None:
    """With a link so slow that copies are all there is: block i+2 begins when the copy of block i has ended."""
    lowered = program(offload_activations=True)
    durations_s = [10.0 if op.stream is Stream.TO_HOST else 1.0 if op.work else 0.0 for op in lowered.ops]
    times = simulate(lowered, durations_s)
    ends = {op.name: times.end_s[i] for i, op in enumerate(lowered.ops) if op.stream is Stream.TO_HOST}
    starts = {
        op.name: times.start_s[i]
        for i, op in enumerate(lowered.ops)
        if str(op.action) == "0F0" and op.work and op.stream is Stream.COMPUTE
    }
    assert [starts[f"block {i + 2}"] for i in range(4)] == [ends[f"offload block {i}"] for i in range(4)]
    assert starts["head"] == ends["offload block 4"]


def test_backward_asks_for_one_block_ahead() -> None:
    """Copies back as long as a backward: the first is beside the last block's backward, so none is seen."""
    lowered = program(offload_activations=True)
    durations_s = [0.0] * len(lowered.ops)
    for i, op in enumerate(lowered.ops):
        if op.stream is Stream.FROM_HOST or (op.stream is Stream.COMPUTE and op.work and str(op.action) == "0B0"):
            durations_s[i] = 1.0
    assert simulate(lowered, durations_s).step_time_s == pytest.approx(8)  # embedding, six blocks, head


def test_pipelines_keep_microbatches_in_flight_on_the_host() -> None:
    """1F1B: the first of two stages has two microbatches in flight, each of three blocks."""
    lowered = program(4, pp=2, offload_activations=True)
    assert host_peak_bytes(lowered, 0) == 2 * 3 * KEPT_BYTES
    assert all(op.communication is None for op in copies(lowered))


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


def shard_bytes(elements: int) -> int:
    """Of fp32 on one of four ranks, between which all tensors divide evenly."""
    return 4 * elements // 4


BLOCKS = [shard_bytes(BLOCK_ELEMENTS)] * 6
ROOT = shard_bytes((512 + 32 + 2) * 64)  # the tied embedding, positions and the last norm
FORWARD, BACKWARD = [ROOT, *BLOCKS], BLOCKS  # the unit with which backward begins stays gathered
SHARDED: dict[str, Any] = {"dp_shard": 4, "offload_optimizer": True}


def in_direction(program: Program, stream: Stream) -> list[int]:
    return [num_bytes for _, num_bytes in moved([op for op in copies(program) if op.stream is stream])]


def gathers(program: Program) -> list[Communication]:
    """Of rank 0."""
    communications = (op.communication for op in program.ops if op.rank == 0)
    return [
        communication
        for communication in communications
        if communication is not None and communication.kind is CollectiveKind.ALL_GATHER
    ]


@pytest.mark.parametrize(
    ("microbatches", "plan", "fetched", "offloaded"),
    [
        (1, {}, FORWARD + BACKWARD, [*BLOCKS, ROOT]),
        (2, {}, 2 * (FORWARD + BACKWARD), 2 * [*BLOCKS, ROOT]),
        (2, {"zero_stage": 2}, 2 * FORWARD, 2 * [*BLOCKS, ROOT]),
        (2, {"grad_sync": "step"}, 2 * (FORWARD + BACKWARD), [*BLOCKS, ROOT]),
        (1, {"dp_replicate": 2}, FORWARD + BACKWARD, [*BLOCKS, ROOT]),
    ],
)
def test_shards_come_before_gathers_and_gradients_go_after_reductions(
    microbatches: int, plan: dict[str, Any], fetched: list[int], offloaded: list[int]
) -> None:
    lowered = program(microbatches, **SHARDED, **plan)
    assert in_direction(lowered, Stream.FROM_HOST) == fetched
    assert in_direction(lowered, Stream.TO_HOST) == offloaded
    gathered = [communication.num_bytes for communication in gathers(lowered)]
    assert gathered == [4 * num_bytes for num_bytes in fetched]


def test_shards_are_copied_as_wide_as_they_are_kept() -> None:
    """torch casts on the device (_fsdp_param.py, all_gather_inputs), so gathers have half the bytes."""
    lowered = program(precision="bf16", **SHARDED)
    assert in_direction(lowered, Stream.FROM_HOST) == FORWARD + BACKWARD
    assert in_direction(lowered, Stream.TO_HOST) == [*BLOCKS, ROOT]
    assert [communication.num_bytes for communication in gathers(lowered)] == [
        2 * num_bytes for num_bytes in FORWARD + BACKWARD
    ]


def test_the_host_has_all_that_is_sharded() -> None:
    """Weights and two moments at rest, gradients from the first reduction to the update."""
    lowered, elements = program(**SHARDED), GPT.num_parameters // 4
    resting = lowered.persistent_bytes[0]
    assert resting[MemoryCategory.HOST] == 12 * elements
    on_device = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
    assert [resting[category] for category in on_device] == [0, 0, 0]
    assert host_peak_bytes(lowered, 0) == 16 * elements
    often = program(2, **SHARDED)  # gradients of a unit come once more, and are added
    assert host_peak_bytes(often, 0) == 16 * elements + BLOCKS[0]
    foreach = program(fused_optimizer=False, **SHARDED)  # Adam's step makes a tensor as large as all parameters
    assert host_peak_bytes(foreach, 0) == 20 * elements


def test_the_device_has_no_shards_but_for_gathers() -> None:
    """Of a copied shard there is a second one, in the gather's buffer."""
    on, off = program(**SHARDED), program(dp_shard=4, keeps_gradients=True)
    (buffer,) = next(op for op in on.ops if op.name == "all_gather block 0").memory
    assert (buffer.during_bytes, buffer.after_bytes) == (5 * BLOCKS[0], 4 * BLOCKS[0])
    saved = memory_peak(off, 0).total_bytes - memory_peak(on, 0).total_bytes
    assert saved == 16 * GPT.num_parameters // 4


def times_of(program: Program, duration_s: Any) -> Times:
    return simulate(program, [duration_s(op) for op in program.ops])


def test_copies_take_turns_on_their_link() -> None:
    """Nothing else takes time: seven shards come in forward and six in backward, and three go after the last came.

    The reduction of a block is behind the gather of the one below it, on one communicator.
    """
    lowered = program(**SHARDED)
    times = times_of(lowered, lambda op: 1.0 if op.stream in (Stream.TO_HOST, Stream.FROM_HOST) else 0.0)
    assert times.step_time_s == pytest.approx(7 + 6 + 3)


def test_the_update_waits_for_gradients_on_the_host() -> None:
    lowered = program(**SHARDED)
    times = times_of(lowered, lambda op: 1.0 if op.stream is Stream.TO_HOST else 0.0)
    updates = [times.start_s[i] for i, op in enumerate(lowered.ops) if op.action.kind is ActionKind.OPTIM]
    assert updates == [pytest.approx(7)] * len(updates)
    work = [part for op in lowered.ops if op.action.kind is ActionKind.OPTIM for part in op.work]
    assert all(isinstance(part, LayerWork) and part.on_host for part in work)


@pytest.mark.parametrize(("plan", "last"), [({}, "reduce_scatter"), ({"dp_replicate": 2}, "all_reduce")])
def test_a_reduction_is_behind_the_copy_of_the_one_before(plan: dict[str, Any], last: str) -> None:
    """Copies are on the stream of the last collective, and longer here than all else."""
    lowered = program(**SHARDED, **plan)
    times = times_of(lowered, lambda op: 1.0 if op.stream is Stream.TO_HOST else 0.0)
    begun = [
        times.start_s[i] for i, op in enumerate(lowered.ops) if op.rank == 0 and op.name.startswith(f"{last} block")
    ]
    assert begun == pytest.approx([0, 1, 2, 3, 4, 5])


def test_the_device_waits_where_the_host_adds_to_gradients() -> None:
    """Backward of a block and each copy as long: beside each other the first time, after each other the second."""
    lowered = program(2, **SHARDED)

    def duration_s(op: Op) -> float:
        of_block = op.name.startswith("block") and op.action.kind is ActionKind.BACKWARD and bool(op.work)
        return 1.0 if of_block or op.stream is Stream.TO_HOST else 0.0

    assert times_of(lowered, duration_s).step_time_s == pytest.approx((6 + 2) + (2 * 6 + 1))
    added = [op for op in lowered.ops if op.rank == 0 and op.name.startswith("add ")]
    elements = [part.num_parameters for op in added for part in op.work if isinstance(part, LayerWork)]
    assert sum(elements) == GPT.num_parameters // 4
    assert {str(op.action) for op in added} == {"0B1"}


def test_shards_of_a_stage_come_before_it_computes() -> None:
    """A stage's gathers were asked for, so torch copies on the stream that computes."""
    lowered = program(2, pp=2, dp_shard=2, offload_optimizer=True, untied=True)
    times = times_of(lowered, lambda op: 1.0 if op.stream is Stream.FROM_HOST else 0.0)
    begun = min(
        times.start_s[i] for i, op in enumerate(lowered.ops) if op.rank == 0 and str(op.action) == "0F0" and op.work
    )
    assert begun == pytest.approx(4)  # the embedding and three blocks
    assert in_direction(lowered, Stream.TO_HOST) == in_direction(lowered, Stream.FROM_HOST)


def test_nothing_is_copied_where_host_and_device_are_one() -> None:
    """torch's tensor.to("cpu") of a tensor on the CPU is the tensor itself."""
    lowered = program(how=Lowering(host_waits=True), **SHARDED)
    assert copies(lowered) == []
    assert memory_peak(lowered, 0).by_category[MemoryCategory.HOST] >= 12 * GPT.num_parameters // 4


def test_a_reduced_gradient_is_counted_once_where_host_and_device_are_one() -> None:
    """With replicas torch keeps what it reduced to the end of backward: of the same storage as the gradient."""
    plan: dict[str, Any] = {"dp_shard": 4, "dp_replicate": 2}
    how = Lowering(host_waits=True)
    gradients, host = MemoryCategory.GRADIENTS, MemoryCategory.HOST
    for offloads, holding, other in ((False, gradients, host), (True, host, gradients)):
        lowered = program(how=how, offload_optimizer=offloads, **plan)
        scatters = [op for op in lowered.ops if op.rank == 0 and op.name.startswith("reduce_scatter")]
        held = {
            category: sum(e.after_bytes for op in scatters for e in op.memory if e.category is category)
            for category in MemoryCategory
        }
        assert (held[MemoryCategory.BUFFERS], held[holding], held[other]) == (0, sum(FORWARD), 0)


def test_level_1_moves_the_same_bytes_in_one_piece() -> None:
    """But that it does not know which unit stays gathered."""
    fine, coarse = (program(2, how=Lowering(level=level), **SHARDED) for level in (2, 1))
    assert in_direction(coarse, Stream.FROM_HOST) == 4 * [sum(FORWARD)]
    moved = in_direction(coarse, Stream.TO_HOST)  # after each of two microbatches
    assert moved == 2 * [sum(in_direction(fine, Stream.TO_HOST)) // 2]


def test_copies_are_priced_by_the_host_link() -> None:
    job = job_of(GPT, SHARDED, cluster="dgx-a100-80gb", precision="fp32")
    cost = cost_model(job, None)
    assert job.cluster.host_link is not None
    # PCIe 4 at four fifths of 31 GB/s, each way
    assert cost.host_copy(HostCopy(31 * 10**9, to_host=True)).seconds == pytest.approx(1.25, rel=1e-4)
    simulated = simulate_program(program(**SHARDED), cost, StepContext.of(job))
    priced = {term.name: term.count for term in simulated.program_costs.terms if term.name.startswith("copy")}
    assert set(priced) == {"copy to host", "copy from host"}


@pytest.mark.parametrize(
    ("devices", "bandwidth", "sharing"), [(8, None, 8), (4, None, 4), (8, 100e9, 8), (16, None, 8)]
)
def test_the_update_moves_its_bytes_at_the_bandwidth_of_the_host(
    devices: int, bandwidth: float | None, sharing: int
) -> None:
    """AdamW: 28 bytes of each fp32 parameter; two Xeon 8480C have 614.4 GB/s, of which three quarters are reached."""
    cluster = catalog.cluster("dgx-h100", num_devices=devices)
    if bandwidth is not None:
        cluster = cluster.model_copy(update={"host_memory_bandwidth_bytes_per_s": bandwidth})
    plan = {"dp_shard": devices, "offload_optimizer": True}
    prediction = predict(job_of(GPT, plan, cluster=cluster, num_microbatches=1))
    rate = 0.75 * (bandwidth or 614.4e9) / sharing
    assert prediction.splits[0].optimizer_s == pytest.approx(28 * GPT.num_parameters / devices / rate, rel=1e-6)


def test_the_update_of_a_cpu_is_that_of_its_calibration() -> None:
    assert host_memory_rate(catalog.cluster("this-machine", 1)) is None
    unknown = catalog.cluster("dgx-a100-80gb", 2).model_copy(update={"host_memory_bandwidth_bytes_per_s": None})
    assert host_memory_rate(unknown) == pytest.approx(0.75 * 409.6e9 / 2)
