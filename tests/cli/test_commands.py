"""Commands that need no ranks: what they print, what they write, and how they end."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer.main

import simplan as package
from simplan import catalog
from simplan.cli.app import app
from simplan.cli.listing import listing
from simplan.interop.formats import formats
from simplan.report.html import html_report
from simplan.scenario import METRICS
from simplan.search.switch import RIGHT_ORDER
from tests.cli.calls import Simplan, bash, here, refused
from tests.support.problems import says
from tests.test_words import PRIVATE_WORDS


def test_version_and_help(simplan: Simplan, new_simplan: Simplan) -> None:
    assert new_simplan("--version").stdout == f"simplan {package.__version__}\n"
    for args in ((), ("--help",), ("predict", "-h")):
        result = simplan(*args)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("Usage: simplan")


def test_predict_prints_the_verdict_first(simplan: Simplan, scenario: Path) -> None:
    result = simplan("predict", scenario)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("small: fits: rank ")
    for word in ("step time", "MFU", "dense bf16 peak", "Step breakdown per rank", "Peak memory per rank", "Next"):
        assert word in result.stdout
    assert "\033" not in result.stdout, "no color off a terminal"


def test_several_scenarios_are_one_table_fastest_first(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(scenario.read_text().replace("gpipe", "1f1b").replace("name: small", "name: other"))
    alone = [json.loads(simplan("predict", path, "--json").stdout) for path in (scenario, other)]
    document = json.loads(simplan("predict", scenario, other, "--json").stdout)
    times = [prediction["step_time_s"] for prediction in document["predictions"]]
    assert times == sorted(prediction["step_time_s"] for prediction in alone)
    table, _, note = simplan("predict", scenario, other).stdout.partition("\n\n")
    lines = table.splitlines()
    assert lines[0].split()[:3] == ["scenario", "step", "time"]
    assert {line.split()[0] for line in lines[1:]} == {scenario.stem, "other"}
    assert 1.02 < times[1] / times[0] < 1.05, "the second row of RIGHT_ORDER"
    _, fraction, num_pairs = RIGHT_ORDER[1]
    assert document["published_pairs_in_this_order"] == [None, {"fraction": fraction, "num_pairs": num_pairs}]
    assert f" {fraction:.0%} of {num_pairs} ".replace("%", " %") in lines[2]
    assert note.startswith("certainty: share of published pairs of plans")
    refused(simplan("predict", scenario, other, "--trace", tmp_path / "t.json"), "--trace", "is of one scenario")


def test_every_result_can_be_saved() -> None:
    """As ``predict -o`` does; ``calibrate`` has --calibration for its file, and ``show`` prints the catalog."""
    options = {
        name: {option for param in command.params for option in param.opts}
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    assert {name for name, of_it in options.items() if "--json" in of_it and "-o" not in of_it} == {"calibrate", "show"}


def test_saved_results_are_reported_and_others_name_the_command(
    simplan: Simplan, scenario: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(scenario.read_text().replace("gpipe", "1f1b"))
    commands: dict[str, list[str | Path]] = {
        "predict": [scenario, other],
        "explain": [scenario, other],
        "search": [scenario, "--set", "search={}"],
    }
    saved = []
    for command, args in commands.items():
        saved.append(tmp_path / f"{command}.json")
        text = simplan(command, *args).stdout
        assert simplan(command, *args, "-o", saved[-1]).stdout == text, "as without -o"
        assert json.loads(saved[-1].read_text()) == json.loads(simplan(command, *args, "--json").stdout)
    page = tmp_path / "report.html"
    assert simplan("report", *saved, "-o", page).returncode == 0
    assert {"Comparison", "Difference", "Search"} <= {*re.findall(r"<h2>(\w+):? ", page.read_text())}
    refused(simplan("report", other), "`simplan predict ", "other.yaml -o other.json; simplan report other.json`")
    refused(simplan("report", saved[0], "-o", "r.pdf"), "--output", "r.html")
    refused(simplan("report", saved[0], "-o", saved[0]), "--output")


def test_plans_with_other_batches_are_compared_per_sequence(simplan: Simplan, tmp_path: Path) -> None:
    """Each has one microbatch per data-parallel rank, so that the slower plan has the shorter step."""
    files = [tmp_path / f"{name}.yaml" for name in ("whole", "halved")]
    for file, options in zip(files, ((), ("--tp", "2")), strict=True):
        shape = ("llama3-8b", "--gpus", "16")
        assert simplan("predict", *shape, *options, "--write-scenario", file).returncode == 0
    table = simplan("predict", *files).stdout
    document = json.loads(simplan("predict", *files, "--json").stdout)
    whole, halved = document["predictions"]
    assert (whole["name"], halved["name"]) == ("whole", "halved"), "the most tokens per second first"
    assert whole["step_time_s"] > halved["step_time_s"]
    assert [line.split()[0] for line in table.splitlines()[1:3]] == ["whole", "halved"]
    for predicted in (whole, halved):
        assert f"{predicted['tokens_per_s_per_device']:,.0f}" in table
    assert "certainty" not in table, "other batches are no two plans of one job"
    change = whole["tokens_per_s_per_device"] / halved["tokens_per_s_per_device"] - 1
    explained = json.loads(simplan("explain", *files, "--json").stdout)
    text = simplan("explain", *files).stdout
    page = html_report([("explained.json", explained), ("predicted.json", document)], written="")
    for shown in (table, text, page, json.dumps(document["notes"]), json.dumps(explained["reasons"])):
        assert "Batches differ: 16 sequences (whole), 8 sequences (halved)." in shown
    for shown in (text, page):
        assert f"Per sequence, the second step is {100 * change:.1f} % longer" in shown


def test_explain_shows_every_term_with_its_formula(simplan: Simplan, scenario: Path) -> None:
    result = simplan("explain", scenario)
    assert (result.returncode, result.stderr) == (0, "")
    for words in ("a step on rank", "compute", "parameters x 4 B", "MFU = ", "(p-1)/(m+p-1)"):
        assert words in result.stdout
    document = json.loads(simplan("explain", scenario, "--json").stdout)
    assert document["kind"] == "explanation"
    assert sum(part["value"] for part in document["time"]) == pytest.approx(document["step_time_s"])


def test_explain_of_two_is_their_difference(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(scenario.read_text().replace("gpipe", "1f1b").replace("name: small", "name: other"))
    result = simplan("explain", scenario, other)
    assert result.stdout.startswith("small -> other: a step ")
    document = json.loads(simplan("explain", scenario, other, "--json").stdout)
    assert sum(row["difference"] for row in document["memory"]) == pytest.approx(document["device_bytes"])
    assert document["device_bytes"] < 0, "1F1B holds less than GPipe"


DOES_NOT_FIT = (
    "model: {preset: llama3-8b}\ncluster: {preset: dgx-h100, num_nodes: 1}\n"
    "training: {global_batch_size: 64, precision: bf16}\nplan: {dp_shard: 8, microbatch_size: 2}\n"
)


def commands_after(stdout: str) -> list[list[str]]:
    lines = stdout.partition("\nNext\n")[2].splitlines()
    assert all(line.startswith("  simplan ") for line in lines), lines
    return [shlex.split(line)[1:] for line in lines]


SMALL_SPACE = {"search": ("--tp", "1", "--cp", "1", "--pp", "1")}
"""Options after a pasted command, without which it takes long."""


@pytest.mark.slow
def test_commands_after_a_plan_that_does_not_fit_work_as_pasted(
    simplan: Simplan, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario.write_text(DOES_NOT_FIT)
    result = simplan("predict", scenario, "--microbatch-size", "4")
    assert result.returncode == 0
    assert "does not fit: rank 0 needs" in result.stdout.splitlines()[0]
    commands = commands_after(result.stdout)
    assert [command[0] for command in commands] == ["predict", "search", "explain", "trace"]
    assert "/how-to/troubleshooting/" in result.stdout.partition("\n\nNext")[0].splitlines()[-1]
    done = [simplan(*command, *SMALL_SPACE.get(command[0], ())) for command in commands]
    assert [result_of_command.returncode for result_of_command in done] == [0, 0, 0, 0], [
        result_of_command.stderr for result_of_command in done
    ]
    assert "does not fit" not in done[0].stdout.splitlines()[0]


def test_commands_after_a_plan_that_fits_work_as_pasted(
    simplan: Simplan, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([str(scenario)], ["gpt2-124m", "--gpus", "2", "--tp", "1", "--global-batch-tokens", "64k"]):
        commands = commands_after(simplan("predict", *arguments).stdout)
        assert [command[0] for command in commands] == ["explain", "search", "trace"]
        done = [simplan(*command) for command in commands]
        assert [result_of_command.returncode for result_of_command in done] == [0, 0, 0], [
            result_of_command.stderr for result_of_command in done
        ]
    assert commands[1] == ["search", "gpt2-124m", "--num-devices", "2", "--global-batch-size", "64"]


def test_a_model_that_does_not_fit_keeps_its_batch_in_the_next_command(simplan: Simplan) -> None:
    """The batch that is assumed for a model depends on the plan."""
    result = simplan("predict", "llama3-8b", "--num-microbatches", "4", "--set", "plan.microbatch_size=2", "--json")
    before = json.loads(result.stdout)
    text = simplan("predict", "llama3-8b", "--num-microbatches", "4", "--set", "plan.microbatch_size=2").stdout
    after = json.loads(simplan(*commands_after(text)[0], "--json").stdout)
    batch = [document["inputs"]["training"]["global_batch_size"] for document in (before, after)]
    assert batch == [64, 64]
    assert (before["fits"], after["fits"]) == (False, True)
    best, *_ = before["fixes"]
    assert best["step_time_s"] == after["step_time_s"]
    assert best["peak_memory_gib"]["device"] == after["peak_memory_gib"]["device"]
    assert "fixes" not in after


def test_predict_json_is_one_document_and_the_file_is_the_same(
    simplan: Simplan, scenario: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    result = simplan("predict", scenario, "--json", "-o", file)
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document == json.loads(file.read_text())
    assert document["schema_version"] == 2
    low_s, high_s = document["step_time_interval_s"]
    assert low_s < document["step_time_s"] < high_s
    assert set(document["peak_memory_gib"]) == {"allocated", "reserved", "device"}
    for rank in document["ranks"]:
        assert sum(rank["split"].values()) == pytest.approx(document["step_time_s"])
    assert {"fits", "worst_rank", "tokens_per_s_per_device", "mfu"} <= document.keys()


def test_help_says_all_in_words_of_users(simplan: Simplan) -> None:
    listed = simplan("--help").stdout.partition("Commands:")[2]
    assert "..." not in listed, "what a command does fits on its line"
    for name in (line.split()[0] for line in listed.splitlines() if line):
        options = simplan(name, "--help").stdout.partition("Options:")[2]
        assert "range>" not in options, name
        assert "list[" not in options, name


REPLACED = re.compile(
    r"\b(messages?|exchanges?|products?|priced|goes? on|went|whole|told|says?|said|what|whether|how|whatever|catalogue"
    r"|how far off|furthest off|of its own|here|a core)\b",
    re.IGNORECASE,
)
"""Words of the glossary's list of words to replace."""
VERBS = {
    "Capture", "Check", "Draw", "Find", "List", "Measure", "Predict", "Print", "Run", "Serve", "Show", "Simulate",
    "Write",
}  # fmt: skip


