"""Scenarios from a file, a model of the catalog, a Hugging Face configuration or a mapping, with overrides of keys.

::

    scenario_from("fsdp.yaml", {"plan.tp": 2})                               # a file wins over a model of its name
    scenario_from("llama3-8b", {"cluster.num_devices": 64, "plan.tp": 8})    # what is missing is assumed, and listed
    scenario_from("llama/config.json", {"model.seq_len": 4096})              # or the folder of the file
    scenario_from({"model": {...}, "cluster": {...}, "training": {...}, "plan": {...}})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simplan import catalog
from simplan.base import MAX_COUNT, Spec
from simplan.cluster.hardware import ClusterSpec
from simplan.document import Document, parse_yaml
from simplan.document import Path as KeyPath
from simplan.documentation import documentation
from simplan.errors import Problem, SpecError
from simplan.goodput.sections import SECTIONS, RunLength
from simplan.interop.configuration import Configuration, Setting
from simplan.interop.formats import ConfigFile, formats, read_configuration
from simplan.interop.frameworks.shell import WITHOUT_FILE, unknown_script
from simplan.interop.huggingface import model_types
from simplan.interop.others import framework_that_is_not_read
from simplan.io import MAX_YAML_BYTES, folder_of, read_json, read_text
from simplan.job import Job, full_key
from simplan.model.captured.file import is_captured
from simplan.model.families.family import LORA
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.problems import render_value
from simplan.rules import RULES, Rule, violations
from simplan.rules.optimizers import optimizer_of_plan
from simplan.scenario.clusters import ClusterSection
from simplan.scenario.collecting import Sections
from simplan.scenario.file import Scenario, ScenarioParts, parts_of, relocated, scenario_of
from simplan.scenario.names import (
    LARGEST_NODE,
    looks_like_path,
    model_named,
    says_numbers,
    unknown_source,
    with_catalog_names,
)
from simplan.scenario.search import SearchScenario, search_of
from simplan.scenario.sections import read_software
from simplan.scenario.writing import scenario_text
from simplan.software.software import SoftwareSpec
from simplan.training import PAIRED_TASKS, TrainingSection
from simplan.units import counted

NUM_MICROBATCHES = "num_microbatches"
"""Override that is no key of a file: microbatches of a data-parallel rank, which set the global batch size."""
GLOBAL_BATCH_TOKENS = "global_batch_tokens"
"""Override that is no key of a file: tokens of a step, which the nearest possible global batch size has."""

_BATCH = "training.global_batch_size"
_DEFAULT_CLUSTER = "dgx-h100"
_USUAL_LENGTH = 4096
_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
_NOT_YAML = {".toml": "TOML file", ".json": "JSON file"}
"""Suffix of files that are no scenarios -> what they are."""
_SECTIONS = frozenset(
    ("name", "model", "cluster", "training", "software", "plan", "search", "expect", "measured", *SECTIONS)
)
_OF_PLAN = ("plan", "expect", "measured")
"""Sections that are of one plan."""
_IN_FOLDERS = ("training_args.json", "config.json")
"""Files that say what a folder holds: arguments of a training, next to which is its model, or a model."""
_MICROBATCHES_PER_STAGE = 4  # with 1F1B, a bubble of at most 1/5 of the step
_NETWORKS = (
    ("inter_link",),
    ("inter_link_gbit_per_device",),
    ("inter_link_gbit_per_node",),
    ("nics_per_node", "nic_gbit"),
)
_LENGTHS = tuple(RunLength.model_fields)
_SHORT_FAILURES = ("device_mtbf_h", "node_mtbf_h", "link_mtbf_h")
"""Failures by unit, which would count twice next to those of a preset or by cause."""
_INSTEAD: dict[str, tuple[str, ...]] = {
    "cluster.num_nodes": ("num_devices",),
    "cluster.num_devices": ("num_nodes",),
    **{
        f"cluster.{key}": tuple(other for others in _NETWORKS if key not in others for other in others)
        for keys in _NETWORKS
        for key in keys
    },
    **{f"run.{key}": tuple(other for other in _LENGTHS if other != key) for key in _LENGTHS},
    **{f"reliability.{key}": ("preset", "causes") for key in _SHORT_FAILURES},
    "reliability.preset": _SHORT_FAILURES,
    "checkpoint.interval_s": ("interval_steps",),
    "checkpoint.interval_steps": ("interval_s",),
}
"""Override -> keys of its section that it replaces; a key that is an override itself stays, to be refused."""
_SAME: dict[str, tuple[str, ...]] = {
    "training.num_tokens": ("run",),
    "price.device_hour": ("cluster.price_per_device_hour",),
    **dict.fromkeys(("run", *(f"run.{key}" for key in _LENGTHS)), ("training.num_tokens",)),
}
"""Override -> keys of other sections that say the same, which it replaces."""
_KEPT: dict[str, tuple[str, ...]] = {
    "model.preset": ("seq_len", *sorted(LORA)),
    "model.hf_config": ("seq_len", *sorted(LORA)),
    "model.file": ("seq_len", *sorted(LORA)),
    "cluster.preset": ("num_nodes", "num_devices", "price_per_device_hour"),
}
"""Override that replaces its section -> keys of the section that it keeps."""
_MODELS = ("model.preset", "model.hf_config", "model.file")
"""Overrides that name a model by which a framework's file is read."""
_NAMES_A_MODEL = {"preset", "hf_config", "file", "family"}
"""Keys of which a model has one; the settings of a model without one are those of the override's model."""
_NEAR, _TOO_FAR = 0.05, 0.25
"""Relative difference of a batch from the tokens asked for: what 1M may mean (2**20 is 4.9 % more), and the largest."""
_ORDER = ("name", "model", "cluster", "training", "software", "plan", "search", *SECTIONS)
_OF_NODES = {"cluster.num_devices", "cluster.num_nodes", "cluster.devices_per_node"}
"""Overrides that say other nodes than a framework's file."""
_NAMES_WITH_OPTIONS = ("software", "cluster.device")
"""Keys whose value is a name, or a mapping of ``preset`` and options."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that neither the scenario nor its overrides give.

    Attributes:
        key: Dotted key, e.g. ``plan.dp_shard``.
        why: Origin of the value; empty for a default.
    """

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else render_value(self.value)
        return f"{self.key} = {value}" + (f" ({self.why})" if self.why else "")


