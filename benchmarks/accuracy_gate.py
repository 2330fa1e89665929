"""Accuracy on published runs, compared with what is committed.

    python -m benchmarks.accuracy_gate [--write]

Partitions of all runs are a source, a device, a framework, a precision and a size of model. The gate fails if the mean
error of all runs grows by more than 0.5 points, that of a partition of eight runs or more by more than 2, or a run that
was predicted now is skipped. ``--write`` commits the figures of today.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.predict_runs import predict_runs
from simplan.scenario.published.reading import read_published

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = Path(__file__).with_name("accuracy.json")
FOLDERS = ("published", "heldout", "validation")
MOST_OVERALL, MOST_IN_PARTITION = 0.5, 2.0
"""Points by which a mean error may grow, in percent."""
_FEWEST = 8
_SIZES = ((2e9, "below 2 billion parameters"), (20e9, "2 to 20 billion parameters"), (100e9, "20 to 100 billion"))


def figures() -> dict[str, Any]:
    """Mean error and coverage in percent of all runs and by partition, and the names of the runs that are predicted."""
    files = read_published([ROOT / "scenarios" / folder for folder in FOLDERS])
    outcomes = [outcome for outcome in predict_runs(files, jobs=-1) if outcome.error is not None]
    parts: dict[str, list[RunOutcome]] = defaultdict(list)
    for outcome in outcomes:
        for part in _partitions(outcome):
            parts[part].append(outcome)
    return {
        "overall": _mean(outcomes),
        "partitions": {part: _mean(errors) for part, errors in sorted(parts.items()) if len(errors) >= _FEWEST},
        "runs": sorted(outcome.run.id for outcome in outcomes),
    }


def _partitions(outcome: RunOutcome) -> list[str]:
    job = outcome.run.known_job
    parameters = job.model.num_parameters
    size = next((words for limit, words in _SIZES if parameters < limit), "100 billion parameters and more")
    file = Path(outcome.file)
    software = outcome.run.fallback_for or job.software.id
    return [f"{file.parent.name}/{file.stem}", job.cluster.device.id, software, job.training.precision, size]


def _mean(outcomes: list[RunOutcome]) -> dict[str, float]:
    errors = [abs(outcome.error or 0.0) for outcome in outcomes]
    inside = [bool(outcome.in_interval) for outcome in outcomes]
    return {
        "runs": len(outcomes),
        "mean_error": round(100 * sum(errors) / len(errors), 2),
        "coverage": round(100 * sum(inside) / len(inside), 1),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences on what got worse by more than is allowed."""
    sentences = []
    rows = [("all runs", before["overall"], now["overall"], MOST_OVERALL)]
    rows += [
        (part, old, now["partitions"][part], MOST_IN_PARTITION)
        for part, old in before["partitions"].items()
        if part in now["partitions"]
    ]
    for part, old, new, allowed in rows:
        if new["mean_error"] > old["mean_error"] + allowed:
            sentences.append(
                f"{part}: mean error {new['mean_error']} % ({old['mean_error']} % before); at most +{allowed}"
            )
    lost = sorted(set(before["runs"]) - set(now["runs"]))
    return [*sentences, *(f"{run}: is not predicted any more" for run in lost)]


def main() -> int:
    """Entry point of the command; 1 if something got worse."""
    parser = argparse.ArgumentParser(description="compare the accuracy on published runs with what is committed")
    parser.add_argument("--write", action="store_true", help=f"replace {COMMITTED.name}")
    arguments, now = parser.parse_args(), figures()
    sys.stdout.write(f"{now['overall']['runs']} runs: mean error {now['overall']['mean_error']} %, ")
    sys.stdout.write(f"{now['overall']['coverage']} % inside the interval\n")
    if arguments.write:
        COMMITTED.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    worse = differences(json.loads(COMMITTED.read_text()), now)
    sys.stdout.writelines(f"{sentence}\n" for sentence in worse)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
