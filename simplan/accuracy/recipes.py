"""What published runs were started with beyond what their tables print: settings of the recipes that the tables name.

A table of a framework's own runs says which scripts made it. What these set for just such a run is as good as printed;
what they leave open is the framework's own, which is in its software profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from simplan.accuracy.schema import Framework, PublishedRun
from simplan.spec.low_precision import QuantizedWeights
from simplan.spec.software import SoftwareSpec

__all__ = ["RECIPES", "Recipe", "recipes_of", "with_recipes"]

_Container = tuple[int, int]
"""Year and month of a release."""

_RELEASE = re.compile(r"(?<![0-9.])(2[0-9])\.([01][0-9])\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of some runs; an empty condition holds for all.

    Attributes:
        framework: Whose.
        since: The first release.
        tasks, models, devices, precisions, num_devices, zero_stages: Of which runs.
        grad_dtype: In which precision gradients are reduced; None where it is not set.
        weights: How often weights in 8 bits are quantized; None where it is not set.
        states: Bytes of optimizer states that differ, by their names in ``StateBytes``.
        offload_layers: How many blocks have their activations on the host; None where it is not set.
        lora_rank: Of adapters; None where it is not set.
        lora_targets: The matrices that have some; empty where that is not set.
        virtual_stages: Stages of a pipeline rank, of a table that has no column for them; None where it is not set.
        expandable_segments: The allocator makes its segments longer as it needs them, and so leaves no gaps.
        source: Where this is said.
    """

    framework: Framework
    since: _Container = (0, 0)
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    num_devices: tuple[int, ...] = ()
    zero_stages: tuple[int, ...] = ()
    grad_dtype: Literal["bf16"] | None = None
    weights: QuantizedWeights | None = None
    states: Mapping[str, int] = field(default_factory=dict)
    offload_layers: int | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    virtual_stages: int | None = None
    expandable_segments: bool = False
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
            "an allocator with expandable segments": self.expandable_segments,
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
        )
        return (
            run.software.framework == self.framework
            and _release(run) >= self.since
            and all(value in allowed for allowed, value in named if allowed)
        )


