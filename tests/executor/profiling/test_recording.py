"""What ranks record against the table they were given and against torch's own record."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import torch

from simplan.plan.plan import Place, RankMapping
from simplan.program.action import ActionKind
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.tables.complete import stage_to_rank
from simplan.program.timeline import SpanKind
from simplan.runs.measurement import MeasuredCollective, RankMeasurement
from simplan.sim.memory import memory_peak
from tests.jobs import job_to_lower

MESSAGES = {
    ActionKind.SEND_F: ("send", 1),
    ActionKind.RECV_F: ("recv", -1),
    ActionKind.SEND_B: ("send", -1),
    ActionKind.RECV_B: ("recv", 1),
}
UNTIMED = (*MESSAGES, ActionKind.UNSHARD, ActionKind.RESHARD)


def place(run: Any, rank: int) -> Place:
    return RankMapping.of(run.job.plan).place(rank)


def row_of(run: Any, rank: int) -> Any:
    return run.rows()[place(run, rank).pp]


def messages_of(rank: RankMeasurement) -> list[MeasuredCollective]:
    return [c for c in rank.collectives if c.kind in ("send", "recv")]


def collectives_of(rank: RankMeasurement, *kinds: str) -> list[MeasuredCollective]:
    """What a process group does; messages and copies over the link to the host have tests of their own."""
    alone = ("send", "recv", "to_host", "from_host")
    return [c for c in rank.collectives if c.kind not in alone and (not kinds or c.kind in kinds)]


def data_parallel(run: Any, rank: RankMeasurement, *kinds: str) -> list[MeasuredCollective]:
    """Without what the layers of tensor- and context-parallel ranks exchange.

    Context-parallel ranks alone may be those that shard parameters; then the layers' exchanges are all-to-alls.
    """
    plan, mapping = run.job.plan, RankMapping.of(run.job.plan)
    inside = {mapping.tp_group(rank.rank), mapping.cp_group(rank.rank)}
    if plan.shards_parameters and plan.dp_shard == 1:
        assert plan.cp_comm == "a2a"
        return [c for c in collectives_of(rank, *kinds) if c.kind != "all_to_all"]
    return [c for c in collectives_of(rank, *kinds) if c.ranks not in inside]


def test_actions_and_messages_were_issued_in_the_order_of_the_table(finished_run: Any) -> None:
    for rank in finished_run.measurement.ranks:
        events = [(span.start_s, span.action) for span in rank.actions]
        events += [(c.start_s, c.action) for c in messages_of(rank)]
        row = [action for action in row_of(finished_run, rank.rank) if action.kind not in UNTIMED[4:]]
        assert [action for _, action in sorted(events)] == [str(action) for action in row]


def test_spans_do_not_overlap_and_lie_in_the_step(finished_run: Any) -> None:
    assert finished_run.measurement.reference_s > 0, "timed outside of the steps"
    for rank in finished_run.measurement.ranks:
        times = [time for span in rank.actions for time in (span.start_s, span.end_s)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= max(finished_run.measurement.step_times_s)


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


def test_messages_are_those_of_the_table(finished_run: Any) -> None:
    job = finished_run.job
    boundary_bytes = job.plan.microbatch_size * job.model.layers_of(job.plan.shard)[0].output_elements * 8
    mapping, placement = RankMapping.of(job.plan), stage_to_rank(finished_run.rows())
    for rank in finished_run.measurement.ranks:
        here = place(finished_run, rank.rank)
        wanted = []
        for action in row_of(finished_run, rank.rank):
            if action.kind in MESSAGES:
                kind, step = MESSAGES[action.kind]
                peer = mapping.rank(here._replace(pp=placement[action.stage + step]))
                ends = (rank.rank, peer)
                wanted.append((kind, str(action), ends if kind == "send" else ends[::-1], boundary_bytes))
        found = messages_of(rank)
        assert [(c.kind, c.action, c.ranks, c.num_bytes) for c in found] == wanted
        assert all(c.end_s is not None and c.end_s >= c.start_s for c in rank.collectives)


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
        found = [(c.kind, c.num_bytes) for c in collectives_of(rank)]
        assert found == [(kind, 8 * elements) for kind, elements in calls]


def test_groups_and_actions_of_whole_gradients(finished_run: Any) -> None:
    """Buckets overlap the last backward; tied gradients are summed before the update, updates handed out after."""
    job = finished_run.job
    if job.plan.shards_parameters:
        return
    mapping, placement = RankMapping.of(job.plan), stage_to_rank(finished_run.rows())
    for rank in finished_run.measurement.ranks:
        optim = str(row_of(finished_run, rank.rank)[-1])
        reduces = data_parallel(finished_run, rank, "all_reduce")
        in_optim = [c for c in reduces if c.action == optim]
        pipeline = mapping.pp_group(rank.rank)
        ends = placement[0], placement[job.plan.num_stages - 1]
        tied_over_ranks = job.model.tied_embeddings and ends[0] != ends[1] and place(finished_run, rank.rank).pp in ends
        assert [c.ranks for c in in_optim] == [(pipeline[ends[0]], pipeline[ends[1]])] * tied_over_ranks
        buckets = [c for c in reduces if c not in in_optim]
        group = mapping.dp_group(rank.rank)
        assert {c.ranks for c in buckets} == ({group} if len(group) > 1 else set())
        stage = place(finished_run, rank.rank).pp
        synchronized = range(4) if job.plan.grad_sync == "microbatch" else [3]
        wanted = {f"{stage}B{microbatch}" for microbatch in synchronized} if len(group) > 1 else set()
        assert {c.action for c in buckets} == wanted
        assert len(buckets) > len(wanted) or len(group) == 1
        shard_group = mapping.shard_group(rank.rank)
        broadcasts = [(c.action, c.ranks[0], set(c.ranks)) for c in data_parallel(finished_run, rank, "broadcast")]
        owners = shard_group if job.plan.shards_optimizer_only else ()
        assert broadcasts == [(optim, owner, set(shard_group)) for owner in owners]


def test_groups_and_actions_of_sharded_parameters(finished_run: Any) -> None:
    """Every unit is gathered once, or once more where it was resharded, and reduced once per synchronization."""
    job = finished_run.job
    plan = job.plan
    if not plan.shards_parameters:
        return
    mapping = RankMapping.of(plan)
    for rank in finished_run.measurement.ranks:
        row = row_of(finished_run, rank.rank)
        gathers = data_parallel(finished_run, rank, "all_gather")
        scatters = data_parallel(finished_run, rank, "reduce_scatter")
        reduces = data_parallel(finished_run, rank, "all_reduce")
        assert {c.ranks for c in gathers + scatters} == {mapping.shard_group(rank.rank)}
        replicas = mapping.replicate_group(rank.rank)
        assert [c.ranks for c in reduces] == [replicas] * (len(scatters) if plan.dp_replicate > 1 else 0)
        # everything is float64, so a unit is reduced in a buffer as large as the one it is gathered into
        assert {c.num_bytes for c in gathers} == {c.num_bytes for c in scatters}
        shards = [c.num_bytes // len(mapping.shard_group(rank.rank)) for c in scatters]
        assert [c.num_bytes for c in reduces] == (shards if plan.dp_replicate > 1 else [])
        if plan.pp > 1:
            unshards = [str(action) for action in row if action.kind is ActionKind.UNSHARD]
            assert [action for action, _ in groupby(c.action for c in gathers)] == unshards
            assert {c.action for c in scatters} == {str(a) for a in row if a.kind is ActionKind.REDUCE_GRAD}
            continue
        num_units = len(job.model.layers) - job.model.tied_embeddings
        resharded = plan.zero_stage == 3 and plan.reshard_after_forward
        for microbatch in range(4):
            forward = [c for c in gathers if c.action == f"0F{microbatch}"]
            backward = [c for c in gathers if c.action == f"0B{microbatch}"]
            assert len(forward) == num_units
            assert len(backward) == (num_units - 1) * resharded
        synchronized = range(4) if plan.grad_sync == "microbatch" else [3]
        assert [c.action for c in scatters] == [f"0B{m}" for m in synchronized for _ in range(num_units)]
