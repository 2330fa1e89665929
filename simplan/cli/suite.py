"""``simplan suite``: many scenarios on one device, each in a separate process, and one report."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import simplan
from simplan.children import exit_code
from simplan.cli.calibrations import read
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.processes import child_environment, end_child, run_executor
from simplan.cli.terminal.progress import ProgressLine
from simplan.cost.calibration.store import refuse_other_device
from simplan.errors import Problem, SpecError
from simplan.io import read_model, write_json, write_model, write_text
from simplan.report.suite import suite_markdown, suite_summary
from simplan.scenario import load_scenario
from simplan.validate.suite import Suite, SuiteCase, case_of_rehearsal, case_of_run

_REHEARSED = "rehearse-"
_CALIBRATION_SHARE = 0.25  # of the budget
_GRID = ("--dtype", "bf16", "--dtype", "fp32")
_MIN_S = 10.0  # less time is not worth starting a case
_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Options of a suite.

    Attributes:
        device: ``cuda`` or ``cpu``.
        budget_s: Time for the suite, in seconds.
        limit_s: Time per case, in seconds.
        num_steps: Steady steps per case.
    """

    device: str = "cuda"
    budget_s: float = 520.0
    limit_s: float = 90.0
    num_steps: int = 10


class _OutOfTimeError(Exception):
    """A process was ended because its time was over."""


def suite_command(
    folders: Sequence[Path], *, output: Path, as_json: bool, calibration_file: Path | None, options: SuiteOptions
) -> int:
    """``simplan suite``."""
    files = _scenario_files(folders)
    deadline_s = time.monotonic() + options.budget_s
    environment = _environment()
    _check_device(options.device, environment)
    (output / "cases").mkdir(parents=True, exist_ok=True)
    calibration = calibration_file or _calibrated(files, output / "calibration.json", deadline_s, options)
    cases, not_reached = [], []
    with ProgressLine(f"{len(files)} scenarios") as progress:
        for number, file in enumerate(files):
            progress.update(number, len(files), file.stem)
            case = _case(file, output / "cases" / file.stem, calibration, deadline_s, options)
            if case is None:
                not_reached.append(file.stem)
            else:
                cases.append(case)
    suite = Suite(
        environment=environment,
        calibration_file=None if calibration is None else calibration.name,
        cases=tuple(cases),
        not_reached=tuple(not_reached),
    )
    write_json(output / "report.json", suite.to_json())
    write_text(output / "report.md", suite_markdown(suite))
    if as_json:
        print_json(suite.to_json())
    else:
        print_result(f"{suite_summary(suite)}\nreport in {output / 'report.md'} and report.json")
    return 0


