"""Jobs as launch scripts of Megatron-LM."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
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
from simplan.interop.writing import Exported, Option, Writing
from simplan.job import Job
from simplan.predict.build import assign_layers, cost_model

_TARGET = "Megatron-LM arguments"
_PROGRAMS = {"t5": "pretrain_t5.py", "bert": "pretrain_bert.py"}
_FAMILIES = ("gpt", "llama", "moe", "deepseek", "t5", "bert")
_WITH_ROTATION = ("llama", "moe", "deepseek")
_SCHEDULES = ("none", "1f1b", "interleaved_1f1b")
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
        exports="".join(f"export {_variable(option)}\n" for option in variables),
        arrays=arrays,
        program=_PROGRAMS.get(job.model.family, "pretrain_gpt.py"),
        uses=uses,
    )
    start = f"bash {shlex.quote(file)}" + (" on every node, with NODE_RANK and MASTER_ADDR set" if nodes > 1 else "")
    notes = ["paths of data, tokenizer and checkpoints, and the number of steps, are at the top of the script"]
    if job.training.clip_grad_norm is None:
        notes.append(
            "gradients are not clipped, as training.clip_grad_norm is not set; Megatron-LM clips to 1 by default"
        )
    return Exported({file: text}, start, tuple(notes))


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
NODE_RANK=${{NODE_RANK:-0}}
MASTER_ADDR=${{MASTER_ADDR:-localhost}}
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
    return " ".join([option.setting.key, *(shlex.quote(str(each)) for each in values)])


def _sections(job: Job) -> list[tuple[str, tuple[Option, ...]]]:
    """Arguments in groups, each with the name of its array."""
    writer = _Writer(job)
    groups = {
        "MODEL_ARGS": (writer.software, writer.model, writer.blocks, writer.experts),
        "PARALLEL_ARGS": (writer.parallelism, writer.stages, writer.sharding, writer.overlap),
        "RECOMPUTE_ARGS": (writer.recompute,),
        "TRAINING_ARGS": (writer.training,),
        _ENVIRONMENT: (lambda: write_nccl_algo(writer.writing),),
    }
    sections = []
    for title, parts in groups.items():
        first = len(writer.writing.options)
        for write in parts:
            write()
        sections.append((title, tuple(writer.writing.options[first:])))
    writer.writing.finish()
    return sections


class _Writer:
    """Writer of one job.

    Attributes:
        job: The job.
        writing: The job on its way into arguments.
        is_core: True for Megatron Core, False for earlier versions.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.writing = Writing(job, _TARGET)
        self.is_core = job.software.id == CORE

    def software(self) -> None:
        """Version, and padding of the vocabulary."""
        writing = self.writing
        if self.job.software.id not in (CORE, OF_2022, OF_2021):
            writing.refuse("software.id", f"use {CORE}, {OF_2022} or {OF_2021}")
        if self.job.model.family not in _FAMILIES:
            writing.refuse("model.family", f"use {', '.join(_FAMILIES)}")
        if self.is_core:
            writing.set("--use-mcore-models", True, "software")
        elif self.job.software.id == OF_2022:
            writing.set("--DDP-impl", "local", "software")
        multiple = writing.value("software.vocab_multiple")
        writing.set("--make-vocab-size-divisible-by", multiple, "software.vocab_multiple")

    def model(self) -> None:
        """Sizes."""
        writing, model = self.writing, self.job.model
        writing.match(match for match in MODEL if match.path != "model.max_position_embeddings" or model.family != "t5")
        if model.family == "t5":
            writing.match(T5)
            writing.set("--max-position-embeddings", model.seq_len, "needed by Megatron-LM")
            writing.taken("model.relative_attention_buckets")
        writing.set("--ffn-hidden-size", writing.value("model.intermediate_size"), "model.intermediate_size")
        if model.family != "deepseek":
            writing.set("--kv-channels", writing.value("model.head_dim"), "model.head_dim")
        writing.set("--vocab-size", writing.value("model.vocab_size"), "model.vocab_size")
        groups = writing.value("model.num_key_value_heads")
        if groups and groups != model.num_attention_heads:
            writing.set("--group-query-attention", True, "model.num_key_value_heads")
            writing.set("--num-query-groups", groups, "model.num_key_value_heads")
        if not writing.value("model.tied_embeddings"):
            writing.set("--untie-embeddings-and-output-weights", True, "model.tied_embeddings")

    def blocks(self) -> None:
        """Norms, MLP, positions, biases and attention."""
        writing, model = self.writing, self.job.model
        writing.taken("model.family", "model.type_vocab_size")
        if model.family not in _WITH_ROTATION:
            return
        if not self.is_core:
            writing.refuse("model.family", f"use the software {CORE}")
        writing.taken("model.gated_mlp")
        for key, value in (("--swiglu", True), ("--normalization", "RMSNorm"), ("--position-embedding-type", "rope")):
            writing.set(key, value, f"model.family: {model.family}")
        writing.set("--hidden-dropout", 0.0, f"{CORE} predicts no dropout for this family")
        writing.set("--attention-dropout", 0.0, f"{CORE} predicts no dropout for this family")
        self._biases()
        if writing.value("model.qk_norm") == "projection":
            writing.refuse("model.qk_norm", "use head")
        if model.qk_norm == "head" or model.family == "deepseek":
            writing.set("--qk-layernorm", True, "model.qk_norm" if model.qk_norm else "norms of the latent vectors")
        if writing.value("model.attention_sinks"):
            writing.set("--softmax-type", "learnable", "model.attention_sinks")
        window, period = writing.value("model.sliding_window"), writing.value("model.sliding_window_pattern")
        if window is not None:
            writing.set("--window-size", f"{window - 1},0", "model.sliding_window")
            if period:
                writing.set("--window-attn-skip-freq", period, "model.sliding_window_pattern")
        if writing.value("model.mtp_num_layers"):
            writing.set("--mtp-num-layers", model.mtp_num_layers, "model.mtp_num_layers")
        if model.family == "deepseek":
            writing.set("--multi-latent-attention", True, "model.family: deepseek")
            rank = model.q_lora_rank
            writing.match(match for match in LATENT_ATTENTION if match.path != "model.q_lora_rank" or rank is not None)

    def _biases(self) -> None:
        writing, model = self.writing, self.job.model
        biased, experts = writing.value("model.attention_bias"), writing.value("model.expert_bias")
        if model.num_experts and biased != experts:
            writing.refuse("model.attention_bias" if biased else "model.expert_bias", "give biases to both or to none")
        if not biased:
            writing.set("--disable-bias-linear", True, "model.attention_bias")
        if writing.value("model.qkv_bias"):
            writing.set("--add-qkv-bias", True, "model.qkv_bias")

    def experts(self) -> None:
        """Experts, and how tokens reach them."""
        writing, model, plan = self.writing, self.job.model, self.job.plan
        if not model.num_experts:
            return
        optional = ("model.shared_expert_intermediate_size", "model.shared_expert_gate")
        writing.match(match for match in EXPERTS if match.path not in optional)
        writing.set(
            "--moe-ffn-hidden-size", writing.value("model.moe_intermediate_size"), "model.moe_intermediate_size"
        )
        writing.set("--moe-grouped-gemm", True, f"as {CORE} computes experts")
        if size := writing.value("model.shared_expert_intermediate_size"):
            writing.set("--moe-shared-expert-intermediate-size", size, "model.shared_expert_intermediate_size")
        if writing.value("model.shared_expert_gate"):
            writing.set("--moe-shared-expert-gate", True, "model.shared_expert_gate")
        if dense := writing.value("model.num_dense_layers"):
            pattern = f"([0]*{dense}+[1]*{model.num_hidden_layers - dense})"
            writing.set("--moe-layer-freq", pattern, "model.num_dense_layers")
        writing.taken("model.expert_imbalance")
        factor = writing.value("model.capacity_factor")
        if writing.value("model.drop_tokens"):
            writing.set("--moe-expert-capacity-factor", factor, "model.capacity_factor")
        elif factor != 1:
            writing.refuse("model.capacity_factor", "set model.drop_tokens: true, or 1.0")
        kind, *more = _DISPATCH[writing.value("software.expert_dispatch")]
        writing.set("--moe-token-dispatcher-type", kind, "software.expert_dispatch")
        if more:
            writing.set(more[0], more[1] if len(more) > 1 else True, "software.expert_dispatch")
        if writing.value("software.expert_overlap"):
            writing.set("--overlap-moe-expert-parallel-comm", True, "software.expert_overlap")
        writing.set("--expert-tensor-parallel-size", writing.value("plan.etp"), "plan.etp")
        if plan.etp not in (1, plan.tp):
            writing.refuse("plan.etp", f"use 1 or {plan.tp}")

    def parallelism(self) -> None:
        """Degrees."""
        writing, plan = self.writing, self.job.plan
        always = ("plan.tp", "plan.pp", "plan.microbatch_size")
        writing.match(match for match in PLAN if match.path in always or writing.value(match.path) > 1)
        if plan.cp > 1:
            writing.match([CONTEXT_PARALLEL])
        if writing.value("plan.sequence_parallel"):
            writing.set("--sequence-parallel", True, "plan.sequence_parallel")
        if self.is_core:
            write_placement(writing, "--use-tp-pp-dp-mapping")

    def stages(self) -> None:
        """Schedule, and blocks per stage."""
        writing, plan, layers = self.writing, self.job.plan, self.job.model.num_hidden_layers
        if writing.value("plan.schedule") not in _SCHEDULES:
            writing.refuse("plan.schedule", "use 1f1b or interleaved_1f1b")
        virtual, blocks = writing.value("plan.virtual_stages"), writing.value("plan.stage_layers")
        if blocks is None and plan.pp > 1 and layers % plan.num_stages:
            if not self.is_core:
                writing.refuse("plan.stage_layers", f"use the software {CORE}")
            blocks = self._balanced_blocks()
        if blocks is not None:
            if not self.is_core:
                writing.refuse("plan.stage_layers", f"use the software {CORE}")
            writing.set("--pipeline-model-parallel-layout", self._layout(blocks), "plan.stage_layers")
            return
        if virtual > 1:
            per_stage = layers // plan.num_stages
            writing.set("--num-layers-per-virtual-pipeline-stage", per_stage, "plan.virtual_stages")

    def _layout(self, blocks: Sequence[int]) -> str:
        """Stages as Megatron-LM writes them: ``Et|(tt|)*6tL`` for 1, 2, 2, 2, 2, 2, 2 and 1 blocks."""
        first, *middle, last = ("t" * number for number in blocks)
        text = f"E{first}|"
        for stage, group in groupby(middle):
            number = len([*group])
            text += f"({stage}|)*{number}" if number > 1 else f"{stage}|"
        return f"{text}{last}{'m' * self.job.model.mtp_num_layers}L"

    def _balanced_blocks(self) -> list[int]:
        """Blocks per stage as predicted, which Megatron-LM has to be told if they are not equal."""
        assignment = assign_layers(self.job, cost_model(self.job, None))
        return list(assignment.stage_layers(self.job.model.num_last_layers))

    def sharding(self) -> None:
        """Data parallelism, which follows from the number of devices."""
        writing, plan = self.writing, self.job.plan
        stage = writing.value("plan.zero_stage")
        writing.taken("plan.dp_shard", "plan.dp_replicate", "plan.reshard_after_forward")
        if stage > 1:
            writing.refuse("plan.zero_stage", "use 0 or 1")
        if stage == 1:
            writing.set("--use-distributed-optimizer", True, "plan.zero_stage")
            if plan.dp_replicate > 1:
                writing.set("--num-distributed-optimizer-instances", plan.dp_replicate, "plan.dp_replicate")
        if writing.value("plan.grad_sync") == "microbatch":
            writing.refuse("plan.grad_sync", "use step")
        dtype = writing.value("plan.grad_dtype")
        if dtype == "fp16":
            writing.refuse("plan.grad_dtype", "use bf16 or fp32")
        if dtype is not None:
            key = "--grad-reduce-in-bf16" if dtype == "bf16" else "--accumulate-allreduce-grads-in-fp32"
            writing.set(key, True, "plan.grad_dtype")

    def overlap(self) -> None:
        """Collectives that overlap compute."""
        writing = self.writing
        if not self.is_core:
            return
        if writing.value("software.grad_overlap"):
            writing.set("--overlap-grad-reduce", True, "software.grad_overlap")
            size = writing.value("plan.bucket_bytes")
            if size is not None:
                width = _FP32_BYTES // 2 if self.job.plan.grad_dtype == "bf16" else _FP32_BYTES
                writing.set("--ddp-bucket-size", size // width, "plan.bucket_bytes")
        if writing.value("software.overlap_param_gather"):
            writing.set("--overlap-param-gather", True, "software.overlap_param_gather")
        overlap = writing.value("software.tp_overlap")
        if overlap == "all":
            writing.set("--tp-comm-overlap", True, "software.tp_overlap")
        elif overlap == "none":
            writing.set("--no-async-tensor-model-parallel-allreduce", True, "software.tp_overlap")
        elif overlap != "backward":
            writing.refuse("software.tp_overlap", "use none, backward or all")
        if writing.value("software.fp8_dot_product_attention"):
            writing.set("--fp8-dot-product-attention", True, "software.fp8_dot_product_attention")

    def recompute(self) -> None:
        """Activation recomputation."""
        writing = self.writing
        kind, layers, modules = (
            writing.value(f"plan.{name}") for name in ("recompute", "recompute_layers", "recompute_modules")
        )
        method = "uniform" if layers is None else "block"
        number = 1 if layers is None else layers
        if kind == "none":
            if self.job.software.id == OF_2021:
                writing.set("--activations-checkpoint-num-layers", 1, "software; no effect without a method")
            return
        if kind not in ("full", "selective") or (kind == "selective" and self.job.software.id == OF_2021):
            writing.refuse("plan.recompute", "use full" if self.job.software.id == OF_2021 else "use full or selective")
        if self.job.software.id == OF_2021:
            writing.set("--activations-checkpoint-method", method, "plan.recompute")
            writing.set("--activations-checkpoint-num-layers", number, "plan.recompute_layers")
            return
        writing.set("--recompute-granularity", kind, "plan.recompute")
        if kind == "selective":
            if layers is not None:
                writing.refuse("plan.recompute_layers", "leave it out, or use plan.recompute: full")
            if modules is not None:
                writing.set("--recompute-modules", list(modules), "plan.recompute_modules")
            return
        writing.set("--recompute-method", method, "plan.recompute_layers")
        writing.set("--recompute-num-layers", number, "plan.recompute_layers")

    def training(self) -> None:
        """Batch, precision and optimizer."""
        writing = self.writing
        writing.match(TRAINING)
        writing.set("--clip-grad", writing.value("training.clip_grad_norm") or 0.0, "training.clip_grad_norm")
        precision = writing.value("training.precision")
        if precision not in _PRECISIONS:
            writing.refuse("training.precision", f"use {', '.join(_PRECISIONS)}")
        for key, value in _PRECISIONS[precision]:
            writing.set(key, value, "training.precision")
        recipe = writing.value("training.fp8_recipe")
        if precision == "fp8":
            writing.set("--fp8-recipe", recipe or "tensorwise", "training.fp8_recipe")
        if self.job.training.task == "sft":
            writing.taken("training.task")
