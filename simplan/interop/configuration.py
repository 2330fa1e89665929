"""Configuration files of frameworks as sections of a scenario: what each setting became, and what is left.

A reader of one framework (``simplan.interop.frameworks``) puts every setting of a file in one place: a key of the
scenario; *no effect* on time or memory; *not modeled*, which changes time or memory by something that simplan leaves
out; or refused, if an answer without it would be about another job. Settings that no reader knows stay, and are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from simplan.document import Document, Place
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.interop.unread import is_device_setting, subject_of, usual_device
from simplan.model.model import MAX_LAYERS
from simplan.problems import Path, in_file_order, render_value

_ABSENT: Any = object()
_MAX_LISTED = 40


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a file.

    Attributes:
        key: Key as its users write it: ``--tensor-model-parallel-size``, ``parallelism.tensor_parallel_degree``.
        value: Plain data; True for a flag without a value.
        line: 1-based line of the file; None if it comes from elsewhere.
        older_name: Key as the file has it, if that is an older name of ``key``.
    """

    key: str
    value: Any
    line: int | None = None
    older_name: str = ""

    @property
    def name(self) -> str:
        """Key as the file has it."""
        return self.older_name or self.key

    def __str__(self) -> str:
        place = f" (line {self.line})" if self.line is not None else ""
        return f"{self.name}{place}" if self.value is True else f"{self.name} = {render_value(self.value)}{place}"


