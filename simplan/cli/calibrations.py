"""Calibrations for commands: reading, checking their coverage, measuring missing parts."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.processes import require_executor, run_executor
from simplan.cli.terminal.progress import ProgressLine, show_event
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.machine import THIS_MACHINE, num_cores, num_nvidia_devices
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import (
    Calibration,
    CalibrationRequest,
    ShapeRequest,
    pace_in_words,
    way_of_mixing,
)
from simplan.cost.calibration.nccl_tests import read_nccl_tests
from simplan.cost.calibration.store import default_path, kinds_needed, load, save
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.io import as_argument, write_model
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.model.low_precision import DEFAULT_RECIPE
from simplan.program.lowering.passes import forward_passes
from simplan.runs.elastic import RendezvousOptions
from simplan.runs.lock import exclusive
from simplan.scenario import Scenario, SearchScenario
from simplan.units import counted

QUICK_BUDGET_S = 30.0
_TRUSTED = timedelta(minutes=10)
_BUSY_LOAD_PER_CORE = 0.5  # mean over the last minute, from which ranks and other programs get into each other's way
_MAX_PACE = 2.0  # beyond it, either way, timings are no measure of now


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """Device and precisions of a calibration without scenarios.

    Attributes:
        device: Device kind of the ranks; None for GPUs if the machine has any, else CPUs.
        dtypes: Precisions of the grid; empty for the default of the device.
    """

    device: Literal["cpu", "cuda"] | None = None
    dtypes: tuple[str, ...] = ()


def is_needed(cluster: ClusterSpec) -> bool:
    """True when jobs on the cluster need a calibration: their ranks are processes that share this machine's cores.

    All other jobs are estimated from the catalog, unless a calibration of the same device is given.
    """
    return cluster.cores_per_node is not None


def refuse_unneeded(search: SearchScenario, file: Path | None) -> None:
    """Rejects a calibration that was given for a search on devices of the catalog.

    Raises:
        SpecError: The search would not use it; or the file is missing or is no calibration.
    """
    if file is None or is_needed(search.job.cluster):
        return
    read(file)
    problem = Problem(
        field="--calibration",
        value=str(file),
        rule=f"a search on {search.job.cluster.device.id} devices is not estimated from a calibration in this version",
        fix="leave the option out; `simplan predict --calibration FILE` prices single plans from it",
    )
    raise SpecError(problem, file=search.file)


def read(file: Path | None) -> Calibration | None:
    """The user's calibration: of the given file, which must exist, else the one in the cache folder, if any.

    Raises:
        SpecError: The file is missing or is no calibration.
    """
    calibration = load(file or default_path())
    if calibration is None and file is not None:
        raise SpecError(
            Problem(
                field="", rule="does not exist", fix="write it with `simplan calibrate SCENARIO --calibration FILE`"
            ),
            file=str(file),
        )
    return calibration


def chosen(scenario: Scenario, file: Path | None) -> Calibration | None:
    """Calibration for one scenario: the given file; without one, the user's calibration if the scenario needs one.

    Raises:
        SpecError: The file is missing or is no calibration.
    """
    return read(file) if file is not None or is_needed(scenario.job.cluster) else None


def covers(calibration: Calibration | None, scenario: Scenario) -> bool:
    """True when the calibration has timed everything the scenario's plan runs, or none is needed."""
    if not is_needed(scenario.job.cluster):
        return True
    if calibration is None:
        return False
    shapes, plan = _shapes(scenario), scenario.job.plan
    shape = shapes[0]
    ranks = scenario.job.cluster.ranks_per_node
    cost = CalibratedCost(
        calibration,
        dtype=shape.dtype,
        optimizer=shape.optimizer,
        num_ranks=ranks,
        fp8_recipe=shape.fp8_recipe,
        mixed=shape.mixed,
    )
    keys = {layer.key for shape_of_pass in shapes for layer in shape_of_pass.layers}
    kinds = kinds_needed(plan, scenario.job.padded_model, scenario.job.training) if ranks > 1 else frozenset()
    if _has_servers_alone(scenario) and not _times_sends_inside(calibration):
        return False
    return cost.covers(keys, shape.microbatch_size, kinds, host_copies=_copies_to_host(scenario))


