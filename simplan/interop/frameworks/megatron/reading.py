"""Arguments of Megatron-LM as a scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks import tables
from simplan.interop.frameworks.megatron.arguments import Arguments, alike, hyphenated, is_above, read_arguments
from simplan.interop.frameworks.megatron.model import read_model
from simplan.interop.frameworks.megatron.options import (
    CONTEXT_PARALLEL,
    CORE,
    DEEPSPEED,
    DEFAULT,
    EXPERTS,
    LATENT_ATTENTION,
    MODEL,
    OF_2021,
    OF_2022,
    PLAN,
    T5,
    TRAINING,
)
from simplan.interop.frameworks.megatron.plan import read_parallelism, read_recompute, read_sharding, read_stages
from simplan.interop.frameworks.shell import OTHER_FILE

TITLE = "Megatron-LM arguments"
_SIGNS_OF_CORE = ("--use-mcore-models", "--use-flash-attn", "--attention-backend", "--moe-router-topk", "--fp8-format")
_SIGNS_OF_2021 = (
    "--checkpoint-activations", "--activations-checkpoint-method",
    "--activations-checkpoint-num-layers", "--distribute-checkpointed-activations",
    "--checkpoint-num-layers", "--use-contiguous-buffers-in-ddp",
)  # fmt: skip
_SIGNS_OF_2022 = (
    "--data-impl",
    "--DDP-impl",
    "--layernorm-epsilon",
    "--no-query-key-layer-scaling",
    "--use-legacy-models",
)
_MATCHES = (*MODEL, *T5, *EXPERTS, *LATENT_ATTENTION, *PLAN, *TRAINING, CONTEXT_PARALLEL)
_FP8_RECIPES = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise"}
_NUM_DEVICES = "devices"
"""Name of the product of nodes and ranks per node of the launcher, in origins."""


def read(file: ConfigFile) -> Configuration:
    """Scenario of a launch script.

    Raises:
        SpecError: See ``read_arguments``, and ``Reading.finish``.
    """
    arguments = read_arguments(file)
    words = " x ".join(f"{setting.key} {setting.value}" for setting in arguments.launcher)
    line = arguments.launcher[0].line if arguments.launcher else None
    devices = Setting(_NUM_DEVICES, words, line if line is not None and line < OTHER_FILE else None)
    reading = Reading.of(TITLE, file.name, (*arguments.settings, devices, *arguments.extra))
    if arguments.num_devices is None:
        reading.value(_NUM_DEVICES)
    return MegatronReader(reading, arguments).configuration()


class MegatronReader:
    """Reader of one set of arguments.

    Attributes:
        reading: Arguments on their way into a scenario.
        arguments: The arguments, with those that are not certain.
        software: Profile that models this version.
        table: Tables of options without a key in a scenario.
        asked: Argument whose value decides the plan -> key of the scenario that is asked for if it is not known.
    """

    def __init__(self, reading: Reading, arguments: Arguments) -> None:
        self.reading = reading
        self.arguments = arguments
        self.software = CORE
        self.table = tables("megatron")
        self.asked: dict[str, str] = {match.key: match.path for match in _MATCHES} | self.table["asked"]

    def configuration(self) -> Configuration:
        """Read everything."""
        self._check_program()
        self._read_unsure()
        self._read_software()
        read_model(self)
        read_parallelism(self)
        read_stages(self)
        read_recompute(self)
        read_sharding(self)
        self._read_training()
        self._read_devices()
        self._sort_rest()
        return replace(self.reading.finish(), search={"schedule": ["1f1b", "interleaved_1f1b"]})

    def _check_program(self) -> None:
        program = self.arguments.program
        for part, what in self.table["refused_programs"].items():
            if part in program.lower():
                self.reading.refuse(
                    program, f"trains {what}, which are not modeled yet", "give a script of pretrain_gpt.py"
                )
                return
        for key, (rule, fix) in self.table["refused"].items():
            value = self.reading.settings[key].value if key in self.reading else None
            if value not in (None, 0, "none", "None"):
                self.reading.refuse(key, rule, fix)
        known = {*self.table["flags"], *self.table["not_modeled"], *self.table["refused"], *self.asked}
        no_effect = self.table["no_effect"]
        for setting, other in hyphenated(self.arguments.settings):
            is_own = alike(no_effect, setting.key) or setting.key.startswith("--deepspeed")
            if not is_own and (other.key in known or alike(no_effect, other.key)):
                self.reading.contradiction(setting.key, "is no argument of Megatron-LM", f"write {other.key}")

    def _read_unsure(self) -> None:
        """Ask for values that decide the plan and that the file does not tell."""
        asked: set[str] = set()
        for setting, why in self.arguments.unsure:
            path = self.asked.get(setting.key)
            is_rotary = setting.key == "--max-position-embeddings" and self.value("--position-embedding-type") == "rope"
            if path is None or path in asked or is_rotary:
                continue
            shown = setting.key if setting.value is True else f"{setting.key} {setting.value}"
            place = f" in line {setting.line}" if setting.line is not None else ""
            usual = self.table["usual"].get(path, f"--set {path}=...")
            fix = f"add {usual}"
            if why.endswith("argument of the script") and not asked:
                fix += f", or name a file with the line: bash {self.reading.file.rpartition('/')[2]} ARGUMENTS"
            asked.add(path)
            keys = ("model.preset", "model.hf_config") if path.startswith("model.") and path != "model.seq_len" else ()
            self.reading.ask(path, *keys, what=f"has {shown}{place}, which {why}", fix=fix)

    def is_unsure(self, *keys: str) -> bool:
        """True if the file has one of the arguments, and its value is not known."""
        return any(setting.key in keys for setting, _ in self.arguments.unsure)

    def _read_software(self) -> None:
        sign = next((key for key in _SIGNS_OF_CORE if key in self.reading), "")
        older = next((key for key in _SIGNS_OF_2021 if key in self.reading), "")
        of_2022 = next((key for key in _SIGNS_OF_2022 if key in self.reading), "")
        if any(key.startswith("--deepspeed") or key == "--zero-stage" for key in self.reading.settings):
            self.software = DEEPSPEED
            sign = next(key for key in self.reading.settings if key.startswith("--deepspeed") or key == "--zero-stage")
        elif not sign and (older or of_2022):
            self.software, sign = (OF_2021, older) if older else (OF_2022, of_2022)
        if self.reading.value("--transformer-impl") == "local" and self.software == CORE:
            self.reading.not_modeled("--transformer-impl", "kernels are Transformer Engine's")
        self.reading.put(
            "software.preset", self.software, sign or "as of recent scripts; --software names another profile"
        )
        multiple = self.reading.value("--make-vocab-size-divisible-by")
        if multiple is not None:
            self.reading.put("software.vocab_multiple", multiple, "--make-vocab-size-divisible-by")
        if self.software == CORE:
            self._read_overlap()
        backend = self.reading.value("--attention-backend", "auto")
        if backend in ("unfused", "local"):
            self.reading.not_modeled("--attention-backend", "attention is fused, which takes less time and memory")

    def _read_overlap(self) -> None:
        """Collectives that overlap compute, which are options of Megatron Core's profile."""
        for key, option, value in (
            ("--overlap-grad-reduce", "grad_overlap", True),
            ("--overlap-param-gather", "overlap_param_gather", True),
            ("--tp-comm-overlap", "tp_overlap", "all"),
            ("--no-async-tensor-model-parallel-allreduce", "tp_overlap", "none"),
        ):
            if key in self.reading:
                self.reading.put(f"software.{option}", value, key)

    def value(self, key: str, default: Any = None) -> Any:
        """Value of an argument."""
        return self.reading.settings[key].value if key in self.reading else default

    def _all_keys(self) -> set[str]:
        return {*self.reading.settings, *(setting.key for setting, _ in self.arguments.unsure)}

    @property
    def program(self) -> str:
        """Name of the script that is run, without its folder."""
        return self.arguments.program.rpartition("/")[2]

    def _read_training(self) -> None:
        reading = self.reading
        reading.match(TRAINING)
        self._read_precision()
        steps = "--step-batch-size-schedule"
        if "--global-batch-size" not in reading and steps in reading:
            last = str(reading.value(steps)).strip("[]'\" ").rpartition(":")[2]
            if last.isdecimal():
                reading.put("training.global_batch_size", int(last), steps)
            else:
                reading.refuse(steps, "has no batch at its end", "write START:BATCH START:BATCH ...")
        elif "--global-batch-size" not in reading and not self.is_unsure("--global-batch-size"):
            reading.put("num_microbatches", 1, f"{DEFAULT}: the global batch is one microbatch per data-parallel rank")
        core.read_clipping(reading, "--clip-grad")
        for key, dtype in (("--grad-reduce-in-bf16", "bf16"), ("--accumulate-allreduce-grads-in-fp32", "fp32")):
            if key in reading:
                reading.put("plan.grad_dtype", dtype, key)
                break
        reading.no_effect("--accumulate-allreduce-grads-in-fp32")
        length, batch = self.value("--seq-length"), self.value("--global-batch-size")
        steps, samples = reading.value("--train-iters"), reading.value("--train-samples")
        key = "--train-samples" if samples is not None else "--train-iters"
        if isinstance(samples, int | float) and isinstance(length, int) and samples > 0:
            reading.put("training.num_tokens", float(samples * length), key)
        elif isinstance(steps, int) and isinstance(length, int) and isinstance(batch, int) and steps > 0:
            reading.put("training.num_tokens", float(steps * batch * length), key)

    def _read_precision(self) -> None:
        reading, path = self.reading, "training.precision"
        fp8 = next((key for key in ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3") if key in reading), "")
        wide = next((key for key in ("--bf16", "--fp16") if key in reading), "")
        recipe, fp4 = (
            str(reading.value("--fp8-recipe", "delayed")),
            next((key for key in ("--fp4-format", "--fp4") if key in reading), ""),
        )
        if fp4:
            reading.put(path, "nvfp4", fp4)
        elif fp8 and recipe == "mxfp8":
            reading.put(path, "mxfp8", fp8)
        elif fp8:
            reading.put(path, "fp8", fp8)
            if recipe == "tensorwise":
                reading.value("--fp8-recipe")  # simplan's default
            elif recipe in _FP8_RECIPES:
                reading.put("training.fp8_recipe", recipe, "--fp8-recipe" if "--fp8-recipe" in reading else DEFAULT)
            else:
                reading.refuse("--fp8-recipe", "is not modeled yet", f"only {', '.join(_FP8_RECIPES)} and mxfp8 are")
        elif wide:
            reading.put(path, wide.lstrip("-"), wide)
        elif not self.is_unsure("--bf16", "--fp16", "--fp8-format"):
            reading.put(path, "fp32", "without --bf16 and --fp16")
        reading.no_effect("--bf16", "--fp8-recipe")
        if "--fp8-dot-product-attention" in reading and self.software == CORE and (fp8 or fp4):
            reading.put("software.fp8_dot_product_attention", True, "--fp8-dot-product-attention")

    def _read_devices(self) -> None:
        reading, devices = self.reading, self.arguments.num_devices
        if devices is not None:
            reading.put("cluster.num_devices", devices, _NUM_DEVICES)
        else:
            what, fix = "does not say how many devices there are", "add --num-devices 64"
            reading.ask("cluster.num_devices", "cluster.num_nodes", what=what, fix=fix)
        reading.ask(
            "cluster.preset", "cluster.device", what="does not say what the devices are", fix="add --cluster dgx-h100"
        )

    def _sort_rest(self) -> None:
        """Sort arguments that nothing has looked at."""
        reading, no_effect = self.reading, self.table["no_effect"]
        for key, why in self.table["not_modeled"].items():
            reading.not_modeled(key, why)
        if not is_above(self.value("--num-experts"), 1):
            reading.no_effect(*(key for key in reading.settings if key == "--num-experts" or key.startswith("--moe-")))
        reading.no_effect(*(key for key in reading.settings if alike(no_effect, key)))
        for setting, why in self.arguments.unsure:
            known = alike(no_effect, setting.key) and setting.key not in self.asked
            if known or setting.key in ("--vocab-file", "--load", "--save"):
                reading.settings[setting.key] = setting
                reading._left[setting.key] = setting
                reading.no_effect(setting.key)
            elif setting.key not in self.asked:
                reading.settings[setting.key] = setting
                reading.not_modeled(setting.key, f"{why}; read without it")
