"""One of Hugging Face's model types: what it calls the fields of a ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ModelType", "same_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """One value of ``model_type``.

    Attributes:
        family: Which family of models it is.
        keys: By field of ``ModelSpec``, the key of the config; dots lead into mappings.
        optional: Fields that may be missing.
        neutral: Keys that change the model, and the values that leave it as simplan models it (absent and null
            always do).
        fixed: Fields that no key says.
        windows: ``sliding_window`` is that of all layers; else of some, where ``use_sliding_window`` is set.
        alternates: Of every second layer, from the first on, unless ``layer_types`` says of which.
        has_sequences: Sequences are as long as the user says.
        later_tokens: The key of layers for multi-token prediction, of types that have some.
        in_experts: Widths that the config counts in experts, each as wide as ``moe_intermediate_size``.
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
        """Value of a field of ``ModelSpec``; None where the config does not have it."""
        value = self.look_up(config, self.keys[name])
        return len(value) if name == "num_classes" and isinstance(value, Mapping) else value

    def look_up(self, config: Mapping[str, Any], key: str) -> Any:
        """Value of a key, perhaps inside of mappings."""
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def same_names(*names: str) -> dict[str, str]:
    """Keys that are called as the fields are."""
    return {name: name for name in names}
