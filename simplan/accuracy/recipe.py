"""One recipe that tables of published runs name: for which runs, and what it sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from simplan.accuracy.schema import Framework, PublishedRun
from simplan.spec.expert_style import ExpertDispatch
from simplan.spec.low_precision import QuantizedWeights
from simplan.spec.plan import RecomputeModule

__all__ = ["Recipe"]

_Container = tuple[int, int]
"""Year and month of a release."""

_RELEASE = re.compile(r"(?<![0-9.])(2[0-9])\.([01][0-9])\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of some runs; an empty condition holds for all.

    Attributes:
        framework: Whose.
        since: The first release.
        before: The first release that no longer is of it; None for none.
        tasks, models, devices, precisions, num_devices, zero_stages, ep, num_stages: Of which runs.
        experts: Experts, those of a token, and hidden size of which models; names of such models are spelled in many
            ways.
        grad_dtype: In which precision gradients are reduced; None where it is not set.
        weights: How often weights in 8 bits are quantized; None where it is not set.
        states: Bytes of optimizer states that differ, by their names in ``StateBytes``.
        offload_layers: How many blocks have their activations on the host; None where it is not set.
        lora_rank: Of adapters; None where it is not set.
        lora_targets: The matrices that have some; empty where that is not set.
        virtual_stages: Stages of a pipeline rank, of a table that has no column for them; None where it is not set.
        recompute_modules: Of which backward runs again what they made; None where it is not set.
        recompute_layers: How many blocks of every stage run again; None where it is not set.
        stage_layers: Layers of every stage; None where it is not set.
        mtp_num_layers: Layers for multi-token prediction; None where it is not set.
        expert_dispatch: How tokens come to their experts; None where it is not set.
        expert_overlap: They do beside another microbatch.
        fused_experts: Activations of experts are part of their products.
        fp8_dot_product_attention: The attention core is in 8 bits.
        source: Where this is said.
    """

    framework: Framework
    since: _Container = (0, 0)
    before: _Container | None = None
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    num_devices: tuple[int, ...] = ()
    zero_stages: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    num_stages: tuple[int, ...] = ()
    experts: tuple[tuple[int, int, int], ...] = ()
    grad_dtype: Literal["bf16"] | None = None
    weights: QuantizedWeights | None = None
    states: Mapping[str, int] = field(default_factory=dict)
    offload_layers: int | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    virtual_stages: int | None = None
    stage_layers: tuple[int, ...] | None = None
    mtp_num_layers: int | None = None
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    recompute_layers: int | None = None
    expert_dispatch: ExpertDispatch | None = None
    expert_overlap: bool = False
    fused_experts: bool = False
    fp8_dot_product_attention: bool = False
    source: str

    @property
    def settings(self) -> str:
        """What it sets, for people."""
        words = {
            "gradients reduced in bf16": self.grad_dtype is not None,
            "weights held in 8 bits": self.weights == "stored",
            **{f"{name} of {width} bytes a parameter": True for name, width in self.states.items()},
            f"activations of {self.offload_layers} blocks on the host": self.offload_layers is not None,
            f"adapters of rank {self.lora_rank}": self.lora_rank is not None,
            f"adapters of {', '.join(self.lora_targets)} alone": bool(self.lora_targets),
            f"{self.virtual_stages} stages a pipeline rank": self.virtual_stages is not None,
            f"backward runs again {', '.join(self.recompute_modules or ()) or 'nothing'}": self.recompute_modules
            is not None,
            f"backward runs the first {self.recompute_layers} blocks of each stage again": self.recompute_layers
            is not None,
            "layers of stages, the last of which has what is left": self.stage_layers is not None,
            f"{self.mtp_num_layers or 'no'} layer for multi-token prediction": self.mtp_num_layers is not None,
            f"tokens brought to experts by {self.expert_dispatch}": self.expert_dispatch is not None,
            "exchanges for experts beside another microbatch": self.expert_overlap,
            "activations of experts in their products": self.fused_experts,
            "attention in 8 bits": self.fp8_dot_product_attention,
        }
        return ", ".join(word for word, holds in words.items() if holds)

    def is_for(self, run: PublishedRun) -> bool:
        """Whether a run is one of its."""
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
            run.software.framework == self.framework
            and _release(run) >= self.since
            and (self.before is None or _release(run) < self.before)
            and all(value in allowed for allowed, value in named if allowed)
        )


def _experts(run: PublishedRun) -> tuple[int, int, int] | None:
    """Experts, those of a token, hidden size."""
    moe = run.model.moe
    return None if moe is None else (moe.num_experts, moe.top_k, run.model.hidden_size)


def _release(run: PublishedRun) -> _Container:
    """Of its container; runs without one are older than all recipes that begin with one."""
    found = _RELEASE.search(run.software.version or "")
    return (0, 0) if found is None else (int(found[1]), int(found[2]))
