"""Jobs as launch scripts of Megatron-LM."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from simplan.interop.frameworks.megatron.options import (
    CONTEXT_PARALLEL,
    CORE,
    EXPERTS,
    LATENT_ATTENTION,
    MODEL,
    OF_2021,
    OF_2022,
    PLAN,
    T5,
    TRAINING,
)
from simplan.interop.frameworks.megatron_core import write_placement
from simplan.interop.nccl import write_nccl_algo
from simplan.interop.writing import MASTER_ADDR, NODE_RANK, Exported, Option, Writing
from simplan.job import Job
from simplan.predict import predict
from simplan.predict.build import assign_layers, cost_model
from simplan.problems import render_value

_TARGET = "Megatron-LM arguments"
_PROGRAMS = {"t5": "pretrain_t5.py", "bert": "pretrain_bert.py"}
_FAMILIES = ("gpt", "llama", "moe", "deepseek", "t5", "bert")
_WITH_ROTATION = ("llama", "moe", "deepseek")
_DISPATCH = {
    "copies": ("alltoall",),
    "all_to_all": ("alltoall", "--moe-permute-fusion"),
    "deepep": ("flex", "--moe-flex-dispatcher-backend", "deepep"),
    "hybridep": ("flex", "--moe-flex-dispatcher-backend", "hybridep"),
}
_PRECISIONS: Mapping[str, tuple[tuple[str, str | bool], ...]] = {
    "fp32": (),
    "bf16": (("--bf16", True),),
    "fp16": (("--fp16", True),),
    "fp8": (("--bf16", True), ("--fp8-format", "hybrid")),
    "mxfp8": (("--bf16", True), ("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")),
    "nvfp4": (("--bf16", True), ("--fp4-format", "e2m1")),
}
_FP32_BYTES = 4
_ENVIRONMENT = "environment"


def settings(job: Job) -> tuple[Option, ...]:
    """Arguments of a job.

    Raises:
        NotModelledError: The job has something that Megatron-LM has no argument for.
    """
    return tuple(option for _, options in _sections(job) for option in options)


def export(job: Job, name: str) -> Exported:
    """Launch script that runs a job.

    Raises:
        NotModelledError: See ``settings``.
    """
    all_sections = _sections(job)
    sections = [(title, options) for title, options in all_sections if options and title != _ENVIRONMENT]
    variables = [option for title, options in all_sections if title == _ENVIRONMENT for option in options]
    file = f"{name}.sh"
    arrays = "\n\n".join(_array(title, options) for title, options in sections)
    uses = " \\\n".join(
        f'    "${{{title}[@]}}"' for title in (*(title for title, _ in sections), "DATA_ARGS", "OTHER_ARGS")
    )
    nodes = job.cluster.num_nodes
    text = _SCRIPT.format(
        name=name,
        software=job.software.id,
        nodes=nodes,
        gpus=job.cluster.num_devices // nodes,
        rendezvous=f"{NODE_RANK}\n{MASTER_ADDR}" if nodes > 1 else "NODE_RANK=0\nMASTER_ADDR=localhost",
        exports="".join(f"export {_variable(option)}\n" for option in variables),
        arrays=arrays,
        program=_PROGRAMS.get(job.model.family, "pretrain_gpt.py"),
        uses=uses,
    )
    notes = ["start it on every node, with NODE_RANK and MASTER_ADDR set"] if nodes > 1 else []
    notes.append("paths of data, tokenizer and checkpoints, and the number of steps, are at the top of the script")
    if job.training.clip_grad_norm is None:
        notes.append(
            "gradients are not clipped, as training.clip_grad_norm is not set; Megatron-LM clips to 1 by default"
        )
    if job.software.id == CORE:
        notes.append(
            "the loss is predicted as Transformer Engine's, which Megatron-LM no longer takes (arguments.py, 2026-08): "
            "its own has FP32 logits, too"
        )
    notes += _notes_on_overlap(job)
    return Exported({file: text}, f"bash {shlex.quote(file)}", tuple(notes))


def _notes_on_overlap(job: Job) -> list[str]:
    """Overlap of collectives that the profile, and so the script, does not have, with what it would give."""
    plan, software = job.plan, job.software
    if software.id != CORE:
        return []
    options: dict[str, tuple[str, object]] = {}
    if plan.dp > 1 and not software.grad_overlap:
        options["--overlap-grad-reduce"] = "grad_overlap", True
    if plan.dp_shard > 1 and plan.zero_stage == 1 and not software.overlap_param_gather:
        options["--overlap-param-gather"] = "overlap_param_gather", True
    if plan.tp > 1 and plan.sequence_parallel and software.tp_overlap != "all":
        options["--tp-comm-overlap"] = "tp_overlap", "all"
    if not options:
        return []
    faster = replace(job, software=software.model_copy(update=dict(options.values())))
    saved = 1 - predict(faster).step_time_s / predict(job).step_time_s
    sets = " ".join(f"--set software.{name}={render_value(value).strip(chr(34))}" for name, value in options.values())
    return [f"without {', '.join(options)}, as predicted; with them the step is predicted {saved:.1%} shorter: {sets}"]


_SCRIPT = """\
#!/bin/bash
# {name}: launch script of Megatron-LM, written by simplan for its profile {software}.
# Comments name the key of the scenario that an argument says. Run it in a clone of NVIDIA/Megatron-LM.

