"""Hugging Face model types: keys of their config for the fields of ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ModelType", "same_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Mapping of one ``model_type`` to ``ModelSpec``.

    Attributes:
        family: Model family of simplan.
        keys: By field of ``ModelSpec``, the key of the config; dots select nested keys.
        optional: Fields that may be missing.
        neutral: Keys that change the model, with the values that leave it as modeled; absent and null always do.
        fixed: Fields of ``ModelSpec`` that no key gives, with their values.
        windows: True if ``sliding_window`` applies to all layers; False if ``use_sliding_window`` enables it for some.
        alternates: True if ``sliding_window`` applies to every second layer, from the first, unless ``layer_types`` is
            set.
        has_sequences: True if the user gives ``seq_len``; False for image models.
        later_tokens: Key with the number of multi-token prediction layers; None if the type has none.
        in_experts: Fields that the config counts in experts of width ``moe_intermediate_size``.
    """

    family: str
    keys: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: bool = False
    alternates: bool = False
    has_sequences: bool = True
    later_tokens: str | None = None
    in_experts: frozenset[str] = frozenset()

    def read(self, config: Mapping[str, Any], name: str) -> Any:
        """Value of a field of ``ModelSpec``; None if the config lacks it."""
        value = self.look_up(config, self.keys[name])
        return len(value) if name == "num_classes" and isinstance(value, Mapping) else value

    def look_up(self, config: Mapping[str, Any], key: str) -> Any:
        """Value of a dotted key; None if the config lacks it."""
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def same_names(*names: str) -> dict[str, str]:
    """Keys with the same names as the fields."""
    return {name: name for name in names}
