"""Rules about activation recomputation: modules, number of blocks, and combinations with other options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from simplan.errors import Problem
from simplan.job import Job
from simplan.model.layer import LayerKind
from simplan.model.recompute_modules import has_module
from simplan.plan.plan import ParallelPlan, RecomputeModule
from simplan.rules.rule import not_modelled, problem_of, rule, unmodelled
from simplan.wording import either

_LAYERS, _MODULES = "plan.recompute_layers", "plan.recompute_modules"
_INSIDE: Mapping[RecomputeModule, RecomputeModule] = MappingProxyType({"moe_act": "moe", "shared_experts": "moe"})
"""Modules that are part of another one."""

_DISCARDED: tuple[RecomputeModule, ...] = ("layernorm", "moe_act")
"""Modules whose output is freed after FP8 matmuls have quantized it."""


@rule("expert all-to-all that overlaps another microbatch cannot be recomputed with whole layers", reads="recompute")
def expert_overlap_recompute(job: Job) -> Iterator[Problem]:
    if job.plan.recompute == "full" and job.software.expert_overlap:
        sentence = "would repeat the expert all-to-all that overlaps another microbatch (software.expert_overlap)"
        yield problem_of(
            job, "plan.recompute", sentence, "use selective with recompute_modules, or expert_overlap = false"
        )


@rule("only MaxText offloads q, k and v of a block to the host", reads="recompute")
def recompute_of_software(job: Job) -> Iterator[Problem]:
    if job.plan.recompute == "qkv_proj_offloaded" and job.software.runtime != "xla":
        sentence = f"{job.software.id} does not support it: it moves q, k and v to the host as MaxText does"
        yield problem_of(job, "plan.recompute", sentence, "use full, selective or software: maxtext")


@rule("recompute_layers must be at most the blocks, and goes with recompute = full", reads="recompute recompute_layers")
def recompute_layers_of_full(job: Job) -> Iterator[Problem]:
    plan, blocks = job.plan, job.model.num_blocks
    if plan.recompute_layers is None:
        return
    if plan.recompute_layers > blocks:
        sentence = f"is more than the {blocks} blocks of the model"
        yield problem_of(job, _LAYERS, sentence, "remove it, to recompute all")
    if plan.recompute != "full":
        sentence = f"is the number of blocks to recompute in full, and recompute is {plan.recompute}"
        yield problem_of(job, _LAYERS, sentence, "use recompute = full, or remove it")


@rule("recompute_modules names modules for selective recomputation, each once", reads="recompute recompute_modules")
def recompute_modules_of_selective(job: Job) -> Iterator[Problem]:
    modules, recompute = job.plan.recompute_modules, job.plan.recompute
    if modules is None:
        return
    if recompute != "selective":
        sentence = f"lists modules of selective recomputation, and recompute is {recompute}"
        yield problem_of(job, _MODULES, sentence, "use recompute = selective, or remove it")
    elif not modules or len(set(modules)) < len(modules):
        sentence = "names a module twice" if modules else "names no module"
        yield problem_of(job, _MODULES, sentence, "name each module once, or use recompute = none")


@rule("recompute_modules must be modules that can be recomputed separately", reads="recompute recompute_modules")
def recompute_modules_apart(job: Job) -> Iterator[Problem]:
    modules = job.plan.recompute_modules
    if modules is None or job.plan.recompute != "selective":
        return
    for module in dict.fromkeys(modules):
        for against, fix in _against(module, modules, job):
            yield problem_of(job, _MODULES, against, fix, value=module)


def _against(module: RecomputeModule, modules: tuple[RecomputeModule, ...], job: Job) -> Iterator[tuple[str, str]]:
    """Reasons why a module cannot be recomputed alone, each with a fix."""
    software, training = job.software, job.training
    if not _has(job, module):
        yield "no block of the model has such a module apart", "remove it"
    whole = _INSIDE.get(module)
    if whole in modules:
        yield f"is part of {whole}, which is recomputed", "remove it"
    if module in _DISCARDED and training.precision == "fp8" and training.fp8_recipe == "delayed":
        sentence = f"cannot be recomputed with delayed scaling of fp8, in {software.id}"
        yield sentence, "remove it, or use another fp8_recipe"
    if module == "moe" and software.expert_overlap:
        sentence = "would repeat the expert all-to-all that overlaps another microbatch (software.expert_overlap)"
        yield sentence, "use moe_act and shared_experts, or expert_overlap = false"


def _has(job: Job, module: RecomputeModule) -> bool:
    """True when a block has such a module, regardless of ranks and adapters; convolutions have none."""
    if job.model.family == "resnet":
        return False
    bare = job.model.model_copy(update={"lora_rank": 0})
    layers = set(job.software.layers_of(bare, ParallelPlan()))
    return any(has_module(layer, module) for layer in layers if layer.kind is LayerKind.BLOCK)


@unmodelled("this recomputation of this model is not modeled", reads="recompute")
def recompute_modelled(job: Job) -> Iterator[Problem]:
    if job.model.depths and job.plan.recompute != "none":
        what = "recomputation of batch norms, whose running statistics would count every microbatch twice,"
        yield not_modelled(job, "plan.recompute", what, "use none")


@unmodelled("recomputing some blocks is not modeled for this software or model", reads="recompute_layers")
def recompute_layers_modelled(job: Job) -> Iterator[Problem]:
    family, software = job.model.family, job.software
    if job.plan.recompute_layers is None:
        return
    if not software.recompute_layers:
        sentence = f"is not modeled for {software.id}: it recomputes all blocks or none"
        yield problem_of(job, _LAYERS, sentence, "remove it")
    if family in ("resnet", "t5"):
        yield problem_of(job, _LAYERS, f"is not modeled for the family {family}", "remove it")


@unmodelled("the software does not run this module alone again", reads="recompute_modules")
def recompute_modules_modelled(job: Job) -> Iterator[Problem]:
    known = ("core_attn", *job.software.recompute_modules)
    for module in job.plan.recompute_modules or ():
        if module not in known:
            fix = f"use {either(known)}, or software: megatron-core"
            sentence = f"{job.software.id} does not run this module alone again"
            yield problem_of(job, _MODULES, sentence, fix, value=module)
