"""Arguments of Megatron-LM as a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simplan import catalog
from simplan.interop.allocator import note_allocator
from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks import names_without_effect, tables
from simplan.interop.frameworks.megatron.arguments import Arguments, hyphenated, is_above, read_arguments
from simplan.interop.frameworks.megatron.deepspeed import settings_of_file
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
from simplan.interop.frameworks.megatron.plan import (
    read_parallelism,
    read_recompute,
    read_sharding,
    read_stages,
    setting_of_narrow_gradients,
)
from simplan.interop.frameworks.shell import own_line

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
_NOT_ASYNC = "--no-async-tensor-model-parallel-allreduce"
_TASKS = ("MNLI", "QQP", "RACE")
"""Values of ``--task`` that train a model: tasks/main.py."""
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
    devices = Setting(_NUM_DEVICES, words, None if line is None else own_line(line))
    deepspeed = dict(settings_of_file(replace(file, written=arguments.files), arguments.settings))
    settings = (*arguments.settings, devices, *arguments.extra, *arguments.missing, *deepspeed.values())
    reading = MegatronReading.of(TITLE, file.name, settings)
    reading.deepspeed = {key: setting.key for key, setting in deepspeed.items()}
    if arguments.num_devices is None:
        reading.value(_NUM_DEVICES)
    reading.arguments = arguments
    return reading.configuration()


_SIGNS_OF_DEEPSPEED = (
    "--deepspeed", "--deepspeed_config", "--deepspeed-config", "--zero-stage", "--deepspeed-activation-checkpointing",
)  # fmt: skip


@dataclass(slots=True)
class MegatronReading(Reading):
    """One set of arguments on their way into a scenario.

    Attributes:
        arguments: The arguments, with those that are not certain.
        deepspeed: Key of DeepSpeed's JSON -> key in the reading.
        software: Profile that models this version.
        table: Tables of options without a key in a scenario.
        asked: Argument whose value decides the plan -> key of the scenario that is asked for if it is not known.
    """

    arguments: Arguments = field(default_factory=lambda: Arguments(()))
    deepspeed: Mapping[str, str] = field(default_factory=dict)
    software: str = CORE
    table: Mapping[str, Any] = field(default_factory=lambda: tables("megatron"))
    asked: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.asked = {match.key: match.path for match in _MATCHES} | self.table["asked"]

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
        return replace(self.finish(), search={"schedule": ["1f1b", "interleaved_1f1b"]})

    def _check_program(self) -> None:
        program = self.arguments.program
        for part, what in self.table["refused_programs"].items():
            if part in program.lower():
                self.refuse(program, f"trains {what}, which are not modeled yet", "give a script of pretrain_gpt.py")
                return
        if "--task" in self and self.value("--task") not in _TASKS:
            self.refuse("--task", "evaluates a model, or trains another task, which is not modeled", "remove it")
        for key, (rule, fix) in self.table["refused"].items():
            value = self.settings[key].value if key in self else None
            if value not in (None, 0, "none", "None"):
                self.refuse(key, rule, fix)
        known = {*self.table["flags"], *self.table["not_modeled"], *self.table["refused"], *self.asked}
        no_effect = names_without_effect("megatron")
        for setting, other in hyphenated(self.arguments.settings):
            is_own = setting.key in no_effect or setting.key.startswith("--deepspeed")
            if not is_own and (other.key in known or other.key in no_effect):
                self.contradiction(setting.key, "is no argument of Megatron-LM", f"write {other.key}")

    def _read_unsure(self) -> None:
        """Ask for values that decide the plan and that the file does not tell."""
        asked: set[str] = set()
        for setting, why in self.arguments.unsure:
            path = self.asked.get(setting.key)
            is_rotary = setting.key == "--max-position-embeddings" and self.peek("--position-embedding-type") == "rope"
            if path is None or path in asked or is_rotary:
                continue
            shown = setting.name if setting.value is True else f"{setting.name} {setting.value}"
            place = f" in line {setting.line}" if setting.line is not None else ""
            usual = self.table["usual"].get(path, f"--set {path}=...")
            fix = f"add {usual}"
            if why.endswith("argument of the script") and not asked:
                fix += f", or name a file with the line: bash {self.file.rpartition('/')[2]} ARGUMENTS"
            asked.add(path)
            keys = ("model.preset", "model.hf_config") if path.startswith("model.") and path != "model.seq_len" else ()
            self.ask(path, *keys, what=f"has {shown}{place}, which {why}", fix=fix)

    def is_unsure(self, *keys: str) -> bool:
        """True if the file has one of the arguments, and its value is not known."""
        return any(setting.key in keys for setting, _ in self.arguments.unsure)

    def _read_software(self) -> None:
        sign = next((key for key in _SIGNS_OF_CORE if key in self), "")
        older = next((key for key in _SIGNS_OF_2021 if key in self), "")
        of_2022 = next((key for key in _SIGNS_OF_2022 if key in self), "")
        of_deepspeed = next((key for key in _SIGNS_OF_DEEPSPEED if key in self), "")
        if of_deepspeed:
            self.software, sign = DEEPSPEED, of_deepspeed
        elif not sign and (older or of_2022):
            self.software, sign = (OF_2021, older) if older else (OF_2022, of_2022)
        if self.value("--transformer-impl") == "local" and self.software == CORE:
            self.not_modeled("--transformer-impl", "kernels are Transformer Engine's")
        self.put("software.preset", self.software, sign or "as of recent scripts; --software names another profile")
        multiple = self.value("--make-vocab-size-divisible-by")
        if multiple is not None:
            self.put("software.vocab_multiple", multiple, "--make-vocab-size-divisible-by")
        if self.software == CORE:
            self._read_overlap()
        elif self.peek("--tensor-model-parallel-size", 1) == 1 or catalog.software(self.software).tp_overlap == "none":
            self.no_effect(_NOT_ASYNC)
        else:
            self.not_modeled(_NOT_ASYNC, "tensor-parallel all-reduces overlap the backward")
        backend = self.value("--attention-backend", "auto")
        if backend in ("unfused", "local"):
            self.not_modeled("--attention-backend", "attention is fused, which takes less time and memory")

    def _read_overlap(self) -> None:
        """Collectives that overlap compute, which are options of Megatron Core's profile."""
        for key, option, value in (
            ("--overlap-grad-reduce", "grad_overlap", True),
            ("--overlap-param-gather", "overlap_param_gather", True),
            ("--tp-comm-overlap", "tp_overlap", "all"),
            (_NOT_ASYNC, "tp_overlap", "none"),
        ):
            if key in self:
                self.put(f"software.{option}", value, key)

    def _all_keys(self) -> set[str]:
        return {*self.settings, *(setting.key for setting, _ in self.arguments.unsure)}

    @property
    def program(self) -> str:
        """Name of the script that is run, without its folder."""
        return self.arguments.program.rpartition("/")[2]

    def _read_training(self) -> None:
        self.match(TRAINING)
        keys = {"exp_avg": "--exp-avg-dtype", "exp_avg_sq": "--exp-avg-sq-dtype", "main_params": "--main-params-dtype"}
        core.read_types_of_states(self, "--use-precision-aware-optimizer", keys)
        self._read_precision()
        steps = "--step-batch-size-schedule"
        if "--global-batch-size" not in self and steps in self:
            last = str(self.value(steps)).strip("[]'\" ").rpartition(":")[2]
            if last.isdecimal():
                self.put("training.global_batch_size", int(last), steps)
            else:
                self.refuse(steps, "has no batch at its end", "write START:BATCH START:BATCH ...")
        elif "--global-batch-size" not in self and not self.is_unsure("--global-batch-size"):
            self.put("num_microbatches", 1, f"{DEFAULT}: the global batch is one microbatch per data-parallel rank")
        if not self.deepspeed:  # else the engine clips, as its JSON says
            core.read_clipping(self, "--clip-grad")
        if (narrow := setting_of_narrow_gradients(self)) is not None:
            self.put("plan.grad_dtype", "bf16", narrow)
        elif "--accumulate-allreduce-grads-in-fp32" in self:
            self.put("plan.grad_dtype", "fp32", "--accumulate-allreduce-grads-in-fp32")
        self.no_effect("--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype")
        length, batch = self.peek("--seq-length"), self.peek("--global-batch-size")
        steps, samples = self.value("--train-iters"), self.value("--train-samples")
        key = "--train-samples" if samples is not None else "--train-iters"
        if isinstance(samples, int | float) and isinstance(length, int) and samples > 0:
            self.put("training.num_tokens", float(samples * length), key)
        elif isinstance(steps, int) and isinstance(length, int) and isinstance(batch, int) and steps > 0:
            self.put("training.num_tokens", float(steps * batch * length), key)

    def _read_precision(self) -> None:
        path = "training.precision"
        fp8 = next((key for key in ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3") if key in self), "")
        wide = next((key for key in ("--bf16", "--fp16") if key in self), "")
        if {"--bf16", "--fp16"} <= self.settings.keys():
            self.contradiction("--fp16", "is set next to --bf16", "remove one of them")
        recipe, fp4 = (
            str(self.value("--fp8-recipe", "delayed")),
            next((key for key in ("--fp4-format", "--fp4") if key in self), ""),
        )
        if fp4:
            self.put(path, "nvfp4", fp4)
        elif fp8 and recipe == "mxfp8":
            self.put(path, "mxfp8", fp8)
        elif fp8:
            self.put(path, "fp8", fp8)
            if recipe == "tensorwise":
                self.value("--fp8-recipe")  # simplan's default
            elif recipe in _FP8_RECIPES:
                self.put("training.fp8_recipe", recipe, "--fp8-recipe" if "--fp8-recipe" in self else DEFAULT)
            else:
                self.refuse("--fp8-recipe", "is not modeled yet", f"only {', '.join(_FP8_RECIPES)} and mxfp8 are")
        elif wide:
            self.put(path, wide.lstrip("-"), wide)
        elif not self.is_unsure("--bf16", "--fp16", "--fp8-format"):
            self.put(path, "fp32", "without --bf16 and --fp16")
        self.no_effect("--bf16", "--fp8-recipe")
        if "--fp8-dot-product-attention" in self and self.software == CORE and (fp8 or fp4):
            self.put("software.fp8_dot_product_attention", True, "--fp8-dot-product-attention")
        if self.software == CORE:
            self._read_graphs()

    def _read_graphs(self) -> None:
        """CUDA graphs of whole layers; those of parts are left to the table of what is not modeled."""
        said = next((key for key in ("--enable-cuda-graph", "--external-cuda-graph") if key in self), None)
        if said is None and self.peek("--cuda-graph-impl", "none") != "none":
            said = "--cuda-graph-impl"
        scopes = [self.peek(key) or () for key in ("--cuda-graph-scope", "--cuda-graph-modules")]
        parts = {str(part) for words in scopes for part in (words.split() if isinstance(words, str) else words)}
        if said is not None and core.are_whole_layers(parts):
            self.put("software.cuda_graphs", bool(self.value(said)), said)
            self.no_effect("--cuda-graph-scope", "--cuda-graph-modules", "--cuda-graph-warmup-steps")

    def _read_devices(self) -> None:
        devices = self.arguments.num_devices
        if devices is not None:
            self.put("cluster.num_devices", devices, _NUM_DEVICES)
            self.ranks_per_node = self.arguments.ranks_per_node
        else:
            what, fix = "does not say how many devices there are", "add --num-devices 64"
            self.ask("cluster.num_devices", "cluster.num_nodes", what=what, fix=fix)
        self.ask(
            "cluster.preset", "cluster.device", what="does not say what the devices are", fix="add --cluster dgx-h100"
        )

    def _sort_rest(self) -> None:
        """Sort arguments that nothing has looked at."""
        no_effect = names_without_effect("megatron")
        for key, why in self.table["not_modeled"].items():
            self.not_modeled(key, why)
        note_allocator(self, grown=False)
        for setting in self.arguments.missing:
            self.not_modeled(setting.key, "it is not there, so variables that it sets are not known")
        if not is_above(self.peek("--num-experts"), 1):
            self.no_effect(*names_without_effect("megatron_experts"))
        self.no_effect(*no_effect)
        for setting, why in self.arguments.unsure:
            known = setting.key in no_effect and setting.key not in self.asked
            if known or setting.key in ("--vocab-file", "--load", "--save"):
                self.settings[setting.key] = setting
                self._left[setting.key] = setting
                self.no_effect(setting.key)
            elif setting.key not in self.asked:
                self.settings[setting.key] = setting
                self.not_modeled(setting.key, f"{why}; read without it")
