"""Predicts a scenario, runs the same plan on this machine, and compares the two."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simplan.cli.terminal.output import say
from simplan.cli.terminal.processes import ExecutorKilledError, run_executor
from simplan.cli.terminal.progress import ProgressLine, show_event
from simplan.cost.calibration.format import Calibration
from simplan.documentation import documentation
from simplan.errors import NotModelledError, Problem, RunError, SimplanError, SpecError
from simplan.interop.writing import refuse_mixed
from simplan.io import read_model, write_json, write_model
from simplan.predict import Simulated, run_dtype, run_spec_of
from simplan.prediction import Prediction
from simplan.report.text import verdict
from simplan.report.trace import write_measured_trace, write_predicted_trace
from simplan.runs.checkpoint import Checkpointing, check_new_run, differences, readable_headers, step_folder
from simplan.runs.elastic import RendezvousOptions, refuse_busy_port
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec, rounds_beyond_run
from simplan.scenario import Scenario
from simplan.scenario.elastic import fewer_nodes, scenarios_on_fewer
from simplan.scenario.whole_run.executed import FaultRequest, with_faults
from simplan.units import GIB
from simplan.validate.compare import Comparison, compare

_MAX_CELLS = 1_000_000  # a table of these actions has a few hundred MiB
_DEVICES = {"cpu": "cpu", "gpu": "cuda"}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run.

    Attributes:
        num_steps: Steady steps to measure.
        num_warmup_steps: Steps before the measured ones; None for detection from the step times.
        timeout_s: Abort if a rank makes no progress for this number of seconds.
        nodes: Rendezvous of a run on several nodes; None for all ranks on this machine.
        checkpointing: Checkpoints of the training state; None for no checkpoints.
        faults: Faults that the run is to meet; None for none.
        replica_restarts: Restarts of replicas that leave (``plan.replication.min_replicas``).
    """

    num_steps: int = 10
    num_warmup_steps: int | None = None
    timeout_s: float = 120.0
    nodes: RendezvousOptions | None = None
    checkpointing: Checkpointing | None = None
    faults: FaultRequest | None = None
    replica_restarts: int = 0


