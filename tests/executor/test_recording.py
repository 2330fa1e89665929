"""What ranks record against the table they were given and against torch's own record."""

from __future__ import annotations

from typing import Any

import torch

from simplan.program.action import ActionKind
from simplan.spec.plan import RankMapping

MESSAGES = {
    ActionKind.SEND_F: ("send", 1),
    ActionKind.RECV_F: ("recv", -1),
    ActionKind.SEND_B: ("send", -1),
    ActionKind.RECV_B: ("recv", 1),
}


def place(run: Any, rank: int) -> tuple[int, int]:
    return RankMapping(run.job.plan.pp, run.job.plan.dp).place(rank)


def test_actions_ran_in_the_order_of_the_table(finished_run: Any) -> None:
    for rank in finished_run.measurement.ranks:
        row = finished_run.rows()[place(finished_run, rank.rank)[0]]
        wanted = [str(action) for action in row if action.kind not in MESSAGES]
        assert [span.action for span in rank.actions] == wanted


def test_actions_and_messages_were_issued_in_the_order_of_the_table(finished_run: Any) -> None:
    for rank in finished_run.measurement.ranks:
        events = [(span.start_s, span.action) for span in rank.actions]
        events += [(c.start_s, c.action) for c in rank.collectives if c.kind != "all_reduce"]
        row = finished_run.rows()[place(finished_run, rank.rank)[0]]
        assert [action for _, action in sorted(events)] == [str(action) for action in row]


def test_spans_do_not_overlap_and_lie_in_the_step(finished_run: Any) -> None:
    for rank in finished_run.measurement.ranks:
        times = [time for span in rank.actions for time in (span.start_s, span.end_s)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= max(finished_run.measurement.step_times_s)


def test_messages_are_those_of_the_table(finished_run: Any) -> None:
    job = finished_run.job
    boundary_bytes = job.plan.microbatch_size * job.model.layers[0].output_elements * 8
    mapping = RankMapping(job.plan.pp, job.plan.dp)
    for rank in finished_run.measurement.ranks:
        stage, replica = place(finished_run, rank.rank)
        wanted = []
        for action in finished_run.rows()[stage]:
            if action.kind in MESSAGES:
                kind, step = MESSAGES[action.kind]
                ends = (rank.rank, mapping.rank(stage + step, replica))
                wanted.append((kind, str(action), ends if kind == "send" else ends[::-1], boundary_bytes))
        found = [(c.kind, c.action, c.ranks, c.num_bytes) for c in rank.collectives if c.kind != "all_reduce"]
        assert found == wanted
        assert all(c.end_s is not None and c.end_s >= c.start_s for c in rank.collectives)


def test_all_reduces_are_those_torch_saw(finished_run: Any) -> None:
    """Bytes and order of DDP's buckets and of the tied gradient, against torch.profiler's record of the same step."""
    for rank in finished_run.measurement.ranks:
        elements = torch.load(finished_run.out_dir / f"collectives.rank{rank.rank}.pt")
        assert [c.num_bytes for c in rank.collectives if c.kind == "all_reduce"] == [8 * n for n in elements]


def test_groups_and_actions_of_all_reduces(finished_run: Any) -> None:
    job = finished_run.job
    mapping = RankMapping(job.plan.pp, job.plan.dp)
    for rank in finished_run.measurement.ranks:
        stage, replica = place(finished_run, rank.rank)
        reduces = [c for c in rank.collectives if c.kind == "all_reduce"]
        in_optim = [c for c in reduces if c.action == f"{stage}OPTIM"]
        tied_over_stages = job.model.tied_embeddings and job.plan.pp > 1
        assert [c.ranks for c in in_optim] == [mapping.pp_group(replica)] * tied_over_stages
        buckets = [c for c in reduces if c not in in_optim]
        assert {c.ranks for c in buckets} == ({mapping.dp_group(stage)} if job.plan.dp > 1 else set())
        assert {c.action for c in buckets} <= {f"{stage}B3"}
        if job.plan.dp > 1:
            assert len(buckets) > 1
