"""axolotl, LLaMA-Factory, TRL and Unsloth: settings with names, defaults and meanings of their own.

Sources: axolotl (utils/schemas, utils/distributed.py, utils/config), LLaMA-Factory (hparams, launcher.py) and TRL
(cli/accelerate_config.py), read 2026-11-29.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simplan.interop.configuration import Setting
from simplan.interop.frameworks.hugging_face.keys import AUTO, is_true, table, whole
from simplan.interop.frameworks.hugging_face.names import PROJECTIONS
from simplan.wording import either

if TYPE_CHECKING:  # a run reads itself by these functions
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

AXOLOTL, FACTORY, TRL, UNSLOTH = "axolotl", "LLaMA-Factory", "trl", "Unsloth"
_AXOLOTL_SIGNS = ("base_model", "micro_batch_size", "sequence_len")
_FACTORY_SIGNS = ("stage", "cutoff_len", "template")
_AXOLOTL_NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "base_model": "model_name_or_path",
    "dp_shard_size": "parallelism_config.dp_shard_size",
    "dp_replicate_size": "parallelism_config.dp_replicate_size",
    "tensor_parallel_size": "parallelism_config.tp_size",
    "context_parallel_size": "parallelism_config.cp_size",
    "sequence_parallel_degree": "parallelism_config.cp_size",
    "expert_parallel_size": "parallelism_config.ep_size",
}
"""Keys of axolotl that have another name in TrainingArguments, or in Accelerate's ``ParallelismConfig``."""
_OF_ACCELERATE = (
    "config_file",
    "multi_gpu",
    "num_processes",
    "num_machines",
    "machine_rank",
    "use_fsdp",
    "use_deepspeed",
)
"""Options that ``trl`` and ``axolotl`` pass on to ``accelerate launch``."""


def tool_of(keys: Iterable[str]) -> str:
    """Tool whose configuration has these keys; empty for plain arguments of the Trainer."""
    known = {*keys}
    if len(known.intersection(_AXOLOTL_SIGNS)) >= 2:
        return AXOLOTL
    is_factory = "finetuning_type" in known or len(known.intersection(_FACTORY_SIGNS)) >= 2
    return FACTORY if is_factory else ""


def renamed(tool: str, key: str, setting: Setting, keys: frozenset[str]) -> tuple[str, Setting]:
    """A setting of a tool under its name in TrainingArguments.

    Args:
        keys: All keys of the file.
    """
    if tool != AXOLOTL:
        return key, setting
    if key in ("bf16", "torch_compile") and setting.value == AUTO:  # what it is with BF16 and a recent torch
        return key, replace(setting, value=True)
    if key == "float16" and is_true(setting.value) and "adapter" in keys:  # frozen weights of FP16
        return "fp16", setting
    if key == "bfloat16" and is_true(setting.value):  # BF16 without autocast
        return "bf16", replace(setting, value="full")
    if key == "lora_r" and "adapter" not in keys:
        return "lora_unused", setting
    return _AXOLOTL_NAMES.get(key, key), setting


def split_of_tool(
    tool: str,
    settings: Sequence[tuple[str, Setting]],
) -> tuple[list[tuple[str, Setting]], list[tuple[str, Setting]]]:
    """Arguments of ``trl`` or ``axolotl``: those of the training, and those passed on to ``accelerate launch``.

    ``--accelerate_config`` of TRL names one of TRL's own configurations, or a file.
    """
    options_of_fsdp = tool == TRL
    of_training: list[tuple[str, Setting]] = []
    passed: list[tuple[str, Setting]] = []
    for key, setting in settings:
        if key == "accelerate_config" and (named := table("trl_configurations").get(str(setting.value))) is not None:
            passed += [
                (name, replace(setting, key=f"{setting.key}: {name}", value=value)) for name, value in named.items()
            ]
        elif key == "accelerate_config":
            passed.append(("config_file", setting))
        else:
            is_flag = options_of_fsdp and key.startswith("fsdp_") and not key.startswith("fsdp_config")
            (passed if key in _OF_ACCELERATE or is_flag else of_training).append((key, setting))
    options = {key for key, _ in settings}
    return of_training, [
        (key, setting) for key, setting in passed if key not in options or not setting.key.endswith(f": {key}")
    ]


