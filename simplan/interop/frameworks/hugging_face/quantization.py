"""Frozen weights of few bits in settings of the Hugging Face stack: bitsandbytes' arguments, and names of checkpoints.

Defaults: TRL (trl/trainer/model_config.py) and PEFT's examples, whose arguments scripts have: nf4, no double
quantization, uint8; axolotl at 067b021, loaders/model.py (nf4, double quantization, BF16 storage);
LLaMA-Factory at ff6d4d1, model/model_utils/quantization.py (nf4, double quantization, storage of the compute dtype).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from simplan.interop.frameworks.hugging_face.keys import is_true, whole

if TYPE_CHECKING:
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_FIELD = "training.base_weights"
_FOUR = ("load_in_4bit", "use_4bit_quantization", "q_lora")
_EIGHT = ("load_in_8bit", "use_8bit_quantization")
_TYPES = ("bnb_4bit_quant_type", "quantization_type", "bnb_config_kwargs.bnb_4bit_quant_type")
_DOUBLE = (
    "bnb_4bit_use_double_quant",
    "use_bnb_nested_quant",
    "use_nested_quant",
    "double_quantization",
    "bnb_config_kwargs.bnb_4bit_use_double_quant",
)
_STORAGE = ("bnb_4bit_quant_storage", "bnb_4bit_quant_storage_dtype", "bnb_config_kwargs.bnb_4bit_quant_storage")
_STORAGES = {"uint8": "uint8", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32"}
_CHECKPOINTS = (
    (re.compile(r"(?i)gptq.*(?:int4|4bit|4-bit)|(?:^|-)int4$"), {"format": "gptq_int4"}),
    (re.compile(r"(?i)(?:^|[-_.])awq(?:$|[-_.])"), {"format": "awq_int4"}),
    (re.compile(r"(?i)-gptq$"), {"format": "gptq_int4"}),
    (re.compile(r"(?i)bnb-4bit$"), {"format": "nf4", "double_quantization": True}),
    (re.compile(r"(?i)bnb-nf4-bf16$"), {"format": "nf4", "storage": "bf16"}),
)
"""Patterns of names of checkpoints, and their weights; Qwen's Int4 are of GPTQ, as are TheBloke's of 4 bits, and
Unsloth's bnb-4bit of bitsandbytes."""
_DYNAMIC = re.compile(r"(?i)unsloth-bnb-4bit$")


def weights_of_checkpoint(name: str) -> dict[str, Any] | None:
    """Keys of ``base_weights`` that the name of a checkpoint says; None for other names."""
    if _DYNAMIC.search(name):  # some layers stay in 16 bits
        return None
    return next((keys for pattern, keys in _CHECKPOINTS if pattern.search(name)), None)


def read_base_weights(run: TrainerRun) -> None:
    """Read the format of frozen weights below adapters."""
    trainer, found = run.trainer, dict[str, Any]()
    if trainer.is_true("gptq"):  # axolotl: the checkpoint has these weights
        if run.reading.written(_FIELD) is None:
            trainer.put(_FIELD, {"format": "gptq_int4"}, "gptq")
        trainer.no_effect(("gptq", "gptq_disable_exllama"))
    key = _bits(run, found)
    if key is None:
        return
    if found["format"] == "nf4":
        _read_variant(run, found, key)
    if trainer.is_true("quantize_moe_experts"):  # axolotl, monkeypatch/moe_quant.py
        found["experts"] = True
        trainer.no_effect(("quantize_moe_experts",))
    if run.is_axolotl or run.is_factory:  # they skip embeddings and head, or do not call it
        found["upcast"] = False
        if trainer.is_true("upcast_layernorm"):
            trainer.not_modeled("upcast_layernorm", "norms in FP32")
    run.reading.put(_FIELD, found, trainer.full(key))
    trainer.no_effect((*_FOUR, *_EIGHT, *_TYPES, *_DOUBLE, *_STORAGE, "quantization_bit", "quantization_method"))


def _bits(run: TrainerRun, found: dict[str, Any]) -> str | None:
    """Setting that says that weights are quantized, and their format without its variants; None if they are not."""
    trainer = run.trainer
    adapter = trainer.first("adapter", "finetuning_type")
    four = next((key for key in _FOUR if trainer.is_true(key)), None)
    if four is None and adapter is not None and str(trainer.value(adapter)).lower() == "qlora":
        four = adapter
    eight = next((key for key in _EIGHT if trainer.is_true(key)), None)
    if "quantization_bit" in trainer:
        bits, method = (
            whole(trainer.value("quantization_bit")),
            str(trainer.value("quantization_method", "bnb")).lower(),
        )
        if method not in ("bnb", "bitsandbytes"):
            trainer.refuse("quantization_method", "is not modeled yet", "use bnb")
        elif bits not in (4, 8):
            trainer.refuse("quantization_bit", "is not modeled yet: bitsandbytes has 4 and 8 bits", "use 4")
        four, eight = ("quantization_bit" if bits == each else None for each in (4, 8))
    if four is not None:
        found["format"] = "nf4"
        return four
    if eight is not None:
        found["format"] = "int8"
    return eight


def _read_variant(run: TrainerRun, found: dict[str, Any], key: str) -> None:
    """Read the kind of 4 bits, double quantization and the type of the packed tensor."""
    trainer = run.trainer
    chosen = bool(run.is_axolotl or run.is_factory)
    kind = trainer.first(*_TYPES)
    word = str(trainer.value(kind, "nf4") if kind is not None else "nf4").lower()
    if word in ("nf4", "fp4"):
        found["format"] = word
    else:
        trainer.refuse(kind or key, "is no type of bitsandbytes", "use nf4 or fp4")
    double = trainer.first(*_DOUBLE)
    if is_true(trainer.value(double, chosen)) if double is not None else chosen:
        found["double_quantization"] = True
    stored = trainer.first(*_STORAGE)
    usual = {"bf16": "bf16", "fp16": "fp16"}.get(str(run.reading.written("training.precision")), "fp32")
    own = "bf16" if run.is_axolotl else usual if run.is_factory else "uint8"
    storage = _STORAGES.get(str(trainer.value(stored)).lower().removeprefix("torch.")) if stored is not None else own
    if storage is None:
        trainer.refuse(stored or "", "is no type of bitsandbytes' packed weights", "use bfloat16 or uint8")
    elif storage != "uint8":
        found["storage"] = storage
