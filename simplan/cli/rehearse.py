"""``simplan rehearse``: dry run of one rank of a plan, on a local device or on none, next to its prediction."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from simplan.cli.calibrations import ensure, is_needed, read
from simplan.cli.execute import RunOptions, refuse_other_software, run_spec_of_scenario
from simplan.cli.terminal.output import print_json, print_result
from simplan.cli.terminal.processes import run_executor
from simplan.cli.terminal.progress import ProgressLine
from simplan.errors import Problem, SpecError
from simplan.io import read_model, write_json, write_model
from simplan.prediction import Prediction
from simplan.report.rehearsal import rehearsal_text
from simplan.report.text import verdict
from simplan.runs.rehearsal import Rehearsal
from simplan.runs.run_spec import RunSpec
from simplan.scenario import load_scenario
from simplan.validate.rehearsal import compare_rehearsal

__all__ = ["RehearseOptions", "rehearse_command"]

_WORST = "worst"


@dataclass(frozen=True, slots=True)
class RehearseOptions:
    """Options of a dry run.

    Attributes:
        rank: A rank's number, or ``worst`` for the rank with the highest predicted peak memory.
        fake: Run on tensors without data.
        num_steps: Steps to measure.
        num_warmup_steps: Steps before the measured ones.
    """

    rank: str = _WORST
    fake: bool = False
    num_steps: int = 5
    num_warmup_steps: int = 2


def rehearse_command(
    file: Path, *, as_json: bool, output: Path | None, calibration_file: Path | None, options: RehearseOptions
) -> int:
    """``simplan rehearse``."""
    scenario = load_scenario(file)
    refuse_other_software(scenario)
    if is_needed(scenario.job.cluster):
        calibration = ensure([scenario], calibration_file)
    else:
        calibration = None if calibration_file is None else read(calibration_file)
    prediction, simulated = scenario.predict_step(calibration)
    rank = _rank(options.rank, prediction)
    steps = RunOptions(num_steps=options.num_steps, num_warmup_steps=options.num_warmup_steps)
    rehearsal = _rehearse(run_spec_of_scenario(scenario, prediction, steps), rank, fake=options.fake)
    comparison = compare_rehearsal(prediction, simulated, rehearsal)
    document = {
        "schema_version": 2,
        "kind": "rehearsal",
        "rehearsal": rehearsal.model_dump(mode="json"),
        "comparison": comparison.to_json(),
    }
    if output is not None:
        write_json(output, document)
    if as_json:
        print_json(document)
        return 0
    where = "on tensors without data" if options.fake else f"on {rehearsal.environment.get('device')}"
    title = f"{scenario.name}: rank {rank} of {prediction.job.plan.num_devices}, rehearsed {where}"
    print_result(f"{title}\npredicted: {verdict(prediction)}\n\n{rehearsal_text(comparison)}")
    return 0


def _rank(asked: str, prediction: Prediction) -> int:
    """Number of the requested rank; checked before torch is imported."""
    if asked == _WORST:
        return prediction.worst_rank
    most = prediction.job.plan.num_devices - 1
    if not asked.isdecimal() or int(asked) > most:
        fix = f"use 0 to {most}, or {_WORST}" if most else f"use 0 or {_WORST}"
        raise SpecError(Problem(field="--rank", value=asked, rule="is no rank of the plan", fix=fix))
    return int(asked)


def _rehearse(job: RunSpec, rank: int, *, fake: bool) -> Rehearsal:
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "rehearsal.json"
        write_model(job_file, job)
        command = ["rehearse", str(job_file), "--out", str(result_file), "--rank", str(rank)]
        with ProgressLine(f"rehearsing rank {rank} of {job.plan.num_devices}") as progress:
            run_executor(
                [*command, "--fake"] if fake else command,
                lambda event: progress.update(event["step"], event["of"], f"step {event['step']} of {event['of']}"),
            )
        return read_model(result_file, Rehearsal)
