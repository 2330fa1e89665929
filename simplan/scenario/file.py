"""A scenario: one model, cluster, training, software and plan, and expectations of the prediction.

::

    name: llama3-8b-8xh100
    model: {preset: llama3-8b, seq_len: 8192}    # or hf_config: config.json, or inline: family and its keys
    cluster: {preset: dgx-h100, num_nodes: 1}    # or num_devices; or inline, see simplan.scenario.clusters
    training: {global_batch_size: 16, precision: bf16}
    software: torch
    plan: {dp_replicate: 8, microbatch_size: 2}  # or search: {objective: step_time}, see simplan.scenario.search
    run: {num_tokens: 1.0e12}                    # and the other sections of a whole run: simplan.goodput.sections
    expect:
      - {metric: fits, value: true, why: it ran}
    measured: {source: "a log", step_time_s: 1.3}  # for simplan accuracy, see simplan.accuracy.measured

One error reports all problems of a file, with their lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from simplan import catalog
from simplan.accuracy.measured import Measured
from simplan.base import Line, Spec
from simplan.cluster.hardware import ClusterSpec
from simplan.cost.calibration.format import Calibration
from simplan.document import Document
from simplan.errors import Problem, SpecError
from simplan.goodput.sections import RunSections
from simplan.io import as_argument, folder_of, read_yaml
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.hostfile import is_host_file, read_host_file
from simplan.plan.placement import NETWORK, is_placement_file, read_rank_file
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import is_table_file
from simplan.predict import Simulated, predict_step
from simplan.prediction import Prediction
from simplan.rules import check_job
from simplan.scenario.clusters import read_cluster
from simplan.scenario.collecting import Sections
from simplan.scenario.expectation import Expectation
from simplan.scenario.names import with_catalog_names
from simplan.scenario.sections import read_expectations, read_model, read_software, with_software_defaults
from simplan.scenario.whole_run.reading import read_budget, read_run
from simplan.scenario.whole_run.rules import check_run
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingBudget, TrainingSection, TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One request to simplan, fully resolved and valid: the constructor checks the plan.

    Attributes:
        file: File of the scenario; None when the scenario was made in code.
        budget: Length and price of the full training.
        assumptions: Sentences about values that were not given.
        plan_is_assumed: True if nothing of the plan, or no degree of data parallelism, was given, and all other degrees
            are 1.
        batch_is_assumed: True if the global batch size was not given.
        whole_run: Sections of a whole run; None if there are none.

    Raises:
        SpecError: The job violates rules; the error lists all violations.
    """

    name: str
    job: Job
    expect: tuple[Expectation, ...] = ()
    file: str | None = None
    budget: TrainingBudget = field(default_factory=TrainingBudget)
    assumptions: tuple[str, ...] = ()
    plan_is_assumed: bool = False
    batch_is_assumed: bool = False
    whole_run: RunSections | None = None

    def __repr__(self) -> str:
        """Name and job, in one line."""
        return f"Scenario({self.name}: {self.job!r})"

    def __post_init__(self) -> None:
        check_job(self.job)
        check_budget(self.budget, self.job.model, self.whole_run)
        if self.whole_run is not None:
            check_run(self.whole_run, self.job)

    def predict(self, calibration: Calibration | None = None) -> Prediction:
        """Time and memory of one optimizer step.

        Args:
            calibration: Timings of this machine; needed when the cluster is this machine.

        Raises:
            SpecError: As ``simplan.predict.predict``, with the scenario's file.
        """
        return self.predict_step(calibration)[0]

    def predict_step(
        self, calibration: Calibration | None = None, progress: Callable[[int, int], None] | None = None
    ) -> tuple[Prediction, Simulated]:
        """Prediction together with the simulated step, for drawings.

        Args:
            calibration: See ``predict``.
            progress: Called with the number of ended and of all communications while links are simulated.

        Raises:
            SpecError: See ``predict``.
        """
        try:
            prediction, simulated = predict_step(self.job, name=self.name, calibration=calibration, progress=progress)
        except SpecError as error:
            raise error if error.file or self.file is None else error.in_file(self.file) from None
        assumptions = (*self.assumptions, *prediction.assumptions, *self._left_to_goodput())
        prediction = replace(prediction, assumptions=assumptions)
        return prediction.with_budget(self.budget), simulated

    def _left_to_goodput(self) -> Iterator[str]:
        """Sentence about sections that a step does not depend on."""
        sections = () if self.whole_run is None else self.whole_run.model_dump(exclude_none=True)
        names = [name for name in sections if name not in _LENGTH_AND_PRICE]
        if names:
            yield f"{', '.join(names)}: a step does not depend on them, `simplan goodput` does"


