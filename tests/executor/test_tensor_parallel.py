"""Tensor and sequence parallelism on two real ranks against one process and against what the layers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.model import build_stage
from executor.parallel import Parallel, partial_parameters
from simplan.spec.shard import Shard
from tests.executor.splits import (
    Case,
    assert_equals_one_process,
    run_cases,
    small_model,
    wanted_exchanges,
    wanted_order,
)

TENSOR = Shard(tp=2)
SEQUENCE = Shard(tp=2, sequence_parallel=True)
NAMES = {"tensor": TENSOR, "sequence": SEQUENCE}
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


@pytest.mark.parametrize("name", RECORDED)
def test_partial_gradients_are_summed_in_one_message(name: str, results: dict[str, list[Any]]) -> None:
    case = RECORDED[name]
    layers = case.model.layers_of(case.shard)
    elements = sum(p.num_elements for layer in layers for p in layer.parameters if p.partial_gradient)
    wanted = [("all_reduce", (0, 1), 4 * elements)] if case.shard.sequence_parallel else []
    for result in results[name]:
        assert result["issued for partial gradients"] == wanted


def test_partial_gradients_are_of_what_every_rank_has_whole() -> None:
    """Norms, positions and biases added after a sum (Korthikanti et al. 2022, section 4.2.2)."""
    model = small_model("gpt")
    stage = build_stage(model, range(2), torch.float32, torch.device("cpu"), 0, Parallel.silent(SEQUENCE))
    partial = partial_parameters(stage, model, SEQUENCE)
    names = {name for name, parameter in stage.named_parameters() if any(parameter is p for p in partial)}
    block = {"norm1.weight", "norm1.bias", "proj.bias", "norm2.weight", "norm2.bias", "down.bias"}
    assert names == {"layers.0.wpe.weight", *(f"layers.1.{name}" for name in block)}
    assert partial_parameters(stage, model, TENSOR) == []
