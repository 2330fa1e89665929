"""Hypotheses on a log: the change is known, because the measurement is of another published run or a changed job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from simplan.accuracy.run import PublishedRun
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.sensitivity import Resource, improved
from simplan.predict.step_summary import summarize_step
from simplan.prediction import Prediction
from simplan.report.comparison import logged_text
from simplan.scenario.file import load_scenario
from simplan.scenario.published.reading import read_published
from simplan.units import GIB
from simplan.validate.hypotheses import MeasuredTotals, hypotheses, job_of_prediction
from simplan.validate.logged import compare_logged
from simplan.validate.logged_run import GpuTime, LoggedRun
from tests.validate.measuring import predicted

PUBLISHED = Path(__file__).resolve().parents[2] / "scenarios" / "published"


@cache
def published(file: str) -> dict[str, tuple[PublishedRun, Job]]:
    [read] = read_published([PUBLISHED / file])
    runs = {}
    for run in read.runs or ():
        if run.job is not None and run.measured.step_time_s is not None and not run.steps_overlap:
            runs[run.id] = run, run.job
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "predicted_id", "measured_id", "change"),
    [
        ("torchtitan.yaml", "torchtitan-01", "torchtitan-02", "software.compiled: true"),
        ("small_models_gpt2.yaml", "build-nanogpt-bf16-compile", "build-nanogpt-bf16", "software.compiled: false"),
        ("vtrain_a100_multi_node.yaml", "vtrain-multi-077", "vtrain-multi-088", "plan.microbatch_size: 24"),
        ("vtrain_a100_multi_node.yaml", "vtrain-multi-088", "vtrain-multi-077", "plan.microbatch_size: 3"),
    ],
)
def test_only_difference_of_two_published_runs_comes_first(
    file: str, predicted_id: str, measured_id: str, change: str
) -> None:
    """One run is predicted, the other one measured; they differ in one setting."""
    _, job = published(file)[predicted_id]
    run, _ = published(file)[measured_id]
    peak = run.measured.peak_reserved_gib
    measured = MeasuredTotals(run.measured.step_time_s, None if peak is None else "reserved", peak or 0.0)
    tried = hypotheses(job, summarize_step(job).step_time_s, measured)
    assert tried
    assert tried[0].change == change
    assert tried[0].explains


TRIED = frozenset(
    {
        "software.compiled", "plan.recompute", "plan.grad_sync", "plan.zero_stage", "plan.microbatch_size",
        "plan.sequence_parallel", "plan.reshard_after_forward",
    }
)  # fmt: skip


def only_difference(job: Job, other: Job) -> tuple[str, Any] | None:
    """The setting of a hypothesis in which two jobs differ, and its value in the other; None if there are others."""
    differing = {
        f"{section}.{name}": getattr(getattr(other, section), name)
        for section in ("model", "cluster", "training", "plan", "software")
        for name in type(getattr(job, section)).model_fields
        if name not in ("name", "sources", "source")
        and getattr(getattr(job, section), name) != getattr(getattr(other, section), name)
    }
    [*settings] = differing.items()
    return settings[0] if len(settings) == 1 and settings[0][0] in TRIED else None


@pytest.mark.slow
def test_setting_that_differs_between_published_runs_is_listed() -> None:
    """All pairs of runs in one file that differ in one setting, with the counts that the documentation states."""
    pairs = within = first = among_three = 0
    for file in sorted(path.name for path in PUBLISHED.glob("*.yaml")):
        for (_, job), (run, other) in permutations(published(file).values(), 2):
            same = job.model == other.model and job.cluster.num_devices == other.cluster.num_devices
            difference = only_difference(job, other) if same else None
            if difference is None:
                continue
            pairs += 1
            peak, base = run.measured.peak_reserved_gib, summarize_step(job)
            measured = MeasuredTotals(run.measured.step_time_s, None if peak is None else "reserved", peak or 0.0)
            low_s, high_s = base.step_time_interval_s
            assert run.measured.step_time_s is not None
            if low_s <= run.measured.step_time_s <= high_s:
                within += 1
                continue
            settings = [
                hypothesis.change.partition(":")[0] for hypothesis in hypotheses(job, base.step_time_s, measured) or ()
            ]
            first += settings[:1] == [difference[0]]
            among_three += difference[0] in settings[:3]
    assert (pairs, within, first, among_three) == (78, 55, 10, 23)


@cache
def sharded() -> Prediction:
    return predicted(ParallelPlan(dp_shard=2))


def unfused(job: Job) -> Job:
    layers = job.software.layers.model_copy(update={"attention": "unfused"})
    return replace(job, software=job.software.model_copy(update={"layers": layers}))


def slower_link(job: Job) -> Job:
    cluster = improved(job.cluster, Resource.INTRA_LINK, 0.5)
    assert cluster is not None
    return replace(job, cluster=cluster)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("plan.recompute: full", lambda job: job.with_changes({"plan.recompute": "full"})),
        ("plan.zero_stage: 1", lambda job: job.with_changes({"plan.zero_stage": 1})),
        ("unfused attention", unfused),
        ("half of the bandwidth inside nodes", slower_link),
    ],
)
def test_change_with_which_the_job_was_run_is_found(change: str, changed: Callable[[Job], Job]) -> None:
    """The measurement is the prediction of a changed job; hypotheses truncate steps, so a small error may be left."""
    job = sharded().job
    other = predict(changed(job))
    measured = MeasuredTotals(other.step_time_s, "allocated", other.worst_memory.allocated_bytes / GIB)
    tried = hypotheses(job, sharded().step_time_s, measured)
    assert tried is not None
    [same] = [hypothesis for hypothesis in tried if hypothesis.change == change]
    assert same.explains
    assert (same.step_error, same.peak_error) == pytest.approx((0.0, 0.0), abs=0.002)
    assert all(hypothesis.distance >= same.distance for hypothesis in tried)


def test_a_slow_rank_slows_all_by_its_compute() -> None:
    """Ranks wait for each other; so a step without communication takes as much longer as the compute of the slowest."""
    alone = predicted(ParallelPlan(dp_replicate=2))
    measured_s = 1.3 * alone.step_time_s
    tried = hypotheses(alone.job, alone.step_time_s, MeasuredTotals(measured_s))
    assert tried is not None
    [slow] = [hypothesis for hypothesis in tried if hypothesis.change.startswith("a rank that computes")]
    assert slow.change == "a rank that computes 1.3 times as slowly (clock, power cap)"
    assert slow.step_error == pytest.approx(0.0, abs=0.05)


def test_job_of_a_prediction_file() -> None:
    """Every part of the job is in the document; files of older versions lack the settings of the software."""
    prediction = sharded()
    document = prediction.to_json()
    assert job_of_prediction(document) == prediction.job
    compiled = replace(prediction.job, software=prediction.job.software.with_changes(compiled=True))
    assert job_of_prediction(predict(compiled).to_json()) == compiled
    del document["inputs"]["software_settings"]
    assert job_of_prediction(document) is None
    logged = LoggedRun(step_time_s=2 * prediction.step_time_s)
    comparison = compare_logged(document, logged)
    assert comparison.hypotheses is None
    assert any("cannot be predicted again" in note for note in comparison.notes)
    document["step_time_s"] *= 1.5  # as with a calibration
    document["inputs"]["software_settings"] = prediction.job.software.settings
    calibrated = compare_logged(document | {"reference_s": 0.001}, logged)
    assert calibrated.hypotheses is None
    assert any("predicted again without a calibration" in note for note in calibrated.notes)
    assert any("not rescaled to its speed" in note for note in calibrated.notes)
    assert not any("not rescaled" in note for note in comparison.notes)


def test_hypotheses_are_tried_outside_of_the_intervals_only() -> None:
    prediction = sharded()
    document = prediction.to_json()
    allocated_gib = prediction.worst_memory.allocated_bytes / GIB
    agrees = LoggedRun(step_time_s=prediction.step_time_s, peak_allocated_gib=(allocated_gib,))
    assert compare_logged(document, agrees).hypotheses is None
    assert compare_logged(document, agrees).memory_terms == ()
    larger = LoggedRun(step_time_s=prediction.step_time_s, peak_allocated_gib=(2 * allocated_gib,))
    comparison = compare_logged(document, larger)
    assert comparison.hypotheses is not None
    for term in comparison.memory_terms:
        assert term.factor is not None
        assert (term.factor - 1) * term.predicted_gib == pytest.approx(allocated_gib)
    assert sum(term.predicted_gib for term in comparison.memory_terms) == pytest.approx(allocated_gib)


def test_memory_without_times() -> None:
    """A snapshot has no step time; the comparison is of memory alone."""
    prediction = sharded()
    reserved_gib = prediction.worst_memory.reserved_bytes / GIB
    comparison = compare_logged(prediction.to_json(), LoggedRun(peak_reserved_gib=(reserved_gib,)))
    assert [row.name for row in comparison.rows] == ["peak memory, reserved"]
    assert (comparison.interval_holds, comparison.difference_s, comparison.parts) == (None, None, ())
    document = comparison.to_json()
    assert document["interval_holds"] is None
    assert "step time" not in logged_text(comparison)


def test_parts_of_a_profiled_step() -> None:
    """Those of one rank: all of the step but its hidden communication."""
    prediction = sharded()
    split = prediction.splits[1]
    busy_s = split.compute_s + split.recompute_s + split.optimizer_s
    time = GpuTime(
        compute_s=busy_s,
        exposed_communication_s=split.exposed_communication_s + split.wait_s,
        hidden_communication_s=0.1,
        idle_s=split.host_s,
        rank=1,
    )
    logged = LoggedRun(step_time_s=prediction.step_time_s, gpu_time=time)
    rows = {row.name: row for row in compare_logged(prediction.to_json(), logged).rows[1:]}
    assert list(rows) == ["compute, rank 1", "exposed communication, rank 1", "idle, rank 1"]
    assert all(row.predicted == pytest.approx(row.measured) for row in rows.values())
    slower = 2 * prediction.step_time_s
    idle = logged.model_copy(
        update={
            "step_time_s": slower,
            "gpu_time": time.model_copy(update={"idle_s": prediction.step_time_s, "compute_s": 0.0}),
        }
    )
    for run, is_listed in ((LoggedRun(step_time_s=slower), True), (idle, False)):
        changes = [hypothesis.change for hypothesis in compare_logged(prediction.to_json(), run).hypotheses or ()]
        assert ("plan.recompute: full" in changes) == is_listed  # the trace has less compute than predicted
        assert any(change.startswith("a rank that computes") for change in changes)
    assert sum(row.predicted for row in rows.values()) == pytest.approx(prediction.step_time_s)


ACROSS = """
model: {preset: gpt2-124m, seq_len: 256}
cluster: {preset: dgx-h100, num_nodes: NODES%s}
training: {global_batch_size: 64}
plan: {dp_shard: DEVICES, microbatch_size: 1}
"""


def across(folder: Path, network: str = "", *, num_nodes: int = 2) -> Prediction:
    file = folder / "across.yaml"
    text = (ACROSS % network).replace("NODES", f"{num_nodes}").replace("DEVICES", f"{8 * num_nodes}")
    file.write_text(text)
    return predict(load_scenario(file).job)


@pytest.mark.parametrize(
    ("network", "change"),
    [
        (", inter_link_gbit_per_node: 1600", "half of the bandwidth between nodes"),
        (", inter_link_gbit_per_node: 400", "1/8 of the bandwidth between nodes (one network card of 8)"),
        *((f", inter_link: tcp-{gbit}gbit", f"cluster.inter_link: tcp-{gbit}gbit") for gbit in (100, 50, 25, 10)),
    ],
)
def test_network_that_the_job_ran_on_is_named(network: str, change: str, tmp_path: Path) -> None:
    """The measurement is the prediction of a scenario with that network."""
    base, other = across(tmp_path), across(tmp_path, network)
    tried = hypotheses(base.job, base.step_time_s, MeasuredTotals(other.step_time_s))
    assert tried is not None
    networks = [
        hypothesis for hypothesis in tried if "between nodes" in hypothesis.change or "inter_link" in hypothesis.change
    ]
    assert [hypothesis.change for hypothesis in networks] == [change]
    assert networks[0].explains
    assert networks[0].step_error == pytest.approx(0.0, abs=0.002)


def test_network_is_not_suspected_in_one_node(tmp_path: Path) -> None:
    alone = across(tmp_path, num_nodes=1)
    tried = hypotheses(alone.job, alone.step_time_s, MeasuredTotals(20 * alone.step_time_s))
    assert tried
    assert not [
        hypothesis.change
        for hypothesis in tried
        if "between nodes" in hypothesis.change or "inter_link" in hypothesis.change
    ]
