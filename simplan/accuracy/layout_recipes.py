"""Which layers models have in Megatron Bridge's recipes, and on which stage, of which its tables have no column."""

from __future__ import annotations

from simplan.accuracy.recipe import Recipe
from simplan.accuracy.recompute_recipes import DEEPSEEK_V3, KIMI_K2

__all__ = ["LAYOUT_RECIPES"]

_SOURCE = (
    "NVIDIA-NeMo/Megatron-Bridge: layout_map in src/megatron/bridge/recipes/deepseek/deepseek_v3.py and "
    "map_pp_vp_to_layout in recipes/kimi/kimi_k2.py at v0.2.0 to v0.5.0; layout and pp_layout in scripts/performance "
    "(run_script.py at v0.1.0rc4, *_workload_base_configs.py at v0.3.0 to v0.5.0)"
)
_MTP = (
    "NVIDIA-NeMo/Megatron-Bridge: mtp_num_layers = 1 in src/megatron/bridge/recipes/deepseek/deepseek_v3.py at "
    "v0.1.0rc4 to v0.5.0 and recipes/deepseek/h100/deepseek_v3.py at v0.6.0, on the last stage of all of its layouts. "
    "The tables' model TFLOP/s over tokens/s are 0.260 TFLOP a token, which is what flop_utils.py counts with it"
)
_NO_MTP = (
    'NVIDIA-NeMo/Megatron-Bridge: "DeepSeekV3 (w/o MTP)" in docs/performance-summary-archive.md at 067f987, with '
    "0.250 TFLOP a token in 25.11"
)

LAYOUT_RECIPES: tuple[Recipe, ...] = (
    Recipe(framework="megatron-bridge", tasks=("pretrain",), experts=(DEEPSEEK_V3,), mtp_num_layers=1, source=_MTP),
    Recipe(
        framework="megatron-bridge",
        since=(25, 11),
        before=(26, 2),
        tasks=("pretrain",),
        experts=(DEEPSEEK_V3,),
        devices=("gb200", "gb300"),
        mtp_num_layers=0,
        source=_NO_MTP,
    ),
    *(
        Recipe(
            framework="megatron-bridge",
            tasks=("pretrain",),
            experts=(DEEPSEEK_V3, KIMI_K2),
            num_stages=(len(layers),),
            stage_layers=layers,
            source=_SOURCE,
        )
        for layers in ((*[16] * 3, 13), (*[8] * 7, 5), (*[4] * 15, 1), (1, *[2] * 30, 0))
    ),
)
"""Of 61 layers on 4, 8, 16 and 32 stages; the last are "Et|(tt|)*30mL"."""