def requests_for(
    scenarios: Sequence[Scenario],
    num_ranks: int | None,
    budget_s: float,
    wanted: CalibrationTarget = CalibrationTarget(),
) -> list[CalibrationRequest]:
    """Calibration requests, one per number of ranks, which share the time budget.

    Args:
        scenarios: Scenarios whose shapes and collectives are timed. If empty, the kernel grid and all collectives are
            timed, which suffice for any model.
        num_ranks: Ranks that run at the same time; None for each scenario's number, and for all devices with the grid.
        budget_s: Time for all measurements, in seconds.
        wanted: Device and precisions.

    Raises:
        SpecError: A scenario is not about CPU ranks of this machine and ``num_ranks`` is not given.
    """
    device = wanted.device or ("cuda" if num_nvidia_devices() else "cpu")
    if not scenarios:
        dtypes = wanted.dtypes or (("bf16",) if device == "cuda" else ("fp32",))
        all_ranks = num_nvidia_devices() if device == "cuda" else num_cores()
        asked = {
            "shapes": (),
            "num_ranks": num_ranks or max(1, all_ranks),
            "device": device,
            "budget_s": budget_s,
            "communication": tuple(CollectiveKind),
            "grid": dtypes,
            "host_copies": True,
            "overlap": True,
        }
        return [CalibrationRequest.model_validate(asked)]
    shapes: dict[int, dict[str, ShapeRequest]] = defaultdict(dict)
    kinds: dict[int, set[CollectiveKind]] = defaultdict(set)
    copies: set[int] = set()
    for scenario in scenarios:
        if num_ranks is None and not is_needed(scenario.job.cluster):
            rule = f"is not the CPU ranks of {THIS_MACHINE}, so the number of ranks to time here is unknown"
            problem = Problem(field="cluster", value=scenario.job.cluster.id, rule=rule, fix="give --ranks N")
            raise SpecError(problem, file=scenario.file)
        ranks = num_ranks or scenario.job.cluster.ranks_per_node
        shapes[ranks] |= {shape.model_dump_json(): shape for shape in _shapes(scenario)}
        kinds[ranks] |= kinds_needed(scenario.job.plan, scenario.job.padded_model, scenario.job.training)
        if _has_servers_alone(scenario):
            kinds[2].add(CollectiveKind.SEND)
        if _copies_to_host(scenario):
            copies.add(ranks)
    return [
        CalibrationRequest(
            shapes=tuple(shapes[ranks].values()),
            num_ranks=ranks,
            device=wanted.device or "cpu",
            budget_s=budget_s / len(kinds),
            communication=tuple(sorted(of_ranks)),
            host_copies=ranks in copies,
        )
        for ranks, of_ranks in kinds.items()
    ]


def request_across(
    num_nodes: int, num_ranks: int | None, budget_s: float, wanted: CalibrationTarget
) -> CalibrationRequest:
    """Calibration request for several nodes: communication inside of a node and between nodes.

    Args:
        num_nodes: Nodes in all.
        num_ranks: Ranks per node; None for the number of GPUs or cores.
        budget_s, wanted: See ``requests_for``; precisions must be empty, since no kernels are timed.

    Raises:
        SpecError: Precisions were requested.
    """
    if wanted.dtypes:
        rule = "is about kernels, and across nodes only collectives and P2P sends are timed"
        raise SpecError(Problem(field="--dtype", value=" ".join(wanted.dtypes), rule=rule, fix="leave it out"))
    device = wanted.device or ("cuda" if num_nvidia_devices() else "cpu")
    return CalibrationRequest(
        shapes=(),
        num_ranks=num_ranks or max(1, num_nvidia_devices() if device == "cuda" else num_cores()),
        num_nodes=num_nodes,
        device=device,
        budget_s=budget_s,
        communication=tuple(CollectiveKind),
    )


