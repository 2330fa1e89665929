"""Jobs as settings of a framework: every choice of the job is written, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from simplan import catalog
from simplan.base import Spec
from simplan.errors import NotModelledError, Problem
from simplan.interop.configuration import Setting, SettingMapping
from simplan.job import Job
from simplan.problems import render_value
from simplan.software.software import SoftwareSpec

_SECTIONS = ("model", "training", "software", "plan")
_DISPLAY = {"model.name", "model.sources", "model.packs", "software.sources"}
"""Fields that no framework needs."""
NODE_RANK = "NODE_RANK=${NODE_RANK:?set it to the number of this node, from 0 on}"
MASTER_ADDR = "MASTER_ADDR=${MASTER_ADDR:?set it to the host name of node 0}"
"""Lines of a script that stops, with a sentence, on one of several nodes that was not told which one it is."""
_EQUAL_NODES = "use a cluster of equal nodes; simplan predict and search take different ones"
_FIXES = {
    "plan.placement": "leave it out: its ranks fill nodes in the order tp, cp, dp, pp",
    "plan.collectives": "leave it out, and set NCCL_ALGO where the run is started",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting to write.

    Attributes:
        setting: Key and value in the words of the framework.
        comment: Key of the scenario that it says; or why it is needed.
    """

    setting: Setting
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """Files of an export.

    Attributes:
        files: Name -> content. One file has the name that the framework's users give it.
        start: Command that starts the run, with the names of the files.
        notes: Sentences on what the reader has to add.
    """

    files: Mapping[str, str | bytes]
    start: str
    notes: tuple[str, ...] = ()


def refuse_mixed(job: Job, target: str) -> None:
    """Refuse jobs on different nodes, or with different microbatches.

    Raises:
        NotModelledError: The cluster has node groups, or data-parallel ranks have microbatches of their own.
    """
    problems = []
    if job.cluster.is_mixed:
        rule = f"are different nodes, which is not supported yet for {target}"
        problems.append(Problem(field="cluster.nodes", value=job.cluster.devices_in_words, rule=rule, fix=_EQUAL_NODES))
    if job.plan.microbatch_sizes is not None:
        rule = f"is not supported yet for {target}, where all ranks have microbatches of one size"
        fix = "use microbatch_size"
        problems.append(Problem(field="plan.microbatch_sizes", rule=rule, fix=fix))
    if problems:
        raise NotModelledError(problems)


@dataclass(slots=True)
class Writing:
    """A job on its way into settings of a framework.

    Attributes:
        job: The job.
        target: Framework in words, for errors.
    """

    job: Job
    target: str
    options: list[Option] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        refuse_mixed(self.job, self.target)
        if self.job.placement is None:  # an order of axes may be that of the mesh
            self.taken("plan.placement")

    def value(self, path: str) -> Any:
        """Value of a dotted key (``plan.tp``), which counts as written from here on."""
        self._taken.add(path)
        section, _, name = path.partition(".")
        return getattr(getattr(self.job, section), name)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Write a setting; a flag has the value True."""
        self.options.append(Option(Setting(key, value), comment))

    def copy(self, key: str, path: str, *, if_set: bool = False) -> None:
        """Write the value of a dotted key as it is.

        Args:
            if_set: Leave out what is null, false or 0.
        """
        value = self.value(path)
        if value or not if_set:
            self.set(key, value, path)

    def allowed(self, path: str, values: Iterable[Any], fix: str = "") -> Any:
        """Value of a dotted key, one of several; any other is refused, with these as the fix."""
        value, known = self.value(path), list(values)
        if value not in known:
            self.refuse(path, fix or f"use {', '.join(map(str, known))}")
        return value

    def match(self, matches: Iterable[SettingMapping]) -> None:
        """Write all keys of the scenario that are one setting each.

        Values of the scenario that ``SettingMapping.values`` does not have are refused.
        """
        for match in matches:
            value = self.value(match.path)
            if match.values is None:
                self.set(match.key, value, match.path)
                continue
            words = [word for word, chosen in match.values.items() if chosen == value]
            if words:
                self.set(match.key, words[0], match.path)
            else:
                self.refuse(match.path, f"use {' or '.join(map(render_value, match.values.values()))}")

    def taken(self, *paths: str) -> None:
        """Note keys that other settings imply."""
        self._taken.update(paths)

    def refuse(self, path: str, fix: str = "") -> NoReturn:
        """Refuse a key that the framework cannot express.

        Raises:
            NotModelledError: Always.
        """
        raise NotModelledError(self._problem(path, fix))

    def finish(self) -> tuple[Option, ...]:
        """The settings.

        Raises:
            NotModelledError: A key of the job that is not the default was neither written nor implied; lists all.
        """
        problems = [
            self._problem(f"{section}.{name}", _FIXES.get(f"{section}.{name}", ""))
            for section in _SECTIONS
            for name in _chosen(getattr(self.job, section))
            if f"{section}.{name}" not in self._taken | _DISPLAY
        ]
        if problems:
            raise NotModelledError(problems)
        return tuple(self.options)

    def _problem(self, path: str, fix: str) -> Problem:
        section, _, name = path.partition(".")
        value = render_value(getattr(getattr(self.job, section), name))
        return Problem(field=path, value=value, rule=f"cannot be said in {self.target}", fix=fix)


def _chosen(spec: Spec) -> list[str]:
    """Fields with another value than their default; for software, than those of its profile."""
    default: Any = catalog.software(spec.id) if isinstance(spec, SoftwareSpec) else None
    chosen = []
    for name, info in type(spec).model_fields.items():
        if info.exclude:  # it follows from others
            continue
        value = getattr(spec, name)
        usual = info.get_default(call_default_factory=True) if default is None else getattr(default, name)
        if value != usual and not (info.is_required() and not value):  # sizes that a family does not have are 0
            chosen.append(name)
    return chosen
