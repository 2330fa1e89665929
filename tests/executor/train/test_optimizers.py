"""Every optimizer, and clipped gradients, with every sharding of parameters: against one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from simplan.optimizers import OPTIMIZERS
from simplan.program.program import MemoryCategory
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job, make_model
from tests.executor.distributed.test_level2 import check_run
from tests.executor.dry_run.accounting import account, predicted_peak
from tests.support.slow import slow_except

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("none", {}),
    "ddp": ("none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "zero-1": ("none", {"dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}),
    "fsdp": ("none", {"dp_shard": 2}),
    "fsdp on host": ("none", {"dp_shard": 2, "offload_optimizer": True}),
    "hsdp": ("none", {"dp_shard": 2, "dp_replicate": 2}),
    "tp": ("none", {"tp": 2}),
    "tp x zero-1": ("none", {"tp": 2, "dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}),
    "tp x fsdp": ("none", {"tp": 2, "dp_shard": 2}),
    "cp x fsdp": ("none", {"cp": 2, "cp_comm": "a2a", "dp_shard": 2}),
    "1f1b": ("1f1b", {"pp": 2}),
    "zb-v": ("zb-v", {"pp": 2}),
    "1f1b x zero-1": ("1f1b", {"pp": 2, "dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}),
    "1f1b x fsdp": ("1f1b", {"pp": 2, "dp_shard": 2}),
    "1f1b x fsdp on host": ("1f1b", {"pp": 2, "dp_shard": 2, "offload_optimizer": True}),
    "1f1b x tp": ("1f1b", {"pp": 2, "tp": 2}),
}
CLIP = 0.3  # below the norm in every step, so that gradients are scaled

UPDATES: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name, "clip_grad_norm": CLIP} for name in ("sgd_momentum", "lars", "lamb")},
    "adamw foreach": {"optimizer": "adamw", "fused_optimizer": False},
    "adam fused": {"optimizer": "adam", "fused_optimizer": True},
    "sgd_momentum foreach": {"optimizer": "sgd_momentum", "fused_optimizer": False},
    "sgd fused": {"optimizer": "sgd", "fused_optimizer": True},
    "muon": {"optimizer": "muon", "clip_grad_norm": CLIP},
    "adafactor_torch": {"optimizer": "adafactor_torch"},
}
IN_DRY_RUNS = [
    name
    for name, facts in OPTIMIZERS.items()
    if (not facts.by_tensor or facts.orthogonalizes) and not facts.updates_copies
]


def is_refused(plan: str, update: str) -> bool:
    """True for tensor parallelism and states on the host of optimizers that need whole tensors."""
    fields, facts = PLANS[plan][1], OPTIMIZERS[UPDATES[update]["optimizer"]]
    return facts.by_tensor and ("tp" in fields or "offload_optimizer" in fields)


RUNS = [(plan, update) for plan, update in product(PLANS, UPDATES) if not is_refused(plan, update)]
QUICK = {
    ("zero-1", "lamb"),
    ("1f1b", "lars"),
    ("fsdp on host", "lamb"),
    ("fsdp", "muon"),
    ("fsdp", "adafactor_torch"),
    ("zero-1", "muon"),
}


def job_of(plan: str, training: dict[str, Any]) -> Any:
    schedule, fields = PLANS[plan]
    fields = dict(fields)
    sharded_ends = "pp" in fields and "dp_shard" in fields and "zero_stage" not in fields
    pp = fields.pop("pp", 1)
    layers = 4 if schedule == "zb-v" else 2
    model = make_model("llama" if sharded_ends else "gpt", vocab_size=96, num_hidden_layers=layers)
    batch = 8 * fields.get("dp_shard", 1) * fields.get("dp_replicate", 1)
    return make_job(
        schedule,
        pp=pp,
        model=model,
        plan=fields,
        training=TrainingSpec(global_batch_size=batch, precision="fp32", **training),
        dtype="fp64",
    )


@pytest.mark.parametrize(
    ("plan", "update"),
    slow_except(QUICK, RUNS),
)
def test_run_equals_one_process_and_issues_what_is_predicted(plan: str, update: str, tmp_path: Path) -> None:
    """Later losses follow from updates, gradients are as clipping leaves them."""
    check_run(job_of(plan, UPDATES[update]), tmp_path)


@pytest.mark.parametrize(
    ("plan", "optimizer"), [("zero-1", "adamw"), *(pytest.param("one", o, marks=pytest.mark.slow) for o in IN_DRY_RUNS)]
)
def test_workspace_of_foreach_step_is_as_predicted(plan: str, optimizer: str) -> None:
    """In a dry run, with so few tokens that Adam's step is the peak."""
    fused = False if optimizer in ("adam", "adamw", "sgd", "sgd_momentum") else None
    job = job_of(plan, {"optimizer": optimizer, "fused_optimizer": fused})
    model = make_model("llama", vocab_size=96, hidden_size=256, num_hidden_layers=2, seq_len=4)
    job = job.model_copy(update={"dtype": "fp32", "model": model})
    peak_point, predicted = account(job, 0), predicted_peak(job, 0)
    if optimizer.startswith("adam"):
        assert peak_point.action == predicted.action == "0OPTIM"
        updated = predicted.by_category[MemoryCategory.OPTIMIZER] // 2
        assert peak_point.by_category[MemoryCategory.WORKSPACE] == pytest.approx(
            updated, abs=4096
        )  # activations' tables
        assert peak_point.total_bytes == pytest.approx(predicted.total_bytes, rel=1e-3)
    elif optimizer == "muon":  # gradients and their temporaries are one category of the account
        assert peak_point.action == predicted.action == "0OPTIM"
        assert peak_point.total_bytes == pytest.approx(predicted.total_bytes, rel=1e-3)
    else:
        assert peak_point.action != "0OPTIM"
        assert predicted.action != "0OPTIM"


@pytest.mark.parametrize("optimizer", slow_except(["sgd_momentum", "lamb", "muon"], IN_DRY_RUNS))
@pytest.mark.parametrize("plan", [pytest.param("one", marks=pytest.mark.slow), "1f1b x fsdp"])
def test_optimizer_states_are_as_large_as_predicted(plan: str, optimizer: str) -> None:
    """In a dry run; the step allocates nothing else."""
    job = job_of(plan, {"optimizer": optimizer, "clip_grad_norm": CLIP})
    job = job.model_copy(update={"dtype": "fp32"})
    peak_point, predicted = account(job, 0), predicted_peak(job, 0)
    states = predicted.by_category.get(MemoryCategory.OPTIMIZER, 0)
    assert peak_point.by_category.get(MemoryCategory.OPTIMIZER, 0) == pytest.approx(states, abs=400)  # counts of steps
    assert peak_point.total_bytes == pytest.approx(predicted.total_bytes, rel=0.03)
