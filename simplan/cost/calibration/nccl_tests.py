"""Output of nccl-tests (and rccl-tests) as communication timings.

A log may have several runs. Each has the ranks with their hosts and devices, and a table of sizes with the mean time of
an iteration; the out-of-place column is read. ``size`` is the buffer that ``CollectiveKind`` names.

Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/common.cu of versions 2.0 to 2.18.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from simplan.cost.calibration.format import Calibration, CommunicationTiming, Sample
from simplan.errors import Problem, SpecError
from simplan.io import read_text
from simplan.model.layer import CollectiveKind

_MAX_BYTES = 20 * 2**20
_MAX_RUNS = 1_000
_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "sendrecv": CollectiveKind.RING,  # every rank sends to the next and receives from the previous one
}
_TEST = re.compile(r"\b([a-z]+(?:_[a-z]+)*)_perf(?:_mpi)?\b")
_RANK = re.compile(
    r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(\S.*?)\s*$"
)
_ITERATIONS = re.compile(r"\bwarmup iters:\s*\d+\s+iters:\s*(\d+)")
_LIBRARY = re.compile(r"\b(?:N|R)CCL version\s*:?\s*([0-9][\w.+-]*)")
_ROW = re.compile(
    r"(?<![\w.])(\d+)\s+\d+\s+(?:u?int\d+|half|float|double|bfloat16|f8e\w+|fp8\w*)\s+"
    r"(?:sum|prod|max|min|avg|all|none|mulsum)\s+(\S+(?:\s+\S+){2,})"
)
_SAME_RATE = 0.05  # bandwidths are printed with two decimals
_STD = 0.04  # relative: of the mean over iterations from one run of nccl-tests to the next


@dataclass
class _Run:
    """One run of a test, as far as it is read."""

    test: str | None = None
    num_iterations: int = 20
    groups: Counter[str] = field(default_factory=Counter)
    ranks: set[int] = field(default_factory=set)
    hosts: Counter[str] = field(default_factory=Counter)
    device: str = ""
    has_root: bool = True
    rows: list[tuple[int, float]] = field(default_factory=list)

    def next(self) -> _Run:
        """Returns the run after this one in the log: another test may have the same ranks."""
        return _Run(self.test, self.num_iterations, self.groups, self.ranks, self.hosts, self.device, self.has_root)

    def without_ranks(self) -> _Run:
        """Returns the run after this one, whose ranks follow."""
        return _Run(self.test, self.num_iterations)


def read_nccl_tests(files: Sequence[Path]) -> Calibration:
    """Reads logs of nccl-tests on one kind of device.

    Returns:
        A calibration that holds nothing but timings of communication.

    Raises:
        SpecError: A file cannot be read, holds no results, results of an unknown test or of several kinds of devices,
            or its numbers contradict each other.
    """
    timings: list[CommunicationTiming] = []
    devices: dict[str, str] = {}
    library = None
    for file in files:
        text = read_text(file, _MAX_BYTES)
        runs = [run for run in _runs(text, str(file)) if run.rows]
        if not runs:
            fix = "give the whole output, from the lines '# Rank' to the table of sizes"
            raise _refused(file, "has no results of nccl-tests", fix)
        for run in runs:
            devices[run.device] = str(file)
            timings += _timings(run, file)
        found = _LIBRARY.search(text)
        library = found.group(1) if found else library
    if len(devices) > 1:
        (first, _), (second, where) = list(devices.items())[:2]
        raise _refused(where, f"was run on {second}, another file on {first}", "calibrate one kind of device at a time")
    (device,) = devices
    unique = {(t.kind, t.num_ranks, t.num_nodes, t.world_size, t.num_bytes): t for t in timings}
    return Calibration(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment={"device": device, "backend": "nccl", "nccl": library},
        device_kind="gpu",
        communication=tuple(unique.values()),
    )


def _runs(text: str, file: str) -> Iterator[_Run]:
    """Yields all runs of a log."""
    run, number = _Run(test=_named(Path(file).name)), 0
    for line_number, line in enumerate(text.splitlines(), 1):
        rank, row = _RANK.search(line), None
        if rank is None and (row := _ROW.search(line)) is None:
            test = _named(line)
            if test is not None and test != run.test and run.rows:
                yield run
                run, number = run.next(), number + 1
            run.test = test or run.test
            iterations = _ITERATIONS.search(line)
            run.num_iterations = max(1, min(10**9, int(iterations.group(1)))) if iterations else run.num_iterations
            if "redop" in line:
                run.has_root = "root" in line
            continue
        if rank is not None:
            if run.rows or (len(run.ranks) > 1 and int(rank.group(1)) == 0):
                yield run
                run, number = run.without_ranks(), number + 1
            _add_rank(run, rank, file)
        elif row is not None:
            _add_row(run, row, file, line_number)
        if number > _MAX_RUNS:
            raise _refused(file, f"has more than {_MAX_RUNS:,} runs", "split the file")
    yield run


def _named(text: str) -> str | None:
    """Returns the test that a line or a file's name mentions, such as ``all_reduce`` for ``all_reduce_perf``."""
    found = _TEST.search(text)
    return found.group(1) if found else None


