"""Numbers of predictions, searches and accuracy, frozen in a file, and their comparison with those of another commit.

``python -m benchmarks.golden OUT.json [--only KIND ...] [--searches FILE ...] [--compare BEFORE.json]`` freezes those
of the working directory, a checkout, and exits with 1 if a number differs from the ones before. A search of
``benchmarks/searches`` takes up to minutes, so ``--searches`` names fewer of them. What only one of the two files has,
such as a new scenario, is no difference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import simplan
from simplan.accuracy.predict_runs import predict_runs
from simplan.cli.check import scenario_files
from simplan.errors import SimplanError
from simplan.scenario.published.reading import read_published
from simplan.scenario.search import load_search
from simplan.search import SearchResult, search

Entry = tuple[str, dict[str, Any]]
"""Name and numbers of a scenario, a search or a run; the numbers of ``information`` are not compared."""

_TOLERANCE = 1e-12
_SHOWN = 40
_LONG_TEXT = 200
_INPUTS = frozenset({"schema_version", "kind", "name", "inputs", "links", "assumptions", "timeline"})
_SEARCHES = sorted(Path(__file__).with_name("searches").glob("*.yaml"))
_SMALL: dict[str, dict[str, Any]] = {
    "small": {},
    "small, time and memory": {"objectives": ["step_time", "memory"]},
    "small, fewest devices": {"objective": "num_devices", "num_devices": [2, 4, 8], "max_step_time_s": 20.0},
    "small, context": {"cp": [1, 2, 4], "compiled": [False, True]},
}
"""Searches of seconds, which cover objectives and axes that those of real questions do not have."""


def predictions(_: Sequence[Path]) -> Iterator[Entry]:
    """Every number of ``predict``, of each scenario with a plan."""
    for path in scenario_files([Path("scenarios")]):
        try:
            numbers = simplan.load_scenario(path).predict().to_json(timeline=False)
        except SimplanError as error:
            numbers = {"error": str(error)}
        yield str(path), {key: value for key, value in numbers.items() if key not in _INPUTS}


def searches(paths: Sequence[Path]) -> Iterator[Entry]:
    """Plans, times and memory of small searches and of those of the files."""
    job = simplan.make_job("gpt2-1.5b", cluster="dgx-h100", num_nodes=1, global_batch_size=64)
    for name, space in _SMALL.items():
        yield name, _numbers_of_search(partial(search, job, space))
    for path in paths:
        yield path.stem, _numbers_of_search(load_search(path).search)


def _numbers_of_search(run: Callable[[], SearchResult]) -> dict[str, Any]:
    """Ranked plans and the front; counts and what follows from them change with the bounds of a search."""
    start_s = time.process_time()
    result = run()
    document = result.to_json()
    plans = {
        key: [{field: value for field, value in plan.items() if field != "alike"} for plan in document[key]]
        for key in ("ranked", "pareto")
    }
    information = {key: document[key] for key in ("space", "nearest_misses", "changes")}
    return {**plans, "information": information | {"cpu_s": time.process_time() - start_s}}


def accuracy(_: Sequence[Path]) -> Iterator[Entry]:
    """Predicted numbers of every published run."""
    for outcome in predict_runs(read_published([Path("scenarios/published")])):
        predicted = None if outcome.predicted is None else asdict(outcome.predicted)
        yield f"{outcome.file} {outcome.run.id}", {"predicted": predicted, "reason": outcome.reason}


_KINDS: dict[str, Callable[[Sequence[Path]], Iterator[Entry]]] = {
    "predict": predictions,
    "accuracy": accuracy,
    "search": searches,
}


def freeze(kinds: Sequence[str], search_files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Entries by kind, also in the file, which is written after each search so that none is lost."""
    frozen: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for kind in kinds:
        for name, numbers in _KINDS[kind](search_files):
            frozen[kind][name] = _plain(numbers)
            if kind == "search":
                out.write_text(json.dumps(frozen))
                print(f"search {name}: {numbers['information']['cpu_s']:.1f} s of CPU", flush=True)
        out.write_text(json.dumps(frozen))
        print(f"{kind}: {len(frozen[kind])} frozen", flush=True)
    return frozen


def _plain(value: Any) -> Any:
    """As JSON reads it again, with hashes of long texts such as action tables."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return sha256(value.encode()).hexdigest()
    return value


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths whose values differ, with both; integers, texts and structure must be equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key, "absent"), after.get(key, "absent"), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}/{place}")
    elif type(before) is float and type(after) is float:
        if not math.isclose(before, after, rel_tol=_TOLERANCE):
            yield f"{path}: {before!r} before, {after!r} after"
    elif type(before) is not type(after) or before != after:
        yield f"{path}: {_short(before)} before, {_short(after)} after"


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, dict | list) else repr(value)


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print all differences of entries that both have; 1 if there is any."""
    num_differences = 0
    for kind, entries in after.items():
        old = before.get(kind, {})
        common = [name for name in entries if name in old]
        print(f"{kind}: {len(common)} compared; {len(entries) - len(common)} only after")
        for name in common:
            changes = [*differences(_compared(old[name]), _compared(entries[name]), f"{kind} {name}")]
            for place, difference in enumerate(changes):
                if place == _SHOWN:
                    print(f"  and {len(changes) - place} more of {name}")
                    break
                print(f"  {difference}")
            num_differences += len(changes)
    print(f"{num_differences} differences")
    return 1 if num_differences else 0


def _compared(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "information"}


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__)
    parser.add_argument("out", type=Path, help="file of the frozen numbers")
    parser.add_argument("--only", nargs="+", choices=[*_KINDS], default=[*_KINDS], help="what is frozen")
    parser.add_argument("--searches", nargs="*", type=Path, default=_SEARCHES, help="searches instead of all")
    parser.add_argument("--compare", type=Path, help="numbers frozen before")
    options = parser.parse_args(arguments)
    frozen = freeze(options.only, options.searches, options.out)
    return 0 if options.compare is None else compare(json.loads(options.compare.read_text()), frozen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
