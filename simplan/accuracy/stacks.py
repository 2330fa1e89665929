"""Which software profile stands for a framework and version, and what its figures mean: ``catalog/stacks.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import Field

from simplan.accuracy.schema import Framework, MemoryKind, RunPlan, RunSoftware
from simplan.base import Count, Spec
from simplan.document import parse_yaml
from simplan.problems import parse_model

__all__ = ["Stack", "profile_name", "splits_experts", "stacks"]

_FILE = "stacks.yaml"
_Year = Annotated[int, Field(ge=0)]


class Stack(Spec):
    """What a framework brings that a published run does not print.

    Attributes:
        profiles: Name of the software profile, by the first year that it holds for, the oldest first.
        cp_comm: How its context parallelism exchanges keys and values.
        fp8_recipe: How it scales fp8 unless told otherwise.
        prints: What a peak is a figure of where the source prints "GB" only.
        printed_gb_bytes: How many bytes such a GB has.
        whole_experts_since: The first year in which tensor-parallel ranks have whole experts and route their own
            tokens (etp = 1); before, or where there is none, they split every expert.
        fused_attention: Whether attention is one kernel where a run does not say; None for as in the profile.
        combining: Profiles of plans with tensor parallelism and pipelines, or with sharded optimizer states alone,
            where that is another lineage of software than the rest.
        is_known: Its profiles are of itself; else they stand in for it, and what was fitted to them is not of it.
    """

    profiles: dict[_Year, str]
    cp_comm: Literal["ring", "all_gather", "a2a"] = "ring"
    fp8_recipe: Literal["tensorwise", "delayed"] = "tensorwise"
    prints: MemoryKind = "allocated"
    printed_gb_bytes: Count = 2**30
    whole_experts_since: _Year | None = None
    fused_attention: bool | None = None
    combining: dict[_Year, str] = Field(default_factory=dict)
    is_known: bool = True


class _StackFile(Spec):
    meta: dict[str, Any]
    stacks: dict[Framework, Stack]


@cache
def stacks() -> Mapping[Framework, Stack]:
    """All of them, by framework."""
    text = resources.files("simplan.accuracy").joinpath("catalog", _FILE).read_text(encoding="utf-8")
    document = parse_yaml(text, _FILE)
    return parse_model(_StackFile, document.data, document.lines, _FILE).stacks


_YEAR = re.compile(r"\b(?:19|20)[0-9]{2}\b")
_YEAR_AND_MONTH = re.compile(r"(?<![0-9.])(2[0-9])\.(?:0[1-9]|1[0-2])(?![0-9])")


def profile_name(software: RunSoftware, plan: RunPlan) -> str:
    """The name of the software profile.

    A version without a year, or year and month (23.08), is taken for a recent one, unless attention is not fused, which
    it was before 2022.
    """
    stack, year = stacks()[software.framework], _year(software)
    combines = (plan.tp > 1 and plan.pp > 1) or plan.zero_stage == 1
    profiles = stack.combining if stack.combining and combines else stack.profiles
    return [name for first, name in profiles.items() if first <= year][-1]


def splits_experts(software: RunSoftware) -> bool:
    """Whether tensor-parallel ranks split every expert (etp = tp); else each has whole ones (etp = 1)."""
    since = stacks()[software.framework].whole_experts_since
    return since is None or _year(software) < since


def _year(software: RunSoftware) -> int:
    version = software.version or ""
    years = _YEAR.findall(version) or [f"20{year}" for year in _YEAR_AND_MONTH.findall(version)]
    return int(years[-1]) if years else 2021 if software.flash_attention is False else 9999
