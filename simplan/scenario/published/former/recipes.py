"""Settings that the scripts behind published tables have and the tables do not print.

``catalog/recipes`` has those of Megatron Bridge and NeMo; a file of runs may add more (``recipes:``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from simplan.document import parse_yaml
from simplan.problems import parse_model
from simplan.scenario.published.former.schema import Conditions, FormerFile, FormerRun, Framework, Recipe

Recipes = Mapping[Framework, tuple[Recipe, ...]]
"""Recipes by framework, in order; the last recipe that sets a field wins."""

_RELEASE = re.compile(r"(?<![0-9.])(2[0-9]\.[01][0-9])\b")


@cache
def shipped_recipes() -> Recipes:
    """Recipes of all files in ``catalog/recipes``."""
    by_framework: dict[Framework, tuple[Recipe, ...]] = defaultdict(tuple)
    folder = resources.files("simplan.scenario.published.former").joinpath("catalog", "recipes")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        document = parse_yaml(file.read_text(encoding="utf-8"), file.name)
        read = parse_model(FormerFile, document.data, document.lines, file.name)
        for framework, recipes in read.recipes.items():
            by_framework[framework] += recipes
    return dict(by_framework)


def settings_of(run: FormerRun, recipes: Recipes) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings of a run by the shipped recipes, then by its ``own`` file's, and the source of each."""
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    framework = run.software.framework
    for recipe in (*shipped_recipes().get(framework, ()), *recipes.get(framework, ())):
        if recipe.where and not any(_holds(conditions, run) for conditions in recipe.where):
            continue
        for name, value in recipe.sets.model_dump(exclude_none=True, exclude_defaults=True).items():
            settings[name] = settings.get("states", {}) | value if name == "states" else value
            sources[name] = recipe.source
    return settings, sources


def _holds(conditions: Conditions, run: FormerRun) -> bool:
    """True if a run meets all conditions; a run without a release is older than all releases."""
    match = _RELEASE.search(run.software.version or "")
    release = "" if match is None else match[1]
    moe = run.model.moe or {}
    sizes = {"num_experts": moe.get("num_experts"), "top_k": moe.get("top_k"), "hidden_size": run.model.hidden_size}
    values = {
        "tasks": run.task,
        "models": run.model.name,
        "devices": run.cluster.device,
        "precisions": run.plan.precision,
        "num_devices": run.cluster.num_devices,
        "zero_stages": run.plan.zero_stage,
        "ep": run.plan.ep,
        "num_stages": run.plan.pp * run.plan.virtual_stages,
        "experts": sizes,
    }
    allowed = conditions.model_dump(exclude={"since", "before"}, exclude_none=True)
    return conditions.since <= release < conditions.before and all(
        values[name] in choices for name, choices in allowed.items() if choices
    )
