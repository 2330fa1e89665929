"""Jobs in settings of torchtitan, as a TOML file or as arguments of version 0.3, with a launch script."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from simplan import catalog
from simplan.interop.configuration import SettingMapping
from simplan.interop.frameworks.torchtitan import stages
from simplan.interop.frameworks.torchtitan.settings import facts
from simplan.interop.writing import MASTER_ADDR, Exported, Option, Writing
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict import predict
from simplan.program.action import Table, format_table
from simplan.wording import either

TARGET, TARGET_TOML = "torchtitan", "torchtitan's TOML files (version 0.2)"
_PROFILES = ("torchtitan-2024", "torchtitan-2025", "torchtitan")
_IGNORED = frozenset({"name", "sources", "packs", "seq_len", "max_position_embeddings"})
_TABLE_FILE = "schedule.csv"
_P = "parallelism."
_MATCHES = (
    SettingMapping("training.seq_len", "model.seq_len"),
    SettingMapping("training.global_batch_size", "training.global_batch_size"),
    SettingMapping("optimizer.name", "training.optimizer", values={"AdamW": "adamw", "Adam": "adam"}),
    SettingMapping("optimizer.implementation", "training.fused_optimizer", values={"fused": None, "foreach": False}),
    SettingMapping("training.enable_cpu_offload", "plan.offload_optimizer"),
    SettingMapping(f"{_P}data_parallel_replicate_degree", "plan.dp_replicate"),
    SettingMapping(f"{_P}data_parallel_shard_degree", "plan.dp_shard"),
    SettingMapping(f"{_P}tensor_parallel_degree", "plan.tp"),
    SettingMapping(f"{_P}context_parallel_degree", "plan.cp"),
    SettingMapping(f"{_P}expert_parallel_degree", "plan.ep"),
    SettingMapping(f"{_P}pipeline_parallel_degree", "plan.pp"),
)
"""Settings that are one key of a scenario each."""
_RECOMPUTE = {
    "none": ("none", None),
    "full": ("full", None),
    "selective_op": ("selective", "op"),
    "selective_layer": ("selective", "2"),
}


def settings_of(job: Job) -> tuple[Option, ...]:
    """The job in settings of torchtitan's TOML files.

    Raises:
        NotModelledError: torchtitan cannot express the job; names the key.
    """
    return _Job(job, TARGET_TOML).settings()


def export_toml(job: Job, name: str) -> Exported:
    """TOML file and launch script for torchtitan 0.2.

    Raises:
        NotModelledError: torchtitan cannot express the job; names the key.
    """
    written = _Job(job, TARGET_TOML)
    options = written.settings()
    config = f"{name}.toml"
    command = ["-m", "torchtitan.train", "--job.config_file", config, "--model.hf_assets_path", '"$HF_ASSETS"']
    script = _script(job, name, [*command, "--training.dataset", '"$DATASET"'], ())
    files: dict[str, str | bytes] = {config: _toml(options, name), "train.sh": script, **written.files}
    return Exported(files, "bash train.sh", tuple(written.notes))


def export_arguments(job: Job, name: str) -> Exported:
    """Launch script with arguments for torchtitan 0.3.

    Raises:
        NotModelledError: torchtitan's command line cannot express the job; names the key.
    """
    written = _Job(job, TARGET)
    options = written.settings()
    module, configuration = written.module, written.configuration
    files: dict[str, str | bytes] = dict(written.files)
    if job.training.precision == "fp8" or job.software.loss == "whole":
        module, configuration = _MODULE, "changed"
        files[f"{_MODULE}.py"] = _configuration(job, written)
    command = ["-m", "torchtitan.train", "--module", module, "--config", configuration]
    places = ["--hf_assets_path", '"$HF_ASSETS"', "--dataloader.dataset", '"$DATASET"', '"${ARGUMENTS[@]}"']
    mode = next(option.setting.value for option in options if option.setting.key == "activation_checkpoint.mode")
    lines = [_argument(option) for option in options if not option.setting.key.startswith(_NO_ARGUMENTS)]
    script = _script(job, name, [*command, *places, f"activation-checkpoint:{mode}"], lines)
    return Exported({"train.sh": script, **files}, "bash train.sh", tuple(written.notes))


def _configuration(job: Job, written: _Job) -> str:
    """Configuration in Python, for what version 0.3 has no arguments: quantized linear layers, and a whole loss."""
    models, flavor = f"torchtitan.models.{written.module}", written.flavor
    quantized, whole = job.training.precision == "fp8", job.software.loss == "whole"
    arguments = {
        "recipe_name": job.training.fp8_recipe,
        "filter_fqns": ["lm_head"],
        "model_compile_enabled": job.software.compiled,
    }
    listed = "".join(f"                {key}={value!r},\n" for key, value in arguments.items()).replace("'", '"')
    words = [*["linear layers in FP8"] * quantized, *["a loss of all tokens together"] * whole]
    loss = "from torchtitan.components.loss import CrossEntropyLoss\n" * whole
    converter = "from torchtitan.components.quantization import Float8LinearConverter\n" * quantized
    registry = f"from {models} import model_registry\n" * quantized
    of_loss = f"    config.loss = CrossEntropyLoss.Config(global_vocab_size={job.model.vocab_size})\n" * whole
    of_model = (
        f"""    config.model_spec = model_registry(
        "{flavor}",
        converters=[
            Float8LinearConverter.Config(
{listed}            )
        ],
    )
