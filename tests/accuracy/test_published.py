"""Published runs: what is read, what is refused, what is skipped by name, and the figures over them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simplan.accuracy.choosing import choices
from simplan.accuracy.evaluate import predict_runs
from simplan.accuracy.job import job_of_run
from simplan.accuracy.outcome import Predicted, RunOutcome
from simplan.accuracy.profiled import predict_from_profiles, read_profiles
from simplan.accuracy.reading import read_published
from simplan.accuracy.result import Accuracy
from simplan.accuracy.schema import PublishedRun
from simplan.accuracy.statistics import ErrorFigures, verdicts
from simplan.cli.accuracy import accuracy_command
from simplan.errors import SpecError
from simplan.predict import predict
from simplan.predict.brief import predict_brief

PUBLISHED = Path(__file__).parents[2] / "scenarios" / "published"
RUN: dict[str, Any] = {
    "id": "one",
    "source": "a test",
    "software": {
        "framework": "megatron-lm",
        "version": "2022",
        "flash_attention": False,
        "compile": False,
        "tp_comm_overlap": None,
        "grad_overlap": None,
    },
    "task": "pretrain",
    "model": {
        "name": "small",
        "family": "gpt",
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 51200,
        "seq_len": 1024,
        "gated_mlp": False,
        "tied_embeddings": True,
    },
    "cluster": {
        "device": "a100-sxm-80gb",
        "num_devices": 8,
        "devices_per_node": 8,
        "intra_link": "nvlink3",
        "inter_link_gbit_per_device": 200.0,
    },
    "plan": {
        "dp_replicate": 2,
        "dp_shard": 1,
        "zero_stage": 0,
        "tp": 2,
        "sequence_parallel": False,
        "pp": 2,
        "virtual_stages": 1,
        "cp": 1,
        "ep": 1,
        "schedule": "1f1b",
        "microbatch_size": 2,
        "num_microbatches": 8,
        "global_batch_size": 32,
        "recompute": "none",
        "precision": "fp16",
        "optimizer": "adam",
    },
    "measured": {
        "step_time_s": 1.0,
        "tokens_per_s_per_device": None,
        "peak_allocated_gib": None,
        "peak_reserved_gib": None,
        "peak_memory_gb_as_printed": 10.0,
        "oom": False,
        "model_tflops_per_device_published": None,
        "mfu_published": None,
    },
    "derived_step_time": False,
    "assumed": [],
    "quality": "good",
}


WITHOUT_PIPELINE: dict[str, Any] = {
    "plan__pp": 1,
    "plan__dp_replicate": 1,
    "plan__dp_shard": 4,
    "plan__zero_stage": 3,
    "plan__schedule": "none",
}


INTERLEAVED = {
    "plan__virtual_stages": 2,
    "plan__schedule": "interleaved_1f1b",
    "software__framework": "megatron-core",
}


def run_with(**changes: Any) -> dict[str, Any]:
    """The run, with dotted fields changed (``__`` for the dot)."""
    found = copy.deepcopy(RUN)
    for name, value in changes.items():
        *parents, last = name.split("__")
        place = found
        for parent in parents:
            place = place[parent]
        place[last] = value
    return found


def parsed(run: dict[str, Any]) -> PublishedRun:
    return PublishedRun.model_validate_json(json.dumps(run))


def written(folder: Path, *runs: dict[str, Any], name: str = "some.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump({"meta": {"source": "a test"}, "runs": list(runs)}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan__microbatchsize": 2}, ("microbatchsize", "microbatch_size")),
        ({"cluster__num_devices": 16}, ("num_devices", "16", "= 8")),
        ({"plan__global_batch_size": 33}, ("global_batch_size", "33", "= 32")),
        ({"model__num_hidden_layers": 7}, ("num_hidden_layers", "7", "multiple")),
        ({"plan__stage_layers": [4, 3]}, ("stage_layers", "7", "8")),
        ({"plan__schedule": "1f2b"}, ("schedule", "1f2b")),
        ({"measured__oom": True}, ("step_time_s", "out of memory")),
    ],
)
def test_a_run_that_does_not_add_up_is_named(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as caught:
        read_published([written(tmp_path, run_with(**changes))])
    for word in words:
        assert word in str(caught.value)


def test_every_visible_run_is_read_and_ids_are_unique(tmp_path: Path) -> None:
    runs = [run for file in read_published([PUBLISHED]) for run in file.runs or ()]
    assert len(runs) == 413
    assert len({run.id for run in runs}) == 413
    with pytest.raises(SpecError, match="one"):
        read_published([written(tmp_path, RUN), written(tmp_path, RUN, name="other.yaml")])


def test_the_command_skips_by_name_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.yaml").write_text("records: []\n", encoding="utf-8")
    unknown = run_with(id="two", cluster__device="a100-of-tomorrow")
    full = run_with(id="three", plan__recompute="full", measured__oom=True, measured__step_time_s=None)
    written(tmp_path, RUN, unknown, full)
    options: dict[str, Any] = {"every_run": False, "markdown": False, "stage_times": None, "jobs": 1}
    csv_file = tmp_path / "rows.csv"
    assert accuracy_command([tmp_path], as_json=True, csv_file=csv_file, **options) == 0
    printed = capsys.readouterr()
    assert "notes.yaml holds no runs" in printed.err
    document = json.loads(printed.out)
    first, second, third = document["runs"]
    assert set(first) >= {
        "id", "file", "status", "reason", "predicted_step_time_s", "step_time_interval_s", "measured_step_time_s",
        "predicted_peak_memory_gib", "measured_peak_memory_gib", "memory_kind", "predicted_oom", "measured_oom",
    }  # fmt: skip
    assert (first["status"], second["status"], third["status"]) == ("ok", "skipped", "ok")
    assert "a100-of-tomorrow" in second["reason"]
    assert first["step_time_interval_s"][0] < first["predicted_step_time_s"] < first["step_time_interval_s"][1]
    assert first["measured_peak_memory_gib"] == pytest.approx(10e9 / 2**30), "the fork prints 10^9 bytes as a GB"
    overall = document["overall"]
    assert overall["step_time"]["num"] == 1
    assert overall["step_time"]["mape"] == pytest.approx(abs(first["predicted_step_time_s"] - 1))
    assert overall["oom"] | {"right": None} == {
        "right": None,
        "fit": 1,
        "oom": 0,
        "missed": 1,
        "false_alarms": 0,
        "unknown": 0,
    }
    assert set(document["by_file"]) == {str(tmp_path / "some.yaml")}
    assert csv_file.read_text(encoding="utf-8").count("\n") == 4
    assert accuracy_command([tmp_path], as_json=False, csv_file=None, **options) == 0
    assert "a100-of-tomorrow" in capsys.readouterr().out, "what is skipped is named"
    assert accuracy_command([tmp_path], as_json=False, csv_file=None, **options | {"markdown": True}) == 0
    assert "| some |" in capsys.readouterr().out


def outcome(name: str, predicted_s: float, measured_s: float, **changes: Any) -> RunOutcome:
    run = parsed(run_with(id=name, measured__step_time_s=measured_s, **changes))
    found = Predicted(predicted_s, (0.9 * predicted_s, 1.1 * predicted_s), {"allocated": 9.0}, False, 1.0, "torch", ())
    return RunOutcome("some.yaml", run, found)


def test_figures_are_those_of_numpy() -> None:
    errors = [0.1, -0.2, 0.05, -0.4]
    found = ErrorFigures.of(errors)
    assert found.mape == pytest.approx(0.1875)
    assert found.median_ape == pytest.approx(0.15)
    assert found.p90_ape == pytest.approx(np.percentile([0.1, 0.2, 0.05, 0.4], 90))
    assert found.max_ape == 0.4
    assert found.bias == pytest.approx(-0.1125)
    accuracy = Accuracy((outcome("a", 1.0, 1.05), outcome("b", 1.0, 2.0)))
    figures = accuracy.overall.step_time
    assert figures.interval_coverage == 0.5
    assert figures.median_interval_half_width == pytest.approx(0.1)
    assert verdicts(accuracy.outcomes).fit == 2


def test_choices_by_hand() -> None:
    plans = [{"plan__tp": tp, "plan__dp_replicate": 4 // tp} for tp in (1, 2, 4)]
    for plan in plans:
        plan["plan__num_microbatches"] = 16 // plan["plan__dp_replicate"]
    times = [(1.0, 1.2), (1.1, 1.0), (1.3, 1.5)]  # the first is chosen, the second was the best
    found = choices([outcome(str(i), *time, **plan) for i, (time, plan) in enumerate(zip(times, plans, strict=True))])
    assert (found.num_groups, found.num_pairs) == (1, 3)
    assert found.median_regret == pytest.approx(0.2)
    assert found.kendall_tau == pytest.approx((2 - 1) / 3)


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, 1e-2),
        ({"plan__num_microbatches": 24, "plan__schedule": "gpipe"}, 1e-2),
        ({"software__framework": "megatron-core"}, 1e-2),
        (INTERLEAVED, 1e-2),
        (WITHOUT_PIPELINE | {"plan__zero_stage": 1}, 1e-9),
        (WITHOUT_PIPELINE | {"software__framework": "torchtitan", "plan__precision": "bf16"}, 1e-9),
    ],
)
def test_a_brief_prediction_is_that_of_predict(changes: dict[str, Any], within: float) -> None:
    given = run_with(**changes)
    given["plan"]["global_batch_size"] = (
        given["plan"]["microbatch_size"]
        * given["plan"]["num_microbatches"]
        * given["plan"]["dp_replicate"]
        * given["plan"]["dp_shard"]
    )
    job = job_of_run(parsed(given))
    brief = predict_brief(job.model, job.cluster, job.training, job.plan, job.software)
    whole = predict("x", job.model, job.cluster, job.training, job.plan, job.software)
    assert brief.step_time_s == pytest.approx(whole.step_time_s, rel=within)
    assert brief.allocated_bytes == max(rank.allocated_bytes for rank in whole.memory)


def test_zero_bubble_from_profiled_stage_times() -> None:
    files = read_published([PUBLISHED / "zero_bubble.yaml"])
    outcomes = predict_from_profiles(files, read_profiles(PUBLISHED / "zero_bubble_profiles.yaml"))
    found = Accuracy(tuple(outcomes)).overall
    assert found.step_time.errors.num >= 18
    assert found.step_time.errors.mape is not None
    assert found.step_time.errors.mape < 0.015


def test_a_sample_of_every_file_is_predicted() -> None:
    files = read_published([PUBLISHED])
    smallest = []
    for file in files:
        runs = [
            run
            for run in file.runs or ()
            if run.measured.step_time_s and run.task == "pretrain" and run.plan.num_microbatches <= 64
        ]
        smallest.append((file.file, min(runs, key=lambda run: run.cluster.num_devices) if runs else None))
    chosen = [type(files[0])(name, (run,)) for name, run in smallest if run is not None]
    outcomes = predict_runs(chosen, jobs=1)
    assert len(outcomes) == 12
    for one in outcomes:
        assert one.predicted is not None, f"{one.run.id}: {one.reason}"
        assert one.error is not None
        assert abs(one.error) < 0.6
