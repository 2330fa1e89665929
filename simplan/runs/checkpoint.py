"""Checkpoints of a run: options, header, and checks before resuming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, NonNegative, Spec
from simplan.errors import Problem
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.training import TrainingSpec


class Checkpointing(Spec):
    """Checkpointing options of a run.

    Attributes:
        folder: Absolute path, shared by all nodes; each checkpoint is one folder in it.
        every: Number of steps between checkpoints.
        keep: Number of complete checkpoints to keep; older ones are deleted.
        resume: True to resume from the latest checkpoint of the folder, or from step 0 if there is none.
        max_restarts: Maximum restarts from the latest checkpoint after ranks fail or hang.
    """

    folder: str
    every: Count = 10
    keep: Count = 2
    resume: bool = False
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0


class CheckpointTiming(Spec):
    """Time to write a checkpoint.

    Attributes:
        step: Steps completed at the checkpoint.
        written_s: Seconds from the end of the step until the checkpoint is complete on disk, during which training
            waits.
        failure: Reason why writing failed; None for success.
    """

    step: int
    written_s: NonNegative
    failure: str | None = None


class CheckpointHeader(Spec):
    """Header of a checkpoint: the training that it belongs to, and its files.

    Attributes:
        step: Steps completed, which is also the position in the data: step n has the same samples in every run.
        model, training, plan: Model, training and plan of the run that wrote the checkpoint.
        seed: Seed of the run's weights and data.
        file_bytes: File name -> size in bytes, for all files except the header.
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
    """Yields the reasons why a job cannot resume from a checkpoint: another training, or an incompatible split.

    Data- and tensor-parallel sizes, sharding of states, and pipeline stages may differ. There are two exceptions: a
    tied embedding, which has two copies in a pipeline, needs equal stages; experts with tensor parallelism need an
    equal tensor-parallel size.
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
