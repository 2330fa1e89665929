"""A scenario that requests the best plan: ``search:`` instead of ``plan:``.

::

    name: gpt3-on-1024
    model: {preset: gpt3-175b, vocab_size: 51200, tied_embeddings: false}
    cluster: {preset: dgx-a100-80gb, num_devices: 1024}
    training: {global_batch_size: 1536}
    search: {objective: step_time, tp: [4, 8], recompute: [none, full]}    # {} for all default ranges

"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from simplan.cost.calibration.format import Calibration
from simplan.errors import SpecError
from simplan.interop.configuration import Configuration
from simplan.io import folder_of, read_yaml
from simplan.job import Job
from simplan.plan.placement import NETWORK, is_placement_file
from simplan.plan.plan import ParallelPlan
from simplan.scenario.file import Scenario, ScenarioParts, check_budget, named_placement, parts_of, relocated

if TYPE_CHECKING:
    from simplan.search import SearchResult, SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchScenario:
    """One request to ``simplan search``.

    Attributes:
        job: Model, cluster, training and software, with a plan of defaults.
        space: Plans to choose from.
        document: Data of the file; with a plan, it makes a scenario.
        assumptions: Sentences about values that were not given.
        batch_is_assumed: True if the global batch size was not given.
        current: Scenario of the plan that the file or options have, if the search starts from it; else None.
        current_space: Plans with the options that ``current`` has, to start from the best one; None to start from it.
        configuration: Framework's file that the search comes from; None for scenarios and models.
    """

    name: str
    job: Job
    space: SearchSpace
    document: dict[str, Any]
    file: str
    assumptions: tuple[str, ...] = ()
    batch_is_assumed: bool = False
    current: Scenario | None = None
    current_space: SearchSpace | None = None
    configuration: Configuration | None = None

    def search(self, calibration: Calibration | None = None, *, jobs: int = 1) -> SearchResult:
        """The best plans of the space.

        Args:
            calibration: Timings of this machine; needed when the cluster is this machine.

        Raises:
            SpecError: See ``simplan.search.search``.
        """
        from simplan.search import search

        result = search(self.job, self.space, name=self.name, calibration=calibration, jobs=jobs)
        return replace(result, assumptions=self.assumptions)

    def starting_from(self, current: Scenario, space: SearchSpace | None = None) -> SearchScenario:
        """The search that starts from a plan; all plans have the algorithms of collectives that this plan prescribes.

        Args:
            current: Scenario of the plan.
            space: See ``current_space``.
        """
        search, collectives = replace(self, current=current, current_space=space), current.job.plan.collectives
        if collectives is None:
            return search
        job = self.job.with_plan(self.job.plan.model_copy(update={"collectives": collectives}))
        kept = f"all plans have plan.collectives: {collectives.words}"
        return replace(search, job=job, assumptions=(*self.assumptions, kept))


def load_search(path: str | Path) -> SearchScenario:
    """Reads a scenario file for a search.

    Raises:
        SpecError: The file cannot be read or is wrong; lists all problems, each with its line.
    """
    return search_of(parts_of(read_yaml(path), str(path)))


def search_of(parts: ScenarioParts) -> SearchScenario:
    """Search of the sections of a document.

    Raises:
        SpecError: See ``load_search``.
    """
    from simplan.search.space import SearchSpace, that_it_has

    sections, data = parts.sections, parts.data
    if "search" not in data:
        fix = "write search: {} in its place, which asks for all default ranges"
        sections.refuse(("plan",) if "plan" in data else ("search",), "leaves nothing to search", fix=fix)
    elif "plan" in data:
        sections.refuse(("search",), "cannot go with plan", fix="keep one of the two")
    for key, what in (("expect", "the prediction"), ("measured", "a run")):
        if data.get(key):
            fix = "add it to the scenario that --save-plan writes"
            sections.refuse((key,), f"is about {what} of one plan", fix=fix)
    search_keys = _with_devices(parts, _with_budget(data.get("search", {}), parts))
    space = sections.read(SearchSpace, search_keys, ("search",))
    sections.raise_problems()
    job = parts.job(ParallelPlan())
    assert space is not None
    try:
        check_budget(parts.budget, job.model, parts.whole_run)
        space = that_it_has(job.software, space)
    except SpecError as error:
        raise sections.in_file(error) from None
    said = parts.sentences
    return SearchScenario(name=parts.name, job=job, space=space, document=data, file=sections.file, assumptions=said)


def _with_budget(search: Any, parts: ScenarioParts) -> Any:
    """The section ``search`` with length and price of the training, where the section has none itself."""
    if not isinstance(search, dict):
        return search
    budget, tokens = parts.budget, parts.budget.num_tokens
    if parts.training is not None and parts.model is not None and parts.model.sample == "sequence" and tokens is None:
        batch, seq_len = parts.training.global_batch_size, parts.model.seq_len
        steps = budget.steps(batch, seq_len)
        tokens = None if steps is None else float(steps * batch * seq_len)
    known = {"token_budget": tokens, "dollars_per_device_hour": budget.price_per_device_hour}
    return {key: value for key, value in known.items() if value is not None} | search


def _with_devices(parts: ScenarioParts, search: Any) -> Any:
    """The section ``search`` with the devices of placements that are files, or the order of the network."""
    if not isinstance(search, dict) or search.get("placement") is None:
        return search
    folder, placements = folder_of(parts.sections.file), search["placement"]
    if isinstance(placements, str):
        named = named_placement(parts, folder, ("search", "placement"), placements)
    elif isinstance(placements, list):
        named = [
            named_placement(parts, folder, ("search", "placement", number), placement)
            if is_placement_file(placement) or placement == NETWORK
            else placement
            for number, placement in enumerate(placements)
        ]
    else:
        return search
    rest = {key: value for key, value in search.items() if key != "placement"}
    has_problem = named is None or (isinstance(named, list) and None in named)
    return rest if has_problem else rest | {"placement": named}


def plan_document(
    scenario: SearchScenario, plan: ParallelPlan, folder: Path, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The scenario with a plan instead of the search, complete for ``predict``, ``run`` and ``check``.

    Args:
        folder: Folder of the new file; paths in the file are relative to this folder.
        options: Searched options (``simplan.search.space.OPTION_KEYS``), as the plan has them.
    """
    document = {key: value for key, value in scenario.document.items() if key not in ("search", "name")}
    document = relocated(document, folder_of(scenario.file), folder)
    if plan.num_devices != scenario.job.cluster.num_devices:
        kept = {key: value for key, value in document["cluster"].items() if key != "num_nodes"}
        document["cluster"] = kept | {"num_devices": plan.num_devices}
    for section, key, value in (
        ("training", "num_tokens", scenario.space.token_budget),
        ("cluster", "price_per_device_hour", scenario.space.dollars_per_device_hour),
    ):
        if value is not None and section == "training" and "run" in document:
            document["run"] = {"num_tokens": value}
        elif value is not None and section == "cluster" and "price" in document:
            document["price"] = document["price"] | {"device_hour": value}
        elif value is not None:
            document[section] = document[section] | {key: value}
    return {"name": scenario.name, **with_searched(document, options), "plan": plan_section(plan)}


