"""Which layers Megatron Bridge's recipes give to every stage of a pipeline, of which its tables have no column."""

from __future__ import annotations

from simplan.accuracy.recipe import Recipe
from simplan.accuracy.recompute_recipes import DEEPSEEK_V3, KIMI_K2

__all__ = ["LAYOUT_RECIPES"]

_SOURCE = (
    "NVIDIA-NeMo/Megatron-Bridge: layout_map in src/megatron/bridge/recipes/deepseek/deepseek_v3.py and "
    "map_pp_vp_to_layout in recipes/kimi/kimi_k2.py at v0.2.0 to v0.5.0; layout and pp_layout in scripts/performance "
    "(run_script.py at v0.1.0rc4, *_workload_base_configs.py at v0.3.0 to v0.5.0). The last stage of DeepSeek-V3 also "
    "has a layer that predicts the next token but one (mtp_num_layers = 1), which is not modelled"
)

LAYOUT_RECIPES: tuple[Recipe, ...] = tuple(
    Recipe(
        framework="megatron-bridge",
        tasks=("pretrain",),
        experts=(DEEPSEEK_V3, KIMI_K2),
        num_stages=(len(layers),),
        stage_layers=layers,
        source=_SOURCE,
    )
    for layers in ((*[16] * 3, 13), (*[8] * 7, 5), (*[4] * 15, 1), (1, *[2] * 30, 0))
)
"""Of 61 layers on 4, 8, 16 and 32 stages; the last are "Et|(tt|)*30mL"."""
