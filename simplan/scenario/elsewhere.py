"""Where a key belongs that is written in another section, or in the words of another framework."""

from __future__ import annotations

from functools import cache

from pydantic import BaseModel

from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.search import SearchSpace
from simplan.training.training import TrainingSpec

__all__ = ["where_keys_belong"]

_SECTIONS: dict[str, type[BaseModel]] = {"model": ModelSpec, "training": TrainingSpec, "plan": ParallelPlan}

_OTHER_WORDS = {
    "plan.microbatch_size": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
    "local_batch_size device_train_microbatch_size mbs",
    "training.global_batch_size": "batch_size train_batch_size global_train_batch_size gbs",
    "training.global_batch_size, from which it follows": "gradient_accumulation_steps num_microbatches",
    "training.precision": "dtype mixed_precision bf16 fp16 fp8",
    "plan.dp_replicate": "dp ddp dp_size data_parallel data_parallel_size data_parallel_replicate_degree",
    "plan.dp_shard": "fsdp fsdp_size data_parallel_shard_degree",
    "plan.zero_stage": "zero zero_optimization",
    "plan.tp": "tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "plan.pp": "pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "plan.cp": "cp_size context_parallel context_parallel_size context_parallel_degree",
    "plan.ep": "ep_size expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "plan.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "plan.virtual_stages": "virtual_pipeline_model_parallel_size num_virtual_stages vpp",
    "plan.recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing recompute_granularity",
    "model.seq_len": "sequence_length max_seq_len max_length context_length seq_length",
    "model.num_hidden_layers": "num_layers n_layer n_layers",
    "model.hidden_size": "d_model n_embd dim",
    "model.num_attention_heads": "num_heads n_head n_heads",
    "model.num_key_value_heads": "num_query_groups n_kv_heads num_kv_heads",
    "model.intermediate_size": "ffn_hidden_size d_ff",
    "model.num_experts": "num_local_experts n_routed_experts",
    "model.top_k": "num_experts_per_tok moe_router_topk",
    "model.mtp_num_layers": "num_nextn_predict_layers",
    "cluster.num_devices": "num_gpus gpus world_size",
    "cluster.num_nodes": "nodes nnodes",
    "cluster.devices_per_node": "gpus_per_node num_gpus_per_node nproc_per_node",
    "cluster.device": "gpu gpu_type accelerator",
    "cluster.device: {preset: ..., memory_bytes: ...}": "memory memory_bytes memory_gb memory_gib gpu_memory",
}
"""Keys of Megatron-LM, torchtitan, DeepSpeed, Hugging Face and others, under what says the same here."""

_AFTERWARDS = "in the scenario that --save-plan writes, as a search does not vary it"


@cache
def where_keys_belong(section: str, *, searches: bool) -> dict[str, str]:
    """For a section, keys that it does not have -> what to write, e.g. ``model.seq_len`` for ``seq_len``.

    Args:
        section: Where the key is written; empty for the top level of the file.
        searches: Whether the file has ``search`` in place of ``plan``.
    """
    found = {word: place for place, words in _OTHER_WORDS.items() for word in words.split()}
    for other, spec in _SECTIONS.items():
        found |= {key: f"{other}.{key}" for key in spec.model_fields if other != section}
    if searches:
        in_search = SearchSpace.model_fields.keys()
        moved = {key: place.partition(".") for key, place in found.items() if place.startswith("plan.")}
        found |= {
            key: f"search.{name}" if name in in_search else f"{section}.{name} {_AFTERWARDS}"
            for key, (section, _, name) in moved.items()
        }
    return found
