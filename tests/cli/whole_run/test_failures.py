"""``simplan run --fail``: what is refused before anything runs, and the faults and predictions of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simplan.cli.execute import RunOptions, run_spec_of_scenario
from simplan.errors import SpecError
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.faults import MeasuredStop, RunTimes
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.scenario import Scenario, load_scenario
from simplan.scenario.whole_run.executed import FaultOptions, read_faults, with_faults, with_measured_recovery
from tests.cli.calls import Simplan, refused
from tests.support.problems import refuses

KEPT = ("--checkpoint-dir", "kept", "--max-restarts", "3")
FAILING = """
reliability: {node_mtbf_h: 1000, detection_s: 1000}
recovery: {restart_s: 20000, repair_h: 10}
checkpoint: {interval_steps: 1, blocking_s: 1000}
"""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--fail", "60"), "--fail = 60: ... restarts ... checkpoint; add --checkpoint-dir DIR"),
        (("--fail", "60", *KEPT[:2]), "restarts ... checkpoint; add --max-restarts"),
        (("--fail", "0", *KEPT), "--fail = 0: must be above zero and finite"),
        (("--fail", "inf", *KEPT), "--fail = inf: must be above zero and finite"),
        (("--fail", "scenario", *KEPT), "--fail = scenario: the scenario has no failures"),
        (("--fail", "60", "--time-scale", "10", *KEPT), "--time-scale = 10: is the time of the scenario"),
        (("--seed", "3"), "--seed: is about the faults of a run; add --fail"),
        (("--recovery", "first.json"), "--recovery: is about the faults of a run; add --fail"),
        (("--fail", "missing.yaml", *KEPT), "missing.yaml"),
        (("--fail", "rank.yaml", *KEPT), "faults.0.rank = 2: must be below 2, the ranks"),
        (("--fail", "node.yaml", *KEPT), "faults.0.node = 1: is no node besides that at the endpoint"),
    ],
)
def test_faults_without_a_meaning_are_refused(
    simplan: Simplan, scenario: Path, options: tuple[str, ...], sentence: str
) -> None:
    for place in ("rank: 2", "node: 1"):
        name = f"{place.partition(':')[0]}.yaml"
        scenario.with_name(name).write_text(f"faults: [{{kind: kill, at_step: 1, {place}}}]\n")
    refused(simplan("run", scenario, *options), sentence)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("reliability: {maintenance: {every_h: 5, duration_h: 1}}", "reliability.maintenance"),
        ("spot: {preemptions_per_h: 1, fallback: on_demand}", "spot.fallback"),
        ("reliability: {node_mtbf_h: 5}\nevaluation: {every_steps: 5, time_s: 3}", "evaluation"),
        ("reliability: {causes: [{name: fire, mtbf_h: 5, scope: rack}]}", "reliability.causes.0.scope"),
        ("reliability: {node_mtbf_h: 5}\nrecovery: {spares: 1, takeover_s: 3}", "recovery.takeover_s"),
        (
            "reliability: {node_mtbf_h: 5}\ncheckpoint: {interval_s: 9, blocking_s: 1, async_save: true, write_s: 2}",
            "checkpoint.async_save",
        ),
    ],
)
def test_options_that_are_only_simulated_are_refused(
    simplan: Simplan, scenario: Path, section: str, field: str
) -> None:
    scenario.write_text(f"{scenario.read_text()}{section}\n")
    racks = ("--set", "cluster.topology={kind: leaf_spine, nodes_per_leaf: 4}")
    refused(simplan("run", scenario, *racks, "--fail", "scenario", *KEPT), f"{field}: is only simulated")


def job_with(scenario: Scenario, **asked: Any) -> Any:
    kept = Checkpointing(folder="/kept", every=10, max_restarts=3)
    prediction = scenario.predict(None)
    options = RunOptions(num_steps=1000, num_warmup_steps=0, checkpointing=kept)
    job = run_spec_of_scenario(scenario, prediction, options)
    return with_faults(job, scenario, read_faults(scenario, FaultOptions(**asked), kept, 1), {1: prediction}, None)


def test_failures_of_the_scenario_pass_in_the_time_of_the_run(scenario: Path) -> None:
    """One node with 1000 h between failures, of which an hour is a thousandth of a second: 1 s."""
    scenario.write_text(scenario.read_text() + FAILING)
    job = job_with(load_scenario(scenario), fail="scenario", seed=5, time_scale=3.6e6)
    again = job_with(load_scenario(scenario), fail="scenario", seed=5, time_scale=3.6e6)
    assert job == again
    assert job != job_with(load_scenario(scenario), fail="scenario", seed=6, time_scale=3.6e6)
    assert {fault.kind for fault in job.faults} == {"kill"}
    assert {fault.rank for fault in job.faults} == {0, 1}, "a node alone loses its ranks"
    gaps_s = job.faults[-1].at_s / len(job.faults)
    assert 0.5 < gaps_s < 2.0
    assert job.expected is not None
    assert job.expected.waterfall_s["restart"] < 0.1, "20,000 s are a moment"
    assert "waiting" not in job.expected.waterfall_s, "ranks need no repair"


def test_a_rate_leaves_out_what_only_simulated_runs_have(scenario: Path) -> None:
    """Evaluations, maintenance and preemptions of the scenario are no part of a run whose ranks are killed."""
    plain = scenario.read_text() + FAILING
    scenario.write_text(plain)
    wanted = job_with(load_scenario(scenario), fail="0.01")
    more = "maintenance: {every_h: 50, duration_h: 1}, silent_corruption: {device_mtbf_h: 9, found_h: 1}"
    scenario.write_text(
        plain.replace("node_mtbf_h: 1000", f"node_mtbf_h: 1000, {more}")
        + "spot: {preemptions_per_h: 0.1, wait_h: 1}\nevaluation: {every_steps: 5, time_s: 3}\n"
    )
    assert job_with(load_scenario(scenario), fail="0.01") == wanted


def measured(job: RunSpec, file: Path) -> Path:
    """Measurement of a run of a job with a restart of 0.2 s and 2 s."""
    stop = MeasuredStop(kind="kill", at_s=3.0, detection_s=0.1, waiting_s=0.2, restart_s=2.0, num_nodes=1)
    times = RunTimes(
        initialization_s=1.0,
        time_s=10.0,
        waterfall_s={"compute": 5.0, "checkpoint": 1.0, "restart": 4.0},
        stops=(stop,),
        step_s={1: 0.01},
        checkpoint_s=0.05,
    )
    file.write_text(Measurement(job=job, step_times_s=(0.01,), times=times).model_dump_json())
    return file


def test_goodput_is_predicted_from_an_earlier_run(scenario: Path, tmp_path: Path) -> None:
    first = job_with(load_scenario(scenario), fail="3600")
    assert first.expected is None, "nobody knows how long a restart takes"
    file = measured(first, tmp_path / "measurement.json")
    later = job_with(load_scenario(scenario), fail="3600", recovery=file)
    times_s, same_s = ([fault.at_s for fault in job.faults[: len(first.faults)]] for job in (later, first))
    assert times_s == pytest.approx(same_s), "the same failures, of which restarts that take longer meet more"
    assert later.expected is not None
    assert later.expected.waterfall_s["compute"] == pytest.approx(1000 * 0.01)
    assert later.expected.waterfall_s["checkpoint"] == pytest.approx(100 * 0.05)


def test_a_whole_run_takes_measured_restarts(scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(scenario.read_text() + FAILING)
    loaded = load_scenario(scenario)
    single = tmp_path / "one.yaml"
    single.write_text("faults: [{kind: kill, at_step: 5, rank: 1}]\n")
    with refuses("--fail", "3600", rule="the run never finishes: it stops"):
        job_with(loaded, fail="3600")
    file = measured(job_with(loaded, fail=str(single)), tmp_path / "measurement.json")
    assert job_with(loaded, fail="3600", recovery=file).expected is not None
    recovered = with_measured_recovery(loaded, file)
    run, before = recovered.whole_run, loaded.whole_run
    assert run is not None
    assert before is not None
    assert run.recovery is not None
    assert before.recovery is not None
    assert run.reliability is not None
    assert before.reliability is not None
    assert run.checkpoint is not None
    assert run.recovery.restart_s == pytest.approx(0.2 + 2.0)
    assert (run.reliability.detection_s, run.checkpoint.blocking_s, run.checkpoint.load_s) == (0.1, 0.05, 0.0)
    assert run.recovery.repair_h == before.recovery.repair_h, "a run of minutes does not say that"
    assert run.reliability.node_mtbf_h == before.reliability.node_mtbf_h
    assert f"as measured in {file}" in recovered.assumptions[-1]
    for changes, said in (
        ({"model.num_hidden_layers": 2}, "is the measurement of a run of another model; name a run of this scenario"),
        ({"num_devices": 4, "dp_replicate": 2}, "is the measurement of 2 ranks, and the scenario has 4 devices"),
    ):
        other = replace(loaded, job=loaded.job.with_changes(changes))
        with pytest.raises(SpecError, match=rf"--recovery = \S+: {said}"):
            with_measured_recovery(other, file)
