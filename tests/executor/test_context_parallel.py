"""Context parallelism on two real ranks against one process and against what the layers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.parallel import Parallel, Peers
from simplan.spec.shard import Shard
from tests.executor.splits import (
    Case,
    assert_equals_one_process,
    run_cases,
    small_model,
    wanted_exchanges,
    wanted_order,
)

NAMES = {"all_gather": Shard(cp=2, cp_comm="all_gather"), "a2a": Shard(cp=2, cp_comm="a2a")}
EXACT = {
    f"{family}-{name}": Case(small_model(family), shard, "none", torch.float64)
    for family in ("gpt", "llama")
    for name, shard in NAMES.items()
}
RECORDED = {
    f"{family}-{name}-{recompute}": Case(small_model(family), shard, recompute, torch.float32)
    for family in ("gpt", "llama")
    for name, shard in NAMES.items()
    for recompute in ("none", "selective", "full")
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
def test_exchanges_are_those_of_the_layers(name: str, results: dict[str, list[Any]]) -> None:
    for result in results[name]:
        assert result["issued"] == wanted_exchanges(RECORDED[name])
        assert result["all completed"]


@pytest.mark.parametrize("name", RECORDED)
def test_gradients_complete_in_the_order_of_the_layers(name: str, results: dict[str, list[Any]]) -> None:
    for result in results[name]:
        assert result["order"] == wanted_order(RECORDED[name])


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ranks_have_all_tokens_and_equal_work(cp: int) -> None:
    """Work of causal attention: each token meets as many keys as its position says."""
    seq_len = 4 * cp * 3
    tokens = torch.arange(2 * seq_len).view(2, -1)
    parts = [Parallel(Shard(cp=cp), cp=Peers(cp, rank)).local_tokens(tokens) for rank in range(cp)]
    assert sorted(torch.cat(parts, dim=1)[0].tolist()) == list(range(seq_len))
    assert len({int((part[0] + 1).sum()) for part in parts}) == 1
    for part in parts:
        assert torch.equal(part[1], part[0] + seq_len)