Assume = Callable[[str, str, Any, str], None]
"""Sets section, key and value of a missing key, with the origin of the value."""


@dataclass(frozen=True, slots=True)
class Source:
    """Complete document of a scenario or search, with overrides and assumed values.

    Attributes:
        file: Name in errors; files that the document names are relative to its folder.
        overrides: Override -> name in errors.
        replaced: Sentence about sections of the file that overrides replace, if there are any.
        spelled: Sentences about names that the source or an override spells in another way than the catalog.
        configuration: Framework's file that the document comes from; None for scenarios and models.
        current: The plan of that file, for a search; None for the rest.
    """

    document: Document
    file: str
    assumptions: tuple[Assumption, ...]
    overrides: Mapping[str, str]
    replaced: tuple[str, ...] = ()
    configuration: Configuration | None = None
    current: Source | None = None
    spelled: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader: names, what a framework's file says, what was replaced, and what was assumed."""
        listed = "; ".join(map(str, self.assumptions))
        read = self.configuration.notes(self.document.data) if self.configuration is not None else ()
        return (*self.spelled, *read, *self.replaced, *((f"not given, so assumed: {listed}",) if listed else ()))

    def parts(self) -> ScenarioParts:
        """Sections of the document, except plan and search.

        Raises:
            SpecError: See ``load_scenario``.
        """
        return parts_of(self.document, self.file)

    def scenario(self) -> Scenario:
        """Scenario of the document.

        Raises:
            SpecError: See ``load_scenario``; overrides have the names that were typed, and no line.
        """
        try:
            file = folder_of(self.file) / Path(self.file).name
            scenario = scenario_of(self.parts(), file.resolve().parent)
            if self.configuration is not None and not _OF_NODES & self.overrides.keys():
                check_ranks_per_node(self.configuration, scenario.job.cluster)
        except SpecError as error:
            raise self._as_typed(error) from None
        assumed = {assumption.key for assumption in self.assumptions}
        has_assumed_degree = bool(assumed & {"plan.dp_shard", "plan.dp_replicate"})
        is_all_assumed = {f"plan.{key}" for key in self.document.data.get("plan", {})} <= assumed
        plan = scenario.job.plan
        return replace(
            scenario,
            assumptions=self.notes,
            plan_is_assumed=(has_assumed_degree or is_all_assumed) and plan.num_devices == plan.dp,
            batch_is_assumed=self._has_assumed_batch,
        )

    def search(self) -> SearchScenario:
        """Search of the document.

        Raises:
            SpecError: See ``load_search``, and ``scenario``.
        """
        try:
            search = search_of(self.parts())
        except SpecError as error:
            raise self._as_typed(error) from None
        search = replace(
            search,
            assumptions=self.notes,
            batch_is_assumed=self._has_assumed_batch,
            configuration=self.configuration,
        )
        return search if self.current is None else search.starting_from(self.current.scenario())

    def text(self, folder: Path, header: str = "") -> str:
        """The document as a complete scenario file for a folder, with comments on assumed values.

        Args:
            header: Comment at the top.
        """
        document = relocated(self.document.data, folder_of(self.file), folder)
        notes = {
            tuple(assumption.key.split(".")): "assumed" + (f": {assumption.why}" if assumption.why else "")
            for assumption in self.assumptions
        }
        if self.configuration is not None:
            origins = self.configuration.origins.items()
            notes |= {tuple(key.split(".")): origin for key, origin in origins if key not in self.overrides}
            if (microbatches := notes.pop((NUM_MICROBATCHES,), "")) and _BATCH not in self.overrides:
                notes[("training", "global_batch_size")] = f"microbatches: {microbatches}"
        return scenario_text({"name": Path(self.file).stem} | document, header, notes)

    def located(self, error: SpecError) -> SpecError:
        """Copy of an error about the scenario that was found after reading it, with lines and names that were typed."""
        if error.file not in (None, self.file):
            return error
        return self._as_typed(Sections(self.document, self.file).in_file(error))

    @property
    def _has_assumed_batch(self) -> bool:
        is_assumed = any(assumption.key == _BATCH for assumption in self.assumptions)
        return is_assumed and GLOBAL_BATCH_TOKENS not in self.overrides

    def _as_typed(self, error: SpecError) -> SpecError:
        names = self.configuration.names if self.configuration is not None else {}

        def typed(problem: Problem) -> Problem:
            for key, name in self.overrides.items():
                if problem.field == key or problem.field.startswith(f"{key}."):
                    return replace(problem, field=name + problem.field[len(key) :], line=None, column=None)
            return replace(
                problem, field=names.get(problem.field, problem.field), column=None if names else problem.column
            )

        return type(error)([typed(problem) for problem in error.problems], file=error.file)


