"""Jobs of tests that are about the Program alone."""

from __future__ import annotations

from simplan.job import Job
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["job_to_lower"]


def job_to_lower(model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Job:
    """A job on whatever cluster, which lowering does not look at."""
    return Job(model, catalogue.cluster("dgx-h100", num_devices=plan.num_devices), training, plan, software)
