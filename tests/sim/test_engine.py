"""The engine against closed forms and against an evaluator that shares no code with it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy import Environment

from simplan.predict.simulated import timeline
from simplan.program.action import Action, ActionKind, Table
from simplan.program.lowering.lower import Lowering
from simplan.program.program import Op, Program, Stream
from simplan.program.schedules import PipelineShape, gpipe, interleaved_1f1b, naive, one_f_one_b
from simplan.program.tables.complete import complete_table
from simplan.program.timeline import Span, SpanKind, split_of_rank
from simplan.sim.engine import CoreUse, SharedCores, simulate
from simplan.software.software import SoftwareSpec, StateBytes
from tests.jobs import job_of, lowered, tiny_model
from tests.laws import meetings
from tests.program.tables.tables import compute_tables, makespan_s

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
SOFTWARE = SoftwareSpec(
    id="test",
    state_bytes={"fp32": StateBytes(parameter=4, gradient=4, activation=4, boundary=4)},
    bucket_bytes=2**17,
    first_bucket_bytes=2**16,
)


def program(
    compute: Table,
    *,
    dp: int = 1,
    level: int = 1,
    layers_per_stage: int = 1,
    host_waits: bool = False,
    software: SoftwareSpec = SOFTWARE,
) -> Program:
    p, m = len(compute), 1 + max(action.microbatch or 0 for action in compute[0])
    num_stages = 1 + max(action.stage for row in compute for action in row)
    model = tiny_model(num_hidden_layers=num_stages * layers_per_stage, tied_embeddings=False)
    plan = {"pp": p, "dp_replicate": dp}
    job = job_of(model, plan, software=software, num_microbatches=m, precision="fp32")
    how = Lowering(level, host_waits=host_waits)
    return lowered(job, how, [layers_per_stage] * num_stages, complete_table(compute))


def durations(lowered: Program, forward_s: float, backward_s: float, send_s: float = 0.0) -> list[float]:
    def seconds(op: Op) -> float:
        if op.communication:
            return send_s
        return {F: forward_s, B: backward_s}.get(op.action.kind, 0.0) if op.work else 0.0

    return [seconds(op) for op in lowered.ops]


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [1, 2, 8, 17])
@pytest.mark.parametrize("ratio", [1, 2])
def test_bubbles_are_the_closed_forms(p: int, m: int, ratio: int) -> None:
    """GPipe and 1F1B: (p-1)/(m+p-1); naive: (p-1)/p. Equal stages, free communication; integers, so exactly."""
    for schedule, makespan in (
        (gpipe, (m + p - 1) * (1 + ratio)),
        (one_f_one_b, (m + p - 1) * (1 + ratio)),
        (naive, m * p * (1 + ratio)),
    ):
        lowered = program(schedule(PipelineShape(p, m)))
        step_time_s = simulate(lowered, durations(lowered, 1, ratio)).step_time_s
        assert step_time_s == makespan
        busy = m * (1 + ratio)
        bubble = 1 - busy / step_time_s
        expected = (p - 1) / p if schedule is naive else (p - 1) / (m + p - 1)
        assert bubble == pytest.approx(expected, rel=1e-12)


@given(compute_tables(), st.integers(0, 2**31), st.booleans())
def test_any_table_takes_as_long_as_the_recursion_says(compute: Table, seed: int, uneven: bool) -> None:
    """Free communication, random durations of every action."""
    rng = random.Random(seed)
    seconds = {action: rng.uniform(0.1, 3.0) if uneven else 1.0 for row in compute for action in row}
    lowered = program(compute)
    given_s = [seconds.get(op.action, 0.0) if op.work and not op.communication else 0.0 for op in lowered.ops]
    assert simulate(lowered, given_s).step_time_s == pytest.approx(makespan_s(compute, seconds.__getitem__), rel=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 8, 2), (4, 4, 2), (4, 8, 3), (3, 9, 4)])
def test_the_interleaved_bubble_is_the_closed_form(p: int, m: int, v: int) -> None:
    """(p-1)/(v m+p-1) of equal stages and free communications (Narayanan et al. 2021); integers, so exactly."""
    lowered = program(interleaved_1f1b(PipelineShape(p, m, v)))
    step_s = simulate(lowered, durations(lowered, 1.0, 2.0)).step_time_s
    assert step_s == 3 * (v * m + p - 1)


def test_a_communication_delays_the_next_stage_and_overlaps_the_next_forward() -> None:
    """p=2, m=2, F=2, B=4, send=1: by hand."""
    lowered = program(gpipe(PipelineShape(2, 2)))
    times = simulate(lowered, durations(lowered, 2.0, 4.0, 1.0))
    started = {
        str(op.action): (times.start_s[i], times.end_s[i])
        for i, op in enumerate(lowered.ops)
        if op.action.kind in (F, B, ActionKind.SEND_F, ActionKind.SEND_B) and (op.work or op.communication)
    }
    assert started == {
        "0F0": (0, 2),
        "0SEND_F0": (2, 3),
        "0F1": (2, 4),
        "0SEND_F1": (4, 5),
        "1F0": (3, 5),
        "1F1": (5, 7),
        "1B0": (7, 11),
        "1SEND_B0": (11, 12),
        "0B0": (12, 16),
        "1B1": (11, 15),
        "1SEND_B1": (15, 16),
        "0B1": (16, 20),
    }


@given(compute_tables(), st.floats(0.0, 2.0), st.sampled_from([1, 2]))
def test_shares_sum_to_the_step_and_streams_keep_their_order(compute: Table, send_s: float, level: int) -> None:
    lowered = program(compute, dp=2, level=level, layers_per_stage=2)
    given_s = durations(lowered, 1.0, 2.0, send_s)
    times = simulate(lowered, given_s)
    of_all = timeline(lowered, times)
    spans = of_all.by_rank()
    for rank in lowered.ranks:
        assert of_all.by_rank([rank]) == {rank: spans[rank]}
        split = split_of_rank(spans[rank], times.step_time_s)
        assert split.total_s == pytest.approx(times.step_time_s, rel=1e-12)
        assert min(split.compute_s, split.exposed_communication_s, split.wait_s + 1e-9) >= 0
    for indices in lowered.streams.values():
        for before, after in pairwise(indices):
            assert times.end_s[before] <= times.start_s[after]
    for i, (start_s, end_s) in enumerate(zip(times.start_s, times.end_s, strict=True)):
        assert end_s - start_s == pytest.approx(given_s[i])
    for members in meetings(lowered).values():
        assert len({(times.start_s[i], times.end_s[i]) for i in members}) == 1


def test_ddp_buckets_overlap_backward_at_level_2_and_follow_it_at_level_1() -> None:
    compute = ((Action(0, F, 0), Action(0, B, 0)),)
    layers = 6
    coarse, fine = (program(compute, dp=2, level=level, layers_per_stage=layers) for level in (1, 2))
    reduce_s = 0.5
    fine_s = durations(fine, 1.0, 2.0, reduce_s)
    num_buckets = sum(op.communication is not None for op in fine.ops) // 2
    assert num_buckets > 2
    # the last bucket ends one reduction after the backward; the others hide
    compute_s = (layers + 2) * 3.0
    assert simulate(fine, fine_s).step_time_s == pytest.approx(compute_s + reduce_s)
    coarse_s = durations(coarse, 1.0 * (layers + 2), 2.0 * (layers + 2), reduce_s * num_buckets)
    assert simulate(coarse, coarse_s).step_time_s == pytest.approx(compute_s + reduce_s * num_buckets)


def test_ranks_beyond_the_cores_slow_down_alike() -> None:
    """Four data-parallel ranks on two cores take twice as long as on four; on eight no less than on four."""
    compute = ((Action(0, F, 0), Action(0, B, 0)),)
    lowered = program(compute, dp=4)
    given_s = durations(lowered, 1.0, 2.0)
    node, demand = [0] * len(lowered.ops), [0.0 if op.communication else 1.0 for op in lowered.ops]
    for cores, expected in ((2, 6.0), (4, 3.0), (8, 3.0), (3, 4.0)):
        assert simulate(lowered, given_s, CoreUse(cores, node, demand)).step_time_s == pytest.approx(expected)


@given(compute_tables(), st.floats(0.0, 0.5))
def test_enough_cores_are_as_good_as_none_shared(compute: Table, send_s: float) -> None:
    lowered = program(compute)
    given_s = durations(lowered, 1.0, 2.0, send_s)
    plenty = CoreUse(1000, [0] * len(lowered.ops), [1.0] * len(lowered.ops))
    shared, alone = simulate(lowered, given_s, plenty), simulate(lowered, given_s)
    assert shared.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_communications_of_one_connection_take_turns(num_microbatches: int) -> None:
    """Where computing takes no time, a connection that carries one communication at a time is never free."""
    lowered = program(one_f_one_b(PipelineShape(2, num_microbatches)), host_waits=True)
    given_s = durations(lowered, 0.0, 0.0, 1.0)
    free = [0.0] * len(lowered.ops)
    turns = [frozenset(op.communication.ranks) if op.communication is not None else None for op in lowered.ops]
    both_ways = simulate(lowered, given_s, CoreUse(1, [0] * len(lowered.ops), free))
    in_turn = simulate(lowered, given_s, CoreUse(1, [0] * len(lowered.ops), free, turns))
    assert in_turn.step_time_s == 2 * num_microbatches
    assert both_ways.step_time_s == num_microbatches + 1


def test_nothing_of_the_stage_goes_on_before_its_gradients_are_reduced() -> None:
    """DDP's end of backward waits for the buckets: so do the communication of the last microbatch and the optimizer."""
    lowered = program(one_f_one_b(PipelineShape(2, 2)), dp=2, level=2)
    given_s = [5.0 if op.stream is Stream.DATA else 1.0 if op.work else 0.0 for op in lowered.ops]
    times = simulate(lowered, given_s)
    for rank in lowered.ranks:
        of_rank = [(lowered.ops[i], times.start_s[i], times.end_s[i]) for i in lowered.by_rank[rank]]
        reduced_s = max(end_s for op, _, end_s in of_rank if op.stream is Stream.DATA)
        later = [start_s for op, start_s, _ in of_rank if str(op.action) in ("1SEND_B1", f"{rank // 2}OPTIM")]
        assert len(later) == (1 if rank < 2 else 2)
        assert min(later) >= reduced_s


