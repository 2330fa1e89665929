"""A folder of checkpoints: each is complete or absent, is verified before it is read, and is data only.

A checkpoint is written to a folder with a hidden name, synced file by file, and renamed when all ranks have written. A
folder with a final name is therefore complete. The checksums in its header reveal later changes.

torch.distributed.checkpoint reads its metadata with pickle, which runs what a file says. The reader here accepts only
the classes of tensors' metadata. A data file that was changed together with its checksum has other tensors than the
metadata says.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import skip_data

from simplan.errors import Problem, RunError, SpecError
from simplan.io import write_whole
from simplan.runs.checkpoint import (
    HEADER_FILE,
    CheckpointHeader,
    check_new_run,
    damaged_file,
    differences,
    file_sha256,
    lost_errors,
    readable_headers,
    step_folder,
)
from simplan.runs.run_spec import RunSpec

_UNFINISHED = ".unfinished-"
_METADATA = ".metadata"
_METADATA_BYTES = 2**30
_CLASSES = frozenset({
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
})  # fmt: skip
"""Classes in the metadata of tensors, besides data types: plain data, whose construction runs nothing."""


class _DataUnpickler(pickle.Unpickler):
    """Reads a pickle of the metadata of tensors; anything else is refused before it is made."""

    def find_class(self, module: str, name: str) -> Any:
        """Looks up a class that the pickle names.

        Raises:
            pickle.UnpicklingError: The metadata of tensors does not have it.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


class DataReader(FileSystemReader):
    """torch's reader of checkpoints, without the ability to run code that a file names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what the checkpoint contains.

        Raises:
            RunError: The metadata is damaged, or is more than the metadata of tensors.
        """
        file = Path(self.path) / _METADATA
        try:
            with file.open("rb") as stream:
                metadata = _DataUnpickler(BytesIO(stream.read(_METADATA_BYTES))).load()
            names = {str(info.relative_path) for info in metadata.storage_data.values()}
            is_data = all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values())
        except Exception as error:  # a forged pickle raises anything
            raise RunError(f"{file} is not the metadata of a checkpoint: {error}") from None
        if not is_data or not isinstance(metadata, Metadata) or any(os.sep in name for name in names):
            raise RunError(f"{file} describes more than tensors in files of its folder")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def check(self, names: Collection[str]) -> None:
        """Reads the metadata, and the dtype and shape of every tensor in these files.

        Raises:
            RunError: The metadata is not that of tensors, or a file does not hold the tensors that it describes.
        """
        metadata = self.read_metadata()
        for index, info in metadata.storage_data.items():
            if info.relative_path not in names:
                continue
            file = Path(self.path) / info.relative_path
            try:
                described = cast("TensorStorageMetadata", metadata.state_dict_metadata[index.fqn])
                with file.open("rb") as stream, skip_data():
                    stored = torch.load(self._slice_file(stream, info), map_location="cpu", weights_only=True)
                shapes = [chunk.sizes for chunk in described.chunks if chunk.offsets == index.offset]
                is_there = stored.dtype == described.properties.dtype and stored.shape in shapes
            except Exception:  # of a forged file, anything
                is_there = False
            if not is_there:
                raise RunError(f"{file} does not hold the tensors that its metadata describes")


def newest_checkpoint(folder: Path) -> tuple[CheckpointHeader | None, list[str]]:
    """Header of the newest intact checkpoint, and a note about each newer one."""
    headers, notes = readable_headers(folder)
    for header in headers:
        why = why_damaged(folder, header, sorted(header.file_sha256))
        if why is None:
            return header, notes
        notes.append(f"{step_folder(folder, header.step)} is passed over: {why}")
    return None, notes


def why_damaged(folder: Path, header: CheckpointHeader, names: Collection[str]) -> str | None:
    """Reason why a checkpoint cannot be read; None if these files of it and its metadata are as they were written."""
    path = step_folder(folder, header.step)
    damaged = damaged_file(path, header, names)
    if damaged is not None:
        return f"{damaged} is not as it was written"
    try:
        DataReader(path).check(names)
    except RunError as error:
        return str(error)
    return None


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
    check_new_run(checkpointing, header)
    if header is None:
        return [*notes, f"no checkpoint in {folder}: beginning at step 1"] if checkpointing.resume else notes
    problems = list(differences(header, job.model, job.training, job.plan, job.seed, job.dtype))
    if header.step >= job.num_all_steps:
        rule = f"the newest checkpoint has done all {job.num_all_steps} steps of the run already"
        problems.append(
            Problem(field="--resume", value=f"step {header.step}", rule=rule, fix="ask for more steps with --steps")
        )
    if problems:
        raise SpecError(problems, file=str(step_folder(folder, header.step)))
    if lost := lost_errors(header.plan, job.plan):
        notes.append(lost)
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


@dataclass(frozen=True)
class _SumResult(WriteResult):
    """Result of a write, with the checksum of its file."""

    sha256: str


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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and takes their checksums."""
        results = super().write_data(plan, planner).wait()
        sums = {name: file_sha256(self.unfinished / name) for name in {r.storage_data.relative_path for r in results}}
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [_SumResult(r.index, r.size_in_bytes, r.storage_data, sums[r.storage_data.relative_path]) for r in results]
        )
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        """Called on one rank after all ranks have written."""
        super().finish(metadata, results)
        job, folder = self._job, self.unfinished
        sums = {result.storage_data.relative_path: result.sha256 for written in results for result in written}
        header = CheckpointHeader(
            step=self._step,
            model=job.model,
            training=job.training,
            plan=job.plan,
            seed=job.seed,
            dtype=job.dtype,
            file_sha256={**sums, _METADATA: file_sha256(folder / _METADATA)},
        )
        write_whole(folder / HEADER_FILE, header.model_dump_json(indent=1))
        _sync(folder)
        if self._final.exists():  # damaged, or of a training that resumed from an earlier step
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
