"""A run on several numbers of devices, against the steps of its law and the step times of predict."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.report.devices import DeviceComparison, devices_text
from simplan.scenario import load_scenario
from simplan.scenario.whole_run.devices import compare_devices
from simplan.scenario.whole_run.goodput import goodput_of
from tests.support.problems import says

SCENARIO = """
model: {preset: gpt2-124m}
cluster: {preset: dgx-h100, num_devices: 8}
training: {global_batch_size: 64}
plan: {dp_shard: 8, microbatch_size: 4}
price: {device_hour: 2}
"""
LAW = "run: {samples_at_batch: {kind: critical_batch, num_samples: 1000000, critical_batch_size: 64}}\n"
STEPS = {64: 31_250, 128: 23_438}
"""A million samples of small batches, twice at 64 and three times at 128."""


def compared(tmp_path: Path, text: str, *numbers: int) -> DeviceComparison:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    return compare_devices(
        load_scenario(file), numbers, lambda scenario: goodput_of(scenario, num_runs=1, compares=False)
    )


def test_runs_take_the_steps_of_their_batch_and_the_step_of_their_devices(tmp_path: Path) -> None:
    rows = compared(tmp_path, SCENARIO + LAW, 8, 16)
    assert [(run.num_devices, run.batch_size) for run in rows.runs] == [(8, 64), (16, 64), (16, 128)]
    times_s = []
    for run in rows.runs:
        text = SCENARIO.replace("num_devices: 8", f"num_devices: {run.num_devices}")
        text = text.replace("dp_shard: 8", f"dp_shard: {run.num_devices}").replace("64}", f"{run.batch_size}}}")
        (tmp_path / "other.yaml").write_text(text)
        predicted = load_scenario(tmp_path / "other.yaml").predict()
        times_s.append(STEPS[run.batch_size] * predicted.step_time_s)
        assert run.result.mean_time_s == pytest.approx(times_s[-1])
    last = rows.to_json()["runs"][2]
    assert last["speedup"] == pytest.approx(times_s[0] / times_s[2])
    assert last["device_hours_factor"] == pytest.approx(2 * times_s[2] / times_s[0])
    assert last["goodput"]["cost"] == pytest.approx(2 * 16 * times_s[2] / 3600)
    assert last["num_samples"] == 128 * STEPS[128]
    assert "the learning rate of adamw grows with the square root" in rows.sentences[-1]


def test_samples_without_a_law_are_the_same_and_said_to_be(tmp_path: Path) -> None:
    rows = compared(tmp_path, SCENARIO + "run: {num_steps: 1000}\n", 8, 16)
    assert {run.num_samples for run in rows.runs} == {64_000}
    assert says(rows.sentences[0], "samples", "assumed", "every batch")


def test_a_plan_that_cannot_run_is_left_out_with_its_reason(tmp_path: Path) -> None:
    law = "run: {samples_at_batch: {kind: table, table: [[64, 100000], [128, 150000]]}}\n"
    rows = compared(tmp_path, SCENARIO + law, 8, 16, 32)
    assert [(run.num_devices, run.batch_size) for run in rows.runs] == [(8, 64), (16, 64), (16, 128)]
    left_out = "\n".join(rows.sentences[:2])
    assert "32 devices with batch 64 are left out: " in left_out
    assert "the batch 256 is outside the table, which has 64 to 128" in left_out
    assert "32 devices with batch 256 are left out" in devices_text(rows)
    with pytest.raises(SpecError, match="is outside the table"):
        compared(tmp_path, SCENARIO.replace("64}", "32}") + law, 8)
