"""Command ``python -m benchmarks.failures``: run a job with drawn failures on hosts, and write benchmarks/FAILURES.md.

Hosts are network namespaces of this machine (``tests/hosts.py``; root only) with one rank each, in float64. Three
set-ups meet failures: two hosts whose ranks are killed; two hosts and a spare one, of which hosts are killed; three
hosts that go on as two and grow again. Each set-up has an undisturbed run, whose losses are those to get, and a run
with one failure, whose times of restart and checkpoint predict the goodput of the others. Measurements are kept in
``build`` until all are there, so that an interrupted command resumes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from simplan.cli.terminal.processes import ending_signals_raise
from simplan.goodput.executed import RecoveryTimes, drawn_faults, expected_run, with_recovery
from simplan.goodput.setup import CauseSetup, RunSetup, Size
from simplan.io import read_model, write_model
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import FewerNodes, RendezvousOptions, on_fewer_devices
from simplan.runs.faults import Fault
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.validate.goodput import GoodputComparison
from tests.executor.conftest import make_job
from tests.executor.launch.node_runs import BATCH, cores_of, table_of
from tests.hosts import Host, hosts, unavailable

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("FAILURES.md")
_KEPT = ROOT / "build" / "failures"
_PORT = 29435
_TOLERANCE = 1e-9
_MAX_RESTARTS = 100
_JOIN = "import sys; from pathlib import Path; from simplan.cli.execute import join; "
_JOIN += "from simplan.io import read_model; from simplan.runs.elastic import RendezvousOptions; "
_JOIN += "join(read_model(Path(sys.argv[1]), RendezvousOptions), Path(sys.argv[2]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """Hosts, and the failures that they meet.

    Attributes:
        num_hosts: Hosts, spare ones included.
        nodes: Fewest and all nodes of the job.
        cause: Failures.
        seeds: Seeds of the runs.
        num_steps: Steps of a run.
    """

    name: str
    num_hosts: int
    nodes: tuple[int, int]
    cause: CauseSetup
    seeds: Sequence[int]
    num_steps: int = 120
    every: int = 12

    @property
    def job(self) -> RunSpec:
        """The job without faults: FSDP of the common batch, with plans for fewer nodes."""
        least, number = self.nodes
        job = make_job(plan={"dp_shard": number})
        fewer = []
        for nodes in range(number - 1, least - 1, -1):
            plan = on_fewer_devices(job.plan, nodes)
            fewer.append(FewerNodes(num_nodes=nodes, plan=plan, boundaries=job.boundaries, table=table_of(plan)))
        training = job.training.model_copy(update={"global_batch_size": BATCH})
        update = {"training": training, "table": table_of(job.plan), "dtype": "fp64", "fewer_nodes": tuple(fewer)}
        return job.model_copy(update={**update, "num_steps": self.num_steps, "num_warmup_steps": 0})

    @property
    def numbers(self) -> RunSetup:
        """The job for the simulation, with no times yet."""
        least, number = self.nodes
        return RunSetup(
            num_steps=self.num_steps,
            sizes=tuple(Size(num_nodes=nodes, step_s=0.1) for nodes in range(number, least - 1, -1)),
            devices_per_node=1,
            policy="shrink" if least < number else "restart",
            checkpoint_every=self.every,
            causes=(self.cause,),
            spares=self.num_hosts - number,
        )

    @property
    def one_failure(self) -> Fault:
        """The failure of the run that measures restarts."""
        step, back_s = self.every + self.every // 2, self.cause.repair_s
        if self.cause.num_nodes:
            return Fault(kind="kill", at_step=step, node=1, for_s=back_s)
        return Fault(kind="kill", at_step=step, rank=self.nodes[1] - 1)


def set_ups(num_runs: Sequence[int] = (4, 3, 3)) -> tuple[SetUp, ...]:
    """The set-ups with a number of runs each."""
    rank = CauseSetup(name="a rank is killed", units_per_node=0, mtbf_s=80.0, num_nodes=0)
    node = CauseSetup(name="a host is killed", units_per_node=0, mtbf_s=120.0, num_nodes=1, repair_s=10.0)
    seeds = [range(number) for number in num_runs]
    return (
        SetUp(name="restart", num_hosts=2, nodes=(2, 2), cause=rank, seeds=seeds[0]),
        SetUp(name="spare", num_hosts=3, nodes=(2, 2), cause=node, seeds=seeds[1]),
        SetUp(name="shrink", num_hosts=3, nodes=(2, 3), cause=replace(node, repair_s=30.0), seeds=seeds[2]),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run with drawn failures.

    Attributes:
        error: Largest relative difference of a loss from that of the undisturbed run.
    """

    set_up: SetUp
    seed: int
    measurement: Measurement
    goodput: GoodputComparison
    error: float


