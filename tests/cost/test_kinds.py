"""The kinds of collectives of each strategy, as the papers and torch's hooks have them."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.cost.calibration.store import kinds_needed
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.training import TrainingSpec
from tests.jobs import tiny_model

TRAINING = TrainingSpec(global_batch_size=8)
LLAMA = tiny_model("llama", num_hidden_layers=4, intermediate_size=64, vocab_size=64)


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ({}, ""),
        ({"dp_replicate": 2}, "all_reduce"),
        ({"dp_shard": 2, "zero_stage": 1}, "all_reduce broadcast"),
        ({"dp_replicate": 2, "zero_stage": 1}, "all_reduce"),
        ({"dp_shard": 2}, "all_gather reduce_scatter"),
        ({"dp_shard": 2, "zero_stage": 2}, "all_gather reduce_scatter"),
        ({"dp_shard": 2, "dp_replicate": 2}, "all_gather all_reduce reduce_scatter"),
        ({"pp": 2}, "send"),
        ({"pp": 2, "dp_shard": 2}, "all_gather reduce_scatter send"),
        ({"tp": 2, "sequence_parallel": False}, "all_reduce"),
        ({"tp": 2}, "all_gather all_reduce reduce_scatter"),
        ({"cp": 2, "cp_comm": "ring"}, "all_reduce ring"),
        ({"cp": 2, "cp_comm": "a2a"}, "all_reduce all_to_all"),
        ({"cp": 2, "cp_comm": "all_gather"}, "all_gather all_reduce reduce_scatter"),
        ({"cp": 2, "cp_comm": "a2a", "zero_stage": 3}, "all_gather all_to_all reduce_scatter"),
    ],
)
def test_kinds_of_each_strategy(plan: dict[str, Any], kinds: str) -> None:
    assert " ".join(sorted(kinds_needed(ParallelPlan(**plan), LLAMA, TRAINING))) == kinds


def test_a_tied_embedding_is_summed_over_both_ends_of_a_pipeline() -> None:
    assert " ".join(sorted(kinds_needed(ParallelPlan(pp=2), tiny_model(), TRAINING))) == "all_reduce send"


@pytest.mark.parametrize(
    ("plan", "training", "sums"),
    [
        ({}, {"clip_grad_norm": 1.0}, False),
        ({"dp_shard": 2, "zero_stage": 3}, {"clip_grad_norm": 1.0}, True),
        ({"pp": 2}, {"clip_grad_norm": 1.0}, True),
        ({"pp": 2}, {"optimizer": "lamb"}, False),
        ({"dp_shard": 2}, {"optimizer": "lars"}, True),
        ({"dp_shard": 2}, {"optimizer": "adamw"}, False),
    ],
)
def test_norms_are_summed_over_ranks_with_parts(plan: dict[str, Any], training: dict[str, Any], sums: bool) -> None:
    kinds = kinds_needed(ParallelPlan(**plan), LLAMA, TrainingSpec(global_batch_size=8, **training))
    assert (CollectiveKind.ALL_REDUCE in kinds) == sums
