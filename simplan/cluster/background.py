"""Other training jobs on the topology of a cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simplan.base import MAX_DEVICES, Line, Seconds, Spec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec

Nodes = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_DEVICES)], ...], Field(min_length=1)]
"""Nodes of the topology, numbered from 0."""


class BackgroundJob(Spec):
    """Another job, whose steps follow each other on the links of the topology while the predicted step runs.

    Attributes:
        name: Display name.
        model, training, plan, software: As in ``simplan.job.Job``; its nodes are like those of the cluster.
        nodes: Nodes of the topology that its ranks fill, in this order.
        offset_s: Seconds from the begin of one of its steps to that of the predicted step, modulo its step time alone.
    """

    name: Annotated[Line, Field(min_length=1, max_length=200)]
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec
    nodes: Nodes
    offset_s: Seconds = 0.0
