"""Scenarios: files with the request to simplan and the expected prediction."""

from simplan.scenario.expectation import METRICS, CheckResult, Expectation, Metric, evaluate
from simplan.scenario.file import Scenario, load_scenario
from simplan.scenario.search import (
    SearchScenario,
    load_search,
    plan_document,
    plan_section,
    with_searched,
    with_software,
)
from simplan.scenario.source import make_job, read_source, scenario_from
from simplan.scenario.text import parse_scenario, parse_search

__all__ = [
    "METRICS",
    "CheckResult",
    "Expectation",
    "Metric",
    "Scenario",
    "SearchScenario",
    "evaluate",
    "load_scenario",
    "load_search",
    "make_job",
    "parse_scenario",
    "parse_search",
    "plan_document",
    "plan_section",
    "read_source",
    "scenario_from",
    "with_searched",
    "with_software",
]
