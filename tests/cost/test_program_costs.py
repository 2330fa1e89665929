"""Pricing a Program: equal work is asked once, operations add up their parts, and seconds are those of prices."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.cost.analytic import AnalyticCost
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.cost.program_costs import estimate_program
from simplan.model.layer import CollectiveKind
from simplan.predict import predict
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
from simplan.software.rates import FrameworkRates
from tests.cost.rates import cost_of
from tests.jobs import job_of, tiny_model
from tests.program.programs import program_of

BLOCK = tiny_model().layers[1]


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
    return CostEstimate.of(CostPart("", seconds, Limit.COMPUTE, str), Provenance.DATASHEET, 0.1)


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
        program(*[op(SpanKind.HOST, call) for call in calls]), tariff
    ).durations_s
    assert 1e-7 < copy_s < view_s < 1e-4
    assert many_s == pytest.approx([1536 * view_s, 1536 * copy_s])
    assert not tariff.asked


def test_a_trainers_host_is_priced_once() -> None:
    tariff = Tariff()
    program_costs = estimate_program(program(*[op(SpanKind.HOST, HostWait("step"))] * 3), tariff)
    assert program_costs.durations_s.tolist() == [0.25, 0.25, 0.25]
    assert tariff.asked == [HostWait("step")]
    assert [(term.name, term.count) for term in program_costs.terms] == [("host, once a step", 3)]


CLUSTER = catalog.cluster("dgx-h100", num_devices=16)
KERNELS = cost_of(CLUSTER.device, num_devices=16)
COST = AnalyticCost(CLUSTER, KERNELS)
LAYERS = catalog.model("gpt2-124m").layers


@pytest.mark.parametrize(("num_ranks", "times"), [(8, 1.5), (16, 3.0)])
def test_communications_in_training_take_so_many_times_as_long_as_alone(num_ranks: int, times: float) -> None:
    """Inside a node of eight and between two."""
    trained = AnalyticCost(CLUSTER, KERNELS, FrameworkRates(intra_slowdown=1.5, inter_slowdown=3.0))
    communication = Communication(CollectiveKind.ALL_REDUCE, 10**8, tuple(range(num_ranks)))
    alone, cost_estimate = COST.communication(communication), trained.communication(communication)
    assert cost_estimate.seconds == pytest.approx(times * alone.seconds)
    assert cost_estimate.formula == f"{times:.4g} x ({alone.formula})"
    assert cost_estimate.relative_std == alone.relative_std


def test_tcp_is_no_faster_in_training_than_its_headers_allow() -> None:
    """A frame of 1,538 bytes on the wire carries 1,448 of data; a fitted slowdown below 1 is NCCL's."""
    cluster = CLUSTER.with_changes(inter_link=catalog.network_of_node("tcp-10gbit", CLUSTER.devices_per_node))
    cost = AnalyticCost(cluster, KERNELS, FrameworkRates(inter_slowdown=0.92))
    num_bytes, ranks = 10**9, tuple(range(2 * CLUSTER.devices_per_node))
    gather = Communication(CollectiveKind.ALL_GATHER, num_bytes, ranks)
    goodput_bytes_per_s = 10e9 / 8 * 1448 / 1538
    least_s = num_bytes / 2 / goodput_bytes_per_s  # the other node's half crosses the card
    assert cost.communication(gather).seconds >= 0.99 * least_s
    ring_s = num_bytes * (len(ranks) - 1) / len(ranks) / goodput_bytes_per_s
    assert cost.communication(gather).seconds == pytest.approx(ring_s, rel=0.01)


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm"])
def test_a_device_of_an_unknown_architecture_is_unsure_enough_to_be_a_known_one(name: str) -> None:
    """With the same datasheet and nothing known of its kernels the interval holds what is predicted with that."""
    known = catalog.cluster({"h": "dgx-h100", "a": "dgx-a100-80gb", "b": "dgx-b200"}[name[0]])
    kernels = catalog.kernel_rates("other")
    unknown = known.device.model_copy(update={"architecture": "other", "kernels": kernels, "matmul_flop_per_s": {}})
    clusters = (known.model_copy(update={"device": unknown}), known)
    wide, sure = (
        predict(job_of("llama3-8b", {"dp_shard": 8}, cluster=cluster, software="torchtitan")) for cluster in clusters
    )
    low_s, high_s = wide.step_time_interval_s
    assert known.device.id == name
    assert low_s < sure.step_time_s < high_s


@pytest.mark.parametrize("software", catalog.names("software"))
def test_transfers_never_beat_the_datasheet_bandwidth(software: str) -> None:
    """A P2P send inside a node and between nodes, and an all-gather over one rank per node, by hand."""
    cluster, num_bytes = catalog.cluster("dgx-h100", num_devices=64), 10**9
    assert cluster.intra_link is not None
    assert cluster.inter_link is not None
    rates = catalog.software(software).rates
    cost = AnalyticCost(cluster, cost_of("h100-sxm-80gb"), rates)
    for kind, ranks, factor, link in (
        (CollectiveKind.SEND, (0, 1), 1.0, cluster.intra_link),
        (CollectiveKind.SEND, (0, 8), 1.0, cluster.inter_link),
        (CollectiveKind.ALL_GATHER, tuple(range(0, 64, 8)), 7 / 8, cluster.inter_link),
    ):
        estimate = cost.communication(Communication(kind, num_bytes, ranks))
        wire_s = factor * num_bytes / link.bytes_per_s
        assert estimate.seconds >= wire_s * (1 - 1e-9)
        inside = link is cluster.intra_link  # the switch might reduce, at a lower rate
        assert 0.7 * wire_s <= estimate.least_s <= wire_s * (1 + 1e-9)
        assert inside or estimate.least_s == pytest.approx(wire_s)