def read_plugins(run: TrainerRun) -> None:
    """Read axolotl's plugins, which replace parts of a training."""
    listed = run.trainer.value("plugins")
    known: Mapping[str, Any] = table("axolotl_plugins")
    for plugin in listed if isinstance(listed, list) else [listed] if listed else []:
        name = str(plugin).rpartition(".")[2]
        if name not in known:
            run.trainer.refuse("plugins", f"has {name}, which is not modeled yet", "remove it")
        elif known[name]:
            run.trainer.not_modeled("plugins", known[name])


def read_unsloth(run: TrainerRun) -> None:
    """Say what Unsloth does besides PEFT and TRL.

    Sources: unslothai/unsloth at 015bdef, kernels/ (fast_lora.py, rms_layernorm.py, rope_embedding.py, swiglu.py,
    utils.py: one buffer for unpacked weights) and models/mapper.py (names of checkpoints of its own in 4 bits);
    unsloth-zoo at ce232d6, fused_losses/cross_entropy_loss.py and gradient_checkpointing.py.
    """
    trainer = run.trainer
    if not run.runs_unsloth:
        kernels = "its kernels of norms, gates, rotation and adapters are faster and save fewer tensors"
        chunks = "its loss has as many chunks as free memory needs, each of at most 4 GiB of FP32 logits; here 8"
        first = "; ".join([kernels, chunks] if run.preference is None else [kernels])
        trainer.not_modeled("model_name_or_path", first)
    if trainer.is_true("load_in_4bit"):
        trainer.not_modeled(
            "load_in_4bit", "its own 4-bit checkpoints keep some layers in 16 bits; here none of blocks"
        )
    if "activation_offloading" in trainer:
        key = "two buffers on the device serve all blocks; here each block has a tensor, and at most two exist"
        trainer.not_modeled("activation_offloading", key)
    elif run.preference is not None and trainer.is_true("gradient_checkpointing"):
        trainer.not_modeled("gradient_checkpointing", "the inputs of blocks move to host memory")


def read_adapter_kind(run: TrainerRun) -> None:
    """Refuse adapters that are none of LoRA's, but for LLaMA-Factory's OFT."""
    trainer = run.trainer
    key = trainer.first("finetuning_type", "adapter")
    kind = str(trainer.value(key)).lower() if key is not None else "lora"
    if run.is_oft:
        for other in ("oft_rank", "module_dropout"):
            if trainer.value(other):
                trainer.refuse(other, "is not modeled yet with OFT", "use oft_block_size, and no dropout")
        trainer.no_effect(("oft_rank", "module_dropout"))
    elif kind not in ("lora", "qlora", "full", "none", "false", "freeze"):
        trainer.refuse(key or "", "is not modeled yet", "use lora, or train all weights")


