"""``simplan accuracy``: what it prints, what others rely on in its JSON, and that it ends with 0."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.accuracy.runs import run_data, write_runs
from tests.cli.calls import Simplan, refused
from tests.support.problems import says

OF_A_RUN = {
    "id", "file", "status", "reason", "predicted_step_time_s", "step_time_interval_s", "measured_step_time_s",
    "predicted_peak_memory_gib", "measured_peak_memory_gib", "memory_kind", "predicted_oom", "measured_oom",
}  # fmt: skip
OF_STEP_TIME = {
    "num", "mape", "median_ape", "p90_ape", "max_ape", "bias", "interval_coverage", "median_interval_half_width",
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    write_runs(
        folder / "some.yaml",
        run_data("absurd", measured__step_time_s=1000.0, measured__peak_allocated_gib=1.0),
        run_data("ran-out", measured__step_time_s=None, measured__oom=True),
        run_data("adapters", training__task="lora", model__lora_rank=8),
        run_data("documents", model__document_lengths=[64, 192]),
    )
    (folder / "links.yaml").write_text("meta: {source: x}\nrecords: []\n")
    return folder


def test_only_some_runs_are_predicted(simplan: Simplan, runs: Path) -> None:
    """By their ids, in one table; an id that no run has is an error with the nearest one."""
    result = simplan("accuracy", runs, "--only", "absurd", "--only", "adapters", "--jobs", "1")
    assert result.returncode == 0, result.stderr
    assert "1 published run predicted, 1 skipped" in result.stdout
    assert len([line for line in result.stdout.splitlines() if line.startswith("  absurd")]) == 1
    assert "ran-out" not in result.stdout
    refused(
        simplan("accuracy", runs, "--only", "absurt"), "--only = absurt: is no run of the files", "did you mean absurd"
    )


def test_the_json_has_what_others_rely_on(simplan: Simplan, runs: Path) -> None:
    result = simplan("accuracy", runs, "--json", "--jobs", "1")
    assert result.returncode == 0, result.stderr
    assert f"note: {runs / 'links.yaml'} holds no runs, and is passed over" in result.stderr
    document = json.loads(result.stdout)
    by_id = {run["id"]: run for run in document["runs"]}
    assert all(run.keys() >= OF_A_RUN for run in by_id.values())
    assert [run["status"] for run in document["runs"]] == ["ok", "ok", "skipped", "skipped"]
    assert by_id["absurd"]["predicted_step_time_s"] < 1.0
    assert by_id["absurd"]["memory_kind"] == "allocated"
    assert by_id["absurd"]["in_step_time_interval"] is False
    assert by_id["ran-out"]["in_step_time_interval"] is None
    assert by_id["ran-out"]["measured_oom"] is True
    assert by_id["ran-out"]["predicted_step_time_s"] > 0, "a step time is predicted even where nothing fits"
    assert "training adapters with megatron-lm-2022" in by_id["adapters"]["reason"]
    assert "attention of several documents in a sequence" in by_id["documents"]["reason"]
    assert document["overall"]["step_time"].keys() >= OF_STEP_TIME
    assert document["overall"]["peak_memory"]["num"] == 1
    of_file = document["by_file"][str(runs / "some.yaml")]
    assert of_file["num_skipped"] == 2
    assert of_file["step_time"]["interval_coverage"] == 0
    assert of_file["step_time"]["median_interval_half_width"] > 0


def test_frameworks_of_the_catalog_and_others_are_rows(simplan: Simplan, tmp_path: Path) -> None:
    """Each group has the errors of its own runs; without runs of both there is no such row."""
    catalog = [run_data("known", measured__step_time_s=1.0)]
    other = [
        run_data(name, software__fallback_for="other", measured__step_time_s=s) for name, s in (("a", 2.0), ("b", 3.0))
    ]
    write_runs(tmp_path / "both.yaml", *catalog, *other)
    write_runs(tmp_path / "known.yaml", *catalog)
    document = json.loads(simplan("accuracy", tmp_path / "both.yaml", "--json", "--jobs", "1").stdout)
    errors = [abs(run["step_time_error"]) for run in document["runs"]]
    groups = document["by_framework"]
    assert groups["frameworks in the catalog"]["step_time"]["mape"] == pytest.approx(errors[0])
    assert groups["other frameworks"]["step_time"]["mape"] == pytest.approx(sum(errors[1:]) / 2)
    assert groups["other frameworks"]["num_runs"] == 2
    text = simplan("accuracy", tmp_path / "both.yaml", "--jobs", "1").stdout
    of_times, of_memory = (line.split()[2] for line in text.splitlines() if "other frameworks" in line)
    assert (of_times, of_memory) == ("2", "0")
    assert says(text, "2 runs of other: ", "megatron-lm-2022", "without")
    alone = json.loads(simplan("accuracy", tmp_path / "known.yaml", "--json", "--jobs", "1").stdout)
    assert alone["by_framework"] == {}


def test_the_text_names_files_errors_and_what_was_skipped(simplan: Simplan, runs: Path) -> None:
    result = simplan("accuracy", runs / "some.yaml", "--jobs", "1")
    assert result.returncode == 0, "whatever the errors are"
    assert says(result.stdout, "2 published runs", "2 skipped", "mean absolute error of step times")
    assert says(result.stdout, "\n90 % intervals", "0.0 %", "measured times", "half width")
    for words in (
        "Step time: errors in percent",
        "Peak memory",
        "Largest errors",
        "\nSkipped\n",
        "documents: model.",
    ):
        assert words in result.stdout
    assert all(
        len(line) <= 120 for line in result.stdout.splitlines() if "lora" not in line and "documents" not in line
    )


def test_every_run_goes_into_a_table(simplan: Simplan, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.csv"
    result = simplan("accuracy", runs / "some.yaml", "--runs", "--csv", file, "--jobs", "1")
    assert "Every run" in result.stdout
    assert "out of memory" in result.stdout
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["id"] for row in rows] == ["absurd", "ran-out", "adapters", "documents"]
    assert float(rows[0]["predicted_step_time_s"]) > 0
    assert rows[0]["tp"] == "1"


def test_tables_come_as_markdown(simplan: Simplan, runs: Path) -> None:
    result = simplan("accuracy", runs, "--markdown", "--jobs", "1")
    headers, rule, row, *_ = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert row.startswith("| some | 1 | 2 |")
    assert "| coverage | +/- |" in headers
    assert headers.count("|") == rule.count("|") == row.count("|")


def test_a_picture_holds_the_runs_of_the_table(simplan: Simplan, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.svg"
    result = simplan("accuracy", runs, "--json", "--plot", file, "--jobs", "1")
    assert result.returncode == 0, result.stderr
    error = json.loads(result.stdout)["runs"][0]["step_time_error"]
    titles = [
        element.text or "" for element in ElementTree.parse(file).getroot().iter() if element.tag.endswith("title")
    ]
    [absurd] = [words for words in titles if words.startswith("absurd: ")]
    assert absurd.endswith(f"({100 * error:+.1f} %)")
    assert not any("ran-out" in words or "documents" in words for words in titles)


def test_a_picture_of_nothing_is_not_written(simplan: Simplan, tmp_path: Path) -> None:
    write_runs(tmp_path / "some.yaml", run_data("adapters", training__task="lora", model__lora_rank=8))
    result = simplan("accuracy", tmp_path / "some.yaml", "--plot", tmp_path / "none.svg")
    assert (result.returncode, (tmp_path / "none.svg").exists()) == (0, False)
    assert "no step time was both measured and predicted" in result.stderr


def test_a_picture_is_svg(simplan: Simplan, runs: Path) -> None:
    result = simplan("accuracy", runs, "--plot", "all.png")
    refused(result, "--plot = all.png: must end in .svg; write all.svg")
    assert "predicting" not in result.stderr


def test_a_bad_file_is_told_with_its_line(simplan: Simplan, tmp_path: Path) -> None:
    write_runs(tmp_path / "bad.yaml", run_data("one", cluster__num_devices=5))
    said = "one: plan = dp_replicate 2 x pp 2: the plan needs 4 devices and the cluster has 5"
    refused(simplan("accuracy", tmp_path / "bad.yaml"), said)


def test_scenarios_are_checked_beside_published_runs(simplan: Simplan, runs: Path, scenario: Path) -> None:
    runs.rename(scenario.parent / "published")
    result = simplan("check", scenario.parent)
    assert result.returncode == 0, result.stdout
    assert "1 scenario:" in result.stdout
