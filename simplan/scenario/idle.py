"""What a scenario sets and what could change nothing in it: refused, for whoever wrote it expects that it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplan.model.model import ModelSpec
from simplan.scenario.collecting import Sections
from simplan.software.software import SoftwareSpec

__all__ = ["refuse_idle_options"]

_OF_EXPERTS = ("expert_dispatch", "expert_overlap", "fused_experts")


def refuse_idle_options(
    sections: Sections, data: Mapping[str, Any], model: ModelSpec, software: SoftwareSpec, profile: SoftwareSpec
) -> None:
    """Keeps a problem for each.

    Args:
        sections: Of the file.
        data: The file.
        model, software: As they were read.
        profile: The software without its options.
    """
    for option in _OF_EXPERTS:
        value = getattr(software, option)
        if not model.num_experts and value != getattr(profile, option):
            rule = f"is for models with experts, and family {model.family} has none"
            sections.refuse(("software", option), rule, value=value, fix="remove it")
    written, width = data.get("model"), model.moe_intermediate_size
    if not isinstance(written, dict) or "intermediate_size" not in written:
        return
    if model.num_experts and not model.num_dense_layers and model.intermediate_size != width:
        rule = f"is the width of leading dense layers, and num_dense_layers = 0; experts have {width:,}"
        fix = "use moe_intermediate_size for experts, or remove it"
        sections.refuse(("model", "intermediate_size"), rule, value=model.intermediate_size, fix=fix)
