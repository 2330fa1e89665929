"""Settings of the Hugging Face stack by what they do to a step.

Names are those of transformers 5.23 (``training_args.py``), TRL 0.24, PEFT, LLaMA-Factory, axolotl, Accelerate 1.15
(``commands/config/config_args.py``, ``utils/dataclasses.py``) and DeepSpeed 0.19.8 (``runtime/config.py``,
``runtime/zero/config.py``), read 2026-11-26.
"""

from __future__ import annotations

from typing import Any

from simplan.model.adapters import MODULES

Notes = dict[str, tuple[tuple[Any, ...], str]]
"""Setting -> values that change nothing, and what other values do that is left out."""

LENGTHS = (
    "max_seq_length", "max_length", "model_max_length", "cutoff_len", "sequence_len", "block_size", "max_seq_len",
)  # fmt: skip
"""Arguments of scripts that say how long sequences are: TRL, FastChat, LLaMA-Factory, axolotl, run_clm.py."""

PACKING = ("packing", "sample_packing", "neat_packing")

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "paged_adamw_32bit": "adamw", "paged_adamw": "adamw", "sgd": "sgd",
}  # fmt: skip
"""``optim`` of TrainingArguments -> optimizer."""
UNFUSED = ("adamw_torch", "adamw_hf", "sgd")
DEEPSPEED_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "lamb": "lamb", "fusedlamb": "lamb", "sgd": "sgd"}

