"""Calibrates this machine: starts ranks that time layers, kernels and communication, and reads their Calibration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from executor.launch.errors import RanksError
from executor.launch.launcher import RankLaunch, launch_ranks
from executor.launch.nodes import Rendezvous
from executor.launch.watchdog import Beats
from simplan.cost.calibration.format import Calibration, CalibrationRequest
from simplan.errors import Problem, RunError, SpecError
from simplan.runs.elastic import RendezvousOptions

Progress = Callable[[int, int, str], None]
"""Called with the percentage done, 100, and the name of the timed part."""

_TIMEOUT_S = 120.0  # beyond the budget


def calibrate(
    request: CalibrationRequest,
    on_progress: Progress | None = None,
    result_file: Path | None = None,
    *,
    nodes: RendezvousOptions | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Calibration:
    """Measures a request on ``num_ranks`` ranks simultaneously, of every node.

    Args:
        result_file: Gets the measurements so far after every part, so that an interruption loses only one part.
        nodes: The rendezvous of the nodes, all of which get the same result; None for this machine alone.
        on_note: Called with a sentence about the addresses at which this node listens for other nodes.

    Raises:
        SpecError: The machine has too few CUDA devices, or a CPU would compute in tf32; nothing was started. Or the
            nodes have different requests.
        RunError: A rank failed or hung, or nodes did not come; all are ended.
    """
    if problems := list(_problems(request, nodes)):
        raise SpecError(problems)
    rendezvous = None if nodes is None else Rendezvous(nodes, request.model_dump_json() if nodes.leads else None)
    if rendezvous is not None:
        request = CalibrationRequest.model_validate_json(rendezvous.job)
        if on_note is not None:
            on_note(rendezvous.listening)
    with tempfile.TemporaryDirectory(prefix="simplan-calibrate-") as folder:
        result_file = (result_file or Path(folder) / "calibration.json").resolve()
        try:
            _run_ranks(request, Path(folder), result_file, on_progress, rendezvous)
        except RanksError as error:
            raise error if rendezvous is None else rendezvous.agreed(error) from None
        finally:
            if rendezvous is not None:
                rendezvous.farewell()
        if not result_file.exists():
            raise RunError("the ranks ended without a calibration")
        return Calibration.model_validate_json(result_file.read_bytes())


def _run_ranks(
    request: CalibrationRequest,
    folder: Path,
    result_file: Path,
    on_progress: Progress | None,
    rendezvous: Rendezvous | None,
) -> None:
    reported: tuple[str, int] | None = None

    def on_poll(beats: Beats) -> None:
        nonlocal reported
        beat = next(iter(beats.values()), None)
        if on_progress is not None and beat is not None and (beat.doing, beat.step) != reported:
            reported = beat.doing, beat.step
            on_progress(min(100, beat.step), 100, beat.doing)

    request_file = folder / "request.json"
    request_file.write_text(request.model_dump_json())
    module, args = "executor.calibration.calibrate_worker", (str(request_file), str(result_file))
    launch_ranks(
        RankLaunch(module, args, request.num_ranks, folder, _TIMEOUT_S + request.budget_s, rendezvous), on_poll
    )


def _problems(request: CalibrationRequest, nodes: RendezvousOptions | None) -> Iterator[Problem]:
    num_gpus = torch.cuda.device_count()
    if request.device == "cuda" and request.num_ranks > num_gpus:
        yield Problem(
            field="device",
            value="cuda",
            rule=f"{request.num_ranks} ranks need as many CUDA devices; this machine has {num_gpus}",
            fix="use device cpu" if num_gpus == 0 else f"use num_ranks = {num_gpus}, or device cpu",
        )
    if (nodes is not None) != (request.num_nodes > 1):
        rule, fix = "does not go with --nodes", "give --nodes NODES.json for several nodes, and only for them"
        yield Problem(field="num_nodes", value=str(request.num_nodes), rule=rule, fix=fix)
    if request.num_nodes > 1 and (request.shapes or request.grid or request.host_copies or request.overlap):
        rule = "times collectives and P2P sends between nodes, and nothing else"
        yield Problem(field="num_nodes", value=str(request.num_nodes), rule=rule, fix="leave the rest to one node")
    for index, shape in enumerate(request.shapes):
        if request.device == "cpu" and shape.dtype == "tf32":
            yield Problem(field=f"shapes.{index}.dtype", value="tf32", rule="needs CUDA devices", fix="use fp32")
        if shape.shard.cp > 1 and shape.shard.cp_comm == "ring":
            yield Problem(
                field=f"shapes.{index}.shard.cp_comm",
                value="ring",
                rule="cannot be timed: the executor has no ring attention",
                fix="use all_gather or a2a",
            )
