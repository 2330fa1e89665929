"""LLaMA-Factory's trainers with Megatron Core: mcore_adapter (``USE_MCA=1``) and Megatron Bridge.

Their settings stand in the file of arguments under Megatron Core's own names. Sources: LLaMA-Factory at ff6d4d1,
train/mca/workflow.py, train/megatron_bridge/config_builder.py and hparams/megatron_bridge_args.py; alibaba/ROLL at
8eb27cc, mcore_adapter/src/mcore_adapter/training_args.py, models/model_config.py and trainer/trainer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks import tables
from simplan.interop.frameworks.bridge.words import RECIPES
from simplan.interop.frameworks.hugging_face.keys import whole

if TYPE_CHECKING:  # a run reads itself by these functions
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_SIGNS = (
    "use_mca", "use_megatron_bridge", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "expert_model_parallel_size", "use_distributed_optimizer", "megatron_bridge_args",
)  # fmt: skip
_OF_BRIDGE = (
    "use_megatron_bridge", "megatron_bridge_args", "mixed_precision", "use_packed_sequences", "export_hf_on_finish",
    "megatron_pretrained_checkpoint", "extra_config",
)  # fmt: skip
"""Arguments that mcore_adapter does not have."""
_LORA_RANK = 8
_ADAPTERS = "LLaMA-Factory's modules for Megatron Bridge"


def is_of_megatron(run: TrainerRun) -> bool:
    """True if the arguments are for one of LLaMA-Factory's trainers with Megatron Core."""
    return run.is_factory and _sign(run, _SIGNS) is not None


def _sign(run: TrainerRun, keys: Sequence[str]) -> str | None:
    """The first of some arguments that is there and not off."""
    return next((key for key in keys if run.trainer.value(key) not in (None, False, "false")), None)


def read_megatron(run: TrainerRun) -> None:
    """Read plan, precision, optimizer and adapters; batch and model are read as those of the Trainer."""
    trainer, reading = run.trainer, run.reading
    sign = _sign(run, _SIGNS) or ""
    prefix = trainer.full(sign).removesuffix(sign)
    bridge = _sign(run, _OF_BRIDGE)
    words = core.Words(*[prefix] * 6)
    table = tables("hugging_face")["megatron"]
    for key, why in table["refused"].items():
        if trainer.value(key):
            trainer.refuse(key, why, "remove it")
    experts = run.captured is None and (run.model is None or run.model.num_experts > 0)
    degrees = core.read_parallel(reading, words, experts=experts)
    _read_recomputation(run, prefix, of_bridge=bridge is not None)
    origin = f"the default of {'Megatron Bridge' if bridge else 'mcore_adapter'}"
    core.read_data_parallel(reading, words, default=bridge is not None, origin=origin)
    _read_precision(run, of_bridge=bridge is not None)
    core.read_optimizer(reading, prefix, f"{core.ORIGIN}: Adam with decoupled weight decay")
    clip, where = trainer.value("max_grad_norm"), trainer.full("max_grad_norm")
    reading.put("training.clip_grad_norm", 1.0 if clip is None else clip, where if clip is not None else core.ORIGIN)
    if bridge is not None and degrees.get("ep", 1) > 1:
        rule = "divides the batch that LLaMA-Factory gives Megatron Bridge as well, which is not read"
        trainer.refuse("expert_model_parallel_size", rule, "use 1, or give Megatron Bridge's own configuration")
    _read_adapters(run, of_bridge=bridge is not None)
    reading.put("software.preset", "megatron-bridge" if bridge else "megatron-core", trainer.full(bridge or sign))
    if bridge is None:
        _note_defaults(run, sign, table, experts=experts)
    core.sort_rest(reading, _with_prefix(table, prefix), [prefix + name for name in table["no_effect"]], degrees)


def _note_defaults(run: TrainerRun, sign: str, table: Mapping[str, Any], *, experts: bool) -> None:
    """Note what is off in mcore_adapter unless a file turns it on, and on in the profile."""
    for key, default in table["mcore_adapter"].items():
        if run.trainer.value(key) is None and (experts or not key.startswith("moe_")):
            run.trainer.not_modeled(sign, f"{key} is {str(default).lower()} by default: {table['not_modeled'][key][1]}")


def _with_prefix(table: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """The table with the keys of one file."""
    return {"not_modeled": {prefix + key: words for key, words in table["not_modeled"].items()}}


def _read_recomputation(run: TrainerRun, prefix: str, *, of_bridge: bool) -> None:
    """Read recomputation; mcore_adapter recomputes all blocks where no method is named (models/model_config.py)."""
    trainer = run.trainer
    if not of_bridge and trainer.value("recompute_granularity") == "full" and "recompute_method" not in trainer:
        trainer.put("plan.recompute", "full", "recompute_granularity")
        return
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    core.read_recompute(run.reading, prefix, names=names)


def _read_precision(run: TrainerRun, *, of_bridge: bool) -> None:
    """Read the precision of GEMMs and gradients: LLaMA-Factory reduces those of Megatron Bridge in FP32."""
    trainer, reading = run.trainer, run.reading
    half = next((half for half in ("bf16", "fp16") if trainer.is_true(half)), "fp32")
    recipe = str(trainer.value("mixed_precision", "bf16_mixed" if of_bridge else "")).replace("-", "_")
    if of_bridge and recipe not in RECIPES:
        trainer.refuse("mixed_precision", "is not modeled yet", f"use one of {', '.join(RECIPES)}")
    elif of_bridge:
        precision, scaling = RECIPES[recipe]
        key = trainer.full("mixed_precision") if "mixed_precision" in trainer else "the default of Megatron Bridge"
        reading.put("training.precision", precision, key)
        if scaling is not None:
            reading.put("training.fp8_recipe", scaling, key)
    else:
        reading.put("training.precision", half, trainer.full(half) if half in trainer else "no mixed precision")
        key = "accumulate_allreduce_grads_in_fp32"
        where = trainer.full(key) if key in trainer else "the default of mcore_adapter"
        core.grad_dtype(reading, half, trainer.is_true(key), where)
    trainer.no_effect(("bf16", "fp16", "mixed_precision"))


def _read_adapters(run: TrainerRun, *, of_bridge: bool) -> None:
    """Read LoRA, which Megatron Bridge alone has here, on its own modules whatever ``lora_target`` says."""
    trainer, reading = run.trainer, run.reading
    stage = str(trainer.value("stage", "sft")).lower()
    kind = str(trainer.value("finetuning_type", "lora")).lower()
    where = trainer.full("finetuning_type") if "finetuning_type" in trainer else "the default of LLaMA-Factory: lora"
    if kind == "lora" and of_bridge:
        rank = whole(trainer.value("lora_rank"))
        said = (rank, trainer.full("lora_rank")) if rank else (_LORA_RANK, "the default of LLaMA-Factory")
        modules = core.LORA_TARGETS["all"]
        core.put_adapters(reading, key=where, rank=said, modules=modules, modules_key=_ADAPTERS)
        trainer.no_effect(("lora_target", "lora_alpha"))
    elif kind == "full":
        origin = trainer.full("stage") if "stage" in trainer else "the default of LLaMA-Factory: sft"
        reading.put("training.task", "pretrain" if stage == "pt" else "sft", origin)
    else:
        fix = "use full" if not of_bridge else "use full or lora"
        trainer.refuse("finetuning_type", "is no way in which this trainer trains", fix)
    if stage not in ("sft", "pt"):
        trainer.refuse("stage", "is not modeled yet with Megatron Core", "use sft or pt")
