"""Jobs of tests that are about rules, or about the Program alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.rules import check_job
from simplan.software.software import SoftwareSpec
from simplan.training.training import TrainingSpec

__all__ = ["check", "job_to_lower"]


def job_to_lower(model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Job:
    """A job on whatever cluster, which lowering does not look at."""
    return Job(model, catalog.cluster("dgx-h100", num_devices=plan.num_devices), training, plan, software)


def check(
    model: ModelSpec, cluster: ClusterSpec | None = None, training: Mapping[str, Any] | None = None, **plan: Any
) -> None:
    """Raises what rules say of a plan under torch, unless said otherwise on as many H100s as it needs."""
    made, asked = ParallelPlan.model_validate(plan), {"global_batch_size": 24, **(training or {})}
    check_job(
        Job(
            model,
            cluster or catalog.cluster("dgx-h100", num_devices=made.num_devices),
            TrainingSpec.model_validate(asked),
            made,
            catalog.software("torch"),
        )
    )
