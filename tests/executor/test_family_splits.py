"""Tensor, sequence and context parallelism of all families on two real ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simplan.spec.shard import Shard
from tests.executor.family_models import variant
from tests.executor.splits import Case, assert_equals_one_process, run_cases, wanted_exchanges, wanted_order

SHARDS = {
    "tensor": Shard(tp=2),
    "sequence": Shard(tp=2, sequence_parallel=True),
    "gather": Shard(cp=2, cp_comm="all_gather"),
    "a2a": Shard(cp=2, cp_comm="a2a"),
}
SPLIT = {
    "qkv-bias": ("tensor", "sequence"),
    "attention-bias": ("sequence",),
    "qk-norm": ("tensor", "sequence", "a2a"),
    "window": ("gather", "a2a"),
    "mpt": ("tensor", "sequence", "gather", "a2a"),
    "bert": ("tensor", "sequence"),
    "vit": ("tensor",),
}
EXACT = {
    f"{name}-{shard}": Case(variant(name), SHARDS[shard], "none", torch.float64)
    for name, shards in SPLIT.items()
    for shard in shards
}
RECORDED = {
    f"{name}-{shard}-{recompute}": Case(variant(name), SHARDS[shard], recompute, torch.float32)
    for name, shards in SPLIT.items()
    for shard in shards
    for recompute in ("none", "full")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks did in every case, by its name."""
    cases = EXACT | RECORDED
    return dict(zip(cases, run_cases(list(cases.values()), tmp_path_factory.mktemp("split")), strict=True))


@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradients_equal_those_of_one_process(name: str, results: dict[str, list[Any]]) -> None:
    assert_equals_one_process(EXACT[name], results[name])


@pytest.mark.parametrize("name", RECORDED)
def test_exchanges_and_gradients_are_those_of_the_layers(name: str, results: dict[str, list[Any]]) -> None:
    for result in results[name]:
        assert result["issued"] == wanted_exchanges(RECORDED[name])
        assert result["order"] == wanted_order(RECORDED[name])


@pytest.mark.parametrize("name", RECORDED)
def test_partial_gradients_are_summed_in_one_message(name: str, results: dict[str, list[Any]]) -> None:
    """Norms of heads see some heads each also where tokens are not split."""
    case = RECORDED[name]
    layers = case.model.layers_of(case.shard)
    elements = sum(p.num_elements for layer in layers for p in layer.parameters if p.partial_gradient)
    assert (elements > 0) == (case.shard.sequence_parallel or (name.startswith("qk-norm") and case.shard.tp > 1))
    wanted = [("all_reduce", (0, 1), 4 * elements)] if elements else []
    for result in results[name]:
        assert result["issued for partial gradients"] == wanted