_LENGTH_AND_PRICE = ("run", "price")
"""Sections of a whole run that predictions have, too."""


def check_budget(budget: TrainingBudget, model: ModelSpec, whole_run: RunSections | None = None) -> None:
    """Rejects a number of tokens for a model without tokens.

    Raises:
        SpecError: The model has no tokens.
    """
    if budget.num_tokens is not None and model.sample != "sequence":
        rule = "is a number of tokens, and the model has no tokens"
        value = f"{budget.num_tokens:g}"
        field = "training.num_tokens" if whole_run is None or whole_run.run is None else "run.num_tokens"
        raise SpecError(Problem(field=field, value=value, rule=rule, fix="leave it out, or give run.num_samples"))


class _File(Spec):
    """The top level of a scenario file; the sections are read one by one."""

    name: Annotated[Line, Field(min_length=1, max_length=200)] = "scenario"
    model: Any
    cluster: Any
    training: Any
    software: Any = "torch"
    plan: Any = None
    search: Any = None
    expect: Any = ()
    measured: Any = None
    run: Any = None
    reliability: Any = None
    checkpoint: Any = None
    recovery: Any = None
    spot: Any = None
    evaluation: Any = None
    price: Any = None
    power: Any = None


def load_scenario(path: str | Path) -> Scenario:
    """Reads and checks a scenario file.

    Raises:
        SpecError: The file cannot be read or is wrong; lists all problems, each with its line. When all of them
            are options that are not modeled yet, the error is a ``NotModelledError``.
    """
    return scenario_of_document(read_yaml(path), path)


def scenario_of_document(document: Document, path: str | Path) -> Scenario:
    """Scenario of a document that was read already.

    Raises:
        SpecError: See ``load_scenario``.
    """
    file = folder_of(path) / Path(path).name
    return scenario_of(parts_of(document, str(path)), file.resolve().parent)


def scenario_of(parts: ScenarioParts, folder: Path | None) -> Scenario:
    """Scenario of the sections of a document.

    Args:
        folder: Folder of the files that the document names; None for a document that names none.

    Raises:
        SpecError: See ``load_scenario``.
    """
    sections, data = parts.sections, parts.data
    expect = read_expectations(sections, data.get("expect", ()))
    of_run = next((expectation.metric for expectation in expect if expectation.is_of_run), None)
    if of_run is not None and not parts.budget.has_length:
        rule = f"has {of_run} of a whole run, which has no length"
        sections.refuse(("expect",), rule, fix="add run: {num_steps: 100000}, or num_tokens or num_samples")
    job = job_of(parts, folder)
    try:
        return Scenario(
            name=parts.name,
            job=job,
            expect=expect,
            file=sections.file,
            budget=parts.budget,
            assumptions=parts.sentences,
            whole_run=parts.whole_run,
        )
    except SpecError as error:
        raise sections.in_file(error) from None


def job_of(parts: ScenarioParts, folder: Path | None) -> Job:
    """Job of the sections of a document, not checked by the rules between sections.

    Args:
        folder: See ``scenario_of``.

    Raises:
        SpecError: A section is wrong or missing; lists all problems.
    """
    plan = _read_plan(parts, folder)
    parts.sections.raise_problems()
    assert plan is not None, "the missing section plan has raised an error"
    return parts.job(plan)


@dataclass(frozen=True, slots=True)
class ScenarioParts:
    """Sections that scenarios of plans and of searches share; an invalid section is None, its problems recorded.

    Attributes:
        data: The document, with the names of the catalog.
        measured: Figures of a run of the scenario; None if there are none.
        sentences: Sentences about names that the document spells in another way.
    """

    name: str
    data: dict[str, Any]
    sections: Sections
    model: ModelSpec | None
    cluster: ClusterSpec | None
    training: TrainingSpec | None
    software: SoftwareSpec | None
    budget: TrainingBudget
    whole_run: RunSections | None = None
    measured: Measured | None = None
    sentences: tuple[str, ...] = ()

    def job(self, plan: ParallelPlan) -> Job:
        """Job with a plan, once no problem is left."""
        assert self.model is not None
        assert self.cluster is not None
        assert self.training is not None
        assert self.software is not None
        return Job(self.model, self.cluster, self.training, plan, self.software)


