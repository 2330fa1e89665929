"""``simplan goodput``: its JSON, files, tables and expectations, and runs that it refuses."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.calls import Simplan, refused

TRIALS = ("--trials", "5")
RUN = """\
run: {num_steps: 400000}
reliability: {device_mtbf_h: 20, detection_s: 60}
checkpoint: {interval_s: 300, blocking_s: 3}
recovery: {restart_s: 60, spares: 1, repair_h: 1}
price: {device_hour: 2.5}
"""


@pytest.fixture
def whole_run(scenario: Path) -> Path:
    scenario.write_text(scenario.read_text().partition("expect:")[0] + RUN)
    return scenario


def test_json_has_the_agreed_keys_and_files_have_the_same_runs(
    simplan: Simplan, whole_run: Path, tmp_path: Path
) -> None:
    files = ("--runs", "runs.csv", "--trace", "trace.json", "-o", "out.json")
    printed = simplan("goodput", whole_run, "--json", "--seed", "3", *TRIALS, *files)
    document = json.loads(printed.stdout)
    assert json.loads((tmp_path / "out.json").read_text()) == document
    time = document["time_to_finish_s"]
    assert {"mean", "p10", "p50", "p90"} <= time.keys()
    assert {"mean", "p10", "p90"} <= document["num_interruptions"].keys()
    assert math.fsum(document["waterfall_s"].values()) == pytest.approx(time["mean"])
    assert document["goodput"] == pytest.approx(400_000 * document["step_time_s"] / time["mean"])
    assert document["cost"] == pytest.approx(2.5 * document["device_hours"])
    assert (document["seed"], document["trials"]) == (3, 5)
    for key in ("best_interval_s", "young_s", "daly_s"):
        assert document[key] > 0
    with (tmp_path / "runs.csv").open() as stream:
        rows = [*csv.DictReader(stream)]
    times_s = sorted(float(row["time_s"]) for row in rows)
    assert sum(times_s) / 5 == pytest.approx(time["mean"])
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert trace["otherData"]["time_s"] == pytest.approx(times_s[2]), "the run with the median time"
    assert sum(event["dur"] for event in slices) / 1e6 == pytest.approx(times_s[2])
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in itertools.pairwise(slices))
    again = simplan("goodput", whole_run, "--json", "--seed", "3", *TRIALS)
    assert json.loads(again.stdout) == document, "a seed gives the same bytes"


def test_a_run_is_drawn_and_traced_by_its_number(simplan: Simplan, whole_run: Path, tmp_path: Path) -> None:
    often = (whole_run, "--mtbf-h", "0.5", "--seed", "3", "--trial", "2")
    simplan("goodput", *often, *TRIALS, "--runs", "runs.csv", "--trace", "trace.json")
    with (tmp_path / "runs.csv").open() as stream:
        row = [*csv.DictReader(stream)][2]
    time_s, num_stops = float(row["time_s"]), int(row["num_interruptions"])
    assert row["trial"] == "2"
    assert num_stops > 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["time_s"] == pytest.approx(time_s)
    drawn = json.loads(simplan("draw", *often, "--json", "-o", "run.svg").stdout)
    assert (drawn["kind"], drawn["trial"], drawn["seed"]) == ("run_timeline", 2, 3)
    assert drawn["time_s"] == pytest.approx(time_s)
    assert sum(stretch["cause"] is not None for stretch in drawn["stretches"]) == num_stops
    svg = ElementTree.parse(tmp_path / "run.svg").getroot()
    assert len(svg.findall("{*}path[@class='ink']")) == num_stops
    refused(simplan("draw", *often, "--network"), "--run: is another drawing than --network")
    refused(simplan("goodput", *often), "--trial = 2: is the run of --trace; add --trace FILE")


def test_parquet_has_the_same_columns(simplan: Simplan, whole_run: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    simplan("goodput", whole_run, *TRIALS, "--runs", "runs.parquet")
    table = pandas.read_parquet(tmp_path / "runs.parquet")
    assert len(table) == 5
    assert {"time_s", "lost_work_s", "num_interruptions", "cost"} <= {*table.columns}


def test_text_answers_first_and_shows_time_interval_and_worth(simplan: Simplan, whole_run: Path) -> None:
    lines = simplan("goodput", whole_run, *TRIALS).stdout.splitlines()
    assert lines[0].startswith("small: done in ")
    assert " goodput " in lines[0]
    for title in ("Time, mean of the runs", "Interruptions, mean of the runs", "Checkpoint interval: best ",
                  "Worth of one change, with equal failures", "Assumptions", "Next"):  # fmt: skip
        assert any(line.startswith(title) for line in lines), title


def test_options_are_the_keys_of_the_sections(simplan: Simplan, whole_run: Path) -> None:
    options = "--steps 1000 --mtbf-h 20 --detection-s 60 --checkpoint-every-s best --checkpoint-s 3 --restart-s 60"
    others = "--spares 1 --repair-h 1 --price 2.5"
    text = whole_run.read_text().partition("run:")[0]
    bare = whole_run.with_name("bare.yaml")
    bare.write_text(text)
    whole_run.write_text(text + RUN.replace("400000", "1000").replace("interval_s: 300", "interval_s: best"))
    by_options = json.loads(simplan("goodput", bare, *options.split(), *others.split(), "--json", *TRIALS).stdout)
    by_keys = json.loads(simplan("goodput", whole_run, "--json", *TRIALS).stdout)
    assert by_options == by_keys
    assert by_keys["checkpoint_interval_s"] == by_keys["best_interval_s"]


def test_several_scenarios_are_one_table(simplan: Simplan, whole_run: Path) -> None:
    other = whole_run.with_name("eight.yaml")
    other.write_text(whole_run.read_text().replace("restart_s: 60", "restart_s: 600"))
    lines = simplan("goodput", whole_run, other, *TRIALS).stdout.splitlines()
    assert lines[0].split()[:2] == ["scenario", "time"]
    assert [line.split()[0] for line in lines[1:3]] == [whole_run.stem, "eight"]
    document = json.loads(simplan("goodput", whole_run, other, "--json", *TRIALS).stdout)
    first, second = document["goodputs"]
    assert second["time_to_finish_s"]["mean"] > first["time_to_finish_s"]["mean"]
    refused(simplan("goodput", whole_run, other, "--trace", "t.json"), "--trace = t.json: is of one scenario")


def test_expectations_of_the_run_decide_the_exit_code_of_goodput_and_check(simplan: Simplan, whole_run: Path) -> None:
    expect = "expect:\n  - {metric: num_microbatches, value: 8}\n  - {metric: goodput, min: 0.2}\n"
    good = whole_run.read_text() + expect
    whole_run.write_text(good)
    assert simplan("goodput", whole_run, *TRIALS).returncode == 0
    checked = simplan("check", whole_run)
    assert (checked.returncode, "3 passed" in checked.stdout) == (0, True)
    whole_run.write_text(good + "  - {metric: time_to_finish_p50_s, max: 1, why: in a second}\n")
    failed = simplan("goodput", whole_run, *TRIALS)
    assert failed.returncode == 1
    assert "failed: time_to_finish_p50_s is " in failed.stderr
    assert "(in a second)" in failed.stderr
    assert simplan("check", whole_run).returncode == 1


def test_run_that_never_finishes_names_the_option_and_the_change(simplan: Simplan, whole_run: Path) -> None:
    result = simplan("goodput", whole_run, "--mtbf-h", "0.03")
    refused(result, "--mtbf-h = 0.03: the run never finishes: it stops every ", "write reliability.device_mtbf_h: 0.")
    file = simplan("goodput", whole_run, "--set", "recovery.restart_s=86400")
    refused(file, f"{whole_run}:7:", ": reliability.device_mtbf_h = 20: the run never finishes", "recovery.restart_s: ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--runs", "runs.txt"), "--runs = runs.txt: ... Parquet or CSV ... write runs.parquet or runs.csv"),
        (("--set", "checkpoint.storage_bytes=1e3"), "has no room for a checkpoint of "),
        (("--set", "checkpoint.storage_bytes=1e7"), "checkpoints of the run, each of "),
        (("--spares", "3"), "--spares = 3: is more than the 1 node of the job"),
        (("--recovery", "missing.json"), "missing.json: does not exist"),
        (("--price", "-1"), "--price = -1: must be greater than 0"),
    ],
)
def test_bad_options_are_refused(simplan: Simplan, whole_run: Path, options: tuple[str, ...], sentence: str) -> None:
    refused(simplan("goodput", whole_run, *options), sentence)


def test_run_without_length_names_the_fix(simplan: Simplan, whole_run: Path) -> None:
    whole_run.write_text(whole_run.read_text().replace("run: {num_steps: 400000}\n", ""))
    refused(simplan("goodput", whole_run), "run: is missing: a run needs a length; add run: {num_steps: 100000}")
    assert simplan("predict", whole_run).returncode == 0


def test_predict_names_the_next_command(simplan: Simplan, whole_run: Path) -> None:
    text = simplan("predict", whole_run).stdout
    assert f"  simplan goodput {whole_run}" in text
    assert "checkpoints or restarts (`simplan goodput` has them)" in text