def scenario_from(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> Scenario:
    """Scenario of a file, a model or a mapping.

    Args:
        source: Scenario file; name of a model in the catalog; ``config.json`` of Hugging Face, or its folder; or
            sections of a scenario. A file wins over a model of the same name. For a model or configuration, values
            that are not given are assumed, and listed in ``Scenario.assumptions``.
        overrides: Dotted key -> value, e.g. ``{"plan.tp": 8, "software": "megatron-core"}``; and ``num_microbatches``
            or ``global_batch_tokens``.
        names: Override -> name in errors, such as the option of a command; the key itself by default.

    Raises:
        SpecError: There is no such file or model, or the scenario is wrong; lists all problems.
    """
    return read_source(source, overrides, names).scenario()


def make_job(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, **keys: Any) -> Job:
    """Job of a model's name, a file or a mapping.

    ::

        make_job("llama3-8b", cluster="dgx-h100", num_nodes=8, tp=8, global_batch_size=128)
        make_job("fsdp.yaml", {"plan.tp": 2})

    Args:
        source, overrides: As for ``scenario_from``.
        keys: Overrides without their section; ``cluster`` is the preset.

    Raises:
        SpecError: See ``scenario_from``; or no section has a key.
    """
    return scenario_with(source, {**(overrides or {}), **keys}).job


def scenario_with(source: Scenario | str | Path | Mapping[str, Any], keys: Mapping[str, Any]) -> Scenario:
    """Scenario with other values of keys, with or without their section.

    Args:
        source: As for ``scenario_from``; or a scenario, which takes no keys.

    Raises:
        SpecError: See ``scenario_from``; or no section has a key.
    """
    if isinstance(source, Scenario):
        if keys:
            rule, fix = "cannot change a scenario that was read", "give its file or document in place of the scenario"
            raise SpecError(Problem(field=next(iter(keys)), rule=rule, fix=fix))
        return source
    full = {_full_key(key): key for key in keys}
    return scenario_from(source, {name: keys[key] for name, key in full.items()}, full)


def _full_key(key: str) -> str:
    """Dotted key of a key with or without its section."""
    if key in ("software", NUM_MICROBATCHES, GLOBAL_BATCH_TOKENS):
        return key
    return "cluster.preset" if key == "cluster" else full_key(key, _KEYED)


_KEYED: dict[str, type[Spec]] = {
    "plan": ParallelPlan,
    "training": TrainingSection,
    "cluster": ClusterSection,
    "model": ModelSpec,
    "software": SoftwareSpec,
    **SECTIONS,
}


def read_source(
    source: str | Path | Mapping[str, Any] | ConfigFile,
    overrides: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    *,
    searches: bool = False,
    from_current: bool = False,
    framework: str | None = None,
) -> Source:
    """Document of a file, a model or a mapping; see ``scenario_from``.

    Args:
        from_current: True for a search that starts from the plan of the source.
        searches: True to complete the document of a model with ``search`` instead of ``plan``.
        framework: Format of a framework's file (``simplan.interop.formats``); None to find it by content.

    Raises:
        SpecError: There is no such file or model, or an override names no key of a scenario.
    """
    changes = dict(overrides or {})
    typed = {key: (names or {}).get(key, key) for key in changes}
    instead = {key.removeprefix("model."): changes[key] for key in _MODELS if isinstance(changes.get(key), str)}
    document, file, is_whole, configuration = _read(source, framework, instead)
    batch = _batch_override(changes, typed)
    data: Any = document.data
    if configuration is not None:
        configuration.require(overrides or {})
        if batch is None and _BATCH not in changes and configuration.num_microbatches is not None:
            batch = NUM_MICROBATCHES, configuration.num_microbatches
            typed.setdefault(NUM_MICROBATCHES, configuration.names.get(NUM_MICROBATCHES, NUM_MICROBATCHES))
        data, configuration = _sharded(data, changes, typed, configuration)
    current = None
    if searches and isinstance(data, dict) and (configuration is not None or from_current):
        current = _current(document, file, configuration, changes, batch, typed)
        training = {"training": {**data.get("training", {}), **_batch_of(current)}}
        data, batch = {key: value for key, value in data.items() if key not in _OF_PLAN} | training, None
        data.setdefault("search", dict(configuration.search) if configuration is not None else {})
    assumptions: list[Assumption] = []
    replaced: list[str] = []
    if changes and isinstance(data, dict):
        chosen = "search" if searches else "plan"
        if any(key.partition(".")[0] == chosen for key in changes) and chosen not in data:
            dropped = [key for key in ("search", *_OF_PLAN) if key in data]
            replaced = [f"{' and '.join(dropped)} of {file}: replaced by {chosen}"] if dropped else []
            data = {key: value for key, value in data.items() if key not in dropped}
            is_whole = False
        replaced += _on_failures(data.get("reliability"), typed, file)
        data = _overridden(data, changes, typed, file)
    data, spelled = with_catalog_names(data)
    if not is_whole and isinstance(data, dict):
        data, assumptions = _completed(
            data, file, searches=searches, has_batch=batch is not None, node=_node_of(configuration, changes)
        )
    if batch is not None and isinstance(data, dict):
        data, rounded = _with_batch(data, file, batch, typed, searches=searches)
        assumptions += rounded
        if configuration is not None and batch == (NUM_MICROBATCHES, configuration.num_microbatches):
            _check_batch(configuration, data)
    read_names = configuration.names if configuration is not None else {}
    if not {_BATCH} & {*changes, *read_names}:
        _check_derived_batch(data, {**read_names, **typed}, file)
    if configuration is not None and searches:
        ranges = ((f"search.{key}", value) for key, value in configuration.search.items())
        why = f"no others in {configuration.title}"
        assumptions += [Assumption(key, value, why) for key, value in ranges if key not in changes]
    lines = _lines(document, changes)
    document = Document(data, lines)
    return Source(document, file, tuple(assumptions), typed, tuple(replaced), configuration, current, spelled)


def _check_batch(configuration: Configuration, data: dict[str, Any]) -> None:
    """Check that a file which gives both a batch and microbatches is run on the number of devices that it is for."""
    key = _BATCH
    written = configuration.document.data.get("training", {}).get("global_batch_size")
    size, number = data["training"]["global_batch_size"], configuration.num_microbatches
    if key in configuration.names and written not in (None, size):
        rule = f"is {size} on these devices, with {number} microbatches per data-parallel rank"
        fix = "give the devices that it is for, or --num-microbatches"
        field = configuration.names[key]
        raise SpecError(Problem(field=field, value=str(written), rule=rule, fix=fix), file=configuration.file)


def _check_derived_batch(data: Any, names: Mapping[str, str], file: str) -> None:
    """Check that a global batch which nobody wrote is not too large, and name the largest of its factors."""
    sections = [data.get(section) if isinstance(data, dict) else None for section in ("training", "plan")]
    training, plan = (section if isinstance(section, dict) else {} for section in sections)
    size = training.get("global_batch_size")
    if not isinstance(size, int) or size <= MAX_COUNT:
        return
    factors = {f"plan.{key}": plan.get(key, 1) for key in ("microbatch_size", "dp_replicate", "dp_shard")}
    factors = {key: value for key, value in factors.items() if isinstance(value, int) and value > 0}
    factors[NUM_MICROBATCHES] = size // math.prod(factors.values())
    key = max(factors, key=lambda key: factors[key])
    rule = f"makes a global batch of {size:,}, and the largest is {MAX_COUNT:,}"
    problem = Problem(field=names.get(key, key), value=str(factors[key]), rule=rule, fix="use a smaller one")
    raise SpecError(problem, file=file)


def _current(
    document: Document,
    file: str,
    configuration: Configuration | None,
    changes: Mapping[str, Any],
    batch: tuple[str, Any] | None,
    typed: Mapping[str, str],
) -> Source:
    """Document of the plan that a file has, for a search that starts from it."""
    kept = {key: value for key, value in changes.items() if not key.startswith("search.")}
    data, spelled = with_catalog_names(_overridden(document.data, kept, typed, file))
    node = _node_of(configuration, kept)
    data, assumptions = _completed(data, file, searches=False, has_batch=batch is not None, node=node)
    if batch is not None:
        data, rounded = _with_batch(data, file, batch, typed, searches=False)
        assumptions += rounded
    document = Document(data, _lines(document, kept))
    return Source(document, file, tuple(assumptions), typed, (), configuration, None, spelled)


def _batch_of(source: Source) -> dict[str, Any]:
    """Global batch size of a complete document."""
    return {"global_batch_size": source.document.data["training"]["global_batch_size"]}


def _read(
    source: str | Path | Mapping[str, Any] | ConfigFile, framework: str | None, instead: Mapping[str, str]
) -> tuple[Document, str, bool, Configuration | None]:
    """Document of a source without overrides, its name, True if it is a whole scenario, and a framework's file.

    Args:
        instead: See ``ConfigFile``.
    """
    if isinstance(source, Mapping):
        return Document(dict(source), {}), "scenario", True, None
    if isinstance(source, ConfigFile):
        return _parsed(replace(source, instead=instead), framework)
    path = Path(source)
    in_folder = next((name for name in _IN_FOLDERS if path.is_dir() and (path / name).is_file()), None)
    if in_folder is not None:
        path = path / in_folder
    elif not path.is_file() and (name := model_named(str(source))):
        return Document({"name": name, "model": {"preset": str(source)}}, {}), str(source), False, None
    elif path.is_dir():
        rule, fix = "is a folder without config.json", "name a scenario file in it"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=str(source))
    elif not path.exists() and not path.is_symlink() and not looks_like_path(str(source)):
        raise unknown_source(str(source))
    return _parsed(ConfigFile(path, read_text(path, MAX_YAML_BYTES), instead=instead), framework)


