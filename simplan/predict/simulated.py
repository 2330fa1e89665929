"""A plan's Program with its prices and the times of all its operations."""

from __future__ import annotations

from dataclasses import dataclass

from simplan.cost.base import CostModel
from simplan.cost.calibration import Calibration
from simplan.cost.pricing import Pricing, price_program
from simplan.predict.build import build_program, core_use, cost_model
from simplan.prediction import Prediction
from simplan.program.program import Program
from simplan.sim.choice import Engine, engine_of
from simplan.sim.engine import CoreUse, Times
from simplan.spec.hardware import ClusterSpec

__all__ = ["Simulated", "simulate_again", "simulate_program"]


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated step.

    Attributes:
        program: What ran.
        pricing: How long its operations take alone.
        times: When they ran.
        engine: Runs it again with other durations.
        cores: Cores that ranks share, if they do.
    """

    program: Program
    pricing: Pricing
    times: Times
    engine: Engine
    cores: CoreUse | None


def simulate_program(program: Program, cost: CostModel, cluster: ClusterSpec) -> Simulated:
    """Prices and simulates."""
    pricing = price_program(program, cost)
    cores = core_use(program, cluster)
    engine = engine_of(program, cores)
    return Simulated(program, pricing, engine.times(pricing.durations_s), engine, cores)


def simulate_again(prediction: Prediction, calibration: Calibration | None = None) -> Simulated:
    """What is behind a prediction, made anew: predictions keep results only.

    Args:
        prediction: The prediction.
        calibration: What it was made from, if it was.
    """
    cluster = prediction.cluster
    cost = cost_model(cluster, prediction.training, prediction.plan, prediction.software, calibration)
    return simulate_program(build_program(prediction), cost, cluster)
