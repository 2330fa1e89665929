"""Parallelism of a run: DDP, FSDP of Accelerate, ZeRO of DeepSpeed, and Accelerate's ``parallelism_config``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.interop.frameworks.hugging_face import names
from simplan.interop.frameworks.hugging_face.keys import Keys, whole
from simplan.optimizers import OPTIMIZERS

if TYPE_CHECKING:  # a run reads itself by these functions
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

DEEPSPEED_DEFAULT = "the default of DeepSpeed"
_SYNC_EACH_BATCH = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
_VERSIONS = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
_PREFETCHED = ("backward_pre", "1", "no_prefetch", "none")


def read_replicas(run: TrainerRun) -> None:
    """Read DDP's settings."""
    run.reading.put("plan.dp_shard", 1, "DDP replicates parameters")
    if (whole(parallelism_keys(run).value("cp_size")) or 1) > 1:  # axolotl's ACCELERATE_ALLOW_CP_STANDALONE
        run.reading.put("plan.zero_stage", 0, "DDP replicates parameters")
    full = run.reading.written("training.task") not in (None, "pretrain", "lora")
    if full and (run.is_axolotl or (run.is_factory and run.trainer.value("low_cpu_mem_usage", True) is not False)):
        # axolotl at 067b021, utils/config; LLaMA-Factory at ff6d4d1, hparams/parser.py and model/patcher.py
        run.reading.put("software.loading", "device_map", f"the default of {run.tool}")
    if run.accumulates and run.num_devices != 1 and run.trainer.is_true(_SYNC_EACH_BATCH):
        run.trainer.put("plan.grad_sync", "microbatch", _SYNC_EACH_BATCH)
    megabytes = whole(run.trainer.value("ddp_bucket_cap_mb"))
    if megabytes and run.num_devices not in (None, 1):
        run.trainer.put("plan.bucket_bytes", megabytes * 2**20, "ddp_bucket_cap_mb")


def fsdp_keys(run: TrainerRun) -> Keys:
    """Settings of FSDP of Accelerate and of the Trainer, by names without ``fsdp_``."""

    def rename(name: str) -> str:
        return {"offload_params": "cpu_offload"}.get(name.removeprefix("fsdp_"), name.removeprefix("fsdp_"))

    of_accelerate = run.accelerate.view(("fsdp_config.", "fsdp_"), rename)
    of_trainer = run.trainer.view(("fsdp_config.", "fsdp_"), rename)
    both = Keys(run.reading, {**of_accelerate.settings, **of_trainer.settings})
    for key, full in [*run.accelerate.settings.items(), *run.trainer.settings.items()]:
        name = rename(key.removeprefix("fsdp_config."))
        if key.startswith("fsdp_") and both.settings.get(name, full) != full:
            run.reading.value(full)  # fsdp_version next to fsdp_config.fsdp_version: read_fsdp compares them
    return both


def _compare_versions(run: TrainerRun) -> None:
    """Check that a version of FSDP that axolotl has in two places is one."""
    values = {key: whole(run.trainer.value(key)) for key in _VERSIONS if key in run.trainer}
    if len({*values.values()}) > 1:
        first, *_, last = values
        rule = f"is {values[last]}, and {first} = {values[first]}"
        run.reading.contradiction(run.trainer.full(last), rule, "use one version")


