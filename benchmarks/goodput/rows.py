"""Rows of the report: what was published, what a preset was fitted to, and what simplan says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from simplan import catalog
from simplan.goodput.sections import Recovery, Reliability
from simplan.goodput.setup import RunSetup, Size
from simplan.scenario.whole_run.failures import causes_of

Outcome = Literal["met", "missed", "fitted", "implied"]
"""``fitted``: the number went into the preset, so agreement is no success. ``implied``: an input of the run was not
published, and the number says what it must have been."""
HEADER = "| run | published | mark | fitted on it | simplan | outcome |\n|---|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published number.

    Attributes:
        run: Run or cluster, and what was counted.
        published: The number.
        mark: P if read in the source or computed from it, S in a secondary collection.
        fitted: Part of the number that went into the preset; empty for nothing.
        predicted: What simplan says.
        outcome: See ``Outcome``.
    """

    run: str
    published: str
    mark: Literal["P", "S"]
    fitted: str
    predicted: str
    outcome: Outcome

    def to_markdown(self) -> str:
        """Row of the table."""
        outcome = "**missed**" if self.outcome == "missed" else self.outcome
        cells = (self.run, self.published, self.mark, self.fitted or "no", self.predicted, outcome)
        return f"| {' | '.join(cells)} |"


def run_with(preset: str, cluster: str, num_devices: int, **fields: Any) -> RunSetup:
    """Run on nodes of a cluster with the failures of a preset, one step of 10 s if nothing else is given."""
    section = Reliability.model_validate_json(json.dumps(catalog.reliability(preset)))
    hardware = catalog.cluster(cluster, num_devices)
    sizes = (Size(num_nodes=hardware.num_nodes, step_s=fields.pop("step_s", 10.0)),)
    causes = causes_of(section, Recovery(), hardware)
    return RunSetup(sizes=sizes, devices_per_node=hardware.ranks_per_node, causes=causes, **fields)


def solved(function: Callable[[float], float], target: float, low: float, high: float, tolerance: float) -> float:
    """Argument at which a rising function has a value, by halving."""
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2
