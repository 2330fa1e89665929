"""Pipelines of captured modules on real ranks and alone: against one process, the Program, and torch's account."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from executor.dry_run.rehearse import rehearse
from executor.run import run_job
from simplan.errors import NotModelledError
from simplan.program.program import MemoryCategory
from simplan.runs.run_spec import RunSpec
from simplan.training import Precision
from simplan.validate.compare import issued_as_predicted, predicted_communications
from tests.executor.capture import test_running
from tests.executor.capture.test_running import assert_equal_to_one_process, job_of, prediction_of
from tests.executor.dry_run.accounting import account, predicted_peak
from tests.executor.train.test_checkpoints import in_two_parts, undisturbed
from tests.executor.train.test_equality import run_in_float64
from tests.support.slow import slow_except

_1F1B: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
_FOUR: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "stage_layers": (0, 1, 1, 1)}
PLANS: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": _1F1B,
    "early": _1F1B | {"stage_layers": (0, 1)},
    "interleaved": _FOUR | {"schedule": "interleaved_1f1b"},
    "ddp": _1F1B | {"dp_replicate": 2},
    "zero1": _1F1B | {"dp_shard": 2, "zero_stage": 1},
    "zero3": _1F1B | {"dp_shard": 2},
    "recomputed": _1F1B | {"recompute": "full"},
    "zb-h1": _1F1B | {"schedule": "zb-h1"},
    "zb-v": _FOUR | {"schedule": "zb-v"},
}
CASES = [
    ("UNet", "early"),
    ("Recommender", "early"),
    *(("DiT", plan) for plan in PLANS if plan != "early"),
    ("AdaptedDiT", "1f1b"),
    ("AdaptedDiT", "zero3"),
    ("Scaled", "ddp"),
    ("StateSpaceModel", "1f1b"),
    ("StateSpaceModel", "zero1"),
]


@pytest.mark.parametrize(("name", "plan"), slow_except([("StateSpaceModel", "1f1b")], CASES))
def test_pipelines_equal_one_process(name: str, plan: str, tmp_path: Path) -> None:
    """Losses and all gradients; the ends of the state-space model share a weight."""
    job = job_of(prediction_of(name, PLANS[plan]), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    assert_equal_to_one_process(job, run.measurement.losses, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "precision"), [*((*case, "fp32") for case in CASES), ("DiT", "zero3", "bf16")]
)
def test_pipelines_issue_what_is_predicted(name: str, plan: str, precision: Precision, tmp_path: Path) -> None:
    """Tensors between stages, their gradients, and all collectives: kinds, groups, bytes and order."""
    assert issued_as_predicted(run_job(job_of(prediction_of(name, PLANS[plan], precision)), tmp_path))


UNITS: dict[str, Any] = PLANS["zero3"] | {"fsdp_units": ["DiffusionBlock"]}


@pytest.mark.slow
def test_stages_have_units_by_class(tmp_path: Path) -> None:
    """Small blocks join the root unit of their stage: equal to one process, and issued as predicted."""
    job = job_of(prediction_of("Alternating", UNITS), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    assert_equal_to_one_process(job, run.measurement.losses, tmp_path)
    assert issued_as_predicted(run_job(job_of(prediction_of("Alternating", UNITS)), tmp_path / "issued"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", slow_except(["bf16"], ["fp32", "bf16"]))
def test_stages_with_units_by_class_are_rehearsed(precision: Precision) -> None:
    job = job_of(prediction_of("Alternating", UNITS, precision))
    for rank in (0, job.plan.num_devices - 1):
        assert issued(job, rank, fake=True)
        assert predicted_peak(job, rank).total_bytes == pytest.approx(account(job, rank).total_bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "plan"), [({}, "1f1b"), (test_running.PLANS["zero3"], "zero3")])
def test_losses_in_bf16_are_those_without_stages(whole: dict[str, Any], plan: str, tmp_path: Path) -> None:
    """To the last bit, under autocast and FSDP2."""
    plans = {"whole": whole, "stages": PLANS[plan]}
    runs = [run_job(job_of(prediction_of("DiT", plan, "bf16")), tmp_path / name) for name, plan in plans.items()]
    assert runs[0].losses == runs[1].losses


def issued(job: RunSpec, rank: int, *, fake: bool) -> bool:
    """True if a rank alone issues what is predicted."""
    collectives = [(c.kind, c.ranks, c.num_bytes, c.action) for c in rehearse(job, rank, fake=fake).collectives]
    return collectives == predicted_communications(job)[rank]


REHEARSED = [
    (name, plan, precision)
    for (name, plan), precision in product([*CASES, ("DiT", "whole zero3"), ("UNet", "whole")], ("fp32", "bf16"))
    if plan != "early"
]
WHOLE: dict[str, dict[str, Any]] = {"whole": {}, "whole zero3": test_running.PLANS["zero3"]}


@pytest.mark.parametrize(("name", "plan", "precision"), slow_except([], REHEARSED))
def test_a_rank_is_rehearsed_alone(name: str, plan: str, precision: Precision) -> None:
    """A rank of the first and of the last stage issues what is predicted, and has its peak by category."""
    job = job_of(prediction_of(name, (PLANS | WHOLE)[plan], precision))
    for rank in {0, job.plan.num_devices - 1}:
        rehearsal, predicted = rehearse(job, rank, fake=True), predicted_peak(job, rank)
        if "ddp" not in plan and "zero1" not in plan:  # without data DDP keeps its first buckets
            assert issued(job, rank, fake=True)
        assert predicted.total_bytes == pytest.approx(rehearsal.peak_memory.allocated_bytes, rel=0.065)
        by_category = rehearsal.peak_by_category
        assert sum(by_category.values()) == rehearsal.peak_memory.allocated_bytes
        assert by_category[MemoryCategory.PARAMETERS] == predicted.by_category[MemoryCategory.PARAMETERS]
        at_once = rehearsal.peak_action == predicted.action  # else other tensors are being sent
        for category in (MemoryCategory.OPTIMIZER, *((MemoryCategory.BUFFERS,) if at_once else ())):
            assert by_category.get(category, 0) == pytest.approx(predicted.by_category[category], rel=0.01, abs=200)


@pytest.mark.parametrize("name", slow_except(["Recommender"], ["UNet", "DiT", "Recommender", "Scaled"]))
def test_gradients_in_flight_are_told_from_other_tensors(name: str) -> None:
    """At the peak, a gradient is not yet added to those of the other microbatch."""
    job = job_of(prediction_of(name, {}))
    num_bytes = rehearse(job, 0, fake=True).peak_by_category[MemoryCategory.GRADIENTS]
    held = sum(4 * parameter.num_elements for layer in job.model.layers for parameter in layer.parameters)
    assert num_bytes > held
    assert num_bytes == pytest.approx(predicted_peak(job, 0).by_category[MemoryCategory.GRADIENTS], rel=0.001)


@pytest.mark.slow
def test_a_rehearsal_on_this_machine_measures_all_actions() -> None:
    """With data: indices among the received tensors are valid."""
    job = job_of(prediction_of("DiT", PLANS["zb-v"]))
    for rank in (0, 1):
        rehearsal = rehearse(job, rank, fake=False)
        assert issued(job, rank, fake=False)
        assert all(time.median_s > 0 for time in rehearsal.actions if "REDUCE_GRAD" not in time.action)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["1f1b", "interleaved"])
def test_pipelines_go_on_from_checkpoints_as_other_pipelines_do(plan: str, tmp_path: Path) -> None:
    """Four steps on two ranks, then one rank goes on with the same samples, as without a break."""
    first, after = (job_of(prediction_of("DiT", plan_fields), dtype="fp64") for plan_fields in (PLANS[plan], {}))
    after = after.model_copy(update={"model": first.model})  # two captures have different largest labels
    whole = undisturbed(first, tmp_path / "whole")
    _, second = in_two_parts(first, after, tmp_path)
    assert second.losses == pytest.approx(whole.losses[4:], rel=1e-9)


def test_shards_of_a_weight_that_both_ends_share_are_refused() -> None:
    rule = r"plan\.zero_stage = 3: sharding of a weight whose two copies are on different stages \(embedding\.weight\)"
    with pytest.raises(NotModelledError, match=rule):
        prediction_of("StateSpaceModel", PLANS["zero3"])