def _parsed(file: ConfigFile, framework: str | None) -> tuple[Document, str, bool, Configuration | None]:
    """Content of a file, as ``_read`` returns it."""
    path = file.path
    configuration = read_configuration(file, framework)
    if configuration is not None:
        named = Document({"name": path.stem} | configuration.document.data, configuration.document.lines)
        return named, file.name, False, configuration
    is_scenario = file.yaml is not None and {"model", "cluster"} <= file.yaml.data.keys()
    if framework is None and not is_scenario and (other := framework_that_is_not_read(file)) is not None:
        rule = f"looks like a file of {other}, which is not read"
        raise SpecError(Problem(field="", rule=rule, fix=WITHOUT_FILE), file=file.name)
    if file.yaml is None and path.suffix == ".py":
        rule = "is a Python script, which simplan does not run"
        fix = (
            "give the command that launches it, as a shell script, or its arguments as JSON or YAML; of a torch module "
            f"in it make a file: `simplan capture {path.stem}:MODULE --inputs {path.stem}:BATCH -o model.json` "
            f"({documentation('how-to/your-own-model')})"
        )
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=file.name)
    if file.yaml is None and path.suffix in _SCRIPTS:
        raise unknown_script(file.text, file.name, file.folder)
    if file.yaml is None and path.suffix in _NOT_YAML:
        rule, fix = f"is no {_NOT_YAML[path.suffix]} that simplan knows", "--from NAME names its format"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=file.name)
    document = file.yaml or parse_yaml(file.text, file.name)
    if isinstance(document.data, str):
        rule = f"is text that simplan does not know; it looked for {known_files()}"
        fix = "`simplan compare PREDICTION LOG` reads logs, and `simplan init` writes a scenario"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=file.name)
    if isinstance(document.data, dict) and "model" not in document.data and "model_type" in document.data:
        name_of = path.resolve().parent.name if path.name == "config.json" else path.stem
        return Document({"name": name_of, "model": {"hf_config": path.name}}, {}), file.name, False, None
    if is_captured(document.data):
        return Document({"name": path.stem, "model": {"file": path.name}}, {}), file.name, False, None
    if isinstance(document.data, dict) and document.data and not _SECTIONS & document.data.keys():
        rule = "is no file of a framework that simplan knows, and has no section of a scenario (model, cluster, ...)"
        raise SpecError(Problem(field="", rule=rule, fix=WITHOUT_FILE), file=file.name)
    return document, file.name, True, None


