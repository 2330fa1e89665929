"""Conversion of a published run to a job: its model, cluster, training, software and plan.

Values that a source does not print are assumed here, each with a note for the reader. Features without a profile use a
fallback profile. Unsupported features raise errors later, by the rules that every plan has to pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from simplan import catalog
from simplan.accuracy.framework_defaults import framework_defaults, profile_name, splits_experts, year_of
from simplan.accuracy.recipe import NO_RECIPES, Recipes, Settings, recipes_of, settings_of, with_settings
from simplan.accuracy.schema import PublishedRun, RunCluster, RunModel, RunPlan
from simplan.cluster.hardware import ClusterSpec, DeviceSpec
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS, Placement
from simplan.predict.assumptions import padding_assumption
from simplan.problems import parse_model
from simplan.rules import violations
from simplan.rules.experts import expert_overlap_precision, expert_overlap_ranks, expert_overlap_stages
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training import TrainingSpec
from simplan.units import format_flop_per_s

_NETWORK_GBIT: Mapping[str, float] = MappingProxyType({"tpu-v4": 50, "tpu-v5e": 25, "tpu-v5p": 50, "tpu-v6e": 100})
"""Data-center network of a TPU, Gbit/s (jax-ml/scaling-book, tpus.md: egress per chip)."""
_USUAL_GBIT = 100.0
_PACKED_DOCUMENT_TOKENS = 256  # fine-tuning rows: "the packed samples are much shorter than seq_len"
_NVL72, _TRAY = 72, 4  # devices of an NVLink domain of GB200 and GB300, and of a tray, the unit of allocation
_LORA_RANK = 32  # the default of NeMo and Megatron-Bridge (nemo/collections/llm/peft/lora.py: dim)
_SYNCHRONIZED = {"zb-2p-optsync": "zb-2p"}
_SIZES = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "seq_len",
})  # fmt: skip
_SIZES_OF_SOME = frozenset({
    "num_decoder_layers", "decoder_seq_len", "image_size", "patch_size", "num_classes", "depths", "layer_type",
})  # fmt: skip
_SIZES_OF_EXPERTS = ("num_experts", "top_k", "moe_intermediate_size")
_SWITCHES = (
    "attention_bias", "qkv_bias", "qk_norm", "sliding_window", "sliding_window_pattern", "attention_sinks",
    "router_bias", "expert_bias", "shared_expert_gate",
)  # fmt: skip
_PLAN_FIELDS = frozenset({
    "dp_replicate", "dp_shard", "zero_stage", "tp", "sequence_parallel", "cp", "ep", "pp", "microbatch_size",
    "recompute", "grad_dtype",
})  # fmt: skip
_UNFITTED = {
    "framework_efficiency": 1.0,
    "intra_slowdown": 1.0,
    "inter_slowdown": 1.0,
    "relative_std": None,
    "fitted_on": None,
}
_SIXTEEN_BITS = StateBytes(parameter=2, gradient=2, master=4, activation=2, boundary=2)
"""Widths of Apex's level O2, which patches no function (NVIDIA/apex, docs/source/amp.rst), and of llm.c
(karpathy/llm.c, train_gpt2.cu: floatX is bf16, master weights are fp32)."""
_CUDNN_FIRST = 2026  # torch 2.9 (October 2025) still prefers FlashAttention 2; see ``rates`` of the profile ``torch``
_RECIPES = {"tensorwise": "tensorwise", "rowwise_with_gw_hp": "rowwise_with_gw_hp", "rowwise": "rowwise"}


@dataclass(frozen=True, slots=True)
class PublishedJob:
    """Prediction request for a published run.

    Attributes:
        steps_overlap: True if pipeline ranks start the next step without waiting for each other: the step time is then
            the time of the busiest rank. False: the step lasts from the first start to the last end.
        notes: Assumed values, and features of the run that the prediction lacks.
    """

    job: Job
    steps_overlap: bool
    notes: tuple[str, ...]


def job_of_published_run(run: PublishedRun, own: Recipes = NO_RECIPES) -> PublishedJob:
    """Convert a published run, whose file has recipes of its ``own``, to a prediction request.

    Raises:
        SpecError: A feature of the run has no counterpart in simplan.
    """
    notes: list[str] = []
    recipes = recipes_of(run, own)
    settings = settings_of(recipes)
    software = with_settings(_software(run, notes), settings)
    notes += [f"as its recipe says: {', '.join(recipe.sets.words())}" for recipe in recipes]
    model = _model(run, software, settings, notes)
    cluster, training = _cluster(run, notes), _training(run, software, notes)
    job = Job(model, cluster, training, _plan(run, settings, notes), software)
    notes += padding_assumption(job)
    return PublishedJob(
        job=without_refused_overlap(job, notes),
        steps_overlap=run.plan.schedule.startswith("zb-") and run.plan.schedule not in _SYNCHRONIZED,
        notes=tuple(notes),
    )


def _software(run: PublishedRun, notes: list[str]) -> SoftwareSpec:
    given = run.software
    framework = framework_defaults()[given.framework]
    profile = with_fallback_profiles(catalog.software(profile_name(given, run.plan)), run.plan, notes)
    rates = profile.rates
    if profile.rates_of is not None and year_of(given) < _CUDNN_FIRST:
        earlier = catalog.software(profile.rates_of).rates.attention_kernel
        rates = rates.model_copy(update={"attention_kernel": earlier})
    changes: dict[str, object] = {"rates": rates}
    if given.grad_overlap is not None:
        changes["grad_overlap"] = given.grad_overlap
    if given.tp_comm_overlap:
        changes["tp_overlap"] = "all"
    if given.compile or (given.compile is None and framework.compiled):
        changes["compiled"] = True
    if framework.keeps_gradients:
        changes |= {"gradient_as_bucket_view": True, "zero_grad_set_to_none": False}
    version = given.version or ""
    if "Apex O2" in version or given.framework == "llm.c":
        changes["state_bytes"] = profile.state_bytes | {"fp16": _SIXTEEN_BITS, "bf16": _SIXTEEN_BITS}
        notes.append("weights and all activations in 16 bits, with fp32 master weights")
    if "NVFuser" in version:
        changes["compiled"] = True
        notes.append("operators that NVFuser fuses: as torch.compile fuses them")
    if given.channels_last:
        changes["channels_last"] = True
    if not framework.is_known:
        # padding of vocabularies is unknown too; nanotron, for example, pads to a multiple of tp
        changes |= {"rates": rates.model_copy(update=_UNFITTED), "vocab_multiple": 1}
        changes |= {"memory_spread": catalog.unfitted_memory_spread()}
    fused = framework.fused_attention if given.flash_attention is None else given.flash_attention
    layers: dict[str, object] = {} if fused is None else {"attention": "fused" if fused else "unfused"}
    if run.model.family == "bert" and profile.id == _TORCH:
        layers["dropout"] = ("bert",)
        notes.append("dropout, with which every script trains BERT")
    changes["layers"] = profile.layers.model_copy(update=layers)
    return profile.model_copy(update=changes)


def _model(run: PublishedRun, software: SoftwareSpec, settings: Settings, notes: list[str]) -> ModelSpec:
    given = run.model
    name = _family(given, notes)
    takes = FAMILIES[name].fields
    sizes = given.model_dump(include=set((_SIZES | _SIZES_OF_SOME) & takes))
    fields: dict[str, Any] = {"name": given.name, "family": name} | {key: each for key, each in sizes.items() if each}
    if "vocab_size" in takes:
        fields |= {"vocab_size": _vocabulary(run, software, notes), **_tied_embeddings(given, notes)}
    if "head_dim" in takes:
        fields["head_dim"] = given.head_dim or _head_dim(given)
    if "gated_mlp" in takes:
        fields["gated_mlp"] = given.gated_mlp
    if "num_decoder_layers" in takes and given.num_decoder_layers is None:
        notes.append("layers and tokens of the decoder are not known: the same numbers as of the encoder")
    for part in (given.moe, given.mla):
        if part is not None:
            fields |= {key: value for key, value in part.model_dump().items() if value is not None}
    if given.max_predictions_per_seq is not None:
        fields["max_predictions_per_seq"] = max(1, given.max_predictions_per_seq)
        if not given.max_predictions_per_seq:
            notes.append("a small head in place of the vocabulary's: that of one predicted token")
    switches, like = _switches_of(given, name)
    if like is not None:
        fields |= switches
        said = ", ".join(f"{field} = {value}" for field, value in switches.items())
        notes.append(f"as the catalog's {like}, whose sizes it has: {said}")
    if run.task == "lora":
        fields |= _adapters(run, settings, notes)
    fields |= settings.given("mtp_num_layers")
    if run.task != "pretrain" and software.packed_attention is not None and "document_lengths" in takes:
        documents = max(1, given.seq_len // _PACKED_DOCUMENT_TOKENS)
        fields["document_lengths"] = (given.seq_len // documents,) * documents
        notes.append(f"fine-tuning on packed documents: of {given.seq_len // documents} tokens each")
    return parse_model(ModelSpec, fields, prefix=("model",))


def _switches_of(model: RunModel, family: str) -> tuple[dict[str, Any], str | None]:
    """Details that the schema of runs lacks (biases, windows, norms), from a catalog model with exactly the same sizes.

    Returns:
        Fields of ``ModelSpec`` and the name of the catalog model; empty and None if no model matches, or matching
        models differ.
    """
    sizes = {name: getattr(model, name) for name in (*(_SIZES - {"seq_len"}), "vocab_size")}
    if model.moe is not None:
        del sizes["intermediate_size"]
        sizes |= {name: getattr(model.moe, name) for name in _SIZES_OF_EXPERTS}
    found = {}
    for name in catalog.names("models"):
        fields = catalog.model_fields(name)
        if fields["family"] == family and all(fields.get(size) == value for size, value in sizes.items()):
            found[name] = {switch: fields[switch] for switch in _SWITCHES if switch in fields}
    ways = list(found.values())
    if not ways or not ways[0] or any(way != ways[0] for way in ways):
        return {}, None
    return ways[0], next(iter(found))


def _tied_embeddings(given: RunModel, notes: list[str]) -> dict[str, bool]:
    """Field of ``ModelSpec``; empty, with a note, where it is not known."""
    if given.tied_embeddings is None:
        notes.append("model.tied_embeddings is not known: as is usual for the family")
        return {}
    return {"tied_embeddings": given.tied_embeddings}


def _adapters(run: PublishedRun, settings: Settings, notes: list[str]) -> dict[str, Any]:
    """LoRA fields of ``ModelSpec``: rank, and adapted modules if known."""
    rank = run.plan.lora_rank or settings.lora_rank
    if rank is None:
        notes.append(f"plan.lora_rank is not known: {_LORA_RANK}")
    return {"lora_rank": rank or _LORA_RANK, **settings.given("lora_targets")}


def _head_dim(model: RunModel) -> int:
    if model.hidden_size % model.num_attention_heads:
        rule = f"must divide model.hidden_size = {model.hidden_size}"
        heads = str(model.num_attention_heads)
        raise SpecError(Problem(field="model.num_attention_heads", value=heads, rule=rule, fix="give model.head_dim"))
    return model.hidden_size // model.num_attention_heads


def _family(model: RunModel, notes: list[str]) -> str:
    """Model family with the same layers."""
    if model.family == "moe":
        return "deepseek" if model.mla is not None else "moe"
    if model.family == "mpt":
        # llm-foundry's benchmark models: learned positions and biases, no ALiBi; their printed sizes say the same
        return "gpt"
    if model.family == "other" or (model.family == "gpt" and model.gated_mlp):
        family = "llama" if model.gated_mlp else "gpt"
        notes.append(f"model.family = {model.family}: computed as {family}")
        return family
    if model.family == "llama" and not model.gated_mlp:
        notes.append("model.gated_mlp = false: computed as gpt")
        return "gpt"
    return model.family


def _vocabulary(run: PublishedRun, software: SoftwareSpec, notes: list[str]) -> int:
    """Published vocabulary size, padded to a multiple of tp unless the software profile pads it."""
    size, tp = run.model.vocab_size, run.plan.tp
    if software.vocab_multiple > 1:
        return size
    padded = -(-size // tp) * tp
    if padded != size:
        notes.append(f"model.vocab_size = {size}: padded to {padded}, a multiple of tp")
    return padded


def _cluster(run: PublishedRun, notes: list[str]) -> ClusterSpec:
    given = run.cluster
    device = catalog.device(given.device)
    if given.matmul_flop_per_s is not None:
        device = device.model_copy(update={"matmul_flop_per_s": device.matmul_flop_per_s | given.matmul_flop_per_s})
        rates = ", ".join(f"{dtype} {format_flop_per_s(rate)}" for dtype, rate in given.matmul_flop_per_s.items())
        notes.append(f"best GEMM rates of its machine, measured by its owners: {rates}")
    link = device.intra_link or given.intra_link
    gbit = given.inter_link_gbit_per_device
    if gbit is None and given.num_devices > given.devices_per_node:
        gbit = _network_gbit(device)
        notes.append(f"cluster.inter_link_gbit_per_device is not known: {gbit:g}")
    node = catalog.NodeEntry(
        id="published",
        device=device,
        devices_per_node=_domain(given, notes),
        intra_link=None if link is None else catalog.link(link),
        inter_link=None if gbit is None else catalog.network_link(gbit),
        source=run.source,
    )
    return catalog.make_cluster(node, given.num_devices)


def _domain(given: RunCluster, notes: list[str]) -> int:
    """Devices that a job uses per NVLink domain: equal numbers of full trays, if it needs several NVL72 domains.

    NVIDIA-NeMo/Megatron-Bridge at 067f987, scripts/performance/utils/executors.py (since v0.1.0rc4): ``--segment`` is
    the largest number of up to 18 trays that divides those of the job.
    """
    size, number = given.devices_per_node, given.num_devices
    if size != _NVL72 or number <= size or number % _TRAY:
        return size
    found = _TRAY * max(each for each in range(1, size // _TRAY + 1) if number // _TRAY % each == 0)
    if found == size:
        return size
    notes.append(f"cluster.devices_per_node = {size}: the job takes {found} of each")
    return found


def _network_gbit(device: DeviceSpec) -> float:
    """Usual network of a device in Gbit/s: from a catalog cluster with the same device, or with the same links."""
    if device.id in _NETWORK_GBIT:
        return _NETWORK_GBIT[device.id]
    nodes = [catalog.node(name) for name in catalog.names("clusters") if name != "this-machine"]
    same = [node for node in nodes if node.device.id == device.id]
    same = same or [node for node in nodes if node.device.intra_link == device.intra_link]
    link = same[0].inter_link if same else None
    return _USUAL_GBIT if link is None else link.bytes_per_s * 8 / 1e9


def _training(run: PublishedRun, software: SoftwareSpec, notes: list[str]) -> TrainingSpec:
    plan = run.plan
    fields: dict[str, Any] = {
        "global_batch_size": plan.global_batch_size,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "fused_optimizer": plan.fused_optimizer,
        "clip_grad_norm": plan.clip_grad_norm,
        "task": run.task,
    }
    low = software.low_precision.get("fp8")
    if plan.precision == "fp8" and low is not None:
        printed = plan.fp8_recipe
        recipe = _recipe(printed) if printed else framework_defaults()[run.software.framework].fp8_recipe
        if recipe not in low.recipes:
            notes.append(f"fp8 recipe {recipe}: predicted as {low.recipes[0]}, {software.id} has no such one")
            recipe = low.recipes[0]
        fields["fp8_recipe"] = recipe
    elif plan.fp8_recipe is not None and plan.precision != "fp8":
        notes.append(f"plan.fp8_recipe = {plan.fp8_recipe!r} is not in the prediction")
    return parse_model(TrainingSpec, fields, prefix=("training",))


def _recipe(printed: str) -> str:
    """FP8 recipe for the name that a source prints."""
    return next((recipe for word, recipe in _RECIPES.items() if word in printed.lower()), "tensorwise")


def _plan(run: PublishedRun, settings: Settings, notes: list[str]) -> ParallelPlan:
    given = run.plan
    schedule = _SYNCHRONIZED.get(given.schedule, given.schedule)
    facts = SCHEDULE_FACTS.get(schedule)
    virtual_stages = given.virtual_stages
    if facts is not None and facts.virtual_stages is not None:
        virtual_stages = facts.virtual_stages
    fields: dict[str, Any] = given.model_dump(include=set(_PLAN_FIELDS))
    if given.grad_dtype is None:
        fields |= settings.given("grad_dtype")
    if settings.offload_layers is not None:
        fields |= {"offload_activations": True, "offload_layers": settings.offload_layers}
    if settings.recompute_modules and given.recompute == "none":
        fields |= {"recompute": "selective", "recompute_modules": settings.recompute_modules}
    if settings.recompute_layers is not None and given.recompute == "none":
        fields |= {"recompute": "full", "recompute_layers": settings.recompute_layers}
    if settings.virtual_stages is not None and schedule == "1f1b":
        schedule, virtual_stages = "interleaved_1f1b", settings.virtual_stages
        facts = SCHEDULE_FACTS[schedule]
    fields |= {"schedule": schedule, "virtual_stages": virtual_stages}
    if run.model.moe is not None and given.tp > 1:
        fields["etp"] = given.tp if splits_experts(run.software) else 1
        notes.append(f"plan.etp is not known: {fields['etp']}, as {run.software.framework} of the time has it")
    if given.cp > 1:
        fields["cp_comm"] = given.cp_comm or framework_defaults()[run.software.framework].cp_comm
    if given.pp > 1 and run.model.family not in ("t5", "resnet"):  # which of their blocks are in a stage is unknown
        placement = "loop" if facts is None else facts.placement
        by_rank = given.stage_layers or (run.model.num_hidden_layers // given.pp,) * given.pp
        fields["stage_layers"] = layers_of_stages(by_rank, virtual_stages, placement)
        if given.stage_layers is None or "plan.stage_layers" in run.assumed:
            fields |= settings.given("stage_layers")
    return parse_model(ParallelPlan, fields, prefix=("plan",))


def layers_of_stages(by_rank: Sequence[int], virtual_stages: int, placement: Placement = "loop") -> tuple[int, ...]:
    """Distribute the layers of each rank evenly over its stages.

    A rank with too few layers for equal stages gets fewer in its stage with the embedding or head, which count as
    layers there: the first or the last stage of the pipeline.

    >>> layers_of_stages([3, 4, 4, 3], 2)
    (1, 2, 2, 2, 2, 2, 2, 1)
    >>> layers_of_stages([3, 4], 2, "v")
    (2, 2, 2, 1)
    """
    num_ranks = len(by_rank)
    stages = [0] * (num_ranks * virtual_stages)
    for rank, layers in enumerate(by_rank):
        least, more = divmod(layers, virtual_stages)
        sizes = [least + (turn < more) for turn in range(virtual_stages)]
        if rank == 0 and placement == "loop":
            sizes.reverse()
        for turn, size in enumerate(sizes):
            back = placement == "v" and turn % 2
            place = num_ranks - 1 - rank if back else rank
            stages[turn * num_ranks + place] = size
    return tuple(stages)


_TORCH = "torch"  # the profile with the most features
_AS_WIDE: Mapping[str, str] = MappingProxyType({"fp16": "bf16", "bf16": "fp16", "tf32": "fp32"})
"""Precision with the same widths of weights and states."""


def with_fallback_profiles(profile: SoftwareSpec, plan: RunPlan, notes: list[str]) -> SoftwareSpec:
    """Add features to a profile that the plan of a run requires; ``notes`` gets a sentence per added feature."""
    if profile.id == _TORCH:
        profile = _torch(profile)
    changes: dict[str, object] = {}
    if plan.zero_stage not in profile.zero_stages and plan.dp_shard * plan.cp > 1:
        changes["zero_stages"] = (*profile.zero_stages, plan.zero_stage)
        how = "parameters are gathered and gradients reduced as FSDP2 does"
        if plan.zero_stage == 1:
            changes["optimizer_shards"] = "elements"
            how = "equal numbers of elements per rank, as in Megatron's distributed optimizer"
        notes.append(f"plan.zero_stage = {plan.zero_stage} with {profile.id}: {how}")
    if plan.sequence_parallel and plan.tp > 1 and not profile.sequence_parallelism:
        changes["sequence_parallelism"] = True
        notes.append(f"plan.sequence_parallel = true with {profile.id}: as Megatron-LM has it")
    if plan.grad_dtype is not None and plan.grad_dtype not in profile.grad_dtypes:
        changes["grad_dtypes"] = (*profile.grad_dtypes, plan.grad_dtype)
        notes.append(f"plan.grad_dtype = {plan.grad_dtype} with {profile.id}: kept and reduced as others do")
    changes |= _precision(profile, plan, notes)
    return profile.model_copy(update=changes)


def without_refused_overlap(job: Job, notes: list[str]) -> Job:
    """Disable ``expert_overlap`` in a job if the framework does not support it for the plan.

    A recipe enables expert overlap per model and device. A run with other stages or recomputation cannot have used it.
    ``notes`` gets a sentence if the overlap is disabled.
    """
    recomputes = job.plan.recompute == "full" or "moe" in (job.plan.recompute_modules or ())
    refused = violations(job, (expert_overlap_ranks, expert_overlap_stages, expert_overlap_precision))
    if not job.software.expert_overlap or not (refused or recomputes):
        return job
    why = f"{refused[0].field} = {refused[0].value}" if refused else "recomputation of experts"
    name = job.software.id
    notes.append(f"no expert dispatch overlapped with another microbatch: {name} does not support it with {why}")
    return replace(job, software=job.software.model_copy(update={"expert_overlap": False}))


def _torch(profile: SoftwareSpec) -> SoftwareSpec:
    """Add features that torch's runtime lacks, since its profile is the fallback for frameworks that have them."""
    low = profile.low_precision
    return profile.model_copy(
        update={
            "ddp_in_pipelines": True,
            "low_precision": low | {"nvfp4": low["nvfp4"].model_copy(update={"kept": "wide"})},
            "grad_dtypes": ("fp32", "bf16", "fp16"),
        }
    )


def _precision(profile: SoftwareSpec, plan: RunPlan, notes: list[str]) -> dict[str, object]:
    """Quantization and element widths of a precision that the profile lacks, from a precision of the same width."""
    changes: dict[str, object] = {}
    wide = plan.precision
    if wide in ("fp8", "mxfp8", "nvfp4"):
        if wide not in profile.low_precision:
            low = catalog.software(_TORCH).low_precision[wide].model_copy(update={"eager": False})
            changes["low_precision"] = profile.low_precision | {wide: low}
            notes.append(f"plan.precision = {wide} with {profile.id}: quantized as torch does")
        wide = "bf16"
    field = "sharded_state_bytes" if plan.zero_stage in (2, 3) and plan.dp_shard * plan.cp > 1 else "state_bytes"
    known = [getattr(profile, name) for name in (field, "state_bytes")]
    if wide not in known[0]:
        like = _AS_WIDE.get(wide, wide)
        found = [widths[name] for widths in known for name in (wide, like) if name in widths]
        if found:
            changes[field] = known[0] | {wide: found[0]}
            notes.append(f"plan.precision = {wide} with {profile.id}: elements as wide as elsewhere")
    return changes
