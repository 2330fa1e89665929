"""A training run of the Hugging Face stack: what the files of one run say together, as a scenario.

A run has up to three files: arguments of the Trainer, the configuration of ``accelerate launch``, and DeepSpeed's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simplan import catalog
from simplan.catalog.spelling import find
from simplan.errors import SpecError
from simplan.interop.allocator import note_allocator
from simplan.interop.configuration import Configuration, Reading
from simplan.interop.frameworks import names_without_effect
from simplan.interop.frameworks.factory_megatron import is_of_megatron, read_megatron
from simplan.interop.frameworks.hugging_face import names
from simplan.interop.frameworks.hugging_face.adapters import read_targets
from simplan.interop.frameworks.hugging_face.devices import read_devices
from simplan.interop.frameworks.hugging_face.images import capture_instead, read_frozen_parts, read_images
from simplan.interop.frameworks.hugging_face.keys import Keys, table, whole
from simplan.interop.frameworks.hugging_face.preference import (
    SETTINGS,
    preference_task,
    read_preference,
    read_preference_loss,
)
from simplan.interop.frameworks.hugging_face.quantization import (
    read_base_weights,
    read_fake_quantization,
    weights_of_checkpoint,
)
from simplan.interop.frameworks.hugging_face.strategies import (
    DEEPSPEED_DEFAULT,
    ask_for_fsdp_file,
    fsdp_keys,
    read_fsdp,
    read_parallelism,
    read_replicas,
    read_zero,
)
from simplan.interop.frameworks.hugging_face.tools import (
    AXOLOTL,
    FACTORY,
    UNSLOTH,
    read_adapter_kind,
    read_optimizer_of_factory,
    read_plugins,
    read_projections,
    read_unsloth,
)
from simplan.interop.frameworks.hugging_face.trained_parts import read_trained_parts
from simplan.interop.frameworks.model_names import preset_of
from simplan.interop.huggingface import model_fields_from_config
from simplan.interop.nccl import read_nccl_algo
from simplan.io import folder_of, is_file, read_json
from simplan.model.captured.facts import CapturedModel
from simplan.model.model import ModelSpec
from simplan.optimizers import OPTIMIZERS
from simplan.rules.model import has_transformers_code

_TRAINER = "the default of transformers' TrainingArguments"
_TRL = "the default of TRL 1; --precision and --recompute say otherwise for older ones"
_TRL_LOSS = "the default of TRL 1.7; --set software.loss=whole says otherwise for older ones"
_LIGER = ("use_liger_kernel", "enable_liger_kernel", "use_liger")
"""Settings of transformers, LLaMA-Factory and older TRL that replace modules of a model by Liger's kernels."""
_OTHER_LIGER_KERNELS = ("rope", "rms_norm", "swiglu")
_HALVES = ("bf16", "fp16")
_FEW_BITS = re.compile(
    r"(?i)(?:^|[-_.])(?:awq|gptq|aqlm|hqq|eetq|gguf|bnb|nf4|int4|int8|fp8|nvfp4|mxfp4|w4a16|w8a8|w8a16|\d-?bits?)(?=$|[-_.])"
)
"""Words in the name of a checkpoint whose weights are quantized."""
_DEEPSPEED = frozenset(("deepspeed", "deepspeed_config"))
"""Arguments that name the file of DeepSpeed."""
_OFT_BLOCK_SIZE = 32
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "fp16": "fp16"}