def known_files() -> str:
    """Files that scenarios are read from, in words."""
    titles = [file_format.title for file_format in formats().values() if file_format.read is not None]
    return ", ".join(("a scenario", "a config.json of Hugging Face", "a captured model", *titles))


def _overridden(
    data: dict[str, Any], changes: Mapping[str, Any], typed: Mapping[str, str], file: str
) -> dict[str, Any]:
    """Copy of the data with the overrides, of which those that replace others come first."""
    changed = dict(data)
    for key in sorted(changes, key=lambda key: (key.count("."), key not in _KEPT)):
        section, _, rest = key.partition(".")
        before = changed.get(section)
        if key in _KEPT and isinstance(before, dict) and (section != "model" or _NAMES_A_MODEL & before.keys()):
            kept = _KEPT[key] if key != "cluster.preset" or not says_numbers(changes[key]) else _KEPT[key][2:]
            before = {name: value for name, value in before.items() if name in kept}
        elif isinstance(before, dict):
            replaced = [name for name in _INSTEAD.get(key, ()) if f"{section}.{name}" not in changes]
            before = {name: value for name, value in before.items() if name not in replaced}
        changed[section] = _with(before, section, rest.split(".") if rest else [], changes[key], typed[key], file)
        for same in _SAME.get(key, ()):
            if not any(other == same or other.startswith(f"{same}.") for other in changes):
                changed = _without(changed, same)
    return changed


def _on_failures(before: Any, typed: Mapping[str, str], file: str) -> Iterator[str]:
    """Sentences on failures of a file that overrides replace, and on those of two overrides, which add up."""
    for key, name in typed.items():
        section, _, failure_key = key.partition(".")
        for other in _INSTEAD.get(key, ()) if section == "reliability" else ():
            if (twin := f"{section}.{other}") in typed and failure_key in _SHORT_FAILURES:
                yield f"{name}: these failures count besides those of {typed[twin]}"
            elif isinstance(before, dict) and other in before and twin not in typed:
                yield f"{twin} of {file}: replaced by {name}"


def _without(data: dict[str, Any], key: str) -> dict[str, Any]:
    """Copy of the data without a section, or without a key of a section."""
    section, _, name = key.partition(".")
    if name and isinstance(data.get(section), dict):
        return {**data, section: {other: value for other, value in data[section].items() if other != name}}
    return data if name else {other: value for other, value in data.items() if other != section}


def _sharded(
    data: dict[str, Any], changes: Mapping[str, Any], typed: Mapping[str, str], configuration: Configuration
) -> tuple[dict[str, Any], Configuration]:
    """A framework's file without its replicas, if an override gives a stage of ZeRO and no degrees.

    Raises:
        SpecError: The file itself says that nothing is sharded.
    """
    plan, stage = data.get("plan"), changes.get("plan.zero_stage")
    degrees = {"plan", "plan.dp_shard", "plan.dp_replicate"} & changes.keys()
    if not isinstance(plan, dict) or stage not in (1, 2, 3) or plan.get("dp_shard") != 1 or degrees:
        return data, configuration
    if (key := configuration.names.get("plan.dp_shard")) is not None:
        rule = f"has nothing to shard: {configuration.settings[key]} keeps one copy per data-parallel rank"
        fix = "give the ranks that share a copy as well: --dp-shard 8"
        raise SpecError(
            Problem(field=typed["plan.zero_stage"], value=str(stage), rule=rule, fix=fix), file=configuration.file
        )
    others = {key: value for key, value in plan.items() if key not in ("dp_shard", "dp_replicate")}
    origins = {key: origin for key, origin in configuration.origins.items() if key != "plan.dp_shard"}
    return data | {"plan": others | {"dp_replicate": 1}}, replace(configuration, origins=origins)


