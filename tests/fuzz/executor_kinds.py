"""Damaged files for the executor's commands, which run in this process up to the launch of ranks; none is launched.

``run`` and ``calibrate`` get what their ranks would have written: nothing, or a small calibration. ``rehearse`` runs
its rank on tensors without data where the model is small.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import executor.__main__
import simplan.cli
from executor.dry_run import rehearse
from executor.launch.launcher import RankLaunch
from executor.profiling.recorder import StepRecord
from simplan.cli.calibrations import requests_for
from simplan.cli.execute import RunOptions, run_spec_of_scenario
from simplan.cli.terminal import processes
from simplan.cost.calibration.format import Calibration
from simplan.program.timeline import SpanKind
from simplan.runs.checkpoint import HEADER_FILE, CheckpointHeader, Checkpointing, step_folder
from simplan.runs.elastic import RendezvousOptions
from simplan.runs.measurement import MeasuredSpan, PeakMemory, Rehearsal
from simplan.runs.run_spec import RunSpec
from simplan.scenario import parse_scenario
from tests.fuzz.campaign import CALIBRATION, HERE, SMALL, Case, Kind
from tests.fuzz.mutation import Mutator

_MAX_LAYERS = 2  # of a model that is rehearsed: valid ones with more only take longer
_MAX_MICROBATCHES = 2
_STEP = 2
_PAYLOAD = "__0_0.distcp"

_SCENARIO = parse_scenario(HERE)
_TIMED = Calibration.model_validate_json(CALIBRATION)
_JOB = run_spec_of_scenario(
    _SCENARIO, _SCENARIO.predict(_TIMED), RunOptions(num_steps=4, num_warmup_steps=1)
).model_copy(update={"checkpointing": Checkpointing(folder="checkpoints", resume=True)})
JOB = _JOB.model_dump_json()
REQUEST = requests_for([_SCENARIO], None, 10.0)[0].model_dump_json()
NODES = RendezvousOptions(
    min_nodes=1, max_nodes=2, ranks_per_node=1, host="127.0.0.1", port=29400, leads=True
).model_dump_json()
HEADER = CheckpointHeader(
    step=_STEP,
    model=_JOB.model,
    training=_JOB.training,
    plan=_JOB.plan,
    seed=_JOB.seed,
    dtype=_JOB.dtype,
    file_sha256={},
).model_dump()
_SPAN = MeasuredSpan(action="0F0", kind=SpanKind.COMPUTE, start_s=0.0, end_s=0.5)
STEPS = [
    StepRecord(step=step, start_s=float(step), end_s=step + 0.5, losses=(6.0,), spans=(_SPAN,), collectives=())
    for step in range(4)
]


def _metadata() -> bytes:
    """Metadata of a checkpoint with one tensor, as torch.distributed.checkpoint writes it."""
    size = torch.Size((4, 8))
    chunk = ChunkStorageMetadata(offsets=torch.Size((0, 0)), sizes=size)
    weight = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [chunk])
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {"model.weight": weight}
    stored = {MetadataIndex("model.weight", torch.Size((0, 0)), 0): _StorageInfo(_PAYLOAD, 0, 128)}
    return pickle.dumps(Metadata(tensors, storage_data=stored))


METADATA = _metadata()


class _RendezvousReachedError(BaseException):
    """A run on several nodes was understood, and would wait for the others."""


def _launched(launch: RankLaunch, *args: Any) -> None:
    """Stand-in for ranks."""
    if launch.module.endswith("calibrate_worker"):
        Path(launch.args[1]).write_text(CALIBRATION)


def _fake_of_small(original: Callable[[RunSpec, int], Rehearsal]) -> Callable[[RunSpec, int], Rehearsal]:
    def fake(job: RunSpec, rank: int) -> Rehearsal:
        num_microbatches = job.training.global_batch_size // (job.plan.dp * job.plan.microbatch_size)
        if len(job.model.layers) > _MAX_LAYERS + 2 or num_microbatches > _MAX_MICROBATCHES:
            memory = PeakMemory(allocated_bytes=1)
            return Rehearsal(
                job=job, rank=rank, fake=True, peak_memory=memory, peak_by_category={}, peak_action=job.table[0][0]
            )
        return original(job, rank)

    return fake


def _meet(*args: object) -> None:
    raise _RendezvousReachedError


@contextlib.contextmanager
def _nothing_is_launched() -> Any:
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            ("executor.run", "launch_ranks", _launched),
            ("executor.calibration.calibrate", "launch_ranks", _launched),
            ("executor.run", "Rendezvous", _meet),
            ("executor.calibration.calibrate", "Rendezvous", _meet),
            ("executor.dry_run.rehearse", "_fake", _fake_of_small(rehearse._fake)),
            ("simplan.cli.execute", "run_executor", _in_this_process),
            ("simplan.cli.calibrations", "run_executor", _in_this_process),
            ("simplan.cli.rehearse", "run_executor", _in_this_process),
        ):
            stack.enter_context(mock.patch(f"{target}.{name}", value))
        yield


def _in_this_process(args: list[str], on_event: Callable[[dict[str, Any]], None]) -> None:
    """``run_executor`` without another process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = executor.__main__.main(args)
    for line in out.getvalue().splitlines():
        on_event(json.loads(line))
    processes._raise_for(code, err.getvalue().strip())