@dataclass(slots=True)
class TrainerRun:
    """Files of one run.

    Attributes:
        reading: Reading of all of them.
        trainer: Arguments of the training script, which are TrainingArguments with those of the script.
        accelerate: Configuration and options of ``accelerate launch``.
        deepspeed: DeepSpeed's configuration.
        num_devices, ranks_per_node: Ranks that the launcher starts; None if no file says so.
        devices_key: Setting that says so.
        names_launcher: True if the files say how the run is launched, so that DDP is what is left.
        unknown: Arguments whose values the script does not say.
        missing: Settings that name files which are not there.
        tool: Tool that the arguments are for: axolotl, LLaMA-Factory, Unsloth, or empty.
        num_nodes: Nodes, if a file says so without the ranks of each.
        is_trl: True if the program is one of TRL's own scripts.
        task: Words on the program or setting that makes it supervised fine-tuning; empty for none.
        preference: Task of preference training, and the program or setting that says it; None for another task.
        reads_others: False if no other files must be read.
        instead: See ``ConfigFile``.
    """

    reading: Reading
    trainer: Keys
    accelerate: Keys
    deepspeed: Keys
    num_devices: int | None = None
    ranks_per_node: int | None = None
    devices_key: str = ""
    names_launcher: bool = True
    unknown: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    tool: str = ""
    num_nodes: int | None = None
    is_trl: bool = False
    task: str = ""
    preference: tuple[str, str] | None = None
    reads_others: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)
    _precision: str = field(default="", init=False)
    _model: ModelSpec | None = field(default=None, init=False)
    _captured: CapturedModel | None = field(default=None, init=False)

    def configuration(self) -> Configuration:
        """The run as sections of a scenario.

        Raises:
            SpecError: Settings are refused, or contradict each other.
        """
        read_devices(self)
        read_plugins(self)
        other = next((key for key in ("do_predict", "do_eval") if self.trainer.is_true(key)), None)
        if self.is_factory and other is not None and not self.trainer.is_true("do_train"):
            self.trainer.refuse(other, "is of a run that trains nothing, as do_train is not true", "add do_train: true")
            return self.reading.finish(is_whole=False)
        if is_of_megatron(self):
            self._read_batch()
            self._read_model()
            read_images(self)
            read_megatron(self)
            self._read_rest("megatron")
            return self.reading.finish()
        strategy = self._strategy()
        self._read_precision(strategy)
        self._read_batch()
        self._read_optimizer(strategy)
        self._read_recomputation(strategy)
        self._read_model()
        self._read_adapters()
        self._read_gradients_of_inputs(strategy)
        offloads = False
        if strategy == "deepspeed":
            offloads = read_zero(self)
        elif strategy == "fsdp":
            read_fsdp(self)
            ask_for_fsdp_file(self)
        elif strategy == "ddp":
            read_replicas(self)
        else:
            what = "does not say what ranks shard, which the configuration of `accelerate launch` does"
            if (key := self.accelerate.full("config_file")) in self.missing:
                what = f"names {self.accelerate.value('config_file')}, which is not next to it ({key})"
            self.reading.ask(
                *("plan.zero_stage", "plan.dp_shard", "plan.dp_replicate"),
                what=what,
                fix="give the launch script with that file, or add --set plan.zero_stage=3 (FSDP), or 0 (DDP)",
            )
        read_parallelism(self)
        self._choose_software(strategy, offloads=offloads)
        if self.is_unsloth:
            read_unsloth(self)
        read_nccl_algo(self.reading)
        note_allocator(self.reading, grown=True)
        self._read_rest(strategy)
        return self.reading.finish()

    @property
    def precision(self) -> str:
        """Precision of the run, once it is read."""
        return self._precision

    # Batch and precision

    def _strategy(self) -> str:
        """``deepspeed``, ``fsdp``, ``ddp``, or empty if the files do not say."""
        kind = str(self.accelerate.value("distributed_type", "")).upper()
        if kind and kind.rpartition(".")[2] not in names.DISTRIBUTED_TYPES:
            fix = names.OTHER_DISTRIBUTED_TYPES.get(kind, f"use {' or '.join(names.DISTRIBUTED_TYPES)}")
            self.accelerate.refuse("distributed_type", "is not modeled", fix)
        of_trainer = self.trainer.value("deepspeed") or "zero_stage" in self.trainer  # the latter of DeepSpeed-Chat
        if self.unknown & {"fsdp", "config_file"}:
            return ""
        of_trainer = of_trainer or "deepspeed_config" in self.trainer or bool(self.unknown & _DEEPSPEED)
        if self.deepspeed or of_trainer or kind == "DEEPSPEED" or self.accelerate.is_true("use_deepspeed"):
            return "deepspeed"
        options = self.fsdp_options()
        if kind == "FSDP" or self.accelerate.is_true("use_fsdp") or (options and "no_shard" not in options):
            return "fsdp"
        if self.is_axolotl and any(key.startswith("fsdp_config.") for key in self.trainer.settings):
            return "fsdp"  # core/builders: fsdp_config or fsdp, of which the latter is deprecated
        is_launched = kind or self.names_launcher or self.accelerate.is_true("multi_gpu")
        return "ddp" if is_launched or options or self.num_devices == 1 else ""

    @property
    def is_axolotl(self) -> bool:
        """True for a configuration of axolotl."""
        return self.tool == AXOLOTL

    @property
    def is_factory(self) -> bool:
        """True for a configuration of LLaMA-Factory."""
        return self.tool == FACTORY

    @property
    def is_unsloth(self) -> bool:
        """True for Python code with Unsloth."""
        return self.tool == UNSLOTH

    @property
    def runs_unsloth(self) -> bool:
        """True for adapters on a model for which Unsloth has kernels that are modeled, once both are read."""
        base = self.reading.written("training.base_weights") or {}
        is_known = self._model is not None and self._model.family == "llama" and base.get("format") != "int8"
        return self.is_unsloth and is_known and self.adapts and self.preference is None and self._precision != "fp8"

    @property
    def is_oft(self) -> bool:
        """True for LLaMA-Factory's OFT."""
        return self.is_factory and str(self.trainer.value("finetuning_type", "")).lower() == "oft"

    @property
    def model(self) -> ModelSpec | None:
        """Model that a file names, once it is read; None for one whose shapes are not known."""
        return self._model

    @property
    def captured(self) -> CapturedModel | None:
        """Captured model that an override names, once the model is read; None for none."""
        return self._captured

    @property
    def adapts(self) -> bool:
        """True if low-rank adapters are trained."""
        return self._adapter_rank() is not None

    def fsdp_options(self) -> list[str]:
        """Words of the argument ``fsdp``: ``full_shard``, ``auto_wrap``, ``offload``; or ``true``."""
        value = self.trainer.value("fsdp")
        listed = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
        return [str(word).lower() for word in listed if str(word).lower() not in ("false", "none")]

    def _read_precision(self, strategy: str) -> None:
        if self._read_fp8(strategy):
            self._precision = "fp8"
            self.trainer.no_effect(("tf32", "torch_dtype", "dtype", "model_dtype"))
            return
        precision_and_key = next(self._precisions(), None)
        if precision_and_key is None and self.unknown & {*_HALVES, "mixed_precision"}:
            precision = self._ask_for_precision("")
        elif precision_and_key is not None:
            precision, key = precision_and_key
            self.reading.put("training.precision", precision, key)
        elif self.is_trl and not {"bf16", "fp16"} & self.trainer.settings.keys():
            precision = "bf16"
            self.reading.put("training.precision", precision, _TRL)
        elif strategy == "" or (strategy == "deepspeed" and not self.trainer and not self.accelerate):
            precision = self._ask_for_precision(strategy)
        else:
            precision = "tf32" if self.trainer.is_true("tf32") else "fp32"
            where = self.trainer.full("tf32") if precision == "tf32" else "no mixed precision is the default"
            if precision == "fp32" and "mixed_precision" in self.accelerate:
                where = self.accelerate.full("mixed_precision")
            self.reading.put("training.precision", precision, where)
        self._precision = precision
        self.trainer.no_effect(("tf32",))
        self._read_weights(strategy)

    def _ask_for_precision(self, strategy: str) -> str:
        """Precision that files without a launcher or Trainer leave open; empty if it has to be asked for."""
        auto = [key for key in ("bf16.enabled", "fp16.enabled") if key in self.deepspeed.settings]
        if strategy == "deepspeed" and not auto:
            self.reading.put("training.precision", "fp32", DEEPSPEED_DEFAULT)
            return "fp32"
        what = "does not say the precision, which `accelerate launch` may set"
        if auto:
            what = f"leaves the precision to the Trainer ({' and '.join(auto)}: auto)"
        self.reading.ask("training.precision", what=what, fix="add --precision bf16")
        return ""

    def _precisions(self) -> Any:
        """Pairs of precision and setting, the deciding one first."""
        for half in _HALVES:
            if self.deepspeed.is_true(f"{half}.enabled"):
                yield half, self.deepspeed.full(f"{half}.enabled")
        for half in _HALVES:
            is_mixed = str(self.trainer.value("mixed_precision", "")).lower() == half
            if self.trainer.is_true(half) or is_mixed or (half == "bf16" and self._is_full_bf16):
                yield half, self.trainer.full(half if half in self.trainer else "mixed_precision")
        if "zero_stage" in self.trainer.settings and not self.deepspeed:  # DeepSpeed-Chat writes the file itself
            half = _DTYPES.get(str(self.trainer.value("dtype", "fp16")).lower(), "fp16")
            yield half, self.trainer.full("dtype") if "dtype" in self.trainer else "the default of DeepSpeed-Chat"
        word = str(self.accelerate.value("mixed_precision", "")).lower()
        if word in _HALVES:
            yield word, self.accelerate.full("mixed_precision")
        if self.accelerate.is_true("fp16"):
            yield "fp16", self.accelerate.full("fp16")

    def _read_fp8(self, strategy: str) -> bool:
        """Read FP8 of torchao, which axolotl scales by tensor and LLaMA-Factory by row; True if it is on."""
        trainer, backend = self.trainer, str(self.trainer.value("fp8_backend", "torchao")).lower()
        fix = "use bf16, or software torch with fp8"
        if str(self.accelerate.value("mixed_precision", "")).lower() == "fp8":
            self.accelerate.refuse("mixed_precision", "is not modeled yet with transformers' models", fix)
        if not trainer.is_true("fp8"):
            return False
        options = ("fp8_enable_fsdp_float8_all_gather", "fp8_backend")
        is_sharded = strategy == "deepspeed" and whole(self.deepspeed.value("zero_optimization.stage")) == 3
        if is_sharded and self.is_factory and backend in ("torchao", "auto"):
            # fp8_utils.py, module_filter_func: matrices only, and a weight of ZeRO-3 has no dimensions between uses
            why = "LLaMA-Factory converts no layer of ZeRO-3, whose weights are empty at that time: they run in BF16"
            trainer.not_modeled("fp8", why)
            trainer.no_effect(options)
            return False
        if strategy == "deepspeed":
            trainer.refuse("fp8", "is not modeled yet with DeepSpeed", "use bf16, or FSDP")
        elif backend not in ("torchao", "auto"):
            trainer.refuse("fp8_backend", "is not modeled yet with transformers' models", "use torchao")
        trainer.put("training.precision", "fp8", "fp8")
        if self.is_factory:
            self.reading.put("training.fp8_recipe", "rowwise", "LLaMA-Factory's recipe of torchao")
        if trainer.is_true("fp8_enable_fsdp_float8_all_gather") and not self.is_factory:
            trainer.not_modeled("fp8_enable_fsdp_float8_all_gather", "all-gathers of weights in FP8; here in BF16")
        trainer.no_effect((*_HALVES, *options))
        return True

    def _read_weights(self, strategy: str) -> None:
        """Precision in which the weights are loaded, which FSDP and DeepSpeed may widen."""
        trainer = self.trainer
        key = trainer.first("torch_dtype", "dtype", "model_dtype")
        loaded = _DTYPES.get(str(trainer.value(key or "", "")).lower().removeprefix("torch."))
        if trainer.is_true("use_badam"):  # LLaMA-Factory, model/adapter.py: weights stay as in the checkpoint
            key, loaded = "use_badam", "bf16"
        elif trainer.is_true("pure_bf16"):
            key, loaded = "pure_bf16", "bf16"
        elif self.is_axolotl and trainer.is_true("float16"):
            key, loaded = "float16", "fp16"
        elif key is None and self.is_axolotl:
            key = next((half for half in _HALVES if half in trainer), None)
            loaded = self._precision if self._precision in _HALVES else None
        if self.is_factory and self._adapter_rank() is not None and self._precision == "fp32":
            # LLaMA-Factory, model/patcher.py, patch_config: frozen weights stay as in the checkpoint, without autocast
            loaded = "bf16"
            self.reading.put("software.autocast", False, "neither bf16 nor fp16 is set")
        is_mixed = self._precision in _HALVES and key != "pure_bf16" and not self._is_full_bf16
        if self._adapter_rank() is not None:
            if loaded == "bf16" and self._precision == "fp32":
                self._precision = "bf16"
                where = trainer.full(key) if key is not None else "the dtype of most checkpoints"
                self.reading.put("training.precision", "bf16", where)
            if key == "pure_bf16" or self._is_full_bf16:
                trainer.not_modeled(key or "bf16", "adapters of 16 bits; here adapters and their states are FP32")
        elif strategy == "deepspeed":
            self._read_deepspeed_states()
        elif loaded is None or (strategy == "fsdp" and is_mixed):
            self._note_checkpoint(strategy, is_mixed=is_mixed)
        elif self._precision == "fp16" or (loaded == "fp16" and is_mixed):
            rule = "trains weights of 16 bits without an FP32 copy under autocast of FP16, which is not modeled"
            trainer.refuse(key or "", rule, "use bfloat16, float32 with mixed precision, or FP16 without autocast")
        else:
            if self._precision != loaded:
                self._precision = loaded
                trainer.put("training.precision", loaded, key or "")
            trainer.put("training.pure_bf16", True, key or "")
        trainer.no_effect(("float16", "torch_dtype", "dtype", "model_dtype", "pure_bf16"))

    @property
    def _is_full_bf16(self) -> bool:
        """True for axolotl's ``bf16: full``, which is BF16 without autocast."""
        return str(self.trainer.value("bf16", "")).lower() == "full"

    def _read_deepspeed_states(self) -> None:
        """Master weights and states of DeepSpeed in BF16; half of that needs states on the host."""
        keys = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
        if all(self.deepspeed.is_true(key) for key in keys):
            self.deepspeed.put("training.pure_bf16", True, keys[1])
        elif self.deepspeed.is_true(keys[0]):
            self.deepspeed.not_modeled(keys[0], "FP32 copies are modeled")

    def _note_checkpoint(self, strategy: str, *, is_mixed: bool) -> None:
        """Note that a checkpoint may be of 16 bits where nothing makes FP32 weights of it."""
        of_checkpoint = "model_name_or_path" in self.trainer and not self.is_factory
        if strategy == "ddp" and is_mixed and of_checkpoint:
            why = (
                "weights, gradients and states are FP32 here; transformers 5 loads checkpoints in their own precision, "
                "and for one of BF16 --set training.pure_bf16=true is right"
            )
            self.reading.not_modeled(self.trainer.full(self._precision), why)

    def _read_batch(self) -> None:
        key = self.trainer.first("per_device_train_batch_size", "per_gpu_train_batch_size") or ""
        micro, micro_key = self._number(key, "train_micro_batch_size_per_gpu")
        steps, steps_key = self._number("gradient_accumulation_steps", "gradient_accumulation_steps")
        total = whole(self.deepspeed.value("train_batch_size"))
        if self.is_axolotl and steps is None and micro and (batch := whole(self.trainer.value("batch_size"))):
            steps, steps_key = max(1, batch // micro), self.trainer.full("batch_size")
        has_own = not self.is_axolotl and self.trainer.first(*names.OWN_BATCHES) is not None
        is_trainer = not has_own and (self.tool or self.trainer.first(*names.OF_TRAINER) is not None)
        if is_trainer and micro is None and "per_device_train_batch_size" not in self.unknown:
            micro, micro_key = 8, _TRAINER
        if self.trainer and steps is None and total is None and "gradient_accumulation_steps" not in self.unknown:
            steps, steps_key = 1, _TRAINER
        devices = self.num_devices
        if total is not None and devices is not None and micro is None and total % (devices * (steps or 1)) == 0:
            micro, micro_key = total // devices // (steps or 1), self.deepspeed.full("train_batch_size")
        if micro is None:
            self.reading.ask(
                "plan.microbatch_size",
                what="does not say how many sequences a microbatch has",
                fix="add --microbatch-size 1",
            )
        else:
            self.reading.put("plan.microbatch_size", micro, micro_key)
        if total is not None:
            self.deepspeed.put("training.global_batch_size", total, "train_batch_size")
            if steps is not None:
                self.reading.put("num_microbatches", steps, steps_key)
            if devices is None and micro is not None and steps is not None:
                if total % (micro * steps):
                    rule = f"is not a multiple of {micro} sequences x {steps} steps of accumulation"
                    self.reading.contradiction(self.deepspeed.full("train_batch_size"), rule)
                else:
                    devices = total // micro // steps  # DeepSpeed stops with any other number
                    self.deepspeed.put("cluster.num_devices", devices, "train_batch_size")
            if (
                devices is not None
                and micro is not None
                and total != micro * devices * (steps or total // micro // devices)
            ):
                rule = f"is not {micro} sequences x {devices} devices x {steps or 1} steps of accumulation"
                self.reading.contradiction(self.deepspeed.full("train_batch_size"), rule)
        elif steps is None:
            self.reading.ask(
                "training.global_batch_size",
                "num_microbatches",
                what="does not say how large the batch is",
                fix="add --num-microbatches 1, the steps of gradient accumulation",
            )
        else:
            self.reading.put("num_microbatches", steps, steps_key)

    def _number(self, trainer: str, deepspeed: str) -> tuple[int | None, str]:
        """Number that the Trainer and DeepSpeed both have, and its setting; they must agree."""
        candidates = [
            (value, keys.full(key))
            for keys, key in ((self.trainer, trainer), (self.deepspeed, deepspeed))
            if (value := whole(keys.value(key))) is not None
        ]
        for key in (deepspeed, f"deepspeed_config.{deepspeed}"):  # the Trainer's own value wins over Accelerate's
            value = whole(self.accelerate.value(key))
            candidates += [(value, self.accelerate.full(key))] if value is not None and not candidates else []
        if len({value for value, _ in candidates}) > 1:
            (first, key), (other, other_key) = candidates[:2]
            self.reading.contradiction(other_key, f"is {other}, and {key} = {first}", "use auto, or the same number")
        return candidates[0] if candidates else (None, "")

    @property
    def accumulates(self) -> bool:
        """True if an optimizer step has several microbatches."""
        steps, _ = self._number("gradient_accumulation_steps", "gradient_accumulation_steps")
        return (steps or 1) > 1

    # Optimizer, recomputation

    def _read_optimizer(self, strategy: str) -> None:
        of_deepspeed = self.deepspeed.value("optimizer.type")
        if of_deepspeed is not None:
            self._put_optimizer(self.deepspeed, "optimizer.type", names.DEEPSPEED_OPTIMIZERS)
            self.trainer.no_effect(("optim",))
        elif self.trainer.is_true("use_muon"):  # LLaMA-Factory's, which replaces the one of optim
            self.trainer.put("training.optimizer", "muon", "use_muon")
            self.trainer.no_effect(("optim",))
        elif self.trainer.is_true("use_adam_mini"):
            self.trainer.put("training.optimizer", "adam_mini", "use_adam_mini")
            self.trainer.no_effect(("optim",))
        elif read_optimizer_of_factory(self):
            self.trainer.no_effect(("optim",))
        elif "optim" in self.trainer and read_projections(self):
            pass
        elif "optim" in self.trainer:
            self._put_optimizer(self.trainer, "optim", names.OPTIMIZERS)
            if str(self.trainer.value("optim")) in names.UNFUSED and strategy != "deepspeed":
                self.trainer.put("training.fused_optimizer", False, "optim")
        else:
            where = _TRAINER if self.trainer else "usual; no file names one"
            self.reading.put("training.optimizer", "adamw", where)
        if self.reading.written("training.optimizer_in_backward"):
            self.trainer.no_effect(("max_grad_norm",))  # no gradient is left whose norm could be taken
            return
        clip = self.trainer.value("max_grad_norm", 1.0 if self.trainer else None)
        key = self.trainer.full("max_grad_norm") if "max_grad_norm" in self.trainer else _TRAINER
        if "gradient_clipping" in self.deepspeed:
            clip, key = self.deepspeed.value("gradient_clipping"), self.deepspeed.full("gradient_clipping")
        elif (
            clip_key := self.accelerate.first("gradient_clipping", "deepspeed_config.gradient_clipping")
        ) is not None and not self.trainer:
            clip, key = self.accelerate.value(clip_key), self.accelerate.full(clip_key)
        if not isinstance(clip, int | float) or isinstance(clip, bool) or clip <= 0:
            return
        self.reading.put("training.clip_grad_norm", float(clip), key)

    def _put_optimizer(self, keys: Keys, key: str, known: dict[str, str]) -> None:
        word = str(keys.value(key)).lower().removeprefix("optimizernames.")
        if word in known:
            keys.put("training.optimizer", known[word], key)
        else:
            rule = "is an optimizer that is not modeled yet, for it has other states"
            keys.refuse(key, rule, "use " + ("AdamW" if known is names.DEEPSPEED_OPTIMIZERS else "adamw_torch_fused"))

    def _read_recomputation(self, strategy: str) -> None:
        """Activation checkpointing: of the model, or of FSDP."""
        fsdp = fsdp_keys(self) if strategy == "fsdp" else Keys(self.reading)
        for keys, key in (
            (self.trainer, "gradient_checkpointing"),
            (self.trainer, "activation_checkpointing"),
            (fsdp, "activation_checkpointing"),
        ):
            if key in keys and keys.value(key) != "offload":
                recompute = "full" if keys.is_true(key) else "none"
                if recompute == "full" or self.reading.written("plan.recompute") is None:
                    keys.put("plan.recompute", recompute, key)
        if self.trainer.value("gradient_checkpointing") == "offload":
            self.trainer.put("plan.recompute", "full", "gradient_checkpointing")
            self.trainer.not_modeled("gradient_checkpointing", "the inputs of blocks move to host memory")
        if self.trainer.is_true("disable_gradient_checkpointing"):
            self.trainer.put("plan.recompute", "none", "disable_gradient_checkpointing")
        elif self.is_factory and "gradient_checkpointing" not in self.trainer:
            # LLaMA-Factory, model/model_utils/checkpointing.py: on unless disable_gradient_checkpointing
            self.reading.put("plan.recompute", "full", "the default of LLaMA-Factory")
        elif self.is_trl and self.reading.written("plan.recompute") is None:
            self.reading.put("plan.recompute", "full", _TRL)
        self._read_offloaded_activations()
        if fsdp.is_true("activation_checkpointing_offload"):
            fsdp.not_modeled("activation_checkpointing_offload", "the inputs of blocks move to host memory")

    def _read_gradients_of_inputs(self, strategy: str) -> None:
        """Gradients of what frozen embeddings make, which transformers asks for where it recomputes blocks itself.

        Source: transformers 5.23, modeling_utils.py, ``gradient_checkpointing_enable`` (models of text); PEFT 0.21,
        peft_model.py, ``_prepare_model_for_gradient_checkpointing``; LLaMA-Factory at ff6d4d1, model_utils/
        checkpointing.py, ``get_custom_gradient_checkpointing_func``.
        """
        key = self.trainer.first("gradient_checkpointing", "activation_offloading") or "gradient_checkpointing"
        fsdp = fsdp_keys(self) if strategy == "fsdp" else Keys(self.reading)
        of_fsdp = any(keys.is_true("activation_checkpointing") for keys in (self.trainer, fsdp))
        recomputes = self.reading.written("plan.recompute") == "full" and not of_fsdp
        hooks = self.captured is not None and bool(self.captured.input_embeddings) and not self.is_factory
        if self.adapts and recomputes and (self.captured is None or hooks):
            where = self.trainer.full(key) if key in self.trainer else "the default, recomputation"
            self.reading.put("model.input_require_grads", True, where)

    def _read_offloaded_activations(self) -> None:
        """Activations on the host, by TRL's offloader: axolotl, loaders/model.py, ``_apply_activation_checkpointing``.

        With adapters it replaces recomputation; else the inputs of recomputed blocks are moved.
        """
        key, trainer = "activation_offloading", self.trainer
        value = str(trainer.value(key, "false")).lower()
        if value in ("false", "none", "disabled"):
            trainer.no_effect((key,))
            return
        if "disk" in value:
            trainer.refuse(key, "moves saved tensors to a disk, which is not modeled yet", "use true")
        trainer.put("plan.offload_activations", True, key)
        recompute = "none" if self.adapts and value not in ("hidden_states", "unsloth") else "full"
        trainer.put("plan.recompute", recompute, key)
        if value == "legacy":
            trainer.not_modeled(key, "copies that follow a block; here they overlap the next ones")

    # Model

    def _read_model(self) -> None:
        length = self.trainer.first(*names.LENGTHS)
        tokens = whole(self.trainer.value(length)) if length is not None else None
        if length is not None and tokens is not None:
            self.trainer.put("model.seq_len", tokens, length)
            packs = any(self.trainer.is_true(key) for key in names.PACKING)
            if not packs and length != "block_size":
                why = "shorter sequences are padded to the longest of their batch only; all are this long here"
                self.trainer.not_modeled(length, why)
        elif self.is_factory and length is None:
            self.reading.put("model.seq_len", 2048, "the default of LLaMA-Factory's cutoff_len, 1024 before 0.9.2")
        else:
            self.reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")
        key = self.trainer.first(*names.MODELS)
        name = str(self.trainer.value(key) or "") if key is not None else ""
        if _FEW_BITS.search(name.rstrip("/").rpartition("/")[2]):
            self._read_few_bits(key or "", name.rstrip("/").rpartition("/")[2])
        base = folder_of(self.reading.file)
        folders = (name, ".") if self.reads_others else ()
        folder = next(
            (candidate for candidate in folders if candidate and _config_in(base, candidate) is not None), None
        )
        if folder is not None and (folder != "." or not preset_of(name)):
            path = _config_in(base, folder)
            assert path is not None
            self.reading.put("model.hf_config", path, self.trainer.full(key) if folder != "." and key else "next to it")
            self._model = _model_of(base / path, tokens)
        elif preset := preset_of(name):
            self.trainer.put("model.preset", preset, key or "")
            self._model = catalog.model(preset)
        else:
            what = f"names the model {name}, whose shapes are not in the catalog" if name else "names no model"
            fix = "add --model with its config.json or its capture, or with a name of `simplan show models`"
            self.reading.ask("model.preset", "model.hf_config", "model.file", what=what, fix=fix)
        self._captured = capture_instead(self)
        self._model = self._model_instead(tokens) if self._captured is None else None
        self._read_window()
        self.trainer.no_effect((*names.MODELS, *names.LENGTHS))

    def _read_window(self) -> None:
        """Leave out a window as long as sequences: FlashAttention 2 ignores it, and SDPA makes a mask tensor of it.

        Source: transformers 5.23, modeling_flash_attention_utils.py (``key_length > sliding_window``), and
        masking_utils.py (``_ignore_causal_mask_sdpa``: ``kv_length >= local_attention_size``).
        """
        key, length = self.trainer.first(*names.FLASH_ATTENTION), self.reading.written("model.seq_len")
        length = self.instead.get("seq_len", length)
        is_flash = key is not None and str(self.trainer.value(key)).lower() in names.FLASH_ATTENTION_WORDS
        if is_flash and self._model is not None and length is not None and self._model.sliding_window == length:
            self.trainer.put("model.sliding_window", None, key or "")

    def _model_instead(self, tokens: int | None) -> ModelSpec | None:
        """Model that an override names, of whose blocks settings speak then; else that of the file."""
        preset, config = self.instead.get("preset"), self.instead.get("hf_config")
        if preset is not None and (name := find("models", preset).name):
            return catalog.model(name)
        return self._model if config is None else _model_of(Path(config), tokens)

    def _read_few_bits(self, key: str, name: str) -> None:
        """Read the weights of a checkpoint whose name says that they are quantized."""
        known = weights_of_checkpoint(name) if self._adapter_rank() is not None else None
        if known is None:
            rule = "names weights of few bits, which are not modeled yet"
            self.trainer.refuse(key, rule, "name a checkpoint of 16 bits")
            return
        self.trainer.put("training.base_weights", known, key)

    def _adapter_rank(self) -> tuple[str, int] | None:
        """Setting and rank of low-rank adapters, 0 if it is not said; None if all weights are trained."""
        trainer = self.trainer
        uses = trainer.first("use_peft", "use_peft_lora", "use_lora", "finetuning_type", "adapter")
        word = str(trainer.value(uses)).lower() if uses is not None else "lora" if self.is_factory else ""
        rank = "oft_block_size" if self.is_oft else trainer.first("lora_r", "lora_rank", "lora_dim")
        if self.is_oft and "oft_block_size" not in trainer:
            return "the default of LLaMA-Factory's oft_block_size", _OFT_BLOCK_SIZE
        number = whole(trainer.value(rank)) if rank is not None else None
        if word in ("false", "full", "none", "freeze") or (not word and not number):
            return None
        if number is None:
            where = trainer.full(uses) if uses is not None else "the default of LLaMA-Factory: lora"
            return where, names.ADAPTER_RANKS.get(uses or "finetuning_type", 0)
        return trainer.full(rank or ""), number

    def _read_adapters(self) -> None:
        trainer = self.trainer
        read_adapter_kind(self)
        read_images(self)
        read_trained_parts(self)
        read_frozen_parts(self)
        read_base_weights(self)
        read_fake_quantization(self)
        task = preference_task(self)
        for key, (neutral, what) in table("other_tasks").items():
            if task is not None and key in SETTINGS:
                continue
            if key in trainer and str(trainer.value(key)).lower() not in neutral:
                fix = "predict an update of its policy as sft" if "preference" in what or "learning" in what else ""
                trainer.refuse(key, f"belongs to {what}, which is not modeled yet", fix)
        adapters = self._adapter_rank()
        if task is not None:
            self.preference = task
            read_preference(self, task[0], has_adapters=adapters is not None)
        if str(trainer.value("stage", "")).lower() == "sft":
            self.task = trainer.full("stage")
        elif self.is_axolotl and not trainer.value("pretraining_dataset"):
            self.task = "base_model, whose weights axolotl loads"
        if adapters is None:
            trainer.no_effect(("lora_dropout",))
            if task is not None:
                self.reading.put("training.task", *task)
            elif self.task:
                self.reading.put("training.task", "sft", self.task)
            return
        key, rank = adapters
        self.reading.put("training.task", *(task or ("lora", key)))
        if rank:
            self.reading.put("model.lora_rank", rank, key)
        else:
            what = f"trains adapters of a rank that it does not say ({key})"
            self.reading.ask("model.lora_rank", what=what, fix="add --set model.lora_rank=8")
        read_targets(self)

    # Software, and what is left

    def _choose_software(self, strategy: str, *, offloads: bool) -> None:
        where = {"deepspeed": "DeepSpeed with ", "fsdp": "FSDP with "}.get(strategy, "") + "transformers' models"
        is_split = any((self.reading.written(f"plan.{name}") or 1) > 1 for name in ("cp", "tp"))
        compiles = self._compiles()
        moves = bool(self.reading.written("plan.offload_activations"))
        targets = self.reading.written("model.lora_targets") or ()
        routed = not {*table("routed")}.isdisjoint(name.rpartition(".")[2] for name in targets)
        if self.runs_unsloth:
            name, where = "unsloth", "Unsloth's kernels"
        elif self.is_unsloth:
            name, where = "torch", "Unsloth's code of this job is not modeled, and torch's norms are fused as well"
            self.reading.put("software.loading", "device_map", "Unsloth loads onto the device")
        elif self._precision == "fp8":
            name, where = "torch", "the code of transformers in FP8 is not modeled"
            if compiles is not None:
                self.reading.put("software.compiled", True, compiles)
                compiles = None
        elif not self._has_transformers_code() or is_split or moves or routed:
            of = "split over sequences or tensors" if is_split else "for this model"
            of = "with activations on the host" if moves else "with adapters of experts" if routed else of
            name, where = "torch", f"the code of transformers {of} is not modeled"
            if strategy == "deepspeed":
                where += ", and neither are DeepSpeed's states with it"
        elif compiles is not None and strategy != "deepspeed":
            name, where = "torch", compiles
            self.reading.put("software.compiled", True, compiles)
            compiles = None
        else:
            name = "deepspeed" if strategy == "deepspeed" and not offloads else "accelerate"
        if compiles is not None:
            self.reading.not_modeled(compiles, "compiled blocks are faster and save fewer tensors")
        self.reading.put("software.preset", name, where)
        optimizer = self.reading.written("training.optimizer")
        of_bnb = optimizer is not None and OPTIMIZERS[optimizer].package == "bitsandbytes"
        stands_in = strategy == "deepspeed" and name != "deepspeed"
        if stands_in and of_bnb and (self.reading.written("plan.zero_stage") or 0) > 1:
            self.reading.put("software.flat_shards", True, "ZeRO's flat shards")
        self._read_loss()

    def _has_transformers_code(self) -> bool:
        """False if transformers' code of the model is not modeled, with sequences as long as those of the run."""
        if self._model is None:
            return True
        seq_len = self.reading.written("model.seq_len") or self._model.seq_len
        return has_transformers_code(self._model.model_copy(update={"seq_len": seq_len}))

    def _read_loss(self) -> None:
        """Loss in chunks: Liger's, or that of TRL, which is its default."""
        trainer, split = self.trainer, (self.reading.written("plan.tp") or 1) > 1
        if self.preference is not None:
            read_preference_loss(self, self.preference[0])
            return
        if self.is_unsloth:
            if not self.runs_unsloth:
                self.reading.put("software.loss", "chunked", "Unsloth's fused cross-entropy")
            return
        for key in (key for key in _LIGER if trainer.is_true(key)):
            chosen = {name: trainer.value(f"liger_kernel_config.{name}") for name in _OTHER_LIGER_KERNELS}
            if any(value is not False for value in chosen.values()):
                trainer.not_modeled(key, "fused norms, gates and rotation are faster and save fewer tensors")
            if trainer.value("liger_kernel_config.fused_linear_cross_entropy") is not False:
                trainer.put("software.loss", "fused", key)
            return
        if trainer.is_true("liger_fused_linear_cross_entropy"):
            trainer.put("software.loss", "fused", "liger_fused_linear_cross_entropy")
        elif "loss_type" in trainer:
            loss = str(trainer.value("loss_type")).lower()
            if loss == "chunked_nll":
                trainer.put("software.loss", "recomputed", "loss_type")
            elif loss != "nll":
                trainer.not_modeled("loss_type", "cross-entropy is modeled")
        elif self.is_trl and not split:
            self.reading.put("software.loss", "recomputed", _TRL_LOSS)

    def _compiles(self) -> str | None:
        """Setting that turns torch.compile on; None if it is off."""
        key = self.accelerate.first("dynamo_config.dynamo_backend", "dynamo_backend") or ""
        backend = str(self.accelerate.value(key, "no")).lower()
        if self.trainer.is_true("torch_compile"):
            return self.trainer.full("torch_compile")
        return self.accelerate.full(key) if backend not in ("no", "eager") else None

    def _read_rest(self, strategy: str) -> None:
        if strategy != "fsdp":
            fsdp_keys(self).no_effect(names_without_effect("fsdp"))  # of no FSDP
        self.trainer.note("trainer")
        self.accelerate.note("accelerate")
        self.trainer.sort_rest("trainer")
        self.accelerate.sort_rest("accelerate")
        self.deepspeed.sort_rest("deepspeed")


def _config_in(base: Path, name: str) -> str | None:
    """``config.json`` of a model in a folder below ``base``, relative to it; None if there is none."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return None
    file = base / path / "config.json"
    try:
        return str(path / "config.json") if is_file(file) and "model_type" in read_json(file) else None
    except SpecError:
        return None


def _model_of(path: Path, seq_len: int | None) -> ModelSpec | None:
    try:
        fields = model_fields_from_config(read_json(path), name=path.parent.name, seq_len=seq_len or 1)
        return ModelSpec.model_validate(fields)
    except (SpecError, ValueError):  # the reading of the section reports it
        return None
