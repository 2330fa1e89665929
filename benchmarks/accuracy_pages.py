"""Reference pages on accuracy: figures by source of runs, and by device, framework and precision.

    python -m benchmarks.accuracy_pages

writes docs/reference/accuracy.md and a section of docs/reference/support.md. Takes about two minutes.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.accuracy_gate import FOLDERS, ROOT
from benchmarks.strategies import strategy_table
from simplan import catalog
from simplan.accuracy.measured import Measured
from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.predict_runs import predict_runs
from simplan.accuracy.result import Accuracy
from simplan.accuracy.run import PublishedRun, ReadFile
from simplan.accuracy.statistics import step_time_figures
from simplan.report.accuracy import accuracy_head, accuracy_markdown
from simplan.report.table import format_table_markdown
from simplan.scenario import load_scenario
from simplan.scenario.published.reading import read_published
from simplan.training import Precision

ACCURACY_PAGE = ROOT / "docs" / "reference" / "accuracy.md"
SUPPORT_PAGE = ROOT / "docs" / "reference" / "support.md"
MEASURED = ROOT / "scenarios" / "measured"
BEGIN, END = "<!-- runs: begin, written by `python -m benchmarks.accuracy_pages` -->", "<!-- runs: end -->"
_FITTED = "scenarios/published"
_Level = tuple[str, str, str]


def main() -> None:
    """Entry point of the command."""
    published = read_published([ROOT / "scenarios" / folder for folder in FOLDERS])
    files = [ReadFile(_shown(read.file), read.runs) for read in published]
    outcomes = predict_runs([*files, *measured_runs()], jobs=-1)
    today = datetime.datetime.now(datetime.UTC).date()
    ACCURACY_PAGE.write_text(accuracy_page([o for o in outcomes if "measured" not in o.file], today), encoding="utf-8")
    before, _, rest = SUPPORT_PAGE.read_text(encoding="utf-8").partition(BEGIN)
    section = f"{BEGIN}\n\n{support_section(outcomes, today)}\n\n{END}"
    SUPPORT_PAGE.write_text(before + section + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(f"wrote {ACCURACY_PAGE.relative_to(ROOT)} and {SUPPORT_PAGE.relative_to(ROOT)}\n")


def measured_runs() -> Iterator[ReadFile]:
    """Runs of scenarios/one-gpu on a device of our own, as published ones."""
    for report in sorted(MEASURED.glob("*/report.json")):
        runs = []
        for case in json.loads(report.read_text(encoding="utf-8"))["cases"]:
            if case["kind"] != "run" or case["failure"] is not None:
                continue
            job = load_scenario(ROOT / "scenarios" / "one-gpu" / f"{case['name']}.yaml").job
            measured = Measured(source=_shown(report), step_time_s=case["measured_step_time_s"])
            runs.append(PublishedRun(case["name"], measured, job, {"preset": job.software.id}))
        yield ReadFile(_shown(report), tuple(runs))


def accuracy_page(outcomes: Sequence[RunOutcome], today: datetime.date) -> str:
    """Text of the page on accuracy by source."""
    result = Accuracy(tuple(outcomes))
    head = " ".join(accuracy_head(result).split())
    return "\n\n".join(
        [
            "# Accuracy by source",
            f"`python -m benchmarks.accuracy_pages` predicts all published runs of `scenarios`, and wrote this page on "
            f"{today}. [Accuracy](../explanation/accuracy.md) says what the figures mean. `published` is the set that "
            "constants are fitted on; no fit used the others.",
            f"{head}.",
            accuracy_markdown(result),
            "",
        ]
    )


def support_section(outcomes: Iterable[RunOutcome], today: datetime.date) -> str:
    """Tables of runs by device, framework and precision, and by strategy, with what has none."""
    compared = [outcome for outcome in outcomes if outcome.error is not None]
    levels: dict[_Level, list[RunOutcome]] = defaultdict(list)
    for outcome in compared:
        job = outcome.run.known_job
        framework = outcome.run.fallback_for or job.software.id
        levels[job.cluster.device.id, framework, job.training.precision].append(outcome)
    devices = {device for device, _, _ in levels}
    rows = [row for name in _in_order(devices) for row in _device_rows(name, levels)]
    headers = ["device", "framework", "precision", "runs", "of them in the fit", "mean error", "in 90 % interval"]
    frameworks = sorted({*catalog.names("software")} - {framework for _, framework, _ in levels})
    without = [name for name in catalog.names("devices") if name not in devices and _is_device(name)]
    return "\n\n".join(
        [
            f"Steps of {len(compared):,} published and own runs, compared on {today}. Below a device "
            "are the precisions and the frameworks of today that no run of it had.",
            format_table_markdown(headers, rows),
            f"Devices with 0 runs: {', '.join(f'`{name}`' for name in without)}.",
            f"Frameworks with 0 runs: {', '.join(f'`{name}`' for name in frameworks)}.",
            "The same runs by strategy. A run counts for each of its strategies.",
            strategy_table(compared, _is_fitted),
        ]
    )


def _device_rows(device: str, levels: Mapping[_Level, list[RunOutcome]]) -> Iterator[list[str]]:
    of_device = {key: outcomes for key, outcomes in levels.items() if key[0] == device}
    for (_, framework, precision), outcomes in sorted(of_device.items()):
        figures = step_time_figures(outcomes)
        fitted = sum(map(_is_fitted, outcomes))
        mean, inside = figures.errors.mape, figures.interval_coverage
        cells = [str(len(outcomes)), str(fitted), _percent(mean), _percent(inside, digits=0)]
        yield [f"`{device}`", framework, precision, *cells]
    seen = {precision for _, _, precision in of_device}
    peaks = catalog.device(device).peak_flop_per_s
    missing = [precision for precision in get_args(Precision) if precision in peaks and precision not in seen]
    if missing:
        yield [f"`{device}`", "any", ", ".join(missing), "0", "0", "", ""]
    current = {name for name in catalog.names("software") if not re.search(r"-20\d\d$", name)}
    others = sorted(current - {framework for _, framework, _ in of_device})
    yield [f"`{device}`", ", ".join(others), "any", "0", "0", "", ""]


def _is_fitted(outcome: RunOutcome) -> bool:
    return outcome.file.startswith(_FITTED) and outcome.run.fallback_for is None


def _in_order(devices: set[str]) -> list[str]:
    return [name for name in catalog.names("devices") if name in devices]


def _is_device(name: str) -> bool:
    return catalog.canonical_name("devices", name) == name and catalog.device(name).kind != "cpu"


def _percent(value: float | None, *, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _shown(file: str | Path) -> str:
    return Path(file).resolve().relative_to(ROOT).as_posix()


if __name__ == "__main__":
    main()
