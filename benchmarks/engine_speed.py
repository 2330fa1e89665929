"""Speed of the SimPy engine with memory tracking, compared with a bare SimPy loop over the same actions and sends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator

from simpy import Environment, Event

from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, ActionKind, Table
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import Program
from simplan.program.schedules import PipelineShape, one_f_one_b
from simplan.program.tables.complete import complete_table
from simplan.program.tables.partition import assign_stage_layers
from simplan.sim.engine import simulate
from simplan.sim.memory import memory_peak
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training import TrainingSpec

_P, _M, _ROUNDS = 16, 128, 15
_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_SECONDS = {_F: 1.0, _B: 2.0}
_SEND_S = 0.1


def engine_speed() -> list[BenchmarkRow]:
    """Row for 1F1B with 16 ranks and 128 microbatches: 4,096 actions and 3,840 sends."""
    compute = one_f_one_b(PipelineShape(_P, _M))
    program = program_of(compute, _P, _M)
    durations_s = [
        _SEND_S if op.communication else _SECONDS.get(op.action.kind, 0.0) if op.work else 0.0 for op in program.ops
    ]

    def engine(fresh: Program) -> None:
        simulate(fresh, durations_s)
        for rank in fresh.ranks:
            memory_peak(fresh, rank)

    ratios, ours_s, bare_s = [], [], []
    for _ in range(_ROUNDS):  # in turn, so that both see the same machine
        bare_s.append(_time(_bare, compute))
        fresh = program_of(compute, _P, _M)  # without anything cached in an earlier round
        ours_s.append(_time(engine, fresh))
        ratios.append(ours_s[-1] / bare_s[-1])
    ratio = statistics.median(ratios)
    return [
        BenchmarkRow(
            "SimPy engine over a bare SimPy loop, 1F1B p=16 m=128, memory on",
            "at most 2.5",
            f"{ratio:.2f} (of {_ROUNDS} rounds {min(ratios):.2f} to {max(ratios):.2f}; "
            f"{1e3 * statistics.median(ours_s):.0f} ms over {1e3 * statistics.median(bare_s):.0f} ms)",
            ratio <= 2.5,
        )
    ]


def _time(run: Callable[..., None], *args: object) -> float:
    start_s = time.perf_counter()
    run(*args)
    return time.perf_counter() - start_s


def _bare(compute: Table) -> None:
    """Bare loop: one process per rank, one timeout per action, one timeout and arrival event per send."""
    env = Environment()
    arrived = {action: Event(env) for row in compute for action in row}

    def rank(row: tuple[Action, ...]) -> Generator[Event, object, None]:
        for action in row:
            stage, kind, microbatch = action
            source, target = (stage - 1, stage + 1) if kind is _F else (stage + 1, stage - 1)
            if 0 <= source < _P:
                yield arrived[action]
            yield env.timeout(_SECONDS[kind])
            if 0 <= target < _P:
                sent = env.timeout(_SEND_S)
                assert sent.callbacks is not None
                sent.callbacks.append(arrived[Action(target, kind, microbatch)].trigger)

    for row in compute:
        env.process(rank(row))
    env.run()


def program_of(compute: Table, p: int, m: int, v: int = 1) -> Program:
    """Level 1 Program of a small model with one block per stage, all stages equal."""
    state = StateBytes(parameter=4, gradient=4, activation=4, boundary=4)
    model = ModelSpec(
        family="gpt", num_hidden_layers=p * v, hidden_size=64, num_attention_heads=4, vocab_size=128, seq_len=16
    )
    job = Job(
        model,
        catalog.cluster("dgx-h100", p),
        TrainingSpec(global_batch_size=m, precision="fp32"),
        ParallelPlan(pp=p, virtual_stages=v),
        SoftwareSpec(id="bench", state_bytes={"fp32": state}, bucket_bytes=1, first_bucket_bytes=1),
    )
    return lower(job, assign_stage_layers([1] * p * v), complete_table(compute), Lowering(level=1))
