"""Exchanges for experts beside another microbatch: which actions are pairs, and what a step then takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simplan.cost.program_costs import estimate_program
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.predict import cost_model
from simplan.program.lowering.lower import Lowering
from simplan.program.lowering.walk import paired_actions
from simplan.program.program import Communication, Op, OverlapRemainder, Program, Stream
from simplan.program.tables.plan_table import plan_table
from simplan.sim.engine import simulate
from tests.jobs import job_of, lowered
from tests.program.lowering.test_lower_moe import MODEL
from tests.program.programs import program_of

PLAN = ParallelPlan(pp=2, dp_replicate=2, ep=2, schedule="1f1b")
M = 4


ASKED = job_of(MODEL, PLAN, cluster="dgx-a100-80gb", num_microbatches=M, precision="fp32")
COST = cost_model(ASKED, None)


def program(*, overlap: bool, level: int = 2, expand_all: bool = True, way: str = "copies") -> Program:
    software = ASKED.software.model_copy(update={"expert_overlap": overlap, "expert_dispatch": way})
    return lowered(replace(ASKED, software=software), Lowering(level, None, expand_all=expand_all))


def collectives(program: Program, rank: int) -> list[Op]:
    return [program.ops[i] for i in program.by_rank[rank] if program.ops[i].stream is Stream.EXPERT]


@pytest.mark.parametrize(("stage", "expected"), [(0, "0B0 0F2 0B1 0F3"), (1, "1B0 1F1 1B1 1F2 1B2 1F3")])
def test_backwards_pair_with_the_forwards_after_them(stage: int, expected: str) -> None:
    """1F1B of two stages: the first has one forward ahead, so begins with two of them and ends with two backwards."""
    row = plan_table(PLAN, M)[stage]
    assert paired_actions(row) == {action for action in row if str(action) in expected.split()}


@pytest.mark.parametrize("expand_all", [False, True])
def test_only_pairs_have_their_exchanges_beside_the_other_pass(expand_all: bool) -> None:
    ops = collectives(program(overlap=True, expand_all=expand_all), rank=2)
    hidden = {str(op.action) for op in ops if any(isinstance(work, OverlapRemainder) for work in op.work)}
    assert hidden == {"1B0", "1F1", "1B1", "1F2", "1B2", "1F3"}
    assert {str(op.action) for op in ops} - hidden == {"1F0", "1B3"}


@pytest.mark.parametrize("expand_all", [False, True])
def test_all_bytes_are_still_sent(expand_all: bool) -> None:
    def sent(program: Program) -> int:
        works = [work for rank in program.by_rank for op in collectives(program, rank) for work in op.work]
        listed = [
            m
            for w in works
            for m in (w.communications if isinstance(w, OverlapRemainder) else (w,))
            if isinstance(m, Communication)
        ]
        return sum(communication.num_bytes for communication in listed)

    assert sent(program(overlap=True, expand_all=expand_all)) == sent(program(overlap=False, expand_all=expand_all)) > 0


@pytest.mark.parametrize(("way", "expected"), [("deepep", 20 / 132), ("hybridep", 32 / 148)])
def test_communications_take_multiprocessors_from_what_is_computed_meanwhile(way: str, expected: float) -> None:
    """Three quarters of the device are left for products while communications move, and all of it from then on."""
    lowered = program(overlap=True, way=way)
    taken = {work.sm_fraction for op in lowered.ops for work in op.work if isinstance(work, OverlapRemainder)}
    assert list(taken) == [pytest.approx(expected)]
    first = next(work for op in collectives(lowered, 2) for work in op.work if isinstance(work, OverlapRemainder))
    overlapped, communication = first.beside, first.communications[0]
    compute_s = COST.compute(overlapped).seconds
    send_s = COST.communication(communication).seconds
    for num_communications in (1, math.ceil(compute_s / send_s) + 1):
        moving_s = num_communications * send_s
        op = replace(lowered.ops[0], work=(OverlapRemainder((communication,) * num_communications, overlapped, 0.25),))
        priced = estimate_program(program_of([op]), COST)
        done = min(1.0, 0.75 * moving_s / compute_s)  # of the products, when the communications are through
        ends_s = moving_s + (1 - done) * compute_s
        expected_s = ends_s - compute_s
        assert list(priced.durations_s) == [pytest.approx(expected_s)]


@pytest.mark.parametrize("compute_s", [0.1, 1.5, 100.0])
@pytest.mark.parametrize("level", [1, 2])
def test_exposed_time_is_the_excess_over_the_other_pass(compute_s: float, level: int) -> None:
    """Two blocks with experts are on the last stage, each sends there and back: of eight passes six are in pairs."""

    def seconds(work: object) -> float:
        if isinstance(work, OverlapRemainder):
            return max(0.0, len(work.communications) - compute_s)
        return float(isinstance(work, Communication) and work.kind is CollectiveKind.ALL_TO_ALL)

    plain, hidden = (program(overlap=overlap, level=level) for overlap in (False, True))
    exposed = [sum(seconds(work) for op in collectives(lowered, 2) for work in op.work) for lowered in (plain, hidden)]
    assert exposed == pytest.approx([8 * 4, 2 * 4 + 6 * 2 * max(0.0, 2 - compute_s)])
    longer, shorter = (
        simulate(lowered, [sum(map(seconds, op.work)) for op in lowered.ops]).step_time_s for lowered in (plain, hidden)
    )
    assert shorter < longer
