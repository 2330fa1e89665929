"""Arguments of Megatron-LM that are keys of a scenario; ``tables/megatron.yaml`` has all others.

Names and defaults are those of NVIDIA/Megatron-LM, megatron/training/arguments.py at d98e8a6 (2026-08-22), and of
megatron/arguments.py at the tags v2.0 (2020) to 23.06.
"""

from __future__ import annotations

from simplan.interop.configuration import Match
from simplan.interop.frameworks.megatron_core import OPTIMIZERS

MODEL = (
    Match("--num-layers", "model.num_hidden_layers"),
    Match("--hidden-size", "model.hidden_size"),
    Match("--num-attention-heads", "model.num_attention_heads"),
    Match("--seq-length", "model.seq_len"),
    Match("--max-position-embeddings", "model.max_position_embeddings"),
)
"""Sizes of every model."""
T5 = (Match("--decoder-num-layers", "model.num_decoder_layers"), Match("--decoder-seq-length", "model.decoder_seq_len"))
EXPERTS = (
    Match("--num-experts", "model.num_experts"),
    Match("--moe-router-topk", "model.top_k", 2),
    Match("--moe-shared-expert-intermediate-size", "model.shared_expert_intermediate_size"),
    Match("--moe-shared-expert-gate", "model.shared_expert_gate"),
)
LATENT_ATTENTION = (
    Match("--q-lora-rank", "model.q_lora_rank"),
    Match("--kv-lora-rank", "model.kv_lora_rank", 32),
    Match("--qk-head-dim", "model.qk_nope_head_dim", 128),
    Match("--qk-pos-emb-head-dim", "model.qk_rope_head_dim", 64),
    Match("--v-head-dim", "model.v_head_dim", 128),
)
PLAN = (
    Match("--tensor-model-parallel-size", "plan.tp"),
    Match("--pipeline-model-parallel-size", "plan.pp"),
    Match("--context-parallel-size", "plan.cp"),
    Match("--expert-model-parallel-size", "plan.ep"),
    Match("--micro-batch-size", "plan.microbatch_size"),
)
CONTEXT_PARALLEL = Match(
    "--cp-comm-type",
    "plan.cp_comm",
    values={"p2p": "ring", "all_gather": "all_gather", "allgather": "all_gather", "a2a": "a2a"},
)
CORE, OF_2022, OF_2021, DEEPSPEED = "megatron-core", "megatron-lm-2022", "megatron-lm-2021", "megatron-deepspeed"
DEFAULT = "the default of Megatron-LM"

TRAINING = (
    Match("--global-batch-size", "training.global_batch_size"),
    Match("--optimizer", "training.optimizer", "adam", values=OPTIMIZERS | {"adam": "adamw"}),
)
"""Megatron's adam decouples weight decay, as apex's FusedAdam does by default."""