def test_communication_on_the_compute_stream_is_exposed() -> None:
    spans = [
        Span(0, Stream.COMPUTE, "a", "0F0", SpanKind.COMPUTE, 0.0, 1.0),
        Span(0, Stream.COMPUTE, "b", "0F0", SpanKind.COMMUNICATION, 1.0, 1.5),
        Span(0, "grad", "c", "0B0", SpanKind.COMMUNICATION, 0.5, 1.25),
    ]
    split = split_of_rank(spans, 2.0)
    assert (split.compute_s, split.exposed_communication_s, split.wait_s, split.total_s) == (1.0, 0.5, 0.5, 2.0)


def test_a_communication_uses_cores_on_both_ends() -> None:
    """One send of 1 s between two ranks of one machine, nothing else: two cores are enough for it, one is not."""
    lowered = program(gpipe(PipelineShape(2, 1)))
    given_s = [1.0 if op.action.kind in (ActionKind.SEND_F, ActionKind.RECV_F) else 0.0 for op in lowered.ops]
    ones = [1.0] * len(lowered.ops)
    for cores, expected in ((2, 1.0), (1, 2.0)):
        assert simulate(lowered, given_s, CoreUse(cores, [0] * len(lowered.ops), ones)).step_time_s == expected


def ends(num_cores: int, jobs: list[tuple[float, float, float]]) -> list[float]:
    """End of every (arrival, work, demand)."""
    env = Environment()
    cores = SharedCores(env, num_cores)
    ended = [0.0] * len(jobs)

    def job(i: int, arrival: float, work: float, demand: float):  # type: ignore[no-untyped-def]
        yield env.timeout(arrival)
        done = env.event()
        cores.run(done, work, demand)
        yield done
        ended[i] = env.now

    for i, (arrival, work, demand) in enumerate(jobs):
        env.process(job(i, arrival, work, demand))
    env.run()
    return ended


@pytest.mark.parametrize(
    ("num_cores", "jobs", "ended"),
    [
        # both at half speed until the shorter is done at 2, then the longer has 1 left alone
        (1, [(0, 1, 1), (0, 2, 1)], [2.0, 3.0]),
        # 1 done alone by t=1; then both at half speed: the first's 1 ends at 3, the second's 2 has 1 left, ends at 4
        (1, [(0, 2, 1), (1, 2, 1)], [3.0, 4.0]),
        # demand above the cores slows in proportion
        (2, [(0, 1, 2), (0, 1, 1), (0, 1, 1)], [2.0, 2.0, 2.0]),
    ],
)
def test_jobs_share_cores_by_hand(num_cores: int, jobs: list[tuple[float, float, float]], ended: list[float]) -> None:
    assert ends(num_cores, jobs) == pytest.approx(ended)


def test_work_is_conserved() -> None:
    """While demand exceeds the cores, cores x time = work x demand."""
    jobs = [(0.0, 1.5, 1.0), (0.0, 2.5, 1.0), (0.0, 3.5, 1.0)]
    assert max(ends(1, jobs)) == pytest.approx(sum(work for _, work, _ in jobs))