# Yours to set
DATA_PATH=/path/to/data_text_document
TOKENIZER_MODEL=/path/to/tokenizer
CHECKPOINT_PATH=/path/to/checkpoints
TRAIN_ITERS=100
LR=1.0e-4

NUM_NODES={nodes}
GPUS_PER_NODE={gpus}
{rendezvous}
MASTER_PORT=${{MASTER_PORT:-29500}}

export CUDA_DEVICE_MAX_CONNECTIONS=1
{exports}
{arrays}

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --split 949,50,1
)

OTHER_ARGS=(
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --save "$CHECKPOINT_PATH"
    --save-interval 1000
    --eval-iters 0
    --log-interval 1
)

torchrun \\
    --nnodes "$NUM_NODES" \\
    --nproc_per_node "$GPUS_PER_NODE" \\
    --node_rank "$NODE_RANK" \\
    --master_addr "$MASTER_ADDR" \\
    --master_port "$MASTER_PORT" \\
    {program} \\
{uses}
"""


def _variable(option: Option) -> str:
    return f"{option.setting.key}={shlex.quote(str(option.setting.value))}  # {option.comment}"


def _array(title: str, options: tuple[Option, ...]) -> str:
    """Array of the shell with one argument a line."""
    lines = []
    for comment, group in groupby(options, key=lambda option: option.comment):
        words = " ".join(_words(option) for option in group)
        lines.append(f"    {words}" + (f"  # {comment}" if comment else ""))
    return "\n".join([f"{title}=(", *lines, ")"])


def _words(option: Option) -> str:
    value = option.setting.value
    if value is True:
        return option.setting.key
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([option.setting.key, *(shlex.quote(str(value)) for value in values)])


def _sections(job: Job) -> list[tuple[str, tuple[Option, ...]]]:
    """Arguments in groups, each with the name of its array."""
    writer = _Writer(job, _TARGET)
    groups = {
        "MODEL_ARGS": (writer.software, writer.model, writer.blocks, writer.experts),
        "PARALLEL_ARGS": (writer.parallelism, writer.stages, writer.sharding, writer.overlap),
        "RECOMPUTE_ARGS": (writer.recompute,),
        "TRAINING_ARGS": (writer.training,),
        _ENVIRONMENT: (lambda: write_nccl_algo(writer),),
    }
    sections = []
    for title, parts in groups.items():
        first = len(writer.options)
        for write in parts:
            write()
        sections.append((title, tuple(writer.options[first:])))
    writer.finish()
    return sections


class _Writer(Writing):
    """A job on its way into arguments, in parts."""

    @property
    def is_core(self) -> bool:
        """True for Megatron Core, False for earlier versions."""
        return self.job.software.id == CORE

    def software(self) -> None:
        """Version, and padding of the vocabulary."""
        software = self.allowed("software.id", (CORE, OF_2022, OF_2021), f"use {CORE}, {OF_2022} or {OF_2021}")
        self.allowed("model.family", _FAMILIES)
        if self.is_core:
            self.set("--use-mcore-models", True, "software")
        elif software == OF_2022:
            self.set("--DDP-impl", "local", "software")
        self.copy("--make-vocab-size-divisible-by", "software.vocab_multiple")

    def model(self) -> None:
        """Sizes."""
        model = self.job.model
        self.match(match for match in MODEL if match.path != "model.max_position_embeddings" or model.family != "t5")
        if model.family == "t5":
            self.match(T5)
            self.set("--max-position-embeddings", model.seq_len, "needed by Megatron-LM")
            self.taken("model.relative_attention_buckets")
        self.copy("--ffn-hidden-size", "model.intermediate_size")
        if model.family != "deepseek":
            self.copy("--kv-channels", "model.head_dim")
        self.copy("--vocab-size", "model.vocab_size")
        groups = self.value("model.num_key_value_heads")
        if groups and groups != model.num_attention_heads:
            self.set("--group-query-attention", True, "model.num_key_value_heads")
            self.set("--num-query-groups", groups, "model.num_key_value_heads")
        if not self.value("model.tied_embeddings"):
            self.set("--untie-embeddings-and-output-weights", True, "model.tied_embeddings")

    def blocks(self) -> None:
        """Norms, MLP, positions, biases and attention."""
        model = self.job.model
        self.taken("model.family", "model.type_vocab_size")
        if model.family not in _WITH_ROTATION:
            return
        if not self.is_core:
            self.refuse("model.family", f"use the software {CORE}")
        self.taken("model.gated_mlp")
        for key, value in (("--swiglu", True), ("--normalization", "RMSNorm"), ("--position-embedding-type", "rope")):
            self.set(key, value, f"model.family: {model.family}")
        self.set("--hidden-dropout", 0.0, f"{CORE} predicts no dropout for this family")
        self.set("--attention-dropout", 0.0, f"{CORE} predicts no dropout for this family")
        self._biases()
        if self.value("model.qk_norm") == "projection":
            self.refuse("model.qk_norm", "use head")
        if model.qk_norm == "head" or model.family == "deepseek":
            self.set("--qk-layernorm", True, "model.qk_norm" if model.qk_norm else "norms of the latent vectors")
        if self.value("model.attention_sinks"):
            self.set("--softmax-type", "learnable", "model.attention_sinks")
        window = self.value("model.sliding_window")
        self.taken("model.sliding_window_pattern")
        if window is not None:
            self.set("--window-size", f"{window - 1},0", "model.sliding_window")
            self.copy("--window-attn-skip-freq", "model.sliding_window_pattern", if_set=True)
        self.copy("--mtp-num-layers", "model.mtp_num_layers", if_set=True)
        if model.family == "deepseek":
            self.set("--multi-latent-attention", True, "model.family: deepseek")
            rank = model.q_lora_rank
            self.match(match for match in LATENT_ATTENTION if match.path != "model.q_lora_rank" or rank is not None)

    def _biases(self) -> None:
        model = self.job.model
        biased, experts = self.value("model.attention_bias"), self.value("model.expert_bias")
        if model.num_experts and biased != experts:
            self.refuse("model.attention_bias" if biased else "model.expert_bias", "give biases to both or to none")
        if not biased:
            self.set("--disable-bias-linear", True, "model.attention_bias")
        self.copy("--add-qkv-bias", "model.qkv_bias", if_set=True)

    def experts(self) -> None:
        """Experts, and how tokens reach them."""
        model, plan = self.job.model, self.job.plan
        if not model.num_experts:
            return
        optional = ("model.shared_expert_intermediate_size", "model.shared_expert_gate")
        self.match(match for match in EXPERTS if match.path not in optional)
        self.copy("--moe-ffn-hidden-size", "model.moe_intermediate_size")
        self.set("--moe-grouped-gemm", True, f"as {CORE} computes experts")
        for match in (match for match in EXPERTS if match.path in optional):
            self.copy(match.key, match.path, if_set=True)
        if dense := self.value("model.num_dense_layers"):
            pattern = f"([0]*{dense}+[1]*{model.num_hidden_layers - dense})"
            self.set("--moe-layer-freq", pattern, "model.num_dense_layers")
        self.taken("model.expert_imbalance")
        factor = self.value("model.capacity_factor")
        if self.value("model.drop_tokens"):
            self.set("--moe-expert-capacity-factor", factor, "model.capacity_factor")
        elif factor != 1:
            self.refuse("model.capacity_factor", "set model.drop_tokens: true, or 1.0")
        kind, *more = _DISPATCH[self.value("software.expert_dispatch")]
        self.set("--moe-token-dispatcher-type", kind, "software.expert_dispatch")
        if more:
            self.set(more[0], more[1] if len(more) > 1 else True, "software.expert_dispatch")
        self.copy("--overlap-moe-expert-parallel-comm", "software.expert_overlap", if_set=True)
        self.copy("--expert-tensor-parallel-size", "plan.etp")
        if plan.etp not in (1, plan.tp):
            self.refuse("plan.etp", f"use 1 or {plan.tp}")

    def parallelism(self) -> None:
        """Degrees."""
        plan = self.job.plan
        always = ("plan.tp", "plan.pp", "plan.microbatch_size")
        self.match(match for match in PLAN if match.path in always or self.value(match.path) > 1)
        if plan.cp > 1:
            self.match([CONTEXT_PARALLEL])
        self.copy("--sequence-parallel", "plan.sequence_parallel", if_set=True)
        if self.is_core:
            write_placement(self, "--use-tp-pp-dp-mapping")

    def stages(self) -> None:
        """Schedule, and blocks per stage."""
        plan, layers = self.job.plan, self.job.model.num_hidden_layers
        self.allowed("plan.schedule", ("none", "1f1b", "interleaved_1f1b"), "use 1f1b or interleaved_1f1b")
        virtual, blocks = self.value("plan.virtual_stages"), self.value("plan.stage_layers")
        is_uneven = blocks is not None or (plan.pp > 1 and layers % plan.num_stages > 0)
        if is_uneven and not self.is_core:
            self.refuse("plan.stage_layers", f"use the software {CORE}")
        if is_uneven:
            layout = self._layout(self._balanced_blocks() if blocks is None else blocks)
            self.set("--pipeline-model-parallel-layout", layout, "plan.stage_layers")
        elif virtual > 1:
            per_stage = layers // plan.num_stages
            self.set("--num-layers-per-virtual-pipeline-stage", per_stage, "plan.virtual_stages")

    def _layout(self, blocks: Sequence[int]) -> str:
        """Stages as Megatron-LM writes them: ``Et|(tt|)*6tL`` for 1, 2, 2, 2, 2, 2, 2 and 1 blocks."""
        first, *middle, last = ("t" * number for number in blocks)
        text = f"E{first}|"
        for stage, group in groupby(middle):
            number = len([*group])
            text += f"({stage}|)*{number}" if number > 1 else f"{stage}|"
        return f"{text}{last}{'m' * self.job.model.mtp_num_layers}L"

    def _balanced_blocks(self) -> Sequence[int]:
        """Blocks per stage as predicted, which Megatron-LM has to be told if they are not equal."""
        assignment = assign_layers(self.job, cost_model(self.job, None))
        return assignment.stage_layers(self.job.model.num_last_layers)

    def sharding(self) -> None:
        """Data parallelism, which follows from the number of devices."""
        plan = self.job.plan
        self.taken("plan.dp_shard", "plan.dp_replicate", "plan.reshard_after_forward")
        if self.allowed("plan.zero_stage", (0, 1), "use 0 or 1") == 1:
            if self.job.training.optimizer == "muon":  # ranks own whole matrices
                self.taken("plan.zero_stage")
            else:
                self.set("--use-distributed-optimizer", True, "plan.zero_stage")
            if plan.dp_replicate > 1:
                self.set("--num-distributed-optimizer-instances", plan.dp_replicate, "plan.dp_replicate")
        if self.value("plan.grad_sync") == "microbatch":
            self.refuse("plan.grad_sync", "use step")
        dtype = self.allowed("plan.grad_dtype", (None, "bf16", "fp32"), "use bf16 or fp32")
        if dtype is not None:
            key = "--grad-reduce-in-bf16" if dtype == "bf16" else "--accumulate-allreduce-grads-in-fp32"
            self.set(key, True, "plan.grad_dtype")

    def overlap(self) -> None:
        """Collectives that overlap compute."""
        if not self.is_core:
            return
        if self.value("software.grad_overlap"):
            self.set("--overlap-grad-reduce", True, "software.grad_overlap")
            size = self.value("plan.bucket_bytes")
            if size is not None:
                width = _FP32_BYTES // 2 if self.job.plan.grad_dtype == "bf16" else _FP32_BYTES
                self.set("--ddp-bucket-size", size // width, "plan.bucket_bytes")
        self.copy("--overlap-param-gather", "software.overlap_param_gather", if_set=True)
        overlap = self.allowed("software.tp_overlap", ("none", "backward", "all"), "use none, backward or all")
        if overlap == "all":
            self.set("--tp-comm-overlap", True, "software.tp_overlap")
        elif overlap == "none":
            self.set("--no-async-tensor-model-parallel-allreduce", True, "software.tp_overlap")
        self.copy("--fp8-dot-product-attention", "software.fp8_dot_product_attention", if_set=True)
        if self.value("software.cuda_graphs"):
            self.set("--cuda-graph-impl", "local", "software.cuda_graphs")
        if self.value("software.fp8_activation_input"):
            self.refuse("software.fp8_activation_input", "use false: Megatron-LM has no argument for it")

    def recompute(self) -> None:
        """Activation recomputation."""
        is_of_2021 = self.job.software.id == OF_2021
        kind, layers, modules = (
            self.value(f"plan.{name}") for name in ("recompute", "recompute_layers", "recompute_modules")
        )
        method, number = ("uniform", 1) if layers is None else ("block", layers)
        if kind == "none":
            if is_of_2021:
                self.set("--activations-checkpoint-num-layers", 1, "software; no effect without a method")
        elif is_of_2021:
            self.allowed("plan.recompute", ("full",))
            self.set("--activations-checkpoint-method", method, "plan.recompute")
            self.set("--activations-checkpoint-num-layers", number, "plan.recompute_layers")
        else:
            self.allowed("plan.recompute", ("full", "selective"), "use full or selective")
            self.set("--recompute-granularity", kind, "plan.recompute")
            if kind == "full":
                self.set("--recompute-method", method, "plan.recompute_layers")
                self.set("--recompute-num-layers", number, "plan.recompute_layers")
            elif layers is not None:
                self.refuse("plan.recompute_layers", "leave it out, or use plan.recompute: full")
            elif modules is not None:
                self.set("--recompute-modules", list(modules), "plan.recompute_modules")

    def training(self) -> None:
        """Batch, precision and optimizer."""
        self.match(TRAINING)
        if self.job.training.optimizer == "muon" and self.job.plan.zero_stage == 1:
            self.set("--optimizer", "dist_muon", "training.optimizer")
        if (types := self.value("training.optimizer_dtypes")) is not None:
            self.set("--use-precision-aware-optimizer", True, "training.optimizer_dtypes")
            for name in ("exp_avg", "exp_avg_sq", "main_params"):
                key = f"--{name.replace('_', '-')}-dtype"
                self.set(key, getattr(types, name), "training.optimizer_dtypes")
        self.set("--clip-grad", self.value("training.clip_grad_norm") or 0.0, "training.clip_grad_norm")
        precision = self.allowed("training.precision", _PRECISIONS)
        for key, value in _PRECISIONS[precision]:
            self.set(key, value, "training.precision")
        recipe = self.value("training.fp8_recipe")
        if precision == "fp8":
            self.set("--fp8-recipe", recipe or "tensorwise", "training.fp8_recipe")
        if self.job.training.task == "sft":
            self.taken("training.task")
