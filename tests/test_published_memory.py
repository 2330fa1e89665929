"""Predicted peaks of memory against those that others measured, by framework."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.units import GIB, MIB
from tests.jobs import job_of

LLAMA = {"family": "llama", "vocab_size": 128256, "seq_len": 4096}
LLAMA_70B = LLAMA | {"num_hidden_layers": 12, "hidden_size": 8192, "num_attention_heads": 64}
LLAMA_70B |= {"num_key_value_heads": 8, "intermediate_size": 28672}
LLAMA_405B = LLAMA | {"num_hidden_layers": 4, "hidden_size": 16384, "num_attention_heads": 128}
LLAMA_405B |= {"num_key_value_heads": 16, "intermediate_size": 53248}
DEEPSEEK_V2 = catalog.model_fields("deepseek-v2") | {"num_hidden_layers": 4}


def predicted(
    software: str, cluster: str, precision: Any, model: dict[str, Any], plan: ParallelPlan, num_microbatches: int
) -> Prediction:
    spec, how = ModelSpec.model_validate(model), {"num_microbatches": num_microbatches, "precision": precision}
    return predict(job_of(spec, plan, cluster=cluster, software=software, **how))


@pytest.mark.parametrize(
    ("model", "plan", "allocated_mib"),
    [
        (LLAMA_70B, {"dp_shard": 4, "zero_stage": 1, "tp": 2}, 62136.4),
        (LLAMA_405B, {"dp_shard": 4, "zero_stage": 1, "tp": 2}, 83549.9),
        (LLAMA_405B, {"zero_stage": 1, "tp": 8}, 39499.8),
        (LLAMA_70B | {"seq_len": 131072}, {"zero_stage": 1, "cp": 8, "cp_comm": "a2a"}, 151538.4),
        (DEEPSEEK_V2, {"dp_shard": 8, "zero_stage": 1, "ep": 8}, 46730.0),
    ],
    ids=["llama3-70b tp2", "llama3-405b tp2", "llama3-405b tp8", "llama3-70b cp8", "deepseek-v2 ep8"],
)
def test_every_rank_of_megatron_core_on_b200(model: dict[str, Any], plan: dict[str, Any], allocated_mib: float) -> None:
    """MooreThreads/SimuMax at 4dcaae5, docs/b200/b200_release_v1.2_summary.json: torch.cuda.max_memory_allocated."""
    prediction = predicted("megatron-core", "dgx-b200", "bf16", model, ParallelPlan(**plan), 2)
    for memory in prediction.memory:
        assert memory.allocated_bytes / MIB == pytest.approx(allocated_mib, rel=0.01)


GPT_1_5B = {"num_hidden_layers": 22, "hidden_size": 2304, "num_attention_heads": 24}
GPT_6_2B = {"num_hidden_layers": 30, "hidden_size": 4096, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("model", "schedule", "b", "num_microbatches", "printed_gb"),
    [
        (GPT_1_5B, "1f1b", 6, 24, 30),
        (GPT_1_5B, "1f1b", 12, 24, 57),
        (GPT_1_5B, "zb-1p", 6, 24, 32),
        (GPT_6_2B, "zb-1p", 6, 32, 71),
        (GPT_6_2B, "zb-2p", 3, 24, 70),
    ],
)
def test_zero_bubble_schedules_of_megatron(
    model: dict[str, int], schedule: str, b: int, num_microbatches: int, printed_gb: float
) -> None:
    """Qi et al. 2024 (arXiv:2401.10241), tables 4 and 8; GB are 1e9 bytes, as in their fork's own profile.

    The first and the last of 8 stages have a layer less.
    """
    of_stages = model["num_hidden_layers"] // 8 + 1
    plan = ParallelPlan(
        pp=8, schedule=schedule, microbatch_size=b, stage_layers=(of_stages - 1, *[of_stages] * 6, of_stages - 1)
    )
    sizes = model | {"family": "gpt", "vocab_size": 32000, "seq_len": 1024}
    prediction = predicted("megatron-lm-2022", "dgx-a100-80gb", "fp16", sizes, plan, num_microbatches)
    peak = max(memory.allocated_bytes for memory in prediction.memory)
    assert peak / 1e9 == pytest.approx(printed_gb, rel=0.045)


@pytest.mark.parametrize(
    ("plan", "num_layers", "printed_gib"),
    [
        ({"dp_shard": 12, "tp": 8, "pp": 4}, 80, 47),
        ({"dp_shard": 6, "tp": 8, "pp": 8}, 80, 36),
        ({"dp_shard": 4, "tp": 8, "pp": 10, "microbatch_size": 8}, 80, 76),
    ],
)
def test_the_sweep_for_bloom(plan: dict[str, Any], num_layers: int, printed_gib: float) -> None:
    """bigscience-workshop/bigscience at 9e64ede, train/tr11-176B-ml/chronicles-prequel.md: memory of the device."""
    parallel = ParallelPlan(zero_stage=1, recompute="full", sequence_parallel=False, **plan)
    sizes = {
        "family": "gpt",
        "num_hidden_layers": num_layers,
        "hidden_size": 14400,
        "num_attention_heads": 96,
        "vocab_size": 250880,
        "seq_len": 2048,
    }
    prediction = predicted("megatron-deepspeed", "dgx-a100-80gb", "fp16", sizes, parallel, 2 * parallel.pp)
    assert max(memory.device_bytes for memory in prediction.memory) / GIB == pytest.approx(printed_gib, rel=0.05)