def test_help_follows_the_style_guide() -> None:
    """Commands begin with an imperative verb; options are noun phrases."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        texts = [command.help or "", command.get_short_help_str(200)]
        assert all(text.split()[0] in VERBS for text in texts), name
        for parameter in command.params:
            text = parameter.help or ""
            assert text.endswith("."), (name, parameter.name)
            assert text.split()[0] not in VERBS, (name, parameter.name, text)
            texts.append(text)
        for text in texts:
            assert not REPLACED.search(text), (name, text)
            assert not PRIVATE_WORDS.search(text), (name, text)


def test_show_without_a_kind_names_them(simplan: Simplan) -> None:
    result = simplan("show")
    assert result.returncode == 2
    assert result.stderr.startswith("error: KIND: is missing; one of devices, links, clusters")


def test_every_command_that_prints_a_result_takes_json(simplan: Simplan) -> None:
    listed = simplan("--help").stdout.partition("Commands:")[2]
    commands = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert {"predict", "trace", "export", "dashboard"} <= set(commands)
    assert [name for name in commands if "--json" not in simplan(name, "--help").stdout] == ["report", "dashboard"]


EXPORTED = """\
name: four nodes
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: dgx-h100, num_nodes: 4}
training: {global_batch_size: 64}
plan: {dp_replicate: 32}
"""


@pytest.mark.parametrize("target", ["slurm", "kubernetes"])
def test_an_export_may_be_of_some_to_all_nodes(target: str, simplan: Simplan, tmp_path: Path) -> None:
    """With what such a run takes; pods that come back always go on from the newest checkpoint."""
    scenario = tmp_path / "four.yaml"
    scenario.write_text(EXPORTED)
    export = ("export", scenario, "--to", target, "--nnodes", "1:4")
    alone = simplan(*export, "--checkpoint-dir", "/kept")
    refused(alone, "each time counts as a restart; add --max-restarts K\n")
    written = simplan(*export, "--checkpoint-dir", "/kept", "--max-restarts", "2")
    assert "torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 2" in written.stdout
    assert ('"resume":true' in written.stdout) == (target == "kubernetes")
    assert says(written.stderr, "note: 3 nodes", "training.global_batch_size = 64")
    other = simplan("export", scenario, "--to", target, "--nnodes", "2:8")
    assert says(other.stderr, "--nnodes = 8: ", "4 nodes", "use --nnodes 4")


def test_target_is_said_if_it_was_named_otherwise(simplan: Simplan) -> None:
    export = ("export", "gpt2-124m", "--software", "megatron-core", "--gpus", "8", "--to")
    named = simplan(*export, "Megatron-Core")
    assert "--to Megatron-Core: target megatron" in named.stderr
    assert named.stdout == simplan(*export, "megatron").stdout
    refused(
        simplan(*export, "maxtext"), "--to = maxtext: is a framework for which nothing is written; targets: torchti"
    )
    refused(simplan(*export, "megatronn"), "--to = megatronn: is not known; did you mean megatron?")


@pytest.mark.parametrize("target", [name for name, target in formats().items() if target.export is not None])
def test_export_of_a_model_has_the_framework_of_its_target(target: str, simplan: Simplan) -> None:
    written = simplan("export", "llama3-8b", "--gpus", "8", "--to", target, "--json")
    assert written.returncode == 0, written.stderr
    profile = formats()[target].profile
    assert profile in ("", *catalog.names("software"))
    assert (f"--to {target}: software {profile}" in written.stderr) == bool(profile)


def test_a_trace_and_an_export_on_stdout_are_one_document(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = simplan("trace", scenario, "--json", "-o", file)
    assert json.loads(result.stdout) == json.loads(file.read_text())
    script = simplan("export", scenario, "--to", "slurm").stdout
    assert json.loads(simplan("export", scenario, "--to", "slurm", "--json").stdout)["text"] == script
    refused(simplan("trace", scenario), "give -o FILE, or --json to print the trace")


def test_trace_and_predict_write_the_same_trace(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    result = simplan("trace", scenario, "-o", first)
    assert (result.returncode, result.stdout) == (0, "")
    assert "perfetto" in result.stderr
    simplan("predict", scenario, "--trace", second)
    document = json.loads(first.read_text())
    assert document == json.loads(second.read_text())
    assert {event["pid"] for event in document["traceEvents"]} == {0, 1}
    assert {"X", "M", "s", "f", "C"} == {event["ph"] for event in document["traceEvents"]}
    last_us = max(e["ts"] + e["dur"] for e in document["traceEvents"] if e["ph"] == "X")
    assert last_us / 1e6 == pytest.approx(document["otherData"]["step_time_s"], rel=1e-6)


@pytest.mark.parametrize(
    "kind", ["devices", "links", "clusters", "models", "software", "schedules", "metrics", "expect"]
)
def test_show_lists_and_details(kind: str, simplan: Simplan) -> None:
    listed = json.loads(simplan("show", kind, "--json").stdout)["entries"]
    text = simplan("show", kind).stdout.splitlines()
    assert len(text) == len(listed) + 1
    name = listed[0]["name"]
    assert text[1].startswith(name)
    assert name in simplan("show", kind, name).stdout
    assert json.loads(simplan("show", kind, name, "--json").stdout)["entry"]


def test_schedule_may_say_its_order_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that was added without a word on its bubble is listed."""

    def mine() -> None:
        """All forwards."""

    monkeypatch.setattr("simplan.cli.listing.SCHEDULES", {"mine": mine})
    assert [(row["name"], row["order"]) for row in listing("schedules")] == [("mine", "All forwards.")]


