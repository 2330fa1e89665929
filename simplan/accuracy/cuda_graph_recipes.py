"""What Megatron Bridge's recipes replay as CUDA graphs, of which its tables have no column.

Left out are the runs of 25.09 with many experts: their recipes let every expert drop tokens beyond a fixed number
(``apply_moe_token_drop``) and capture whole layers, which is not modelled.
"""

from __future__ import annotations

from simplan.accuracy.recipe import Recipe
from simplan.accuracy.recompute_recipes import DEEPSEEK_V3, GPT_OSS_120B, QWEN3_30B, QWEN3_235B
from simplan.spec.cuda_graphs import CudaGraph

__all__ = ["CUDA_GRAPH_RECIPES"]

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
_WORKLOADS = (
    f"{_BRIDGE}: cuda_graph_impl and cuda_graph_scope in scripts/performance/configs/*/workload_base_configs.py at "
    "v0.2.0 and *_workload_base_configs.py at v0.3.0 to v0.5.1, whose containers are 25.11, 26.02, 26.04 and 26.06; "
    "v0.5.1 stands for 26.08 as well"
)
_FIRST_CONFIGS = (
    f"{_BRIDGE}: cuda_graphs in scripts/performance/configs/llama3/llama3_8b_llm_pretrain.yaml at v0.1.0rc4, which "
    "scripts/performance/utils/helpers.py makes enable_cuda_graph: whole layers (NVIDIA/Megatron-LM at 23e00ed, "
    "megatron/core/transformer/transformer_config.py, cuda_graph_scope)"
)

_Parts = tuple[CudaGraph, ...]
_ROUTERS: _Parts = ("moe_router", "moe_preprocess")
_ATTENTION: _Parts = ("attn", *_ROUTERS)
_WHOLE: _Parts = ("full_iteration",)
_ALL: tuple[int, ...] = ()

_OF_EXPERTS: tuple[
    tuple[tuple[int, int], tuple[int, int, int], tuple[str, ...], tuple[str, ...], tuple[int, ...], _Parts], ...
] = (
    ((25, 11), DEEPSEEK_V3, ("gb300",), (), _ALL, _ATTENTION),
    ((25, 11), DEEPSEEK_V3, ("gb200",), (), _ALL, _ROUTERS),
    ((26, 2), DEEPSEEK_V3, ("gb200",), (), _ALL, _ATTENTION),
    ((26, 2), DEEPSEEK_V3, ("gb300",), ("fp8", "mxfp8", "nvfp4"), _ALL, ()),
    ((26, 6), DEEPSEEK_V3, ("gb200", "gb300"), ("mxfp8",), _ALL, _WHOLE),
    ((25, 11), QWEN3_235B, ("gb300",), (), _ALL, _ROUTERS),
    ((25, 11), QWEN3_235B, ("gb200",), (), _ALL, _ATTENTION),
    ((26, 2), QWEN3_235B, ("gb300",), ("mxfp8",), (256,), _ATTENTION),
    ((26, 6), QWEN3_235B, ("gb200", "gb300"), ("mxfp8",), (256,), _WHOLE),
    ((25, 11), QWEN3_30B, ("b200-sxm", "b300-sxm", "gb300"), (), _ALL, _ROUTERS),
    ((25, 11), QWEN3_30B, ("gb200",), ("mxfp8",), _ALL, _ROUTERS),
    ((25, 11), QWEN3_30B, ("gb200",), ("bf16", "fp8"), _ALL, _ATTENTION),
    ((25, 11), QWEN3_30B, ("h100-sxm-80gb",), ("bf16",), _ALL, _ROUTERS),
    ((26, 4), QWEN3_30B, ("b200-sxm",), (), _ALL, _ATTENTION),
    ((26, 6), QWEN3_30B, ("b300-sxm", "gb200", "gb300"), ("mxfp8",), _ALL, _WHOLE),
    ((25, 11), GPT_OSS_120B, ("gb300",), (), _ALL, _ATTENTION),
    ((26, 2), GPT_OSS_120B, ("b300-sxm",), (), _ALL, _ATTENTION),
    ((26, 6), GPT_OSS_120B, ("gb200", "gb300"), ("mxfp8",), _ALL, _WHOLE),
)
"""First release, model, devices, precisions and numbers of devices (all where none is named), what is captured."""

_OF_LLAMA_8B: tuple[tuple[tuple[int, int], tuple[str, ...], tuple[str, ...]], ...] = (
    ((25, 11), ("gb300",), ()),
    ((25, 11), ("gb200", "b200-sxm"), ("bf16", "fp8", "mxfp8")),
)

CUDA_GRAPH_RECIPES: tuple[Recipe, ...] = (
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            tasks=("pretrain",),
            experts=(experts,),
            devices=devices,
            precisions=precisions,
            num_devices=num_devices,
            cuda_graphs=parts,
            source=_WORKLOADS,
        )
        for since, experts, devices, precisions, num_devices, parts in _OF_EXPERTS
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=(26, 4),
            tasks=("pretrain",),
            experts=(DEEPSEEK_V3,),
            devices=(device,),
            precisions=("mxfp8",),
            ep=(ep,),
            num_stages=(num_stages,),
            cuda_graphs=_ATTENTION,
            source=f"{_BRIDGE}: {config} at v0.4.2 and v0.5.0",
        )
        for device, ep, num_stages, config in (
            ("b300-sxm", 8, 8, "DEEPSEEK_V3_PRETRAIN_CONFIG_B300_FP8_MX_V2"),
            ("b200-sxm", 32, 16, "DEEPSEEK_V3_PRETRAIN_CONFIG_B200_FP8_MX_V2"),
        )
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            tasks=("pretrain",),
            models=("llama3-8b",),
            devices=devices,
            precisions=precisions,
            cuda_graphs=_WHOLE,
            source=_WORKLOADS,
        )
        for since, devices, precisions in _OF_LLAMA_8B
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=(25, 9),
            before=(25, 11),
            tasks=("pretrain",),
            models=("llama3-8b",),
            devices=(device,),
            precisions=precisions,
            cuda_graphs=("attn", "mlp"),
            source=_FIRST_CONFIGS,
        )
        for device, precisions in (("b200-sxm", ()), ("gb200", ("bf16", "mxfp8")))
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            since=since,
            tasks=("sft", "lora"),
            models=("llama3-70b",),
            devices=(device,),
            cuda_graphs=("mlp",),
            source=_WORKLOADS,
        )
        for since, device in (((25, 11), "gb200"), ((26, 2), "gb300"))
    ),
)
"""In order; what several set is the last one's."""
