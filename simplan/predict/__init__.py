"""Prediction of one plan."""

from simplan.predict.build import build_program, cost_model, folding_of, run_dtype, run_spec_of, sharing_of
from simplan.predict.memory import rank_memory
from simplan.predict.sensitivity import MarginalValue, Resource, marginal_values
from simplan.predict.simulated import Simulated, StepContext, simulate_program
from simplan.predict.step import predict, predict_step
from simplan.predict.sweep import sweep

__all__ = [
    "MarginalValue",
    "Resource",
    "Simulated",
    "StepContext",
    "build_program",
    "cost_model",
    "folding_of",
    "marginal_values",
    "predict",
    "predict_step",
    "rank_memory",
    "run_dtype",
    "run_spec_of",
    "sharing_of",
    "simulate_program",
    "sweep",
]
