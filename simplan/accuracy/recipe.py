"""A recipe: settings that published runs of some kinds were started with beyond what their tables print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from simplan.accuracy.schema import Framework, PublishedRun, Task
from simplan.base import Count, Spec
from simplan.model.implementations.expert_dispatch import ExpertDispatch
from simplan.model.low_precision import QuantizedWeights
from simplan.plan.plan import RecomputeModule
from simplan.training.training import Precision

__all__ = ["NO_RECIPES", "Experts", "Recipe", "RecipeFile", "Recipes", "Settings", "Where"]

_RELEASE = re.compile(r"(?<![0-9.])(2[0-9]\.[01][0-9])\b")
_Zero = Annotated[int, Field(ge=0)]


def _is_release(text: str) -> str:
    if not _RELEASE.fullmatch(text):
        raise ValueError('must be the year and month of a release, such as "26.04"')
    return text


Release = Annotated[str, AfterValidator(_is_release)]
"""Year and month of a container: releases compare as their texts do."""


class Experts(Spec):
    """Sizes that tell models with experts apart, since names of such models are spelled in many ways."""

    num_experts: Count
    top_k: Count
    hidden_size: Count


class Where(Spec):
    """One kind of runs; a condition that is not given holds for all.

    Attributes:
        since: The first release; runs without a release are older than all.
        before: The first release that no longer is of this kind.
        tasks, models, devices, precisions, num_devices, zero_stages, ep: The values, one of which a run has.
        num_stages: The same of all stages of its pipeline.
        experts: The same of its experts.
    """

    since: Release | None = None
    before: Release | None = None
    tasks: tuple[Task, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    num_devices: tuple[Count, ...] = ()
    zero_stages: tuple[_Zero, ...] = ()
    ep: tuple[Count, ...] = ()
    num_stages: tuple[Count, ...] = ()
    experts: tuple[Experts, ...] = ()

    def holds_for(self, run: PublishedRun) -> bool:
        """Whether a run is of this kind."""
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
    """What a recipe sets; None, or no states, where it leaves something as it is.

    Attributes:
        grad_dtype: In which precision gradients are reduced.
        weights: How often weights in 8 bits are quantized.
        states: Bytes of optimizer states that differ, by their names in ``StateBytes``.
        offload_layers: How many blocks have their activations on the host.
        lora_rank: Of adapters.
        lora_targets: The matrices that have some.
        virtual_stages: Stages of a pipeline rank, of a table that has no column for them.
        recompute_modules: Of which backward runs again what they made.
        recompute_layers: How many blocks of every stage run again.
        stage_layers: Layers of every stage, embedding and head not counted.
        mtp_num_layers: Layers for multi-token prediction.
        expert_dispatch: How tokens come to their experts.
        expert_overlap: They do beside another microbatch.
        fused_experts: Activations of experts are part of their products.
        fp8_dot_product_attention: The attention core is in 8 bits.
    """

    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    weights: QuantizedWeights | None = None
    states: dict[Literal["master", "moment"], _Zero] = Field(default_factory=dict)
    offload_layers: Count | None = None
    lora_rank: Count | None = None
    lora_targets: tuple[str, ...] | None = None
    virtual_stages: Count | None = None
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    recompute_layers: Count | None = None
    stage_layers: tuple[_Zero, ...] | None = None
    mtp_num_layers: _Zero | None = None
    expert_dispatch: ExpertDispatch | None = None
    expert_overlap: bool | None = None
    fused_experts: bool | None = None
    fp8_dot_product_attention: bool | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Those of some fields that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def updated(self, later: Settings) -> Settings:
        """These, with what later ones set; optimizer states one by one."""
        changes = later.given(*(name for name in Settings.model_fields if name != "states"))
        return self.model_copy(update=changes | {"states": self.states | later.states})

    def words(self) -> Iterator[str]:
        """What is set, for people."""
        if self.grad_dtype is not None:
            yield f"gradients reduced in {self.grad_dtype}"
        if self.weights is not None:
            yield "weights held in 8 bits" if self.weights == "stored" else f"weights quantized every {self.weights}"
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
            yield f"backward runs again {', '.join(self.recompute_modules) or 'nothing'}"
        if self.recompute_layers is not None:
            yield f"backward runs the first {self.recompute_layers} blocks of each stage again"
        if self.stage_layers is not None:
            yield "layers of stages, the last of which has what is left"
        if self.mtp_num_layers is not None:
            yield f"{self.mtp_num_layers or 'no'} layer for multi-token prediction"
        if self.expert_dispatch is not None:
            yield f"tokens brought to experts by {self.expert_dispatch}"
        yield from _switched("exchanges for experts beside another microbatch", self.expert_overlap)
        yield from _switched("activations of experts in their products", self.fused_experts)
        yield from _switched("attention in 8 bits", self.fp8_dot_product_attention)


class Recipe(Spec):
    """Settings of some runs of a framework.

    Attributes:
        where: The kinds of runs it is for, one of which is enough; none for all runs of the framework.
        sets: What it sets.
        source: Where this is said.
    """

    where: tuple[Where, ...] = ()
    sets: Settings
    source: Annotated[str, Field(min_length=1)]

    def is_for(self, run: PublishedRun) -> bool:
        """Whether a run of its framework is one of its."""
        return not self.where or any(kind.holds_for(run) for kind in self.where)


Recipes = Mapping[Framework, tuple[Recipe, ...]]
"""By framework, in order: what several set is the last one's."""
NO_RECIPES: Recipes = MappingProxyType({})


class RecipeFile(Spec):
    """A file of recipes.

    Attributes:
        meta: What its author wants to say, or to repeat by aliases.
        recipes: By framework, in order.
    """

    meta: dict[str, Any] = Field(default_factory=dict)
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
    """Of its container; empty, which comes before all others, where its version names none."""
    found = _RELEASE.search(run.software.version or "")
    return "" if found is None else found[1]
