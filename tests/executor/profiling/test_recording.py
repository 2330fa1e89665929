"""Records of ranks against the table they were given and against torch's own record.

``test_level2`` compares all communication with the lowered Program: kind, ranks, bytes, action and order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from simplan.errors import RunError
from simplan.plan.plan import RankMapping
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.timeline import SpanKind
from simplan.sim.memory import memory_peak
from tests.executor.dry_run.accounting import SilentRecorder
from tests.jobs import job_to_lower

ALONE = ("send", "recv", "to_host", "from_host")
"""What no process group does: P2P sends and copies over the host link."""


def test_actions_and_messages_were_issued_in_the_order_of_the_table(finished_run: Any) -> None:
    job = finished_run.job
    for rank in finished_run.measurement.ranks:
        events = [(span.start_s, span.action) for span in rank.actions]
        events += [(c.start_s, c.action) for c in rank.collectives if c.kind in ("send", "recv")]
        row = job.parsed_table()[RankMapping.of(job.plan).place(rank.rank).pp]
        assert [action for _, action in sorted(events)] == [
            str(a) for a in row if a.kind not in (ActionKind.UNSHARD, ActionKind.RESHARD)
        ]


def test_spans_do_not_overlap_and_lie_in_the_step(finished_run: Any) -> None:
    assert finished_run.measurement.reference_s > 0, "timed outside of the steps"
    for rank in finished_run.measurement.ranks:
        times = [time for span in rank.actions for time in (span.start_s, span.end_s)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= max(finished_run.measurement.step_times_s)
        assert all(c.end_s is not None and c.end_s >= c.start_s for c in rank.collectives)


def test_forward_that_runs_again_is_timed_inside_of_backward(finished_run: Any) -> None:
    """Once for every block that does, or its attention core, in the action in which Level 2 has it."""
    job = finished_run.job
    how = Lowering(level=2)
    program = lower(
        job_to_lower(job.model, job.training, job.plan, job.software), job.assignment, job.parsed_table(), how
    )
    for rank in finished_run.measurement.ranks:
        again = [op for op in program.ops if op.rank == rank.rank and op.kind is SpanKind.RECOMPUTE]
        wanted = Counter(action for action, _ in {(str(op.action), op.name) for op in again})
        assert Counter(span.action for span in rank.reruns) == wanted
        spans = {span.action: span for span in rank.actions}
        for rerun in rank.reruns:
            assert spans[rerun.action].start_s <= rerun.start_s < rerun.end_s <= spans[rerun.action].end_s
        times = [time for rerun in rank.reruns for time in (rerun.start_s, rerun.end_s)]
        assert times == sorted(times)


def test_microbatches_in_flight_are_those_predicted(finished_run: Any) -> None:
    """Those of which torch held activations, between forward and the end of backward."""
    job = finished_run.job
    if job.plan.pp == 1:
        return
    how = Lowering(level=1)
    program = lower(
        job_to_lower(job.model, job.training, job.plan, job.software), job.assignment, job.parsed_table(), how
    )
    for rank in program.ranks:
        held = torch.load(finished_run.out_dir / f"in_flight.rank{rank}.pt")
        assert held == memory_peak(program, rank).activations_in_flight


def test_collectives_are_those_torch_saw(finished_run: Any) -> None:
    """Kind, bytes and order against torch.profiler's record of the same step.

    Of what selective recomputation keeps torch tells again, though its result is taken from a list.
    """
    plan = finished_run.job.plan
    if plan.recompute == "selective_op" and plan.tp > 1:
        return
    for rank in finished_run.measurement.ranks:
        calls = torch.load(finished_run.out_dir / f"collectives.rank{rank.rank}.pt")
        collectives = [(c.kind, c.num_bytes) for c in rank.collectives if c.kind not in ALONE]
        assert collectives == [(kind, 8 * elements) for kind, elements in calls]


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence() -> None:
    recorder = SilentRecorder([Action(0, ActionKind.FORWARD, 0)])
    recorder.begin_step(3)
    with pytest.raises(RunError, match="the loss of step 3 is nan: try precision fp32 or bf16"):
        recorder.record(0.0, 1.0, [2.5, float("nan")])
