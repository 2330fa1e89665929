"""``simplan search``: the best plan of a scenario, or the largest model, batch or sequence that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np

from simplan.cli.calibrations import read, refuse_unneeded
from simplan.cli.predict import chosen_budget
from simplan.cli.terminal.output import emphasize, print_result, say, write_result
from simplan.cli.terminal.progress import ProgressLine
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.cluster.machine import THIS_MACHINE
from simplan.cost.calibration.format import Calibration
from simplan.errors import NoFeasiblePlanError, Problem, SpecError, did_you_mean
from simplan.explain import difference, explain
from simplan.interop.formats import changed_settings
from simplan.io import read_yaml, write_text
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.problems import parse_model
from simplan.report.search import assumed_text, search_plan_words, search_text, search_verdict
from simplan.report.text import verdict
from simplan.scenario import Scenario, SearchScenario, load_scenario, load_search, plan_document
from simplan.scenario.writing import scenario_text
from simplan.search import Largest, RankedPlan, SearchProgress, SearchResult, SearchSpace, largest, search
from simplan.search.enumeration import Enumeration
from simplan.search.largest import QUANTITIES, Quantity
from simplan.search.space import check_without_plan, searched_options, with_options
from simplan.search.switch import PlanSwitch, changed_keys
from simplan.units import format_percent, format_time

_INTERRUPTED = 130
_BUDGET_KEYS = {"num_tokens": "token_budget", "price_per_device_hour": "dollars_per_device_hour"}
_MANY = 5_000
"""Number of plans above which a search with slow evaluation prints a warning."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search from flags; None keeps the scenario's value.

    Attributes:
        top: Number of plans to rank.
        max_memory_fraction: Fraction of the device memory that plans may use.
        objectives: Names of one or two objectives.
        jobs: Number of processes; -1 for one per core.
        save_plan: File for the scenario with a ranked plan.
        rank: Rank of the plan to save; None for the best.
        largest: Quantity to maximize instead of searching for the best plan.
        budget: Fields of ``TrainingBudget``: length and price of the full training.
    """

    top: int | None = None
    max_memory_fraction: float | None = None
    objectives: tuple[str, ...] = ()
    jobs: int = -1
    save_plan: Path | None = None
    rank: int | None = None
    largest: str | None = None
    from_current: bool = False
    budget: Mapping[str, float | None] = field(default_factory=dict)

    def quantity(self, scenario: SearchScenario) -> Quantity:
        """Quantity to maximize.

        Raises:
            SpecError: It is none, or the scenario does not say the batch that bounds it.
        """
        name = self.largest
        if name not in QUANTITIES:
            fix = did_you_mean(str(name), QUANTITIES)
            raise SpecError(Problem(field="--largest", value=name, rule="is not a quantity to make large", fix=fix))
        if name == "microbatch_size" and scenario.batch_is_assumed:
            batch = scenario.job.training.global_batch_size
            rule = f"is at most the batch of a device, and the batch of {batch:,} was assumed"
            raise SpecError(Problem(field="--largest", value=name, rule=rule, fix="give --global-batch-size"))
        return cast(Quantity, name)


def search_command(
    request: ScenarioRequest,
    *,
    as_json: bool,
    output: Path | None,
    options: SearchOptions,
    calibration_file: Path | None,
) -> int:
    """``simplan search``."""
    scenario = request.search(from_current=options.from_current)
    command = f"simplan search {request.argument()}" + " --from-current" * options.from_current
    space = search_space(scenario, options)
    current_space = None if scenario.current_space is None else search_space(scenario, options, scenario.current_space)
    scenario = replace(scenario, space=space, current_space=current_space)
    _check_rank(options, space)
    refuse_unneeded(scenario, calibration_file)
    calibration = read(calibration_file) if scenario.job.cluster.cores_per_node is not None else None
    if options.largest is not None:
        return _largest(scenario, command, space, calibration, options, as_json=as_json, output=output)
    if note := slow_search(scenario.job, space):
        say(note)
    with SearchProgressLine() as watch:
        result = search(
            scenario.job,
            space,
            name=scenario.name,
            calibration=calibration,
            jobs=options.jobs,
            on_progress=watch.show,
        )
    result = replace(result, assumptions=scenario.assumptions)
    compares = options.from_current and not result.interrupted  # who stopped a search does not wait for another one
    switch = _switch(scenario, result, calibration, options.jobs) if compares else None
    if compares and result.best is None and scenario.current is not None:
        say(f"the current plan {verdict(predict(scenario.current.job, calibration=calibration))}")
    document = result.to_json() | ({} if switch is None else {"switch": switch.to_json()})
    if write_result(document, as_json=as_json, output=output):
        reason = "" if switch is None or not switch.changes else _reason(switch, calibration)
        text = search_text(result, _next(scenario, request, command, result, options), switch, reason)
        line = search_verdict(result)
        print_result(text.replace(line, emphasize(line, result.best is not None), 1))
    if result.best is not None and options.save_plan is not None:
        _save_ranked(scenario, command, result, options.save_plan, options.rank)
    if result.interrupted:
        return _INTERRUPTED
    return NoFeasiblePlanError.exit_code if result.best is None else 0


def _switch(
    scenario: SearchScenario, result: SearchResult, calibration: Calibration | None, jobs: int
) -> PlanSwitch | None:
    """Comparison of the current plan with the best one; None if no plan fits."""
    if scenario.current is None or result.best is None:
        return None
    before, words = scenario.current.job, "the current plan"
    after = _with(before, result.best)
    if scenario.current_space is not None:
        space = scenario.current_space
        best = search(scenario.job, space, name=scenario.name, calibration=calibration, jobs=jobs).best
        words = "the best plan with these options" if best else f"the plan with these options ({_none_fits(space)})"
        before = _with(before, best) if best else before
    if scenario.configuration is not None:
        changes = changed_settings(scenario.configuration, before, after)
    else:
        changes = changed_keys(before, after)
    current, best_one = (predict(job, calibration=calibration) for job in (before, after))
    return PlanSwitch(current, best_one, changes, words)


def _none_fits(space: SearchSpace) -> str:
    """Why no plan with the given options was found, with the headroom that the search keeps free."""
    kept = space.max_memory_fraction
    return "none with them fits" + (f" in {100 * kept:.3g} % of the device memory" if kept < 1 else "")


def _with(job: Job, ranked: RankedPlan) -> Job:
    return with_options(job.with_plan(ranked.plan), tuple(ranked.software.items()))


def _reason(switch: PlanSwitch, calibration: Calibration | None) -> str:
    """Sentence on the main reason why the best plan is faster than the current one."""
    before, after = (explain(plan, calibration=calibration) for plan in (switch.current, switch.best))
    return " ".join(difference(before, after).reasons("the current plan", "the best plan"))


def slow_search(job: Job, space: SearchSpace) -> str:
    """Warning before a long search, else empty: on shared CPU cores, every plan's full step is simulated.

    Raises:
        SpecError: The job violates a rule under any plan.
    """
    check_without_plan(job, space)
    total = Enumeration(space, job).total * len(searched_options(space))
    if total < _MANY or job.cluster.cores_per_node is None:
        return ""
    return (
        f"{total:,} plans are simulated one by one, all of a step: this may take tens of minutes. "
        "Narrow the ranges of search (pp, schedule, virtual_stages, microbatch_size); Ctrl-C shows the best so far"
    )


def _largest(
    scenario: SearchScenario,
    command: str,
    space: SearchSpace,
    calibration: Calibration | None,
    options: SearchOptions,
    *,
    as_json: bool,
    output: Path | None,
) -> int:
    quantity = options.quantity(scenario)
    with SearchProgressLine() as watch:
        result = largest(
            scenario.job,
            space,
            quantity,
            lambda value: watch.update(0, 0, f"trying {value:,}"),
            calibration=calibration,
            jobs=options.jobs,
        )
    if options.save_plan is not None:
        what = f"A plan that fits with {quantity} = {result.value:,}, the largest that "
        what += f"`{command} --largest {quantity}` found; there may be faster ones"
        _save(scenario, result, options.save_plan, what, result.model_fields)
    if not write_result(result.to_json(), as_json=as_json, output=output):
        return 0
    where = "of all sizes" if result.exact else "of the values tried"
    print_result(
        f"{scenario.name}: {quantity} = {result.value:,} is the largest {where} for which a plan fits\n"
        f"  plan         {search_plan_words(result.plan, result.software)}\n"
        f"  fits         {listed(result.fitting)}\n"
        f"  does not     {listed(result.failing)}\n"
        f"  memory       plans may use {format_percent(space.max_memory_fraction)} of the device memory"
        " (--max-memory-fraction)"
        + (f"\n\n{assumed_text(scenario.assumptions)}" if scenario.assumptions else "")
        + (f"\n\nNext\n  simplan predict {options.save_plan}" if options.save_plan else "")
    )
    return 0


def listed(values: tuple[int, ...]) -> str:
    """Numbers as words."""
    return ", ".join(f"{value:,}" for value in values) or "none"


def search_space(scenario: SearchScenario, options: SearchOptions, limits: SearchSpace | None = None) -> SearchSpace:
    """Search space, by default that of the scenario, with the changes of the flags."""
    space = limits or scenario.space
    update: dict[str, Any] = {}
    if options.top is not None:
        update["top"] = options.top
    if options.max_memory_fraction is not None:
        update["max_memory_fraction"] = options.max_memory_fraction
    if len(options.objectives) == 1:
        update |= {"objective": options.objectives[0], "objectives": None}
    elif options.objectives:
        update |= {"objective": options.objectives[0], "objectives": list(options.objectives)}
    budget = chosen_budget(options.budget, scenario.job.model, has_length=space.token_budget is not None)
    update |= {_BUDGET_KEYS[name]: value for name, value in budget.items()}
    if not update:
        return space
    before = space.model_dump(mode="json", exclude_unset=True)
    merged = {key: value for key, value in {**before, **update}.items() if value is not None}
    return parse_model(SearchSpace, merged, prefix=("search",))


def _check_rank(options: SearchOptions, space: SearchSpace) -> None:
    """Reject a rank of which no plan can be saved.

    Raises:
        SpecError: The rank has no effect, or is more than the search ranks.
    """
    rank = options.rank
    if rank is None:
        return
    if options.save_plan is None:
        rule, fix = "chooses the plan to save, and --save-plan is not given", "give --save-plan FILE too"
    elif options.largest is not None:
        rule, fix = "cannot go with --largest, which finds one plan", "leave it out"
    elif rank > space.top:
        rule, fix = f"is more than the {space.top} plans to rank", f"give --top {rank} too"
    else:
        return
    raise SpecError(Problem(field="--rank", value=str(rank), rule=rule, fix=fix))


def _save_ranked(scenario: SearchScenario, command: str, result: SearchResult, file: Path, number: int | None) -> None:
    """Write a scenario with a plan of the ranking, the best being rank 1; a given rank is part of its name.

    Raises:
        SpecError: The search found fewer plans.
    """
    rank = number or 1
    if rank > len(result.ranked):
        rule = f"is more than the {len(result.ranked)} ranked plans: no others fit"
        raise SpecError(Problem(field="--rank", value=str(rank), rule=rule, fix=f"use 1 to {len(result.ranked)}"))
    until = " until it was stopped: there may be better ones" if result.interrupted else ""
    what = f"The best plan that `{command}` found" if rank == 1 else f"Plan {rank} of the ranking of `{command}`"
    name = scenario.name if number is None else f"{scenario.name}-{rank}"
    _save(scenario, result.ranked[rank - 1], file, what + until, name=name)


def _save(
    scenario: SearchScenario,
    saved: RankedPlan | Largest,
    file: Path,
    what: str,
    model: Mapping[str, int] | None = None,
    name: str | None = None,
) -> None:
    document = plan_document(scenario, saved.plan, file.resolve().parent, saved.software)
    if name is not None:
        document["name"] = name
    if model:
        document["model"] = {**document["model"], **model}
    write_text(file, scenario_text(document, f"{what}."))
    say(f"wrote {file}")


def _next(
    scenario: SearchScenario, request: ScenarioRequest, command: str, result: SearchResult, options: SearchOptions
) -> list[str]:
    if result.best is None:
        return []
    why_not = [] if options.from_current else _why_not(request, result)
    if options.save_plan is None:
        others = [f"{command} --save-plan plan-2.yaml --rank 2"] if len(result.ranked) > 1 else []
        return [f"{command} --save-plan plan.yaml", *others, *why_not]
    here = scenario.job.cluster.id == THIS_MACHINE
    return [
        *(f"simplan {command} {options.save_plan}" for command in ("predict", *(["run"] if here else []))),
        *why_not,
    ]


def _why_not(request: ScenarioRequest, result: SearchResult) -> list[str]:
    """Command that compares a plan with the best one, with the degrees of another ranked plan; empty without any."""
    names = ("tp", "pp", "dp_replicate")
    degrees = [{f"plan.{name}": getattr(ranked.plan, name) for name in names} for ranked in result.ranked]
    other = next((number for number in degrees if number != degrees[0]), None)
    if other is None or any(key.startswith("plan.") for key in request.overrides):
        return []
    changes = {key: degree for key, degree in other.items() if degree > 1 or degree != degrees[0][key]}
    return [
        "why another plan is slower, here with the degrees of one of the ranking:",
        f"simplan search {request.with_overrides(changes).argument()} --from-current",
    ]


def scenarios_to_time(file: Path) -> list[Scenario]:
    """Scenarios to time for a file: the scenario, or for a search one plan per split of the layers.

    Raises:
        SpecError: The file is wrong.
    """
    data = read_yaml(file).data
    if not isinstance(data, dict) or "search" not in data or "plan" in data:
        return [load_scenario(file)]
    search = load_search(file)
    check_without_plan(search.job, search.space)
    enumeration = Enumeration(search.space, search.job)
    jobs = [with_options(search.job, options) for options in searched_options(search.space)]
    one_of: dict[object, ParallelPlan] = {}
    for table in enumeration.tables(Counter()):
        cut = [table[name] for name in ("tp", "sequence_parallel", "cp", "cp_comm", "ep", "microbatch_size")]
        groups = [table[name] > 1 for name in ("dp_replicate", "dp_shard", "pp")]  # which have other collectives
        keys = np.stack([*cut, table["zero_stage"], table.shards_parameters, *groups], axis=1)
        for row, key in enumerate(map(tuple, keys.tolist())):
            if key not in one_of:
                one_of[key] = table.plan(row)
    return [
        Scenario(name=search.name, job=job.with_plan(plan), file=search.file)
        for job, plan in product(jobs, one_of.values())
    ]


class SearchProgressLine(ProgressLine):
    """Progress: the current phase, its parts done, the best plan so far, and the time that the phase still takes."""

    def __init__(self) -> None:
        super().__init__("searching", quarters=False)

    def show(self, progress: SearchProgress) -> None:
        """Shows how far a search is."""
        phase = progress.phase
        words = [phase.name]
        if phase.done:
            words[0] += f": {phase.done:,}" + ("" if phase.of is None else f" of at most {phase.of:,}")
        if progress.best_step_time_s is not None:
            words.append(f"best {format_time(progress.best_step_time_s)}")
        if phase.left_s is not None:
            words.append(f"up to {phase.left_s:,.0f} s more")
        self.update(phase.done, phase.of or 0, ", ".join(words))