def _with(before: Any, place: str, rest: list[str], value: Any, typed: str, file: str) -> Any:
    """Copy of a value with one override inside.

    Args:
        place: Dotted key of ``before``.
        rest: Keys from there to the override.
    """
    if not rest:
        return value
    if isinstance(before, str) and place in _NAMES_WITH_OPTIONS:
        before = {"preset": before}
    if before is not None and not isinstance(before, dict):
        rule = f"{place} is {render_value(before)}, which has no keys"
        raise SpecError(Problem(field=typed, rule=rule, fix=f"set {place}"), file=file)
    merged = dict(before or {})
    merged[rest[0]] = _with(merged.get(rest[0]), f"{place}.{rest[0]}", rest[1:], value, typed, file)
    return merged


def _lines(document: Document, changes: Mapping[str, Any]) -> dict[KeyPath, tuple[int, int]]:
    """Locations of keys that no override changes."""
    changed = [tuple(key.split(".")) for key in changes]
    return {
        path: place for path, place in document.lines.items() if not any(path[: len(key)] == key for key in changed)
    }


def _node_of(configuration: Configuration | None, changes: Mapping[str, Any]) -> Setting | None:
    """Setting of a framework's file with the ranks on each of several nodes; None if an override moves the job."""
    return None if configuration is None or _OF_NODES & changes.keys() else configuration.ranks_per_node


def _completed(
    data: dict[str, Any], file: str, *, searches: bool, has_batch: bool, node: Setting | None
) -> tuple[dict[str, Any], list[Assumption]]:
    """The data with values for everything that a scenario needs, and these values.

    Args:
        has_batch: True if an override sets the global batch size afterwards.
        node: Setting of a framework's file with the ranks on each of several nodes.
    """
    completed, assumptions = dict(data), []

    def assume(section: str, key: str, value: Any, why: str) -> None:
        at = completed.setdefault(section, {})
        if isinstance(at, dict) and key not in at:
            completed[section] = {**at, key: value}
            assumptions.append(Assumption(f"{section}.{key}", value, why))

    _assume_model(completed, file, assume)
    cluster = completed.get("cluster")
    if not isinstance(cluster, dict) or not {"preset", "device", "nodes"} & cluster.keys():
        assume("cluster", "preset", _DEFAULT_CLUSTER, "")
    devices = completed["cluster"].get("num_devices")
    if node is not None and "device" in completed["cluster"] and "preset" not in completed["cluster"]:
        assume("cluster", "devices_per_node", node.value, f"the ranks of a node: {node.key}")
    if (
        "device" in completed["cluster"]
        and "num_nodes" not in completed["cluster"]
        and devices in range(1, LARGEST_NODE + 1)
    ):
        assume("cluster", "devices_per_node", devices, "all in one node")
    if not {"num_nodes", "num_devices", "nodes"} & completed["cluster"].keys():
        is_one = "preset" not in completed["cluster"] and "devices_per_node" not in completed["cluster"]
        assume("cluster", "num_devices" if is_one else "num_nodes", 1, "")
    if "software" not in completed:
        completed["software"] = "torch"
        assumptions.append(Assumption("software", "torch", ""))
    if isinstance(completed.get("model"), dict) and completed["model"].get("lora_rank"):
        assume("training", "task", "lora", "model.lora_rank is given")
    assume("training", "precision", "bf16", "")
    assume("training", "optimizer", "adamw", "")
    if searches:
        completed.setdefault("search", {})
        devices = _num_devices(completed, file)
        if devices is not None and not has_batch:
            assume("training", "global_batch_size", devices, "one sequence per device")
        else:
            completed["training"].setdefault("global_batch_size", 1)  # the cluster is wrong, which is told
    else:
        completed.setdefault("plan", {})
        _assume_plan(completed, file, assume, has_batch=has_batch)
    ordered = {key: completed[key] for key in _ORDER if key in completed}
    return ordered | completed, assumptions


def _assume_model(completed: dict[str, Any], file: str, assume: Assume) -> None:
    """Sequence length of the model."""
    model = completed.get("model")
    if not isinstance(model, dict):
        return
    name, config = model.get("preset"), model.get("hf_config")
    if isinstance(name, str) and name in catalog.names("models"):
        length = catalog.model_fields(name).get("seq_len")
        if length is not None:
            assume("model", "seq_len", length, f"length of the pretraining of {name}")
    elif isinstance(config, str) and "seq_len" not in model:
        read = read_json(folder_of(file) / config)
        word = read.get("model_type")
        kind = model_types().get(word) if isinstance(word, str) else None
        if kind is None or not kind.has_sequences:
            return
        longest = read.get(kind.keys.get("max_position_embeddings", ""))
        if not isinstance(longest, int) or longest < 1:
            rule = "does not say how long sequences are"
            raise SpecError(Problem(field="", rule=rule, fix=f"add --seq-len {_USUAL_LENGTH}"), file=file)
        why = "usual in training" if longest > _USUAL_LENGTH else "the longest that the configuration has"
        assume("model", "seq_len", min(longest, _USUAL_LENGTH), why)


def _num_devices(completed: dict[str, Any], file: str) -> int | None:
    """Devices of the cluster; None if the section is wrong, which its reading reports."""
    cluster = parts_of(Document({**completed, "training": {"global_batch_size": 1}}, {}), file).cluster
    return None if cluster is None else cluster.num_devices