def read_fsdp(run: TrainerRun) -> None:
    """Read FSDP's settings, of Accelerate and of the Trainer."""
    keys, options = fsdp_keys(run), run.fsdp_options()
    _compare_versions(run)
    version = whole(keys.value("version")) or (2 if options and not run.is_axolotl else 1)
    strategy, key = _sharding(run, keys, options, version)
    if strategy == "no_shard":
        run.reading.put("plan.dp_shard", 1, key)
        run.reading.not_modeled(key, "FSDP that shards nothing is DDP here")
    else:
        run.reading.put("plan.zero_stage", 2 if strategy.endswith(("grad_op", "zero2", "kept")) else 3, key)
        if strategy.startswith("hybrid"):
            _read_hybrid(run, key)
        elif not run.is_axolotl or (whole(parallelism_keys(run).value("dp_shard_size")) or 1) == 1:
            run.reading.put("plan.dp_replicate", 1, key)  # with a size of shards, axolotl's other ranks are replicas
        if run.accumulates and not run.trainer.is_true(_SYNC_EACH_BATCH):
            where = "Accelerate reduces gradients at the last step of accumulation"
            run.reading.put("plan.grad_sync", "step", where)
    if "offload" in options or keys.is_true("cpu_offload"):
        where = keys.full("cpu_offload") if "cpu_offload" in keys else run.trainer.full("fsdp")
        run.reading.put("plan.offload_optimizer", True, where)
    optimizer = run.reading.written("training.optimizer")
    if version == 1 and optimizer and OPTIMIZERS[optimizer].package == "bitsandbytes":
        key = run.trainer.first("optim", "optimizer") or ""
        run.reading.put("software.flat_shards", True, run.trainer.full(key))
    of_version_1 = _first_full(run, keys, ("version", "sharding_strategy"), "distributed_type", "fsdp")
    if version == 1 and of_version_1 is not None:
        run.reading.not_modeled(of_version_1, "FSDP1 gathers and frees flat parameters; FSDP2 is modeled")
    wrap = str(keys.value("auto_wrap_policy", "transformer_based_wrap")).lower()
    if wrap != "transformer_based_wrap":
        keys.not_modeled("auto_wrap_policy", "each block is one unit of FSDP here")
    if str(keys.value("backward_prefetch", "none")).lower() not in _PREFETCHED:
        keys.not_modeled("backward_prefetch", "FSDP2's order of all-gathers in the backward is modeled")
    if keys.is_true("forward_prefetch"):
        keys.not_modeled("forward_prefetch", "FSDP2's order of all-gathers in the forward is modeled")
    _read_loading(run, keys, version)
    keys.note("fsdp")
    keys.sort_rest("fsdp")


def _read_loading(run: TrainerRun, keys: Keys, version: int) -> None:
    """Read who loads a checkpoint (``SoftwareSpec.loading``), where ranks shard whole layers."""
    loads = run.reading.written("training.task") not in (None, "pretrain")
    splits = (whole(parallelism_keys(run).value("tp_size")) or 1) > 1
    if not loads or splits or not keys.is_true("cpu_ram_efficient_loading"):
        return
    if run.is_axolotl and version == 2:
        keys.put("software.loading", "rank0", "cpu_ram_efficient_loading")
    elif run.reading.written("training.base_weights") is None:  # those of bitsandbytes go to every device
        keys.put("software.loading", "broadcast", "cpu_ram_efficient_loading")


def _first_full(run: TrainerRun, keys: Keys, names: tuple[str, ...], accelerate: str, trainer: str) -> str | None:
    candidates = [*((keys, key) for key in names), (run.accelerate, accelerate), (run.trainer, trainer)]
    return next((view.full(key) for view, key in candidates if key in view), None)


def _sharding(run: TrainerRun, keys: Keys, options: list[str], version: int) -> tuple[str, str]:
    """Sharding strategy of FSDP1 by name, or ``kept`` for parameters that FSDP2 does not reshard; its setting."""
    sharding = next((word for word in options if word in names.SHARDING), None)
    of_config = run.is_axolotl and any(key in keys for key in ("sharding_strategy", "reshard_after_forward"))
    if sharding is not None and not of_config:
        return sharding, run.trainer.full("fsdp")
    for key in ("sharding_strategy", "reshard_after_forward"):
        if key not in keys or (key == "sharding_strategy" and version == 2 and "reshard_after_forward" in keys):
            continue
        value = keys.value(key)
        word = str(value).lower()
        if word in ("true", "false"):
            return ("full_shard" if word == "true" else "kept"), keys.full(key)
        number = whole(value)
        if number is not None and 1 <= number <= len(names.SHARDING):
            return names.SHARDING[number - 1], keys.full(key)
        if word in names.SHARDING:
            return word, keys.full(key)
        keys.refuse(key, "is no sharding strategy", f"use {' or '.join(names.SHARDING)}")
    return "full_shard", "the default of FSDP"


