"""CPU time and memory of predictions of random jobs, each ended at a limit.

``python -m benchmarks.random_jobs FIRST [NUMBER]`` shows the job of a seed as a scenario file and measures it; with
NUMBER, that many jobs in turn, as the benchmark does.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.job_draw import random_scenario
from benchmarks.table import BenchmarkRow, to_markdown
from simplan.errors import SimplanError
from simplan.scenario.writing import scenario_text

_NUM_JOBS = 1000
_JOBS_OF_A_PROCESS = 50
_LIMIT_S, _LIMIT_BYTES = 30, 3 * 2**30
_GOAL_S, _GOAL_BYTES = 5.0, 2**30
_SHOWN = 5
_WORKER = "--in-this-process"


@dataclass(frozen=True, slots=True)
class JobCost:
    """Cost of the prediction of one random job.

    Attributes:
        cpu_s: Seconds of CPU.
        peak_bytes: Resident memory of the process, with what predictions before left in caches; of all predictions in
            the process, if this one ended it.
        num_operations: Operations of the step's Program; 0 if it was not predicted.
        error: Traceback of an exception that is no ``SimplanError``; empty for none.
        ended: Limit at which the prediction was ended; empty if it was not.
    """

    seed: int
    cpu_s: float
    peak_bytes: int
    num_operations: int = 0
    error: str = ""
    ended: str = ""

    @property
    def words(self) -> str:
        """Seed and cost on one line."""
        how = f", ended: {self.ended}" if self.ended else ""
        bug = f", {self.error.strip().splitlines()[-1]}" if self.error else ""
        cost = f"{self.cpu_s:.2f} s, {self.peak_bytes / 2**30:.2f} GiB, {self.num_operations:,} operations"
        return f"seed {self.seed}: {cost}{how}{bug}"


def random_jobs() -> Iterator[BenchmarkRow]:
    """Rows for time, memory and exceptions of the predictions of random jobs."""
    costs = [*measured(range(_NUM_JOBS))]
    yield from rows(costs)


def rows(costs: Sequence[JobCost]) -> Iterator[BenchmarkRow]:
    """Rows of the jobs' costs, with the seeds of the worst."""
    what = f"predictions of {len(costs):,} random jobs on 1 to 8,192 devices"
    by_time = sorted(costs, key=lambda cost: cost.cpu_s, reverse=True)
    slow = [cost for cost in by_time if cost.cpu_s > _GOAL_S]
    middle_s, most_s = (by_time[len(by_time) * share // 100].cpu_s for share in (50, 1))
    slow_text = f"{len(slow)} (median {middle_s:.2f} s, 99 % up to {most_s:.2f} s; most {_listed(by_time)})"
    yield BenchmarkRow(f"{what}: over {_GOAL_S:.0f} s of CPU", "none", slow_text, not slow)

    by_memory = sorted(costs, key=lambda cost: cost.peak_bytes, reverse=True)
    large = [cost for cost in by_memory if cost.peak_bytes > _GOAL_BYTES or cost.ended == "memory"]
    middle_bytes = by_memory[len(by_memory) // 2].peak_bytes
    slow_text = f"{len(large)} (median {middle_bytes / 2**30:.2f} GiB; most {_listed(by_memory)})"
    yield BenchmarkRow(f"{what}: over 1 GiB", "none", slow_text, not large)

    wrong = [cost for cost in costs if cost.error or cost.ended not in ("", "CPU", "memory")]
    yield BenchmarkRow(f"{what}: exceptions of bugs", "none", f"{len(wrong)} ({_listed(wrong)})", not wrong)


def _listed(costs: Sequence[JobCost]) -> str:
    return "; ".join(cost.words for cost in costs[:_SHOWN])


def measured(seeds: Sequence[int]) -> Iterator[JobCost]:
    """Costs of the jobs of seeds, in processes of many jobs; a process that ends early takes only one job with it."""
    left = list(seeds)
    while left:
        asked = left[:_JOBS_OF_A_PROCESS]
        for cost in _in_a_process(asked):
            assert cost.seed == left.pop(0)
            yield cost


def _in_a_process(seeds: Sequence[int]) -> Iterator[JobCost]:
    """Costs of the first jobs, up to the one that ended the process."""
    command = [sys.executable, "-m", "benchmarks.random_jobs", _WORKER, *map(str, seeds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = list(seeds)
        for line in process.stdout:
            yield JobCost(**json.loads(line))
            del left[0]
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        at_limit = process.returncode == -signal.SIGXCPU
        ended = "CPU" if at_limit else f"exit code {process.returncode}"
        yield JobCost(left[0], _LIMIT_S if at_limit else 0.0, used.ru_maxrss * 1024, ended=ended)


def _measure(seeds: Sequence[int]) -> None:
    """Print the cost of each seed's job as a line of JSON; ends early once memory ran out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        cost = job_cost(seed)
        print(json.dumps(asdict(cost)), flush=True)
        if cost.ended:
            return


def job_cost(seed: int) -> JobCost:
    """Cost of the prediction of a seed's job in this process, which the limit of CPU seconds may end."""
    _, scenario = random_scenario(seed)
    num_operations, error, ended = 0, "", ""
    _limit_from_here()
    start_s = time.process_time()
    try:
        _, simulated = scenario.predict_step()
        num_operations = len(simulated.program)
    except SimplanError:
        pass
    except MemoryError:
        ended = "memory"
    except Exception:
        error = traceback.format_exc()
    return JobCost(seed, time.process_time() - start_s, _status_bytes("VmHWM"), num_operations, error, ended)


def _limit_from_here() -> None:
    """Limit CPU and address space to more than this process has used, and forget its peak of memory."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(time.process_time()) + _LIMIT_S,
        resource.RLIMIT_AS: _status_bytes("VmSize") + _LIMIT_BYTES,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def _status_bytes(key: str) -> int:
    """Figure of this process in ``/proc``: ``VmSize``, or ``VmHWM``, the peak of resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    if arguments[0] == _WORKER:
        _measure([int(seed) for seed in arguments[1:]])
        return 0
    first, number = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 1
    if number == 1:
        document, scenario = random_scenario(first)
        print(scenario_text(document, repr(scenario.job)))
    costs = []
    for cost in measured(range(first, first + number)):
        costs.append(cost)
        print(cost.words, cost.error, sep="\n" if cost.error else "", flush=True)
    if number > 1:
        print(to_markdown([*rows(costs)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
