"""Rules about batch, task, precision and optimizer, and their support by frameworks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from simplan.errors import Problem
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.model.low_precision import LOW_PRECISIONS, LowPrecision, linear_format, quantized_linears
from simplan.optimizers import LAYERWISE, UPDATES
from simplan.plan.schedules import SCHEDULE_FACTS, splits_backward
from simplan.rules.rule import experts_apart, nearest_multiples, not_modelled, problem_of, rule, unmodelled
from simplan.software.rates import low_attention
from simplan.software.software import SoftwareSpec
from simplan.training import num_gratings
from simplan.wording import either, nearest_divisors

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", *LOW_PRECISIONS)
_TORCH_OPTIMIZERS = frozenset(
    {
        "torch",
        "torchtitan",
        "torchtitan-2024",
        "torchtitan-2025",
        "transformers",
        "accelerate",
        "litgpt",
        "torchtune",
        "unsloth",
    }
)
"""Frameworks that use torch.optim's optimizers."""

_NOT_IN_LOW_PRECISION = {
    "resnet": "its matmuls are convolutions",
    "t5": "its memory was never compared with torch's",
}

_IN_8_BITS = ("llama", "moe", "deepseek")
_WITHOUT = "or fp8_dot_product_attention: false"


@rule("fp8_recipe is for fp8")
def recipe_of_fp8(job: Job) -> Iterator[Problem]:
    training = job.training
    if training.fp8_recipe is not None and training.precision != "fp8":
        sentence = f"is for training.precision = fp8, not for {training.precision}"
        yield problem_of(job, "training.fp8_recipe", sentence, "remove it")


@rule("pure_bf16 is for 16 bits, and for linear layers below 16 bits")
def pure_bf16_of_bf16(job: Job) -> Iterator[Problem]:
    precision = job.training.precision
    if job.training.pure_bf16 and precision in ("fp32", "tf32"):
        sentence = f"has weights and states in 16 bits, and training.precision = {precision}"
        yield problem_of(job, "training.pure_bf16", sentence, "use precision bf16, or remove pure_bf16")


@unmodelled("weights and optimizer states in BF16 are not modeled for this", reads="shards_parameters grad_dtype")
def pure_bf16_modelled(job: Job) -> Iterator[Problem]:
    training, software, plan = job.training, job.software, job.plan
    if not training.pure_bf16 or training.precision in ("fp32", "tf32"):
        return
    if "pure_bf16" not in software.states(training, plan):
        adapters = " of adapters" * software.of_adapters(training)
        what = f"training{adapters} without FP32 weights with {software.id}"
        known = "torch or accelerate" if adapters else "torch, torchtitan, accelerate or transformers"
        yield not_modelled(job, "training.pure_bf16", what, f"remove it, or use software {known}")
    elif training.precision == "fp16" and software.id not in ("torch", "accelerate"):
        what = f"training without FP32 weights in FP16 with {software.id}"
        yield not_modelled(job, "training.pure_bf16", what, "use precision bf16, or software torch or accelerate")
    elif plan.grad_dtype == "fp32" and not plan.shards_parameters:
        what = "pure BF16 with gradients in FP32 that are not sharded"
        yield not_modelled(job, "plan.grad_dtype", what, "remove it")


@unmodelled("this task or precision is not modeled for the software", reads="shards_parameters")
def training_modelled(job: Job) -> Iterator[Problem]:
    if not job.plan.shards_parameters:
        yield from _unmodelled_training(job)


@unmodelled("ZeRO-2 and ZeRO-3 of this task and precision are not modeled for the software", reads="shards_parameters")
def sharded_training_modelled(job: Job) -> Iterator[Problem]:
    if job.plan.shards_parameters:
        yield from _unmodelled_training(job)


def _unmodelled_training(job: Job) -> Iterator[Problem]:
    training, software = job.training, job.software
    kinds = software.states(training, job.plan)
    if software.of_adapters(training) and not kinds and software.lora_state_bytes:
        if job.plan.zero_stage in software.zero_stages:  # else the rule of ZeRO stages names the reason
            what = f"ZeRO-{job.plan.zero_stage} sharding of a model with adapters with {software.id}"
            yield not_modelled(job, "plan.zero_stage", what, f"use {either(_stages_with_whole_weights(software))}")
    elif software.of_adapters(training) and not kinds:
        what = f"training adapters with {software.id}"
        yield not_modelled(job, "training.task", what, "use pretrain or sft, or software torch")
    has = {*(kinds or software.state_bytes), *software.low_precision}
    if training.precision not in has:
        known = [precision for precision in _PRECISIONS if precision in has]
        what = f"this precision with {software.id}"
        yield not_modelled(job, "training.precision", what, f"use {either(known)}")


