"""Pricing a Program: what equal work costs is asked once, and every operation adds up its parts."""

from __future__ import annotations

import pytest

from simplan.cost.model import CostEstimate, Provenance
from simplan.cost.program_costs import estimate_program
from simplan.model.layer import CollectiveKind
from simplan.model.model import ModelSpec
from simplan.program.action import Action
from simplan.program.program import (
    Communication,
    HostCalls,
    HostCopy,
    HostWait,
    LayerWork,
    Op,
    Phase,
    Program,
    Stream,
    Work,
)
from simplan.program.timeline import SpanKind
from tests.program.programs import program_of

MODEL = ModelSpec(family="gpt", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, seq_len=16)
EMBEDDING, BLOCK, *_ = MODEL.layers


class Tariff:
    """Seconds by phase and kind; counts how often it is asked."""

    overlap_slowdown = 0.0

    def __init__(self) -> None:
        self.asked: list[Work] = []

    def compute(self, work: LayerWork) -> CostEstimate:
        self.asked.append(work)
        return _price({Phase.FORWARD: 1.0, Phase.RECOMPUTE: 0.5, Phase.BACKWARD: 2.0}[work.phase])

    def communication(self, communication: Communication) -> CostEstimate:
        self.asked.append(communication)
        return _price(communication.num_bytes / 100)

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        self.asked.append(copy)
        return _price(copy.num_bytes / 10)

    def host_wait(self, wait: HostWait) -> CostEstimate:
        self.asked.append(wait)
        return _price(0.25)


def _price(seconds: float) -> CostEstimate:
    return CostEstimate(seconds, Provenance.DATASHEET, 0.1, "")


def op(kind: SpanKind, *work: Work) -> Op:
    stream = Stream.DATA if kind is SpanKind.COMMUNICATION else Stream.COMPUTE
    return Op(0, stream, "", Action.parse("0F0"), kind, work)


def program(*ops: Op) -> Program:
    return program_of(ops)


FORWARD = LayerWork(BLOCK, Phase.FORWARD, 1, BLOCK.num_parameters)
AGAIN = LayerWork(BLOCK, Phase.RECOMPUTE, 1, BLOCK.num_parameters, (2,))
BACKWARD = LayerWork(BLOCK, Phase.BACKWARD, 1, BLOCK.num_parameters)
GATHER = Communication(CollectiveKind.ALL_GATHER, 300, tuple(range(8)))
SEND = Communication(CollectiveKind.SEND, 50, (0, 1))


def test_every_operation_adds_up_its_parts_and_equal_work_is_asked_once() -> None:
    tariff = Tariff()
    compute, communications = SpanKind.COMPUTE, SpanKind.COMMUNICATION
    ops = (
        op(compute, FORWARD, FORWARD),
        op(compute, AGAIN, BACKWARD),
        op(compute),
        op(communications, GATHER),
        op(communications, GATHER._replace()),  # an equal one, not the same
        op(communications, SEND),
        op(compute, FORWARD),
    )
    program_costs = estimate_program(program(*ops, ops[0]), tariff)
    assert program_costs.durations_s == pytest.approx((2.0, 2.5, 0.0, 3.0, 3.0, 0.5, 1.0, 2.0))
    assert program_costs.deviations_s == pytest.approx([0.1 * duration_s for duration_s in program_costs.durations_s])
    assert tariff.asked == [FORWARD, AGAIN, BACKWARD, GATHER, SEND]
    assert [(term.name, term.count) for term in program_costs.terms] == [
        ("block forward", 5),
        (f"block recompute: {BLOCK.kernels[2].name}", 1),
        ("block backward", 1),
        ("all_gather over 8 ranks", 2),
        ("send", 1),
    ]


def test_calls_of_the_host_take_as_long_each_whatever_the_device() -> None:
    """Between a function call of Python and a small collective; no cost model is asked."""
    tariff = Tariff()
    calls = [HostCalls(number, copies) for number in (1, 1536) for copies in (False, True)]
    view_s, copy_s, *many_s = estimate_program(
        program(*[op(SpanKind.HOST, each) for each in calls]), tariff
    ).durations_s
    assert 1e-7 < copy_s < view_s < 1e-4
    assert many_s == pytest.approx([1536 * view_s, 1536 * copy_s])
    assert not tariff.asked


def test_what_a_trainers_host_does_is_priced_once() -> None:
    tariff = Tariff()
    program_costs = estimate_program(program(*[op(SpanKind.HOST, HostWait("step"))] * 3), tariff)
    assert program_costs.durations_s.tolist() == [0.25, 0.25, 0.25]
    assert tariff.asked == [HostWait("step")]
    assert [(term.name, term.count) for term in program_costs.terms] == [("host, once a step", 3)]
