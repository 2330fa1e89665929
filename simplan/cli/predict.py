"""``simplan predict``, and what other commands do alike; what only some predictions need is imported then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from simplan.cli.calibrations import chosen, covers, is_needed
from simplan.cli.terminal.options import opened
from simplan.cli.terminal.output import emphasize, print_result, say, write_result
from simplan.cli.terminal.progress import ProgressLine
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.cluster.hardware import BackgroundJob
from simplan.cluster.machine import THIS_MACHINE
from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.io import as_argument
from simplan.model.model import ModelSpec
from simplan.predict import Simulated
from simplan.prediction import Prediction
from simplan.problems import parse_model
from simplan.report.predictions import compared_predictions, predictions_text
from simplan.report.text import prediction_text, verdict
from simplan.scenario import Scenario
from simplan.scenario.file import check_budget
from simplan.training import TrainingBudget
from simplan.units import format_percent

if TYPE_CHECKING:
    from simplan.explain.rank_order import FasterOrder
    from simplan.search import Fix

_MOST_OF_A_STEP = 0.5
"""Fraction of exposed communication above which an assumed plan has a warning."""


def predict_command(
    request: ScenarioRequest,
    others: Sequence[Path],
    *,
    as_json: bool,
    trace: Path | None,
    output: Path | None,
    calibration_file: Path | None,
    budget: Mapping[str, float | None],
) -> int:
    """``simplan predict``."""
    if others:
        if trace is not None:
            rule, fix = "is of one scenario", f"give it with each of the {len(others) + 1}"
            raise SpecError(Problem(field="--trace", value=str(trace), rule=rule, fix=fix))
        return _predict_all(request, others, as_json, output, calibration_file, budget)
    scenario = _with_budget(request.scenario(), budget)
    calibration = calibration_for(scenario, calibration_file)
    prediction, simulated = predict_step(scenario, calibration)
    changes, order = _fixes(prediction, calibration), _faster_order(prediction, calibration)
    if as_json or output is not None:
        document = prediction.to_json()
        if changes is not None:
            document["fixes"] = [fix.to_json() for fix in changes]
        if order is not None:
            document["faster_order"] = order.to_json()
        write_result(document, as_json=as_json, output=output)
    if trace is not None:
        from simplan.report.trace import write_predicted_trace

        write_predicted_trace(trace, prediction, simulated)
    if as_json:
        return 0
    sentences = [_warning(scenario, request, prediction), "" if order is None else order.words()]
    warning = "\n".join(sentence for sentence in sentences if sentence)
    steps, line = _next(scenario, request, changes), verdict(prediction)
    assumed = {"plan": scenario.plan_is_assumed, "batch": scenario.batch_is_assumed}
    text = prediction_text(prediction, steps, changes or (), warning, assumed={key for key in assumed if assumed[key]})
    certain = {"fits": True, "does not fit": False}.get(prediction.memory_verdict or "")
    print_result(text.replace(line, emphasize(line, certain), 1))
    return 0


def _with_budget(scenario: Scenario, options: Mapping[str, float | None]) -> Scenario:
    """The scenario with the length and the price that options give."""
    budget = scenario.budget
    fields: dict[str, object] = {**chosen_budget(options, scenario.job.model, has_length=budget.has_length)}
    if "num_tokens" in fields:
        fields |= {"num_samples": None, "num_steps": None}
    return replace(scenario, budget=budget.model_copy(update=fields))


def predict_step(scenario: Scenario, calibration: Calibration | None) -> tuple[Prediction, Simulated]:
    """Prediction and simulated step; on a terminal, with the progress of the simulation of links."""
    if scenario.job.cluster.topology is None:
        return scenario.predict_step(calibration)
    with ProgressLine("simulating links", quarters=False) as line:
        return scenario.predict_step(calibration, line.update)


def _predict_all(
    request: ScenarioRequest,
    others: Sequence[Path],
    as_json: bool,
    output: Path | None,
    calibration_file: Path | None,
    budget: Mapping[str, float | None],
) -> int:
    """Table of the predictions of several scenarios."""
    predictions = []
    for asked in (request, *(replace(request, source=opened(other)) for other in others)):
        scenario = _with_budget(asked.scenario(), budget)
        calibration = calibration_for(scenario, calibration_file if is_needed(scenario.job.cluster) else None)
        prediction = replace(scenario.predict(calibration), name=name_of(asked, scenario, several=True))
        predictions.append(prediction.to_json())
    document = compared_predictions(predictions)
    if write_result(document, as_json=as_json, output=output):
        print_result(predictions_text(document))
    return 0


def _fixes(prediction: Prediction, calibration: Calibration | None) -> tuple[Fix, ...] | None:
    """Changes with which a job fits; None if it fits as it is."""
    if prediction.memory_verdict in (None, "fits", "may not fit"):
        return None
    from simplan.search import fixes

    with ProgressLine("does not fit; trying changes", quarters=False):
        return fixes(prediction, calibration)


def _faster_order(prediction: Prediction, calibration: Calibration | None) -> FasterOrder | None:
    """Order of nodes with which the step is shorter; None for none."""
    if prediction.network is None:
        return None
    from simplan.explain.rank_order import faster_order

    with ProgressLine("trying the order of the network", quarters=False):
        return faster_order(prediction, calibration)


def _warning(scenario: Scenario, request: ScenarioRequest, prediction: Prediction) -> str:
    """Sentence on an assumed plan that does not fit or mostly waits for communication; empty for any other."""
    exposed_s = sum(split.exposed_communication_s for split in prediction.splits) / len(prediction.splits)
    share = exposed_s / prediction.step_time_s
    fits = prediction.fits is not False
    if not scenario.plan_is_assumed or (fits and share <= _MOST_OF_A_STEP):
        return ""
    words = f"{format_percent(share)} of the step is exposed communication. Find faster plans"
    if not fits:
        words = "other plans may fit. Find them"
    return (
        f"The plan was assumed, and {words}:\n"
        f"  simplan search {request.with_batch(scenario.job.training.global_batch_size).argument(without='plan')}"
    )


def _next(scenario: Scenario, request: ScenarioRequest, changes: Sequence[Fix] | None) -> list[str]:
    """Commands to run after a prediction."""
    this = request.argument()
    steps = [f"simplan run {this}"] if scenario.job.cluster.id == THIS_MACHINE else []
    steps.append(f"simplan trace {this} -o trace.json")
    same_batch = request.with_batch(scenario.job.training.global_batch_size)
    search = same_batch.argument(without="plan")
    if request.is_file:
        search += " --from-current" if changes is None else " --set 'search={}'"
    has_jobs = any(isinstance(background, BackgroundJob) for background in scenario.job.cluster.background)
    searched = [] if has_jobs else [f"simplan search {search}"]  # every plan would simulate the other jobs: minutes
    if changes is None:
        whole_run = [f"simplan goodput {this}"] if scenario.whole_run is not None and scenario.budget.has_length else []
        return [f"simplan explain {this}", *searched, *whole_run, *steps]
    changed = [f"simplan predict {same_batch.with_overrides(changes[0].changes).argument()}"] if changes else []
    return [*changed, *searched, f"simplan explain {this}", *steps]


def name_of(request: ScenarioRequest, scenario: Scenario, *, several: bool) -> str:
    """Name of a scenario, or of its file if there are several: those of saved plans have one name."""
    return request.source.stem if several and request.is_file else scenario.name


def calibration_for(scenario: Scenario, file: Path | None) -> Calibration | None:
    """Calibration of a prediction, None for the catalog; a note says if layers were not timed."""
    calibration = chosen(scenario, file)
    if calibration is not None and not covers(calibration, scenario):
        this = as_argument(scenario.file) if scenario.file and Path(scenario.file).exists() else "FILE"
        say(f"note: not every layer here was timed itself; `simplan calibrate {this}` times them")
    return calibration


_OPTIONS = {"num_tokens": "--tokens", "price_per_device_hour": "--price"}


def chosen_budget(options: Mapping[str, float | None], model: ModelSpec, *, has_length: bool) -> dict[str, float]:
    """Fields of ``TrainingBudget`` that options give.

    Args:
        options: Fields of ``TrainingBudget``; None for options that are not given.
        model: Model of the scenario.
        has_length: True if the length of the training is known without ``--tokens``.

    Raises:
        SpecError: An option is out of range or has no effect; the error names the option.
    """
    fields = {name: value for name, value in options.items() if value is not None}
    try:
        check_budget(parse_model(TrainingBudget, fields), model)
    except SpecError as error:
        raise SpecError([replace(p, field=_OPTIONS[p.field.rpartition(".")[2]]) for p in error.problems]) from None
    price = fields.get("price_per_device_hour")
    if price is not None and "num_tokens" not in fields and not has_length:
        rule = "is the price of a training whose number of tokens is missing"
        raise SpecError(Problem(field="--price", value=f"{price:g}", rule=rule, fix="give --tokens too, e.g. 1e12"))
    return fields