def _stages_with_whole_weights(software: SoftwareSpec) -> list[int]:
    return [stage for stage in software.zero_stages if stage < 2]


@unmodelled("fused_optimizer is about torch's optimizers")
def fused_optimizer_of_torch(job: Job) -> Iterator[Problem]:
    """Rejects ``fused_optimizer`` where the option has no effect or no model."""
    training, software = job.training, job.software
    if training.fused_optimizer is None:
        return
    sentence = ""
    if f"{training.optimizer}_foreach" not in UPDATES:
        sentence = f"is of torch's optimizers, and {training.optimizer} is none: there is one way to compute its step"
    elif software.id not in _TORCH_OPTIMIZERS:
        sentence = f"is of torch's optimizers, and {software.id} has its own"
    if sentence:
        yield problem_of(job, "training.fused_optimizer", sentence, "leave it out")


@unmodelled("an optimizer with norms of layers is not modeled with experts that ranks share out", reads="experts_apart")
def layerwise_optimizer_modelled(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if job.training.optimizer in LAYERWISE and job.model.num_experts and plan.ep == 1 and experts_apart(plan):
        sentence = "with experts that tensor-parallel ranks do not split (plan.etp = 1) is not modeled yet"
        yield problem_of(job, "training.optimizer", sentence, "use adamw")


@unmodelled("norms of gradients are not modeled where ranks have parts of them in unequal ways", reads="ep")
def norms_modelled(job: Job) -> Iterator[Problem]:
    training, software, ep = job.training, job.software, job.plan.ep
    of_layers = training.optimizer in LAYERWISE
    split = f"with experts that are split over ranks (plan.ep = {ep})"
    if ep > 1 and training.clip_grad_norm is not None and software.executable:
        yield problem_of(job, "training.clip_grad_norm", f"clipping {split} is not modeled yet", "leave it out")
    if ep > 1 and of_layers:
        yield problem_of(job, "training.optimizer", f"it {split} is not modeled yet", "use adamw")
    if of_layers and software.optimizer_shards == "elements":
        sentence = f"it with {software.id}, whose ranks update parts of flat buffers, is not modeled yet"
        yield problem_of(job, "training.optimizer", sentence, "use adamw")


@unmodelled("this precision is not modeled for this model and software")
def low_precision_modelled(job: Job) -> Iterator[Problem]:
    """Precisions that software does not have at all are refused by ``training_modelled``."""
    training, family, software = job.training, job.model.family, job.software
    low = software.low_precision.get(cast(LowPrecision, training.precision))
    if low is None:
        return
    recipe = training.fp8_recipe
    if recipe is not None and training.precision == "fp8" and recipe not in low.recipes:
        sentence = f"linear layers of {software.id} have no such recipe"
        yield problem_of(job, "training.fp8_recipe", sentence, f"use {either(low.recipes)}")
    if family in _NOT_IN_LOW_PRECISION:
        sentence = f"is not modeled yet for {family}: {_NOT_IN_LOW_PRECISION[family]}"
        yield problem_of(job, "training.precision", sentence, "use bf16")


@rule("torchtitan's CUDA graphs capture neither pipelines nor expert parallelism", reads="pp ep")
def cuda_graphs_of_torchtitan(job: Job) -> Iterator[Problem]:
    """As torchtitan 0.3, torchtitan/trainer.py, ``_validate_cuda_graphs``, for the all-to-all of torch."""
    plan = job.plan
    if job.software.cuda_graphs and job.software.id == "torchtitan" and plan.pp * plan.ep > 1:
        what = f"a pipeline (plan.pp = {plan.pp})" if plan.pp > 1 else f"expert parallelism (plan.ep = {plan.ep})"
        yield problem_of(job, "software.cuda_graphs", f"torchtitan captures no step with {what}", "use false")


_WITHOUT_CHUNKS = ("bert", "resnet", "t5", "vit")


@unmodelled(
    "a loss in chunks is not modeled for this software, tensor parallelism or heads of other models",
    reads="tp schedule",
)
def chunked_loss_modelled(job: Job) -> Iterator[Problem]:
    model, plan, software = job.model, job.plan, job.software
    if software.loss == "whole":
        return
    chunked = software.chunked_loss
    reason, fix = "", "use software.loss = whole"
    if chunked is None:
        reason = f"for {software.id}"
        fix = f"use software.loss = {either(['whole', *software.chunked_losses])}"
    elif plan.tp > 1 and not chunked.tensor_parallel:
        reason = f"with tp = {plan.tp} for {software.id}"
    elif chunked.recomputed and splits_backward(plan.schedule):
        reason = f"in recomputed chunks with schedule = {plan.schedule}"
        fix = f"use software.loss = {'chunked or ' * (not software.chunked_losses['chunked'].recomputed)}whole"
    elif model.family in _WITHOUT_CHUNKS:
        reason = f"for {model.family}"
    elif model.mtp_num_layers:
        reason = "with multi-token prediction"
    if reason:
        yield problem_of(job, "software.loss", f"is not modeled yet {reason}", fix)


@rule("tokens of a microbatch divide into equal chunks of the loss", reads="dp cp microbatch_size microbatch_sizes")
def chunks_of_loss_are_equal(job: Job) -> Iterator[Problem]:
    chunked = job.software.chunked_loss
    if chunked is None or not chunked.equal or chunked.num_chunks is None:
        return
    for size in sorted(set(job.plan.sizes_of_ranks)):
        tokens = size * job.model.seq_len // job.plan.cp
        if tokens % chunked.num_chunks:
            number = chunked.num_chunks
            into = f"whose loss has {number} equal chunks in {job.software.id}"
            sentence = f"gives a rank {tokens:,} tokens per microbatch, {into}"
            fix = f"use a multiple of {number} tokens, or software.loss = whole"
            yield problem_of(job, "plan.microbatch_size", sentence, fix)


@unmodelled("FP8 attention is not modeled for this model, precision or device", reads_cluster=True)
def low_attention_modelled(job: Job) -> Iterator[Problem]:
    """Support of Transformer Engine's ``fp8_dpa`` (FP8 attention)."""
    model, device, precision = job.model, job.cluster.device, job.training.precision
    if not job.software.fp8_dot_product_attention:
        return
    if precision not in LOW_PRECISIONS:
        sentence = f"is for training.precision = {either(LOW_PRECISIONS)}, and it is {precision}"
        yield _in_8_bits(sentence, "use one of them, " + _WITHOUT)
        return
    if low_attention(precision) not in device.kernels.low_attention:
        sentence = f"on {device.id} is not modeled yet: there is no public data on its rate in {precision}"
        yield _in_8_bits(sentence, f"use b200-sxm, gb200, b300-sxm or gb300, {_WITHOUT}")
    if model.family not in _IN_8_BITS:
        sentence = f"of the family {model.family} is not modeled yet"
        yield _in_8_bits(sentence, f"models: {', '.join(_IN_8_BITS)}; {_WITHOUT}")
    if model.document_lengths:
        sentence = "of packed documents (model.document_lengths) is not modeled yet"
        yield _in_8_bits(sentence, "remove them, " + _WITHOUT)


@unmodelled("context parallelism of FP8 attention is not modeled", reads="cp")
def cp_of_low_attention(job: Job) -> Iterator[Problem]:
    cp = job.plan.cp
    if job.software.fp8_dot_product_attention and job.training.precision in LOW_PRECISIONS and cp > 1:
        yield _in_8_bits(f"with plan.cp = {cp} is not modeled yet: ranks communicate keys", "use cp = 1, " + _WITHOUT)


def _in_8_bits(sentence: str, fix: str) -> Problem:
    return Problem(field="software.fp8_dot_product_attention", value="true", rule=sentence, fix=fix)


@rule(
    "FP8 and FP4 matmuls need sizes that are multiples of the scaling block",
    reads="dp tp sequence_parallel cp cp_comm ep etp microbatch_size microbatch_sizes",
    after_others=True,
)
def low_precision_sizes(job: Job) -> Iterator[Problem]:
    """Sizes that the kernels take: whole blocks, and 16 bytes of every row."""
    training, plan = job.training, job.plan
    precision = cast(LowPrecision, training.precision)
    low = job.software.low_precision.get(precision)
    if low is None:
        return
    form = linear_format(precision, training.fp8_recipe, low.kept, low.weights, experts=low.experts)
    multiple = form.multiple
    odd: dict[str, int] = {}
    rows: set[int] = set()
    for layer in set(job.padded_model.layers_of(plan.shard)):
        for gemm in quantized_linears(layer, form):
            sides = (("outputs", gemm.n), ("inputs", gemm.k))
            odd |= {f"{side} of {gemm.name}": size for side, size in sides if size % multiple}
            rows |= {gemm.m * size for size in plan.sizes_of_ranks}
    if odd:
        name, size = min(odd.items())
        yield Problem(
            field="model",
            value=f"{size} {name}",
            rule=f"linear layers in {form.precision} ({form.recipe}) need sizes that are multiples of {multiple}",
            fix="use training.precision = bf16",
        )
    uneven = sorted(number for number in rows if number % multiple)
    if uneven:
        size = next(each for each in plan.sizes_of_ranks if uneven[0] % each == 0)
        per_sequence = uneven[0] // size
        whole = multiple // math.gcd(per_sequence, multiple)
        sentence = (
            f"gives {uneven[0]} tokens, and the gradients of weights in {form.precision} ({form.recipe}) need a "
            f"multiple of {multiple}"
        )
        yield problem_of(job, "plan.microbatch_size", sentence, f"use a multiple of {whole}")


_MAX_PIPELINE_CELLS = 30_000


@rule("microbatch_sizes must have one size per data-parallel rank", reads="dp microbatch_size microbatch_sizes")
def microbatch_sizes_of_ranks(job: Job) -> Iterator[Problem]:
    plan = job.plan
    sizes = plan.microbatch_sizes
    if not isinstance(sizes, tuple):
        return
    if len(sizes) != plan.dp:
        sentence = f"must have one size for each of dp_replicate x dp_shard = {plan.dp} data-parallel ranks"
        yield problem_of(job, "plan.microbatch_sizes", f"has {len(sizes)} sizes, and {sentence}", "list them all")
    elif plan.microbatch_size != max(sizes):
        sentence = f"is not the largest of plan.microbatch_sizes, {max(sizes)}"
        yield problem_of(job, "plan.microbatch_size", sentence, "remove it")


@rule(
    "global_batch_size must be a multiple of dp x microbatch_size, or of the sum of microbatch_sizes",
    reads="dp microbatch_size microbatch_sizes",
)
def batch_divides(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if isinstance(plan.microbatch_sizes, tuple):
        batch, unit = job.training.global_batch_size, plan.sequences_per_microbatch
        if len(plan.microbatch_sizes) == plan.dp and batch % unit:
            fix = f"use {either(nearest_multiples(batch, unit))}, or sizes with another sum"
            sentence = f"must be a multiple of the sum of plan.microbatch_sizes, {unit}"
            yield problem_of(job, "training.global_batch_size", sentence, fix)
        return
    batch, unit = job.training.global_batch_size, plan.dp * plan.microbatch_size
    if batch % unit == 0:
        return
    fix = f"use {either(nearest_multiples(batch, unit))}"
    if batch % plan.dp == 0:
        sizes = nearest_divisors(batch // plan.dp, plan.microbatch_size)
        fix += f", or plan.microbatch_size = {either(sizes)}"
    sentence = f"must be a multiple of dp x microbatch_size = {plan.dp} x {plan.microbatch_size} = {unit}"
    yield problem_of(job, "training.global_batch_size", sentence, fix)


@rule(
    f"microbatches x pipeline ranks must be at most {_MAX_PIPELINE_CELLS:,} where a step cannot be truncated",
    reads="dp microbatch_size microbatch_sizes pp schedule offload_activations",
)
def pipeline_cells(job: Job) -> Iterator[Problem]:
    """More take minutes and gigabytes to simulate whole."""
    plan = job.plan
    facts, shares_cores = SCHEDULE_FACTS.get(plan.schedule), job.cluster.cores_per_node is not None
    periodic = plan.pp == 1 or (facts is not None and not facts.needs_times and not plan.offload_activations)
    if periodic and not shares_cores:
        return
    cells = job.num_microbatches * plan.pp
    if cells > _MAX_PIPELINE_CELLS:
        most = _MAX_PIPELINE_CELLS // plan.pp * plan.sequences_per_microbatch
        why = "ranks share cores" if periodic else f"schedule {plan.schedule} differs with every number of microbatches"
        sentence = f"gives {cells:,} microbatches x pipeline ranks, more than {_MAX_PIPELINE_CELLS:,}, and {why}"
        others = "or a larger microbatch_size" if shares_cores else "a larger microbatch_size, or 1f1b"
        fix = f"use at most {most}, {others}" if most else "use fewer pipeline ranks"
        yield problem_of(job, "training.global_batch_size", sentence, fix)


_TASKS = {
    "next_token": ("markov", "the next token"),
    "class": ("gratings", "the class of an image"),
    "masked_token": ("", "masked tokens"),
    "target_tokens": ("", "the tokens of a decoder"),
    "own": ("", "what its own loss says"),
}
"""Data with something to learn, and the target in words, by the task of a family."""


@rule("data with something to learn must be made for the task of the model")
def data_of_task(job: Job) -> Iterator[Problem]:
    data, (known, target) = job.training.data, _TASKS[FAMILIES[job.model.family].task]
    if data not in ("random", known):
        other = next(words for name, words in _TASKS.values() if name == data)
        sentence = f"is made for models that predict {other}, and {job.model.family} predicts {target}"
        yield problem_of(job, "training.data", sentence, f"use {known} or random" if known else "use random")


@rule("classes of gratings must be different gratings of the image")
def gratings_of_image(job: Job) -> Iterator[Problem]:
    model, size = job.model, job.model.image_size
    is_of_images = FAMILIES[model.family].task == "class"
    if job.training.data == "gratings" and is_of_images and num_gratings(size) < model.num_classes:
        sentence = (
            f"has {num_gratings(size)} different images of {size} x {size} pixels, and the model {model.num_classes} "
            f"classes"
        )
        yield problem_of(job, "training.data", sentence, "use larger images, or fewer classes")


@rule("backup_workers must be fewer than the replicas of dp_replicate", reads="dp_replicate")
def backup_workers_of_replicas(job: Job) -> Iterator[Problem]:
    replicas, num_dropped = job.plan.dp_replicate, job.training.backup_workers
    if num_dropped and num_dropped >= replicas:
        sentence = f"must be less than plan.dp_replicate = {replicas}, or no gradient is left"
        fix = f"use at most {replicas - 1}" if replicas > 1 else "use a plan with dp_replicate > 1, or remove it"
        yield problem_of(job, "training.backup_workers", sentence, fix)


@unmodelled(
    "backup_workers of replicas that share states or experts, or differ in their batch, are not modeled",
    reads="dp_shard cp ep microbatch_sizes grad_sync",
)
def backup_workers_modelled(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not job.training.backup_workers:
        return
    refused = [f"plan.{key} = {getattr(plan, key)}" for key in ("dp_shard", "cp", "ep") if getattr(plan, key) > 1]
    refused += ["plan.microbatch_sizes"] if plan.microbatch_sizes is not None else []
    refused += ["plan.grad_sync = microbatch"] if plan.grad_sync == "microbatch" else []
    if refused:
        why = "only replicas that are independent until the end of a step can be dropped"
        sentence = f"is not modeled yet with {', '.join(refused)}: {why}"
        fix = "use only dp_replicate, tp and pp, or remove it"
        yield problem_of(job, "training.backup_workers", sentence, fix)


@rule("grad_sync = microbatch is about data-parallel ranks, and there is one", reads="grad_sync dp cp")
def grad_sync_of_replicas(job: Job) -> Iterator[Problem]:
    if job.plan.grad_sync == "microbatch" and job.plan.dp * job.plan.cp == 1:
        sentence = "is about reducing gradients over data-parallel ranks, and there is one"
        yield problem_of(job, "plan.grad_sync", sentence, "remove it")


@rule("the framework reduces sharded gradients after every microbatch", reads="grad_sync shards_parameters pp")
def grad_sync_of_shards(job: Job) -> Iterator[Problem]:
    plan, software = job.plan, job.software
    if plan.grad_sync == "step" and software.reduces_each_microbatch and plan.shards_parameters and plan.pp == 1:
        sentence = f"{software.id} reduces sharded gradients after every microbatch"
        yield problem_of(job, "plan.grad_sync", sentence, "remove it")


@unmodelled("gradient reduction after every microbatch of a pipeline is not modeled", reads="grad_sync pp")
def grad_sync_modelled(job: Job) -> Iterator[Problem]:
    if job.plan.grad_sync == "microbatch" and job.plan.pp > 1:
        what = "gradient reduction after every microbatch of a pipeline (torch's pipelines reduce once a step)"
        yield not_modelled(job, "plan.grad_sync", what, "use step")


@unmodelled(
    "gradient reduction after every microbatch of experts that ranks share out is not modeled",
    reads="grad_sync experts_apart shards_parameters",
)
def grad_sync_of_experts(job: Job) -> Iterator[Problem]:
    plan = job.plan
    reduces = plan.grad_sync == "microbatch" and not plan.shards_parameters
    if job.model.num_experts and experts_apart(plan) and reduces:
        what = "gradient reduction after every microbatch with " + ("ep > 1" if plan.ep > 1 else "tp > 1 and etp = 1")
        yield not_modelled(job, "plan.grad_sync", what, "use step")
