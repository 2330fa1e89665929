"""Predictions next to measurements: errors, rankings and goals, as JSON and Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from simpy import Environment, Event

from benchmarks.network.cases import NETWORKS, SIZES_BYTES, STEPS, ShapedNetwork, ShapedPlan
from benchmarks.network.measure import Measurements
from simplan import load_scenario, predict
from simplan.cost.calibration.store import load
from simplan.cost.communication.collectives import algorithm_of
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.network.usage import Usages, link_use
from simplan.predict.contention import flows_of_other_jobs
from simplan.program.program import Communication
from simplan.sim.links import SharedLinks
from simplan.units import format_bytes, format_time
from simplan.validate.compare import AT_THIS_SPEED

COLLECTIVE_GOAL = 0.08
STEP_GOAL = 0.12
_ALIKE = 0.05
"""Measurements that differ by less have no order."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Prediction and measurement of one case.

    Attributes:
        network, what: Network, and collective or plan.
        group: Cases of one group are ranked: the same work on other networks, or the same plan placed differently.
        predicted_s: Predicted seconds.
        measured_s: Median of the measured seconds.
        low_s, high_s: Least and most of them.
    """

    network: str
    what: str
    group: str
    predicted_s: float
    measured_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """Prediction over measurement, minus one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """All results, and whether they meet the goals.

    Attributes:
        machine: Machine, date and load.
        missing: Cases without a measurement.
    """

    machine: str
    collectives: tuple[CaseResult, ...]
    steps: tuple[CaseResult, ...]
    missing: tuple[str, ...] = ()

    @property
    def pairs(self) -> list[tuple[CaseResult, CaseResult]]:
        """Pairs of one group whose measurements differ, the faster one first."""
        return [*_pairs((*self.collectives, *self.steps))]

    @property
    def wrong(self) -> list[tuple[CaseResult, CaseResult]]:
        """Pairs that are predicted in the reverse order."""
        return [(fast, slow) for fast, slow in self.pairs if fast.predicted_s >= slow.predicted_s]

    @property
    def meets_goals(self) -> bool:
        """True if every case was measured and all goals are met."""
        return not self.missing and not self.wrong and all(ok for *_, ok in self.goals())

    def goals(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yields name, goal, result, and whether the goal is met."""
        for name, results, goal in (
            ("collectives, mean error", self.collectives, COLLECTIVE_GOAL),
            ("steps, mean error", self.steps, STEP_GOAL),
        ):
            if results:
                mean = statistics.fmean(abs(result.error) for result in results)
                yield name, f"at most {goal:.0%}", f"{mean:.1%} of {len(results)}", mean <= goal
        if self.pairs:
            right = len(self.pairs) - len(self.wrong)
            yield "order of networks and placements", "always right", f"{right} of {len(self.pairs)}", not self.wrong

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"wrong": [[asdict(result) for result in pair] for pair in self.wrong]}

    def to_markdown(self) -> str:
        """Page with goals and all cases."""
        lines = [
            "# Results of `make netbench`",
            "",
            self.machine,
            "",
            "| what | goal | found | met |",
            "|---|---|---|---|",
            *(f"| {name} | {goal} | {value} | {'yes' if ok else '**no**'} |" for name, goal, value, ok in self.goals()),
            "",
            "A host has one link of 100 Mbit/s in each direction. A collective begins when its last rank enters it,",
            "and ends when its last rank has its result. Predicted steps are those with computing as fast as in the",
            "run, because the hosts share the cores of one machine: the network is under test.",
            "",
            *_table("collective", self.collectives),
            *_table("step", self.steps),
        ]
        for fast, slow in self.wrong:
            lines.append(f"- Wrong order: {fast.what}, {fast.network} is faster than {slow.what}, {slow.network}.")
        if self.missing:
            lines += ["", f"Not measured: {'; '.join(self.missing)}."]
        return "\n".join(lines).rstrip() + "\n"


def _table(name: str, results: Sequence[CaseResult]) -> Iterator[str]:
    if not results:
        return
    yield f"| {name} | network | predicted | measured (least to most) | error |"
    yield "|---|---|---:|---:|---:|"
    for case in results:
        measured = f"{format_time(case.measured_s)} ({format_time(case.low_s)} to {format_time(case.high_s)})"
        yield f"| {case.what} | {case.network} | {format_time(case.predicted_s)} | {measured} | {case.error:+.1%} |"
    yield ""


def _pairs(results: Iterable[CaseResult]) -> Iterator[tuple[CaseResult, CaseResult]]:
    for pair in combinations(results, 2):
        fast, slow = sorted(pair, key=lambda result: result.measured_s)
        if fast.group == slow.group and slow.measured_s > (1 + _ALIKE) * fast.measured_s:
            yield fast, slow


def make_report(measurements: Measurements, machine: str) -> NetworkReport:
    """Predicts all cases, and compares those that have been measured."""
    collectives: list[CaseResult] = []
    steps: list[CaseResult] = []
    missing = []
    for network in NETWORKS:
        if measurements.collectives(network).exists():
            collectives += _collectives(network, measurements)
        else:
            missing.append(f"collectives, {network.words}")
    for network, plan in STEPS:
        if measurements.step(network, plan).exists():
            steps.append(_step(network, plan, measurements))
        else:
            missing.append(f"{plan.words}, {network.words}")
    return NetworkReport(machine, tuple(collectives), tuple(steps), tuple(missing))


def _collectives(network: ShapedNetwork, measurements: Measurements) -> Iterator[CaseResult]:
    """Yields the collectives over all hosts of a network."""
    n, seconds = network.num_hosts, seconds_alone(network, measurements)
    for timed in json.loads(measurements.collectives(network).read_text()):
        kind, num_bytes, times_s = CollectiveKind(timed["kind"]), timed["num_bytes"], timed["seconds"]
        what = f"{kind} of {format_bytes(min(SIZES_BYTES, key=lambda size: abs(size - num_bytes)))}"
        predicted_s = seconds(Communication(kind, num_bytes, tuple(range(n))))
        group = f"{what}, {network.words}" if kind in network.alike else f"{what} over {n}"
        yield CaseResult(network.words, what, group, predicted_s, *_median_and_range(times_s))


def _median_and_range(times_s: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(times_s), min(times_s), max(times_s)


def seconds_alone(network: ShapedNetwork, measurements: Measurements) -> Callable[[Communication], float]:
    """Function from a collective to its seconds in the simulator, with no other communication of the job."""
    plan = next(plan for other, plan in STEPS if other is network)
    cluster = load_scenario(measurements.scenario(network, plan)).job.cluster
    fabric = fabric_of(cluster)
    usages = Usages(cluster, fabric)
    others = [usage for _, usage in flows_of_other_jobs(cluster, fabric)]

    def seconds(communication: Communication) -> float:
        phases = usages.of(communication, algorithm_of(communication, cluster))
        alone_s, only = sum(phase.fixed_s + phase.transfer_s for phase in phases), np.zeros(1, np.int64)
        use = link_use(phases, only, only, len(fabric.links), others)
        if use.usage[0] < 0:
            return alone_s
        clock = Environment()
        done = Event(clock)
        SharedLinks(clock, use).run(done, 0, 0, alone_s)
        clock.run(done)
        return float(clock.now)

    return seconds


def _step(network: ShapedNetwork, plan: ShapedPlan, measurements: Measurements) -> CaseResult:
    """Compares a step; the prediction is made now, and rescaled to the speed of computing in the run."""
    document = json.loads(measurements.step(network, plan).read_text())
    rows = {row["name"]: row["predicted"] for row in document["comparison"]["rows"]}
    job = load_scenario(measurements.scenario(network, plan)).job
    predicted_s = predict(job, calibration=load(measurements.calibration(network.mbit_per_s))).step_time_s
    slower_s = rows.get(AT_THIS_SPEED, rows["step time"]) - rows["step time"]
    times_s = document["measurement"]["step_times_s"]
    group = plan.placed and f"{plan.placed}, {network.words}"
    return CaseResult(
        network.words,
        plan.words,
        group or f"{plan.words} over {network.num_hosts}",
        predicted_s + slower_s,
        *_median_and_range(times_s),
    )


def summary(report: NetworkReport) -> str:
    """Goals in a few lines, for the terminal."""
    return "\n".join(f"{name}: {value} ({goal})" for name, goal, value, _ in report.goals()) + (
        f"\n{len(report.missing)} cases are not measured yet" if report.missing else ""
    )
