"""Models, flavors and configurations that torchtitan has names for: ``facts.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from simplan import catalog
from simplan.document import parse_yaml

_FILE = "facts.yaml"
_BASE = "<<"
_ATTENTION = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Endings of flavors that name an attention kernel."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Content of ``facts.yaml``.

    Attributes:
        models: Model -> flavor -> keys of the section ``model``.
        of_2024: Flavors with another shape until the end of 2024.
        other_models: Model that simplan does not have -> description.
        other_configurations: Configuration of a model that simplan has -> what it has that simplan does not have.
        configurations: Module -> configuration -> settings that are not the default.
    """

    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    of_2024: Mapping[str, Mapping[str, Mapping[str, Any]]]
    other_models: Mapping[str, str]
    other_configurations: Mapping[str, str]
    configurations: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def model(self, name: str, flavor: str, *, of_2024: bool = False) -> Mapping[str, Any] | None:
        """Keys of the section ``model`` for a model and flavor; None if torchtitan has no such flavor."""
        known = {**self.models.get(name, {}), **(self.of_2024.get(name, {}) if of_2024 else {})}
        ending = next((each for each in _ATTENTION if flavor.endswith(each)), "")
        return known.get(flavor.removesuffix(ending))


@cache
def facts() -> Facts:
    """The facts, read once."""
    text = resources.files("simplan.interop.frameworks.torchtitan").joinpath(_FILE).read_text(encoding="utf-8")
    data = parse_yaml(text, _FILE).data
    configurations = {
        module: {name: _with_base(settings) for name, settings in named.items()}
        for module, named in data["configurations"].items()
    }
    return Facts(**{**data, "configurations": configurations})


def num_layers(model: Mapping[str, Any]) -> int:
    """Blocks of a model of ``Facts.model``."""
    fields = catalog.model_fields(model["preset"]) if "preset" in model else model
    return int(fields["num_hidden_layers"])


def _with_base(settings: Mapping[str, Any]) -> dict[str, Any]:
    base = settings.get(_BASE)
    own = {key: value for key, value in settings.items() if key != _BASE}
    return {**(_with_base(base) if base else {}), **own}
