"""Recipes: settings of published runs beyond the fields that their tables print, and their effect on a profile.

Tables of a framework's own runs name the scripts that produced them. Settings of these scripts for a run count as
published. Other settings are the framework's defaults, from its software profile. Recipes are stored in
``catalog/recipes`` next to this module; a file of runs may add more (``recipes:``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from simplan.accuracy.schema import Framework, PublishedRun, Task, Zero
from simplan.base import Count, Spec
from simplan.document import parse_yaml
from simplan.model.implementations.expert_dispatch import ExpertDispatch
from simplan.model.low_precision import QuantizedWeights
from simplan.plan.plan import RecomputeModule
from simplan.problems import parse_model
from simplan.software.software import SoftwareSpec
from simplan.training import Precision

_RELEASE = re.compile(r"(?<![0-9.])(2[0-9]\.[01][0-9])\b")


def _is_release(text: str) -> str:
    if not _RELEASE.fullmatch(text):
        raise ValueError('must be the year and month of a release, such as "26.04"')
    return text


Release = Annotated[str, AfterValidator(_is_release)]
"""Year and month of a container; releases compare as text."""


class Experts(Spec):
    """Sizes that identify a mixture of experts, since the names of models vary in spelling."""

    num_experts: Count
    top_k: Count
    hidden_size: Count


class RunConditions(Spec):
    """Conditions that select runs; a missing condition holds for all runs.

    Attributes:
        since: First release; runs without a release count as older than all releases.
        before: First release that is excluded.
        tasks, models, devices, precisions, num_devices, zero_stages, ep: Allowed values; empty for all.
        num_stages: Allowed numbers of pipeline stages in total; empty for all.
        experts: Allowed sizes of experts; empty for all.
    """

    since: Release | None = None
    before: Release | None = None
    tasks: tuple[Task, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    num_devices: tuple[Count, ...] = ()
    zero_stages: tuple[Zero, ...] = ()
    ep: tuple[Count, ...] = ()
    num_stages: tuple[Count, ...] = ()
    experts: tuple[Experts, ...] = ()

    def holds_for(self, run: PublishedRun) -> bool:
        """True if a run meets all conditions."""
        release = _release(run)
        named: tuple[tuple[tuple[object, ...], object], ...] = (
            (self.tasks, run.task),
            (self.models, run.model.name),
            (self.devices, run.cluster.device),
            (self.precisions, run.plan.precision),
            (self.num_devices, run.cluster.num_devices),
            (self.zero_stages, run.plan.zero_stage),
            (self.ep, run.plan.ep),
            (self.num_stages, run.plan.pp * run.plan.virtual_stages),
            (self.experts, _experts(run)),
        )
        return (
            (self.since is None or release >= self.since)
            and (self.before is None or release < self.before)
            and all(value in allowed for allowed, value in named if allowed)
        )


class Settings(Spec):
    """Settings of a recipe; None, or no states, leaves a setting unchanged.

    Attributes:
        grad_dtype: Precision of gradient reductions.
        weights: Frequency of FP8 weight quantization.
        states: Bytes of optimizer states that differ, by field of ``StateBytes``.
        offload_layers: Number of blocks with activations offloaded to the host.
        lora_targets: Modules with LoRA adapters.
        virtual_stages: Stages per pipeline rank, for tables without such a column.
        recompute_modules: Modules that selective recomputation recomputes.
        recompute_layers: Number of recomputed blocks per stage.
        stage_layers: Layers per stage, without embedding and head.
        expert_overlap: True if expert dispatch overlaps another microbatch.
        fused_experts: True if the activations of experts are fused into their grouped GEMMs.
        fp8_dot_product_attention: True if the attention core runs in FP8.
    """

    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    weights: QuantizedWeights | None = None
    states: dict[Literal["master", "moment"], Zero] = Field(default_factory=dict)
    offload_layers: Count | None = None
    lora_rank: Count | None = None
    lora_targets: tuple[str, ...] | None = None
    virtual_stages: Count | None = None
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    recompute_layers: Count | None = None
    stage_layers: tuple[Zero, ...] | None = None
    mtp_num_layers: Zero | None = None
    expert_dispatch: ExpertDispatch | None = None
    expert_overlap: bool | None = None
    fused_experts: bool | None = None
    fp8_dot_product_attention: bool | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Values of the named fields that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def updated(self, later: Settings) -> Settings:
        """Copy with later settings applied; optimizer states are merged by name."""
        changes = later.given(*(name for name in Settings.model_fields if name != "states"))
        return self.model_copy(update=changes | {"states": self.states | later.states})

    def words(self) -> Iterator[str]:
        """Yield a description of each setting."""
        if self.grad_dtype is not None:
            yield f"gradients reduced in {self.grad_dtype}"
        if self.weights is not None:
            yield "FP8 weights" if self.weights == "stored" else f"weights quantized every {self.weights}"
        for name, width in self.states.items():
            yield f"{name} of {width} bytes a parameter"
        if self.offload_layers is not None:
            yield f"activations of {self.offload_layers} blocks on the host"
        if self.lora_rank is not None:
            yield f"adapters of rank {self.lora_rank}"
        if self.lora_targets is not None:
            yield f"adapters of {', '.join(self.lora_targets)} alone"
        if self.virtual_stages is not None:
            yield f"{self.virtual_stages} stages a pipeline rank"
        if self.recompute_modules is not None:
            yield f"recomputed modules: {', '.join(self.recompute_modules) or 'none'}"
        if self.recompute_layers is not None:
            yield f"the first {self.recompute_layers} blocks of each stage are recomputed"
        if self.stage_layers is not None:
            yield "layers of stages, the last of which has what is left"
        if self.mtp_num_layers is not None:
            yield f"{self.mtp_num_layers or 'no'} layer for multi-token prediction"
        if self.expert_dispatch is not None:
            yield f"tokens brought to experts by {self.expert_dispatch}"
        yield from _switched("expert dispatch overlapped with another microbatch", self.expert_overlap)
        yield from _switched("activations of experts fused into their GEMMs", self.fused_experts)
        yield from _switched("FP8 attention", self.fp8_dot_product_attention)


class Recipe(Spec):
    """Settings of some runs of a framework.

    Attributes:
        where: Alternative conditions on runs, of which one must hold; empty for all runs of the framework.
        source: Source of the settings.
    """

    where: tuple[RunConditions, ...] = ()
    sets: Settings
    source: Annotated[str, Field(min_length=1)]

    def is_for(self, run: PublishedRun) -> bool:
        """True if the recipe applies to a run of its framework."""
        return not self.where or any(kind.holds_for(run) for kind in self.where)


Recipes = Mapping[Framework, tuple[Recipe, ...]]
"""Recipes by framework, in order; the last recipe that sets a field wins."""
NO_RECIPES: Recipes = MappingProxyType({})


class _RecipeFile(Spec):
    meta: dict[str, Any] = Field(default_factory=dict)  # of the author, such as anchors for YAML aliases
    recipes: dict[Framework, tuple[Recipe, ...]]


def _switched(words: str, value: bool | None) -> Iterator[str]:
    if value is not None:
        yield words if value else f"no {words}"


def _experts(run: PublishedRun) -> Experts | None:
    moe = run.model.moe
    if moe is None:
        return None
    return Experts(num_experts=moe.num_experts, top_k=moe.top_k, hidden_size=run.model.hidden_size)


def _release(run: PublishedRun) -> str:
    """Release of a run's container; empty, which sorts first, if its version names none."""
    match = _RELEASE.search(run.software.version or "")
    return "" if match is None else match[1]


