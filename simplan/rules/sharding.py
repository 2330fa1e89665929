"""Rules about sharding over data-parallel ranks, gradient buckets, and offloading to the host."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.model.captured.layers import other_large_modules
from simplan.model.families import FAMILIES
from simplan.model.layer import LayerKind
from simplan.plan.schedules import is_custom_schedule, splits_backward
from simplan.rules.rule import experts_apart, not_modelled, problem_of, rule, unmodelled
from simplan.software.loading_peaks import OF_SHARDS, loading_peaks, never_whole, splits_layers
from simplan.units import format_bytes
from simplan.wording import divisors, either

_FAMILIES = ("gpt", "llama", "moe")
_WITH_FSDP2 = ("torch", "torchtitan", "torchtitan-2024", "torchtitan-2025", "transformers", "accelerate", "torchtune")
_MAX_BROADCASTS = 4096
"""Broadcasts of an update with torch's ZeroRedundancyOptimizer: each lists all ranks, so their size is the square."""
_WITH_HOST_OPTIMIZER = (*_WITH_FSDP2, "deepspeed")


@rule("dp_shard > 1 needs zero_stage 1, 2 or 3, or replicas that train alone", reads="dp zero_stage replication")
def zero_stage_of_shards(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.dp_shard > 1 and plan.zero_stage == 0 and not plan.replicas_apart:  # whose ranks may be those of DDP
        sentence = f"shards nothing, and dp_shard = {plan.dp_shard}"
        yield problem_of(
            job, "plan.zero_stage", sentence, f"use 1, 2 or 3, or dp_replicate = {plan.dp} and dp_shard = 1"
        )


@rule("zero_stage shards nothing over replicas", reads="dp dp_shard cp zero_stage")
def zero_stage_of_replicas(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.zero_stage and plan.dp_shard * plan.cp == 1 and plan.dp_replicate > 1:
        sentence = f"shards states over dp_shard x cp ranks, which is 1, and dp_replicate = {plan.dp_replicate}"
        fix = f"use dp_shard = {plan.dp} and dp_replicate = 1, or zero_stage = 0"
        yield problem_of(job, "plan.zero_stage", sentence, fix)


@rule(
    "shards of fewer experts must divide a dimension of an expert's matrices with torch's FSDP2",
    reads="dp dp_shard cp tp ep etp shards_parameters experts_apart",
    outside_torch="shards of fewer experts must divide a dimension of an expert's matrices",
)
def few_experts_divide(job: Job) -> Iterator[Problem]:
    """Torch shards only the first dimension unevenly, where most shards of few experts would be padding."""
    plan, model = job.plan, job.model
    if not model.num_experts or not plan.shards_parameters or job.software.id not in _WITH_FSDP2:
        return
    shards = plan.expert_shards if experts_apart(plan) else plan.dp_shard * plan.cp
    experts, sizes = max(1, model.num_experts // plan.ep), (model.moe_intermediate_size // plan.etp, model.hidden_size)

    def is_even(number: int) -> bool:
        return number <= experts or any(size % number == 0 for size in sizes)

    if is_even(shards):
        return
    sentence = (
        f"makes {shards} shards of {experts} experts, which divide neither moe_intermediate_size = {sizes[0]} "
        f"of a rank nor hidden_size = {sizes[1]}: torch shards only the first dimension unevenly"
    )
    fewer = (each for each in reversed(divisors(plan.dp_shard)) if is_even(max(1, shards * each // plan.dp_shard)))
    each = next(fewer, 1)
    yield problem_of(job, "plan.dp_shard", sentence, f"use dp_shard = {each} and dp_replicate = {plan.dp // each}")


@rule("reshard_after_forward is about sharded parameters", reads="reshard_after_forward shards_parameters")
def reshard_needs_shards(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not plan.reshard_after_forward and not plan.shards_parameters:
        none = f"zero_stage = {plan.zero_stage}" if plan.zero_stage < 2 else "there is one shard"
        sentence = f"is about sharded parameters, and {none}"
        yield problem_of(job, "plan.reshard_after_forward", sentence, "remove it, or use zero_stage = 3")


@rule("fsdp_units names blocks of a captured model", reads="shards_parameters")
def fsdp_units_of_blocks(job: Job) -> Iterator[Problem]:
    units, captured = job.plan.fsdp_units, job.model.captured
    if units is None:
        return
    if captured is None:
        sentence = f"is about captured models, and the layers of family = {job.model.family} are units"
        yield problem_of(job, "plan.fsdp_units", sentence, "remove it")
    elif not job.plan.shards_parameters:
        sentence = "is about sharded parameters, and there are none"
        yield problem_of(job, "plan.fsdp_units", sentence, "remove it, or use zero_stage = 3")
    elif isinstance(units, tuple):
        known = sorted({*captured.classes} - {""})
        fix = f"use {either(known)}" if known else "remove it" if captured.classes else "capture the model again"
        for name in units:
            if name not in known:
                sentence = f"is no class of a block of {captured.name}"
                yield problem_of(job, "plan.fsdp_units", sentence, fix, value=name)


@unmodelled("parameters that are gathered together are those of blocks", reads="shards_parameters")
def fsdp_units_modelled(job: Job) -> Iterator[Problem]:
    size, captured = job.plan.fsdp_units, job.model.captured
    if not isinstance(size, int) or captured is None:
        return
    if name := next(other_large_modules(captured, job.model.layers, size), ""):
        what = f"a unit that is no block ({name} has as many parameters)"
        yield not_modelled(job, "plan.fsdp_units", what, "use a larger number, or name classes of blocks")


@rule("bucket_bytes is about DDP's buckets", reads="bucket_bytes shards_parameters")
def buckets_of_ddp(job: Job) -> Iterator[Problem]:
    if job.plan.shards_parameters and job.plan.bucket_bytes is not None:
        sentence = "is about DDP's buckets; FSDP reduces layer by layer"
        yield problem_of(job, "plan.bucket_bytes", sentence, "remove it, or use zero_stage = 0 or 1")


@rule("bucket_bytes is about reducing gradients while backward runs", reads="bucket_bytes")
def buckets_need_overlap(job: Job) -> Iterator[Problem]:
    if job.plan.bucket_bytes is not None and not job.software.grad_overlap:
        sentence = (
            f"is about reducing gradients while backward runs, and {job.software.id} reduces all of them after it"
        )
        yield problem_of(job, "plan.bucket_bytes", sentence, "remove it")


@rule("bucket_bytes is about data-parallel ranks, and there is one", reads="bucket_bytes dp cp")
def buckets_of_replicas(job: Job) -> Iterator[Problem]:
    if job.plan.bucket_bytes is not None and job.plan.dp * job.plan.cp == 1:
        sentence = "is about reducing gradients over data-parallel ranks, and there is one"
        yield problem_of(job, "plan.bucket_bytes", sentence, "remove it")


@unmodelled("this precision of gradients is not modeled for the software", reads="grad_dtype")
def grad_dtype_modelled(job: Job) -> Iterator[Problem]:
    dtype, known = job.plan.grad_dtype, job.software.grad_dtypes
    if dtype is not None and dtype not in known:
        what = f"another dtype for gradients with {job.software.id}"
        fix = f"use {either(known)}, or remove it" if known else "remove it"
        yield not_modelled(job, "plan.grad_dtype", what, fix)


@unmodelled("this ZeRO stage is not modeled for the software", reads="zero_stage dp_shard cp")
def zero_stage_modelled(job: Job) -> Iterator[Problem]:
    plan, known = job.plan, job.software.zero_stages
    if plan.zero_stage not in known and plan.dp_shard * plan.cp > 1:
        what = f"this ZeRO stage with {job.software.id}"
        yield not_modelled(job, "plan.zero_stage", what, f"use {either(known)}")


@unmodelled(
    f"an update of more than {_MAX_BROADCASTS:,} shards that a broadcast each sends to all others is not modeled",
    reads="shards_optimizer_only dp_shard cp",
)
def broadcasts_modelled(job: Job) -> Iterator[Problem]:
    shards = job.plan.dp_shard * job.plan.cp
    parameters = job.software.optimizer_shards == "parameters"
    if parameters and job.plan.shards_optimizer_only and shards > _MAX_BROADCASTS:
        what = f"an update of {shards:,} shards, each of which one broadcast sends to all others,"
        yield not_modelled(job, "plan.zero_stage", what, f"use 2 or 3, or {_MAX_BROADCASTS:,} shards or fewer")


@unmodelled("sharding embeddings tied over two pipeline ranks is not modeled", reads="shards_parameters pp")
def tied_embeddings_sharded(job: Job) -> Iterator[Problem]:
    if not job.plan.shards_parameters or job.plan.pp == 1:
        return
    if job.model.tied_embeddings:
        what = "sharding of an embedding whose two copies are on different stages"
        fix = "use model.tied_embeddings = false, or plan.zero_stage = 1"
        yield not_modelled(job, "model.tied_embeddings", what, fix)
    elif job.model.shared_by_ends:
        names = ", ".join(job.model.layers[-1].tied)
        what = f"sharding of a weight whose two copies are on different stages ({names})"
        yield not_modelled(job, "plan.zero_stage", what, "use 1, or plan.pp = 1")


@unmodelled("sharding batch norms in half precision is not modeled", reads="shards_parameters")
def sharded_precision_modelled(job: Job) -> Iterator[Problem]:
    precision = job.training.precision
    if job.model.depths and job.plan.shards_parameters and precision not in ("fp32", "tf32"):
        what = "a batch norm whose weights FSDP casts to half precision, and whose statistics it does not,"
        yield not_modelled(job, "training.precision", what, "use fp32, or plan.zero_stage = 1")


@unmodelled("sharding of parameters with layers for multi-token prediction is not modeled", reads="shards_parameters")
def mtp_sharded(job: Job) -> Iterator[Problem]:
    layers = job.model.mtp_num_layers
    if layers and job.plan.shards_parameters:
        what = f"sharding of parameters with model.mtp_num_layers = {layers}"
        yield not_modelled(job, "plan.zero_stage", what, "use 0 or 1")


@rule(
    "offload_optimizer is CPUOffloadPolicy of FSDP, and needs parameters that FSDP shards",
    reads="offload_optimizer shards_parameters",
    outside_torch="offload_optimizer needs sharded parameters",
)
def offload_of_sharded_parameters(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not plan.offload_optimizer or plan.shards_parameters:
        return
    if plan.dp_shard * plan.cp > 1:
        fix = "use zero_stage = 3"
    else:
        fix = f"use dp_shard = {plan.dp} in place of dp_replicate" if plan.dp > 1 else "use dp_shard = 2 or more"
    sentence = "is CPUOffloadPolicy of FSDP, and this plan has no parameters that FSDP shards"
    yield problem_of(job, "plan.offload_optimizer", sentence, fix)


@unmodelled(
    "an optimizer on the host is modeled of torch's FSDP2 and DeepSpeed's ZeRO, without tensor parallelism or 8 bits",
    reads="offload_optimizer tp",
    outside_torch="an optimizer on the host is not modeled",
)
def offload_of_fsdp2(job: Job) -> Iterator[Problem]:
    """Tensor-parallel all-reduces and FP8 casts before all-gathers would run on tensors in host memory."""
    plan, software, precision = job.plan, job.software, job.training.precision
    if not plan.offload_optimizer:
        return
    if software.id not in _WITH_HOST_OPTIMIZER:
        others = ", ".join(_WITH_HOST_OPTIMIZER[1:])
        yield _with_it("offload_optimizer", f"software {software.id}", f"use software: torch (or {others})")
    if plan.tp > 1:
        yield _with_it("offload_optimizer", f"tensor parallelism (tp = {plan.tp})", "use tp = 1")
    if precision in software.low_precision:
        yield _with_it("offload_optimizer", f"training.precision = {precision}", "use bf16")


@rule("offload_layers is about offload_activations", reads="offload_layers offload_activations")
def offload_layers_of_activations(job: Job) -> Iterator[Problem]:
    layers = job.plan.offload_layers
    if layers is not None and not job.plan.offload_activations:
        sentence = "says of how many blocks activations are moved, and offload_activations is off"
        yield problem_of(job, "plan.offload_layers", sentence, "set offload_activations, or remove it")


@rule("offloading needs a host link", reads="offload_optimizer offload_activations", reads_cluster=True)
def offload_needs_link(job: Job) -> Iterator[Problem]:
    cluster, offloads = job.cluster, job.plan.offload_optimizer or job.plan.offload_activations
    if offloads and cluster.device.kind != "cpu" and cluster.host_link is None:
        yield Problem(
            field="cluster.device.host_link",
            rule=f"is missing: the catalog does not say what joins {cluster.device.id} with its host",
            fix="name a link, e.g. {preset: " + cluster.device.id + ", host_link: pcie4} (`simplan show links`)",
        )


@unmodelled(
    "optimizer states on the host of experts that ranks share out are not modeled",
    reads="offload_optimizer experts_apart",
)
def offload_of_experts(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.offload_optimizer and job.model.num_experts and experts_apart(plan):
        fix = "use ep = 1" if plan.ep > 1 else "use etp = tp"
        yield _with_it("offload_optimizer", "states of experts of which other ranks have others", fix)


@unmodelled(
    "activations on the host of a part of the blocks of a pipeline are not modeled",
    reads="offload_layers offload_activations pp",
)
def offload_layers_modelled(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.offload_activations and plan.offload_layers is not None and plan.pp > 1:
        sentence = f"a part of the blocks of a pipeline (pp = {plan.pp}) is not modeled yet"
        yield problem_of(job, "plan.offload_layers", sentence, "remove it: then all blocks are moved")


@unmodelled(
    "activations on the host are not modeled of this model, or with this plan",
    reads="offload_activations schedule recompute",
)
def offload_modelled(job: Job) -> Iterator[Problem]:
    plan, model = job.plan, job.model
    if not plan.offload_activations:
        return
    what = ""
    if model.family not in _FAMILIES:
        what, fix = f"activations of the family {model.family}", f"models: {', '.join(_FAMILIES)}"
    elif any(model.windows) or FAMILIES[model.family].alibi:
        what, fix = "attention in a window, whose masks would have to stay on the device,", "remove it"
    elif is_custom_schedule(plan.schedule):
        what, fix = "a schedule of your own", "use 1f1b"
    elif splits_backward(plan.schedule):
        what, fix = f"a backward in two parts ({plan.schedule})", "use 1f1b"
    elif plan.recompute == "qkv_proj_offloaded":
        what, fix = "recompute = qkv_proj_offloaded, which has transfers of its own,", "use selective or full"
    if what:
        yield _with_it("offload_activations", what, fix)


@unmodelled(
    "offloading with frozen weights is modeled for families, where each shard goes with its gradient",
    reads="offload_optimizer offload_activations",
)
def offload_with_frozen_weights(job: Job) -> Iterator[Problem]:
    model = job.model
    by_tensor = job.software.runtime == "torch" and not job.software.zero2_whole_weights
    if not (model.lora_rank or model.frozen) or (by_tensor and model.captured is None):
        return
    for field in ("offload_optimizer", "offload_activations"):
        if getattr(job.plan, field):
            what = "adapters (model.lora_rank)" if model.lora_rank else "frozen weights (model.frozen)"
            of = "of a captured module" if model.captured is not None else f"with {job.software.id}"
            yield not_modelled(job, f"plan.{field}", f"offloading with {what} {of}", "remove it")


@unmodelled("activations on the host are modeled where backward runs through all blocks", reads="offload_activations")
def offload_above_frozen(job: Job) -> Iterator[Problem]:
    model = job.model
    if not job.plan.offload_activations or not (model.lora_rank or model.frozen) or model.captured is not None:
        return
    blocks = [layer for layer in model.layers if layer.kind is LayerKind.BLOCK]
    if any(not layer.needs_input_gradient for layer in blocks[1:]):
        what = "offloading activations of a model whose backward ends above its first block"
        yield not_modelled(job, "plan.offload_activations", what, "remove it, or give model.input_require_grads")


@rule("flat_shards and flat_parameters are of sharded parameters, and exclude each other", reads="shards_parameters")
def flat_tensors_of_fsdp(job: Job) -> Iterator[Problem]:
    options = ("flat_shards", "flat_parameters")
    chosen = [option for option in options if option in job.software.options and getattr(job.software, option)]
    for option in chosen if not job.plan.shards_parameters else ():
        sentence = "is of parameters that FSDP shards, and plan.zero_stage shards none"
        yield problem_of(job, f"software.{option}", sentence, "use plan.zero_stage = 3, or remove it")
    if len(chosen) > 1:
        sentence = "is FSDP1 with use_orig_params=False, and software.flat_parameters with True"
        yield problem_of(job, "software.flat_shards", sentence, "remove one of them")


@rule("weights of one flat tensor have one type", reads="shards_parameters")
def flat_parameters_of_one_type(job: Job) -> Iterator[Problem]:
    model, training = job.model, job.training
    if not _is_flat(job) or not model.lora_rank or not job.software.states(training, job.plan):
        return
    state = job.software.state(training, job.plan)
    if state.parameter != state.frozen:
        sentence = (
            f"has adapters of {state.parameter} bytes per weight next to frozen weights of {state.frozen}, and FSDP1 "
            "puts both in one tensor (software.flat_parameters)"
        )
        yield problem_of(job, "training.precision", sentence, "use fp32, or pure_bf16: true")


@unmodelled(
    "flat parameters are modeled for families over data-parallel ranks",
    reads="shards_parameters tp pp cp ep offload_optimizer",
)
def flat_parameters_modelled(job: Job) -> Iterator[Problem]:
    if not _is_flat(job):
        return
    flat, plan, training, model = "FSDP1's flat parameters", job.plan, job.training, job.model
    if model.captured is not None:
        yield not_modelled(job, "software.flat_parameters", f"{flat} of a captured module", "use FSDP2")
    for axis in ("tp", "pp", "cp", "ep"):
        if (degree := getattr(plan, axis)) > 1:
            yield not_modelled(job, f"plan.{axis}", f"{axis} = {degree} with {flat}", "use 1")
    others = {
        "plan.offload_optimizer": plan.offload_optimizer,
        "training.optimizer_in_backward": training.optimizer_in_backward,
        "model.lora_dora": model.lora_dora,
        "model.lora_oft": model.lora_oft,
    }
    for field in (field for field, is_set in others.items() if is_set):
        yield not_modelled(job, field, f"{field.partition('.')[2]} with {flat}", "use false")
    if model.lora_modules_to_save:
        yield not_modelled(job, "model.lora_modules_to_save", f"a trained copy in {flat}", "remove it")
    if training.base_weights is not None:
        what = f"a weight of few bits in {flat}"
        yield problem_of(
            job,
            "training.base_weights",
            f"{what} is not modeled yet",
            "remove it, or use zero_stage 0",
            value=training.base_weights.words,
        )


def _is_flat(job: Job) -> bool:
    return job.software.flat_parameters and job.plan.shards_parameters


@unmodelled("activations on the host are not modeled with compiled blocks", reads="offload_activations")
def offload_compiled(job: Job) -> Iterator[Problem]:
    if job.software.compiled and job.software.executable and job.plan.offload_activations:
        sentence = "moves tensors that a compiled block keeps for itself, which is not modeled"
        yield problem_of(job, "plan.offload_activations", sentence, "use software.compiled = false")


@unmodelled(
    "activations on the host with layers for multi-token prediction are not modeled", reads="offload_activations"
)
def offload_with_mtp(job: Job) -> Iterator[Problem]:
    if job.model.mtp_num_layers and job.plan.offload_activations:
        what = f"activations on the host with model.mtp_num_layers = {job.model.mtp_num_layers}"
        yield not_modelled(job, "plan.offload_activations", what, "remove it")


def _with_it(field: str, what: str, fix: str) -> Problem:
    return Problem(field=f"plan.{field}", value="true", rule=f"{what} is not modeled yet with it", fix=fix)


@unmodelled("this way of loading is not modeled for the software and the plan", reads="shards_parameters tp pp ep etp")
def loading_modelled(job: Job) -> Iterator[Problem]:
    method, known, base = job.software.loading, job.software.checkpoint.methods, job.training.base_weights
    if method in ("auto", "none"):
        return
    if method not in known:
        what = f"this way of loading with {job.software.id}"
        yield not_modelled(job, "software.loading", what, f"use {either(('auto', *known))}")
    elif method in OF_SHARDS and not never_whole(job.software, job.plan):
        what = "this way of loading without sharded parameters"
        yield not_modelled(job, "software.loading", what, "use cpu or device_map, or plan.zero_stage = 3")
    elif splits_layers(job.plan) and method != "shards":
        what = "this way of loading with ranks that split the model"
        yield not_modelled(job, "software.loading", what, "use auto: each rank reads its own part")
    elif method in ("broadcast", "zero_init", "shards") and base is not None and base.is_quantized_while_loaded:
        what = f"this way of loading with weights that become {base.format} as they are loaded"
        fix = "use device_map" + ", or rank0 as axolotl does under FSDP2" * ("rank0" in known)
        yield not_modelled(job, "software.loading", what, fix)


@rule(
    "the model fits in the memory of devices and hosts while it is loaded",
    reads="shards_parameters dp_replicate tp pp ep etp offload_optimizer",
    reads_cluster=True,
)
def loading_within_memory(job: Job) -> Iterator[Problem]:
    """A rule of searches alone; ``predict`` reports it."""
    software, plan, training, cluster = job.software, job.plan, job.training, job.cluster
    if not software.loads(training) or splits_layers(plan) or cluster.device.kind == "cpu":
        return  # parts of layers need no more than the step
    peaks = loading_peaks(software, job.model, plan, training, cluster.ranks_per_node)
    if peaks is None:
        return
    context_bytes = int(software.context_bytes.get(cluster.device.kind, 0))
    for needed, memory, of in (
        (peaks.device_bytes + context_bytes, cluster.largest_memory_bytes, "a device"),
        (peaks.host_bytes, cluster.host_memory_bytes, "the host memory of a node"),
    ):
        if memory is not None and needed > memory:
            sentence = f"needs {format_bytes(needed)} of {of}, which has {format_bytes(memory)}: {peaks.words}"
            others = [way for way in software.checkpoint.methods if way != peaks.method]
            fix = f"use {either(others)}" if others else "use fewer devices per node, or larger ones"
            yield problem_of(job, "software.loading", sentence, fix, value=peaks.method)