SHARDING = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Sharding strategies of FSDP1, in the order of their numbers."""
FSDP = (
    "version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "backward_prefetch",
    "forward_prefetch", "cpu_ram_efficient_loading", "state_dict_type", "sync_module_states", "use_orig_params",
    "limit_all_gathers", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params",
    "cpu_offload", "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules", "xla",
    "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "param_init_fn", "final_state_dict_type",
)  # fmt: skip
DEGREES = {
    "dp_replicate_size": "plan.dp_replicate",
    "dp_shard_size": "plan.dp_shard",
    "tp_size": "plan.tp",
    "cp_size": "plan.cp",
}
OTHER_DISTRIBUTED_TYPES = {
    "MEGATRON_LM": "give the arguments of Megatron-LM",
    "XLA": "simplan knows TPUs under software maxtext",
    "TPU": "simplan knows TPUs under software maxtext",
    "MULTI_CPU": "use MULTI_GPU",
}

ADAPTED = {**MODULES, "all": "all", "c_attn": "qkv"}
"""Matrix with adapters -> name in ``model.lora_targets``: PEFT's names, LLaMA-Factory's, and one of GPT-2."""
PEFT_TARGETS = [MODULES["q_proj"], MODULES["v_proj"]]
"""Matrices with adapters in a Llama by default, PEFT ``utils/constants.py``."""
ADAPTER_RANKS = {"use_peft": 16, "finetuning_type": 8}
"""Switch -> rank of TRL's and LLaMA-Factory's arguments by default."""
ADAPTER_NAMES = (
    "use_peft", "use_peft_lora", "use_lora", "finetuning_type", "adapter", "use_dora", "use_rslora", "load_in_4bit",
    "load_in_8bit", "use_4bit_quantization", "use_8bit_quantization", "q_lora", "use_nested_quant",
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "use_bnb_nested_quant", "stage", "quantization_method",
)  # fmt: skip
QUANTIZED = (
    "load_in_4bit",
    "load_in_8bit",
    "use_4bit_quantization",
    "use_8bit_quantization",
    "quantization_bit",
    "q_lora",
)
OTHER_TASKS: Notes = {
    "stage": (("sft", "pt", "pretrain"), "preference training or reinforcement learning"),
    "rl": (("none", ""), "preference training or reinforcement learning"),
    "num_generations": (("none",), "reinforcement learning"),
    "beta": (("none",), "preference training"),
    "pref_beta": (("none",), "preference training"),
    "use_galore": (("false",), "an optimizer with other states"),
    "use_apollo": (("false",), "an optimizer with other states"),
    "use_badam": (("false",), "an optimizer with other states"),
    "mixture_of_depths": (("none", ""), "another model"),
    "relora": (("false",), "training adapters that are merged"),
}

ZERO_NOT_MODELED: Notes = {
    "reduce_bucket_size": ((5e8,), "gradients are reduced block by block in ZeRO-2 and 3 here"),
    "allgather_bucket_size": ((5e8,), "parameters are gathered block by block here"),
    "prefetch_bucket_size": ((5e7,), "the next block is prefetched here"),
    "stage3_prefetch_bucket_size": ((5e7,), "the next block is prefetched here"),
    "max_live_parameters": ((), "gathered parameters are freed after their block here"),
    "stage3_max_live_parameters": ((), "gathered parameters are freed after their block here"),
    "max_reuse_distance": ((), "gathered parameters are freed after their block here"),
    "stage3_max_reuse_distance": ((), "gathered parameters are freed after their block here"),
    "param_persistence_threshold": ((), "small parameters are sharded as well here"),
    "stage3_param_persistence_threshold": ((), "small parameters are sharded as well here"),
    "contiguous_gradients": ((True,), "gradients stay where the backward makes them"),
    "reduce_scatter": ((True,), "an all-reduce of gradients moves twice the bytes"),
    "zero_hpz_partition_size": ((0, 1), "hpZ: a second copy of the parameters per node, which fewer bytes reach"),
    "zero_quantized_weights": ((False,), "ZeRO++: all-gathers of parameters in 8 bits"),
    "zero_quantized_nontrainable_weights": ((False,), "frozen weights in 8 bits"),
    "zero_quantized_gradients": ((False,), "ZeRO++: reductions of gradients in 4 bits"),
    "zenflow": ((), "ZenFlow: updates on the host that overlap the step"),
    "offload_optimizer.ratio": ((1, 1.0), "a part of the states stays on the device"),
}
DEEPSPEED_NOT_MODELED: Notes = {
    "communication_data_type": (("fp16", "bf16", None), "gradients are reduced in the precision of the weights here"),
    "data_types.grad_accum_dtype": (("fp16", "bf16", None), "gradients are accumulated in the weights' precision here"),
    "activation_checkpointing.cpu_checkpointing": ((False,), "the inputs of blocks move to host memory"),
    "compile.enabled": ((False,), "compiled blocks are faster and save fewer tensors"),
    "compile.deepcompile": ((False,), "compiled blocks are faster and save fewer tensors"),
    "torch_autocast.enabled": ((False,), "autocast casts weights before every matmul"),
    "sparse_gradients": ((False,), "gradients of embeddings are reduced as indices and rows"),
    "fp16.fp16_master_weights_and_grads": ((False,), "FP32 copies are modeled"),
}
DEEPSPEED_REFUSED: Notes = {
    "tensor_parallel.autotp_size": ((0, 1), "is not modeled: DeepSpeed's tensor parallelism"),
    "sequence_parallel_size": ((1,), "is not modeled: sequence parallelism of DeepSpeed-Ulysses"),
    "amp.enabled": ((False,), "is not modeled: NVIDIA Apex"),
    "curriculum_learning.enabled": ((False,), "is not modeled: sequences whose length changes"),
    "data_efficiency.enabled": ((False,), "is not modeled: dropped tokens"),
}

TRAINER_NOT_MODELED: Notes = {
    "use_liger_kernel": ((False,), "fused kernels are faster, and logits are not stored"),
    "enable_liger_kernel": ((False,), "fused kernels are faster, and logits are not stored"),
    "liger_fused_linear_cross_entropy": ((False,), "logits are not stored"),
    "liger_rms_norm": ((False,), "fused kernels are faster and save fewer tensors"),
    "liger_glu_activation": ((False,), "fused kernels are faster and save fewer tensors"),
    "packing": ((False,), "tokens attend to their own document only, which is faster"),
    "sample_packing": ((False,), "tokens attend to their own document only, which is faster"),
    "neat_packing": ((False,), "tokens attend to their own document only, which is faster"),
    "group_by_length": ((False,), "batches of short sequences are padded less"),
    "neftune_noise_alpha": ((None, 0), "noise is added to the embeddings"),
    "torch_empty_cache_steps": ((None,), "the allocator's cache is emptied, which takes time"),
    "ddp_find_unused_parameters": ((False,), "DDP walks the graph after every forward"),
    "ddp_broadcast_buffers": ((False,), "buffers are broadcast before every forward"),
    "ddp_static_graph": ((False,), "DDP's bookkeeping between steps is smaller"),
    "auto_find_batch_size": ((False,), "the batch shrinks until it fits"),
    "label_smoothing_factor": ((0, 0.0), "the loss reads the logits once more"),
    "use_dora": ((False,), "DoRA's magnitudes and norms"),
    "use_unsloth": ((False,), "Unsloth's kernels are faster and save fewer tensors"),
    "unsloth": ((False,), "Unsloth's kernels are faster and save fewer tensors"),
    "shift_attn": ((False,), "shifted sparse attention"),
    "flash_attn": (("auto", "fa2", "sdpa", True, "disabled"), "another attention kernel is faster"),
    "flash_attention": ((True,), "scores of attention are stored"),
    "attn_implementation": (
        ("sdpa", "flash_attention_2", "kernels-community/flash-attn2"),
        "other kernels of attention have other times, and eager stores the scores",
    ),
    "padding_free": ((False,), "tokens attend to their own document only, which is faster"),
    "loraplus_lr_ratio": ((), "nothing but learning rates"),
}

TRAINER = (
    "output_dir", "overwrite_output_dir", "num_train_epochs", "max_steps", "learning_rate", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "average_tokens_across_devices", "tf32",
    "gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode", "use_cache", "disable_tqdm",
    "report_to", "run_name", "project", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "ignore_data_skip", "full_determinism", "seed", "data_seed", "use_cpu", "no_cuda", "remove_unused_columns",
    "label_names", "length_column_name", "ddp_backend", "ddp_timeout", "debug", "skip_memory_metrics", "do_train",
    "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "prediction_loss_only", "include_for_metrics",
    "batch_eval_metrics", "enable_jit_checkpoint", "train_sampling_strategy", "trust_remote_code", "model_revision",
    "tokenizer_name", "tokenizer_name_or_path", "tokenizer_type", "model_type", "use_fast_tokenizer",
    "use_slow_tokenizer", "cache_dir", "token", "use_auth_token", "low_cpu_mem_usage", "data_path", "train_file",
    "validation_file", "validation_split_percentage", "streaming", "preprocessing_num_workers", "overwrite_cache",
    "max_train_samples", "max_eval_samples", "max_samples", "template", "dataset", "datasets", "eval_dataset",
    "val_set_size", "val_size", "plot_loss", "chat_template", "chat_template_format", "eos_token", "pad_token",
    "add_special_tokens", "append_concat_token", "splits", "lazy_preprocess", "num_epochs", "fsdp", "deepspeed",
    "pretraining_tp", "assistant_only_loss", "completion_only_loss", "use_reentrant", "use_flash_attn", "resize_vocab",
    "lr_scheduler", "packing_strategy", "num_proc", "wandb_project", "with_tracking", "text_column", "train_on_inputs",
    "strict", "special_tokens", "base_model_config", "tokens", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval",
    "per_gpu_train_batch_size", "per_gpu_eval_batch_size", "past_index", "jit_mode_eval", "fp16_backend",
    "fp16_opt_level", "half_precision_backend", "mp_parameters", "sharded_ddp", "use_ipex", "use_mps_device", "_n_gpu",
    "gradient_checkpointing", "activation_checkpointing", "optim", "optim_target_modules", "max_grad_norm",
    "include_inputs_for_metrics", "include_num_input_tokens_seen", "include_tokens_per_second", "liger_kernel_config",
    "liger_rope", "parallelism_config", "pissa_init", "pissa_iter", "pissa_convert", "system_prompt",
    "mixed_precision", "torch_compile", "accelerator_config", "fsdp_transformer_layer_cls_to_wrap",
    "disable_gradient_checkpointing", "plugins", "lora_model_dir", "auto_resume_from_checkpoints", "s2_attention",
    "xformers_attention", "group_by_length", "early_stopping_patience", "loss_watchdog_threshold",
    "loss_watchdog_patience", "saves_per_epoch", "evals_per_epoch", "model_init_kwargs", "config", "is_llama",
    "is_mistral_derived_model", "tokenizer", "ref_model", "max_token_limit", "print_loss", "clean_enc",
    "use_special_token", "use_custom_llm", "response_template", "instruction_template", "do_sample",
    "log_on_each_node", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "offload",
    "fix_untrusted_model_repo", "ddp_find_unused_parameters", "val_max_samples", "dtype", "use_swanlab", "val_set",
)  # fmt: skip
"""Arguments without an effect on the time or memory of a step, or whose effect is read elsewhere."""
TRAINER_PREFIXES = (
    "save_", "eval_", "evaluation_", "logging_", "log_", "hub_", "push_to_hub", "lr_scheduler", "warmup_", "dataset_",
    "dataloader_", "per_device_eval", "gradient_checkpointing_kwargs", "accelerator_config", "fsdp_config",
    "parallelism_config", "wandb_", "mlflow_", "comet_", "datasets.", "special_tokens.", "val_", "restore_callback",
    "tracker", "swanlab_", "neptune_", "ray_", "lora_", "peft_", "use_bnb", "bnb_", "model_kwargs", "chat_template_",
    "max_new_tokens", "predict_", "generation_", "do_", "test_", "tokenizer_", "sample_packing_", "pad_to_", "cosine_",
    "adam_", "weight_", "include_", "overwrite_", "preprocessing_", "dataset", "deepspeed", "fsdp",
)  # fmt: skip

ACCELERATE = (
    "compute_environment", "distributed_type", "debug", "downcast_bf16", "machine_rank", "main_process_ip",
    "main_process_port", "main_training_function", "rdzv_backend", "same_network", "use_cpu", "enable_cpu_affinity",
    "gpu_ids", "num_processes", "num_machines", "mixed_precision", "fp16", "commands", "command_file", "config_file",
    "multi_gpu", "use_deepspeed", "use_fsdp", "module", "m", "no_python", "num_cpu_threads_per_process", "quiet",
    "role", "rdzv_conf", "max_restarts", "monitor_interval", "log_dir", "tee", "deepspeed_config_file", "rdzv_id",
    "rdzv_endpoint", "mpirun_config", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port",
    "standalone", "num_gpus", "num_nodes", "hostfile", "include", "exclude", "launcher", "start_method", "config",
    "use_env", "zero_stage", "dynamo_mode", "launcher_args", "gradient_clipping", "gradient_accumulation_steps",
    "dynamo_backend",
)  # fmt: skip
ACCELERATE_PREFIXES = (
    "tpu_", "fsdp_config", "deepspeed_", "dynamo_config.", "parallelism_config", "mpirun_config", "fp8_config",
    "megatron_lm_config", "main_process", "fsdp_", "zero", "offload_",
)  # fmt: skip

DEEPSPEED = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "memory_breakdown", "dataloader_drop_last",
    "disable_allgather", "use_node_local_storage", "zero_optimization",
)  # fmt: skip
DEEPSPEED_PREFIXES = (
    "optimizer.", "scheduler.", "fp16.", "bf16.", "bfloat16.", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
    "comms_logger", "activation_checkpointing", "aio", "checkpoint", "zero_optimization.", "amp.",
    "curriculum_learning", "data_efficiency", "autotuning", "hybrid_engine", "nebula", "timers", "torch_autocast",
    "compile", "elasticity", "communication_data_type", "data_types",
)  # fmt: skip
"""Beginnings of settings without an effect, once those that have one are read."""