def parse_recipes(text: str, name: str) -> Recipes:
    """Parse a file of recipes from YAML text; ``name`` is for errors.

    Raises:
        SpecError: The text is not YAML, or violates the schema.
    """
    document = parse_yaml(text, name)
    return parse_model(_RecipeFile, document.data, document.lines, name).recipes


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
    """Recipes that apply to a run, in order: shipped ones, then those in the file of the run (``own``)."""
    framework = run.software.framework
    listed = (*shipped_recipes().get(framework, ()), *own.get(framework, ()))
    return tuple(recipe for recipe in listed if recipe.is_for(run))


def settings_of(recipes: Sequence[Recipe]) -> Settings:
    """Combined settings of recipes; the last recipe that sets a field wins."""
    return reduce(Settings.updated, (recipe.sets for recipe in recipes), Settings())


def with_settings(software: SoftwareSpec, settings: Settings) -> SoftwareSpec:
    """Software profile with the settings of recipes."""
    update = settings.given("expert_dispatch", "expert_overlap", "fused_experts", "fp8_dot_product_attention")
    if settings.weights is not None and (low := software.low_precision.get("fp8")) is not None:
        update["low_precision"] = software.low_precision | {"fp8": low.model_copy(update=settings.given("weights"))}
    for kinds in ("state_bytes", "lora_state_bytes") if settings.states else ():
        given = getattr(software, kinds)
        if "bf16" in given:
            update[kinds] = given | {"bf16": given["bf16"].model_copy(update=dict(settings.states))}
    return software.model_copy(update=update)