def _of_simplan(args: list[str]) -> int:
    with _nothing_is_launched():
        return simplan.cli.main(args)


def _of_executor(args: list[str]) -> int:
    """The executor alone; ``simplan`` puts ``error:`` before what it says."""
    err = io.StringIO()
    with _nothing_is_launched(), contextlib.redirect_stderr(err):
        try:
            code = executor.__main__.main(args)
        except _RendezvousReachedError:
            code = 0
    if said := err.getvalue().strip():
        sys.stderr.write(f"error: {said}\n")
    return code


def _scenario(mutator: Mutator, folder: Path) -> Case:
    file, calibration = folder / "scenario.yaml", folder / "calibration.json"
    file.write_text(mutator.yaml(mutator.choice((HERE, SMALL))), encoding="utf-8", errors="surrogatepass")
    calibration.write_text(CALIBRATION)
    out = str(folder / "out")
    command = mutator.choice(("run", "calibrate", "rehearse"))
    args = {
        "run": ["run", str(file), "-o", out, "--steps", "2"],
        "calibrate": ["calibrate", str(file)],
        "rehearse": ["rehearse", str(file), "--fake", "--json"],
    }[command]
    return [*args, "--calibration", str(calibration)], None


def _calibration(mutator: Mutator, folder: Path) -> Case:
    file, calibration = folder / "scenario.yaml", folder / "calibration.json"
    file.write_text(HERE)
    calibration.write_text(mutator.json(CALIBRATION), encoding="utf-8", errors="surrogatepass")
    command = mutator.choice((["run", str(file), "-o", str(folder / "out")], ["calibrate", str(file)]))
    return [*command, "--calibration", str(calibration)], None


def _job(mutator: Mutator, folder: Path) -> Case:
    texts = {"job.json": JOB, "request.json": REQUEST, "nodes.json": NODES}
    command, damaged = mutator.choice((
        ("run", "job.json"), ("run", "nodes.json"), ("rehearse", "job.json"), ("calibrate", "request.json"),
    ))  # fmt: skip
    for name, text in texts.items():
        content = mutator.json(text) if name == damaged else text
        (folder / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    args = [command, str(folder / ("request.json" if command == "calibrate" else "job.json"))]
    args += ["--out", str(folder / ("out" if command == "run" else "out.json"))]
    args += ["--nodes", str(folder / "nodes.json")] if damaged == "nodes.json" else []
    return [*args, "--rank", "0", "--fake"] if command == "rehearse" else args, None


def _checkpoint(mutator: Mutator, folder: Path) -> Case:
    """A forged checkpoint has the checksums of its damaged files."""
    kept = step_folder(folder / "checkpoints", _STEP)
    kept.mkdir(parents=True)
    files = {".metadata": METADATA, _PAYLOAD: b"\0" * 128}
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    damaged = mutator.choice((".metadata", ".metadata", _PAYLOAD, HEADER_FILE))
    if damaged in files:
        files[damaged] = mutator.bytes(files[damaged])
        if mutator.choice((True, True, False)):
            sums[damaged] = hashlib.sha256(files[damaged]).hexdigest()
    header = json.dumps({**HEADER, "file_sha256": sums})
    header = mutator.json(header) if damaged == HEADER_FILE else header
    (kept / HEADER_FILE).write_text(header, encoding="utf-8", errors="surrogatepass")
    for name, data in files.items():
        (kept / name).write_bytes(data)
    job = _JOB.model_copy(update={"checkpointing": Checkpointing(folder=str(kept.parent), resume=True)})
    (folder / "job.json").write_text(job.model_dump_json())
    return ["run", str(folder / "job.json"), "--out", str(folder / "out")], None


def _steps(mutator: Mutator, folder: Path) -> Case:
    (folder / "job.json").write_text(JOB)
    lines = [record.model_dump_json() for record in STEPS]
    at = mutator.choice(tuple(range(len(lines))))
    lines[at] = mutator.json(lines[at])
    text = "\n".join([*lines, PeakMemory(allocated_bytes=10**6).model_dump_json()]) + "\n"
    (folder / "rank0.steps.jsonl").write_text(text, encoding="utf-8", errors="surrogatepass")
    return ["gather", str(folder / "job.json"), "--out", str(folder), "--failure", "it was killed"], None


EXECUTOR_KINDS = (
    Kind("executor-scenario", _scenario, _of_simplan),
    Kind("executor-calibration", _calibration, _of_simplan),
    Kind("job", _job, _of_executor),
    Kind("checkpoint", _checkpoint, _of_executor),
    Kind("steps", _steps, _of_executor),
)
