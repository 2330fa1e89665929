"""Settings of torchtitan under one name each, whatever version they are of, with its defaults and its own models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from simplan import catalog
from simplan.interop.configuration import Reading, Setting
from simplan.interop.frameworks import names_without_effect, tables
from simplan.problems import render_value

_BASE = "<<"
_ATTENTION = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Endings of flavors that name an attention kernel."""
_OLD = (
    "training.tensor_parallel_degree", "training.data_parallel", "float8.enable_float8_linear",
    "experimental.pipeline_parallel", "experimental.context_parallel", "experimental.enable_async",
)  # fmt: skip
"""Beginnings of keys that were renamed in March 2025 (785c34c99, the section ``parallelism``), or before."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Content of ``tables/torchtitan.yaml``.

    Attributes:
        models: Model -> flavor -> keys of the section ``model``.
        of_2024: Flavors with another shape until the end of 2024.
        other_models: Model that simplan does not have -> description.
        other_configurations: Configuration of a model that simplan has -> what it has that simplan does not have.
        configurations: Module -> configuration -> settings that are not the default.
        aliases: Key of another version -> key by which simplan reads and writes it.
        defaults: Key that simplan reads -> default, null for none.
        defaults_of_2024, defaults_of_0_3: Other defaults at the end of 2024, and of version 0.3.
        not_modeled: Setting that, if it is on, changes time or memory by something that is left out -> what that is.
    """

    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    of_2024: Mapping[str, Mapping[str, Mapping[str, Any]]]
    other_models: Mapping[str, str]
    other_configurations: Mapping[str, str]
    configurations: Mapping[str, Mapping[str, Mapping[str, Any]]]
    aliases: Mapping[str, str]
    defaults: Mapping[str, Any]
    defaults_of_2024: Mapping[str, Any]
    defaults_of_0_3: Mapping[str, Any]
    not_modeled: Mapping[str, str]

    def known(self, beginning: str) -> tuple[str, ...]:
        """Known keys that begin with a word or section."""
        keys = (*self.defaults, *self.aliases.values(), *self.not_modeled, *names_without_effect("torchtitan"))
        return tuple(sorted({key for key in keys if key.startswith(beginning)}))

    def model(self, name: str, flavor: str, *, of_2024: bool = False) -> Mapping[str, Any] | None:
        """Keys of the section ``model`` for a model and flavor; None if torchtitan has no such flavor."""
        known = {**self.models.get(name, {}), **(self.of_2024.get(name, {}) if of_2024 else {})}
        ending = next((suffix for suffix in _ATTENTION if flavor.endswith(suffix)), "")
        return known.get(flavor.removesuffix(ending))


@cache
def facts() -> Facts:
    """The facts, read once."""
    data = tables("torchtitan")
    configurations = {
        module: {name: _with_base(settings) for name, settings in named.items()}
        for module, named in data["configurations"].items()
    }
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    return Facts(**{**data, **lists, "configurations": configurations})


def num_layers(model: Mapping[str, Any]) -> int:
    """Blocks of a model of ``Facts.model``."""
    fields = catalog.model_fields(model["preset"]) if "preset" in model else model
    return int(fields["num_hidden_layers"])


def _with_base(settings: Mapping[str, Any]) -> dict[str, Any]:
    base = settings.get(_BASE)
    own_settings = {key: value for key, value in settings.items() if key != _BASE}
    return {**(_with_base(base) if base else {}), **own_settings}