def test_show_takes_a_singular_and_leads_from_a_key_to_its_section(simplan: Simplan) -> None:
    assert simplan("show", "device").stdout == simplan("show", "devices").stdout
    assert simplan("show", "schedule", "1f1b").stdout == simplan("show", "schedules", "1f1b").stdout
    for kind, section in (("precision", "training"), ("recompute", "plan")):
        refused(simplan("show", kind), f"KIND = {kind}: is not something to show; run `simplan show {section}`")
    assert "adamw" in simplan("show", "training").stdout


def test_show_scenario_ends_with_a_file_that_works(simplan: Simplan, tmp_path: Path) -> None:
    text = simplan("show", "scenario").stdout
    for section in ("name", "model", "cluster", "training", "software", "plan", "search", "expect"):
        assert f"\n{section} " in text
    file = tmp_path / "minimal.yaml"
    file.write_text(text.partition("Minimal scenario\n")[2])
    assert simplan("predict", file).returncode == 0


def test_show_expect_has_keys_and_metrics(simplan: Simplan) -> None:
    rows = {row["name"]: row for row in json.loads(simplan("show", "expect", "--json").stdout)["entries"]}
    assert {"metric", "value", "min", "max", "rel_tol", "abs_tol", "why", *METRICS} == set(rows)
    assert (rows["step_time_s"]["unit"], rows["max"]["kind"]) == ("s", "key")


