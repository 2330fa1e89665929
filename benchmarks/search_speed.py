"""Speed of exact searches for real questions, the files of ``benchmarks/searches``.

``python -m benchmarks.search_speed FILE WORKERS`` runs one search and prints what it took as JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joblib.externals.loky import get_reusable_executor

from benchmarks.alone import alone
from benchmarks.table import BenchmarkRow
from simplan.scenario import load_search

SEARCHES = Path(__file__).with_name("searches")

_GOALS_S = {
    "llama3-70b-fp8-128-h100-nemo": 60,
    "llama3.1-405b-fp8-256-b200-megatron-bridge": 60,
    "llama3.1-405b-fp8-512-h100-megatron-bridge": 60,
    "llama3-8b-16-h100-16-a100-torch": 60,
    "qwen2.5-72b-64-a100-megatron-bridge": 25,
}
_GOALS_OF_TWO_S = {
    "gpt3-175b-1024-a100-torch": 20,
    "gpt3-175b-1024-a100-megatron-lm-2022": 30,
    "llama3-70b-128-h100-megatron-core": 8,
    "llama3-70b-128-h100-torchtitan": 12,
    "llama3-70b-128-h100-maxtext": 25,
    "llama3-70b-128-h100-megatron-deepspeed": 25,
    "llama3-70b-128-h100-megatron-bridge": 25,
}
"""Seconds on two cores, with two workers."""
_PLAIN, _SHARED_LINKS = "llama3-8b-32-h100-torch", "llama3-8b-32-h100-torch-ecmp"
"""One search without and with links that flows share."""

_LIMIT_S = 300
_LONG_S = 20.0
_LEAST_SPEEDUP, _MOST_RATIO = 1.6, 4.0
_PEAK_BYTES = 2**29


def search_speed() -> Iterator[BenchmarkRow]:
    """Rows for each search with one worker or two, for both where it is long, and for shared links."""
    cpu_s: dict[str, float] = {}
    for path in sorted(SEARCHES.glob("*.yaml")):
        name = path.stem
        if name in _GOALS_OF_TWO_S:
            yield _row(name, 2, _took(path, 2), _GOALS_OF_TWO_S[name])
            continue
        alone = _took(path, 1)
        cpu_s[name] = alone["cpu_s"]
        yield _row(name, 1, alone, _GOALS_S.get(name))
        if alone["taken_s"] > _LONG_S and alone["finished"]:
            two = _took(path, 2)
            yield _row(name, 2, two, None)
            yield _ratio_row(f"{name}: one worker over two", alone["taken_s"] / two["taken_s"], least=_LEAST_SPEEDUP)
    ratio = cpu_s[_SHARED_LINKS] / cpu_s[_PLAIN]
    yield _ratio_row(f"CPU time of {_SHARED_LINKS} over {_PLAIN}", ratio, highest=_MOST_RATIO)


def _took(path: Path, workers: int) -> dict[str, Any]:
    return alone("benchmarks.search_speed", str(path), str(workers))


def _row(name: str, workers: int, result: dict[str, Any], goal_s: int | None) -> BenchmarkRow:
    within = result["finished"] and (goal_s is None or result["taken_s"] <= goal_s)
    best = "no plan" if result["best_s"] is None else f"best {result['best_s']:.3f} s"
    return BenchmarkRow(
        f"search {name}, {workers} worker{'s' if workers > 1 else ''}",
        "0.5 GiB" if goal_s is None else f"at most {goal_s} s, 0.5 GiB",
        f"{'' if result['finished'] else 'not finished in '}{result['taken_s']:.1f} s, {result['cpu_s']:.1f} s of CPU, "
        f"{result['peak_bytes'] / 2**30:.2f} GiB in the largest process ({result['total']:,} candidates, "
        f"{result['bounded']:,} bounded, {result['timed']:,} timed; {best})",
        within and result["peak_bytes"] <= _PEAK_BYTES,
    )


def _ratio_row(what: str, ratio: float, *, least: float = 0.0, highest: float = float("inf")) -> BenchmarkRow:
    goal = f"at least {least}" if least else f"at most {highest:g}"
    return BenchmarkRow(what, goal, f"{ratio:.2f}", least <= ratio <= highest)


def _search(path: str, workers: int) -> dict[str, Any]:
    """One search in this process, interrupted at the limit as by Ctrl-C: it then has the best plan so far."""
    scenario = load_search(path)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(_LIMIT_S)
    start_s = time.perf_counter()
    result = scenario.search(jobs=workers)
    taken_s = time.perf_counter() - start_s
    signal.alarm(0)
    if workers > 1:
        get_reusable_executor().shutdown(wait=True)  # what a process used is known once it has ended
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "finished": not result.interrupted,
        "taken_s": taken_s,
        "cpu_s": sum(usage.ru_utime + usage.ru_stime for usage in used),
        "peak_bytes": max(usage.ru_maxrss for usage in used) * 1024,
        "total": result.space.total,
        "bounded": result.space.bounded,
        "timed": result.space.timed,
        "best_s": None if result.best is None else result.best.step_time_s,
    }


if __name__ == "__main__":
    print(json.dumps(_search(sys.argv[1], int(sys.argv[2]))))