def checkpointing(folder: Path | None, every: int | None, *, restarts: int, resume: bool) -> Checkpointing | None:
    """Checkpointing as the flags say; None without a folder.

    Raises:
        SpecError: A flag needs a folder.
    """
    if folder is None:
        flags = {"--checkpoint-every": every is not None, "--max-restarts": restarts > 0, "--resume": resume}
        rule, fix = "needs a folder for checkpoints", "add --checkpoint-dir DIR"
        if problems := [Problem(field=flag, rule=rule, fix=fix) for flag, is_given in flags.items() if is_given]:
            raise SpecError(problems)
        return None
    asked = Checkpointing(folder=str(folder.resolve()), resume=resume, max_restarts=restarts)
    return asked if every is None else asked.model_copy(update={"every": every})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prediction, the measurement of the same plan, and their comparison; ``folder`` contains their files.

    After a run that lost nodes, all three describe the last segment of the run.
    """

    prediction: Prediction
    measurement: Measurement
    comparison: Comparison
    folder: Path
    prediction_file: Path

    def to_json(self) -> dict[str, Any]:
        """The document of ``simplan run --json``."""
        measured = self.measurement
        peaks = {
            column: max((getattr(rank.peak_memory, f"{column}_bytes") or 0 for rank in measured.ranks), default=0)
            or None
            for column in ("allocated", "reserved", "device")
        }
        return {
            "schema_version": 2,
            "kind": "run",
            "prediction": self.prediction.to_json(),
            "measurement": {
                "step_time_s": measured.step_time_s,
                "step_times_s": list(measured.step_times_s),
                "spread": measured.spread,
                "loss_curve": [point.model_dump(mode="json") for point in measured.loss_curve],
                "peak_memory_gib": {key: None if value is None else value / GIB for key, value in peaks.items()},
                "ranks": [rank.model_dump(mode="json") for rank in measured.ranks],
                "slow_ranks": [slow.model_dump(mode="json") for slow in measured.slow_ranks],
                "arrivals": [step.model_dump(mode="json") for step in measured.arrivals],
                "environment": measured.environment,
                "times": None if measured.times is None else measured.times.model_dump(mode="json"),
            },
            "comparison": self.comparison.to_json(),
        }


def refuse_other_software(scenario: Scenario) -> None:
    """The executor runs one framework.

    Raises:
        NotModelledError: The scenario is for another framework.
    """
    if not scenario.job.software.executable:
        rule = "cannot be run: the executor runs plain torch, which is not what is predicted for another framework"
        problem = Problem(field="software", value=scenario.job.software.id, rule=rule, fix="use torch")
        raise NotModelledError(problem, file=scenario.file)


_ONLY_PREDICTED_BY_RUNS = ("cluster.jitter", "cluster.background")
_ONLY_PREDICTED = (
    "cluster.stragglers",
    "cluster.slow_links",
    *_ONLY_PREDICTED_BY_RUNS,
    "training.backup_workers",
)


def refuse_what_is_only_predicted(scenario: Scenario, who: str, fields: Sequence[str] = _ONLY_PREDICTED) -> None:
    """Slow links, jitter and other jobs are predicted; nothing else makes them. Only runs have slow and late ranks.

    Args:
        scenario: The scenario.
        who: What would ignore them, e.g. ``a rehearsal``.
        fields: Fields of the job that it would ignore.

    Raises:
        NotModelledError: The scenario has some; lists all of them.
    """
    rule, fix = f"is predicted, and {who} would ignore it", "remove it"
    problems = [Problem(field=field, rule=rule, fix=fix) for field in fields if attrgetter(field)(scenario.job)]
    if problems:
        raise NotModelledError(problems, file=scenario.file)


def refuse_restarts(scenario: Scenario, options: RunOptions) -> None:
    """Without a folder for checkpoints, only replicas that may leave can be restarted.

    Raises:
        SpecError: ``--max-restarts`` has nothing to restart from.
    """
    replication = scenario.job.plan.replication
    if options.replica_restarts and (replication is None or replication.min_replicas is None):
        rule, fix = "needs a folder for checkpoints", "add --checkpoint-dir DIR"
        raise SpecError(Problem(field="--max-restarts", rule=rule, fix=fix))


def default_folder(scenario: Scenario) -> Path:
    """``simplan-out/NAME`` in the current folder, the name made safe for a file system."""
    return Path("simplan-out") / (re.sub(r"[^A-Za-z0-9._-]+", "-", scenario.name).strip(".-") or "run")


def check_before_calibrating(scenario: Scenario, options: RunOptions) -> None:
    """Refuses what a run would refuse after its calibration, which takes half a minute.

    Raises:
        SpecError: The folder has checkpoints of another training, the run is shorter than a round, or the port at the
            endpoint is in use.
    """
    kept, job = options.checkpointing, scenario.job
    refuse_what_is_only_predicted(scenario, "a run", _ONLY_PREDICTED_BY_RUNS)
    if kept is not None:
        newest = next(iter(readable_headers(Path(kept.folder))[0]), None)
        check_new_run(kept, newest)
        seed = RunSpec.model_fields["seed"].default
        if newest is not None and (
            problems := list(differences(newest, job.model, job.training, job.plan, seed, run_dtype(job.training)))
        ):
            raise SpecError(problems, file=str(step_folder(Path(kept.folder), newest.step)))
    if problems := list(rounds_beyond_run(job.plan, options.num_steps, "--steps")):
        raise SpecError(problems, file=scenario.file)
    if options.nodes is not None:
        refuse_busy_port(options.nodes)


def execute(scenario: Scenario, calibration: Calibration | None, folder: Path, options: RunOptions) -> Outcome:
    """Predicts, runs, compares, and writes everything to a folder, which this process has alone.

    ``prediction.json``, ``job.json``, ``measurement.json``, ``comparison.json``, ``predicted.trace.json`` and
    ``measured.trace.json``; when the run fails, what was written and measured until then stays. With fewer nodes to go
    on with, ``prediction.N-nodes.json`` is of N of them.

    Raises:
        SpecError: The scenario cannot be predicted or run here, or a file cannot be written.
        RunError: Ranks failed or hung.
    """
    prediction, simulated = scenario.predict_step(calibration)
    least = None if options.nodes is None else options.nodes.min_nodes
    on_fewer = _steps_on_fewer(scenario, calibration, least)
    predictions = {number: of for number, (of, _) in on_fewer.items()}
    job = run_spec_of_scenario(scenario, prediction, options, predictions)
    if options.faults is not None:
        predictions[scenario.job.cluster.num_nodes] = prediction
        job = with_faults(job, scenario, options.faults, predictions, options.nodes)
        if job.expected is None:
            say(
                "note: goodput is not predicted without --recovery, or the sections recovery and checkpoint with which "
                "the run would finish"
            )
    folder.mkdir(parents=True, exist_ok=True)
    job_file, measurement_file = folder / "job.json", folder / "measurement.json"
    for old in (measurement_file, *folder.glob("rank*.steps.jsonl")):  # an older run's must not pass for this one's
        old.unlink(missing_ok=True)
    write_json(folder / "prediction.json", prediction.to_json())
    write_predicted_trace(folder / "predicted.trace.json", prediction, simulated)
    for number, (other, _) in on_fewer.items():
        write_json(folder / f"prediction.{number}-nodes.json", other.to_json())
    write_model(job_file, job)
    try:
        with ProgressLine(f"running {scenario.name}") as progress:
            arguments = ["run", str(job_file), "--out", str(folder)]
            if options.nodes is not None:
                write_model(folder / "nodes.json", options.nodes)
                arguments += ["--nodes", str(folder / "nodes.json")]
            run_executor(arguments, lambda event: show_event(event, progress))
    except RunError as error:
        if isinstance(error, ExecutorKilledError) and options.nodes is None:
            _gather(job_file, folder, str(error))
        kept = f"\nwhat was measured until then is in {folder}" if measurement_file.exists() else ""
        if re.search(r"\branks?\b", str(error)):
            kept += f"\nwhat to check: {documentation('how-to/troubleshooting')}"
        raise RunError(f"{error}{kept}") from None
    measurement = read_model(measurement_file, Measurement)
    prediction_file = folder / "prediction.json"
    for number, (other, other_step) in on_fewer.items():
        if measurement.job.plan == other.job.plan:
            prediction, simulated, prediction_file = other, other_step, folder / f"prediction.{number}-nodes.json"
            write_predicted_trace(folder / "predicted.trace.json", prediction, simulated)
    comparison = compare(prediction, measurement, simulated.program)
    write_json(folder / "comparison.json", comparison.to_json())
    write_measured_trace(folder / "measured.trace.json", measurement)
    return Outcome(prediction, measurement, comparison, folder, prediction_file)


def _gather(job_file: Path, folder: Path, failure: str) -> None:
    """Has the measurement written that a killed executor could not write; of its ranks, which Linux has ended."""
    with suppress(SimplanError):  # the run's own failure is the one to report
        run_executor(["gather", str(job_file), "--out", str(folder), "--failure", failure], lambda event: None)


def join(nodes: RendezvousOptions, folder: Path) -> None:
    """Runs this node's ranks; the node at the endpoint predicts, runs and reports.

    Raises:
        SpecError: The nodes were started with different requests.
        RunError: The run failed, on whichever node.
    """
    say(f"taking the job from {nodes.endpoint}")
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / f"{socket.gethostname()}.nodes.json"  # nodes may share a file system
    write_model(request, nodes)
    out = folder / socket.gethostname()
    lost_for_s: list[float | None] = []

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "lost":
            lost_for_s.append(event["for_s"])
        else:
            show_event(event, progress)

    with ProgressLine("running") as progress:
        while True:
            try:
                run_executor(["run", "--nodes", str(request), "--out", str(out)], show)
            except (ExecutorKilledError, SystemExit):
                back_s = lost_for_s.pop() if lost_for_s else None
                if back_s is None:
                    raise
                time.sleep(back_s)  # a fault of the run: the node comes back
            else:
                return


def exported_job(
    scenario: Scenario, calibration: Calibration | None, options: RunOptions, min_nodes: int | None
) -> RunSpec:
    """Job file for ranks that another launcher starts, on at least ``min_nodes`` nodes; None for all nodes.

    Raises:
        SpecError: The scenario cannot be predicted or run.
    """
    replication = scenario.job.plan.replication
    if replication is not None and replication.min_replicas is not None:
        rule = "needs the launcher of `simplan run`, and torchrun would end all ranks with any of them"
        value = str(replication.min_replicas)
        raise NotModelledError(
            Problem(field="plan.replication.min_replicas", value=value, rule=rule, fix="remove it"), file=scenario.file
        )
    on_fewer = _steps_on_fewer(scenario, calibration, min_nodes)
    predictions = {number: prediction for number, (prediction, _) in on_fewer.items()}
    return run_spec_of_scenario(scenario, scenario.predict(calibration), options, predictions)


def _steps_on_fewer(
    scenario: Scenario, calibration: Calibration | None, min_nodes: int | None
) -> dict[int, tuple[Prediction, Simulated]]:
    """By number of nodes, the largest first; empty for a run that ends when a node is lost."""
    if min_nodes is None or min_nodes == scenario.job.cluster.num_nodes:
        return {}
    scenarios, sentences = scenarios_on_fewer(scenario, min_nodes)
    for sentence in sentences:
        say(f"note: {sentence}")
    steps = {number: fewer.predict_step(calibration) for number, fewer in scenarios.items()}
    for number, (prediction, _) in steps.items():
        if prediction.fits is False:
            say(f"note: on {number} nodes the plan is predicted not to fit: {verdict(prediction)}")
    return steps


def run_spec_of_scenario(
    scenario: Scenario,
    prediction: Prediction,
    options: RunOptions,
    on_fewer: Mapping[int, Prediction] = MappingProxyType({}),
) -> RunSpec:
    """Job for the executor; ``on_fewer`` has the predictions for smaller numbers of nodes that may continue the run.

    Raises:
        NotModelledError: The executor does not run such devices, precisions or stages.
    """
    device, precision = scenario.job.cluster.device, scenario.job.training.precision
    problems = []
    if device.kind not in _DEVICES:
        problems.append(
            Problem(
                field="cluster.device", value=device.id, rule="cannot be run: the executor drives CPUs and CUDA GPUs"
            )
        )
    try:
        refuse_mixed(scenario.job, "the executor")
    except NotModelledError as error:
        problems += error.problems
    if precision not in ("fp32", "tf32", "bf16", "fp8"):
        rule = "cannot be run yet: the executor has no loss scaling, and of narrower formats only fp8"
        problems.append(Problem(field="training.precision", value=precision, rule=rule, fix="use bf16, fp8 or fp32"))
    if 0 in (scenario.job.plan.stage_layers or ()):
        rule = "has a stage without blocks, which the executor does not make"
        fix = "give every stage a layer"
        value = str(list(scenario.job.plan.stage_layers or ()))
        problems.append(Problem(field="plan.stage_layers", value=value, rule=rule, fix=fix))
    cells = scenario.job.num_microbatches * scenario.job.plan.num_stages
    if cells > _MAX_CELLS:
        rule = f"makes {cells:,} forward passes of stages per step, of which the executor runs at most {_MAX_CELLS:,}"
        fix = "use a smaller batch, or a larger plan.microbatch_size"
        value = str(scenario.job.training.global_batch_size)
        problems.append(Problem(field="training.global_batch_size", value=value, rule=rule, fix=fix))
    if problems:
        raise NotModelledError(problems, file=scenario.file)
    job = run_spec_of(
        prediction,
        num_steps=options.num_steps,
        num_warmup_steps=options.num_warmup_steps,
        timeout_s=options.timeout_s,
        checkpointing=options.checkpointing,
        device=_DEVICES[device.kind],
    )
    return job.model_copy(
        update={"fewer_nodes": fewer_nodes(dict(on_fewer)), "replica_restarts": options.replica_restarts}
    )
