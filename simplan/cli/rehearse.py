"""``simplan rehearse``: dry run of one rank of a plan, on a local device or on none, next to its prediction."""

from __future__ import annotations

import tempfile
from pathlib import Path

from simplan.cli.calibrations import chosen, ensure, is_needed
from simplan.cli.execute import RunOptions, refuse_other_software, refuse_what_is_only_predicted, run_spec_of_scenario
from simplan.cli.terminal.output import print_result, write_result
from simplan.cli.terminal.processes import run_executor
from simplan.cli.terminal.progress import ProgressLine, show_event
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import Problem, SpecError
from simplan.io import read_model, write_model
from simplan.prediction import Prediction
from simplan.report.comparison import rehearsal_text
from simplan.report.text import verdict
from simplan.runs.measurement import Rehearsal
from simplan.runs.run_spec import RunSpec
from simplan.validate.rehearsal import compare_rehearsal

_WORST = "worst"


def rehearse_command(
    request: ScenarioRequest,
    *,
    rank_asked: str,
    fake: bool,
    steps: RunOptions,
    as_json: bool,
    output: Path | None,
    calibration_file: Path | None,
) -> int:
    """``simplan rehearse``; the rank is a number, or ``worst`` for the rank with the highest predicted peak memory."""
    scenario = request.scenario()
    refuse_other_software(scenario)
    refuse_what_is_only_predicted(scenario, "a rehearsal")
    needed = is_needed(scenario.job.cluster)
    calibration = ensure([scenario], calibration_file) if needed else chosen(scenario, calibration_file)
    prediction, simulated = scenario.predict_step(calibration)
    rank = _rank(rank_asked, prediction)
    rehearsal = _rehearse(run_spec_of_scenario(scenario, prediction, steps), rank, fake=fake)
    comparison = compare_rehearsal(prediction, simulated, rehearsal)
    document = {
        "schema_version": 2,
        "kind": "rehearsal",
        "rehearsal": rehearsal.model_dump(mode="json"),
        "comparison": comparison.to_json(),
    }
    if not write_result(document, as_json=as_json, output=output):
        return 0
    where = "on tensors without data" if fake else f"on {rehearsal.environment.get('device')}"
    title = f"{scenario.name}: rank {rank} of {prediction.job.plan.num_devices}, rehearsed {where}"
    print_result(f"{title}\npredicted: {verdict(prediction)}\n\n{rehearsal_text(comparison)}")
    return 0


def _rank(asked: str, prediction: Prediction) -> int:
    """Number of the requested rank; checked before torch is imported."""
    if asked == _WORST:
        return prediction.worst_rank
    last_rank = prediction.job.plan.num_devices - 1
    if not asked.isdecimal() or int(asked) > last_rank:
        fix = f"use 0 to {last_rank}, or {_WORST}" if last_rank else f"use 0 or {_WORST}"
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
                lambda event: show_event(event, progress),
            )
        return read_model(result_file, Rehearsal)