_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
_WHOLE_MASTER = {"master": 4}
_STORES = (
    "NVIDIA/NeMo at 8cfedd7, nemo/collections/nlp/models/language_modeling/megatron_base_model.py: the optimizer of "
    "such weights stores whole master copies (store_params)"
)
_LAUNCHER = "NVIDIA/NeMo-Framework-Launcher at 24.07"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        framework="megatron-bridge",
        grad_dtype="bf16",
        source=f'{_BRIDGE}: docs/performance-summary.md: "obtained using performance recipes" in scripts/performance, '
        "which set grad_reduce_in_fp32 = False (v0.1.0rc4 configs/llama3/*.yaml; v0.2.0 to v0.5.0 "
        "configs/**/*_llm_pretrain.py and *_llm_finetune.py; v0.6.0 src/megatron/bridge/perf_recipes/_common.py)",
    ),
    Recipe(
        framework="megatron-bridge",
        models=("llama3.1-405b",),
        devices=("gb200",),
        precisions=("fp8", "mxfp8"),
        tasks=("pretrain",),
        expandable_segments=True,
        source=f"{_BRIDGE}: scripts/performance/setup_experiment.py at v0.1.0rc4, perf_plugins.py at v0.2.0 to v0.4.0",
    ),
    Recipe(
        framework="megatron-bridge",
        since=(26, 4),
        models=("llama3.1-405b",),
        devices=("gb300",),
        precisions=("fp8", "mxfp8"),
        tasks=("pretrain",),
        expandable_segments=True,
        source=f"{_BRIDGE}: scripts/performance/perf_plugins.py at v0.4.0",
    ),
    Recipe(
        framework="megatron-bridge",
        since=(26, 6),
        expandable_segments=True,
        source=f"{_BRIDGE}: scripts/performance/utils/executors.py at v0.5.0, PERF_ENV_VARS",
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            tasks=("pretrain",),
            models=("llama3-70b",),
            devices=(device,),
            precisions=("fp8",),
            zero_stages=(3,),
            offload_layers=layers,
            source=f"{_BRIDGE}: cpu_offloading_num_layers with use_megatron_fsdp in scripts/performance/configs/llama3/"
            "llama3_70b_llm_pretrain.yaml at v0.1.0rc4, workload_base_configs.py at v0.2.0 and "
            "configs/llama/llama3_workload_base_configs.py at v0.3.0 to v0.5.0",
        )
        for device, layers in (("gb200", 40), ("gb300", 20))
    ),
    Recipe(
        framework="megatron-bridge",
        tasks=("lora",),
        lora_targets=("qkv",),
        source=f'{_BRIDGE}: peft.target_modules = ["linear_qkv"] in scripts/performance/configs/llama/'
        "llama3_llm_finetune.py at v0.3.0 and v0.4.0, and in src/megatron/bridge/perf_recipes/llama at 067f987",
    ),
    Recipe(
        framework="megatron-bridge",
        tasks=("lora",),
        models=("llama3-70b",),
        lora_rank=16,
        source=f"{_BRIDGE} at 067f987: src/megatron/bridge/recipes/llama/h100/llama3.py, llama3_70b_peft_config",
    ),
    Recipe(
        framework="nemo",
        tasks=("lora",),
        lora_rank=32,
        lora_targets=("qkv",),
        source=f"{_LAUNCHER}: launcher_scripts/conf/peft/llama/sft.yaml: lora_tuning.adapter_dim = 32 and no "
        "target_modules, for which NVIDIA/NeMo, nemo/collections/nlp/parts/peft_config.py has attention_qkv",
    ),
    Recipe(
        framework="nemo",
        since=(24, 7),
        tasks=("pretrain", "sft"),
        grad_dtype="bf16",
        source=f"{_LAUNCHER}: examples/training/*/h100/*.sh set grad_sync_dtype=bf16, as does "
        "launcher_scripts/conf/peft/llama/sft.yaml",
    ),
    Recipe(
        framework="nemo",
        since=(24, 7),
        tasks=("sft", "lora"),
        precisions=("fp8",),
        weights="stored",
        states=_WHOLE_MASTER,
        source=f"{_LAUNCHER}: examples/peft/*/h100/*.sh set fp8_params=true, which examples/training do not; {_STORES}",
    ),
    Recipe(
        framework="nemo",
        since=(24, 7),
        tasks=("sft",),
        states={"master": 2, "moment": 2},
        source=f"{_LAUNCHER}: launcher_scripts/conf/peft/llama/sft.yaml: optim.dtype = bf16",
    ),
    *(
        Recipe(
            framework="nemo",
            since=(24, 7),
            tasks=("sft",),
            models=(model,),
            num_devices=(devices,),
            virtual_stages=stages,
            source=f"{_LAUNCHER}: examples/peft/llama/h100/{script}.sh set "
            f"virtual_pipeline_model_parallel_size={stages}; the tables of fine-tuning (NVIDIA/NeMo at 070a0bb, "
            "docs/source/performance/performance_summary.md) have no column for it",
        )
        for model, devices, stages, script in (("llama2-13b", 8, 10, "13b_1node"), ("llama2-70b", 16, 20, "70b_2node"))
    ),
    Recipe(
        framework="nemo",
        since=(24, 7),
        tasks=("pretrain",),
        models=("gpt3-175b",),
        num_devices=(512,),
        precisions=("fp8",),
        weights="stored",
        states=_WHOLE_MASTER,
        source="this row is the submission to MLPerf: mlcommons/training_results_v4.0 at 62f111b, "
        "NVIDIA/benchmarks/gpt3/implementations/nemo/config_DGXH100_64x8x128x4x8_mbs2.sh; FP8_PARAMS=True in its "
        f"config_common.sh, read in the copy henrique/training_results_v4.0 at c7a8e8f; {_STORES}",
    ),
)
"""In order; what several set is the last one's."""


def recipes_of(run: PublishedRun) -> tuple[Recipe, ...]:
    """Those that a run was started with."""
    return tuple(recipe for recipe in RECIPES if recipe.is_for(run))


def with_recipes(software: SoftwareSpec, run: PublishedRun) -> SoftwareSpec:
    """A software profile as a run's recipes set it."""
    for recipe in recipes_of(run):
        if recipe.expandable_segments:
            software = software.model_copy(update={"reserve_fraction": 0.0})
        if recipe.weights is not None and (low := software.low_precision.get("fp8")) is not None:
            changed = software.low_precision | {"fp8": low.model_copy(update={"weights": recipe.weights})}
            software = software.model_copy(update={"low_precision": changed})
        if recipe.states:
            software = _with_states(software, recipe.states)
    return software


def _with_states(software: SoftwareSpec, states: Mapping[str, int]) -> SoftwareSpec:
    """With other optimizer states in mixed precision."""
    update = {
        kinds: given | {"bf16": given["bf16"].model_copy(update=dict(states))}
        for kinds in ("state_bytes", "lora_state_bytes")
        if "bf16" in (given := getattr(software, kinds))
    }
    return software.model_copy(update=update)


def _release(run: PublishedRun) -> _Container:
    """Of its container; runs without one are older than all recipes that begin with one."""
    found = _RELEASE.search(run.software.version or "")
    return (0, 0) if found is None else (int(found[1]), int(found[2]))