@dataclass(frozen=True, slots=True)
class SettingMapping:
    """One setting of a framework that is one key of a scenario, for reading and for writing.

    Attributes:
        key: Key of the framework.
        path: Dotted key of a scenario, ``plan.tp``.
        default: Value of the framework if the file does not have the key; absent to leave the scenario's key out.
        values: Value of the framework -> value of the scenario; None if they are equal.
    """

    key: str
    path: str
    default: Any = _ABSENT
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the file does not say and an answer needs.

    Attributes:
        keys: Dotted keys or sections of a scenario, one of which suffices (``cluster`` for any of its keys).
        problem: Sentence with what is missing, and the option that gives a usual value.
    """

    keys: tuple[str, ...]
    problem: Problem


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration file, read.

    Attributes:
        title: Framework and kind of file in words: ``Megatron-LM arguments``.
        file: Name of the file.
        document: Sections of a scenario, with the lines of their settings.
        origins: Dotted key of the scenario -> setting that gives it, or words on the framework's default.
        names: Dotted key of the scenario -> key of the framework, for errors.
        num_microbatches: Microbatches per data-parallel rank, if the file gives these instead of the global batch.
        no_effect: Settings that change neither time nor memory.
        not_modeled: Settings that change time or memory by something that is left out, each with what that is.
        unknown: Settings that no reader knows.
        missing: What the command line has to add.
        settings: All settings of the file, by key.
        format: Name of the format (``simplan.interop.formats``).
        looks_like: Title of another format that the content has signs of; empty if it has none.
        search: Key of ``search`` -> values, where the framework runs fewer plans than simplan knows.
        ranks_per_node: Setting with the ranks on each of several nodes; None if the file does not say.
    """

    title: str
    file: str
    document: Document
    origins: Mapping[str, str]
    names: Mapping[str, str]
    num_microbatches: int | None = None
    no_effect: tuple[Setting, ...] = ()
    not_modeled: tuple[tuple[Setting, str], ...] = ()
    unknown: tuple[Setting, ...] = ()
    missing: tuple[Missing, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    format: str = ""
    looks_like: str = ""
    search: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: Setting | None = None

    def notes(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Sentences for the reader of a report: what was read, and what was not.

        Args:
            data: Sections of the scenario after overrides, which may replace what was read.
        """
        before = self.document.data
        kept = {key for key in self.origins if key.partition(".")[0] in data}  # a search has no plan
        replaced = {key for key in kept if _value(data, key) != _value(before, key)}
        defaults = [f"{key} = {origin}" for key, origin in self.origins.items() if key not in {*self.names, *replaced}]
        read = [key for key in self.names if key not in replaced]
        notes = [f"read from {self.file} ({self.title}): {', '.join(read) or 'nothing'}"]
        if self.looks_like:
            notes.insert(0, f"{self.file} has the signs of another format ({self.looks_like}): check --from")
        if defaults:
            notes.append(f"not in that file: {_listed(defaults)}")
        if self.not_modeled:
            notes.append("not modeled: " + _listed([f"{setting}: {why}" for setting, why in self.not_modeled]))
        if self.unknown:
            what = "may change time or memory, and simplan does not know these settings"
            notes.append(f"{what}: {_listed(map(str, self.unknown))}")
        if self.no_effect:
            notes.append(f"no effect on time or memory: {_listed(setting.name for setting in self.no_effect)}")
        return tuple(notes)

    def require(self, overrides: Iterable[str]) -> None:
        """Check that the overrides add what the file does not say.

        Args:
            overrides: Dotted keys of the overrides.

        Raises:
            SpecError: Something is missing; lists all of it.
        """
        keys = {part for key in overrides for part in (key, key.partition(".")[0])}
        problems = [missing.problem for missing in self.missing if not keys & {*missing.keys}]
        if problems:
            raise SpecError(problems, file=self.file)


def _value(data: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key; None if its section has none."""
    section, _, name = key.partition(".")
    values = data.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


@dataclass(slots=True)
class Reading:
    """Settings of one file on their way into a scenario.

    Attributes:
        title: Framework and kind of file in words.
        file: Name of the file.
        ranks_per_node: See ``Configuration``.
    """

    title: str
    file: str
    settings: dict[str, Setting] = field(default_factory=dict)
    _left: dict[str, Setting] = field(default_factory=dict)
    _data: dict[str, Any] = field(default_factory=dict)
    _lines: dict[Path, Place] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _no_effect: list[Setting] = field(default_factory=list)
    _not_modeled: list[tuple[Setting, str]] = field(default_factory=list)
    _missing: list[Missing] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)
    _unmodeled_problems: list[Problem] = field(default_factory=list)
    ranks_per_node: Setting | None = None

    @classmethod
    def of(cls, title: str, file: str, settings: Iterable[Setting]) -> Self:
        """Reading of settings, of which the last one of a key counts."""
        by_key = {setting.key: setting for setting in settings}
        return cls(title, file, by_key, dict(by_key))

    def __contains__(self, key: str) -> bool:
        """True if the file has the key."""
        return key in self.settings

    def value(self, key: str, default: Any = None) -> Any:
        """Value of a key, which counts as read from here on."""
        self._left.pop(key, None)
        return self.settings[key].value if key in self.settings else default

    def peek(self, key: str, default: Any = None) -> Any:
        """Value of a key, which does not count as read."""
        return self.settings[key].value if key in self.settings else default

    def whole(self, key: str, default: int = 1) -> int:
        """A whole number, at least 1; null and absent are the default, and anything else is a contradiction."""
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.contradiction(key, "must be a whole number, at least 1")
            return default
        return value

    def truth(self, key: str, *, default: bool = False) -> bool:
        """True or false; null and absent are the default, and anything else is a contradiction."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.contradiction(key, "must be true or false")
            return default
        return value

    def word(self, key: str, default: str | None = None) -> str | int | float | bool | None:
        """A single value, to look up; null and absent are the default, and a list is text that nothing has."""
        value = self.value(key)
        if value is None:
            return default
        return value if isinstance(value, str | int | float | bool) else str(value)

    def written(self, path: str) -> Any:
        """Value that a dotted key of the scenario has by now; None if it has none."""
        section, _, name = path.partition(".")
        value = self._data.get(section)
        return value.get(name) if name and isinstance(value, dict) else value

    def put(self, path: str, value: Any, key: str) -> None:
        """Give a key of the scenario the value of a setting.

        Args:
            path: Dotted key of the scenario, or ``num_microbatches``.
            value: Value of the scenario.
            key: Setting that gives it; if the file does not have it, words on the origin (``the default of ...``).
        """
        self._left.pop(key, None)
        section, _, name = path.partition(".")
        if name:
            self._data.setdefault(section, {})[name] = value
        else:
            self._data[section] = value
        setting = self.settings.get(key)
        if setting is None:
            self._origins[path] = f"{render_value(value)} ({key})"
            return
        self._origins[path], self._names[path] = str(setting), setting.name
        if setting.line is not None:
            self._lines[tuple(path.split("."))] = (setting.line, 1)

    def copy(self, path: str, *keys: str) -> bool:
        """Give a key of the scenario the value of the first of some settings; False if the file has none of them."""
        key = next((candidate for candidate in keys if candidate in self), None)
        if key is not None:
            self.put(path, self.value(key), key)
        return key is not None

    def match(self, matches: Iterable[SettingMapping]) -> None:
        """Put all settings that are one key of a scenario each.

        A value that is not in ``SettingMapping.values`` is refused as not modeled.
        """
        for match in matches:
            if match.key not in self:
                if match.default is not _ABSENT:
                    value = match.default if match.values is None else match.values[match.default]
                    self.put(match.path, value, "the framework's default")
                continue
            value = self.value(match.key)
            if match.values is None:
                self.put(match.path, value, match.key)
            elif isinstance(value, str | int | float | bool | None) and value in match.values:
                self.put(match.path, match.values[value], match.key)
            else:
                self.refuse(match.key, "is not modeled yet", f"only {' or '.join(map(str, match.values))} is")

    def no_effect(self, *keys: str) -> None:
        """Note settings that change neither time nor memory, by whole names; others than the file's do not matter."""
        for key in keys:
            if key in self._left:
                self._no_effect.append(self._left.pop(key))

    def not_modeled(self, key: str, why: str) -> None:
        """Note a setting that changes time or memory by something that is left out.

        Args:
            key: Key of the file.
            why: What is left out, and what that does: ``its copies take memory on rank 0``.
        """
        if key in self.settings:
            self._left.pop(key, None)
            self._not_modeled.append((self.settings[key], why))

    def refuse(self, key: str, rule: str, fix: str = "") -> None:
        """Record a setting without which the answer would be about another job."""
        self._unmodeled_problems.append(self._problem(key, rule, fix))

    def contradiction(self, key: str, rule: str, fix: str = "") -> None:
        """Record a setting that contradicts others."""
        self._problems.append(self._problem(key, rule, fix))

    def can_split(self, num_layers: int, num_stages: int, key: str) -> bool:
        """True for stages that a model may have: every one but the first and the last needs a block.

        More stages are recorded as a contradiction of ``key``, before anyone lists their blocks.
        """
        max_stages = min(num_layers, MAX_LAYERS) + 2
        if num_stages > max_stages:
            rule = f"makes {num_stages:,} pipeline stages, and {num_layers:,} blocks make at most {max_stages:,}"
            self.contradiction(key, rule, "use fewer stages")
        return num_stages <= max_stages

    def ask(self, *keys: str, what: str, fix: str) -> None:
        """Note something that the file does not say.

        Args:
            keys: Dotted keys or sections of a scenario, one of which suffices.
            what: What is missing, as a rule: ``does not say how long sequences are``.
            fix: Option with a usual value: ``add --seq-len 4096``.
        """
        self._missing.append(Missing(keys, Problem(field="", rule=what, fix=fix)))

    def finish(self, *, is_whole: bool = True) -> Configuration:
        """The configuration.

        Args:
            is_whole: False if the reader stopped early, so that settings that it would know are left.

        Raises:
            SpecError: Settings are refused or contradict each other; lists all of them. A ``NotModelledError`` if all
                are options that are not modeled.
        """
        self._refuse_other_devices()
        if is_whole:
            self._refuse_unknown()
        problems = sorted([*self._problems, *self._unmodeled_problems], key=in_file_order)
        if problems:
            raise (SpecError if self._problems else NotModelledError)(problems, file=self.file)
        number = self._data.pop("num_microbatches", None)
        return Configuration(
            self.title,
            self.file,
            Document(self._data, self._lines),
            self._origins,
            self._names,
            number,
            tuple(sorted(self._no_effect, key=lambda setting: (setting.line or 0, setting.key))),
            tuple(self._not_modeled),
            tuple(self._left.values()),
            tuple(self._missing),
            self.settings,
            ranks_per_node=self.ranks_per_node,
        )

    def _refuse_other_devices(self) -> None:
        """Refuse settings by which ranks do not run on GPUs."""
        for key, setting in self.settings.items():
            if is_device_setting(key):
                self._left.pop(key, None)
                usual = usual_device(key, setting.value)
                if usual is not None:
                    rule = "trains without the GPUs of a cluster, which is not modeled"
                    if usual == "nccl":
                        rule = "communicates without NCCL, which is not modeled for GPUs"
                    self.refuse(key, rule, "remove it" if usual == "false" else f"use {usual}")

    def _refuse_unknown(self) -> None:
        """Refuse settings that nothing has read and that may be about another plan."""
        for key, setting in [*self._left.items()]:
            subject = subject_of(key, setting.value)
            if subject is not None:
                rule = f"is a setting that simplan does not know, and its name speaks of {subject}"
                self.refuse(key, rule, "remove it if the plan is the same without it, or write a scenario")

    def _problem(self, key: str, rule: str, fix: str) -> Problem:
        self._left.pop(key, None)
        setting = self.settings.get(key)
        if setting is None:
            return Problem(field=key, rule=rule, fix=fix)
        value = None if setting.value is True else render_value(setting.value)
        return Problem(field=setting.name, value=value, rule=rule, fix=fix, line=setting.line)


def _listed(items: Iterable[str]) -> str:
    listed = list(items)
    rest = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + rest