def _read_hybrid(run: TrainerRun, key: str) -> None:
    """Shards within a node, replicas over nodes."""
    if run.ranks_per_node is not None:
        run.reading.put("plan.dp_shard", run.ranks_per_node, run.devices_key)
    else:
        what = f"shards within a node ({run.reading.settings[key] if key in run.reading else key})"
        run.reading.ask("plan.dp_shard", what=what, fix="add --dp-shard 8, the devices of a node")


def read_zero(run: TrainerRun) -> bool:
    """ZeRO of DeepSpeed; True if the optimizer is on the host."""
    inline = run.accelerate.view(("deepspeed_config.", ""))
    deepspeed, key = run.deepspeed, "zero_optimization.stage"
    stage: int | None
    if deepspeed.is_true("zero_optimization"):
        stage, where = 1, deepspeed.full("zero_optimization")
    elif deepspeed:
        stage, where = whole(deepspeed.value(key, 0)), deepspeed.full(key) if key in deepspeed else DEEPSPEED_DEFAULT
    elif "zero_stage" in run.trainer:
        stage, where = whole(run.trainer.value("zero_stage")), run.trainer.full("zero_stage")
    elif _names_missing_file(run):
        return False
    else:
        stage = whole(inline.value("zero_stage", 2))
        where = inline.full("zero_stage") if "zero_stage" in inline else "the default of Accelerate"
    if stage is None:
        fix = "add --set plan.zero_stage=3"
        run.reading.ask("plan.zero_stage", what=f"does not say the stage of ZeRO ({where})", fix=fix)
        run.reading.put("plan.dp_replicate", 1, where)
        return False
    if stage not in (0, 1, 2, 3):
        run.reading.refuse(where, "is no stage of ZeRO", "use 0, 1, 2 or 3")
        return False
    if stage == 0:
        run.reading.put("plan.dp_shard", 1, where)
    else:
        run.reading.put("plan.zero_stage", stage, where)
        mics = whole(deepspeed.value("zero_optimization.mics_shard_size"))
        if mics and mics > 0:
            deepspeed.put("plan.dp_shard", mics, "zero_optimization.mics_shard_size")
        else:
            run.reading.put("plan.dp_replicate", 1, where)
    offloads = _read_offload(run, stage, inline)
    _note_zero(run, stage)
    return offloads


def _names_missing_file(run: TrainerRun) -> bool:
    """Ask for what a DeepSpeed file says that is named and not there."""
    key = run.trainer.first("deepspeed_config", "deepspeed") or "deepspeed_config_file"
    keys = run.trainer if key in run.trainer else run.accelerate
    if key in run.unknown:
        what = f"does not say the file of DeepSpeed's configuration ({keys.full(key)})"
    elif keys.full(key) in run.missing:
        what = f"names the DeepSpeed configuration {keys.value(key)}, which is not next to it"
    else:
        return False
    run.reading.ask("plan.zero_stage", what=what, fix="put it there, or add --set plan.zero_stage=3")
    keys.put("plan.dp_replicate", 1, key)
    return True


def ask_for_fsdp_file(run: TrainerRun) -> None:
    """Ask for what a file of FSDP's settings says that is named and not there."""
    key = "fsdp_config"
    if run.trainer.full(key) in run.missing:
        what = f"names {run.trainer.value(key)} with the settings of FSDP, which is not next to it"
        run.reading.ask("plan.zero_stage", what=what, fix="put it there, or add --set plan.zero_stage=3")


def _read_offload(run: TrainerRun, stage: int, inline: Keys) -> bool:
    """Optimizer states on the host; True if they are there."""
    zero = run.deepspeed.view(("zero_optimization.",))
    places = {}
    for what in ("optimizer", "param"):
        for keys, key in ((zero, f"offload_{what}.device"), (inline, f"offload_{what}_device")):
            value = str(keys.value(key, "none")).lower()
            if value == "nvme":
                keys.refuse(key, "is not modeled: states on NVMe", "use cpu")
            elif value == "cpu" and what == "param" and stage < 3:
                keys.no_effect((key,))  # parameters are offloaded in stage 3 only: runtime/zero/config.py
            elif value == "cpu" and what not in places:
                places[what] = keys, key
    if "optimizer" not in places and zero.is_true("cpu_offload"):
        places["optimizer"] = zero, "cpu_offload"
    if not places:
        return False
    keys, key = places.get("optimizer") or places["param"]
    if "optimizer" not in places:
        keys.refuse(key, "is not modeled without offload_optimizer", "offload both, or neither")
    elif stage < 2:
        keys.refuse(key, f"is not modeled with ZeRO-{stage}", "use stage 2 or 3")
    elif run.adapts and (stage == 2 or "param" not in places):
        why = "states of adapters are on the host, and frozen weights are not; here states are on the device"
        keys.not_modeled(key, why)
        return False
    else:
        keys.put("plan.offload_optimizer", True, key)
        for keys, key in places.values():
            keys.not_modeled(key, "FSDP2's CPUOffloadPolicy, with parameters, gradients and states on the host")
    return True


