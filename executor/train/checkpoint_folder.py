"""A folder of checkpoints: each is complete or absent.

A checkpoint is written to a folder with a hidden name, synced file by file, and renamed when all ranks have written. A
folder with a final name is therefore complete. File sizes in its header reveal later changes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from simplan.errors import Problem, SpecError
from simplan.io import write_whole
from simplan.runs.checkpoint import CheckpointHeader, differences
from simplan.runs.run_spec import RunSpec

_HEADER = "checkpoint.json"
_UNFINISHED = ".unfinished-"


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a number of steps."""
    return folder / f"step-{step:08d}"


def newest_checkpoint(folder: Path) -> tuple[CheckpointHeader | None, list[str]]:
    """Header of the newest complete checkpoint, and a note about each newer one that is incomplete."""
    notes = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            header = CheckpointHeader.model_validate_json((path / _HEADER).read_bytes())
        except (OSError, ValidationError):
            notes.append(f"{path} is passed over: it has no header that can be read")
            continue
        wrong = [name for name, size in header.file_bytes.items() if _size(path / name) != size]
        if wrong or path != step_folder(folder, header.step):
            notes.append(f"{path} is passed over: {wrong[0] if wrong else 'its name'} is not as it was written")
            continue
        return header, notes
    return None, notes


def check_resume(job: RunSpec) -> list[str]:
    """Checks the checkpoint folder before a run starts; returns notes.

    Raises:
        SpecError: The folder cannot be made. Or it has checkpoints, but the run does not resume. Or the newest
            checkpoint is of another training, or of all steps of the run.
    """
    checkpointing = job.checkpointing
    if checkpointing is None:
        return []
    folder = Path(checkpointing.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made: {error.strerror}"
        raise SpecError(Problem(field="--checkpoint-dir", value=checkpointing.folder, rule=rule)) from None
    header, notes = newest_checkpoint(folder)
    if header is None:
        return [*notes, f"no checkpoint in {folder}: beginning at step 1"] if checkpointing.resume else notes
    if not checkpointing.resume:
        rule = f"has checkpoints already, the newest of step {header.step}"
        fix = "add --resume to resume from it, or name another folder"
        raise SpecError(Problem(field="--checkpoint-dir", value=checkpointing.folder, rule=rule, fix=fix))
    problems = list(differences(header, job.model, job.training, job.plan, job.seed, job.dtype))
    if header.step >= job.num_all_steps:
        rule = f"the newest checkpoint has done all {job.num_all_steps} steps of the run already"
        problems.append(
            Problem(field="--resume", value=f"step {header.step}", rule=rule, fix="ask for more steps with --steps")
        )
    if problems:
        raise SpecError(problems, file=str(step_folder(folder, header.step)))
    return [*notes, f"resuming after step {header.step}"]


def drop_unfinished(folder: Path) -> None:
    """Deletes checkpoints whose writers were killed."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    """Deletes all checkpoints except the newest; each loses its final name in one rename."""
    for path in sorted(folder.glob("step-*"))[:-keep]:
        doomed = path.with_name(f"{_UNFINISHED}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class AtomicWriter(FileSystemWriter):
    """Writes the files of all ranks to a hidden folder, and renames it once all files are on the disk.

    Args:
        folder: Folder of all checkpoints.
        step: Number of steps done.
    """

    def __init__(self, folder: Path, job: RunSpec, step: int) -> None:
        # a node that was given up may still write; fewer ranks use another name
        self.unfinished = folder / f"{_UNFINISHED}{step_folder(folder, step).name}-{job.plan.num_devices}ranks"
        super().__init__(self.unfinished)
        self._final = step_folder(folder, step)
        self._job, self._step = job, step

    def finish(self, metadata: Any, results: Any) -> None:
        """Called on one rank after all ranks have written."""
        super().finish(metadata, results)
        job, folder = self._job, self.unfinished
        header = CheckpointHeader(
            step=self._step,
            model=job.model,
            training=job.training,
            plan=job.plan,
            seed=job.seed,
            dtype=job.dtype,
            file_bytes={path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()},
        )
        write_whole(folder / _HEADER, header.model_dump_json(indent=1))
        _sync(folder)
        if self._final.exists():  # of a training that resumed from an earlier step
            shutil.rmtree(self._final)
        folder.rename(self._final)
        _sync(self._final.parent)


def _sync(folder: Path) -> None:
    """Writes the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
