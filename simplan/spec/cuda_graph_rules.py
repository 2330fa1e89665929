"""What must hold for CUDA graphs: what goes together, and what cannot be replayed.

As Megatron Core refuses it (NVIDIA/Megatron-LM at d98e8a6: megatron/core/transformer/transformer_config.py,
transformer_layer.py; core/distributed/fsdp/mcore_fsdp_adapter.py; docs/user-guide/features/cuda_graph.md) and Megatron
Bridge (NVIDIA-NeMo/Megatron-Bridge at 067f987: docs/training/cuda-graphs.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec

__all__ = ["cuda_graph_rules", "unmodelled_cuda_graphs"]

_FIELD = "software.cuda_graphs"
_WHOLE = "full_iteration"
_OF_EXPERTS = ("moe", "moe_router", "moe_preprocess")
_FAMILIES = ("gpt", "llama", "mpt", "moe", "deepseek")
_SCHEDULES = ("none", "naive", "1f1b", "interleaved_1f1b")


def cuda_graph_rules(
    model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[Problem]:
    """Graphs that cannot be."""
    graphs = software.cuda_graphs
    if not graphs:
        return
    if cluster.device.kind != "gpu":
        yield _problem(graphs[0], f"is for GPUs, and {cluster.device.id} is none", "remove it")
    if len(set(graphs)) < len(graphs):
        yield _problem(_listed(software), "names a part twice", "name each part once")
    if _WHOLE in graphs and len(set(graphs)) > 1:
        rule = "names parts of the whole iteration beside it"
        yield _problem(_listed(software), rule, f"use {_WHOLE}, or only the parts")
    for part in dict.fromkeys(graphs):
        for rule, fix in (*_missing(part, model, software), *_against(part, model, plan, software)):
            yield _problem(part, rule, fix)


def unmodelled_cuda_graphs(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Graphs that can be, but that simplan does not model."""
    graphs = software.cuda_graphs
    if "moe" in graphs and model.num_experts:
        what = "graphs of experts that drop tokens beyond a fixed number each (moe_pad_expert_input_to_capacity)"
        yield _problem("moe", f"{what} are not modelled yet", "use moe_router and moe_preprocess")
    if graphs and model.family not in _FAMILIES:
        fix = f"models: {', '.join(_FAMILIES)}; or remove it"
        yield _problem(_listed(software), f"graphs of the family {model.family} are not modelled yet", fix)
    if graphs and plan.schedule not in _SCHEDULES:
        rule = f"graphs with plan.schedule = {plan.schedule} are not modelled yet"
        yield _problem(_listed(software), rule, "use plan.schedule = 1f1b or interleaved_1f1b, or remove it")


def _missing(part: str, model: ModelSpec, software: SoftwareSpec) -> Iterator[tuple[str, str]]:
    """Parts that no block has, or that are nothing without another one."""
    if part in _OF_EXPERTS and not model.num_experts:
        yield f"is for models with experts, and family {model.family} has none", "use attn and mlp"
    if part == "mlp" and model.num_experts and not model.num_dense_layers:
        yield "is for blocks without experts, and the model has none", "use moe_router and moe_preprocess"
    if part == "moe_preprocess" and "moe_router" not in software.cuda_graphs:
        yield "goes with moe_router only", "add moe_router, or remove it"
    if part == "moe" and "moe_router" in software.cuda_graphs:
        yield "has the router in it", "use one of them"


def _against(part: str, model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[tuple[str, str]]:
    """What cannot be replayed, or not with the rest of the plan."""
    whole, again = part == _WHOLE, plan.recompute_modules or ()
    core_again = plan.recompute == "selective" and (plan.recompute_modules is None or "core_attn" in again)
    trains_with_dropout = model.family in software.layers.dropout
    if plan.offload_activations:
        yield "does not go with activations on the host (plan.offload_activations)", "remove one of them"
    if model.document_lengths and part in ("attn", _WHOLE):
        yield "would replay the documents of the first sequence (model.document_lengths)", "use mlp, or remove it"
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
    if part == "mlp" and software.expert_overlap:
        yield "does not go with software.expert_overlap", "use attn and moe_router, or expert_overlap = false"
    if not whole and software.expert_overlap and plan.shards_parameters:
        rule = f"does not go with software.expert_overlap and plan.zero_stage = {plan.zero_stage}"
        yield rule, f"use {_WHOLE}, or expert_overlap = false"
    if whole and model.num_experts and not (software.fused_experts and software.expert_dispatch == "hybridep"):
        rule = "needs experts whose numbers of tokens no kernel is launched by: hybridep and fused experts"
        fix = "set expert_dispatch: hybridep and fused_experts: true (megatron-bridge), or use attn and moe_router"
        yield rule, fix


def _sends_copies(software: SoftwareSpec) -> bool:
    """Whether a graph gives tokens sorted for their experts in place of the output of the norm before these."""
    return software.expert_dispatch in ("copies", "all_to_all") and "moe_preprocess" in software.cuda_graphs


def _listed(software: SoftwareSpec) -> str:
    return f"[{', '.join(software.cuda_graphs)}]"


def _problem(value: str, rule: str, fix: str) -> Problem:
    return Problem(field=_FIELD, value=value, rule=rule, fix=fix)