"""
        * quantized
    )
    return f'''"""{written.configuration} of torchtitan 0.3 with {" and ".join(words)}; written by simplan."""

{loss}{converter}{registry}from {models}.config_registry import {written.configuration}


def changed():
    config = {written.configuration}()
{of_loss}{of_model}    return config
'''


_MODULE = "simplan_config"
_NO_ARGUMENTS = ("model.", "activation_checkpoint.", "optimizer.name", "quantize.")
"""Settings that are no options of version 0.3: the configuration or a subcommand says them."""


@dataclass(slots=True)
class _Job(Writing):
    """A job on its way into settings.

    Attributes:
        files: Files that the settings name.
        notes: Sentences on what the settings do not say.
        module, configuration, flavor: Configuration of version 0.3 that the settings are written over, and its model.
    """

    files: dict[str, str | bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    module: str = ""
    configuration: str = ""
    flavor: str = ""

    @property
    def is_toml(self) -> bool:
        """True for files of version 0.2, False for arguments of version 0.3."""
        return self.target == TARGET_TOML

    def settings(self) -> tuple[Option, ...]:
        """The settings.

        Raises:
            NotModelledError: torchtitan cannot express the job.
        """
        self._model()
        self._software()
        self._precision()
        self._sharding()
        self._batch()
        self.match(_MATCHES)
        self._ranks_of_a_stage()
        if self.job.plan.pp > 1:
            self._pipeline()
        else:
            self.taken("plan.virtual_stages", "plan.schedule", "plan.stage_layers")
        self._recompute()
        return self.finish()

    def _model(self) -> None:
        model = self.job.model
        name, flavor = _flavor_of(model) or self.refuse(
            "model.name", f"torchtitan has {_flavors()}; or write a configuration of torchtitan for it"
        )
        self.taken(*(f"model.{field}" for field in ModelSpec.model_fields))
        self.set("model.name", name, "model")
        self.set("model.flavor", flavor, "model")
        if not self.is_toml:
            self._named(name, flavor)

    def _named(self, name: str, flavor: str) -> None:
        """Find the configuration of version 0.3 to start from: one of the flavor that nothing is quantized in."""
        known = facts().configurations.get(name, {})
        configurations = [
            config
            for config, settings in known.items()
            if settings["model.flavor"] == flavor and "model.converters" not in settings and "sft" not in config
        ]
        if not configurations:
            ones = sorted({settings["model.flavor"] for settings in known.values()})
            fix = f"its configurations are of {', '.join(ones)}; use --to torchtitan-toml" if ones else ""
            self.refuse("model.name", fix or "use --to torchtitan-toml")
        self.module, self.configuration, self.flavor = name, configurations[0], flavor

    def _software(self) -> None:
        software = self.job.software
        self.allowed("software.id", _PROFILES, f"add --software {either(reversed(_PROFILES))}")
        self.taken("software.compiled", "software.compiled_loss", "software.cuda_graphs", "software.tp_overlap")
        if self.is_toml:
            self.allowed("software.loss", ("whole",), "use whole: version 0.2 has none in chunks; or --to torchtitan")
        else:
            self.taken("software.loss")
        is_compiled = software.compiles_loss or software.layers.loss == "logits"
        parts = ["model"] * software.compiled + ["loss"] * is_compiled
        self.set("compile.enable", bool(parts), "software")
        if parts:
            self.set("compile.components", parts, "software")
        if software.tp_overlap not in ("none", "all") or (software.tp_overlap == "all" and not software.compiled):
            self.refuse("software.tp_overlap", "use none, or all with software.compiled = true")
        if software.id != "torchtitan":
            version = "0.2" if self.is_toml else "0.3"
            self.notes.append(f"the settings are of torchtitan {version}, and {software.id} is {software.stands_for}")
        prefix = _P if self.is_toml else "compile."
        self.set(f"{prefix}enable_async_tensor_parallel", software.tp_overlap == "all", "software.tp_overlap")
        if not self.is_toml:
            self.set("training.disable_cuda_graphs", not software.cuda_graphs, "software.cuda_graphs")
        elif software.cuda_graphs:
            self.refuse("software.cuda_graphs", "use false: version 0.2 has none; or --to torchtitan")
        norm = self.value("training.clip_grad_norm")
        self.set("training.max_norm", 1.0 if norm is None else norm, "training.clip_grad_norm")
        if norm is None:
            self.notes.append("torchtitan always clips gradients, and training.clip_grad_norm is not set")

    def _precision(self) -> None:
        training = self.job.training
        self.taken("training.fp8_recipe")
        self.allowed("training.precision", ("bf16", "fp32", "fp8", "mxfp8"), "use bf16, fp32, fp8 or mxfp8")
        wide = "float32" if training.precision == "fp32" else "bfloat16"
        self.set("training.mixed_precision_param", wide, "training.precision")
        if self.value("training.pure_bf16"):
            self.set("training.dtype", "bfloat16", "training.pure_bf16")
        converter = {"fp8": "quantize.linear.float8", "mxfp8": "quantize.linear.mx"}.get(training.precision)
        if converter is None:
            return
        if not self.is_toml and training.precision == "mxfp8":
            self.refuse("training.precision", "use --to torchtitan-toml, or bf16 or fp8")
        if not self.is_toml and (training.fp8_recipe or "tensorwise") not in ("rowwise", "rowwise_with_gw_hp"):
            self.refuse("training.fp8_recipe", "use rowwise, as version 0.3 has no other; or --to torchtitan-toml")
        self.set("model.converters", [converter], "training.precision")
        if training.precision == "fp8":
            self.set(f"{converter}.recipe_name", training.fp8_recipe or "tensorwise", "training.fp8_recipe")
        self.set(f"{converter}.filter_fqns", ["output" if self.is_toml else "lm_head"], "the head stays in BF16")

    def _batch(self) -> None:
        plan, number = self.job.plan, self.job.num_microbatches
        self.taken("plan.microbatch_size")
        if plan.pp > 1:
            self.set(
                "training.local_batch_size", number * plan.microbatch_size, "global_batch_size / data-parallel ranks"
            )
            self.set(f"{_P}pipeline_parallel_microbatch_size", plan.microbatch_size, "plan.microbatch_size")
        else:
            self.set("training.local_batch_size", plan.microbatch_size, "plan.microbatch_size")
        self.taken("plan.grad_sync")
        self.allowed("plan.grad_dtype", (None, "fp32"), "leave it out")
        if number > 1 and plan.pp == 1 and plan.dp * plan.cp > 1 and not plan.reduces_every_microbatch:
            self.refuse("plan.grad_sync", "use microbatch: torchtitan reduces gradients in every backward")
        if plan.grad_sync == "microbatch" and plan.pp > 1:
            self.refuse("plan.grad_sync", "use step: pipelines reduce gradients once")

    def _sharding(self) -> None:
        plan = self.job.plan
        self.taken("plan.zero_stage", "plan.reshard_after_forward")
        sharded = plan.dp_shard * plan.cp > 1
        if sharded and plan.zero_stage not in (2, 3):
            self.refuse("plan.zero_stage", "use 3, or dp_replicate in place of dp_shard and cp")
        keeps = plan.zero_stage == 2 or not plan.reshard_after_forward
        policy = "default" if not sharded or keeps == (plan.pp > 1) else "never" if keeps else "always"
        self.set(f"{_P}fsdp_reshard_after_forward", policy, "plan.zero_stage")

    def _ranks_of_a_stage(self) -> None:
        """Tensor, context and expert parallelism."""
        plan = self.job.plan
        self.taken("plan.sequence_parallel", "plan.cp_comm", "plan.etp")
        if plan.tp > 1 and not self.is_toml:
            self.set(f"{_P}enable_sequence_parallel", plan.sequence_parallel, "plan.sequence_parallel")
        elif plan.tp > 1 and not plan.sequence_parallel:
            self.refuse("plan.sequence_parallel", "use true")
        methods = {"all_gather": "allgather", "ring": "alltoall"} if self.is_toml else {"all_gather": ""}
        if plan.cp > 1 and plan.cp_comm not in methods:
            self.refuse("plan.cp_comm", f"use {either(methods)}")
        if plan.cp > 1 and self.is_toml:
            self.set(f"{_P}context_parallel_rotate_method", methods[plan.cp_comm], "plan.cp_comm")
        if plan.ep > 1 and self.is_toml:
            self.set(f"{_P}expert_tensor_parallel_degree", plan.etp, "plan.etp")
        elif plan.etp > 1:
            self.refuse("plan.etp", "use 1")

    def _pipeline(self) -> None:
        plan = self.job.plan
        self.taken("plan.virtual_stages", "plan.schedule", "plan.stage_layers")
        names = {class_name: name for name, class_name in stages.SCHEDULES.items()}
        prediction = predict(self.job)
        bounds = prediction.assignment.boundaries
        layers = [end - begin for begin, end in pairwise(bounds)]
        layers[0] -= 1  # the embedding, and the layers after the blocks
        layers[-1] -= self.job.model.num_last_layers
        if plan.schedule in names:
            self.set(f"{_P}pipeline_parallel_schedule", names[plan.schedule], "plan.schedule")
        else:
            shape = SCHEDULE_FACTS.get(plan.schedule)
            like = "ZBVZeroBubble" if shape is not None and shape.placement == "v" else stages.CUSTOM_MULTI
            self.set(f"{_P}pipeline_parallel_schedule", like, "stages of the ranks")
            self.set(f"{_P}pipeline_parallel_schedule_csv", _TABLE_FILE, f"plan.schedule: {plan.schedule}")
            self.files[_TABLE_FILE] = _csv(prediction.table)
        modules = stages.modules_of_layers(layers, "output" if self.is_toml else "lm_head")
        self.set(f"{_P}module_fqns_per_model_part", modules, "plan.stage_layers")

    def _recompute(self) -> None:
        known = [name for name in _RECOMPUTE if self.is_toml or name != "selective_layer"]
        mode, option = _RECOMPUTE[self.allowed("plan.recompute", known, f"use {either(known)}")]
        self.set("activation_checkpoint.mode", mode, "plan.recompute")
        if option is not None and self.is_toml:
            self.set("activation_checkpoint.selective_ac_option", option, "plan.recompute")


def _flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """Model and flavor of torchtitan with the shape of a model; None if there is none."""
    if model.sample != "sequence":
        return None  # torchtitan trains models of tokens
    shape = model.model_dump(exclude=set(_IGNORED))
    for name, flavors in facts().models.items():
        for flavor, fields in flavors.items():
            other = {**catalog.model_fields(fields["preset"]), **fields} if "preset" in fields else dict(fields)
            other.pop("preset", None)
            other = {"name": flavor, **other, "seq_len": model.seq_len}
            if ModelSpec.model_validate(other).model_dump(exclude=set(_IGNORED)) == shape:
                return name, flavor
    return None


def _flavors() -> str:
    return "; ".join(f"{name} {', '.join(flavors)}" for name, flavors in facts().models.items())


def _csv(table: Table) -> str:
    """Computations of an action table, one row per rank; torch adds the rest as it loads them."""
    text = io.StringIO()
    rows = format_table(tuple(tuple(action for action in row if action.kind.is_compute) for row in table))
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _toml(options: Iterable[Option], name: str) -> str:
    """TOML with a comment on every setting."""
    sections: dict[str, list[str]] = {}
    for option in options:
        section, _, key = option.setting.key.rpartition(".")
        comment = f"  # {option.comment}" if option.comment else ""
        sections.setdefault(section, []).append(f"{key} = {json.dumps(option.setting.value)}{comment}")
    lines = [f"# {name}: written by simplan for torchtitan 0.2.", "# Comments are keys of the scenario."]
    for section, settings in sections.items():
        lines += ["", f"[{section}]", *settings]
    return "\n".join(lines) + "\n"


def _argument(option: Option) -> str:
    """Line of an array of arguments, with its comment."""
    key, value = option.setting.key, option.setting.value
    section, _, name = key.rpartition(".")
    if value is True:
        text = f"--{key}"
    elif value is False:
        text = f"--{section}.no-{name.replace('_', '-')}"
    elif isinstance(value, list) and value and isinstance(value[0], list):
        text = " ".join([f"--{key}", *(",".join(part) for part in value)])
    else:
        text = f"--{key} {shlex.quote(','.join(value) if isinstance(value, list) else str(value))}"
    return f"  {text}" + (f"  # {option.comment}" if option.comment else "")


def _script(job: Job, name: str, command: Iterable[str], arguments: Iterable[str]) -> str:
    """Launch script, which is started on every node."""
    cluster = job.cluster
    lines = [
        "#!/usr/bin/env bash",
        f"# {name}: {job.plan.num_devices} ranks on {cluster.device.id}, written by simplan. Start it on every node.",
        "set -euo pipefail",
        "",
        "HF_ASSETS=./assets/hf  # folder with the tokenizer",
        "DATASET=c4",
        MASTER_ADDR if cluster.num_nodes > 1 else "MASTER_ADDR=localhost",
        "",
    ]
    arguments = list(arguments)
    if arguments:
        lines += ["ARGUMENTS=(", *arguments, ")", ""]
    launcher = (
        f"torchrun --nnodes {cluster.num_nodes} --nproc_per_node {cluster.ranks_per_node} --rdzv_backend c10d "
        '--rdzv_endpoint "$MASTER_ADDR:29500"'
    )
    lines += [f"{launcher} \\", f"  {' '.join(command)}", ""]
    return "\n".join(lines)
