"""``simplan search --hardware``: the best plan of one job on each of several kinds of devices, as one table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simplan.cli.search.command import SearchOptions, SearchProgressLine, listed, search_space
from simplan.cli.terminal.output import print_result, write_result
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import NoFeasiblePlanError, Problem, SpecError
from simplan.predict import predict
from simplan.report.predictions import compared_predictions, predictions_text
from simplan.report.search import search_plan_words
from simplan.report.table import format_table_text
from simplan.scenario import SearchScenario
from simplan.search import Largest, SearchResult, SearchSpace, largest, search
from simplan.search.space import with_options
from simplan.training import TrainingBudget
from simplan.units import format_bytes

_SAID = ("preset", "device", "num_nodes", "num_devices", "devices_per_node")
"""Keys of the cluster that a kind of hardware says."""
_PRICE = re.compile(r"\d+(?:\.\d+)?")
_MAX_KINDS = 64


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices to compare: ``2x RTX 4090 @ 0.35``.

    Attributes:
        name: Number and kind, as written.
        price_per_device_hour: Price in any currency; None for none.
    """

    name: str
    price_per_device_hour: float | None


def read_hardware(texts: Sequence[str]) -> list[Hardware]:
    """Kinds of hardware of an option that may be repeated, and that separates kinds by commas.

    >>> read_hardware(["1x RTX 4090 @ 0.35, L40S"])
    [Hardware(name='1x RTX 4090', price_per_device_hour=0.35), Hardware(name='L40S', price_per_device_hour=None)]

    Raises:
        SpecError: A price is no number, two kinds have one name, or there are none or too many.
    """
    kinds: list[Hardware] = []
    for text in (part.strip() for kinds_text in texts for part in kinds_text.split(",")):
        name, at, price = (part.strip() for part in text.partition("@"))
        if not name or (at and not _PRICE.fullmatch(price)):
            fix = "write e.g. --hardware '1x RTX 4090 @ 0.35, 2x L40S'"
            raise SpecError(Problem(field="--hardware", value=text, rule="is no KIND or KIND @ PRICE", fix=fix))
        if name in (kind.name for kind in kinds):
            raise SpecError(Problem(field="--hardware", value=name, rule="is given twice", fix="leave one out"))
        kinds.append(Hardware(name, float(price) if at else None))
    if len(kinds) > _MAX_KINDS:
        rule, fix = f"compares at most {_MAX_KINDS} kinds", "leave some out"
        raise SpecError(Problem(field="--hardware", value=f"{len(kinds)} kinds", rule=rule, fix=fix))
    return kinds


def compare_hardware(
    request: ScenarioRequest,
    texts: Sequence[str],
    *,
    as_json: bool,
    output: Path | None,
    options: SearchOptions,
    calibration_file: Path | None,
) -> int:
    """``simplan search --hardware``: a table of best plans, or of the largest value that fits.

    Raises:
        SpecError: An option has no effect on a comparison, or see ``simplan search``.
    """
    _check(request, options, calibration_file)
    kinds = read_hardware(texts)
    scenarios = [_scenario(request, kind, options) for kind in kinds]
    compare = _best_plans if options.largest is None else _largest
    with SearchProgressLine() as watch:
        document, text = compare(kinds, scenarios, options, watch)
    if write_result(document, as_json=as_json, output=output):
        print_result(text)
    return 0 if document["predictions" if options.largest is None else "largest"] else NoFeasiblePlanError.exit_code


def _check(request: ScenarioRequest, options: SearchOptions, calibration_file: Path | None) -> None:
    without_effect = {
        "--from-current": options.from_current,
        "--save-plan": options.save_plan is not None,
        "--rank": options.rank is not None,
        "--top": options.top is not None,
        "--calibration": calibration_file is not None,
    }
    problems = [
        Problem(field=name, rule="is of one search, and --hardware compares several", fix="leave it out")
        for name, is_given in without_effect.items()
        if is_given
    ]
    problems += [
        Problem(field=request.names[key], value=str(value), rule="is said by --hardware", fix="leave it out")
        for key, value in request.overrides.items()
        if key in {f"cluster.{name}" for name in _SAID}
    ]
    if problems:
        raise SpecError(problems)