def outcomes(set_up: SetUp, folder: Path) -> Iterator[Outcome]:
    """Runs of a set-up on hosts; those whose measurement is in the folder are not done again."""
    number = set_up.num_hosts
    with hosts(number, cores=cores_of(number), own_clocks=True) as made:
        whole = _measured(set_up, made, folder / "whole", set_up.job)
        failed = _measured(set_up, made, folder / "one", _with(set_up, folder / "one", (set_up.one_failure,)))
        assert failed.times is not None
        recovery = RecoveryTimes.of(failed.times, failed.job.timeout_s, set_up.cause.repair_s)
        setup = with_recovery(set_up.numbers, recovery)
        for seed in set_up.seeds:
            out = folder / f"seed{seed}"
            job = _with(set_up, out, drawn_faults(setup, seed=seed, ranks_per_node=1))
            job = job.model_copy(update={"expected": expected_run(setup, seed=seed)})
            measurement = _measured(set_up, made, out, job)
            goodput = GoodputComparison.of(measurement)
            assert goodput is not None
            losses = _losses(measurement)  # without those of a host that was lost, where no plan changed
            yield Outcome(set_up, seed, measurement, goodput, _error(losses, whole.losses[-len(losses) :]))


def _with(set_up: SetUp, folder: Path, faults: tuple[Fault, ...]) -> RunSpec:
    kept = Checkpointing(folder=str(folder / "kept"), every=set_up.every, max_restarts=_MAX_RESTARTS)
    return set_up.job.model_copy(update={"checkpointing": kept, "faults": faults})


def _measured(set_up: SetUp, made: Sequence[Host], folder: Path, job: RunSpec) -> Measurement:
    """Measurement of a run on all hosts."""
    file = folder / "0" / "measurement.json"
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run(set_up, made, folder, job)
        shutil.rmtree(folder / "kept", ignore_errors=True)
    return read_model(file, Measurement)


def _run(set_up: SetUp, made: Sequence[Host], folder: Path, job: RunSpec) -> None:
    least, number = set_up.nodes if job.checkpointing is not None else (set_up.nodes[1],) * 2
    write_model(folder / "job.json", job)
    used = made if job.checkpointing is not None else made[:number]
    started = []
    for k, host in enumerate(used):
        nodes = RendezvousOptions(
            min_nodes=least,
            max_nodes=number,
            ranks_per_node=1,
            host=made[0].address,
            port=_PORT,
            leads=k == 0,
            last_call_timeout_s=5.0,
        )
        write_model(folder / f"nodes{k}.json", nodes)
        program = [
            "-m",
            "executor",
            "run",
            folder / "job.json",
            "--out",
            folder / "0",
            "--nodes",
            folder / "nodes0.json",
        ]
        if k > 0:
            program = ["-c", _JOIN, folder / f"nodes{k}.json", folder / f"host{k}"]
        output = (folder / f"host{k}.log").open("w")
        started.append(
            subprocess.Popen(
                host.command([sys.executable, *map(str, program)]),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
            )
        )
        output.close()
        time.sleep(1.0 if k == 0 else 0.0)  # the store first
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"exit codes {codes}; the hosts' messages are in {folder}")


