"""Frameworks of the former schema: profile by year, and defaults that its runs do not print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from pydantic import Field

from simplan.base import Natural, Spec
from simplan.document import parse_yaml
from simplan.prediction import MemoryKind
from simplan.problems import parse_model
from simplan.scenario.published.former.schema import FormerRun, FormerSoftware, Framework

_FILE = "frameworks.yaml"
_YEAR = re.compile(r"\b(?:19|20)[0-9]{2}\b")
_YEAR_AND_MONTH = re.compile(r"(?<![0-9.])(2[0-9])\.(?:0[1-9]|1[0-2])(?![0-9])")


class FrameworkDefaults(Spec):
    """Properties of a framework that its published runs do not print.

    Attributes:
        profiles: Name of the software profile by the first year it applies to, oldest first.
        submissions: Profiles by a word of the version, which go before the year.
        cp_comm: Communication of context-parallel attention.
        fp8_recipe: Default FP8 scaling.
        prints: Kind of a memory peak that the source labels only "GB".
        prints_gb: True if such a "GB" is 1e9 bytes, else a GiB.
        whole_experts_since: First year in which tensor-parallel ranks hold unsharded experts and route their own tokens
            (etp = 1). Before, or if None, they shard every expert.
        combining: Profiles for plans that combine tensor parallelism and pipelines, or shard only optimizer states, if
            that is a separate codebase; empty if not.
        software: Fields of the profile that differ.
        is_known: True if the profiles model this framework; False if they are fallback profiles of another one.
    """

    profiles: dict[Natural, str]
    submissions: dict[str, str] = Field(default_factory=dict)
    cp_comm: str = "ring"
    fp8_recipe: str = "tensorwise"
    prints: MemoryKind = "allocated"
    prints_gb: bool = False
    whole_experts_since: Natural | None = None
    combining: dict[Natural, str] = Field(default_factory=dict)
    software: dict[str, Any] = Field(default_factory=dict)
    is_known: bool = True


class _FrameworkFile(Spec):
    meta: dict[str, Any]
    frameworks: dict[Framework, FrameworkDefaults]


@cache
def framework_defaults() -> Mapping[Framework, FrameworkDefaults]:
    """Properties of all frameworks."""
    text = resources.files("simplan.scenario.published.former").joinpath("catalog", _FILE).read_text(encoding="utf-8")
    document = parse_yaml(text, _FILE)
    return parse_model(_FrameworkFile, document.data, document.lines, _FILE).frameworks


def profile_name(run: FormerRun) -> str:
    """Name of the software profile of a run."""
    framework, plan, year = framework_defaults()[run.software.framework], run.plan, year_of(run.software)
    for word, name in framework.submissions.items():
        if word in (run.software.version or ""):
            return name
    combines = (plan.tp > 1 and plan.pp > 1) or plan.zero_stage == 1
    profiles = framework.combining if framework.combining and combines else framework.profiles
    return [name for first, name in profiles.items() if first <= year][-1]


def year_of(software: FormerSoftware) -> int:
    """Year of the version, also of a release as 23.08; without one 9999, or 2021 if attention is not fused."""
    version = software.version or ""
    years = _YEAR.findall(version) or [f"20{year}" for year in _YEAR_AND_MONTH.findall(version)]
    return int(years[-1]) if years else 2021 if software.flash_attention is False else 9999