def _scenario_files(folders: Sequence[Path]) -> list[Path]:
    """Scenario files sorted by name, with dry runs last.

    Raises:
        SpecError: A path does not exist, there are none, or two have one name.
    """
    for path in folders:
        if not path.exists():
            raise SpecError(Problem(field="", rule="does not exist"), file=str(path))
    paths = [file for path in folders for file in (path.glob("*.yaml") if path.is_dir() else [path])]
    files = sorted(paths, key=lambda file: (file.stem.startswith(_REHEARSED), file.stem))
    names = [file.stem for file in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not files or twice:
        rule = f"two scenarios are called {twice[0]}" if twice else "holds no scenario (*.yaml)"
        raise SpecError(Problem(field="", rule=rule), file=", ".join(map(str, folders)))
    return files


def _environment() -> dict[str, Any]:
    """Environment of measurements, as reported by torch in a separate process."""
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        file = Path(folder) / "environment.json"
        run_executor(["environment", "--out", str(file)], lambda event: None)
        environment: dict[str, Any] = json.loads(file.read_text())
        return environment


def _check_device(device: str, environment: dict[str, Any]) -> None:
    if device not in ("cuda", "cpu"):
        raise SpecError(Problem(field="--device", value=device, rule="is unknown", fix="use cuda or cpu"))
    if device == "cuda" and environment["cuda"] is None:
        fix = "use --device cpu, for scenarios of this-machine"
        raise SpecError(Problem(field="--device", value=device, rule="this machine has no CUDA device", fix=fix))


def _calibrated(files: Sequence[Path], target: Path, deadline_s: float, options: SuiteOptions) -> Path | None:
    """The suite's own calibration, made when there is none; None when that failed."""
    if target.exists():
        return target
    budget_s = _CALIBRATION_SHARE * options.budget_s
    # on the CPU its scenarios' layers and collectives are timed, on a GPU kernels over a grid
    here = [str(file) for file in files if _runs_here(file)]
    asked = here if options.device == "cpu" else ["--ranks", "1", "--device", "cuda", *_GRID]
    say("calibrating ...")
    try:
        _simplan(
            ["calibrate", *asked, "--budget", f"{budget_s:g}", "--calibration", str(target), "--json"],
            limit_s=min(deadline_s - time.monotonic(), 2 * budget_s + 60),
        )
    except (SpecError, _OutOfTimeError) as error:
        say(f"note: predictions are from the catalog alone: {error}")
    return target if target.exists() else None


def _runs_here(file: Path) -> bool:
    try:
        return load_scenario(file).job.cluster.cores_per_node is not None
    except SpecError:
        return False  # the run of the case reports the error


def _case(
    file: Path, folder: Path, calibration: Path | None, deadline_s: float, options: SuiteOptions
) -> SuiteCase | None:
    """Result of one scenario: from an earlier call, a run or a dry run; None when the time budget does not suffice.

    A failure is not kept: the next call tries again, perhaps with a longer limit.
    """
    kind: Literal["run", "rehearsal"] = "rehearsal" if file.stem.startswith(_REHEARSED) else "run"
    digest = hashlib.sha256(file.read_bytes() + simplan.__version__.encode()).hexdigest()[:16]
    kept = folder.with_name(f"{folder.name}.case.json")
    if kept.exists() and (earlier := read_model(kept, SuiteCase)).digest == digest:
        return earlier
    if deadline_s - time.monotonic() < _MIN_S:
        return None
    limit_s = min(options.limit_s, deadline_s - time.monotonic())
    try:
        command = _command(kind, file, folder, calibration, options)
        document = _simplan(command, limit_s)
        case = (case_of_run if kind == "run" else case_of_rehearsal)(file.stem, digest, document)
    except _OutOfTimeError:
        if limit_s < options.limit_s:
            return None
        failure = f"it took more than {options.limit_s:g} s"
        return SuiteCase(name=file.stem, digest=digest, kind=kind, failure=failure)
    except SpecError as error:
        return SuiteCase(name=file.stem, digest=digest, kind=kind, failure=str(error))
    write_model(kept, case)
    return case


def _command(
    kind: Literal["run", "rehearsal"], file: Path, folder: Path, calibration: Path | None, options: SuiteOptions
) -> list[str]:
    """The command line of a case."""
    steps = ["--json", "--steps", str(options.num_steps)]
    steps += ["--calibration", str(calibration)] if _takes(file, calibration) else []
    if kind == "run":
        return ["run", str(file), "-o", str(folder), *steps]
    return ["rehearse", str(file), "-o", str(folder.with_name(f"{folder.name}.rehearsal.json")), *steps]


def _takes(file: Path, calibration: Path | None) -> bool:
    """True when a calibration belongs to the scenario's device, and timed its precision."""
    try:
        calibrated = None if calibration is None else read(calibration)
        if calibrated is None:
            return False
        job = load_scenario(file).job
        refuse_other_device(calibrated, job.cluster)
    except SpecError:
        return False
    timed = {timing.dtype for timing in calibrated.kernels} | {timing.dtype for timing in calibrated.layers}
    return job.training.precision in timed


def _simplan(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """JSON output of a simplan command in a separate process.

    Raises:
        SpecError: The command failed; the error quotes its stderr.
        _OutOfTimeError: The command took too long and was ended together with its child processes.
    """
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "simplan", *command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=said,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            code = exit_code(child, limit_s)
        finally:
            if exit_code(child, 0.0) is None:
                end_child(child, _GRACE_S)
                exit_code(child)
        if code is None:
            raise _OutOfTimeError(f"it took more than {limit_s:.0f} s")
        printed.seek(0)
        said.seek(0)
        result, messages = printed.read(), said.read().decode(errors="replace")
    if code:
        errors = [line.removeprefix("error: ") for line in messages.splitlines() if line.startswith("error: ")]
        why = " ".join(errors) or f"ended with exit code {code}"
        raise SpecError(Problem(field="", rule=why))
    document: dict[str, Any] = json.loads(result)
    return document