def parts_of(document: Document, file: str) -> ScenarioParts:
    """Sections of a document that was read already, except the plan, the search and the expectations.

    Args:
        file: Name of the document in errors; files that it names are relative to its folder.

    Raises:
        SpecError: The document is not a mapping, or a list of runs; or the name of its cluster contradicts another key.
    """
    data, sentences = with_catalog_names(document.data)
    if isinstance(data, dict) and "runs" in data:
        rule, fix = "is a list of runs that were measured", f"run `simplan accuracy {as_argument(file)}`"
        raise SpecError(Problem(field="runs", rule=rule, fix=fix).at(*document.place(("runs",))), file=file)
    sections = Sections(document, file)
    sections.read(_File, data, ())  # unknown keys and missing sections
    if not isinstance(data, dict):
        sections.raise_problems()
    is_measured = data.get("measured") is not None
    measured = sections.read(Measured, data["measured"], ("measured",)) if is_measured else None
    software = read_software(sections, data.get("software", "torch"), is_measured=is_measured)
    mtp = software is not None and software.mtp
    model = read_model(sections, data["model"], mtp=mtp) if "model" in data else None
    cluster = read_cluster(sections, data["cluster"]) if "cluster" in data else None
    section = sections.read(TrainingSection, data["training"], ("training",)) if "training" in data else None
    training = None if section is None else section.step
    if model is not None and software is not None and not is_measured:
        _refuse_idle_options(sections, data, model, software)
    whole_run = read_run(sections, data)
    price = None if cluster is None else data["cluster"].get("price_per_device_hour")
    budget = read_budget(sections, whole_run, model, section, price)
    if cluster is not None:
        price = price_of(cluster, budget.price_per_device_hour)
        budget = budget.model_copy(update={"price_per_device_hour": price})
    name = data.get("name", Path(file).stem)
    return ScenarioParts(
        name, data, sections, model, cluster, training, software, budget, whole_run, measured, sentences
    )


def price_of(cluster: ClusterSpec, price: float | None) -> float | None:
    """Price of a device and hour, the mean of all devices; None if that of any device is unknown.

    Args:
        price: Price of devices of which no other is given (``cluster.price_per_device_hour``).
    """
    if not cluster.is_mixed:
        return price
    prices = [(group.num_nodes, group.price_per_device_hour or price) for group in cluster.node_groups]
    total = sum(number * (device_price or 0.0) for number, device_price in prices)
    return None if any(device_price is None for _, device_price in prices) else total / cluster.num_nodes


def _read_plan(parts: ScenarioParts, folder: Path | None) -> ParallelPlan | None:
    """Plan of the file; action table and ranks are files next to the scenario."""
    sections, data = parts.sections, parts.data
    if "search" in data:
        rule = "cannot go with plan" if "plan" in data else "asks for the best plan, and there is none to use yet"
        fix = "keep one of the two" if "plan" in data else "run `simplan search FILE --save-plan PLAN.yaml`"
        sections.refuse(("search",), rule, fix=fix)
    elif "plan" not in data:
        sections.refuse(("plan",), "is missing", fix="add plan: {dp_replicate: <number of devices>}")
    before = sections.num_problems
    plan_keys = _with_devices(parts, folder)
    is_read = "plan" in data and sections.num_problems == before
    if parts.software is not None:
        plan_keys = with_software_defaults(plan_keys, parts.software)
    plan = sections.read(ParallelPlan, plan_keys, ("plan",)) if is_read else None
    if plan is None or folder is None or not is_table_file(plan.schedule):
        return plan
    return plan.model_copy(update={"schedule": os.path.normpath(folder / plan.schedule)})


def _with_devices(parts: ScenarioParts, folder: Path | None) -> Any:
    """Section plan, with the devices of its ranks in place of a name; None after a problem of that name."""
    plan_keys = parts.data.get("plan")
    if not isinstance(plan_keys, dict) or "placement" not in plan_keys:
        return plan_keys
    placement = named_placement(parts, folder, ("plan", "placement"), plan_keys["placement"])
    return None if placement is None and plan_keys["placement"] is not None else {**plan_keys, "placement": placement}


