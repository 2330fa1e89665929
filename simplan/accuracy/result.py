"""Result of ``simplan accuracy``: outcomes of all runs, and error figures per file and overall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from simplan.accuracy.left_out import without_sources
from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.plan_ranking import Choices, choices
from simplan.accuracy.statistics import (
    ErrorFigures,
    IntervalFigures,
    Verdicts,
    constant_mfu,
    memory_figures,
    step_time_figures,
    verdicts,
)

ACCURACY_SCHEMA_VERSION = 1

IN_CATALOG, NOT_IN_CATALOG = "frameworks in the catalog", "other frameworks"
"""Groups of runs: the framework has a profile of its own, or uses a fallback profile."""


@dataclass(frozen=True, slots=True)
class LeftOutFigures:
    """Figures of runs of a fit, each predicted with constants fitted without its whole source."""

    step_time: IntervalFigures
    choosing: Choices

    def to_json(self) -> dict[str, Any]:
        """Part of the JSON document."""
        return asdict(self) | {"step_time": self.step_time.to_json()}


@dataclass(frozen=True, slots=True)
class Figures:
    """Error figures of a set of runs.

    Attributes:
        num_runs, num_skipped: Number of runs, and of runs without a prediction.
        constant_mfu: Errors of the constant-MFU baseline, fitted to the same runs per file, device and
            precision.
        peak_memory: Errors and interval coverage of memory peaks: ``all``, and by kind of figure.
        oom: Counts of correct and wrong out-of-memory predictions.
        choosing: Quality of choices among plans.
        source_left_out: The same of those that a fit used, predicted without their source; None without such runs.
    """

    num_runs: int
    num_skipped: int
    step_time: IntervalFigures
    constant_mfu: ErrorFigures
    peak_memory: dict[str, IntervalFigures]
    oom: Verdicts
    choosing: Choices
    source_left_out: LeftOutFigures | None = None

    @classmethod
    def of(cls, outcomes: Sequence[RunOutcome]) -> Figures:
        """Compute the figures of outcomes."""
        left = without_sources(outcomes)
        return cls(
            num_runs=len(outcomes),
            num_skipped=sum(outcome.predicted is None for outcome in outcomes),
            step_time=step_time_figures(outcomes),
            constant_mfu=constant_mfu(outcomes),
            peak_memory=memory_figures(outcomes),
            oom=verdicts(outcomes),
            choosing=choices(outcomes),
            source_left_out=LeftOutFigures(step_time_figures(left), choices(left)) if left else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Part of the JSON document."""
        figures = asdict(self)
        by_kind = {kind: others.to_json() for kind, others in self.peak_memory.items()}
        peak_memory = by_kind.pop("all") | {"by_kind": by_kind}
        left = None if self.source_left_out is None else self.source_left_out.to_json()
        others = {"peak_memory": peak_memory, "oom": self.oom.to_json(), "source_left_out": left}
        return figures | {"step_time": self.step_time.to_json(), **others}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Outcomes and figures of all runs.

    Attributes:
        outcomes: In the order of the files.
        without_runs: Files that contain other data.
    """

    outcomes: tuple[RunOutcome, ...]
    without_runs: tuple[str, ...] = ()

    def of_file(self, file: str) -> list[RunOutcome]:
        """Outcomes of one file."""
        return [outcome for outcome in self.outcomes if outcome.file == file]

    @property
    def by_file(self) -> dict[str, Figures]:
        """Error figures of each file."""
        return {file: Figures.of(self.of_file(file)) for file in dict.fromkeys(o.file for o in self.outcomes)}

    @property
    def by_framework(self) -> dict[str, Figures]:
        """Figures of frameworks in the catalog and of others; empty unless there are runs of both."""
        groups: dict[str, list[RunOutcome]] = {IN_CATALOG: [], NOT_IN_CATALOG: []}
        for outcome in self.outcomes:
            groups[IN_CATALOG if outcome.run.fallback_for is None else NOT_IN_CATALOG].append(outcome)
        return {name: Figures.of(outcomes) for name, outcomes in groups.items()} if all(groups.values()) else {}

    @property
    def overall(self) -> Figures:
        """Error figures of all runs."""
        return Figures.of(self.outcomes)

    @property
    def names(self) -> dict[str, str]:
        """Name of each file in tables: without folder and suffix if that is unique, else the path."""
        files = list(dict.fromkeys(outcome.file for outcome in self.outcomes))
        stems = [PurePath(file).stem for file in files]
        return {file: stem if stems.count(stem) == 1 else file for file, stem in zip(files, stems, strict=True)}

    def to_json(self) -> dict[str, Any]:
        """JSON document of ``simplan accuracy --json``."""
        return {
            "schema_version": ACCURACY_SCHEMA_VERSION,
            "kind": "accuracy",
            "runs": [outcome.to_json() for outcome in self.outcomes],
            "by_file": {file: figures.to_json() for file, figures in self.by_file.items()},
            "by_framework": {group: figures.to_json() for group, figures in self.by_framework.items()},
            "overall": self.overall.to_json(),
            "without_runs": list(self.without_runs),
        }
