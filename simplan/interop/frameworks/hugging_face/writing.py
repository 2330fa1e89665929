"""Jobs as runs of the Trainer: arguments of a script, with Accelerate's YAML or DeepSpeed's JSON.

Pretraining runs transformers' ``run_clm.py``, fine-tuning TRL's ``sft.py``; both take TrainingArguments.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from simplan.interop.configuration import Setting
from simplan.interop.frameworks.hugging_face.names import DEEPSPEED_OPTIMIZERS, ENDS, OPTIMIZERS
from simplan.interop.frameworks.model_names import config_of
from simplan.interop.writing import MASTER_ADDR, NODE_RANK, Exported, Option, Writing
from simplan.job import Job
from simplan.model.adapters import MODULES
from simplan.model.base_weights import BaseWeights
from simplan.rules.model import has_transformers_code
from simplan.training import REFERENCE_TASKS
from simplan.wording import either

ACCELERATE_FILE, DEEPSPEED_FILE, MODEL_FOLDER, SCRIPT = "accelerate.yaml", "ds_config.json", "model", "train.sh"
HOST_FILE = "hostfile"
_HALVES = ("bf16", "fp16")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_MIB = 2**20
_PROGRAMS = {
    "pretrain": ("run_clm.py", "transformers: examples/pytorch/language-modeling"),
    "sft": ("sft.py", "TRL: trl/scripts"),
    "lora": ("sft.py", "TRL: trl/scripts"),
    "dpo": ("trl/scripts/dpo.py", "TRL 1.16, a checkout"),
    "kto": ("trl/scripts/kto.py", "TRL 1.16, a checkout"),
    "reward": ("trl/scripts/reward.py", "TRL 1.16, a checkout"),
    "orpo": ("orpo.py", "TRL: examples/scripts"),
    "simpo": ("cpo.py", "TRL: examples/scripts"),
}
_TARGETS = {target: module for module, target in reversed({**MODULES, **ENDS}.items())}


def accelerate_options(job: Job) -> tuple[Option, ...]:
    """A job as settings of Accelerate's YAML and arguments of the Trainer.

    Raises:
        NotModelledError: Accelerate cannot express a choice of the job.
    """
    writing = Writing(job, "Accelerate")
    _write_software(writing, "accelerate")
    _write_devices(writing)
    plan, precision = job.plan, job.training.precision
    is_mixed = precision in _HALVES and not job.training.pure_bf16
    writing.set("mixed_precision", precision if is_mixed else "no", "training.precision, training.pure_bf16")
    writing.taken("plan.dp_shard", "plan.dp_replicate", "plan.zero_stage", "plan.reshard_after_forward")
    if plan.zero_stage == 1:
        writing.refuse("plan.zero_stage", "use 0, 2 or 3, or --to deepspeed")
    if plan.zero_stage == 3 and not plan.reshard_after_forward:
        writing.refuse("plan.reshard_after_forward", "use plan.zero_stage = 2, which keeps parameters as well")
    if plan.dp_shard == 1:
        writing.set("distributed_type", "MULTI_GPU" if plan.dp > 1 else "NO", "plan.dp_shard, plan.dp_replicate")
    else:
        _write_fsdp(writing)
    _write_arguments(writing, is_fsdp=plan.dp_shard > 1)
    return writing.finish()


def deepspeed_options(job: Job) -> tuple[Option, ...]:
    """A job as settings of DeepSpeed's JSON and arguments of the Trainer.

    Raises:
        NotModelledError: DeepSpeed cannot express a choice of the job.
    """
    writing = Writing(job, "DeepSpeed")
    plan, training = job.plan, job.training
    _write_software(writing, "accelerate" if plan.offload_optimizer else "deepspeed")
    writing.taken("plan.dp_shard", "plan.dp_replicate", "plan.zero_stage", "plan.offload_optimizer")
    if plan.dp_shard > 1 and plan.dp_replicate > 1:
        writing.refuse("plan.dp_replicate", "use 1: ZeRO shards over all ranks")
    stage = plan.zero_stage if plan.dp_shard > 1 else 0
    writing.set("zero_optimization.stage", stage, "plan.zero_stage")
    if plan.offload_optimizer:
        writing.set("zero_optimization.offload_optimizer.device", "cpu", "plan.offload_optimizer")
        if stage == 3:
            writing.set("zero_optimization.offload_param.device", "cpu", "plan.offload_optimizer")
    for half in _HALVES:
        writing.set(f"{half}.enabled", training.precision == half, "training.precision")
    if writing.value("training.pure_bf16"):
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            writing.set(f"bf16.{key}", True, "training.pure_bf16")
    optimizers = {name: word for word, name in DEEPSPEED_OPTIMIZERS.items() if word != "fusedlamb"}
    if training.optimizer not in optimizers:
        writing.refuse("training.optimizer", f"use {' or '.join(optimizers)}")
    word = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD"}[optimizers[training.optimizer]]
    writing.set("optimizer.type", word, "training.optimizer")
    writing.set("optimizer.params.lr", "auto", "not in the scenario")
    writing.set("gradient_clipping", writing.value("training.clip_grad_norm") or 0, "training.clip_grad_norm")
    writing.set("train_micro_batch_size_per_gpu", plan.microbatch_size, "plan.microbatch_size")
    writing.set("gradient_accumulation_steps", _steps(job), "training.global_batch_size")
    _write_arguments(writing, is_fsdp=False, has_optimizer=False)
    return writing.finish()


def trainer_options(job: Job) -> tuple[Option, ...]:
    """A job as arguments of the Trainer, with those of DeepSpeed or Accelerate.

    Raises:
        NotModelledError: The Trainer cannot express a choice of the job.
    """
    return deepspeed_options(job) if job.software.id == "deepspeed" else accelerate_options(job)


def export_accelerate(job: Job, name: str) -> Exported:
    """Files of a run under ``accelerate launch``.

    Raises:
        NotModelledError: See ``accelerate_options``.
    """
    options = _with_checkpointing(job, accelerate_options(job))
    nodes = job.cluster.num_nodes
    launch = f"accelerate launch --config_file {ACCELERATE_FILE}"
    if nodes > 1:
        launch += ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port 29500'
    files = {SCRIPT: _script(job, name, options, launch), ACCELERATE_FILE: _yaml(job, name, options)}
    return Exported({**files, **_model_files(job)}, f"bash {SCRIPT}", _notes(job))


def export_deepspeed(job: Job, name: str) -> Exported:
    """Files of a run under the launcher of DeepSpeed.

    Raises:
        NotModelledError: See ``deepspeed_options``.
    """
    options = _with_checkpointing(job, deepspeed_options(job))
    cluster = job.cluster
    launch = f"deepspeed --num_nodes {cluster.num_nodes} --num_gpus {cluster.ranks_per_node}"
    hosts = {}
    if cluster.num_nodes > 1:
        launch += f" --hostfile {HOST_FILE}"
        hosts = {HOST_FILE: "".join(f"node{n} slots={cluster.ranks_per_node}\n" for n in range(cluster.num_nodes))}
    data: dict[str, Any] = {}
    for option in options:
        if not option.setting.key.startswith("--"):
            _put(data, option.setting.key, option.setting.value)
    files = {SCRIPT: _script(job, name, options, launch), DEEPSPEED_FILE: json.dumps(data, indent=2) + "\n"}
    return Exported({**files, **hosts, **_model_files(job)}, f"bash {SCRIPT}", _notes(job, has_hosts=bool(hosts)))


def _with_checkpointing(job: Job, options: tuple[Option, ...]) -> tuple[Option, ...]:
    """Options with the recomputation of FSDP in place of the Trainer's, and without TRL's default.

    The Trainer's under FSDP gathers the parameters once more in backward, of which transformers warns. It stays where
    embeddings' results have gradients (``model.input_require_grads``), for which it asks.
    """
    key, written = "--gradient_checkpointing", list(options)
    checkpointing = next(option for option in written if option.setting.key == key)
    last = next(
        (n for n, option in enumerate(written) if option.setting.key == "fsdp_config.fsdp_state_dict_type"), None
    )
    moved = last is not None and not job.model.input_require_grads
    if moved and last is not None:
        written.remove(checkpointing)
        name = "fsdp_config.fsdp_activation_checkpointing"
        written.insert(last + 1, Option(Setting(name, checkpointing.setting.value), checkpointing.comment))
    if job.training.task != "pretrain" and (moved or checkpointing.setting.value is False):
        written.append(Option(Setting(key, "false"), "TRL's default is true"))
    return tuple(written)


def _write_software(writing: Writing, name: str) -> None:
    """The profile, and the option to compile."""
    job = writing.job
    writing.taken("software.id")
    compiled = job.software.compiled
    usual = name if has_transformers_code(job.model) and not compiled else "torch"
    if job.software.id != usual:
        fix = f"use software {usual}" + (", whose models the Trainer runs" if usual == name else "")
        writing.refuse("software.id", fix)
    writing.taken("software.compiled", "software.options", "software.state_bytes")


def _write_devices(writing: Writing) -> None:
    cluster = writing.job.cluster
    writing.set("compute_environment", "LOCAL_MACHINE")
    writing.set("num_machines", cluster.num_nodes, "cluster.num_nodes")
    writing.set("num_processes", cluster.num_devices, "cluster.num_devices")


def _write_fsdp(writing: Writing) -> None:
    plan = writing.job.plan
    where = "plan.zero_stage"
    writing.set("distributed_type", "FSDP", "plan.dp_shard")
    writing.set("fsdp_config.fsdp_version", 2)
    writing.set("fsdp_config.fsdp_reshard_after_forward", plan.zero_stage == 3, where)
    writing.set("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "one unit per block")
    writing.copy("fsdp_config.fsdp_offload_params", "plan.offload_optimizer")
    writing.set("fsdp_config.fsdp_state_dict_type", "SHARDED_STATE_DICT")
    if writing.job.software.loading in ("cpu", "broadcast"):
        is_efficient = writing.value("software.loading") == "broadcast"
        writing.set("fsdp_config.fsdp_cpu_ram_efficient_loading", is_efficient, "software.loading")
    if plan.dp_replicate > 1:
        for key in ("dp_replicate", "dp_shard"):
            degree = getattr(plan, key)
            writing.set(f"parallelism_config.parallelism_config_{key}_size", degree, f"plan.{key}")


def _write_arguments(writing: Writing, *, is_fsdp: bool, has_optimizer: bool = True) -> None:
    """Arguments of the script."""
    job = writing.job
    model, training, plan = job.model, job.training, job.plan
    writing.taken(*(f"model.{field}" for field in type(model).model_fields if field != "document_lengths"))
    config = config_of(model)
    if config is None:
        writing.refuse("model.family", "use a model that transformers has: gpt, llama, moe, mpt, bert, neox or gemma")
    key = "--config_name" if training.task == "pretrain" else "--model_name_or_path"
    writing.set(key, MODEL_FOLDER, "model")
    writing.set("--block_size" if training.task == "pretrain" else "--max_length", model.seq_len, "model.seq_len")
    if training.is_of_preferences:
        _write_preference(writing)
    elif training.task != "pretrain":
        writing.set("--packing", True, "sequences of model.seq_len tokens")
    writing.copy("--per_device_train_batch_size", "plan.microbatch_size")
    writing.taken("training.global_batch_size", "training.task", "training.precision")
    writing.set("--gradient_accumulation_steps", _steps(job), "training.global_batch_size")
    is_pure = writing.value("training.pure_bf16") and writing.target == "Accelerate"
    for half in _HALVES:
        writing.set(f"--{half}", training.precision == half and not is_pure, "training.precision")
    if is_pure:
        writing.set("--dtype", _DTYPES[training.precision], "training.pure_bf16")
    if writing.allowed("training.precision", (*_HALVES, "tf32", "fp32"), "use bf16, fp16, tf32 or fp32") == "tf32":
        writing.set("--tf32", True, "training.precision")
    _write_optimizer(writing, has_optimizer=has_optimizer)
    writing.allowed("plan.recompute", ("none", "full"), "use none or full")
    writing.set("--gradient_checkpointing", plan.recompute == "full", "plan.recompute")
    if writing.job.software.compiled:
        writing.set("--torch_compile", True, "software.compiled")
    _write_loss(writing)
    _write_synchronization(writing, is_fsdp=is_fsdp)
    if model.lora_rank:
        targets = [_TARGETS.get(target, "") for target in model.lora_targets]
        if not all(targets):
            writing.refuse("model.lora_targets", f"use {', '.join(_TARGETS)}")
        writing.set("--use_peft", True, "training.task")
        writing.set("--lora_r", model.lora_rank, "model.lora_rank")
        writing.set("--lora_target_modules", targets, "model.lora_targets")
        writing.set("--lora_dropout", writing.value("model.lora_dropout"), "model.lora_dropout")
        writing.allowed("model.lora_oft", (False,), "use LoRA: TRL's arguments have no OFT")
        if writing.value("model.lora_dora"):
            writing.set("--use_dora", True, "model.lora_dora")
        if ends := writing.value("model.lora_modules_to_save"):
            modules = {end: module for module, end in reversed(ENDS.items())}
            writing.set("--lora_modules_to_save", [modules[end] for end in ends], "model.lora_modules_to_save")
    if training.base_weights is not None:
        _write_base_weights(writing, training.base_weights)


def _write_preference(writing: Writing) -> None:
    """Arguments of TRL's trainers on preferences."""
    training, model, key = writing.job.training, writing.job.model, "training.preference"
    preference = training.preference
    writing.taken(key)
    if preference is not None and (preference.reference_sharded is not None or preference.reference_dtype is not None):
        writing.refuse(key, "remove reference_sharded and reference_dtype, which TRL decides")
    if writing.job.reference == "precomputed":
        writing.set("--precompute_ref_log_probs", True, key)
    elif writing.job.reference == "second_model" and model.lora_rank:
        writing.refuse(key, "use adapters_off, as TRL does with adapters")
    if training.task == "simpo":
        writing.set("--loss_type", "simpo", "training.task")
    if model.lora_dropout:
        writing.set("--disable_dropout", "false", "model.lora_dropout")


