"""Plans that cannot be, each with its sentence, and their nearest neighbours that can."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.rules import check_job
from simplan.training.training import TrainingSpec
from tests import jobs

MODEL = ModelSpec(
    family="llama",
    num_hidden_layers=8,
    hidden_size=96,
    num_attention_heads=12,
    num_key_value_heads=6,
    intermediate_size=240,
    vocab_size=600,
    seq_len=48,
    tied_embeddings=False,
)


def test_buckets_are_refused_where_nothing_is_reduced_in_buckets() -> None:
    plan = ParallelPlan(dp_replicate=2, bucket_bytes=1000)
    asked = (MODEL, catalog.cluster("dgx-h100", num_devices=2), TrainingSpec(global_batch_size=24), plan)
    check_job(Job(*asked, catalog.software("megatron-bridge")))
    with pytest.raises(SpecError) as caught:
        check_job(Job(*asked, catalog.software("megatron-core")))
    assert str(caught.value) == (
        "plan.bucket_bytes = 1000: is about reducing gradients while backward runs, "
        "and megatron-core reduces all of them after it; remove it"
    )


def check(plan: dict[str, Any], **fields: Any) -> None:
    jobs.check(MODEL.model_copy(update=fields), **plan)


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 6},
        {"tp": 2, "sequence_parallel": False},
        {"cp": 2},
        {"cp": 3, "cp_comm": "a2a"},
        {"cp": 4, "cp_comm": "all_gather", "tp": 2},
        {"dp_shard": 4},
        {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 2, "reshard_after_forward": False},
        {"dp_shard": 3, "zero_stage": 1, "bucket_bytes": 1000},
        {"zero_stage": 3},
        {"pp": 2, "virtual_stages": 2},
        {"pp": 2, "virtual_stages": 4, "dp_shard": 3, "tp": 2},
        {"dp_replicate": 2, "grad_sync": "microbatch"},
        *({"recompute": mode} for mode in ("selective", "selective_op", "selective_layer", "full", "minimal")),
        {"recompute": "qkv_proj_offloaded"},
    ],
)
def test_valid_plans_pass(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.parametrize(
    ("plan", "fields", "sentences"),
    [
        (
            {"tp": 4},
            {},
            ["plan.tp = 4: must divide model.num_key_value_heads = 6; use 3 or 6"],
        ),
        (
            {"tp": 12},
            {"num_key_value_heads": 12, "vocab_size": 601},
            ["plan.tp = 12: must divide model.vocab_size = 601; use 1 or 601, or model.vocab_size = 612 (padded)"],
        ),
        (
            {"sequence_parallel": True},
            {},
            [
                "plan.sequence_parallel = true: splits tokens over the tensor-parallel ranks, and tp = 1; "
                "use false, or a larger tp"
            ],
        ),
        (
            {"tp": 6},
            {"seq_len": 50, "max_position_embeddings": 50},
            [
                "model.seq_len = 50: must be a multiple of tp x cp = 6 for sequence parallelism; use 48 or 54, "
                "or plan.sequence_parallel = false"
            ],
        ),
        (
            {"cp": 5},
            {},
            [
                "model.seq_len = 48: must be a multiple of 2 x cp = 10: each rank takes an early and a late part of "
                "the sequence, so that causal attention is spread evenly; use 40 or 50, or another plan.cp"
            ],
        ),
        (
            {"cp": 4, "cp_comm": "a2a"},
            {},
            [
                "plan.cp = 4: cp x tp = 4 must divide model.num_key_value_heads = 6: all-to-all trades tokens for "
                "heads; use plan.cp_comm = ring or all_gather, or a smaller cp"
            ],
        ),
        (
            {"cp_comm": "a2a"},
            {},
            [
                "plan.cp_comm = a2a: selects the communication of context-parallel ranks, and cp = 1; "
                "remove it, or use a larger cp"
            ],
        ),
        (
            {"dp_shard": 2, "zero_stage": 0},
            {},
            [
                "plan.zero_stage = 0: shards nothing, and dp_shard = 2; use 1, 2 or 3, or dp_replicate = 2 and "
                "dp_shard = 1"
            ],
        ),
        (
            {"dp_shard": 2, "zero_stage": 1, "reshard_after_forward": False},
            {},
            [
                "plan.reshard_after_forward = false: is about sharded parameters, and zero_stage = 1; "
                "remove it, or use zero_stage = 3"
            ],
        ),
        (
            {"dp_shard": 2, "bucket_bytes": 1000},
            {},
            [
                "plan.bucket_bytes = 1000: is about DDP's buckets; FSDP reduces layer by layer; "
                "remove it, or use zero_stage = 0 or 1"
            ],
        ),
        (
            {"tp": 2, "bucket_bytes": 1000},
            {},
            [
                "plan.bucket_bytes = 1000: is about reducing gradients over data-parallel ranks, and there is one; "
                "remove it"
            ],
        ),
        (
            {"zero_stage": 3, "reshard_after_forward": False},
            {},
            [
                "plan.reshard_after_forward = false: is about sharded parameters, and there is one shard; "
                "remove it, or use zero_stage = 3"
            ],
        ),
        (
            {"grad_sync": "microbatch"},
            {},
            [
                "plan.grad_sync = microbatch: is about reducing gradients over data-parallel ranks, and there is one; "
                "remove it"
            ],
        ),
        (
            {"pp": 2, "virtual_stages": 2, "dp_replicate": 2},
            {},
            [
                "plan.virtual_stages = 2: torch's DistributedDataParallel fails with several stages on a rank; "
                "use dp_shard = 2 and dp_replicate = 1 with zero_stage = 3, or virtual_stages = 1"
            ],
        ),
        (
            {"pp": 2, "schedule": "interleaved_1f1b"},
            {},
            [
                "plan.virtual_stages = 1: interleaving needs several stages on a rank; "
                "use virtual_stages = 2 or more, or schedule = 1f1b"
            ],
        ),
        (
            {"pp": 2, "virtual_stages": 2, "schedule": "gpipe"},
            {},
            [
                "plan.schedule = gpipe: takes one stage a rank, and virtual_stages = 2; "
                "use interleaved_1f1b, or virtual_stages = 1"
            ],
        ),
    ],
)
def test_a_violation_names_field_value_rule_and_nearest_values(
    plan: dict[str, Any], fields: dict[str, Any], sentences: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        check(plan, **fields)
    assert [problem.sentence() for problem in caught.value.problems] == sentences