def with_searched(document: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario with other values of searched options outside of its plan."""
    from simplan.search.space import NOT_QUANTIZED, OPTION_KEYS, SOFTWARE_RANGES

    changed = with_software(document, {name: value for name, value in options.items() if name in SOFTWARE_RANGES})
    for name, value in options.items():
        section, _, key = OPTION_KEYS[name].partition(".")
        if section not in ("training", "model"):
            continue
        before = changed.get(section)
        fields = dict(before) if isinstance(before, Mapping) else {"preset": before}
        if name == "base_weights":
            weights = fields.pop(key, None)
            if value == NOT_QUANTIZED:
                changed[section] = fields
                continue
            weights = weights if isinstance(weights, Mapping) else {"format": weights}
            value = dict(weights) if weights.get("format") == value else value
        changed[section] = {**fields, key: value}
    return changed


def with_software(document: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario with other options of its software."""
    if not options:
        return dict(document)
    software_keys = document.get("software", "torch")
    section = software_keys if isinstance(software_keys, dict) else {"preset": software_keys}
    return {**document, "software": {**section, **options}}


def plan_section(plan: ParallelPlan) -> dict[str, Any]:
    """A plan as the section ``plan`` of a scenario file, without keys that have their default value."""
    shown = plan.model_dump(mode="json")
    assumed = ParallelPlan().model_dump(mode="json")
    matters = {  # keys whose defaults depend on others: worth writing where they have a meaning
        "zero_stage": plan.dp_shard * plan.cp > 1,
        "sequence_parallel": plan.tp > 1,
        "schedule": plan.pp > 1,
        "virtual_stages": plan.pp > 1,
    }
    written = {key: value for key, value in shown.items() if value != assumed[key] or matters.get(key)}
    return written or {"dp_replicate": 1}
