"""Parts of layers that CUDA graphs have, and what Megatron Core and Megatron Bridge refuse."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.rules import check_job
from simplan.spec import catalogue
from simplan.spec.cuda_graphs import CudaGraph, captured
from simplan.spec.layer import Exchange, LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

DEEPSEEK = catalogue.model("deepseek-v2-lite")
LLAMA = catalogue.model("llama3-8b")
GPT = catalogue.model("gpt2-1.5b")
DENSE, EXPERTS = 1, 2
PARTS: tuple[CudaGraph, ...] = ("attn", "mlp", "moe_router", "moe_preprocess")


def software(*graphs: str, name: str = "megatron-bridge", **fields: Any) -> SoftwareSpec:
    return catalogue.software(name).model_copy(update={"cuda_graphs": graphs, **fields})


def block(index: int, *graphs: str, model: ModelSpec = DEEPSEEK, **fields: Any) -> LayerSpec:
    plan = ParallelPlan(dp_shard=8, zero_stage=1, ep=8 if model.num_experts else 1)
    return software(*graphs, **fields).layers_of(model, plan)[index]


@pytest.mark.parametrize("dispatch", ["all_to_all", "deepep", "hybridep"])
def test_parts_of_a_block_with_experts_are_all_before_tokens_are_sent(dispatch: str) -> None:
    """transformer_layer.py, _get_submodules_under_cudagraphs and _te_cuda_graph_capture."""
    layer = block(EXPERTS, expert_dispatch=dispatch)
    found = [name for part in ("attn", "moe_router", "moe_preprocess") for name in captured(layer, part)]
    names = [kernel.name for kernel in layer.kernels]
    sends = next(i for i, kernel in enumerate(layer.kernels) if isinstance(kernel, Exchange) and kernel.axis == "ep")
    assert sorted(found) == sorted(names[:sends])
    assert captured(layer, "moe_preprocess") == ([] if dispatch == "hybridep" else captured(layer, "moe_preprocess"))
    assert captured(layer, "mlp") == []
    copies = ["dispatch"] if dispatch == "all_to_all" else []
    assert [name for name in captured(layer, "moe_preprocess") if name == "dispatch"] == copies


def test_parts_of_a_dense_block_are_its_halves() -> None:
    layer = block(DENSE)
    names = [kernel.name for kernel in layer.kernels]
    assert captured(layer, "attn") + captured(layer, "mlp") == names
    assert captured(layer, "attn")[-1] == "residual1"
    assert captured(layer, "moe_router") == captured(layer, "moe_preprocess") == []


def test_a_graph_gives_what_comes_after_it() -> None:
    """Of a block with experts the normed tokens, the shared expert's output and the residual stream."""

    def outputs(index: int, *graphs: str) -> list[str]:
        graph = block(index, *graphs).graph
        return [] if graph is None else [tensor.name for tensor in graph.outputs]

    assert outputs(EXPERTS, "attn", "moe_router") == ["residual1", "norm2 output", "shared expert output"]
    assert outputs(EXPERTS, "attn") == ["residual1"]
    assert outputs(DENSE, "mlp") == ["block output"]
    assert outputs(EXPERTS, "mlp") == outputs(EXPERTS, "full_iteration") == []


def test_only_layers_with_a_part_in_a_graph_are_others() -> None:
    plain, some = (software(*graphs).layers_of(DEEPSEEK, ParallelPlan(ep=1)) for graphs in ((), ("moe_router",)))
    assert [one == other for one, other in zip(plain, some, strict=True)] == [True, True, *[False] * 26, True]
    assert all(layer.graph is not None for layer in software("full_iteration").layers_of(LLAMA, ParallelPlan()))


def test_a_name_alone_is_a_list_of_it() -> None:
    profile = catalogue.software("megatron-core").model_dump()
    assert SoftwareSpec.model_validate({**profile, "cuda_graphs": "full_iteration"}).cuda_graphs == ("full_iteration",)
    assert SoftwareSpec.model_validate({**profile, "cuda_graphs": "none"}).cuda_graphs == ()
    with pytest.raises(ValueError, match="cuda_graphs"):
        SoftwareSpec.model_validate({**profile, "cuda_graphs": ["mamba"]})


FUSED = {"expert_dispatch": "hybridep", "fused_experts": True}
AGAIN = {"recompute": "selective"}