def _losses(measurement: Measurement) -> list[float]:
    return [*(loss for part in measurement.earlier for loss in part.losses), *measurement.losses]


def _error(losses: Sequence[float], wanted: Sequence[float]) -> float:
    assert len(losses) == len(wanted), (len(losses), len(wanted))
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


_HEAD = """\
# Runs with drawn failures

`python -m benchmarks.failures` writes this page. Failures are drawn as in the simulation and hit real runs on hosts
that are network namespaces, one rank of one core each. Goodput is predicted from one run with one failure, which is
none of these. The last column is the largest relative difference of a loss from the undisturbed run, in float64;
with a spare, of the steps since a host last took the place of another.

"""


def main(names: Sequence[str]) -> None:
    """Does all runs, or those of some set-ups, and prints a line of each; only all of them are written to the page."""
    if reason := unavailable():
        raise SystemExit(f"not run: {reason}")
    rows = ["| set-up | failures | stops | goodput | predicted: P5, P50, P95 | inside | time, s | losses |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    parts = ["| set-up | | " + " | ".join(_PARTS) + " |", "|---|---|" + "---|" * len(_PARTS)]
    print("\n".join(rows), flush=True)
    results: list[Outcome] = []
    for set_up in set_ups():
        if names and set_up.name not in names:
            continue
        for outcome in outcomes(set_up, _KEPT / set_up.name):
            results.append(outcome)
            rows.append(_row(outcome))
            parts += _waterfall(outcome)
            print(rows[-1], flush=True)
    inside = sum(bool(outcome.goodput.holds) for outcome in results)
    equal = sum(outcome.error <= _TOLERANCE for outcome in results)
    of_losses = f"losses are equal to {_TOLERANCE:g} in {equal}"
    summary = f"Goodput is inside P5 to P95 in {inside} of {len(results)} runs; {of_losses}."
    print(summary, flush=True)
    if names:
        return
    when = f"Made on {datetime.now(UTC):%Y-%m-%d} on {os.cpu_count()} cores, load average {os.getloadavg()[2]:.0f}."
    PAGE.write_text(
        f"{_HEAD}{summary} {when}\n\n" + "\n".join(rows) + "\n\nSeconds of each part, the predicted ones "
        "means:\n\n" + "\n".join(parts) + "\n"
    )
    shutil.rmtree(_KEPT)


_PARTS = ("compute", "fewer nodes", "checkpoint", "lost work", "detection", "waiting", "restart")


def _row(outcome: Outcome) -> str:
    set_up, goodput = outcome.set_up, outcome.goodput
    assert goodput.predicted is not None
    low, middle, high = (f"{value:.0%}" for value in goodput.predicted)
    hosts_of = (
        f"{set_up.num_hosts} hosts"
        if set_up.nodes[0] == set_up.num_hosts
        else f"{set_up.nodes[0]}:{set_up.nodes[1]} of {set_up.num_hosts} hosts"
    )
    cells = [
        f"{set_up.name}, {hosts_of}, seed {outcome.seed}",
        f"{set_up.cause.name} every {set_up.cause.mtbf_s:g} s",
        f"{sum(goodput.interruptions.values())} ({goodput.predicted_interruptions:.1f})",
        f"{goodput.measured:.0%}",
        f"{low}, {middle}, {high}",
        "yes" if goodput.holds else "NO",
        f"{sum(goodput.measured_s.values()):.0f} ({sum(goodput.predicted_s.values()):.0f})",
        f"{outcome.error:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def _waterfall(outcome: Outcome) -> Iterator[str]:
    for name, seconds in (("predicted", outcome.goodput.predicted_s), ("measured", outcome.goodput.measured_s)):
        cells = [f"{outcome.set_up.name}, seed {outcome.seed}" if name == "predicted" else "", name]
        yield f"| {' | '.join([*cells, *(f'{seconds.get(part, 0.0):.1f}' for part in _PARTS)])} |"


if __name__ == "__main__":
    with ending_signals_raise():  # so that hosts are removed
        main(sys.argv[1:])
