"""Command ``python -m benchmarks.ways``: ways to train on shaped hosts, measured beside their predictions.

Two and four hosts on one switch, at 0.1, 0.4 and 1 Gbit/s, as ``make netbench`` makes them. Each way is calibrated and
run as a user does it. Measurements are kept in ``build/waysbench`` until all cases have one: an interrupted command
resumes. Bytes on the wire are the payload of the first of two hosts: of a run less that of a shorter run, per step.
``python -m benchmarks.ways bytes`` measures bytes alone, which other programs on the machine do not change.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

from benchmarks.network.cases import ShapedNetwork, ShapedPlan, star
from benchmarks.network.measure import PORT, Measurements, hosts_on
from benchmarks.network.payload import counted_payload, gloo_header_bytes
from benchmarks.network.report import CaseResult
from simplan import load_scenario, predict
from simplan.cli.terminal.processes import ending_signals_raise
from simplan.cost.calibration.store import load
from simplan.cost.communication.collectives import bus_factor
from simplan.units import format_bytes, format_time
from simplan.validate.compare import AT_THIS_SPEED
from tests.hosts import unavailable

_KEPT = Path(__file__).resolve().parents[1] / "build" / "waysbench"
_RESULTS = Path(__file__).with_name("WAYS.md")
NETWORKS = tuple(star(number, rate) for number, rate in product((2, 4), (100.0, 400.0, 1000.0)))
_ROUND = 4
_MORE_ROUNDS = 8
"""Rounds, or steps, by which the longer run of a count of bytes is longer than the shorter one."""
_BYTES = "## Bytes on the wire\n"
TIME_GOAL, BYTES_GOAL, ORDER_GOAL, ALIKE = 0.12, 0.02, 0.9, 0.05


def _way(name: str, words: str, keys: str, num_steps: tuple[int, int] = (5, 2)) -> ShapedPlan:
    return ShapedPlan(name, words, True, f"dp_replicate: {{n}}{keys}", num_steps=num_steps)


def _rounds(name: str, words: str, keys: str) -> ShapedPlan:
    replication = f", replication: {{{{kind: {keys}, inner_steps: {_ROUND}}}}}"
    return _way(name, words, replication, (3 * _ROUND, _ROUND))


WAYS = (
    _way("whole", "whole gradients", ""),
    _way("fp16", "fp16", ", compression: fp16"),
    _way("powersgd", "PowerSGD, rank 4", ", compression: {{kind: powersgd, rank: 4, start_step: 2}}"),
    _way("top-k", "top-k, 1 %", ", compression: top_k"),
    _way("int8", "int8", ", compression: int8"),
    _way("one-bit", "one-bit", ", compression: {{kind: one_bit, warmup_share: 0.0}}"),
    _rounds("local-sgd", "Local SGD", "local_sgd"),
    _rounds("diloco", "DiLoCo", "diloco"),
    _rounds("diloco-int4", "DiLoCo, int4", "diloco, outer: {{dtype: int4}}"),
    _rounds("streaming", "streaming DiLoCo", "streaming_diloco, fragments: 2, overlap_steps: 1"),
)
"""Ways; rounds have 4 steps."""


class SentBytes(NamedTuple):
    """Bytes that the first of two hosts sends per step.

    Attributes:
        way: Description of the way.
        predicted: Of gradients or parameters.
        headers: Of gloo's messages, predicted.
        measured: Payload of TCP.
    """

    way: str
    predicted: float
    headers: float
    measured: float

    @property
    def error(self) -> float:
        """Measured bytes over all predicted ones, less 1."""
        return self.measured / (self.predicted + self.headers) - 1


def main(parts: Sequence[str]) -> int:
    """Exit code: 0 if all goals are met, 1 if not, 2 if hosts cannot be made here.

    Args:
        parts: ``bytes`` to measure bytes alone and to keep the times of the page; empty for all.
    """
    if (reason := unavailable()) is not None:
        print(f"ways on shaped hosts need Linux, root and iproute2: {reason}", file=sys.stderr)
        return 2
    measurements = Measurements(_KEPT)
    if parts == ["bytes"]:
        times, met = _RESULTS.read_text().partition(_BYTES)[0], True
    else:
        times, met = _times(measurements)
    bytes_text, bytes_met = report_bytes([*_sent(measurements)])
    _RESULTS.write_text(times + bytes_text)
    print(times + bytes_text)
    if met and bytes_met and not parts:
        shutil.rmtree(_KEPT)
    return 0 if met and bytes_met else 1


def _times(measurements: Measurements) -> tuple[str, bool]:
    cases = [(network, way) for network in NETWORKS for way in WAYS]
    for rate in sorted({network.mbit_per_s for network in NETWORKS}):
        measurements.calibrate(rate, cases)
    for network in NETWORKS:
        for way in measurements.run_steps(network, WAYS):
            print(f"{network.num_hosts} hosts, {network.words}: {way.words}", flush=True)
    return report_times([_result(network, way, measurements) for network, way in cases])


def _result(network: ShapedNetwork, way: ShapedPlan, measurements: Measurements) -> CaseResult:
    document = json.loads(measurements.step(network, way).read_text())
    rows = {row["name"]: row["predicted"] for row in document["comparison"]["rows"]}
    job = load_scenario(measurements.scenario(network, way)).job
    predicted_s = predict(job, calibration=load(measurements.calibration(network.mbit_per_s))).step_time_s
    slower_s = rows.get(AT_THIS_SPEED, rows["step time"]) - rows["step time"]
    times_s, length = document["measurement"]["step_times_s"], job.plan.round_steps
    means_s = [statistics.fmean(times_s[first : first + length]) for first in range(0, len(times_s), length)]
    words = f"{network.num_hosts} hosts, {network.mbit_per_s / 1000:g} Gbit/s"
    return CaseResult(
        words, way.words, "", predicted_s + slower_s, statistics.median(means_s), min(means_s), max(means_s)
    )


def _sent(measurements: Measurements) -> Iterator[SentBytes]:
    """Yields ways with bytes that a host sends per step, on two hosts at 1 Gbit/s."""
    network = star(2, 1000.0)
    measurements.calibrate(network.mbit_per_s, [(network, way) for way in WAYS])
    for way in WAYS:
        scenario = load_scenario(measurements.scenario(network, way))
        replication, length = scenario.job.plan.replication, scenario.job.plan.round_steps
        times = 1.0 if replication is None else replication.outer_steps / length  # the simulated step has an outer step
        _, simulated = scenario.predict_step(load(measurements.calibration(network.mbit_per_s)))
        program = simulated.program
        moved = [
            communication
            for index in program.rank_indices[0]
            for communication in program.op(int(index)).communications
        ]
        predicted = sum(
            bus_factor(communication.kind, len(communication.ranks)) * communication.num_bytes
            for communication in moved
        )
        headers = sum(
            gloo_header_bytes(communication.kind, communication.num_bytes, len(communication.ranks))
            for communication in moved
        )
        counts = []
        for more in (0, _MORE_ROUNDS * length):
            steps = replace(way, name=f"{way.name}-{more}", num_steps=(way.num_steps[0] + more, way.num_steps[1]))
            file = measurements.step(network, steps).with_suffix(".payload")
            if not file.exists():
                with hosts_on(network) as hosts:
                    with counted_payload(hosts[0]) as sent:
                        measurements.run(network, steps, hosts)
                    file.write_text(str(sent.without_port(PORT)))
            counts.append(int(file.read_text()))
        measured = (counts[1] - counts[0]) / (_MORE_ROUNDS * length)
        print(f"bytes of {way.words}: {measured:,.0f}", flush=True)
        yield SentBytes(way.words, times * predicted, times * headers, measured)


def report_times(results: Sequence[CaseResult]) -> tuple[str, bool]:
    """Head of the page with the times of all cases, and whether the goals are met."""
    mean = statistics.fmean(abs(result.error) for result in results)
    ascending = sorted(results, key=lambda result: result.measured_s)
    pairs = [
        (fast, slow)
        for fast, slow in combinations(ascending, 2)
        if fast.network == slow.network and slow.measured_s > (1 + ALIKE) * fast.measured_s
    ]
    right = sum(fast.predicted_s < slow.predicted_s for fast, slow in pairs)
    goals = [
        ("step or mean step of a round, mean error", f"at most {TIME_GOAL:.0%}", f"{mean:.1%}", mean <= TIME_GOAL),
        (
            "pairs of ways in the right order",
            f"{ORDER_GOAL:.0%}",
            f"{right} of {len(pairs)}",
            right >= ORDER_GOAL * len(pairs),
        ),
    ]
    lines = [
        "# Ways to train on shaped hosts",
        "",
        "## Times",
        "",
        *_goals(goals),
        "Predicted steps are those with computing as fast as in the run, because the hosts share the cores of one",
        "machine: the network is under test. Pairs whose measurements differ by less than 5 % have no order.",
        "",
        "| network | way | predicted | measured (least to most) | error |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {case.network} | {case.what} | {format_time(case.predicted_s)} | {format_time(case.measured_s)} "
            f"({format_time(case.low_s)} to {format_time(case.high_s)}) | {case.error:+.1%} |"
            for case in results
        ),
        "",
        "",
    ]
    return "\n".join(lines), all(ok for *_, ok in goals)


def report_bytes(sent: Sequence[SentBytes]) -> tuple[str, bool]:
    """End of the page with the bytes of all ways, and whether the goal is met."""
    worst = max(abs(result.error) for result in sent)
    goal = ("bytes on the wire, largest error", f"at most {BYTES_GOAL:.0%}", f"{worst:.1%}", worst <= BYTES_GOAL)
    lines = [
        _BYTES,
        *_goals([goal]),
        "TCP payload that the first of two hosts sent per step, each byte once, also if sent again. Heartbeats",
        "are left out. Both sides of gloo announce a segment of a collective with 48 bytes, and 48 bytes precede it.",
        "These headers are predicted from its source. Barriers between steps are in what was measured.",
        "",
        "| way | predicted | headers of gloo | measured | error |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {way.way} | {format_bytes(way.predicted)} | {format_bytes(way.headers)} | {format_bytes(way.measured)} "
            f"| {way.error:+.2%} |"
            for way in sent
        ),
    ]
    return "\n".join(lines) + "\n", goal[-1]


def _goals(goals: Sequence[tuple[str, str, str, bool]]) -> Iterator[str]:
    """Yields a line about the machine, and a table of goals."""
    yield from (_machine(), "", "| what | goal | found | met |", "|---|---|---|---|")
    yield from (f"| {name} | {goal} | {value} | {'yes' if ok else '**no**'} |" for name, goal, value, ok in goals)
    yield ""


def _machine() -> str:
    from executor.profiling.results import environment

    facts, load_average = environment(2, cuda=False), os.getloadavg()[1]
    return (
        f"{datetime.now(UTC).date()}, {facts['device']}, {len(os.sched_getaffinity(0))} cores, torch {facts['torch']}, "
        f"load average {load_average:.1f} over five minutes at the end."
    )


if __name__ == "__main__":
    with ending_signals_raise():
        sys.exit(main(sys.argv[1:]))
