"""``simplan demo``: the whole of simplan on one's own machine, in a few minutes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from simplan.cli.calibrations import measure, requests_for
from simplan.cli.execute import Outcome, RunOptions, execute
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.processes import require_executor
from simplan.io import write_text
from simplan.report.comparison import format_error, format_spread
from simplan.report.table import format_table_text
from simplan.scenario import load_scenario
from simplan.units import GIB, format_bytes, format_time

_SCENARIOS = ("ddp", "fsdp", "gpipe", "1f1b", "interleaved")
_CALIBRATION_BUDGET_S = 30.0
_OPTIONS = RunOptions(num_steps=15, num_warmup_steps=2, timeout_s=60.0)


def demo_command(folder: Path, *, as_json: bool) -> int:
    """Calibrates, then predicts and runs each scenario; writes everything to ``folder``."""
    require_executor()
    folder.mkdir(parents=True, exist_ok=True)
    files = [_copy(name, folder) for name in _SCENARIOS]
    scenarios = [load_scenario(file) for file in files]
    calibration_file = folder / "calibration.json"
    calibration_file.unlink(missing_ok=True)  # timings of an earlier day are no measure of now
    say(f"simplan demo: a small GPT on two ranks of this machine, files in {folder}")
    calibration = measure(requests_for(scenarios, None, _CALIBRATION_BUDGET_S), calibration_file)
    outcomes = [
        execute(scenario, calibration, folder / name, _OPTIONS)
        for name, scenario in zip(_SCENARIOS, scenarios, strict=True)
    ]
    if as_json:
        print_json({"schema_version": 1, "kind": "demo", "runs": [outcome.to_json() for outcome in outcomes]})
    else:
        print_result(_report(outcomes, files, calibration_file))
    return 0


def _copy(name: str, folder: Path) -> Path:
    """Copy of the scenario in the output folder, for the user to edit and run."""
    text = resources.files("simplan").joinpath("data", "demo", f"{name}.yaml").read_text(encoding="utf-8")
    file = folder / f"{name}.yaml"
    write_text(file, text)
    return file


def _report(outcomes: list[Outcome], files: list[Path], calibration_file: Path) -> str:
    model, cluster = outcomes[0].prediction.job.model, outcomes[0].prediction.job.cluster
    headers = ["plan", "predicted", "90 % interval", "measured", "in it", "spread", "error"]
    headers += ["memory predicted", "measured"]
    rows = []
    for outcome in outcomes:
        prediction, measurement = outcome.prediction, outcome.measurement
        low_s, high_s = prediction.step_time_interval_s
        step = outcome.comparison.rows[0]
        memory = [row for row in outcome.comparison.rows if row.name.startswith("peak memory, allocated")]
        rows.append(
            [
                prediction.name,
                format_time(prediction.step_time_s),
                f"{format_time(low_s)} to {format_time(high_s)}",
                format_time(measurement.step_time_s),
                "yes" if outcome.comparison.interval_holds else "no",
                format_spread(measurement.spread),
                format_error(step.signed_error),
                *(format_bytes(value * GIB) for row in memory for value in (row.predicted, row.measured)),
                *("?" for _ in range(0 if memory else 2)),
            ]
        )
    same = all(outcome.comparison.structure_equal for outcome in outcomes)
    steps = outcomes[0].measurement.step_times_s
    return "\n".join(
        [
            f"{model.num_parameters / 1e6:.1f} M parameters, {model.num_hidden_layers} layers, on "
            f"{cluster.num_devices} ranks and {cluster.cores_per_node} cores",
            "",
            format_table_text(headers, rows),
            "",
            f"  step time: the median of {len(steps)} steps; spread: half of p10 to p90; "
            "error = (predicted - measured) / measured",
            "  in it: yes if the measured step lies in the 90 % interval",
            "  memory: tensors of the rank that needs most",
            f"  actions: {'exactly those' if same else 'NOT those'} that were predicted, in their order",
            "",
            "Next",
            f"  see where the time went:  open {outcomes[-1].folder}/predicted.trace.json and measured.trace.json "
            "at ui.perfetto.dev",
            f"  one run in detail:        simplan compare {outcomes[-1].folder}/prediction.json "
            f"{outcomes[-1].folder}/measurement.json",
            f"  change the plan:          edit {files[-1]}, then",
            f"                            simplan run {files[-1]} --calibration {calibration_file}",
            "  a real cluster:           simplan show clusters; simplan show models; simplan predict YOUR.yaml",
        ]
    )