def _scenario(
    request: ScenarioRequest, hardware: Hardware, options: SearchOptions
) -> tuple[SearchScenario, SearchSpace, TrainingBudget]:
    """Search of a kind of hardware, its space, and the length and price of the training.

    Raises:
        SpecError: See ``ScenarioRequest.search``; the hardware is unknown; or a price has no number of tokens.
    """
    key = "cluster.preset"  # a name may say the number of devices, as for --gpus
    overrides, names = {**request.overrides, key: hardware.name}, {**request.names, key: "--hardware"}
    scenario = replace(request, overrides=overrides, names=names, write=None).search()
    price = hardware.price_per_device_hour
    if price is not None:
        options = replace(options, budget={**options.budget, "price_per_device_hour": price})
    space = search_space(scenario, options)
    length = TrainingBudget(num_tokens=space.token_budget, price_per_device_hour=space.dollars_per_device_hour)
    return scenario, space, length


_Scenarios = Sequence[tuple[SearchScenario, SearchSpace, TrainingBudget]]


def _best_plans(
    kinds: Sequence[Hardware], scenarios: _Scenarios, options: SearchOptions, watch: SearchProgressLine
) -> tuple[dict[str, Any], str]:
    """Predictions of the best plans as one document, and as text."""
    predictions, plans, unfit = [], {}, []
    for kind, (scenario, space, length) in zip(kinds, scenarios, strict=True):
        watch.update(0, 0, kind.name)
        try:
            result = search(
                scenario.job, space, name=kind.name, jobs=options.jobs, on_progress=watch.show, explain=False
            )
        except SpecError as error:
            unfit.append({"name": kind.name, "why": str(error)})
            continue
        if (best := result.best) is None:
            unfit.append({"name": kind.name, "why": _why_unfit(scenario, space, result)})
            continue
        job = with_options(scenario.job.with_num_devices(best.num_devices), tuple(best.software.items()))
        prediction = predict(job.with_plan(best.plan), name=kind.name).with_budget(length)
        predictions.append(prediction.to_json())
        plans[kind.name] = search_plan_words(best.plan, best.software)
    document: dict[str, Any] = compared_predictions(predictions) if predictions else {"predictions": []}
    document |= {"kind": "predictions", "unfit": unfit}
    rows = [[predicted["name"], plans[predicted["name"]]] for predicted in document["predictions"]]
    parts = [predictions_text(document), format_table_text(["hardware", "best plan"], rows, indent=0)] if rows else []
    return document, "\n\n".join([*parts, *_unfit_lines(unfit)])


def _why_unfit(scenario: SearchScenario, space: SearchSpace, result: SearchResult) -> str:
    """Memory that the nearest miss needs, and what plans may use."""
    capacity = scenario.job.cluster.largest_memory_bytes
    if capacity is None or not result.nearest_misses:
        return "no plan is feasible"
    needed = format_bytes(result.nearest_misses[0].device_bytes)
    usable = format_bytes(capacity * space.max_memory_fraction)
    return f"no plan fits; the nearest one needs {needed} of the {usable} that plans may use"


def _unfit_lines(unfit: Sequence[Mapping[str, str]]) -> list[str]:
    """Hardware without a plan, as one paragraph; none if there is no such hardware."""
    return ["\n".join(f"{kind['name']}: {kind['why']}" for kind in unfit)] if unfit else []


def _largest(
    kinds: Sequence[Hardware], scenarios: _Scenarios, options: SearchOptions, watch: SearchProgressLine
) -> tuple[dict[str, Any], str]:
    """Largest values of a quantity as one document, and as text, the largest first."""
    fitting: list[tuple[str, Largest]] = []
    unfit: list[dict[str, str]] = []
    for kind, (scenario, space, _) in zip(kinds, scenarios, strict=True):
        watch.update(0, 0, kind.name)
        try:
            fitting.append((kind.name, largest(scenario.job, space, options.quantity(scenario), jobs=options.jobs)))
        except (NoFeasiblePlanError, SpecError) as error:
            unfit.append({"name": kind.name, "why": str(error)})
    fitting.sort(key=lambda pair: -pair[1].value)
    document = {
        "schema_version": 1,
        "kind": "largest_by_hardware",
        "largest": [{"name": name, **result.to_json()} for name, result in fitting],
        "unfit": unfit,
    }
    rows = [
        [name, f"{result.value:,}", listed(result.failing[:1]), search_plan_words(result.plan, result.software)]
        for name, result in fitting
    ]
    table = format_table_text(["hardware", f"largest {options.largest}", "does not fit", "plan"], rows, indent=0)
    return document, "\n\n".join([*([table] if rows else []), *_unfit_lines(unfit)])
