"""What Megatron Bridge's recipes run again in backward, of which its tables have no column."""

from __future__ import annotations

from simplan.accuracy.recipe import Recipe
from simplan.spec.plan import RecomputeModule

__all__ = ["DEEPSEEK_V3", "GPT_OSS_120B", "KIMI_K2", "QWEN3_30B", "QWEN3_235B", "RECOMPUTE_RECIPES"]

DEEPSEEK_V3, KIMI_K2, GPT_OSS_120B = (256, 8, 7168), (384, 8, 7168), (128, 4, 2880)
QWEN3_30B, QWEN3_235B = (128, 8, 2048), (128, 8, 4096)
"""Experts, those of a token, and hidden size."""

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
_CONFIGS = f"{_BRIDGE}: scripts/performance/configs"
_WORKLOADS = (
    f"{_BRIDGE}: scripts/performance/run_script.py at v0.1.0rc4; recompute_modules in scripts/performance/configs/*/"
    "workload_base_configs.py at v0.2.0 and *_workload_base_configs.py at v0.3.0 to v0.5.0, and in "
    "src/megatron/bridge/perf_recipes at 067f987"
)
_LOW = ("fp8", "mxfp8", "nvfp4")

_Modules = tuple[RecomputeModule, ...]
_Models = tuple[tuple[int, int, int], ...]
_MODULES: tuple[tuple[tuple[int, int], _Models, tuple[str, ...], tuple[str, ...], _Modules], ...] = (
    ((25, 9), (DEEPSEEK_V3, KIMI_K2), ("b200-sxm", "b300-sxm", "gb200", "gb300"), (), ("mla_up_proj",)),
    ((25, 9), (DEEPSEEK_V3, KIMI_K2), ("h100-sxm-80gb",), (), ("mla_up_proj", "mlp")),
    ((25, 11), (DEEPSEEK_V3,), ("gb300",), (), ("moe_act",)),
    ((26, 2), (DEEPSEEK_V3,), ("gb300",), _LOW, ("mla_up_proj",)),
    ((26, 4), (DEEPSEEK_V3,), ("gb200",), _LOW, ("mlp",)),
    ((26, 6), (DEEPSEEK_V3,), ("gb200",), ("mxfp8",), ("mla_up_proj",)),
    ((26, 6), (DEEPSEEK_V3,), ("gb300",), ("mxfp8",), ()),
    ((26, 2), (GPT_OSS_120B,), ("b200-sxm", "gb200", "h100-sxm-80gb"), (), ("layernorm", "moe_act")),
    ((26, 6), (GPT_OSS_120B,), ("gb200",), ("mxfp8",), ()),
)
"""First release, models, devices, precisions (all where none is named), modules."""

RECOMPUTE_RECIPES: tuple[Recipe, ...] = (
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            tasks=("pretrain",),
            experts=experts,
            devices=devices,
            precisions=precisions,
            recompute_modules=modules,
            source=_WORKLOADS,
        )
        for since, experts, devices, precisions, modules in _MODULES
    ),
    Recipe(
        framework="megatron-bridge",
        since=(25, 11),
        tasks=("pretrain",),
        models=("llama3-8b",),
        devices=("h100-sxm-80gb",),
        precisions=("fp8",),
        zero_stages=(0, 1),
        recompute_layers=5,
        source=f"{_CONFIGS}/llama3/workload_base_configs.py at v0.2.0 and llama/llama3_workload_base_configs.py at "
        "v0.3.0 to v0.5.0: recompute_num_layers of LLAMA3_8B_H100_FP8_CS",
    ),
    Recipe(
        framework="megatron-bridge",
        since=(26, 2),
        tasks=("pretrain",),
        models=("llama3.1-405b",),
        devices=("b200-sxm", "gb200"),
        precisions=("nvfp4",),
        num_devices=(128,),
        recompute_layers=1,
        source=f"{_CONFIGS}/llama/llama31_workload_base_configs.py at v0.3.0 to v0.5.0: recompute_num_layers of "
        "LLAMA31_405B_PRETRAIN_CONFIG_GB200_NVFP4_V1 and B200_NVFP4_V1",
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            before=before,
            tasks=("lora",),
            models=("llama3-70b",),
            devices=("h100-sxm-80gb",),
            precisions=(precision,),
            recompute_layers=1,
            source=f"{_CONFIGS}/llama3/workload_base_configs.py at v0.2.0 (LLAMA3_70B_H100_LORA_FP8_CS) and "
            "llama/llama3_workload_base_configs.py at v0.3.0 to v0.5.0 (LLAMA3_70B_LORA_CONFIG_H100_BF16_V1): "
            "recompute_num_layers",
        )
        for since, before, precision in (((25, 11), (26, 2), "fp8"), ((26, 2), None, "bf16"))
    ),
)
"""In order; what several set is the last one's."""