def _assume_plan(completed: dict[str, Any], file: str, assume: Assume, *, has_batch: bool) -> None:
    """Degrees of data parallelism, microbatch size and batch size of a plan."""
    plan, devices = completed["plan"], _num_devices(completed, file)
    if not isinstance(plan, dict) or devices is None:
        completed["training"].setdefault("global_batch_size", 1)  # one of the two is wrong, which is told
        return
    software = read_software(Sections(Document({}, {}), file), completed["software"])
    if software is not None and not software.sequence_parallelism and plan.get("tp", 1) != 1:
        assume("plan", "sequence_parallel", False, f"{software.id} has none")
        plan = completed["plan"]

    facts = SCHEDULE_FACTS.get(str(plan.get("schedule")))
    if facts is not None and facts.virtual_stages != 1 and plan.get("pp", 1) != 1:
        number, why = facts.virtual_stages or 2, f"the fewest that {plan['schedule']} takes"
        if facts.virtual_stages is None and (equal := _equal_stages(completed, file)) > 2:
            number, why = equal, "the fewest with as many blocks in each stage"
        assume("plan", "virtual_stages", number, why)
        plan = completed["plan"]

    def degree(key: str) -> int:
        value = plan.get(key, 1)
        return value if isinstance(value, int) and value > 0 else 1

    left = devices // math.prod(map(degree, ("tp", "pp", "cp", "dp_replicate", "dp_shard")))
    missing = [key for key in ("dp_shard", "dp_replicate") if key not in plan]
    if left > 1 and missing:
        for key, value in _shared_out(completed, file, left, missing):
            assume("plan", key, value, "the remaining devices" if key != "zero_stage" else "")
    plan = completed["plan"]
    over_cp = software is not None and software.shards_over_cp
    shards = degree("dp_shard") * (degree("cp") if over_cp else 1)
    if shards > 1 and "zero_stage" not in plan and software is not None:
        stages: list[dict[str, Any]] = [{}, {"zero_stage": 2}, {"zero_stage": 1}]
        if degree("dp_shard") == 1:  # a plan by itself shards over context-parallel ranks only if it says so
            stages = [{"zero_stage": stage} for stage in (3, 2, 1, 0)]
        told = [rule for rule in RULES if rule is not optimizer_of_plan]  # what an optimizer refuses is told
        best = min(stages, key=lambda stage: _num_violations({**completed, "plan": {**plan, **stage}}, file, told))
        for key, value in best.items():
            assume("plan", key, value, f"the highest that {software.id} has for this plan")
    assume("plan", "microbatch_size", 1, "")
    plan = completed["plan"]
    dp, size, pp = degree("dp_shard") * degree("dp_replicate"), degree("microbatch_size"), degree("pp")
    if not has_batch:
        microbatches = 1 if pp == 1 else _MICROBATCHES_PER_STAGE * pp
        why = f"{microbatches} microbatch{'es' * (microbatches > 1)} per data-parallel rank"
        assume("training", "global_batch_size", dp * size * microbatches, why)


