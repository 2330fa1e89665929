"""Schema of files of published training runs; its keys are described in scenarios/published/README.md.

Every run satisfies three identities:

- dp_replicate x dp_shard x tp x pp x cp = num_devices
- num_microbatches x microbatch_size x dp_replicate x dp_shard = global_batch_size
- stage_layers sum to num_hidden_layers; without stage_layers, pp x virtual_stages divides num_hidden_layers

A run with samples_per_s_per_device satisfies a fourth one, unless it is inconsistent:

- samples_per_s_per_device x step_time_s x num_devices = global_batch_size, within 2%
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from simplan.base import Count, Gbit, Natural, NonNegative, NumDevices, Positive, Rate, Spec
from simplan.cluster.hardware import Dtype
from simplan.errors import Problem
from simplan.model.model import MAX_LAYERS
from simplan.plan.plan import Recompute
from simplan.plan.schedules import check_schedule_name
from simplan.training import OptimizerName, Precision

Framework = Literal[
    "megatron-lm",
    "megatron-deepspeed",
    "megatron-core",
    "megatron-bridge",
    "nemo",
    "torchtitan",
    "llm-foundry",
    "maxtext",
    "fsdp-paper",
    "deepspeed",
    "gpipe",
    "torch",
    "transformers",
    "llm.c",
    "t5x",
    "other",
]
Task = Literal["pretrain", "sft", "lora"]

Zero = Natural
MeasuredValue = Annotated[float, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
"""A measured value; errors relative to a smaller one would be infinite."""
_ROUNDING = 0.02  # of printed throughputs and step times


class RunSoftware(Spec):
    """Framework of a run; None for values that the source does not print.

    Attributes:
        channels_last: Images and activations are stored with the channels as the fastest dimension.
    """

    framework: Framework
    version: str | None
    flash_attention: bool | None
    compile: bool | None
    tp_comm_overlap: bool | None
    grad_overlap: bool | None
    channels_last: bool | None = None


class RunExperts(Spec):
    """Sizes of a mixture of experts."""

    num_experts: Count
    top_k: Count
    moe_intermediate_size: Count
    shared_expert_intermediate_size: Zero | None = None
    num_dense_layers: Zero | None = None


class RunLatentAttention(Spec):
    """Sizes of multi-head latent attention."""

    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "seq_len",
)  # fmt: skip
_NO_TEXT = {"gated_mlp": False, "tied_embeddings": None}
_ABSENT: dict[str, dict[str, Any]] = {
    "vit": dict.fromkeys(("num_key_value_heads", "vocab_size", "seq_len"), 0) | _NO_TEXT,
    "resnet": dict.fromkeys(_SIZES, 0) | _NO_TEXT,
}
"""Keys that models for images do not have, with the values that stand for that."""
_IMAGES = ("image_size", "num_classes")
_OWN: dict[str, tuple[str, ...]] = {
    "bert": ("max_predictions_per_seq",),
    "t5": ("num_decoder_layers", "decoder_seq_len"),
    "vit": (*_IMAGES, "patch_size"),
    "resnet": (*_IMAGES, "depths", "layer_type"),
}
"""Keys that only some families have."""
_OPTIONAL = ("max_predictions_per_seq", "num_decoder_layers", "decoder_seq_len")


class RunModel(Spec):
    """Shape of the model.

    Attributes:
        num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, intermediate_size, vocab_size,
            seq_len: At least 1; 0 for what a family does not have (``vit`` and ``resnet``).
        max_predictions_per_seq: Tokens of a sequence that BERT's head computes logits for; 0 for a small head instead
            (SQuAD), None for all tokens.
        num_decoder_layers, decoder_seq_len: Blocks and tokens of T5's decoder.
        image_size, num_classes: Pixels along each side of an image, and classes; for ``vit`` and ``resnet``.
        patch_size: Pixels along each side of a patch of a ``vit``.
        depths, layer_type: Blocks of each stage of a ``resnet``, and their form.
    """

    name: str
    family: Literal["gpt", "llama", "mpt", "t5", "bert", "vit", "resnet", "moe", "other"]
    num_hidden_layers: Zero
    hidden_size: Zero
    num_attention_heads: Zero
    num_key_value_heads: Zero
    intermediate_size: Zero
    vocab_size: Zero
    seq_len: Annotated[int, Field(ge=0, le=10**8)]
    gated_mlp: bool
    tied_embeddings: bool | None
    head_dim: Count | None = None
    params: Annotated[int, Field(ge=1, le=10**15)] | None = None
    max_predictions_per_seq: Zero | None = None
    num_decoder_layers: Count | None = None
    decoder_seq_len: Count | None = None
    image_size: Count | None = None
    patch_size: Count | None = None
    num_classes: Count | None = None
    depths: tuple[Count, ...] | None = None
    layer_type: Literal["basic", "bottleneck"] | None = None
    moe: RunExperts | None = None
    mla: RunLatentAttention | None = None

    @model_validator(mode="before")
    @classmethod
    def _absent_keys(cls, data: Any) -> Any:
        """Fill in the keys that models for images do not have."""
        if not isinstance(data, dict) or not isinstance(data.get("family"), str):
            return data
        depths = data.get("depths")  # a file has lists, and strict mode wants the tuple itself
        return _ABSENT.get(data["family"], {}) | data | ({"depths": tuple(depths)} if isinstance(depths, list) else {})


class RunCluster(Spec):
    """Devices and links of a run.

    Attributes:
        device: Catalog name of the device.
        intra_link, inter_link_gbit_per_device: Link inside a node, and network rate per device in Gbit/s; None if
            unknown.
        matmul_flop_per_s: Best GEMM rate by dtype, as the owners of this machine timed it kernel by kernel; never
            derived from a step time.
    """

    device: str
    num_devices: NumDevices
    devices_per_node: NumDevices
    intra_link: str | None
    inter_link_gbit_per_device: Gbit | None
    matmul_flop_per_s: dict[Dtype, Rate] | None = None


class RunPlan(Spec):
    """Parallel plan, batch and precision of a run.

    Attributes:
        fused_optimizer: As ``TrainingSpec.fused_optimizer``; None if the source does not say.
        clip_grad_norm: Norm to which gradients are clipped; None for no clipping, or if the source does not say.
    """

    dp_replicate: Count
    dp_shard: Count
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    tp: Count
    sequence_parallel: bool
    pp: Count
    virtual_stages: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    cp: Count
    ep: Count
    schedule: Annotated[str, AfterValidator(check_schedule_name)]
    microbatch_size: Count
    num_microbatches: Count
    global_batch_size: Count
    recompute: Recompute
    precision: Precision
    optimizer: OptimizerName
    stage_layers: tuple[Zero, ...] | None = None
    cp_comm: Literal["ring", "all_gather", "a2a"] | None = None
    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    fp8_recipe: str | None = None
    lora_rank: Count | None = None
    fused_optimizer: bool | None = None
    clip_grad_norm: Positive | None = None


class Measured(Spec):
    """Measured figures; None for values that the source does not print.

    Attributes:
        samples_per_s_per_device: Sequences or images, where the source counts those instead of tokens.
    """

    step_time_s: MeasuredValue | None
    tokens_per_s_per_device: MeasuredValue | None
    peak_allocated_gib: MeasuredValue | None
    peak_reserved_gib: MeasuredValue | None
    peak_memory_gb_as_printed: MeasuredValue | None
    oom: bool
    model_tflops_per_device_published: MeasuredValue | None
    mfu_published: NonNegative | None
    samples_per_s_per_device: MeasuredValue | None = None


class PublishedRun(Spec):
    """One published run.

    Attributes:
        id: Unique over all files.
        source: Repository, path and commit, or paper and table.
        derived_step_time: True if the step time was computed from a published throughput.
        assumed: Dotted names of fields that the source does not print.
        quality: ``inconsistent``: figures contradict each other. ``noisy``: the source warns of large variation.
            ``assumed``: a field that sets the amount of work is assumed. ``good``: otherwise.
    """

    id: Annotated[str, Field(min_length=1, max_length=200)]
    source: str
    software: RunSoftware
    task: Task
    model: RunModel
    cluster: RunCluster
    plan: RunPlan
    measured: Measured
    derived_step_time: bool
    assumed: tuple[str, ...]
    quality: Literal["good", "assumed", "noisy", "inconsistent"]


def identity_problems(run: PublishedRun) -> Iterator[Problem]:
    """Yield inconsistencies of a run, with fields dotted from the run."""
    yield from _shape_problems(run.model)
    plan, layers = run.plan, run.model.num_hidden_layers
    degrees = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    yield from _product("cluster.num_devices", run.cluster.num_devices, plan, degrees)
    sizes = ("num_microbatches", "microbatch_size", "dp_replicate", "dp_shard")
    yield from _product("plan.global_batch_size", plan.global_batch_size, plan, sizes)
    if plan.stage_layers is not None:
        if sum(plan.stage_layers) != layers:
            rule = f"adds up to {sum(plan.stage_layers)}, and num_hidden_layers = {layers}"
            yield Problem(field="plan.stage_layers", rule=rule, fix="give the layers of every pipeline rank")
        if len(plan.stage_layers) != plan.pp:
            rule = f"has {len(plan.stage_layers)} entries, and pp = {plan.pp}"
            yield Problem(field="plan.stage_layers", rule=rule, fix="give the layers of every pipeline rank")
    elif layers % (plan.pp * plan.virtual_stages):
        stages = f"pp x virtual_stages = {plan.pp} x {plan.virtual_stages} = {plan.pp * plan.virtual_stages}"
        rule = f"must be a multiple of {stages}"
        fix = "give plan.stage_layers, or correct one of the three"
        yield Problem(field="model.num_hidden_layers", value=str(layers), rule=rule, fix=fix)
    if plan.lora_rank is not None and run.task != "lora":
        yield Problem(field="plan.lora_rank", value=str(plan.lora_rank), rule="is for task = lora", fix="remove it")
    if run.measured.oom and run.measured.step_time_s is not None:
        rule = "must be null where oom is true: the run ended out of memory"
        yield Problem(field="measured.step_time_s", value=str(run.measured.step_time_s), rule=rule)
    yield from _throughput_problems(run)


def _shape_problems(model: RunModel) -> Iterator[Problem]:
    """Yield sizes that are 0 or missing, and keys of other families."""
    absent, own = _ABSENT.get(model.family, {}), _OWN.get(model.family, ())
    for name in (*_SIZES, *absent):
        value = getattr(model, name)
        if name in absent and value != absent[name]:
            yield Problem(
                field=f"model.{name}", value=str(value), rule=f"is not for family = {model.family}", fix="remove it"
            )
        elif name not in absent and value < 1:
            yield Problem(field=f"model.{name}", value=str(value), rule="must be at least 1")
    for name in {name: None for names in _OWN.values() for name in names}:
        value = getattr(model, name)
        if value is None and name in own and name not in _OPTIONAL:
            yield Problem(field=f"model.{name}", rule=f"is missing, and family = {model.family} needs it")
        elif value is not None and name not in own:
            yield Problem(
                field=f"model.{name}", value=str(value), rule=f"is not for family = {model.family}", fix="remove it"
            )


def _throughput_problems(run: PublishedRun) -> Iterator[Problem]:
    rate, seconds = run.measured.samples_per_s_per_device, run.measured.step_time_s
    if rate is None or seconds is None or run.quality == "inconsistent":
        return
    samples, batch = rate * seconds * run.cluster.num_devices, run.plan.global_batch_size
    if abs(samples / batch - 1) > _ROUNDING:
        rule = f"times step_time_s and num_devices it is {samples:.4g}, and plan.global_batch_size = {batch}"
        fix = "correct one of the four"
        yield Problem(field="measured.samples_per_s_per_device", value=f"{rate:g}", rule=rule, fix=fix)


def _product(field: str, value: int, plan: RunPlan, names: Sequence[str]) -> Iterator[Problem]:
    factors = [getattr(plan, name) for name in names]
    if (product := prod(factors)) != value:
        rule = f"must be {' x '.join(names)} = {' x '.join(map(str, factors))} = {product}"
        yield Problem(field=field, value=str(value), rule=rule)
