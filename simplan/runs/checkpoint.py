"""Checkpoints of a run: options, header, and checks before resuming.

A checkpoint is a folder of data. Its header has a checksum of every other file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from simplan.base import Count, Natural, NonNegative, Spec
from simplan.errors import Problem, SpecError
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

    step: Natural
    written_s: NonNegative
    failure: str | None = None


class CheckpointHeader(Spec):
    """Header of a checkpoint: the training that it belongs to, and its files.

    Attributes:
        step: Steps completed, which is also the position in the data: step n has the same samples in every run.
        model, training, plan: Model, training and plan of the run that wrote the checkpoint.
        seed: Seed of the run's weights and data.
        file_sha256: File name -> SHA-256 of its content in hexadecimal, for all files except the header.
    """

    schema_version: Literal[4] = 4
    kind: Literal["checkpoint"] = "checkpoint"
    step: Count
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    seed: Natural
    dtype: str
    file_sha256: dict[Annotated[str, Field(pattern=r"^[\w.]{1,100}$")], str]


HEADER_FILE = "checkpoint.json"


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a number of steps."""
    return folder / f"step-{step:08d}"


def readable_headers(folder: Path) -> tuple[list[CheckpointHeader], list[str]]:
    """Headers of the complete checkpoints in a folder, newest first, and a note about each other one."""
    headers, notes = [], []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            header = CheckpointHeader.model_validate_json((path / HEADER_FILE).read_bytes())
        except (OSError, ValidationError):
            notes.append(f"{path} is passed over: it has no header that can be read")
            continue
        if path == step_folder(folder, header.step):
            headers.append(header)
        else:
            notes.append(f"{path} is passed over: its name is not as it was written")
    return headers, notes


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's content in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def damaged_file(folder: Path, header: CheckpointHeader, names: Iterable[str]) -> str | None:
    """The first of these files of a checkpoint that is not as it was written; None if all are."""
    for name in names:
        file = folder / name
        try:
            if not file.is_file() or file.is_symlink() or file_sha256(file) != header.file_sha256[name]:
                return name
        except OSError:
            return name
    return None


_SAME_STAGES = ("pp", "virtual_stages")


def differences(
    header: CheckpointHeader, model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, seed: int, dtype: str
) -> Iterator[Problem]:
    """Yields the reasons why a job cannot resume from a checkpoint: another training, or an incompatible split.

    Data- and tensor-parallel sizes, sharding of states, and pipeline stages may differ. There are three exceptions: a
    tied embedding, which has two copies in a pipeline, needs equal stages; experts with tensor parallelism need an
    equal tensor-parallel size; replicas that train alone have states of their own, by rank.
    """
    same: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("model", header.model.model_dump(), model.model_dump()),
        ("training", header.training.model_dump(), training.model_dump()),
        ("plan.replication", _of_replication(header.plan), _of_replication(plan)),
    ]
    for section, then, now in same:
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                yield _differs(f"{section}.{key}", now.get(key), then.get(key))
    axes = ["ep", "etp", *(_SAME_STAGES if model.tied_embeddings else ())]
    if max(header.plan.etp, plan.etp) > 1:
        axes.append("tp")
    if plan.replicas_apart or header.plan.replicas_apart:
        axes = ["dp_replicate", "dp_shard", "zero_stage", "cp", "tp", "ep", "etp", *_SAME_STAGES]
    for key in axes:
        if getattr(header.plan, key) != getattr(plan, key):
            yield _differs(f"plan.{key}", getattr(plan, key), getattr(header.plan, key))
    for field, before, after in (("seed", header.seed, seed), ("dtype", header.dtype, dtype)):
        if before != after:
            yield _differs(field, after, before)


def _of_replication(plan: ParallelPlan) -> dict[str, Any]:
    return {} if plan.replication is None else plan.replication.model_dump()


def keeps_errors(then: ParallelPlan, now: ParallelPlan) -> bool:
    """True if ranks resume with the errors of gradient compression that they had: the same ranks and buckets."""
    same = ("compression", "dp_replicate", "dp_shard", "bucket_bytes")
    return all(getattr(then, key) == getattr(now, key) for key in same)


def lost_errors(then: ParallelPlan, now: ParallelPlan) -> str:
    """Note about errors of compression with which a plan does not resume; empty if it has none or resumes with them."""
    compression = now.compression
    if compression is None or not compression.keeps_state or keeps_errors(then, now):
        return ""
    why = "the checkpoint has none of these ranks and buckets"
    return f"errors of plan.compression = {compression.kind} begin at zero: {why}"


def check_new_run(checkpointing: Checkpointing, newest: CheckpointHeader | None) -> None:
    """Refuses to mix the checkpoints of two runs.

    Args:
        newest: The newest complete checkpoint in the folder.

    Raises:
        SpecError: There is one, and the run does not resume.
    """
    if newest is not None and not checkpointing.resume:
        rule = f"has checkpoints already, the newest of step {newest.step}"
        fix = "add --resume to resume from it, or name another folder"
        raise SpecError(Problem(field="--checkpoint-dir", value=checkpointing.folder, rule=rule, fix=fix))


def _differs(field: str, now: object, then: object) -> Problem:
    rule = f"the checkpoint is of a training with {then}"
    return Problem(field=field, value=str(now), rule=rule, fix=f"use {then}, or another folder for checkpoints")
