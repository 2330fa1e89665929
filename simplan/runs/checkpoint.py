"""Checkpoints of a run: what is asked, what one says about itself, and what of it can go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, NonNegative, Spec
from simplan.errors import Problem
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.training.training import TrainingSpec

__all__ = ["CheckpointHeader", "CheckpointTiming", "Checkpointing", "differences"]


class Checkpointing(Spec):
    """How a run keeps its state.

    Attributes:
        folder: Absolute path, which all nodes share; one folder in it for every checkpoint.
        every: Steps between checkpoints.
        keep: Whole checkpoints that stay; older ones are deleted.
        resume: Begin with the newest checkpoint of the folder; from the beginning when there is none.
        max_restarts: How often ranks that failed or hang are started again, from the newest checkpoint.
    """

    folder: str
    every: Count = 10
    keep: Count = 2
    resume: bool = False
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0


class CheckpointTiming(Spec):
    """What a checkpoint took.

    Attributes:
        step: Steps done when it was taken.
        written_s: From the end of the step to the whole checkpoint on the disk; training waits for it.
        failure: Why it was not written; None when it was.
    """

    step: int
    written_s: NonNegative
    failure: str | None = None


class CheckpointHeader(Spec):
    """What a checkpoint says about itself: of which training it is, and which files belong to it.

    Attributes:
        step: Steps done, which is also the position in the data: step n has the same samples in every run.
        model, training, plan: Of the run that wrote it.
        seed: Of its weights and data.
        dtype: Of its job.
        file_bytes: Size of every other file by name.
    """

    schema_version: Literal[3] = 3
    kind: Literal["checkpoint"] = "checkpoint"
    step: Count
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    seed: int
    dtype: str
    file_bytes: dict[str, int]


_SAME_STAGES = ("pp", "virtual_stages")


def differences(
    header: CheckpointHeader, model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, seed: int, dtype: str
) -> Iterator[Problem]:
    """Why a job cannot go on from a checkpoint: another training, or a split whose parts do not fit.

    Data- and tensor-parallel ranks, how states are sharded over them, and pipeline stages may be others; only a tied
    embedding, which has two copies in a pipeline, needs the same stages, and experts that ranks split as many
    tensor-parallel ranks.
    """
    same = [
        ("model", header.model.model_dump(), model.model_dump()),
        ("training", header.training.model_dump(), training.model_dump()),
    ]
    for section, then, now in same:
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                yield _differs(f"{section}.{key}", now.get(key), then.get(key))
    axes = ["ep", "etp", *(_SAME_STAGES if model.tied_embeddings else ())]
    if max(header.plan.etp, plan.etp) > 1:
        axes.append("tp")
    for key in axes:
        if getattr(header.plan, key) != getattr(plan, key):
            yield _differs(f"plan.{key}", getattr(plan, key), getattr(header.plan, key))
    for field, before, after in (("seed", header.seed, seed), ("dtype", header.dtype, dtype)):
        if before != after:
            yield _differs(field, after, before)


def _differs(field: str, now: object, then: object) -> Problem:
    rule = f"the checkpoint is of a training with {then}"
    return Problem(field=field, value=str(now), rule=rule, fix=f"use {then}, or another folder for checkpoints")
