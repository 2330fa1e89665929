"""Predicted and measured step times on this machine's CPU.

Rounds alternate: odd rounds calibrate, even rounds run every plan. The prediction is the median over calibrations, the
measurement the median over steps of all runs. So the two use separate data from the same period of time.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.accuracy_cases import MICROBATCH_SIZE, TRAINING, AccuracyCase, cases
from benchmarks.table import BenchmarkRow
from executor.calibration.calibrate import calibrate
from executor.run import run_job
from simplan.cost.calibration.format import Calibration, CalibrationRequest, ShapeRequest
from simplan.cost.calibration.store import kinds_needed
from simplan.predict import run_spec_of
from simplan.prediction import Prediction
from simplan.runs.measurement import Measurement
from simplan.validate.compare import compare

_ROUNDS = 2
_CALIBRATION_S = {2: 50.0, 4: 25.0}  # by number of ranks
_STEPS = 5
_GOAL = 0.12


def accuracy() -> list[BenchmarkRow]:
    """One row per model and plan, and their mean; step times of more ranks than cores are reported without a goal."""
    all_cases = cases()
    calibrations: list[Calibration] = []
    runs: dict[str, list[tuple[Prediction, Measurement]]] = {case.name: [] for case in all_cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_ROUNDS):
            print(f"accuracy: round {number + 1} of {_ROUNDS}", flush=True)
            if number % 2 == 0:
                calibrations.append(_calibrate(all_cases))
            else:
                for case in all_cases:
                    prediction = case.predict(calibrations[-1])
                    run = _run(prediction, Path(folder) / f"{number} {case.name}")
                    runs[case.name].append((prediction, run))
    rows, errors, structures, held = [], [], [], []
    for case in all_cases:
        predicted_s = [prediction.step_time_s for prediction, _ in runs[case.name]]
        measured_s = [seconds for _, run in runs[case.name] for seconds in run.step_times_s]
        middle_s, truth_s = statistics.median(predicted_s), statistics.median(measured_s)
        error = middle_s / truth_s - 1
        compared = [compare(prediction, run) for prediction, run in runs[case.name]]
        structures += [comparison.structure_equal for comparison in compared]
        if case.num_ranks == 2:
            errors.append(error)
            held += [comparison.interval_holds for comparison in compared]
        rows.append(
            BenchmarkRow(
                f"step time, {case.name}, {case.num_ranks} ranks",
                "",
                f"predicted {1e3 * middle_s:.0f} ms ({1e3 * min(predicted_s):.0f} to {1e3 * max(predicted_s):.0f}), "
                f"measured {1e3 * truth_s:.0f} ms (p10 to p90 {_p10_to_p90(measured_s)}): {error:+.1%}",
                abs(error) <= _GOAL,
            )
        )
    mean = statistics.fmean(abs(error) for error in errors)
    largest = max(map(abs, errors))
    return [
        *rows,
        BenchmarkRow(
            "step time, mean absolute error, 2 ranks",
            "at most 12 %",
            f"{mean:.1%} (largest {largest:.1%})",
            mean <= _GOAL,
        ),
        BenchmarkRow(
            "actions and collectives as predicted",
            "all",
            f"{sum(structures)} of {len(structures)} runs",
            all(structures),
        ),
        BenchmarkRow(
            "measured step inside the predicted 90 % interval, 2 ranks", "", f"{sum(held)} of {len(held)} runs", True
        ),
    ]


def _run(prediction: Prediction, folder: Path) -> Measurement:
    options = {"num_steps": _STEPS, "num_warmup_steps": 2, "profile_memory": False, "device": "cpu"}
    return run_job(run_spec_of(prediction, **options), folder)


def _calibrate(all_cases: list[AccuracyCase]) -> Calibration:
    """Calibrate for all cases, once per number of ranks."""
    total: Calibration | None = None
    for num_ranks, budget_s in _CALIBRATION_S.items():
        mine = [case for case in all_cases if case.num_ranks == num_ranks]
        shapes = {
            (case.model.name, case.plan.shard): ShapeRequest(
                model=case.model, shard=case.plan.shard, microbatch_size=MICROBATCH_SIZE
            )
            for case in mine
        }
        kinds = frozenset().union(*(kinds_needed(case.plan, case.model, TRAINING) for case in mine))
        request = CalibrationRequest(
            shapes=tuple(shapes.values()),
            num_ranks=num_ranks,
            budget_s=budget_s,
            communication=tuple(sorted(kinds)),
        )
        timed = calibrate(request)
        total = timed if total is None else total.merged(timed)
    assert total is not None
    return total


def _p10_to_p90(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    tenth = int(0.1 * (len(ordered) - 1))
    return f"{1e3 * ordered[tenth]:.0f} to {1e3 * ordered[-1 - tenth]:.0f}"
