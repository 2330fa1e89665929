"""Rules about compiled blocks and CUDA graphs: what goes together, and what cannot be replayed.

CUDA graphs as Megatron Core refuses them (NVIDIA/Megatron-LM at d98e8a6:
megatron/core/transformer/transformer_config.py, transformer_layer.py; core/distributed/fsdp/mcore_fsdp_adapter.py;
docs/user-guide/features/cuda_graph.md) and Megatron Bridge (NVIDIA-NeMo/Megatron-Bridge at 067f987:
docs/training/cuda-graphs.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.rules.rule import rule
from simplan.spec.software import SoftwareSpec

_WHOLE = "full_iteration"
_OF_EXPERTS = ("moe", "moe_router", "moe_preprocess")
_FAMILIES = ("gpt", "llama", "mpt", "moe", "deepseek")
_SCHEDULES = ("none", "naive", "1f1b", "interleaved_1f1b")


@rule("precisions of 8 and 4 bits in compiled blocks are not modelled", modelled=False)
def compiled_low_precision(job: Job) -> Iterator[Problem]:
    software, precision = job.software, job.training.precision
    if software.compiled and software.executable and precision in software.low_precision:
        rule = "in compiled blocks is not modelled: casts are fused with what is around them"
        fix = "use bf16, or software.compiled = false"
        yield Problem(field="training.precision", value=precision, rule=rule, fix=fix)


@rule("CUDA graphs are for GPUs, and for each part of a block once", reads_cluster=True)
def cuda_graphs_named(job: Job) -> Iterator[Problem]:
    graphs, device = job.software.cuda_graphs, job.cluster.device
    if not graphs:
        return
    if device.kind != "gpu":
        yield _problem(graphs[0], f"is for GPUs, and {device.id} is none", "remove it")
    if len(set(graphs)) < len(graphs):
        yield _problem(_listed(job.software), "names a part twice", "name each part once")
    if _WHOLE in graphs and len(set(graphs)) > 1:
        rule = "names parts of the whole iteration beside it"
        yield _problem(_listed(job.software), rule, f"use {_WHOLE}, or only the parts")


@rule("CUDA graphs are of parts that a block has")
def cuda_graphs_of_parts(job: Job) -> Iterator[Problem]:
    """Parts that no block has, or that are nothing without another one."""
    model, graphs = job.model, job.software.cuda_graphs
    for part in dict.fromkeys(graphs):
        if part in _OF_EXPERTS and not model.num_experts:
            rule = f"is for models with experts, and family {model.family} has none"
            yield _problem(part, rule, "use attn and mlp")
        if part == "mlp" and model.num_experts and not model.num_dense_layers:
            rule = "is for blocks without experts, and the model has none"
            yield _problem(part, rule, "use moe_router and moe_preprocess")
        if part == "moe_preprocess" and "moe_router" not in graphs:
            yield _problem(part, "goes with moe_router only", "add moe_router, or remove it")
        if part == "moe" and "moe_router" in graphs:
            yield _problem(part, "has the router in it", "use one of them")


@rule("CUDA graphs do not go with activations on the host", reads="offload_activations")
def cuda_graphs_offload(job: Job) -> Iterator[Problem]:
    for part in dict.fromkeys(job.software.cuda_graphs):
        if job.plan.offload_activations:
            rule = "does not go with activations on the host (plan.offload_activations)"
            yield _problem(part, rule, "remove one of them")


@rule("what CUDA graphs have cannot run again so", reads="recompute recompute_modules")
def cuda_graphs_recompute(job: Job) -> Iterator[Problem]:
    for part in dict.fromkeys(job.software.cuda_graphs):
        for against, fix in _against_recompute(part, job):
            yield _problem(part, against, fix)


def _against_recompute(part: str, job: Job) -> Iterator[tuple[str, str]]:
    plan, software = job.plan, job.software
    whole, again = part == _WHOLE, plan.recompute_modules or ()
    core_again = plan.recompute == "selective" and (plan.recompute_modules is None or "core_attn" in again)
    trains_with_dropout = job.model.family in software.layers.dropout
    if plan.recompute == "full" and not whole:
        yield "does not go with plan.recompute = full", f"use {_WHOLE}, or selective with recompute_modules"
    if core_again and trains_with_dropout and (whole or part == "attn"):
        yield "would draw the dropout of an attention core that runs again once for all", "use plan.recompute = none"
    if "mlp" in again and trains_with_dropout and (whole or part == "mlp"):
        yield "would draw the dropout of an mlp that runs again once for all", "remove mlp from plan.recompute_modules"
    if part == "moe_router" and "moe" in again:
        yield "does not go with moe in plan.recompute_modules, which has it inside", "use moe_act and shared_experts"
    if part == "moe_router" and "layernorm" in again and not _sends_copies(software):
        rule = "keeps the output of a norm that runs again (layernorm in plan.recompute_modules), as that of its graph"
        yield rule, "remove layernorm, or use expert_dispatch = all_to_all with moe_preprocess"


@rule("CUDA graphs cannot replay packed documents, nor experts whose numbers of tokens launch kernels")
def cuda_graphs_replay(job: Job) -> Iterator[Problem]:
    """What cannot be replayed, or not with other options of the software."""
    model, software = job.model, job.software
    launched = not (software.fused_experts and software.expert_dispatch == "hybridep")
    for part in dict.fromkeys(software.cuda_graphs):
        if model.document_lengths and part in ("attn", _WHOLE):
            rule = "would replay the documents of the first sequence (model.document_lengths)"
            yield _problem(part, rule, "use mlp, or remove it")
        if part == "mlp" and software.expert_overlap:
            rule = "does not go with software.expert_overlap"
            yield _problem(part, rule, "use attn and moe_router, or expert_overlap = false")
        if part == _WHOLE and model.num_experts and launched:
            rule = "needs experts whose numbers of tokens no kernel is launched by: hybridep and fused experts"
            fix = "set expert_dispatch: hybridep and fused_experts: true (megatron-bridge), or use attn and moe_router"
            yield _problem(part, rule, fix)


@rule("CUDA graphs beside exchanges that overlap cannot have sharded parameters", reads="shards_parameters")
def cuda_graphs_sharded(job: Job) -> Iterator[Problem]:
    for part in dict.fromkeys(job.software.cuda_graphs):
        if part != _WHOLE and job.software.expert_overlap and job.plan.shards_parameters:
            rule = f"does not go with software.expert_overlap and plan.zero_stage = {job.plan.zero_stage}"
            yield _problem(part, rule, f"use {_WHOLE}, or expert_overlap = false")


@rule("CUDA graphs of this model are not modelled", modelled=False)
def cuda_graphs_modelled(job: Job) -> Iterator[Problem]:
    model, graphs = job.model, job.software.cuda_graphs
    if "moe" in graphs and model.num_experts:
        what = "graphs of experts that drop tokens beyond a fixed number each (moe_pad_expert_input_to_capacity)"
        yield _problem("moe", f"{what} are not modelled yet", "use moe_router and moe_preprocess")
    if graphs and model.family not in _FAMILIES:
        fix = f"models: {', '.join(_FAMILIES)}; or remove it"
        yield _problem(_listed(job.software), f"graphs of the family {model.family} are not modelled yet", fix)


@rule("CUDA graphs with this schedule are not modelled", reads="schedule", modelled=False)
def cuda_graphs_schedule(job: Job) -> Iterator[Problem]:
    if job.software.cuda_graphs and job.plan.schedule not in _SCHEDULES:
        rule = f"graphs with plan.schedule = {job.plan.schedule} are not modelled yet"
        yield _problem(_listed(job.software), rule, "use plan.schedule = 1f1b or interleaved_1f1b, or remove it")


def _sends_copies(software: SoftwareSpec) -> bool:
    """Whether a graph gives tokens sorted for their experts in place of the output of the norm before these."""
    return software.expert_dispatch in ("copies", "all_to_all") and "moe_preprocess" in software.cuda_graphs


def _listed(software: SoftwareSpec) -> str:
    return f"[{', '.join(software.cuda_graphs)}]"


def _problem(value: str, rule: str, fix: str) -> Problem:
    return Problem(field="software.cuda_graphs", value=value, rule=rule, fix=fix)
