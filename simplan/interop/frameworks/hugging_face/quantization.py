"""Weights of few bits in settings of the Hugging Face stack: frozen ones, and those that axolotl simulates (``qat``).

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
    (re.compile(r"(?i)aqlm-2bit-1x16(?:-hf)?$"), {"format": "aqlm_2bit"}),
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
    trainer, fields = run.trainer, dict[str, Any]()
    if trainer.is_true("gptq"):  # axolotl: the checkpoint has these weights
        if run.reading.written(_FIELD) is None:
            trainer.put(_FIELD, {"format": "gptq_int4"}, "gptq")
        trainer.no_effect(("gptq", "gptq_disable_exllama"))
    key = _bits(run, fields)
    if key is None:
        return
    if fields["format"] == "nf4":
        _read_variant(run, fields, key)
    if trainer.is_true("quantize_moe_experts"):  # axolotl, monkeypatch/moe_quant.py
        fields["experts"] = True
        trainer.no_effect(("quantize_moe_experts",))
    if run.is_axolotl or run.is_factory:  # they skip embeddings and head, or do not call it
        fields["upcast"] = False
        if trainer.is_true("upcast_layernorm"):
            trainer.not_modeled("upcast_layernorm", "norms in FP32")
    run.reading.put(_FIELD, fields, trainer.full(key))
    trainer.no_effect((*_FOUR, *_EIGHT, *_TYPES, *_DOUBLE, *_STORAGE, "quantization_bit", "quantization_method"))


def _bits(run: TrainerRun, fields: dict[str, Any]) -> str | None:
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
        four, eight = ("quantization_bit" if bits == width else None for width in (4, 8))
    if four is not None:
        fields["format"] = "nf4"
        return four
    if eight is not None:
        fields["format"] = "int8"
    return eight


def _read_variant(run: TrainerRun, fields: dict[str, Any], key: str) -> None:
    """Read the kind of 4 bits, double quantization and the type of the packed tensor."""
    trainer = run.trainer
    chosen = bool(run.is_axolotl or run.is_factory)
    kind = trainer.first(*_TYPES)
    word = str(trainer.value(kind, "nf4") if kind is not None else "nf4").lower()
    if word in ("nf4", "fp4"):
        fields["format"] = word
    else:
        trainer.refuse(kind or key, "is no type of bitsandbytes", "use nf4 or fp4")
    double = trainer.first(*_DOUBLE)
    if is_true(trainer.value(double, chosen)) if double is not None else chosen:
        fields["double_quantization"] = True
    stored = trainer.first(*_STORAGE)
    usual = {"bf16": "bf16", "fp16": "fp16"}.get(str(run.reading.written("training.precision")), "fp32")
    default = "bf16" if run.is_axolotl else usual if run.is_factory else "uint8"
    storage = (
        _STORAGES.get(str(trainer.value(stored)).lower().removeprefix("torch.")) if stored is not None else default
    )
    if storage is None:
        trainer.refuse(stored or "", "is no type of bitsandbytes' packed weights", "use bfloat16 or uint8")
    elif storage != "uint8":
        fields["storage"] = storage


_QAT = ("qat.weight_dtype", "qat.activation_dtype")
_SIMULATED: dict[tuple[str, str], dict[str, Any]] = {
    # without another type, Int4WeightFakeQuantizeConfig is for activations in FP8
    ("int4", ""): {"weights": "int4_fp8"},
    ("int4", "int8"): {"weights": "int4", "activations": "int8"},
    ("int4", "fp8"): {"weights": "int4_fp8", "activations": "fp8"},
    ("fp8", "fp8"): {"weights": "fp8", "activations": "fp8"},
    ("mxfp4", "mxfp4"): {"weights": "mxfp4", "activations": "mxfp4"},
}
"""Types of weights and activations -> keys of ``fake_quantization``; axolotl at 067b021, utils/quantization.py."""
_GROUP_SIZE = 32


def read_fake_quantization(run: TrainerRun) -> None:
    """Read axolotl's simulated quantization of linear layers."""
    trainer = run.trainer
    if not run.is_axolotl or trainer.first(*_QAT) is None:
        return
    weights, activations = (_word(trainer.value(key)) for key in _QAT)
    where = trainer.first(*_QAT) or ""
    weights = weights or "int8"
    fields = _SIMULATED.get((weights, weights if weights == "mxfp4" else activations))
    if weights == "nvfp4":
        rule = "is what axolotl makes NVFP4WeightOnlyConfig of, which torchao 0.17 and 0.18 cannot simulate"
        trainer.refuse(_QAT[0], rule, "use mxfp4 or int4")
    elif fields is None:
        known = "int4 with int8 or fp8 activations, fp8 with fp8, or mxfp4 with mxfp4"
        rule = f"is no type of weights that axolotl simulates with activations in {activations or 'full precision'}"
        trainer.refuse(where, rule, f"use {known}")
    elif is_true(trainer.value("qat.quantize_embedding", False)):
        trainer.refuse(
            "qat.quantize_embedding", "simulates few bits of the embedding, which is not modeled yet", "use false"
        )
    else:
        group = whole(trainer.value("qat.group_size", _GROUP_SIZE))
        size = {"group_size": group} if weights == "int4" and group is not None else {}
        run.reading.put("training.fake_quantization", {**fields, **size}, trainer.full(where))
    trainer.no_effect(_QAT)


def _word(value: Any) -> str:
    """Type as in ``fake_quantization``; empty for none."""
    word = str(value or "").lower()
    return "fp8" if word in ("float8_e4m3fn", "float8") else word
