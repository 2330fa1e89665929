"""What real ranks issued is what Level 2 of the simulated Program says: kind, group, bytes and order."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.run import run_job
from simplan.predict import build_program, predict
from simplan.program.action import ActionKind, format_table
from simplan.program.job import Job
from simplan.program.measurement import Measurement
from simplan.program.program import Message, Op
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from simplan.units import KIB
from simplan.validate.compare import compare

GPT = ModelSpec(family="gpt", num_hidden_layers=4, hidden_size=192, num_attention_heads=4, vocab_size=2000, seq_len=16)
LLAMA = ModelSpec(
    family="llama",
    num_hidden_layers=4,
    hidden_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=500,
    vocab_size=1500,
    seq_len=16,
)
CASES = {
    "ddp with torch's own buckets, tied": (GPT, ParallelPlan(dp_replicate=2), 4),
    "ddp with small buckets": (LLAMA, ParallelPlan(dp_replicate=2, bucket_bytes=300 * KIB), 2),
    "gpipe": (LLAMA, ParallelPlan(pp=2, schedule="gpipe"), 4),
    "naive, tied": (GPT, ParallelPlan(pp=2, schedule="naive"), 2),
    "1f1b x ddp, tied": (GPT, ParallelPlan(pp=2, dp_replicate=2, bucket_bytes=300 * KIB), 8),
    "1f1b x ddp with torch's own buckets": (LLAMA, ParallelPlan(pp=2, dp_replicate=2), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_issued_as_predicted(name: str, tmp_path: Path) -> None:
    model, plan, batch = CASES[name]
    prediction = predict(
        name,
        model,
        catalogue.cluster("dgx-a100-80gb", num_devices=plan.num_devices),
        TrainingSpec(global_batch_size=batch, precision="fp32"),
        plan,
        catalogue.software("torch"),
    )
    job = Job(
        name=name,
        model=model,
        training=prediction.training,
        plan=plan,
        software=prediction.software,
        boundaries=prediction.assignment.boundaries,
        table=tuple(tuple(row) for row in format_table(prediction.table)),
        num_steps=1,
        num_warmup_steps=2,
        device="cpu",
        profile_memory=False,
    )
    measurement = run_job(job, tmp_path)
    assert compare(prediction.to_json(), measurement).structure_equal
    program = build_program(prediction, level=2)
    for rank in program.ranks:
        predicted = [_issued(op) for op in (program.ops[i] for i in program.by_rank[rank]) if _is_message(op)]
        assert _recorded(measurement, rank) == predicted


def _is_message(op: Op) -> bool:
    return isinstance(op.work, Message)


def _issued(op: Op) -> tuple[str, tuple[int, ...], int, str]:
    assert isinstance(op.work, Message)
    receives = op.action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
    return "recv" if receives else op.work.kind, op.work.ranks, op.work.num_bytes, str(op.action)


def _recorded(measurement: Measurement, rank: int) -> list[tuple[str, tuple[int, ...], int, str]]:
    return [(c.kind, c.ranks, c.num_bytes, c.action) for c in measurement.ranks[rank].collectives]