def _add_rank(run: _Run, match: re.Match[str], file: str) -> None:
    rank, group, host, device = int(match.group(1)), match.group(2) or "0", match.group(3), match.group(4)
    if rank in run.ranks:
        rule = f"has rank {rank} twice: each process ran alone, without MPI"
        raise _refused(file, rule, "build nccl-tests with MPI=1, and repeat the run")
    if run.device and device != run.device:
        raise _refused(file, f"has ranks on {run.device} and on {device}", "measure one kind of device at a time")
    run.ranks.add(rank)
    run.groups[group] += 1
    run.hosts[host] += 1
    run.device = device


def _add_row(run: _Run, match: re.Match[str], file: str, line_number: int) -> None:
    """Adds a row; its bandwidth must be its size over its time."""
    num_bytes, columns = int(match.group(1)), match.group(2).split()[run.has_root :]
    try:
        time_us, rate = float(columns[0]), float(columns[1])
    except ValueError:
        return  # N/A where only in-place times are printed
    if not num_bytes or not 0 < time_us < 1e12:
        return
    if rate >= 1 and abs(num_bytes / time_us / 1e3 / rate - 1) > _SAME_RATE:
        rule = f"has {num_bytes:,} bytes in {time_us:g} us and {rate:g} GB/s in line {line_number}, which do not agree"
        raise _refused(file, rule, "give the output as nccl-tests prints it, in us and GB/s")
    run.rows.append((num_bytes, time_us * 1e-6))


def _timings(run: _Run, file: Path) -> Iterator[CommunicationTiming]:
    if run.test is None:
        fix = "give the log with the command, or name the file for the test: all_reduce_perf.txt"
        raise _refused(file, "does not say which test was run", fix)
    if run.test not in _KINDS:
        rule = f"is of {run.test}_perf, which no plan runs"
        raise _refused(file, rule, f"give logs of {', '.join(f'{test}_perf' for test in _KINDS)}")
    if not run.ranks:
        raise _refused(file, "does not list its ranks", "give the whole output, with the lines '# Rank'")
    num_ranks = max(run.groups.values()) if len(run.groups) > 1 else max(run.ranks) + 1
    if num_ranks < 2:
        raise _refused(file, "was run with one rank", "run it with as many ranks as the plan's groups have")
    if len(run.groups) > 1 and len(run.hosts) > 1:
        rule = "has several groups on several nodes, and does not say which ranks form a group"
        raise _refused(file, rule, "run one group at a time")
    num_nodes, per_node = len(run.hosts), max(run.hosts.values())
    if len(run.groups) == 1:
        per_node = max(per_node, -(-num_ranks // num_nodes))
    for num_bytes, seconds in run.rows:
        sample = Sample(mean_s=seconds, low_s=seconds, high_s=seconds, round_std=_STD, num_repeats=run.num_iterations)
        yield CommunicationTiming(
            kind=_KINDS[run.test],
            num_ranks=num_ranks,
            world_size=per_node,
            num_bytes=num_bytes,
            num_nodes=num_nodes,
            seconds=sample,
        )


def _refused(file: str | Path, rule: str, fix: str) -> SpecError:
    return SpecError(Problem(field="", rule=rule, fix=fix), file=str(file))