@dataclass(slots=True)
class RunSettings:
    """Settings of a run by their canonical keys: those of the file, of the configuration that it names, and defaults.

    Attributes:
        reading: RunSettings under the keys that the file has.
        names: Canonical key -> key of the file.
        named: RunSettings of the configuration that the command names.
        name: Name of that configuration; empty for none.
        is_of_2024: True for keys that were renamed by March 2025.
    """

    reading: Reading
    names: Mapping[str, str]
    named: Mapping[str, Any]
    name: str
    is_of_2024: bool

    @classmethod
    def of(
        cls, title: str, file: str, settings: Iterable[Setting], named: Mapping[str, Any] | None = None, name: str = ""
    ) -> RunSettings:
        """Settings of a file, of which the last one of a key counts.

        Args:
            named: RunSettings of the configuration that the command names; None before version 0.3.
        """
        aliases, by_key = facts().aliases, dict[str, Setting]()
        for setting in settings:
            key = aliases.get(setting.key, setting.key)
            by_key.pop(key, None)
            by_key[key] = setting
        names = {key: setting.key for key, setting in by_key.items()}
        reading = Reading.of(title, file, by_key.values())
        old = any(key.startswith(_OLD) for key in names.values())
        layers = {} if named is None else {**facts().defaults_of_0_3, **named}
        return cls(reading, names, layers, name, old and named is None)

    def __contains__(self, key: str) -> bool:
        """True if the file or the named configuration has the key."""
        return key in self.names or key in self.named

    def __getitem__(self, key: str) -> Any:
        """Value of a canonical key, which counts as read from here on; None if there is no default either."""
        if key in self.names:
            return self.reading.value(self.names[key])
        if key in self.named:
            return self.named[key]
        of_2024 = facts().defaults_of_2024
        return (of_2024 if self.is_of_2024 and key in of_2024 else facts().defaults).get(key)

    def key(self, key: str) -> str:
        """Key in the words of the file, or its canonical name."""
        return self.names.get(key, key)

    def word(self, key: str) -> str | None:
        """Value of a key that is text; its rendered value else, which no table has."""
        value = self[key]
        return value if isinstance(value, str | None) else render_value(value)

    def put(self, path: str, value: Any, key: str) -> None:
        """Give a key of the scenario the value that a setting gives."""
        if key in self.names:
            self.reading.put(path, value, self.names[key])
        elif key in self.named and self.name:
            self.reading.put(path, value, f"{key} of torchtitan's {self.name}")
        else:
            self.reading.put(path, value, f"torchtitan's default of {key}")

    def whole(self, key: str, minimum: int = 1) -> int:
        """Whole number of a key; a contradiction is recorded for other values, and the minimum returned."""
        value = self[key]
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self.reading.contradiction(self.key(key), f"must be a whole number, at least {minimum}")
        return max(minimum, 1)

    def put_whole(self, path: str, key: str) -> int:
        """Give a key of the scenario the whole number that a setting gives; returns it."""
        value = self.whole(key)
        self.put(path, value, key)
        return value

    def listed(self, key: str) -> list[str]:
        """Names of a list, or of text with commas; a contradiction is recorded for other values."""
        value = self[key]
        names = value.split(",") if isinstance(value, str) and value else list(value) if _is_list(value) else None
        if names is not None and all(isinstance(name, str) for name in names):
            return names
        if value not in (None, ""):
            self.reading.contradiction(self.key(key), "must be a list of names")
        return []

    def flag(self, key: str) -> bool:
        """True if a flag is on; a contradiction is recorded for values that are not boolean."""
        value = self[key]
        if not isinstance(value, bool | None):
            self.reading.contradiction(self.key(key), "must be true or false")
        return value is True

    def refuse(self, key: str, rule: str, fix: str = "") -> None:
        """Refuse a setting; see ``Reading.refuse``."""
        self.reading.refuse(self.key(key), rule, fix)

    def contradiction(self, key: str, rule: str, fix: str = "") -> None:
        """Record a contradiction; see ``Reading.contradiction``."""
        self.reading.contradiction(self.key(key), rule, fix)

    def not_modeled(self, key: str, why: str) -> None:
        """Note what is left out; a setting that the file does not have is noted under its canonical key."""
        if key not in self.names:
            self.reading.settings[key] = Setting(key, self[key])
        self.reading.not_modeled(self.key(key), why)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
