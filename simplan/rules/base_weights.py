"""Rules about frozen weights of few bits below adapters, and about adapters without autocast."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.model.weight_format import FOUR_BITS, SCALES_PER_BLOCK
from simplan.rules.rule import problem_of, rule, unmodelled
from simplan.wording import either

_FIELD = "training.base_weights"
_MIN_BLOCK, _MAX_BLOCK = 32, 4096
_WIDE_PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
_WITH_FLOATS = ("accelerate", "deepspeed")
"""Frameworks whose flat buffers (FSDP1, ZeRO-3) shard floating-point storage alone."""
_WITHOUT = "or remove training.base_weights"


def _problem(key: str, value: object, sentence: str, fix: str) -> Problem:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return Problem(field=f"{_FIELD}.{key}", value=shown, rule=sentence, fix=fix)


@rule("base_weights is for frozen weights below adapters")
def base_weights_of_adapters(job: Job) -> Iterator[Problem]:
    base, task = job.training.base_weights, job.training.task
    if base is not None and task != "lora":
        sentence = f"is for frozen weights below adapters (training.task = lora), and training.task = {task}"
        yield _problem("format", base.format, sentence, f"use training.task = lora with model.lora_rank, {_WITHOUT}")


@rule("double quantization, block sizes and libraries go with formats that have them")
def base_weights_of_format(job: Job) -> Iterator[Problem]:
    base = job.training.base_weights
    if base is None:
        return
    blocked = base.format in ("nf4", "fp4")
    if base.double_quantization and not blocked:
        sentence = f"quantizes the scales of nf4 and fp4, and training.base_weights.format = {base.format}"
        yield _problem("double_quantization", True, sentence, "use format: nf4, or remove it")
    if base.storage != "uint8" and not (blocked and base.library != "torchao"):
        sentence = f"is of bitsandbytes' nf4 and fp4, and training.base_weights.format = {base.format}"
        yield _problem("storage", base.storage, sentence, "remove it")
    if base.library == "torchao" and base.format != "nf4":
        sentence = f"has nf4 alone, and training.base_weights.format = {base.format}"
        yield _problem("library", base.library, sentence, "use format: nf4, or library: bitsandbytes")
    elif base.library == "torchao" and not base.double_quantization:
        sentence = "always quantizes the scales of nf4"
        yield _problem("library", base.library, sentence, "write double_quantization: true")
    if base.library == "bitsandbytes" and base.format not in ("nf4", "fp4", "int8"):
        sentence = f"has nf4, fp4 and int8, and training.base_weights.format = {base.format}"
        yield _problem("library", base.library, sentence, "remove it")
    size = base.block_size
    if size is None:
        return
    if base.format in ("int8", "fp8"):
        sentence = f"is of formats with 4 bits, and training.base_weights.format = {base.format}"
        yield _problem("block_size", size, sentence, "remove it")
    elif not _MIN_BLOCK <= size <= _MAX_BLOCK or size & (size - 1):
        sentence = f"must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}"
        nearest = 1 << min(12, max(5, round(math.log2(size))))
        yield _problem("block_size", size, sentence, f"use {nearest}")


@rule("sharded ranks gather weights of few bits as floating-point storage of 4 bits", reads="shards_parameters")
def base_weights_of_shards(job: Job) -> Iterator[Problem]:
    base, plan, software = job.training.base_weights, job.plan, job.software
    if base is None or not plan.shards_parameters:
        return
    whole = "use plan.dp_replicate (DDP)"
    shards = f"plan.zero_stage = {plan.zero_stage}"
    if base.format == "int8":
        sentence = f"cannot be sharded: FSDP and ZeRO-3 take quantized weights of 4 bits only, and {shards}"
        yield _problem("format", base.format, sentence, f"use format: nf4, or {whole}")
    elif base.format in ("gptq_int4", "awq_int4"):
        sentence = f"cannot be sharded: LLaMA-Factory refuses weights that were quantized before with {shards}"
        yield _problem("format", base.format, sentence, f"use format: nf4 with storage: bf16, or {whole}")
    elif base.storage == "uint8" and base.library != "torchao" and base.format != "fp8" and software.id in _WITH_FLOATS:
        sentence = f"is no floating-point type, which FSDP1 and ZeRO-3 need to shard a parameter, and {shards}"
        yield _problem("storage", base.storage, sentence, f"use storage: bf16, or {whole}")
    if base.upcast:
        sentence = f"is not done under FSDP and ZeRO-3, and {shards}"
        yield _problem("upcast", True, sentence, f"remove it, or {whole}")


@rule("autocast is an option of training adapters on whole weights", reads="shards_parameters")
def autocast_of_adapters(job: Job) -> Iterator[Problem]:
    if job.software.autocast:
        return
    fix = "remove software.autocast"
    if job.training.task != "lora":
        sentence = f"is modeled for adapters (training.task = lora), and training.task = {job.training.task}"
        yield problem_of(job, "software.autocast", sentence, fix)
    elif job.plan.shards_parameters:
        sentence = f"does not go with the mixed precision of plan.zero_stage = {job.plan.zero_stage}"
        yield problem_of(job, "software.autocast", sentence, fix)


@unmodelled("weights of few bits are not modeled for this software or precision")
def base_weights_of_software(job: Job) -> Iterator[Problem]:
    base, software, precision = job.training.base_weights, job.software, job.training.precision
    if base is None:
        return
    library = base.library or "bitsandbytes"
    if library not in software.base_weights:
        sentence = f"in tensors of {library} is not modeled yet with {software.id}"
        known = ("torch", "accelerate", "deepspeed")[: 3 if library == "bitsandbytes" else 2]
        yield _problem("format", base.format, sentence, f"use software {either(known)}, {_WITHOUT}")
    if precision not in _WIDE_PRECISIONS:
        sentence = f"is not modeled yet with training.precision = {precision}"
        yield _problem("format", base.format, sentence, "use training.precision = bf16")
    if software.compiled and library == "bitsandbytes":
        sentence = "is not modeled yet with software.compiled = true: bitsandbytes' functions break its graphs"
        yield _problem("format", base.format, sentence, "use library: torchao, or software.compiled = false")


@unmodelled("weights of few bits are not modeled with splits of layers", reads="tp cp pp ep")
def base_weights_of_splits(job: Job) -> Iterator[Problem]:
    base, plan = job.training.base_weights, job.plan
    if base is None:
        return
    for axis in ("tp", "cp", "pp", "ep"):
        if (degree := getattr(plan, axis)) > 1:
            sentence = f"with {_FIELD}, weights of few bits, is not modeled yet with plan.{axis} = {degree}"
            yield problem_of(job, f"plan.{axis}", sentence, "use 1, and dp_replicate or dp_shard")


@rule(
    "frozen matrices divide into whole blocks and shards of torchao's and GPTQ's formats",
    reads="shards_parameters dp_shard tp",
    after_others=True,
)
def base_weights_divide(job: Job) -> Iterator[Problem]:
    base, plan = job.training.base_weights, job.plan
    if base is None or (base.library != "torchao" and base.format not in FOUR_BITS[2:]):
        return
    size = base.elements_per_scale
    for layer in {*job.software.layers_of(job.model, plan, job.training)}:
        for parameter in layer.parameters:
            if parameter.stored is None:
                continue
            n, k = parameter.shape
            if base.library == "torchao":
                shards = plan.dp_shard if plan.shards_parameters else 1
                unit = size * SCALES_PER_BLOCK * shards
                fits = n * k % unit == 0 and n % shards == 0
                words = f"{unit:,} elements" + (f" and {shards} shards of its rows" if shards > 1 else "")
            else:
                fits, words = k % size == 0, f"groups of {size} inputs"
            if not fits:
                sentence = f"needs {words}, and {parameter.name} is {n:,} x {k:,}"
                fix = "use library: bitsandbytes" if base.library == "torchao" else "use another block_size"
                yield _problem("format", base.format, sentence, fix)
                return