def measure(
    requests: Iterable[CalibrationRequest], file: Path | None, nodes: RendezvousOptions | None = None
) -> Calibration:
    """Runs the requests, merges their results into a calibration file, and returns the merged calibration.

    Without a file, that of the cache folder is used; without nodes, this machine alone.

    Raises:
        SpecError: torch is missing; or the file cannot be written, is no calibration, or another process has it.
        RunError: A rank failed.
    """
    require_executor()
    target = file or default_path()
    if busy := _busy():
        say(busy)
    with exclusive(target, "--calibration", is_file=True):  # two at once would lose layers, and slow each other down
        return _measure(requests, target, nodes)


def _busy() -> str:
    """A note if programs have kept the cores of this machine busy, else nothing."""
    if not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], num_cores()
    if load <= _BUSY_LOAD_PER_CORE * cores:
        return ""
    return (
        f"note: this machine has been busy for the last minute (load {load:.1f} on {cores} cores): if other programs "
        "go on, timings scatter and predictions have wide intervals; calibrate again when it is idle"
    )


def _measure(requests: Iterable[CalibrationRequest], target: Path, nodes: RendezvousOptions | None) -> Calibration:
    total = load(target)
    for asked in requests:
        request = asked.model_copy(update={"pending": total.pending if total is not None else ()})
        with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
            result_file = Path(folder) / "calibration.json"
            try:
                of_each = f" on each of {request.num_nodes} nodes" if request.num_nodes > 1 else ""
                _run(request, result_file, f"calibrating with {counted(request.num_ranks, 'rank')}{of_each}", nodes)
            finally:  # measurements of an interrupted calibration are saved
                calibration = load(result_file)
                if calibration is not None:
                    total = calibration if total is None else total.merged(calibration)
                    save(target, total)
    assert total is not None, "there is at least one request"
    return total


def _run(request: CalibrationRequest, result_file: Path, title: str, nodes: RendezvousOptions | None = None) -> None:
    """Runs one calibration request in the executor, which writes the result to a file."""
    request_file, nodes_file = result_file.with_name("request.json"), result_file.with_name("nodes.json")
    write_model(request_file, request)
    arguments = ["calibrate", str(request_file), "--out", str(result_file)]
    if nodes is not None:
        write_model(nodes_file, nodes)
        arguments += ["--nodes", str(nodes_file)]
    with ProgressLine(title) as progress:
        run_executor(arguments, lambda event: show_event(event, progress))


def of_nccl_tests(files: Sequence[Path], file: Path | None, *, is_alone: bool, as_json: bool) -> int:
    """``simplan calibrate --nccl-tests``: collectives of logs, added to a calibration of the same device.

    Raises:
        SpecError: Other options measure this machine; a log cannot be read; or the calibration is of another device.
    """
    from simplan.cli.listing import measured_links_text

    if not is_alone:
        rule = "is read instead of measuring, so other options have no meaning"
        problem = Problem(
            field="--nccl-tests", value=str(files[0]), rule=rule, fix="leave them out, except --calibration"
        )
        raise SpecError(problem)
    target = file or default_path()
    with exclusive(target, "--calibration", is_file=True):
        timed, before = read_nccl_tests(files), load(target)
        if before is not None:
            device, other_device = (str(calibration.environment.get("device")) for calibration in (before, timed))
            if device != other_device:
                rule = f"was measured on {device}, and the output of nccl-tests on {other_device}"
                problem = Problem(
                    field="--calibration", value=str(target), rule=rule, fix="give --calibration another file"
                )
                raise SpecError(problem)
            timed = before.with_communication(timed)
        save(target, timed)
    if as_json:
        print_json(timed.model_dump(mode="json"))
    else:
        of_file = f" --calibration {as_argument(target)}" if file is not None else " --calibration FILE"
        print_result(
            f"{measured_links_text(timed)}\n\n"
            f"{target} holds {counted(len(timed.communication), 'timing')} of collectives\n"
            f"Next\n  simplan predict SCENARIO{of_file}"
        )
    return 0