def read_optimizer_of_factory(run: TrainerRun) -> bool:
    """Read LLaMA-Factory's GaLore, APOLLO and BAdam, which replace the optimizer; False if none is used.

    Source: LLaMA-Factory at ff6d4d1, train/trainer_utils.py (``create_custom_optimizer``) and hparams/parser.py.
    """
    trainer, known = run.trainer, table("projections")
    name = next((name for name in (*known, "badam") if run.is_factory and trainer.is_true(f"use_{name}")), None)
    if name is None:
        return False
    if run.adapts:
        trainer.refuse(f"use_{name}", "is refused by LLaMA-Factory with adapters", "use finetuning_type: full")
    if name == "badam":
        _read_badam(run)
        return True
    words = known[name]
    for key, value in words["modeled"].items():
        if str(trainer.value(key, value)).lower() != value:
            trainer.refuse(key, "projects other gradients, or in another way, which is not modeled yet", f"use {value}")
    word = str(trainer.value("optim", ""))
    if word in words["optimizers"]:
        trainer.put("training.optimizer", words["optimizers"][word], f"use_{name}")
    else:
        usual = [optimizer for optimizer in words["optimizers"] if optimizer]
        trainer.refuse("optim", f"is no optimizer that LLaMA-Factory has {name} for", f"use {either(usual)}")
    if trainer.value("deepspeed"):
        trainer.refuse("deepspeed", f"is refused by LLaMA-Factory with use_{name}", "use one device, or DDP")
    rank, key = whole(trainer.value(f"{name}_rank")), f"{name}_rank"
    where = trainer.full(key) if rank is not None else f"the default of LLaMA-Factory's {key}"
    run.reading.put("training.optimizer_rank", 16 if rank is None else rank, where)
    if trainer.is_true(f"{name}_layerwise"):
        trainer.put("training.optimizer_in_backward", True, f"{name}_layerwise")
    trainer.no_effect((*words["modeled"], *words["no_effect"], f"{name}_layerwise"))
    return True


def _read_badam(run: TrainerRun) -> None:
    """Read BAdam; ``trained_parts`` reads the block that it trains."""
    trainer = run.trainer
    if str(trainer.value("badam_mode", "layer")) != "layer":
        trainer.refuse("badam_mode", "trains a part of every tensor, which is not modeled yet", "use layer")
    if "optim" in trainer and trainer.value("optim") not in ("adamw_torch", "adamw_torch_fused"):
        trainer.refuse("optim", "is not modeled yet in BAdam's copies", "use adamw_torch")
    trainer.put("training.optimizer", "badam", "use_badam")
    trainer.not_modeled("use_badam", "every step returns the allocator's cache to the driver, which takes time")
    trainer.no_effect(
        ("badam_mode", "badam_switch_mode", "badam_start_block", "badam_switch_interval", "badam_verbose")
    )


def read_projections(run: TrainerRun) -> bool:
    """Read GaLore and APOLLO of transformers; False if ``optim`` names none.

    Source: transformers 5.23, trainer_optimizer.py (``_setup_low_rank_optimizer``).
    """
    trainer, word = run.trainer, str(run.trainer.value("optim")).lower().removeprefix("optimizernames.")
    name = word.removesuffix("_layerwise")
    if name not in PROJECTIONS:
        return False
    trainer.put("training.optimizer", name, "optim")
    if name != word:
        trainer.put("training.optimizer_in_backward", True, "optim")
    targets = trainer.value("optim_target_modules")
    listed = " ".join(map(str, targets)) if isinstance(targets, list) else str(targets or "")
    if targets is None:
        rule = "needs optim_target_modules, without which transformers stops"
        trainer.refuse("optim", rule, "add optim_target_modules: [attn, mlp]")
    elif listed.replace("_", "-") == "all-linear":
        why = "the head's gradient is projected as well; here it is not"
        trainer.not_modeled("optim_target_modules", why)
    elif not ("attn" in listed and "mlp" in listed):
        rule = "projects the gradients of some matrices only, which is not modeled yet"
        trainer.refuse("optim_target_modules", rule, 'use ["attn", "mlp"], or all-linear')
    settings = dict(
        part.partition("=")[::2] for part in str(trainer.value("optim_args", "")).replace(" ", "").split(",")
    )
    for other, usual in table("projection_arguments").items():
        if settings.get(other, usual) != usual:
            trainer.refuse("optim_args", f"has another {other}, which is not modeled yet", f"use {other}={usual}")
    where = trainer.full("optim_args") if "rank" in settings else "the default of transformers"
    run.reading.put("training.optimizer_rank", whole(settings.get("rank")) or 128, where)
    trainer.no_effect(("optim_args", "optim_target_modules"))
    return True
