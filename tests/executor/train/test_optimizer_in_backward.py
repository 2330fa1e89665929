"""Optimizers whose steps are in backward: against one process that steps after it, and torch's own memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from simplan.runs.run_spec import RunSpec
from tests.executor.conftest import make_model
from tests.executor.dry_run.accounting import account, job_of, predicted_peak
from tests.executor.train.test_equality import one_process, run_in_float64
from tests.support.slow import slow_except

PLANS: dict[str, dict[str, Any]] = {"one": {}, "fsdp": {"dp_shard": 2}, "hsdp": {"dp_shard": 2, "dp_replicate": 2}}
UPDATES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "foreach": {"optimizer": "adamw", "fused_optimizer": False},
    "sgd_momentum": {"optimizer": "sgd_momentum"},
    "muon": {"optimizer": "muon"},
}


def job(plan: str, update: str, *, in_backward: bool = True, **model: Any) -> RunSpec:
    """Job of one microbatch."""
    return job_of(make_model(**model), PLANS[plan], 1, "fp32", optimizer_in_backward=in_backward, **UPDATES[update])


@pytest.mark.parametrize(
    ("plan", "update"),
    slow_except([], [("one", "adamw"), ("one", "muon"), ("fsdp", "sgd_momentum"), ("hsdp", "adamw")]),
)
def test_losses_equal_those_of_updates_after_backward(plan: str, update: str, tmp_path: Path) -> None:
    """Real ranks have the losses of one process, whose optimizer steps once all gradients are there."""
    in_float64 = job(plan, update).model_copy(update={"dtype": "fp64"})
    losses, _, _ = one_process(in_float64, in_float64.num_all_steps)
    assert len(losses) > 1
    assert run_in_float64(in_float64, tmp_path).measurement.losses == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    ("plan", "update", "tied"),
    slow_except(
        [("one", "foreach", True), ("fsdp", "adamw", False)], product(PLANS, ("adamw", "foreach"), (False, True))
    ),
)
def test_peak_is_that_of_torch(plan: str, update: str, tied: bool) -> None:
    """In a dry run on tensors without data; on one rank with so few tokens that gradients would be the peak."""
    seq_len = 4 if plan == "one" else 256
    sizes = {"vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 3, "seq_len": seq_len}
    model: dict[str, Any] = {"family": "llama", **sizes}
    in_backward = job(plan, update, **model, tied_embeddings=tied)
    measured, predicted = account(in_backward, 0), predicted_peak(in_backward, 0)
    assert predicted.total_bytes == pytest.approx(measured.total_bytes, rel=0.02)
    after = predicted_peak(job(plan, update, in_backward=False, **model, tied_embeddings=tied), 0)
    assert predicted.total_bytes < after.total_bytes * (0.8 if plan == "one" else 1.0001)
