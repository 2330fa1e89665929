"""Recipes of published runs, and their effect on the software profile.

Tables of a framework's own runs name the scripts that produced them. Settings of these scripts for a run count as
published. Other settings are the framework's defaults, from its software profile. Recipes are stored in
``catalog/recipes`` next to this module; a file of runs may add more (``recipes:``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, reduce
from importlib import resources

from simplan.accuracy.recipe import NO_RECIPES, Recipe, RecipeFile, Recipes, Settings
from simplan.accuracy.schema import Framework, PublishedRun
from simplan.document import parse_yaml
from simplan.problems import parse_model
from simplan.software.software import SoftwareSpec

__all__ = ["parse_recipes", "recipes_of", "settings_of", "shipped_recipes", "with_settings"]


def parse_recipes(text: str, name: str) -> Recipes:
    """Parse a file of recipes from text.

    Args:
        text: YAML.
        name: Name for errors.

    Raises:
        SpecError: The text is not YAML, or violates the schema.
    """
    document = parse_yaml(text, name)
    return parse_model(RecipeFile, document.data, document.lines, name).recipes


@cache
def shipped_recipes() -> Recipes:
    """Recipes of all files in ``catalog/recipes``."""
    found: dict[Framework, tuple[Recipe, ...]] = defaultdict(tuple)
    folder = resources.files("simplan.accuracy").joinpath("catalog", "recipes")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        for framework, recipes in parse_recipes(file.read_text(encoding="utf-8"), file.name).items():
            found[framework] += recipes
    return dict(found)


def recipes_of(run: PublishedRun, own: Recipes = NO_RECIPES) -> tuple[Recipe, ...]:
    """Recipes that apply to a run, in order.

    Args:
        run: Published run.
        own: Recipes in the file of the run, applied after the shipped ones.
    """
    framework = run.software.framework
    listed = (*shipped_recipes().get(framework, ()), *own.get(framework, ()))
    return tuple(recipe for recipe in listed if recipe.is_for(run))


def settings_of(recipes: Sequence[Recipe]) -> Settings:
    """Combined settings of recipes; the last recipe that sets a field wins."""
    return reduce(Settings.updated, (recipe.sets for recipe in recipes), Settings())


def with_settings(software: SoftwareSpec, settings: Settings) -> SoftwareSpec:
    """Software profile with the settings of recipes."""
    names = ("expert_dispatch", "expert_overlap", "fused_experts", "fp8_dot_product_attention")
    update = settings.given(*names)
    if settings.weights is not None and (low := software.low_precision.get("fp8")) is not None:
        update["low_precision"] = software.low_precision | {"fp8": low.model_copy(update=settings.given("weights"))}
    if settings.states:
        update |= _with_states(software, settings)
    return software.model_copy(update=update)


def _with_states(software: SoftwareSpec, settings: Settings) -> dict[str, object]:
    """Profile fields with the changed optimizer states of mixed precision."""
    return {
        kinds: given | {"bf16": given["bf16"].model_copy(update=dict(settings.states))}
        for kinds in ("state_bytes", "lora_state_bytes")
        if "bf16" in (given := getattr(software, kinds))
    }