def _write_base_weights(writing: Writing, base: BaseWeights) -> None:
    """Arguments of TRL's ModelConfig for weights of few bits."""
    key, is_four = "training.base_weights", base.format in ("nf4", "fp4")
    if not (is_four or base.format == "int8") or base.library == "torchao":
        writing.refuse(key, "use nf4, fp4 or int8 of bitsandbytes")
    if base.upcast is not None or base.block_size is not None or base.keeps_inputs:
        writing.refuse(key, "remove upcast, block_size and keeps_inputs, which the script decides")
    writing.taken(key)
    writing.set("--load_in_4bit" if is_four else "--load_in_8bit", True, key)
    if is_four:
        writing.set("--bnb_4bit_quant_type", base.format, key)
        writing.set("--use_bnb_nested_quant", base.double_quantization, key)
        words = {"uint8": "uint8", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        writing.set("--bnb_4bit_quant_storage", words[base.storage], key)


def _write_loss(writing: Writing) -> None:
    """Loss in chunks: Liger's alone of its kernels, or that of TRL."""
    software, training = writing.job.software, writing.job.training
    if training.is_of_preferences:
        has_chunks = training.task in REFERENCE_TASKS
        known = ("recomputed", "fused") if has_chunks else ("whole",)
        if writing.allowed("software.loss", known, f"use {either(known)}") == "fused":
            writing.set("--use_liger_kernel", True, "software.loss")
        return
    is_trl, chunked = training.task != "pretrain", software.chunked_losses.get(software.loss)
    kinds = [loss for loss, entry in software.chunked_losses.items() if entry.fused or (is_trl and entry.recomputed)]
    writing.allowed("software.loss", ("whole", *kinds), f"use {either(['whole', *kinds])}")
    if chunked is not None and chunked.fused:
        writing.set("--use_liger_kernel", True, "software.loss")
        kernels = {"fused_linear_cross_entropy": True, "rope": False, "rms_norm": False, "swiglu": False}
        writing.set("--liger_kernel_config", json.dumps(kernels), "software.loss")
    elif is_trl:
        writing.set("--loss_type", "nll" if chunked is None else "chunked_nll", "software.loss")


def _write_optimizer(writing: Writing, *, has_optimizer: bool) -> None:
    training = writing.job.training
    writing.taken("training.optimizer")
    if has_optimizer:
        writing.taken("training.fused_optimizer")
        fused = training.fused_optimizer is not False
        words = {("adamw", True): "adamw_torch_fused", ("adamw", False): "adamw_torch", ("sgd", False): "sgd"}
        words |= {(name, True): word for word, name in OPTIMIZERS.items() if name not in ("adamw", "sgd", "muon")}
        if (training.optimizer, fused) not in words:
            writing.refuse("training.optimizer", "use adamw, or sgd with fused_optimizer = false")
        writing.set("--optim", words[training.optimizer, fused], "training.optimizer, training.fused_optimizer")
    writing.set("--max_grad_norm", writing.value("training.clip_grad_norm") or 0, "training.clip_grad_norm")


def _write_synchronization(writing: Writing, *, is_fsdp: bool) -> None:
    """Reduction of gradients over steps of accumulation, and DDP's buckets."""
    plan = writing.job.plan
    writing.taken("plan.grad_sync")
    every = plan.grad_sync == "microbatch" or (is_fsdp and plan.grad_sync is None)
    if every and _steps(writing.job) > 1 and writing.target == "Accelerate":
        value = json.dumps({"gradient_accumulation_kwargs": {"sync_each_batch": True}})
        writing.set("--accelerator_config", value, "plan.grad_sync")
    elif plan.grad_sync == "step" and _steps(writing.job) == 1:
        writing.refuse("plan.grad_sync", "remove it: there is one microbatch")
    size = plan.bucket_bytes
    if size is not None:
        if size % _MIB or writing.target != "Accelerate":
            writing.refuse("plan.bucket_bytes", "use a multiple of 1 MiB under Accelerate")
        writing.taken("plan.bucket_bytes")
        writing.set("--ddp_bucket_cap_mb", size // _MIB, "plan.bucket_bytes")


def _steps(job: Job) -> int:
    """Steps of gradient accumulation."""
    return max(1, job.training.global_batch_size // (job.plan.dp * job.plan.microbatch_size))


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[last] = value


def _yaml(job: Job, name: str, options: tuple[Option, ...]) -> str:
    """Accelerate's file, each line with the key of the scenario that it says."""
    lines, section = [f"# {name}: {job.plan.dp} data-parallel ranks, written by simplan"], ""
    for option in options:
        key = option.setting.key
        if key.startswith("--"):
            continue
        outer, _, inner = key.rpartition(".")
        if outer != section and outer:
            lines.append(f"{outer}:")
        section = outer
        value = json.dumps(option.setting.value) if isinstance(option.setting.value, bool) else option.setting.value
        value = f"'{value}'" if value in ("no", "NO") else value
        comment = f"  # {option.comment}" if option.comment else ""
        lines.append(f"{'  ' if outer else ''}{inner}: {value}{comment}")
    return "\n".join([*lines, ""])


def _script(job: Job, name: str, options: tuple[Option, ...], launch: str) -> str:
    """Launch script with the arguments in an array, each with a comment."""
    program, origin = _PROGRAMS[job.training.task]
    lines = ["#!/bin/bash", f"# {name}: written by simplan. Fill in:"]
    lines.append(f"PROGRAM={program}  # {origin}")
    lines.append("TOKENIZER=your-tokenizer  # name or folder" if job.training.task == "pretrain" else "")
    lines.append("DATASET=your-dataset  # name or folder")
    if job.cluster.num_nodes > 1 and launch.startswith("accelerate"):
        lines += [NODE_RANK, MASTER_ADDR]
    lines += ["", "ARGUMENTS=("]
    for option in options:
        setting = option.setting
        if not setting.key.startswith("--") or setting.value is False:
            continue
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        words = [setting.key, *(shlex.quote(str(value)) for value in values if value is not True)]
        lines.append(f"  {' '.join(words)}" + (f"  # {option.comment}" if option.comment else ""))
    if launch.startswith("deepspeed"):
        lines.append(f"  --deepspeed {DEEPSPEED_FILE}")
    tokenizer = ' --tokenizer_name "$TOKENIZER"' if job.training.task == "pretrain" else ""
    lines += [f'  --dataset_name "$DATASET"{tokenizer} --output_dir output --do_train', ")", ""]
    return "\n".join([*lines, f'{launch} "$PROGRAM" "${{ARGUMENTS[@]}}"', ""])


def _model_files(job: Job) -> dict[str, str]:
    config = config_of(job.model) or {}
    if job.training.pure_bf16:
        config["dtype"] = _DTYPES[job.training.precision]  # of a model without a checkpoint
    return {f"{MODEL_FOLDER}/config.json": json.dumps(config, indent=2) + "\n"}


def _notes(job: Job, *, has_hosts: bool = False) -> tuple[str, ...]:
    program, origin = _PROGRAMS[job.training.task]
    notes = [f"set PROGRAM in {SCRIPT} to {program} ({origin}), and the data and tokenizer below it"]
    if job.training.task != "pretrain":
        notes.append(f"put the weights of the model into {MODEL_FOLDER}/, next to its config.json")
    if has_hosts:
        notes.append(
            f"write the names of your nodes into {HOST_FILE}, and start it on one of them: it starts the others"
        )
    elif job.cluster.num_nodes > 1:
        notes.append("start it on every node, with NODE_RANK and MASTER_ADDR set")
    return tuple(notes)