def named_placement(parts: ScenarioParts, folder: Path | None, path: tuple[str | int, ...], placement: Any) -> Any:
    """Devices of the ranks for the name of a file or of the order of the network; any other placement as it is.

    Args:
        folder: Folder of files; None if none may be read.
        path: Keys of the placement in the document.

    Returns:
        The placement; None after recording a problem.
    """
    cluster = parts.cluster
    if cluster is None or not isinstance(placement, str):
        return placement

    def read(name: str) -> list[int]:
        if name.strip() == NETWORK:
            return list(_devices_by_network(cluster))
        assert folder is not None
        if is_host_file(name):
            return list(read_host_file(folder / name.strip(), cluster.devices_per_node, cluster.num_devices))
        return list(read_rank_file(folder / name.strip(), cluster.devices_per_node))

    is_file = folder is not None and is_placement_file(placement)
    return parts.sections.look_up(path, read, placement) if is_file or placement.strip() == NETWORK else placement


def _devices_by_network(cluster: ClusterSpec) -> tuple[int, ...]:
    if cluster.topology is None:
        rule = "orders nodes by their switches, and the cluster has no topology"
        raise SpecError(Problem(field="plan.placement", value=NETWORK, rule=rule, fix="describe cluster.topology"))
    from simplan.network.order import devices_by_network

    return devices_by_network(cluster)


_NAMED_FILES = (
    ("model", "hf_config"),
    ("model", "file"),
    ("model", "document_lengths", "file"),
    ("plan", "schedule"),
    ("plan", "placement"),
    ("search", "placement"),
    ("spot", "trace"),
)
_LISTS = (("search", "placement"),)
"""Keys with a list of values, of which each may be a file."""
_IS_FILE = {"schedule": is_table_file, "placement": is_placement_file}
"""Keys that may have a name of something else, and a check for files."""


def named_files(data: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Keys of a document that name files, or places in lists, each with its value."""
    for path in _NAMED_FILES:
        value = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        is_file = _IS_FILE.get(path[-1])
        listed = enumerate(value) if path in _LISTS and isinstance(value, list) else ()
        yield from (((*path, number), entry) for number, entry in listed if is_file is None or is_file(entry))
        if value is not None and (is_file is None or (isinstance(value, str) and is_file(value))):
            yield path, value


def relocated(data: dict[str, Any], folder: Path, new_folder: Path) -> dict[str, Any]:
    """The document for a file in another folder: relative paths in it name the same files.

    Args:
        folder: Folder to which relative paths of ``data`` are relative.
    """
    changed = dict(data)
    for (section, *keys, last), name in named_files(data):
        changed[str(section)] = at = dict(changed[str(section)])
        for key in keys:
            at[key] = at = copy(at[key])
        at[last] = os.path.relpath(folder / name, new_folder)
    return changed


_OF_EXPERTS = ("expert_dispatch", "expert_overlap", "fused_experts")


def _refuse_idle_options(sections: Sections, data: dict[str, Any], model: ModelSpec, software: SoftwareSpec) -> None:
    """Records a problem for each option of the file that has no effect."""
    profile = catalog.software(software.id)
    for option in _OF_EXPERTS:
        value = getattr(software, option)
        if not model.num_experts and value != getattr(profile, option):
            rule = f"is for models with experts, and family {model.family} has none"
            sections.refuse(("software", option), rule, value=value, fix="remove it")
    if software.fp8_activation_input and not any(o.gates for layer in model.layers for o in layer.operators):
        rule = f"is for models with gated MLPs, and {model.name} has none"
        sections.refuse(("software", "fp8_activation_input"), rule, value=True, fix="remove it")
    written, width = data.get("model"), model.moe_intermediate_size
    if not isinstance(written, dict) or "intermediate_size" not in written:
        return
    if model.num_experts and not model.num_dense_layers and model.intermediate_size != width:
        rule = f"is the width of leading dense layers, and num_dense_layers = 0; experts have {width:,}"
        fix = "use moe_intermediate_size for experts, or remove it"
        sections.refuse(("model", "intermediate_size"), rule, value=model.intermediate_size, fix=fix)
