"""Software profile of each framework and version, and meaning of its printed figures: ``catalog/frameworks.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from simplan.accuracy.schema import Framework, RunPlan, RunSoftware
from simplan.base import Count, Natural, Spec
from simplan.document import parse_yaml
from simplan.prediction import MemoryKind
from simplan.problems import parse_model

_FILE = "frameworks.yaml"
_Year = Natural


class FrameworkDefaults(Spec):
    """Framework properties that a published run does not print.

    Attributes:
        profiles: Name of the software profile by the first year it applies to, oldest first.
        submissions: Profiles by a word of the version, which go before the year.
        cp_comm: Communication of context-parallel attention.
        fp8_recipe: Default FP8 scaling.
        prints: Kind of a memory peak that the source labels only "GB".
        printed_gb_bytes: Bytes of such a "GB".
        whole_experts_since: First year in which tensor-parallel ranks hold unsharded experts and route their own tokens
            (etp = 1). Before, or if None, they shard every expert.
        fused_attention: True if attention is one fused kernel by default; None for the profile's default.
        compiled: True if memory-bound operators are fused by default, as torch.compile does.
        keeps_gradients: True if gradients are buffers that live for the whole run, zeroed and reduced in place; else as
            the profile holds them.
        combining: Profiles for plans that combine tensor parallelism and pipelines, or shard only optimizer states, if
            that is a separate codebase; empty if not.
        is_known: True if the profiles model this framework; False if they are fallback profiles of another one.
    """

    profiles: dict[_Year, str]
    submissions: dict[str, str] = Field(default_factory=dict)
    cp_comm: Literal["ring", "all_gather", "a2a"] = "ring"
    fp8_recipe: Literal["tensorwise", "delayed"] = "tensorwise"
    prints: MemoryKind = "allocated"
    printed_gb_bytes: Count = 2**30
    whole_experts_since: _Year | None = None
    fused_attention: bool | None = None
    compiled: bool = False
    keeps_gradients: bool = False
    combining: dict[_Year, str] = Field(default_factory=dict)
    is_known: bool = True


class _FrameworkFile(Spec):
    meta: dict[str, Any]
    frameworks: dict[Framework, FrameworkDefaults]


@cache
def framework_defaults() -> Mapping[Framework, FrameworkDefaults]:
    """Properties of all frameworks."""
    text = resources.files("simplan.accuracy").joinpath("catalog", _FILE).read_text(encoding="utf-8")
    document = parse_yaml(text, _FILE)
    return parse_model(_FrameworkFile, document.data, document.lines, _FILE).frameworks


_YEAR = re.compile(r"\b(?:19|20)[0-9]{2}\b")
_YEAR_AND_MONTH = re.compile(r"(?<![0-9.])(2[0-9])\.(?:0[1-9]|1[0-2])(?![0-9])")


def profile_name(software: RunSoftware, plan: RunPlan) -> str:
    """Name of the software profile of a run.

    A version without a year, or year and month (23.08), counts as recent. If attention is not fused, it counts as 2021.
    """
    framework, year = framework_defaults()[software.framework], year_of(software)
    for word, name in framework.submissions.items():
        if word in (software.version or ""):
            return name
    combines = (plan.tp > 1 and plan.pp > 1) or plan.zero_stage == 1
    profiles = framework.combining if framework.combining and combines else framework.profiles
    return [name for first, name in profiles.items() if first <= year][-1]


def splits_experts(software: RunSoftware) -> bool:
    """True if tensor-parallel ranks shard every expert (etp = tp); False for unsharded experts (etp = 1)."""
    since = framework_defaults()[software.framework].whole_experts_since
    return since is None or year_of(software) < since


def year_of(software: RunSoftware) -> int:
    """Year of the version; 9999 without one, 2021 if attention is not fused."""
    version = software.version or ""
    years = _YEAR.findall(version) or [f"20{year}" for year in _YEAR_AND_MONTH.findall(version)]
    return int(years[-1]) if years else 2021 if software.flash_attention is False else 9999