def _equal_stages(completed: dict[str, Any], file: str) -> int:
    """Fewest virtual stages above 1 that have as many blocks each; 0 if no number does, or the model is wrong."""
    model, pp = (
        parts_of(Document({**completed, "training": {"global_batch_size": 1}}, {}), file).model,
        completed["plan"]["pp"],
    )
    if model is None or not isinstance(pp, int) or pp < 1:
        return 0
    return next((number for number in range(2, model.num_blocks // pp + 1) if model.num_blocks % (pp * number) == 0), 0)


def _shared_out(completed: dict[str, Any], file: str, left: int, missing: list[str]) -> list[tuple[str, Any]]:
    """Keys of the plan for the remaining devices: sharded as far as the framework can, else replicated.

    Args:
        left: Devices per group of the degrees that are given.
        missing: ``dp_shard``, ``dp_replicate`` or both.
    """
    if missing == ["dp_replicate"]:
        return [("dp_replicate", left)]
    options: list[dict[str, Any]] = [{"dp_shard": left}]
    stage = completed["plan"].get("zero_stage")
    if stage is None:
        options += [{"dp_shard": left, "zero_stage": lower} for lower in (2, 1)]
    if "dp_replicate" in missing and not stage:
        options.append({"dp_replicate": left})
    best = min(
        options, key=lambda option: _num_violations({**completed, "plan": {**completed["plan"], **option}}, file)
    )
    return [*best.items()]


def _num_violations(data: dict[str, Any], file: str, rules: Sequence[Rule] = RULES) -> int:
    """Number of violated rules of a plan with a batch that it divides; 0 for a document that is wrong anyway."""
    try:
        parts = parts_of(Document({**data, "training": {"global_batch_size": 1} | data["training"]}, {}), file)
        parts.sections.raise_problems()
        job = parts.job(ParallelPlan.model_validate(data["plan"]))
        size = job.plan.dp * job.plan.microbatch_size * job.plan.pp * _MICROBATCHES_PER_STAGE
        batch = job.training.with_changes(global_batch_size=size)
    except ValueError:  # SpecError and pydantic's
        return 0
    return len(violations(replace(job, training=batch), rules))


def _batch_override(changes: dict[str, Any], typed: Mapping[str, str]) -> tuple[str, Any] | None:
    """Removes the override that sets the global batch size without being a key of a file: its name and value.

    Raises:
        SpecError: Two overrides give the batch.
    """
    batches = [(name, changes.pop(name)) for name in (NUM_MICROBATCHES, GLOBAL_BATCH_TOKENS) if name in changes]
    if not batches:
        return None
    name, value = batches[0]
    if others := [key for key in (_BATCH, *(key for key, _ in batches[1:])) if key in typed]:
        rule, fix = f"is given twice, with {typed[others[0]]}", "give one of the two"
        raise SpecError(Problem(field=typed[name], value=render_value(value), rule=rule, fix=fix))
    return name, value


def _with_batch(
    data: dict[str, Any],
    file: str,
    batch: tuple[str, Any],
    typed: Mapping[str, str],
    *,
    searches: bool,
) -> tuple[dict[str, Any], list[Assumption]]:
    """The data with the global batch size of a number of microbatches, or next to a number of tokens.

    Args:
        batch: ``NUM_MICROBATCHES`` or ``GLOBAL_BATCH_TOKENS``, and its value.
    """
    name, number = batch

    def refuse(rule: str, fix: str = "") -> SpecError:
        return SpecError(Problem(field=typed[name], value=render_value(number), rule=rule, fix=fix), file=file)

    if searches and name == NUM_MICROBATCHES:
        raise refuse("is chosen by a search", "give training.global_batch_size")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise refuse("must be a whole number, at least 1")
    training = data.get("training")
    before = training if isinstance(training, dict) else {}
    plan, share = data.get("plan"), 1
    for key in ("dp_replicate", "dp_shard", "microbatch_size"):
        value = plan.get(key, 1) if isinstance(plan, dict) else 1
        share *= value if isinstance(value, int) and value > 0 else 1  # reading the section reports other values
    if name == GLOBAL_BATCH_TOKENS and number > MAX_COUNT:
        raise refuse(f"must be at most {MAX_COUNT:,}")
    if name == NUM_MICROBATCHES:
        return {**data, "training": {**before, "global_batch_size": number * share}}, []
    parts = parts_of(Document({**data, "training": {**before, "global_batch_size": 1}}, {}), file)
    if parts.model is None or parts.cluster is None:  # wrong, which is told
        return {**data, "training": {**before, "global_batch_size": 1}}, []
    if parts.model.sample != "sequence":
        raise refuse("is for models of tokens, and this one trains on images", "give training.global_batch_size")
    devices = parts.cluster.num_devices
    units = [unit for unit in range(devices, 0, -1) if devices % unit == 0] if searches else [share]
    try:
        tokens = parts.model.seq_len * (2 if before.get("task") in PAIRED_TASKS else 1)  # of a pair both count
        size, why = _batch_near(number, tokens, units, "devices" if searches else "dp x microbatch_size")
    except ValueError as error:
        raise refuse(*error.args) from None
    return {**data, "training": {**before, "global_batch_size": size}}, [Assumption(_BATCH, size, why)]


def _batch_near(num_tokens: int, seq_len: int, units: list[int], of: str) -> tuple[int, str]:
    """Global batch size near a number of tokens, and its origin in words.

    The batch is exact if it can be. Else it is within 5 %, and has as many factors of 2 as possible: 4M tokens are 512
    sequences of 8,192. Else it is the nearest.

    Args:
        units: Numbers of sequences of which the batch can be a multiple, the preferred one first.
        of: Origin of these numbers in words.

    Raises:
        ValueError: The nearest batch is too far from the number; has rule and fix.
    """
    wanted = num_tokens / seq_len
    for unit in units:
        low, high = math.ceil(wanted * (1 - _NEAR) / unit), math.floor(wanted * (1 + _NEAR) / unit)
        if low <= high:
            exact = wanted == int(wanted) and int(wanted) % unit == 0
            size = int(wanted) if exact else unit * _with_most_factors_of_2(low, high)
            tokens = f"{size * seq_len:,} tokens"
            if size == wanted:
                return size, tokens
            others = f"of the multiples of {unit} ({of}) within 5 % of {num_tokens:,} tokens"
            return size, f"{tokens}; {others}, the one with most factors of 2"
    unit = units[-1]
    below, above = math.floor(wanted / unit) * unit, math.ceil(wanted / unit) * unit
    size = min((size for size in (below, above) if size), key=lambda size: abs(size - wanted))
    if abs(size - wanted) > _TOO_FAR * wanted:
        rule = f"is {wanted:,.3g} sequences of {seq_len:,} tokens, and the batch is a multiple of {unit} ({of})"
        raise ValueError(rule, f"give {' or '.join(str(size * seq_len) for size in (below, above) if size)}")
    return size, f"{size * seq_len:,} tokens, the multiple of {unit} ({of}) nearest to {num_tokens:,} tokens"


def _with_most_factors_of_2(low: int, high: int) -> int:
    """Number from ``low`` to ``high``, both at least 1, with most factors of 2: there is only one."""
    multiples = (high >> power << power for power in range(high.bit_length(), -1, -1))
    return next(multiple for multiple in multiples if multiple >= low)


_LARGEST_HOST = 16
"""Devices that one operating system has in today's machines; larger domains, as of NVL72, are of several hosts."""


def check_ranks_per_node(configuration: Configuration, cluster: ClusterSpec) -> None:
    """Check that a node has as many devices as a job on several nodes has ranks on each.

    Raises:
        SpecError: It has more or fewer, so communications would cross nodes elsewhere.
    """
    setting, devices = configuration.ranks_per_node, cluster.devices_per_node
    if setting is None or setting.value == devices or devices > _LARGEST_HOST:
        return
    rule = f"is the number of ranks on each node, and nodes of this cluster have {counted(devices, 'device')}"
    fix = f"add --set cluster.devices_per_node={setting.value}, or name a cluster of such nodes"
    problem = Problem(field=setting.key, value=str(setting.value), rule=rule, fix=fix, line=setting.line)
    raise SpecError(problem, file=configuration.file)
