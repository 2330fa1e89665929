"""Compiled step times against the SimPy engine."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.program.action import Action, ActionKind
from simplan.program.complete import last_backwards
from simplan.program.program import Op, Stream
from simplan.sim.engine import simulate
from simplan.sim.pipeline.table import compiled_table
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times
from simplan.spec.plan import RankMapping
from tests.sim.pipeline.programs import SHARDING, SOFTWARE, Case, case, cases

_K = ActionKind
_MESSAGES = {Stream.SEND_F: 0, Stream.RECV_F: -1, Stream.SEND_B: 0, Stream.RECV_B: 1}


def random_times(case: Case, num_plans: int, seed: int) -> PipelineTimes:
    """Durations of a few magnitudes, some of them zero."""
    rng = np.random.default_rng(seed)
    units = units_of(case)
    num_units = max((len(names) for names in units.values()), default=0)
    times = PipelineTimes.zeros(case.table.num_stages, case.table.num_ranks, num_plans, num_units)
    scale = rng.choice([0.01, 0.3, 1.0, 10.0], 9)
    for number, name in enumerate(PipelineTimes.__slots__):
        array = getattr(times, name)
        array[:] = (
            scale[number] * rng.choice([0.0, 1.0, 1.0, 1.3, 2.0], array.shape) * rng.uniform(0.9, 1.1, array.shape)
        )
    for stage, names in units.items():
        times.gather_s[stage, len(names) :] = times.copy_s[stage, len(names) :] = 0.0
    times.tied_s[:] = scale[-1] * rng.uniform(0.5, 1.0, num_plans)
    if not case.plan.shards_optimizer_only:
        times.after_s[:] = 0.0
    if not case.plan.shards_parameters:
        times.reduce_copy_s[:] = 0.0
    if not any(op.stream is Stream.TIED for op in case.program.ops):
        times.tied_s[:] = 0.0
    return times


def units_of(case: Case) -> dict[int, list[str]]:
    """Names of FSDP's units by stage, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    for op in case.program.ops:
        unit = op.name.removeprefix("all_gather ")
        if op.action.kind is _K.UNSHARD and unit not in found[op.action.stage]:
            found[op.action.stage].append(unit)
    return found


