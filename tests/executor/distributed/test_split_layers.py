"""Tensor, sequence and context parallelism on two real ranks against one process and against what the layers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

from executor.distributed.gradients import partial_parameters
from executor.distributed.mesh import ParallelDims, Peers
from executor.models.model import build_stage
from simplan.plan.shard import Shard
from tests.executor.distributed.splits import (
    Case,
    assert_equals_one_process,
    run_cases,
    small_model,
    wanted_exchanges,
    wanted_order,
)
from tests.executor.models.family_models import variant
from tests.support.slow import slow_except

TENSOR = Shard(tp=2)
SEQUENCE = Shard(tp=2, sequence_parallel=True)
SHARDS = {
    "tensor": TENSOR,
    "sequence": SEQUENCE,
    "gather": Shard(cp=2, cp_comm="all_gather"),
    "a2a": Shard(cp=2, cp_comm="a2a"),
}
SPLIT = {
    "gpt": tuple(SHARDS),
    "llama": tuple(SHARDS),
    "qkv-bias": ("tensor", "sequence"),
    "attention-bias": ("sequence",),
    "qk-norm": ("tensor", "sequence", "a2a"),
    "window": ("gather", "a2a"),
    "mpt": tuple(SHARDS),
    "bert": ("tensor", "sequence"),
    "vit": ("tensor",),
}
MODELS = {name: small_model(name) if name in ("gpt", "llama") else variant(name) for name in SPLIT}
EXACT = {
    f"{name}-{shard}": Case(MODELS[name], SHARDS[shard], "none", torch.float64)
    for name, shards in SPLIT.items()
    for shard in shards
}
EXACT |= {
    f"{name}-sequence-selective_op": Case(MODELS[name], SEQUENCE, "selective_op", torch.float64)
    for name in ("gpt", "llama")
}
RECORDED = EXACT | {
    f"{name}-{shard}-{recompute}": Case(MODELS[name], SHARDS[shard], recompute, torch.float32)
    for name in ("gpt", "llama")
    for shard in SPLIT[name]
    for recompute in ("selective", "full")
}
QUICK = (*EXACT, "gpt-sequence-full", "llama-a2a-selective")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Records of both ranks, by the name of the case."""
    items: list[Any] = [*request.session.items]
    asked = {item.callspec.params["name"] for item in items if "results" in getattr(item, "fixturenames", ())}
    names = [name for name in RECORDED if name in asked]
    return dict(
        zip(names, run_cases([RECORDED[name] for name in names], tmp_path_factory.mktemp("split")), strict=True)
    )


@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradients_equal_those_of_one_process(name: str, results: dict[str, list[Any]]) -> None:
    assert_equals_one_process(EXACT[name], results[name])


@pytest.mark.parametrize("name", slow_except(QUICK, RECORDED))
def test_exchanges_and_order_of_gradients_are_those_of_the_layers(name: str, results: dict[str, list[Any]]) -> None:
    """Partial gradients are summed in one message; norms of heads have some also where tokens are not split."""
    case = RECORDED[name]
    layers = case.model.layers_of(case.shard)
    elements = sum(p.num_elements for layer in layers for p in layer.parameters if p.partial_gradient)
    assert (elements > 0) == (case.shard.sequence_parallel or (name.startswith("qk-norm") and case.shard.tp > 1))
    wanted = [("all_reduce", (0, 1), case.dtype.itemsize * elements)] if elements else []
    for result in results[name]:
        assert result["issued"] == wanted_exchanges(case)
        assert result["all completed"]
        assert result["order"] == wanted_order(case)
        assert result["issued for partial gradients"] == wanted


def test_partial_gradients_are_of_what_every_rank_has_whole() -> None:
    """Norms and positions (Korthikanti et al. 2022, section 4.2.2); biases that DTensor adds to parts are not."""
    model = small_model("gpt")
    stage = build_stage(model, range(2), torch.float32, torch.device("cpu"), 0, ParallelDims.silent(SEQUENCE))
    partial = partial_parameters(stage, model.layers_of(SEQUENCE))
    names = {name for name, parameter in stage.named_parameters() if any(parameter is p for p in partial)}
    block = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    assert names == {"layers.0.wpe.weight", *(f"layers.1.{name}" for name in block)}
    assert partial_parameters(stage, model.layers_of(TENSOR)) == []


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_context_parallel_ranks_have_all_tokens_and_equal_work(cp: int) -> None:
    """Work of causal attention: each token meets as many keys as its position says."""
    seq_len = 4 * cp * 3
    tokens = torch.arange(2 * seq_len).view(2, -1)
    parts = [ParallelDims(Shard(cp=cp), cp=Peers(cp, rank)).local_tokens(tokens) for rank in range(cp)]
    assert sorted(torch.cat(parts, dim=1)[0].tolist()) == list(range(seq_len))
    assert len({int((part[0] + 1).sum()) for part in parts}) == 1
    for part in parts:
        assert torch.equal(part[1], part[0] + seq_len)


def test_torchs_row_parallel_embedding_has_gradients_of_the_whole_vocabulary() -> None:
    """Why ``VocabularyParallel`` looks up by itself."""
    mesh = Peers.silent("embedding", 2, "cpu").mesh
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Split(1))
    embedding: Any = parallelize_module(torch.nn.Embedding(98, 48), mesh, style, src_data_rank=None)
    embedding(torch.zeros(2, 24, dtype=torch.int64)).sum().backward()
    assert embedding.weight.to_local().shape == (49, 48)
    assert embedding.weight.grad.to_local().shape == (98, 48)


def test_torchs_sequence_parallel_norm_has_a_sum_of_its_own_for_every_parameter() -> None:
    """Why partial gradients are summed in one message."""
    mesh = Peers.silent("norm", 2, "cpu").mesh
    norm: Any = parallelize_module(torch.nn.LayerNorm(48), mesh, SequenceParallel(), src_data_rank=None)
    norm(torch.ones(2, 12, 48)).to_local().sum().backward()
    assert [parameter.grad.placements for parameter in norm.parameters()] == [(Partial(),)] * 2


@pytest.mark.parametrize("other", [None, "b"])
def test_torchs_clipping_takes_tensors_of_one_mesh_only(other: str | None) -> None:
    """Why ``GradientClipper`` sums squares by itself: beside tensor parallelism there are plain tensors, too."""

    meshes = {axis: Peers.silent(axis, 2, "cpu").mesh for axis in "ab"}

    def parameter(axis: str | None) -> torch.nn.Parameter:
        whole = torch.ones(2, 2)
        placed = DTensor.from_local(whole, meshes[axis], (Split(0),), run_check=False) if axis else whole
        made = torch.nn.Parameter(placed)
        made.grad = made.detach().clone()
        return made

    torch.nn.utils.clip_grad_norm_([parameter("a"), parameter("a")], 1.0)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor|must have the same mesh"):
        torch.nn.utils.clip_grad_norm_([parameter("a"), parameter(other)], 1.0)
