"""Configurations of training frameworks as sections of a scenario, and jobs as their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from simplan.document import parse_yaml


@cache
def tables(framework: str) -> Mapping[str, Any]:
    """Content of ``tables/FRAMEWORK.yaml``: what the options of a framework do to a step, and what names stand for."""
    file = resources.files(__name__).joinpath("tables", f"{framework}.yaml")
    data: Mapping[str, Any] = parse_yaml(file.read_text(encoding="utf-8"), file.name).data
    return data


@cache
def names_without_effect(reader: str) -> frozenset[str]:
    """Whole names of settings that change neither time nor memory, of one reader in ``tables/no_effect.yaml``."""
    return frozenset(tables("no_effect")[reader].split())
