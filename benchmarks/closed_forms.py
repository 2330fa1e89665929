"""Exact comparison with closed forms over a grid."""

from __future__ import annotations

from fractions import Fraction

from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.cost.communication.collectives import communication_cost
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.action import ActionKind
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import Communication, Op
from simplan.program.schedules import SCHEDULES, PipelineShape, naive
from simplan.program.tables.complete import complete_table
from simplan.program.tables.partition import assign_stage_layers
from simplan.sim.engine import simulate
from simplan.sim.memory import memory_peak
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training import TrainingSpec

_GRID = [(p, m) for p in (1, 2, 3, 4, 6, 8, 12, 16) for m in (1, 2, 3, 4, 7, 8, 16, 32, 64)]


def closed_forms() -> list[BenchmarkRow]:
    """Rows for bubble fractions, microbatches in flight, ring all-reduce, and bytes per parameter."""
    bubbles = flights = 0
    for p, m in _GRID:
        for name in ("gpipe", "1f1b"):
            found_bubble, found_flight = _simulated(name, p, m)
            bubbles += found_bubble == Fraction(p - 1, m + p - 1)
            flights += found_flight == [m if name == "gpipe" else min(p - rank, m) for rank in range(p)]
    total = 2 * len(_GRID)
    interleaved = [
        _simulated("interleaved_1f1b", p, m, v)[0] == Fraction(p - 1, v * m + p - 1)
        for p, m in _GRID
        for v in (2, 3, 4)
        if p > 1 and m % p == 0
    ]
    rings = [
        _ring_s(num_bytes, n) == 2 * (n - 1) * (num_bytes / n)
        for n in range(2, 65)
        for num_bytes in (n * 1024, n * 4096)
    ]
    bytes_right = [_bytes_per_parameter(*case) == expected for case, expected in _STATES]
    return [
        BenchmarkRow(
            "bubble of GPipe and 1F1B, p to 16, m to 64", "(p-1)/(m+p-1)", f"{bubbles} of {total}", bubbles == total
        ),
        BenchmarkRow("microbatches in flight by stage", "m; min(p-r, m)", f"{flights} of {total}", flights == total),
        BenchmarkRow(
            "bubble of interleaved 1F1B, m a multiple of p, v to 4",
            "(p-1)/(v m+p-1)",
            f"{sum(interleaved)} of {len(interleaved)}",
            all(interleaved),
        ),
        BenchmarkRow(
            "ring all-reduce, 2 to 64 ranks", "2 (n-1)/n x bytes", f"{sum(rings)} of {len(rings)}", all(rings)
        ),
        BenchmarkRow(
            "bytes a parameter by optimizer and precision",
            "16, 16, 18, 8",
            f"{sum(bytes_right)} of {len(bytes_right)}",
            all(bytes_right),
        ),
    ]


_STATES = (
    ((StateBytes(parameter=4, gradient=4, activation=4, boundary=4), "adamw"), 16),
    ((StateBytes(parameter=2, gradient=2, master=4, activation=2, boundary=2), "adam"), 16),
    ((StateBytes(parameter=2, gradient=4, master=4, activation=2, boundary=2), "adam"), 18),
    ((StateBytes(parameter=4, gradient=4, activation=4, boundary=4), "sgd"), 8),
)


def _model(p: int) -> ModelSpec:
    return ModelSpec(
        family="gpt", num_hidden_layers=p, hidden_size=64, num_attention_heads=4, vocab_size=128, seq_len=16
    )


def _software(state: StateBytes) -> SoftwareSpec:
    return SoftwareSpec(id="bench", state_bytes={"fp32": state}, bucket_bytes=1, first_bucket_bytes=1)


def _ring_s(num_bytes: int, num_ranks: int) -> float:
    """Seconds of a ring all-reduce over links of 1 byte/s without latency."""
    link = LinkSpec(id="bench", bytes_per_s=1.0, latency_s=0.0, bandwidth_share=1.0, library="gloo")
    cluster = ClusterSpec(
        id="bench", device=DeviceSpec(id="bench"), devices_per_node=64, num_devices=64, intra_link=link
    )
    return communication_cost(
        Communication(CollectiveKind.ALL_REDUCE, num_bytes, tuple(range(num_ranks))), cluster
    ).seconds


def _bytes_per_parameter(state: StateBytes, optimizer: str) -> float:
    model = _model(4)
    training = TrainingSpec(global_batch_size=1, precision="fp32", optimizer=optimizer)  # type: ignore[arg-type]
    table = complete_table(naive(PipelineShape(1, 1)))
    assignment = StageAssignment((0, len(model.layers)))
    job = Job(model, catalog.cluster("dgx-h100", 1), training, ParallelPlan(), _software(state))
    program = lower(job, assignment, table, Lowering(level=1))
    return sum(program.persistent_bytes[0].values()) / model.num_parameters


def _simulated(name: str, p: int, m: int, v: int = 1) -> tuple[Fraction, list[int]]:
    """Bubble fraction and microbatches in flight, for equal stages (F = 1, B = 2) and zero-cost communication."""
    job = Job(
        _model(p * v),
        catalog.cluster("dgx-h100", p),
        TrainingSpec(global_batch_size=m, precision="fp32"),
        ParallelPlan(pp=p, virtual_stages=v),
        _software(_STATES[0][0][0]),
    )
    table = complete_table(SCHEDULES[name](PipelineShape(p, m, v)))
    program = lower(job, assign_stage_layers([1] * (p * v)), table, Lowering(level=1))

    def seconds(op: Op) -> float:
        if op.communication or not op.work:
            return 0.0
        return {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}.get(op.action.kind, 0.0)

    step = Fraction(simulate(program, [seconds(op) for op in program.ops]).step_time_s)
    flights = [memory_peak(program, rank).activations_in_flight[rank] for rank in program.ranks]
    return 1 - Fraction(3 * m * v) / step, flights
