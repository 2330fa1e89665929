"""Experts that FSDP shards among the ranks that have the same ones: memory, norms, checkpoints, widths.

And memory of latent attention over tensor-parallel ranks.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from simplan.model.model import ModelSpec
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job, make_model
from tests.executor.distributed.test_level2 import check_run
from tests.executor.distributed.test_moe import MOE
from tests.executor.dry_run.accounting import peaks
from tests.executor.train.test_checkpoints import in_two_parts, undisturbed
from tests.support.slow import slow_except

TOTAL = 0.03
MODEL: dict[str, Any] = {
    "family": "moe",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 4096,
    "seq_len": 256,
    "num_experts": 8,
    "top_k": 2,
    "moe_intermediate_size": 512,
    "capacity_factor": 1.5,
    "drop_tokens": True,
}
LATENT: dict[str, Any] = {
    "family": "deepseek",
    "num_key_value_heads": 0,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
FEWER = {"dp_shard": 4, "ep": 2}

# plan, microbatches, pipeline rank
STRATEGIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "zero3": (FEWER, 1, 0),
    "zero3-accumulation": (FEWER, 2, 0),
    "zero2-accumulation": ({**FEWER, "zero_stage": 2}, 2, 0),
    "full": ({**FEWER, "recompute": "full", "microbatch_size": 4}, 1, 0),
    "selective_op": ({**FEWER, "recompute": "selective_op", "microbatch_size": 4}, 1, 0),
    "selective_op-accumulation": ({**FEWER, "recompute": "selective_op"}, 2, 0),
    "hsdp": ({**FEWER, "dp_replicate": 2}, 1, 0),
    "tp": ({"dp_shard": 2, "tp": 2}, 1, 0),
    "tp-ep": ({"dp_shard": 2, "tp": 2, "ep": 2}, 1, 0),
    "1f1b-first": ({**FEWER, "pp": 2}, 4, 0),
    "1f1b-last": ({**FEWER, "pp": 2}, 4, 1),
    "whole": ({"dp_shard": 4, "ep": 4}, 1, 0),
}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    slow_except([("zero3", "bf16")], product(STRATEGIES, ("fp32", "bf16"))),
)
def test_peak_is_torchs(strategy: str, precision: Any) -> None:
    """Of fake tensors; ``whole`` are experts that FSDP leaves alone."""
    predicted, torchs = peaks(ModelSpec(**MODEL), *STRATEGIES[strategy], precision)
    assert predicted == pytest.approx(torchs, rel=TOTAL)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "etp": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "recompute": "full"},
        {"tp": 2, "ep": 2, "dp_shard": 2},
        {"tp": 2, "ep": 2, "pp": 2},
    ],
)
def test_so_it_is_with_latent_attention_over_tensor_parallel_ranks(plan: dict[str, Any], precision: Any) -> None:
    predicted, torchs = peaks(ModelSpec(**{**MODEL, **LATENT}), plan, 2, 0, precision)
    assert predicted == pytest.approx(torchs, rel=TOTAL)


@pytest.mark.slow
def test_norms_are_of_all_shards(tmp_path: Path) -> None:
    """Tensor-parallel ranks hold the same of a router, and different shards of experts."""
    training = TrainingSpec(global_batch_size=16, precision="fp32", clip_grad_norm=0.3)
    plan = {"dp_shard": 2, "tp": 2}
    job = make_job(model=make_model("moe", **MOE), plan=plan, training=training, dtype="fp64")
    check_run(job, tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_with_other_shards(tmp_path: Path) -> None:
    """From two ranks for each expert to one, and on the same two to the last bit."""
    training = TrainingSpec(global_batch_size=16, precision="fp32")
    model = make_model("moe", **MOE)
    before = make_job(model=model, plan={**FEWER, "microbatch_size": 1}, training=training, dtype="fp64")
    after = make_job(model=model, plan={"dp_shard": 2, "ep": 2}, training=training, dtype="fp64")
    whole = undisturbed(before, tmp_path / "whole")
    for name, job, tolerance in (("same", before, 0.0), ("other", after, 1e-9)):
        _, second = in_two_parts(before, job, tmp_path / name)
        assert second.losses == pytest.approx(whole.losses[4:], rel=tolerance, abs=0.0)
