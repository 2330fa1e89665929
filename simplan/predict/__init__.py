"""One plan -> a Prediction."""

from simplan.predict.build import build_program, core_use, cost_model, folding_of
from simplan.predict.evaluate import predict, rank_memory
from simplan.predict.job import job_of
from simplan.predict.simulated import Simulated, simulate_again, simulate_program

__all__ = [
    "Simulated",
    "build_program",
    "core_use",
    "cost_model",
    "folding_of",
    "job_of",
    "predict",
    "rank_memory",
    "simulate_again",
    "simulate_program",
]
