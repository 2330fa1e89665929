"""What published runs were started with beyond what their tables print: settings of the recipes that the tables name.

A table of a framework's own runs says which scripts made it. What these set for just such a run is as good as printed;
what they leave open is the framework's own, which is in its software profile.
"""

from __future__ import annotations

from collections.abc import Mapping

from simplan.accuracy.layout_recipes import LAYOUT_RECIPES
from simplan.accuracy.recipe import Recipe
from simplan.accuracy.recompute_recipes import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    KIMI_K2,
    QWEN3_30B,
    QWEN3_235B,
    RECOMPUTE_RECIPES,
)
from simplan.accuracy.schema import PublishedRun
from simplan.spec.software import SoftwareSpec

__all__ = ["RECIPES", "recipes_of", "with_recipes"]

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
_WHOLE_MASTER = {"master": 4}
_STORES = (
    "NVIDIA/NeMo at 8cfedd7, nemo/collections/nlp/models/language_modeling/megatron_base_model.py: the optimizer of "
    "such weights stores whole master copies (store_params)"
)
_LAUNCHER = "NVIDIA/NeMo-Framework-Launcher at 24.07"

_WORKLOADS = (
    "scripts/performance/configs/*/workload_base_configs.py at v0.2.0 and *_workload_base_configs.py at v0.3.0 to "
    "v0.5.0, whose containers are 25.11, 26.02, 26.04, 26.06"
)

_AT_V050 = "scripts/performance/configs/*/*_workload_base_configs.py at v0.5.0"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        framework="megatron-bridge",
        grad_dtype="bf16",
        source=f'{_BRIDGE}: docs/performance-summary.md: "obtained using performance recipes" in scripts/performance, '
        "which set grad_reduce_in_fp32 = False (v0.1.0rc4 configs/llama3/*.yaml; v0.2.0 to v0.5.0 "
        "configs/**/*_llm_pretrain.py and *_llm_finetune.py; v0.6.0 src/megatron/bridge/perf_recipes/_common.py)",
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
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            tasks=("pretrain",),
            experts=experts,
            devices=devices,
            expert_dispatch="hybridep",
            source=f'{_BRIDGE}: moe_flex_dispatcher_backend = "hybridep" in {_WORKLOADS}',
        )
        for since, devices, experts in (
            ((25, 11), ("gb200", "gb300"), (QWEN3_30B, QWEN3_235B, DEEPSEEK_V3, KIMI_K2)),
            ((26, 2), ("b200-sxm", "b300-sxm", "h100-sxm-80gb"), (DEEPSEEK_V3,)),
            ((26, 4), ("b200-sxm", "b300-sxm", "h100-sxm-80gb"), (QWEN3_30B,)),
            ((26, 4), ("b200-sxm", "b300-sxm", "gb200"), (GPT_OSS_120B,)),
        )
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            tasks=("pretrain",),
            experts=(model,),
            devices=(device,),
            expert_overlap=True,
            source=f"{_BRIDGE}: moe_a2a_overlap = True in {_WORKLOADS}",
        )
        for since, device, model in (
            ((25, 11), "h100-sxm-80gb", QWEN3_235B),
            ((26, 4), "gb200", GPT_OSS_120B),
        )
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            before=before,
            tasks=("pretrain",),
            experts=(DEEPSEEK_V3,),
            devices=(device,),
            precisions=precisions,
            ep=(ep,),
            expert_dispatch="deepep",
            expert_overlap=True,
            source=f"{_BRIDGE}: {where}",
        )
        for since, before, device, precisions, ep, where in (
            (
                (25, 9),
                (26, 2),
                "h100-sxm-80gb",
                (),
                64,
                "enable_deepep and A2A_1F1B in scripts/performance/run_script.py at v0.1.0rc4; "
                "DEEPSEEK_V3_H100_BASE_CONFIG at v0.2.0",
            ),
            (
                (26, 4),
                None,
                "b200-sxm",
                ("mxfp8",),
                32,
                "DEEPSEEK_V3_PRETRAIN_CONFIG_B200_FP8_MX_V2 at v0.4.2 and v0.5.0",
            ),
        )
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=(26, 6),
            tasks=("pretrain",),
            experts=experts,
            devices=devices,
            precisions=("mxfp8",),
            expert_dispatch="hybridep",
            expert_overlap=True,
            fused_experts=True,
            source=f"{_BRIDGE}: moe_a2a_overlap and cutedsl_fused_grouped_mlp in {_AT_V050}; "
            "src/megatron/bridge/perf_recipes at v0.6.0: use_transformer_engine_op_fuser",
        )
        for devices, experts in (
            (("gb200", "gb300"), (QWEN3_30B, QWEN3_235B, DEEPSEEK_V3, GPT_OSS_120B)),
            (("b300-sxm",), (QWEN3_30B,)),
        )
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=(26, 6),
            tasks=("pretrain",),
            experts=(experts,),
            devices=devices,
            precisions=("mxfp8",),
            fp8_dot_product_attention=True,
            source=f"{_BRIDGE}: fp8_dot_product_attention in {_AT_V050} and v0.5.1",
        )
        for experts, devices in (
            (DEEPSEEK_V3, ("gb300",)),
            (QWEN3_235B, ("gb200", "gb300")),
            (QWEN3_30B, ("b300-sxm", "gb200", "gb300")),
            (GPT_OSS_120B, ("gb200", "gb300")),
        )
    ),
    *RECOMPUTE_RECIPES,
    *LAYOUT_RECIPES,
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
        if recipe.weights is not None and (low := software.low_precision.get("fp8")) is not None:
            changed = software.low_precision | {"fp8": low.model_copy(update={"weights": recipe.weights})}
            software = software.model_copy(update={"low_precision": changed})
        if recipe.states:
            software = _with_states(software, recipe.states)
        options = {
            "expert_dispatch": recipe.expert_dispatch or software.expert_dispatch,
            "expert_overlap": recipe.expert_overlap or software.expert_overlap,
            "fused_experts": recipe.fused_experts or software.fused_experts,
            "fp8_dot_product_attention": recipe.fp8_dot_product_attention or software.fp8_dot_product_attention,
        }
        software = software.model_copy(update=options)
    return software


def _with_states(software: SoftwareSpec, states: Mapping[str, int]) -> SoftwareSpec:
    """With other optimizer states in mixed precision."""
    update = {
        kinds: given | {"bf16": given["bf16"].model_copy(update=dict(states))}
        for kinds in ("state_bytes", "lora_state_bytes")
        if "bf16" in (given := getattr(software, kinds))
    }
    return software.model_copy(update=update)
