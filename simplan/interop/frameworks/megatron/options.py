"""Arguments of Megatron-LM that are keys of a scenario; ``tables/megatron.yaml`` has all others.

Names and defaults are those of NVIDIA/Megatron-LM, megatron/training/arguments.py at d98e8a6 (2026-08-22), and of
megatron/arguments.py at the tags v2.0 (2020) to 23.06.
"""

from __future__ import annotations

from simplan.interop.configuration import SettingMapping
from simplan.interop.frameworks.megatron_core import OPTIMIZERS

MODEL = (
    SettingMapping("--num-layers", "model.num_hidden_layers"),
    SettingMapping("--hidden-size", "model.hidden_size"),
    SettingMapping("--num-attention-heads", "model.num_attention_heads"),
    SettingMapping("--seq-length", "model.seq_len"),
    SettingMapping("--max-position-embeddings", "model.max_position_embeddings"),
)
"""Sizes of every model."""
T5 = (
    SettingMapping("--decoder-num-layers", "model.num_decoder_layers"),
    SettingMapping("--decoder-seq-length", "model.decoder_seq_len"),
)
EXPERTS = (
    SettingMapping("--num-experts", "model.num_experts"),
    SettingMapping("--moe-router-topk", "model.top_k", 2),
    SettingMapping("--moe-shared-expert-intermediate-size", "model.shared_expert_intermediate_size"),
    SettingMapping("--moe-shared-expert-gate", "model.shared_expert_gate"),
)
LATENT_ATTENTION = (
    SettingMapping("--q-lora-rank", "model.q_lora_rank"),
    SettingMapping("--kv-lora-rank", "model.kv_lora_rank", 32),
    SettingMapping("--qk-head-dim", "model.qk_nope_head_dim", 128),
    SettingMapping("--qk-pos-emb-head-dim", "model.qk_rope_head_dim", 64),
    SettingMapping("--v-head-dim", "model.v_head_dim", 128),
)
PLAN = (
    SettingMapping("--tensor-model-parallel-size", "plan.tp"),
    SettingMapping("--pipeline-model-parallel-size", "plan.pp"),
    SettingMapping("--context-parallel-size", "plan.cp"),
    SettingMapping("--expert-model-parallel-size", "plan.ep"),
    SettingMapping("--micro-batch-size", "plan.microbatch_size"),
)
CONTEXT_PARALLEL = SettingMapping(
    "--cp-comm-type",
    "plan.cp_comm",
    values={"p2p": "ring", "all_gather": "all_gather", "allgather": "all_gather", "a2a": "a2a"},
)
CORE, OF_2022, OF_2021, DEEPSPEED = "megatron-core", "megatron-lm-2022", "megatron-lm-2021", "megatron-deepspeed"
DEFAULT = "the default of Megatron-LM"

TRAINING = (
    SettingMapping("--global-batch-size", "training.global_batch_size"),
    SettingMapping("--optimizer", "training.optimizer", "adam", values=OPTIMIZERS | {"adam": "adamw"}),
)
"""Megatron's adam decouples weight decay, as apex's FusedAdam does by default."""