@pytest.mark.parametrize(
    ("model", "graphs", "options", "plan", "said"),
    [
        (LLAMA, "attn attn", {}, {}, r"\[attn, attn\]: names a part twice"),
        (LLAMA, "attn full_iteration", {}, {}, r"names parts of the whole iteration beside it; use full_iteration"),
        (LLAMA, "moe_router", {}, {}, "moe_router: is for models with experts, and family llama has none; use attn"),
        (catalogue.model("qwen3-30b-a3b"), "mlp", {}, {}, "mlp: is for blocks without experts, and the model has none"),
        (DEEPSEEK, "moe_preprocess", {}, {}, "moe_preprocess: goes with moe_router only; add moe_router"),
        (DEEPSEEK, "moe moe_router", {}, {}, "moe: has the router in it; use one of them"),
        (DEEPSEEK, "moe", {}, {}, "moe: graphs of experts that drop tokens .* are not modelled yet; use moe_router"),
        (LLAMA, "attn", {}, {"offload_activations": True}, "attn: does not go with activations on the host"),
        (LLAMA, "attn", {}, {"recompute": "full"}, "attn: does not go with plan.recompute = full; use full_iteration"),
        (GPT, "attn", {}, AGAIN, "attn: would draw the dropout of an attention core that runs again once for all"),
        (
            GPT,
            "mlp",
            {},
            AGAIN | {"recompute_modules": ("mlp",)},
            "mlp: would draw the dropout of an mlp that runs again once for all",
        ),
        (DEEPSEEK, "moe_router", {}, AGAIN | {"recompute_modules": ("moe",)}, "moe_router: does not go with moe in"),
        (
            DEEPSEEK,
            "moe_router moe_preprocess",
            {"expert_dispatch": "hybridep"},
            AGAIN | {"recompute_modules": ("layernorm",)},
            "moe_router: keeps the output of a norm that runs again .* remove layernorm, or use",
        ),
        (DEEPSEEK, "mlp", {"expert_overlap": True}, {}, "mlp: does not go with software.expert_overlap"),
        (
            DEEPSEEK,
            "attn",
            {"expert_overlap": True},
            {"zero_stage": 3},
            "attn: does not go with software.expert_overlap and plan.zero_stage = 3; use full_iteration",
        ),
        (DEEPSEEK, "full_iteration", {}, {}, "full_iteration: needs experts whose numbers of tokens no kernel"),
        (catalogue.model("bert-large"), "attn", {}, {}, "graphs of the family bert are not modelled yet; models: gpt"),
        (LLAMA, "attn", {}, {"pp": 2, "dp_shard": 4, "schedule": "zb-h1"}, "graphs with plan.schedule = zb-h1 are not"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    model: ModelSpec, graphs: str, options: dict[str, Any], plan: dict[str, Any], said: str
) -> None:
    with pytest.raises((SpecError, NotModelledError), match=said) as error:
        check(model, software(*graphs.split(), **options), **plan)
    assert "software.cuda_graphs" in str(error.value)


@pytest.mark.parametrize(
    ("model", "graphs", "options", "plan"),
    [
        (LLAMA, "attn mlp", {}, {}),
        (LLAMA, "full_iteration", {}, {"recompute": "full"}),
        (DEEPSEEK, "attn mlp moe_router moe_preprocess", {}, {}),
        (DEEPSEEK, "attn moe_router", {"expert_overlap": True}, {}),
        (DEEPSEEK, "full_iteration", FUSED, {}),
        (DEEPSEEK, "moe_router moe_preprocess", {}, AGAIN | {"recompute_modules": ("layernorm",)}),
    ],
)
def test_what_megatron_captures_is_taken(
    model: ModelSpec, graphs: str, options: dict[str, Any], plan: dict[str, Any]
) -> None:
    check(model, software(*graphs.split(), **options), **plan)


def test_packed_documents_are_replayed_where_their_lengths_do_not_matter() -> None:
    packed = LLAMA.model_copy(update={"document_lengths": (2048,) * 4})
    check(packed, software("mlp"))
    with pytest.raises(SpecError, match="attn: would replay the documents of the first sequence"):
        check(packed, software("attn"))


def test_graphs_are_for_gpus() -> None:
    with pytest.raises(SpecError, match=r"software.cuda_graphs = attn: is for GPUs, and \S+ is none"):
        check(LLAMA, software("attn"), cluster="this-machine")


def check(model: ModelSpec, profile: SoftwareSpec, *, cluster: str = "dgx-h100", **plan: Any) -> None:
    fields = {"dp_shard": 8, "zero_stage": 1, "ep": 8 if model.num_experts else 1, **plan}
    where = catalogue.cluster(cluster) if cluster != "this-machine" else catalogue.cluster(cluster, num_devices=8)
    training = TrainingSpec(global_batch_size=32, precision="bf16", optimizer="adamw")
    check_job(Job(model, where, training, ParallelPlan.model_validate(fields), profile))


def test_outputs_are_of_a_rank_s_own_tokens() -> None:
    """Where tensor-parallel ranks gather tokens for a product, they scatter its result before the graph ends."""
    plan = ParallelPlan(dp_shard=4, zero_stage=1, ep=8, tp=2, sequence_parallel=True)
    graph = software("attn", "moe_router").layers_of(DEEPSEEK, plan)[EXPERTS].graph
    assert graph is not None
    own = DEEPSEEK.seq_len // 2 * DEEPSEEK.hidden_size
    sizes = {tensor.name: tensor.elements for tensor in graph.outputs}
    assert sizes["residual1"] == sizes["shared expert output"] == own
