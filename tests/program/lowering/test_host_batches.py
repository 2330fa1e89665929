"""Stages that wait for the host to take a microbatch before each forward: closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.predict import predict
from simplan.predict.step_summary import summarize_step
from simplan.program.action import ActionKind
from simplan.program.program import LayerWork, Op
from simplan.program.timeline import SpanKind
from simplan.sim.engine import simulate
from tests.jobs import job_of, lowered, tiny_model

FORWARD_S, BACKWARD_S, BATCH_S = 1.0, 2.0, 0.25


def model(num_hidden_layers: int) -> ModelSpec:
    return tiny_model(num_hidden_layers=num_hidden_layers, tied_embeddings=False)


@pytest.mark.parametrize(
    ("waits", "p", "v"),
    [*((waits, p, 1) for waits in (False, True) for p in (1, 2, 4)), *((True, p, v) for p, v in ((2, 2), (4, 3)))],
)
def test_a_step_is_longer_by_the_batches_that_stages_wait_for(waits: bool, p: int, v: int) -> None:
    """A forward is longer by one, as are all m v + p - 1 steps of the pipeline."""
    m, stages = 2 * p, p * v
    software = catalog.software("megatron-lm-2022").model_copy(
        update={"waits_for_batch": waits, "runtime": "xla", "trainer": False}
    )
    plan = {"pp": p, "virtual_stages": v}
    job = job_of(model(stages), plan, software=software, num_microbatches=m, precision="fp16")
    program = lowered(job, 1, [1] * stages)

    def seconds(op: Op) -> float:
        if op.kind is SpanKind.HOST:
            return BATCH_S
        if not any(isinstance(work, LayerWork) for work in op.work):
            return 0.0
        return {ActionKind.FORWARD: FORWARD_S, ActionKind.BACKWARD: BACKWARD_S}.get(op.action.kind, 0.0)

    steps = m * v + p - 1
    times = simulate(program, [seconds(op) for op in program.ops])
    assert times.step_time_s == pytest.approx(steps * (FORWARD_S + BACKWARD_S + waits * BATCH_S))


@pytest.mark.parametrize(
    ("software", "plan"),
    [
        ("megatron-lm-2022", {}),
        ("megatron-lm-2022", {"pp": 4}),
        ("megatron-lm-2021", {"pp": 2, "virtual_stages": 2}),
        ("megatron-lm-2023", {"pp": 2, "schedule": "zb-1p"}),
        ("megatron-deepspeed", {"pp": 4}),
    ],
)
def test_predictions_hold_them_as_time_of_the_host(software: str, plan: dict[str, Any]) -> None:
    """Of every rank as often as it waits; in a brief prediction as in a whole one."""
    job = job_of(model(8), plan, cluster="dgx-a100-80gb", software=software, global_batch_size=8, precision="fp16")
    whole, brief = predict(job), summarize_step(job)
    assert brief.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    kernels = job.cluster.device.kernels
    for rank in range(job.plan.num_devices):
        spans = [span for span in whole.timeline.spans if span.rank == rank and span.kind is SpanKind.HOST]
        expected_s = kernels.host_step_overhead_s + 8 * job.plan.virtual_stages * kernels.host_batch_overhead_s
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(expected_s)
