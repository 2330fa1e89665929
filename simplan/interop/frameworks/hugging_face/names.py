"""Names in settings of the Hugging Face stack; ``tables/hugging_face.yaml`` has settings by what they do to a step.

Names are those of transformers 5.23 (``training_args.py``), TRL 0.24, PEFT, LLaMA-Factory, axolotl, Accelerate 1.15
(``commands/config/config_args.py``, ``utils/dataclasses.py``) and DeepSpeed 0.19.8 (``runtime/config.py``,
``runtime/zero/config.py``), read 2026-11-26.
"""

from __future__ import annotations

from collections.abc import Mapping

from simplan.interop.frameworks import tables
from simplan.model.adapters import MODULES

MODELS = ("model_name_or_path", "config_name", "base_model", "model_name", "model_id", "model_path")
"""Arguments that name the model: the Trainer's scripts, axolotl, scripts of users."""
LENGTHS = (
    "max_seq_length", "max_length", "model_max_length", "cutoff_len", "sequence_len", "block_size", "max_seq_len",
)  # fmt: skip
"""Arguments of scripts that say how long sequences are: TRL, FastChat, LLaMA-Factory, axolotl, run_clm.py."""

OF_TRAINER = ("output_dir", "model_name_or_path", "do_train", "per_device_eval_batch_size", "num_train_epochs")
"""Arguments of programs whose defaults are those of TrainingArguments."""
OWN_BATCHES = ("batch_size", "train_batch_size", "micro_batch_size", "train_micro_batch_size", "batch_size_training")
"""Arguments of programs that are no Trainer, in whose words the batch is of a device, or of all."""

PACKING = ("packing", "sample_packing", "neat_packing")

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "sgd": "sgd", "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit", "paged_adamw": "paged_adamw_32bit",
    "adamw_torch_8bit": "adamw_torch_8bit", "adamw_torch_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit", "ao_adamw_fp8": "ao_adamw_fp8",
    "adafactor": "adafactor", "lion_32bit": "lion", "lion_8bit": "lion_8bit", "paged_lion_8bit": "paged_lion_8bit",
    "paged_lion_32bit": "paged_lion_32bit", "muon": "muon",
}  # fmt: skip
"""``optim`` of TrainingArguments (``OptimizerNames``), or ``optimizer`` of axolotl (``CustomSupportedOptimizers``)."""
PROJECTIONS = ("galore_adamw", "galore_adamw_8bit", "apollo_adamw")
"""``optim`` of optimizers with projected gradients, with the suffix ``_layerwise`` for steps in backward."""
UNFUSED = ("adamw_torch", "adamw_hf", "sgd")
DEEPSPEED_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "lamb": "lamb", "fusedlamb": "lamb", "sgd": "sgd"}

SHARDING = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Sharding strategies of FSDP1, in the order of their numbers."""
DEGREES = {
    "dp_replicate_size": "plan.dp_replicate",
    "dp_shard_size": "plan.dp_shard",
    "tp_size": "plan.tp",
    "cp_size": "plan.cp",
}
CP_STRATEGIES = ("allgather", "alltoall")
"""Values of ``cp_comm_strategy``: torch attends to the keys of one rank after the other, without a mask, with both.

Source: torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py (``_templated_ring_attention``).
"""
DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""Values of ``distributed_type`` for CUDA devices."""
OTHER_DISTRIBUTED_TYPES = {
    "MEGATRON_LM": "give the arguments of Megatron-LM",
    "XLA": "simplan knows TPUs under software maxtext",
    "TPU": "simplan knows TPUs under software maxtext",
}

ENDS = {"embed_tokens": "embedding", "wte": "embedding", "lm_head": "head", "embed_out": "head"}
"""Ends of a model in transformers -> names in ``model.lora_targets`` and ``lora_modules_to_save``."""
ADAPTED: Mapping[str, tuple[str, ...]] = {
    name: (module,) for name, module in {**MODULES, **ENDS, "all": "all"}.items()
} | {name: tuple(matrices) for name, matrices in tables("hugging_face")["adapted"].items()}
"""Matrix with adapters -> names in ``model.lora_targets``: PEFT's for Llama, and ``tables/hugging_face.yaml``."""
AROUND: Mapping[str, tuple[str, ...]] = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "cross_attn": (),
}
"""Modules of a block of transformers' Llama -> matrices inside; no model of the catalog has ``cross_attn``."""
PEFT_TARGETS = [MODULES["q_proj"], MODULES["v_proj"]]
"""Matrices with adapters in a Llama by default, PEFT ``utils/constants.py``."""
ADAPTER_RANKS = {"use_peft": 16, "finetuning_type": 8}
"""Switch -> rank of TRL's and LLaMA-Factory's arguments by default."""
FLASH_ATTENTION = ("attn_implementation", "flash_attn", "flash_attention", "use_flash_attn")
FLASH_ATTENTION_WORDS = ("flash_attention_2", "kernels-community/flash-attn2", "fa2", "true")
"""Settings, of transformers, LLaMA-Factory, axolotl and scripts, and their values that ask for FlashAttention 2."""
