"""Runs of minutes that meet the failures of a whole run: their numbers, their faults, and what they are expected to be.

A simulated run of the same numbers and seed draws the failures: its stops become faults at the same age of the ranks.
The times of detection, restart and checkpoints are those of an earlier run, or those of a scenario.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from simplan.errors import Problem, SpecError
from simplan.goodput.engines.simulate import one_run, simulate
from simplan.goodput.setup import WATERFALL, CauseSetup, RunSetup
from simplan.runs.faults import ExpectedRun, Fault, RunTimes

NUM_RUNS = 1000
_LONGER = 10
"""Times the length of a run for which failures are drawn: real steps may take longer, and are done again."""
_NOTICE_S = 30.0
"""Notice of planned stops that have none in the scenario: as long as Kubernetes and Slurm wait."""
_IDLE = ("detection", "diagnosis", "waiting", "maintenance")
"""Parts in which nothing grows older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Times of a machine from a fault until training goes on, and of its checkpoints.

    Attributes:
        detection_s: From the death of a rank until all have ended.
        after_timeout_s: From the timeout for a rank that hangs until all have ended.
        waiting_s: From then until ranks start, where no node is missing.
        restart_s: From then until the first step, with loading.
        checkpoint_s: For which a checkpoint holds training up.
        return_s: From the start of ranks without a node until that node has joined, minus its repair, which begins
            when the node is lost.
        step_s: Steps by number of nodes, with what is done between them; may be empty.
    """

    detection_s: float
    after_timeout_s: float
    waiting_s: float
    restart_s: float
    checkpoint_s: float
    return_s: float
    step_s: dict[int, float]

    @classmethod
    def of(cls, times: RunTimes, timeout_s: float, returns_after_s: float = 0.0) -> RecoveryTimes:
        """Times of an earlier run, which has restarted at least once.

        Args:
            timeout_s: Its ``--timeout``.
            returns_after_s: Seconds after which its lost nodes came back.

        Raises:
            SpecError: It has not restarted, or it has no checkpoint.
        """
        ended = [stop for stop in times.stops if stop.kind in ("kill", "preempt", "failure")]
        failed = [stop for stop in times.stops if stop.kind != "nodes"]
        if not failed or times.checkpoint_s is None:
            lacks = "checkpoint" if failed else "restart"
            fix = "name a run with --checkpoint-dir and one fault, such as --fail with kind: kill"
            raise SpecError(Problem(field="--recovery", rule=f"is the measurement of a run without a {lacks}", fix=fix))
        hung = [stop.detection_s for stop in failed if stop.kind == "stop"]
        joins = [
            joined.at_s - (lost.at_s + lost.detection_s + lost.waiting_s)
            for lost, joined in zip(times.stops, times.stops[1:], strict=False)
            if lost.node and joined.kind == "nodes"
        ]
        return cls(
            detection_s=statistics.fmean(stop.detection_s for stop in ended or failed),
            after_timeout_s=max(0.0, statistics.fmean(hung) - timeout_s) if hung else 0.0,
            waiting_s=statistics.fmean(stop.waiting_s for stop in failed),
            restart_s=statistics.fmean(stop.restart_s for stop in times.stops),
            checkpoint_s=times.checkpoint_s,
            return_s=statistics.fmean(joins) - returns_after_s if joins else 0.0,
            step_s=dict(times.step_s),
        )


def with_recovery(setup: RunSetup, recovery: RecoveryTimes) -> RunSetup:
    """The numbers of a run with the times of this machine."""
    sizes = tuple(replace(size, step_s=recovery.step_s.get(size.num_nodes, size.step_s)) for size in setup.sizes)
    grows = setup.policy == "shrink"
    causes = tuple(
        replace(cause, repair_s=max(0.0, cause.repair_s + recovery.return_s)) if grows and cause.num_nodes else cause
        for cause in setup.causes
    )
    return replace(
        setup,
        sizes=sizes,
        causes=causes,
        detection_s=recovery.detection_s,
        timeout_s=setup.timeout_s + recovery.after_timeout_s,
        diagnosis_s=recovery.waiting_s,
        restart_s=recovery.restart_s,
        load_s=0.0,
        blocking_s=recovery.checkpoint_s,
        write_s=0.0,
    )


def scaled(setup: RunSetup, scale: float) -> RunSetup:
    """The numbers of a run whose times, those of steps excepted, pass in 1 / ``scale`` of their seconds."""
    times = {
        field_of_setup.name
        for field_of_setup in fields(setup)
        if field_of_setup.name.endswith("_s") and field_of_setup.name != "trace_s"
    }
    causes = tuple(
        replace(cause, mtbf_s=cause.mtbf_s / scale, age_s=cause.age_s / scale, repair_s=cause.repair_s / scale)
        for cause in setup.causes
    )
    return replace(setup, causes=causes, **{name: getattr(setup, name) / scale for name in times})


def with_preemptions(setup: RunSetup) -> RunSetup:
    """Preemptions as a cause: planned where there is a notice, and in the age of the nodes."""
    if setup.preemption_mtbf_s == math.inf:
        return setup
    cause = CauseSetup(
        name="preemption",
        units_per_node=1,
        mtbf_s=setup.preemption_mtbf_s,
        planned=setup.notice_s > 0,
        repair_s=setup.spot_wait_s,
    )
    return replace(setup, causes=(*setup.causes, cause), preemption_mtbf_s=math.inf)


def drawn_faults(setup: RunSetup, *, seed: int, ranks_per_node: int) -> tuple[Fault, ...]:
    """Faults at the ages at which the first simulated run of this seed fails; their victims are drawn, too.

    A cause that loses nodes hits one besides that at the endpoint, or a rank where there is none. What is noticed by
    timeout stops its victim. Planned stops are preemptions.

    Args:
        ranks_per_node: Ranks of a node.
    """
    run = one_run(replace(setup, num_steps=_LONGER * setup.num_steps), seed=seed)
    victims, causes = np.random.default_rng([seed, 1]), {cause.name: cause for cause in setup.causes}
    faults, age_s = [], 0.0
    for stretch in run.stretches:
        seconds = stretch.end_s - stretch.start_s
        cause = causes.get(stretch.cause)
        if cause is not None:
            number = int(victims.integers(2**31))
            hangs = cause.timeout > 0 and stretch.kind == "detection" and math.isclose(seconds, setup.timeout_s)
            faults.append(_fault(cause, age_s, number, setup, ranks_per_node, hangs=hangs))
        age_s += 0.0 if stretch.kind in _IDLE else seconds
    return tuple(faults)


def _fault(cause: CauseSetup, at_s: float, number: int, setup: RunSetup, ranks_per_node: int, *, hangs: bool) -> Fault:
    others = setup.num_nodes - 1
    takes_node = cause.num_nodes > 0 and others > 0
    back_s = max(cause.repair_s, 0.1) if takes_node and not hangs else None
    return Fault(
        kind="preempt" if cause.planned else "stop" if hangs else "kill",
        at_s=at_s,
        node=1 + number % others if takes_node else None,
        rank=None if takes_node else number % (setup.num_nodes * ranks_per_node),
        for_s=back_s,
        notice_s=(setup.notice_s or _NOTICE_S) if cause.planned else None,
    )


def causes_like(faults: Sequence[Fault], undisturbed_s: float) -> tuple[CauseSetup, ...]:
    """Causes with the rates of a schedule: as many failures of each kind in a run as it has."""
    counted: dict[tuple[str, bool, float], int] = {}
    for fault in faults:
        if fault.kind != "slow":
            key = fault.kind, fault.node is not None, fault.for_s or 0.0
            counted[key] = counted.get(key, 0) + 1
    return tuple(
        CauseSetup(
            name=f"{kind} {'node' if is_node else 'rank'} {back_s:g}",
            units_per_node=0,
            mtbf_s=undisturbed_s / number,
            num_nodes=int(is_node and kind != "stop"),
            planned=kind == "preempt",
            timeout=float(kind == "stop"),
            repair_s=back_s,
        )
        for (kind, is_node, back_s), number in counted.items()
    )


def expected_run(setup: RunSetup, *, seed: int, num_runs: int = NUM_RUNS) -> ExpectedRun:
    """Goodput of simulated runs of these numbers, and means of their parts.

    Args:
        seed: Seed of the simulated runs.
    """
    runs = simulate(setup, num_runs=num_runs, seed=seed)
    compute_s = runs.waterfall_s[:, WATERFALL.index("compute")]
    low, middle, high = np.quantile(compute_s / runs.time_s, (0.05, 0.5, 0.95))
    means_s = runs.waterfall_s.mean(axis=0)
    return ExpectedRun(
        goodput=(float(low), float(middle), float(high)),
        time_s=float(runs.time_s.mean()),
        waterfall_s={part: float(seconds) for part, seconds in zip(WATERFALL, means_s, strict=True) if seconds},
        interruptions=float(runs.interruptions.sum(axis=1).mean()),
        num_runs=num_runs,
    )
