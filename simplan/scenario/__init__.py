"""Scenarios: what is asked of simplan in one file, and what the answer must be."""

from simplan.scenario.expectation import METRICS, CheckResult, Expectation, Metric, evaluate
from simplan.scenario.file import Scenario, load_scenario

__all__ = ["METRICS", "CheckResult", "Expectation", "Metric", "Scenario", "evaluate", "load_scenario"]