@pytest.mark.parametrize(("kind", "name"), [("model", "llama3-8b"), ("cluster", "dgx-h100")])
def test_show_of_an_entry_by_its_section_names_the_command(kind: str, name: str, simplan: Simplan) -> None:
    refused(simplan("show", kind, name), f"{kind} = {name}: is not known; run `simplan show {kind}s {name}`")


def test_show_models_names_aliases(simplan: Simplan) -> None:
    rows = {row["name"]: row["alias of"] for row in json.loads(simplan("show", "models", "--json").stdout)["entries"]}
    assert (rows["llama3.1-8b"], rows["llama3-8b"]) == ("llama3-8b", "")


def test_show_tells_sources(simplan: Simplan) -> None:
    text = simplan("show", "devices", "h100-sxm-80gb").stdout
    assert "Sources\n" in text
    assert "  memory_bytes: " in text


def test_check_passes_fails_and_refuses(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    assert simplan("check", tmp_path).returncode == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(scenario.read_text().replace("value: 8", "value: 9"))
    failed = simplan("check", tmp_path)
    assert failed.returncode == 1
    assert "line 7: num_microbatches is 8, expected 9" in failed.stdout
    bad = tmp_path / "sub" / "bad.yml"
    bad.parent.mkdir()
    bad.write_text("nothing: here\n")
    wrong_file = simplan("check", tmp_path, "--json")
    assert wrong_file.returncode == 2
    totals = json.loads(wrong_file.stdout)["totals"]
    assert (totals["passed"], totals["failed"]) == (3, 1)
    assert totals["error"] >= 1
    bad.rename(tmp_path / "bad.yml")
    bad.parent.rename(tmp_path / "published")
    (tmp_path / "bad.yml").rename(tmp_path / "published" / "runs.yaml")
    assert simplan("check", tmp_path).returncode == 1  # what others measured is no scenario
    (tmp_path / "published").rename(tmp_path / "heldout")
    assert simplan("check", tmp_path).returncode == 1


def test_check_writes_junit_and_annotations(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(scenario.read_text().replace("value: 8", "value: 9"))
    junit, summary = tmp_path / "junit.xml", tmp_path / "summary.md"
    result = simplan("check", scenario, "--junit", junit, "--github", env={"GITHUB_STEP_SUMMARY": str(summary)})
    assert says(result.stdout, f"::error file={scenario},line=7,", "num_microbatches::")
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert "| num_microbatches | failed |" in summary.read_text()


def test_check_skips_this_machine_without_a_calibration(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(here(scenario.read_text()))
    result = simplan("check", scenario)
    assert result.returncode == 0
    assert "skipped: needs this machine's calibration" in result.stdout


def test_bless_changes_blessed_values_only_and_nothing_else(simplan: Simplan, scenario: Path) -> None:
    wrong = scenario.read_text() + (
        "  # the next one is a regression value\n"
        "  - metric: activations_in_flight\n"
        "    value: 3   # blessed once\n"
        "    why: blessed\n"
    )
    wrong = wrong.replace("value: 8", "value: 9")
    scenario.write_bytes(wrong.replace("\n", "\r\n").encode())
    result = simplan("check", scenario, "--bless")
    assert result.returncode == 1, "the derived value stays wrong"
    assert f"{scenario}:10: activations_in_flight: 3 -> 8" in result.stderr
    assert "note: --bless writes numbers whose why begins with 'blessed'" in result.stderr, "why the other stays"
    assert scenario.read_bytes().decode() == wrong.replace("value: 3 ", "value: 8 ").replace("\n", "\r\n")


def test_bounds_that_bless_writes_hold_exactly_where_asked(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(scenario.read_text() + "  - {metric: step_time_s, value: 1, rel_tol: 0, why: blessed}\n")
    blessed, checked = simplan("check", scenario, "--bless"), simplan("check", scenario)
    assert "step_time_s: 1 -> " in blessed.stderr
    assert checked.returncode == 0, checked.stdout


def test_blessed_bounds_follow_the_prediction_both_ways(simplan: Simplan, scenario: Path) -> None:
    step_time_s = json.loads(simplan("predict", scenario, "--json").stdout)["step_time_s"]
    before = scenario.read_text()
    for bound in (0, 100):
        scenario.write_text(
            f"{before}  - {{metric: step_time_s, max: {bound}, rel_tol: 0.05, why: blessed}}\n"
            "  - {metric: step_time_s, max: 100, why: blessed}\n"
        )
        assert simplan("check", scenario, "--bless").returncode == 0
        lines = scenario.read_text().splitlines()[-2:]
        assert lines[1] == "  - {metric: step_time_s, max: 100, why: blessed}", "a limit is no record"
        assert float(lines[0].partition("max: ")[2].partition(",")[0]) == pytest.approx(step_time_s)


@pytest.mark.parametrize(
    ("way", "command", "words"),
    [("{1} - < {0}", "draw", "small: one step"), ("{1} <(cat {0})", "export --to slurm", "torchrun")],
)
def test_a_scenario_may_come_through_a_pipe(
    way: str, command: str, words: str, scenario: Path, environment: dict[str, str]
) -> None:
    result = bash(way.format(scenario, f"{sys.executable} -m simplan {command}"), environment)
    assert result.stderr == ""
    assert words in result.stdout


@pytest.mark.parametrize(("way", "named"), [("cat {0} | {1} -", "-"), ("{1} <(cat {0})", "FILE")])
def test_the_next_commands_name_the_scenario_as_it_can_be_read(
    way: str, named: str, scenario: Path, environment: dict[str, str]
) -> None:
    command = way.format(scenario, f"{sys.executable} -m simplan predict")
    result = bash(command, environment)
    assert f"\n  simplan trace {named} -o trace.json\n" in result.stdout


def test_files_named_by_a_scenario_of_a_pipe_are_where_the_command_runs(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    config = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scenario = (
        "model: {hf_config: config.json, seq_len: 32}\ncluster: {preset: dgx-h100, num_devices: 1}\n"
        "training: {global_batch_size: 1}\nplan: {}\n"
    )
    command = [sys.executable, "-m", "simplan", "predict", "-"]
    result = subprocess.run(
        command, input=scenario, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_prediction_as_text_imports_no_compiler_and_no_other_command(
    scenario: Path, environment: dict[str, str]
) -> None:
    unused = ["numba", "simplan.search.api", "simplan.cli.execute", "simplan.interop.frameworks.megatron"]
    code = f"import sys; from simplan.cli import main; main(['predict', {str(scenario)!r}]); "
    code += f"print(sys.modules.keys() & {set(unused)!r}, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "step time" in result.stdout
    assert result.stderr == "set()\n"


def test_check_reads_a_pipe_once(scenario: Path, environment: dict[str, str]) -> None:
    check = f"{sys.executable} -m simplan check"
    result = bash(f"{check} <(cat {scenario})", environment)
    assert (result.returncode, result.stderr) == (0, "")
    blessing = bash(f"cat {scenario} | {check} --bless -", environment)
    refused(blessing, "is not a file that --bless can write to; save it\n")


def test_a_reader_that_goes_away_is_no_error(scenario: Path, environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m simplan predict {scenario} --json | head -c 10; exit ${{PIPESTATUS[0]}}"
    result = bash(command, environment)
    assert (result.returncode, result.stderr) == (0, "")


def test_without_torch_predicting_works_and_running_names_the_extra(
    new_simplan: Simplan, scenario: Path, tmp_path: Path
) -> None:
    # an interpreter start-up file that hides torch, as on a machine that never installed it
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    hidden = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "hide"), str(Path(__file__).resolve().parents[2])])}
    assert new_simplan("predict", scenario, env=hidden).returncode == 0
    for args in (("calibrate",), ("demo", "-o", tmp_path / "demo")):
        refused(new_simplan(*args, env=hidden), 'pip install "simplan[executor]"')


def test_a_bug_is_a_sentence_too(new_simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "break").mkdir()
    (tmp_path / "break" / "sitecustomize.py").write_text(
        "import simplan.scenario.source as s\ndef broken(*a, **k): raise TypeError('oops')\ns.read_source = broken\n"
    )
    broken = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "break"), str(Path(__file__).resolve().parents[2])])}
    result = new_simplan("predict", scenario, env=broken)
    assert result.returncode == 70
    assert "Traceback" not in result.stderr
    assert "this is a bug of simplan (TypeError: oops)" in result.stderr


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ("dgx-h100", "cannot be run: the executor runs plain torch"),
        (
            "this-machine",
            "torch ... this-machine ... not modeled ... use torch ... dgx-h100, num_devices: 1}",
        ),
    ],
)
def test_run_refuses_software_that_it_does_not_run(
    simplan: Simplan, tmp_path: Path, cluster: str, sentence: str
) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(
        f"model: {{preset: bert-tiny, seq_len: 32}}\ncluster: {{preset: {cluster}, num_devices: 1}}\n"
        "training: {global_batch_size: 2}\nplan: {dp_replicate: 1}\nsoftware: megatron-core\n"
    )
    refused(simplan("run", path), f"software = megatron-core: ... {sentence}")


def test_compare_with_what_a_log_says(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    predicted, log = tmp_path / "predicted.json", tmp_path / "log.yaml"
    assert simplan("predict", scenario, "-o", predicted).returncode == 0
    log.write_text("step_times_s: [0.2, 0.2, 0.2]\npeak_device_gib: [1.5, 1.25]\n")
    document = json.loads(simplan("compare", predicted, log, "--json").stdout)
    assert document["kind"] == "logged_comparison"
    assert [row["measured"] for row in document["rows"]] == [0.2, 1.5]
    assert "no term's uncertainty explains the difference of -" in simplan("compare", predicted, log).stdout
    plotted = simplan("compare", predicted, log, "--plot", tmp_path / "steps.svg")
    refused(plotted, "--plot: draws a timeline, and a log has none")
    compared = simplan("compare", predicted, log, "--baseline", predicted)
    refused(compared, "--baseline: compares losses, and a log has none")
    log.write_text("step_times_s: [0.2]\npeak_device_gib: [1, 2, 3]\n")
    said = f"error: {log}: peak_device_gib: has 3 numbers, and the predicted job has 2 ranks"
    refused(simplan("compare", predicted, log), said)