def durations_of(case: Case, times: PipelineTimes, plan: int) -> list[float]:
    """The same durations for every operation of the Program."""
    mapping = RankMapping.of(case.plan)
    last = last_backwards(case.program.table)
    units = units_of(case)
    copies: dict[tuple[int, int], int] = defaultdict(int)  # what only the first of takes its time, by rank and stage

    def seconds(op: Op) -> float:
        stage, kind, _ = op.action
        rank = mapping.place(op.rank).pp
        if op.stream in _MESSAGES:
            way = 0 if op.stream in (Stream.SEND_F, Stream.RECV_F) else 1
            return float(times.send_s[way, stage + _MESSAGES[op.stream], plan])
        match kind:
            case _K.UNSHARD:
                return float(times.gather_s[stage, units[stage].index(op.name.removeprefix("all_gather ")), plan])
            case _K.RESHARD:
                return 0.0
            case _K.REDUCE_GRAD:
                key = op.rank, stage
                if op.name.startswith("copy") and not copies[key]:
                    copies[key] += 1
                    return float(times.reduce_copy_s[stage, plan])
                if case.plan.shards_parameters:  # what is left comes in as many parts as there are
                    is_part = op.name.startswith("reduce_scatter")
                    return float(times.reduce_s[stage, plan]) / len(units[stage]) if is_part else 0.0
                return float(times.reduce_s[stage, plan]) if op.name == str(op.action) else 0.0
            case _K.OPTIM:
                if op.stream is Stream.TIED:
                    return float(times.tied_s[plan])
                if op.stream is Stream.SHARD:
                    return float(times.after_s[rank, plan]) / 2  # a broadcast from each of two shards
                return float(times.update_s[rank, plan])
        if op.name.startswith("copy"):
            return float(times.copy_s[stage, units[stage].index(op.name.removeprefix("copy ")), plan])
        whole = {_K.FORWARD: 0, _K.BACKWARD: 1, _K.BACKWARD_INPUT: 3, _K.BACKWARD_WEIGHT: 4}[kind]
        taken_s = float(times.compute_s[whole + (op.action == last[stage]), stage, plan])
        if op.stream is Stream.DATA:  # DDP's buckets are inside of the last backward: here they are half of it
            return taken_s / 2 / num_buckets[op.rank, stage]
        if op.action == last[stage] and case.plan.dp > 1 and not case.plan.shards_parameters:
            copies[key := (op.rank, stage)] += 1  # the last backward is written layer by layer
            return taken_s / 2 if copies[key] == 1 else 0.0
        if not (op.work or op.name == str(op.action)) or (op.rank, op.action) in written:
            return 0.0
        written.add((op.rank, op.action))  # an action that is written layer by layer takes its time in the first
        return taken_s

    written: set[tuple[int, Action]] = set()
    num_buckets: dict[tuple[int, int], int] = defaultdict(int)
    for op in case.program.ops:
        num_buckets[op.rank, op.action.stage] += op.stream is Stream.DATA
    return [seconds(op) for op in case.program.ops]


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**32 - 1))
def test_step_times_are_those_of_the_engine(case: Case, seed: int) -> None:
    times = random_times(case, 3, seed)
    expected = [simulate(case.program, durations_of(case, times, plan)).step_time_s for plan in range(3)]
    assert pipeline_times(case.table, times) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "sharding"),
    [
        ("naive", 3, 200, 1, "none"),
        ("gpipe", 3, 200, 1, "none"),
        ("1f1b", 4, 300, 1, "zero 3"),
        ("interleaved_1f1b", 3, 240, 2, "none"),
        ("interleaved_1f1b", 2, 120, 5, "zero 3"),
        ("zb-h1", 4, 200, 1, "zero 2"),
        ("zb-v", 3, 150, 2, "none"),
    ],
)
def test_what_is_leaped_over_takes_as_long_as_in_the_engine(
    schedule: str, p: int, m: int, v: int, sharding: str
) -> None:
    found = case(schedule, p, m, v, SHARDING[sharding], [1] * p * v, "fp32", tied=True)
    for seed in range(3):
        times = random_times(found, 2, seed)
        expected = [simulate(found.program, durations_of(found, times, plan)).step_time_s for plan in range(2)]
        assert pipeline_times(found.table, times) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 40, 2), (2, 60, 3), (3, 14, 4)])
def test_receives_that_are_posted_ahead_are_those_of_the_engine(p: int, m: int, v: int) -> None:
    ahead = SOFTWARE.model_copy(update={"receives_ahead": ("interleaved_1f1b",)})
    found = case("interleaved_1f1b", p, m, v, {}, [1] * p * v, "fp32", tied=False, software=ahead)
    for seed in range(3):
        times = random_times(found, 2, seed)
        expected = [simulate(found.program, durations_of(found, times, plan)).step_time_s for plan in range(2)]
        assert pipeline_times(found.table, times, received_ahead=True) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(2, 4), st.floats(0.1, 0.9), st.lists(st.booleans(), min_size=8, max_size=8))
def test_sends_shorter_than_a_forward_cost_nothing_in_the_middle_of_an_interleaved_pipeline(
    p: int, v: int, send_s: float, slow: list[bool]
) -> None:
    """Every rank computes without a pause, so that a further round of p microbatches takes p v (F + B)."""

    def step_s(rounds: int) -> float:
        table = compiled_table("interleaved_1f1b", p, rounds * p, v, "none")
        times = PipelineTimes.zeros(p * v, p, 1)
        times.forward_s[:], times.backward_s[:], times.backward_last_s[:] = 1.0, 2.0, 2.0
        for boundary in range(p * v - 1):
            if slow[boundary % p]:
                times.send_forward_s[boundary] = times.send_backward_s[boundary] = send_s
        return float(pipeline_times(table, times, received_ahead=True)[0])

    assert step_s(13) - step_s(12) == pytest.approx(3 * p * v)