def _note_zero(run: TrainerRun, stage: int) -> None:
    zero = run.deepspeed.view(("zero_optimization.",))
    zero.note("zero")
    if "overlap_comm" in zero and zero.is_true("overlap_comm") != (stage >= 2):
        why = "reductions overlap the backward in ZeRO-2 and 3 here, and follow it in ZeRO-1"
        zero.not_modeled("overlap_comm", why)
    run.deepspeed.note("deepspeed")


def parallelism_keys(run: TrainerRun) -> Keys:
    """Settings of Accelerate's ``parallelism_config``, which axolotl has as keys of its own."""

    def rename(name: str) -> str:
        return name.removeprefix("parallelism_config_")

    keys = run.accelerate.view(("parallelism_config.", "parallelism_config_"), rename)
    return Keys(run.reading, {**keys.settings, **run.trainer.view(("parallelism_config.",), rename).settings})


def read_parallelism(run: TrainerRun) -> None:
    """Degrees of Accelerate's ``parallelism_config``."""
    keys = parallelism_keys(run)
    for name, path in names.DEGREES.items():
        degree = whole(keys.value(name))
        if degree is not None and not (run.is_axolotl and degree == 1):  # which is left out by axolotl
            keys.put(path, degree, name)
    if (whole(keys.value("sp_size")) or 1) > 1:
        keys.refuse("sp_size", "is not modeled: sequence parallelism of DeepSpeed-Ulysses", "use cp_size")
    if (whole(keys.value("ep_size")) or 1) > 1:
        keys.refuse("ep_size", "is not modeled yet with transformers' models", "use 1")
    if (whole(keys.value("tp_size")) or 1) > 1:
        keys.put("plan.sequence_parallel", False, "tp_size")  # transformers' plans have none
    if (whole(keys.value("cp_size")) or 1) > 1:
        _read_rotation(run, keys)
    keys.no_effect(("sp_size", "sp_backend", "sp_seq_length_is_variable", "sp_attn_implementation", "cp_backend"))
    if (whole(keys.value("cp_size")) or 1) == 1:
        keys.no_effect(("cp_comm_strategy",))


def _read_rotation(run: TrainerRun, keys: Keys) -> None:
    """Put the communication of keys and values between context-parallel ranks."""
    if run.is_axolotl:  # ring-flash-attn: all of its kernels take offsets or a triangle, and none a mask tensor
        packs = run.trainer.is_true("sample_packing")
        word = str(run.trainer.value("ring_attn_func", "varlen_llama3" if packs else "batch_ring"))
        key = run.trainer.full("ring_attn_func") if "ring_attn_func" in run.trainer else keys.full("cp_size")
        run.reading.put("plan.cp_comm", "ring", key)
        if word == "varlen_llama3":
            run.reading.not_modeled(key, "keys and values are gathered some heads at a time; here they come in a ring")
        run.trainer.not_modeled("heads_k_stride", "heads whose keys and values are gathered at a time")
        return
    word = str(keys.value("cp_comm_strategy", "allgather")).lower().replace("_", "")
    key = "cp_comm_strategy" if "cp_comm_strategy" in keys else "cp_size"
    if word in names.CP_STRATEGIES:
        keys.put("plan.cp_comm", "ring", key)
        if word == "allgather":
            keys.not_modeled(key, "all keys and values are gathered together, and held; here they come in a ring")
    else:
        keys.refuse(key, "is not modeled yet", f"use {' or '.join(names.CP_STRATEGIES)}")
