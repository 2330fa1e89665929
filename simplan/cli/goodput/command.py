"""``simplan goodput``: whole runs of scenarios, their expectations, and files of the simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simplan.base import MAX_DEVICES
from simplan.cli.calibrations import is_needed
from simplan.cli.predict import calibration_for, name_of
from simplan.cli.terminal.options import opened
from simplan.cli.terminal.output import print_result, say, write_result
from simplan.cli.terminal.progress import ProgressLine
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import Problem, SpecError
from simplan.goodput.engines.simulate import one_run
from simplan.goodput.result import GoodputResult
from simplan.io import write_json, write_whole
from simplan.report.devices import devices_text
from simplan.report.goodput import goodput_text, goodputs_text
from simplan.report.trace import run_trace
from simplan.scenario import CheckResult, Scenario, evaluate
from simplan.scenario.whole_run.devices import compare_devices
from simplan.scenario.whole_run.executed import with_measured_recovery
from simplan.scenario.whole_run.goodput import goodput_of

_FAILED = 1
_MAX_DIGITS = 12
_SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    """Options of the command.

    Attributes:
        num_runs: Simulated runs.
        seed: Seed of their failures.
        jobs: Worker processes; -1 for one per core.
        runs_file: Parquet or CSV file for the runs; None for none.
        trace: File for the trace of one run; None for none.
        trial: Number of that run, from 0; None for the one with the median time.
        devices: Numbers of devices to compare; None for the scenario alone.
        recovery: Measurement of an earlier run, with its times of restarts; None for those of the scenario.
    """

    num_runs: int
    seed: int
    jobs: int
    runs_file: Path | None
    trace: Path | None
    trial: int | None = None
    devices: str | None = None
    recovery: Path | None = None


def goodput_command(
    request: ScenarioRequest,
    others: Sequence[Path],
    *,
    as_json: bool,
    output: Path | None,
    calibration_file: Path | None,
    options: GoodputOptions,
) -> int:
    """Runs the command; returns 1 when an expectation of a whole run failed, else 0."""
    _check_files(options, has_others=bool(others))
    if options.devices is not None:
        return _compare_devices(request, options, options.devices, calibration_file, as_json=as_json, output=output)
    requests = (request, *(replace(request, source=opened(other), write=None) for other in others))
    pairs = [_simulated(asked, options, calibration_file, several=bool(others)) for asked in requests]
    results = [result for _, result in pairs]
    checks = [check for scenario, result in pairs for check in _checks(scenario, result)]
    if options.runs_file is not None:
        _write_runs(options.runs_file, results[0])
    if options.trace is not None:
        _write_trace(options.trace, results[0], options.trial)
    documents = [result.to_json() for result in results]
    document = {"schema_version": 1, "kind": "goodputs", "goodputs": documents} if others else documents[0]
    document["expectations"] = [{"message": check.message, "passed": check.passed} for check in checks]
    if write_result(document, as_json=as_json, output=output):
        print_result(goodputs_text(results) if others else goodput_text(results[0], _next(request, results[0])))
    for check in checks:
        if not check.passed:
            say(f"failed: {check.message}" + (f" ({why})" if (why := check.expectation.why) else ""))
    return 0 if all(check.passed for check in checks) else _FAILED


def _compare_devices(
    request: ScenarioRequest,
    options: GoodputOptions,
    devices: str,
    calibration_file: Path | None,
    *,
    as_json: bool,
    output: Path | None,
) -> int:
    """``--devices``: the run on several numbers of devices."""
    numbers = _numbers(devices)
    scenario, source = request.read()
    calibration = calibration_for(scenario, calibration_file if is_needed(scenario.job.cluster) else None)

    def simulated(scaled: Scenario) -> GoodputResult:
        return goodput_of(
            scaled,
            calibration=calibration,
            num_runs=options.num_runs,
            seed=options.seed,
            jobs=options.jobs,
            compares=False,
        )

    try:
        with ProgressLine("simulating runs", quarters=False):
            comparison = compare_devices(scenario, numbers, simulated)
    except SpecError as error:
        raise source.located(error) from None
    if write_result(comparison.to_json(), as_json=as_json, output=output):
        print_result(devices_text(comparison))
    return 0


def _numbers(text: str) -> list[int]:
    """Rising numbers of devices of a list such as ``256,512``.

    Raises:
        SpecError: The text is something else.
    """
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdecimal() and len(word) <= _MAX_DIGITS]
    if len(numbers) == len(words) and numbers == sorted(set(numbers)) and numbers[0] and numbers[-1] <= MAX_DEVICES:
        return numbers
    rule = f"must be rising numbers of devices up to {MAX_DEVICES:,}, with commas"
    raise SpecError(Problem(field="--devices", value=text, rule=rule, fix="such as --devices 256,512,1024"))


def _simulated(
    request: ScenarioRequest, options: GoodputOptions, calibration_file: Path | None, *, several: bool
) -> tuple[Scenario, GoodputResult]:
    scenario, source = request.read()
    needs = not several or is_needed(scenario.job.cluster)
    calibration = calibration_for(scenario, calibration_file if needs else None)
    scenario = replace(scenario, name=name_of(request, scenario, several=several))
    if options.recovery is not None:
        scenario = with_measured_recovery(scenario, options.recovery)
    try:
        with ProgressLine("simulating runs", quarters=False):
            result = goodput_of(
                scenario,
                calibration=calibration,
                num_runs=options.num_runs,
                seed=options.seed,
                jobs=options.jobs,
                compares=not several,
            )
    except SpecError as error:
        raise source.located(error) from None
    return scenario, result


def _checks(scenario: Scenario, result: GoodputResult) -> list[CheckResult]:
    document = {"whole_run": result.to_json()}
    return [evaluate(expectation, document) for expectation in scenario.expect if expectation.is_of_run]


def _check_files(options: GoodputOptions, *, has_others: bool) -> None:
    """Check the files of one run before anything is simulated.

    Raises:
        SpecError: There are several scenarios or numbers of devices, no trace of the trial, or the suffix of a file is
            unknown.
    """
    if options.devices is not None and has_others:
        rule, fix = "is for one scenario", "give it with each of the scenarios"
        raise SpecError(Problem(field="--devices", value=options.devices, rule=rule, fix=fix))
    files = {"--runs": options.runs_file, "--trace": options.trace, "--recovery": options.recovery}
    for option, file in files.items():
        if file is not None and options.devices is not None:
            fix = "give it without --devices"
            raise SpecError(Problem(field=option, value=str(file), rule="is of one number of devices", fix=fix))
        if file is not None and has_others and option != "--recovery":
            rule, fix = "is of one scenario", "give it with each of the scenarios"
            raise SpecError(Problem(field=option, value=str(file), rule=rule, fix=fix))
    if options.trial is not None and options.trace is None:
        rule, fix = "is the run of --trace", "add --trace FILE"
        raise SpecError(Problem(field="--trial", value=str(options.trial), rule=rule, fix=fix))
    file = options.runs_file
    if file is not None and file.suffix.lower() not in _SUFFIXES:
        rule, fix = "is a Parquet or CSV file", f"write {file.stem}.parquet or {file.stem}.csv"
        raise SpecError(Problem(field="--runs", value=str(file), rule=rule, fix=fix))


def _write_runs(file: Path, result: GoodputResult) -> None:
    """Writes the simulated runs, one row for each.

    Raises:
        SpecError: The file cannot be written, or a package for it is not installed.
    """
    try:
        table = result.to_dataframe()
        is_csv = file.suffix.lower() == ".csv"
        content = table.to_csv(index=False).encode() if is_csv else table.to_parquet(index=False)
    except ImportError as error:
        fix = "install pandas and pyarrow, or write a CSV file, for which pandas is enough"
        raise SpecError(Problem(field="--runs", value=str(file), rule=f"needs {error.name}", fix=fix)) from None
    write_whole(file, content)


def _write_trace(file: Path, result: GoodputResult, trial: int | None) -> None:
    """Writes the trace of a run; raises a SpecError if the file cannot be written."""
    number = result.median_run if trial is None else trial
    write_json(file, run_trace(result, one_run(result.setup, seed=result.seed, number=number)))


def _next(request: ScenarioRequest, result: GoodputResult) -> list[str]:
    """Commands to run next."""
    curve, setup = result.curve, result.setup
    steps = []
    if curve is not None and curve.best.every_steps != setup.checkpoint_every:
        best = request.with_overrides({"checkpoint.interval_s": "best"})
        steps.append(f"simplan goodput {best.argument()}")
    if any(change.name == "spare" and change.saved_s > 2 * change.saved_s_error for change in result.changes):
        spares = request.with_overrides({"recovery.spares": setup.spares + 1})
        steps.append(f"simplan goodput {spares.argument()}")
    return [*steps, f"simplan draw {request.argument()} --run -o run.svg"]