def at_the_pace_of_now(calibration: Calibration, scenario: Scenario) -> Calibration:
    """A calibration of this machine's cores, corrected for how fast they are now; younger than 10 minutes, as it is.

    Raises:
        RunError: A rank failed.
    """
    age = datetime.now(UTC) - datetime.fromisoformat(calibration.created)
    cluster = scenario.job.cluster
    if cluster.cores_per_node is None or age < _TRUSTED:
        return calibration
    request = CalibrationRequest(shapes=(), num_ranks=cluster.ranks_per_node, communication=())
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        result_file = Path(folder) / "calibration.json"
        _run(request, result_file, "timing the reference matmul")
        pace = load(result_file)
    if pace is None or pace.reference_s is None:
        return calibration
    return calibration.at_pace(pace.reference_s, cluster.ranks_per_node)


def ensure(scenarios: Sequence[Scenario], file: Path | None) -> Calibration | None:
    """A calibration that covers the scenarios, measuring what is missing; None when none of them needs one.

    An old calibration is rescaled to the machine's current speed, or measured again if that differs by a factor of 2.
    """
    if not any(is_needed(scenario.job.cluster) for scenario in scenarios):
        return None
    calibration = load(file or default_path())
    missing = [scenario for scenario in scenarios if not covers(calibration, scenario)]
    if calibration is None or missing:
        return measure(requests_for(missing, None, QUICK_BUDGET_S), file)
    paced = at_the_pace_of_now(calibration, scenarios[0])
    if paced.pace is None or 1 / _MAX_PACE <= paced.pace <= _MAX_PACE:
        return paced
    say(f"note: this machine computes {pace_in_words(paced.pace)} than when it was calibrated: calibrating again")
    return measure(requests_for(scenarios, None, QUICK_BUDGET_S), file)


def _has_servers_alone(scenario: Scenario) -> bool:
    """True if a node has one worker, and a parameter server next to it, which is a process that it sends to."""
    replication = scenario.job.plan.replication
    return replication is not None and replication.has_servers and scenario.job.cluster.ranks_per_node == 1


def _times_sends_inside(calibration: Calibration) -> bool:
    return any(timing.kind is CollectiveKind.SEND and timing.num_nodes == 1 for timing in calibration.communication)


def _copies_to_host(scenario: Scenario) -> bool:
    plan, is_cpu = scenario.job.plan, scenario.job.cluster.device.kind == "cpu"  # where shards stay where they are
    return plan.offload_activations or (plan.offload_optimizer and not is_cpu)


def _shapes(scenario: Scenario) -> tuple[ShapeRequest, ...]:
    """Layers of a scenario: those that are trained, and those of passes in forward alone."""
    of_passes = {forward.job.model: forward.job for forward in forward_passes(scenario.job)}
    others = [job for model, job in of_passes.items() if model.trains_nothing]
    return tuple(_shape(scenario, job) for job in (scenario.job, *others))


def _shape(scenario: Scenario, job: Job) -> ShapeRequest:
    training, plan, model = job.training, job.plan, job.padded_model
    precision = training.precision
    if precision not in ("fp32", "tf32", "bf16", "fp8"):
        problem = Problem(
            field="training.precision", value=precision, rule="cannot be timed here yet", fix="use fp32, bf16 or fp8"
        )
        raise NotModelledError(problem, file=scenario.file)
    return ShapeRequest(
        model=model,
        shard=plan.shard,
        microbatch_size=job.plan_in_sequences.microbatch_size,
        mixed=way_of_mixing(precision, sharded=plan.shards_parameters or training.pure_bf16),
        dtype=precision,
        fp8_recipe=training.fp8_recipe or DEFAULT_RECIPE,
        optimizer=training.update,
        compiled=job.software.compiled,
        model_code=job.software.layers.model_code,
        chunked_loss=job.software.chunked_loss,
        base_weights=training.base_weights,
        frozen_base=None if training.base_weights is None else job.software.state(training, plan).base,
        objective=model.objective,
        trains_nothing=model.trains_nothing,
    )
