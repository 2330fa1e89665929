"""SCENARIO as a model with options, ``--set``, ``--write-scenario`` and ``simplan init``, as a user types them."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.calls import Simplan, refused
from tests.support.problems import says

ONE_LINE = (
    *("llama3-8b", "--cluster", "dgx-h100", "--num-nodes", "8", "--tp", "8", "--dp-shard", "8"),
    *("--global-batch-size", "128"),
)


def test_one_line_predicts_and_writes_its_scenario(simplan: Simplan, tmp_path: Path) -> None:
    first = simplan("predict", *ONE_LINE, "--json", "--write-scenario", "one.yaml")
    assert first.stderr == "wrote one.yaml\n"
    document = json.loads(first.stdout)
    again = json.loads(simplan("predict", "one.yaml", "--json").stdout)
    assert again["step_time_s"] == document["step_time_s"]
    assert document["assumptions"][0].startswith("not given, so assumed: model.seq_len = 8192")
    assert document["links"]["inter_node"] == {
        "name": "network-400gbit",
        "bytes_per_s_per_device": 50e9,
        "bytes_per_s_per_node": 400e9,
        "nics_per_node": 8,
    }
    itself = simplan("predict", "one.yaml", "--tp", "4", "--dp-shard", "16", "--write-scenario", "one.yaml")
    refused(itself, "--write-scenario = one.yaml: is SCENARIO itself")


@pytest.mark.slow
def test_an_assumed_plan_that_waits_for_the_network_names_the_search(simplan: Simplan) -> None:
    cluster = ["--device", "rtx-4090", "--gpus-per-node", "2", "--num-nodes", "2", "--gbit-per-node", "5"]
    job = ["llama3.2-1b", *cluster, "--seq-len", "512"]
    text = simplan("predict", *job).stdout
    _, warning, command, *_ = text.splitlines()
    share = float(warning.partition("and ")[2].split(" %")[0])
    assert says(warning, "assumed", f"{share} %", "exposed communication")
    [row] = [line for line in text.splitlines() if line.startswith("  0-3 ")][:1]
    assert any(f" {percent} %" in row for percent in (int(share), int(share) + 1))
    assert share > 50
    best = json.loads(simplan(*shlex.split(command)[1:], "--json").stdout)["best"]
    predicted = json.loads(simplan("predict", *job, "--json").stdout)
    assert best["step_time_s"] < 0.7 * predicted["step_time_s"]
    assert says(text, "inter-node network (InfiniBand or RoCE): 5 Gbit/s", "2 devices")
    for words in ([*job, "--dp-shard", "4"], [*job, "--tp", "2"], ["llama3.2-1b", "--gpus", "8"]):
        assert "was assumed" not in simplan("predict", *words).stdout


def test_suggested_commands_have_the_options(simplan: Simplan) -> None:
    result = simplan("predict", "gpt2-124m", "--gpus", "2", "--set", "plan.recompute=full")
    assert "links        intra-node nvlink4, 450 GB/s per device\n" in result.stdout
    command = result.stdout.partition("\nNext\n")[2].split("\n")[0]
    assert shlex.split(command) == [
        "simplan",
        "explain",
        "gpt2-124m",
        "--num-devices",
        "2",
        "--set",
        "plan.recompute=full",
    ]
    assert simplan(*shlex.split(command)[1:]).returncode == 0


def test_too_large_plan_suggests_a_search_that_works(simplan: Simplan) -> None:
    result = simplan("predict", "llama3-8b", "--gpus", "2", "--dp-replicate", "2")
    assert "does not fit" in result.stdout.splitlines()[0]
    commands = [line.strip() for line in result.stdout.partition("\nNext\n")[2].splitlines()]
    search = next(command for command in commands if command.startswith("simplan search"))
    assert simplan(*shlex.split(search)[1:], "--tp", "2", "--cp", "1").returncode in (0, 3)  # less than the whole space


def test_search_takes_options_as_ranges(simplan: Simplan) -> None:
    result = simplan(
        "search",
        "llama3.2-1b",
        *["--gpus", "2", "--global-batch-size", "4", "--tp", "2", "--seq-len", "512", "--json"],
    )
    document = json.loads(result.stdout)
    assert {plan["plan"]["tp"] for plan in document["ranked"]} == {2}
    assert document["inputs"]["search"]["tp"] == [2]
    assert document["links"]["intra_node"]["bytes_per_s_per_device"] == 450e9
    refused(simplan("search", "gpt2-124m", "--set", "plan.tp=2"), "plan.tp: is about one plan", "set search.tp")
    later = "set plan.grad_dtype in the scenario that --save-plan writes, as a search does not vary it"
    refused(simplan("search", "gpt2-124m", "--set", "plan.grad_dtype=bf16"), later)
    refused(simplan("search", "gpt2-124m", "--num-microbatches", "2"), "--num-microbatches = 2: is chosen by a search")


def test_typed_names_are_those_of_the_catalog_in_results(simplan: Simplan) -> None:
    typed = ("meta-llama/Llama-3.2-1B-Instruct", "--cluster", "2x DGX H100", "--software", "FSDP2", "--tp", "2")
    text = simplan("predict", *typed).stdout
    assert "- 2x DGX H100: cluster dgx-h100, 2 nodes\n" in text
    named = "llama3.2-1b --cluster dgx-h100 --num-nodes 2 --software torch --tp 2"
    assert f"simplan explain {named}\n" in text
    typed_result, same = (json.loads(simplan("predict", *words, "--json").stdout) for words in (typed, named.split()))
    assert typed_result.pop("assumptions") != same.pop("assumptions")
    assert typed_result == same
    assert simplan("show", "models", "Llama 3 70B").stdout == simplan("show", "models", "llama3-70b").stdout


def test_devices_are_named_with_their_number(simplan: Simplan) -> None:
    named = simplan("predict", "gpt2-124m", "--gpus", "4x A100 40 GB").stdout
    written = ("gpt2-124m", "--cluster", "dgx-a100-40gb", "--num-devices", "4")
    assert f"simplan explain {' '.join(written)}\n" in named
    assert "- 4x A100 40 GB: cluster dgx-a100-40gb, 4 devices\n" in named
    assert named.splitlines()[2] == simplan("predict", *written).stdout.splitlines()[2]
    refused(simplan("predict", "gpt2-124m", "--gpus", "8x A100"), "--gpus = 8x A100: may be several clusters; name one")
    refused(
        simplan("predict", "gpt2-124m", "--cluster", "dgx-h100", "--gpus", "8x H100"), "does so, too; give a number"
    )


def test_plan_of_which_nothing_is_given_is_an_assumed_one(simplan: Simplan) -> None:
    on_one_card = ("mistral-7b", "--device", "4090", "--gpus", "1", "--lora-rank", "16", "--seq-len", "2048")
    text = simplan("predict", *on_one_card).stdout
    assert text.startswith("mistral-7b: the assumed plan likely does not fit: ")
    assert "The plan was assumed, and other plans may fit. Find them:" in text
    assert not simplan("predict", *on_one_card, "--microbatch-size", "1").stdout.startswith(
        "mistral-7b: the assumed plan "
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--gpus many", 'whole ... 1 ... write ... e.g. "8x A100 80GB"'),
        ("--gpus -3", "-3 is no whole number from 1 on"),
        ("--tp 3", "gpt2-124m: --tp = 3: must divide model.vocab_size = 50257"),
        ("--recompute ful", 'gpt2-124m: --recompute = "ful": ... known ... did you mean full?'),
        ("--cluster dgx-h10", "gpt2-124m: --cluster = dgx-h10: ... did you mean dgx-h100?"),
        ("--cluster A100", "gpt2-124m: --cluster = A100: ... name ... dgx-a100-40gb"),
        ("--set plan.tp", "--set = plan.tp: must be KEY=VALUE; write e.g. --set plan.tp=4"),
        ("--set plan.tp=x", 'gpt2-124m: plan.tp = "x": must be a whole number'),
        ("--set plan.recomput=full", "gpt2-124m: plan.recomput: ... known ... did you mean recompute"),
        ("--tp 2 --set plan.tp=4", "plan.tp: is given twice, also with --tp; give one of the two"),
        ("--set plan.tp=4 --set plan.tp=2", "plan.tp: ... twice ... --set; give"),
    ],
)
def test_errors_name_options_as_typed(simplan: Simplan, arguments: str, sentence: str) -> None:
    result = simplan("predict", "gpt2-124m", *arguments.split())
    refused(result, sentence)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            "--global-batch",
            "--global-batch ... --global-batch-size, --global-batch-tokens)",
        ),
        ("--tensor-model-parallel-size", "No such option: --tensor-model-parallel-size; write --tp\n"),
        ("--micro-batch-size", "No such option: --micro-batch-size; write --microbatch-size\n"),
        ("--gradient-accumulation-steps", "; write --num-microbatches\n"),
        ("--zero-stage", "No such option: --zero-stage; write --set plan.zero_stage=VALUE\n"),
        ("--zzz", "No such option: --zzz\n"),
    ],
)
def test_unknown_options_lead_to_those_that_there_are(simplan: Simplan, option: str, sentence: str) -> None:
    refused(simplan("predict", "gpt2-124m", option, "8"), sentence)
    if "write" in sentence:
        refused(simplan("show", "models", option, "8"), f"No such option: {option}")
        assert "write" not in simplan("show", "models", option, "8").stderr, "that command has no such option"


def test_a_report_names_the_commands_that_take_its_scenario(simplan: Simplan) -> None:
    sentence = (
        "No such option: {0}: ... run `simplan predict SCENARIO {0} VALUE -o plan.json; simplan report plan.json`"
    )
    for option in ("--cluster", "--gpus", "--set"):
        refused(simplan("report", "gpt2-124m", option, "8"), sentence.format(option))
    refused(simplan("report", "gpt2-124m", "--zzz"), "No such option: --zzz\n")


def test_tokens_of_a_step_are_an_option(simplan: Simplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("llama3-8b", "--gpus", "16", "--global-batch-tokens", "1M", "--write-scenario", "plan.yaml")
    assert "  training     128 sequences (1,048,576 tokens) per step" in simplan("predict", *options).stdout
    written = Path("plan.yaml").read_text()
    assert says(written, "global_batch_size: 128  # assumed: 1,048,576 tokens", "multiples of 16")
    assert "--global-batch-tokens 1000000" in written
    refused(simplan("predict", "gpt2-124m", "--global-batch-tokens", "many"), "many is no number; write e.g. 100B")


def test_nodes_that_are_no_preset_have_options(simplan: Simplan) -> None:
    options = ["--device", "rtx-4090", "--gpus-per-node", "4", "--num-nodes", "2", "--gbit-per-node", "10"]
    links = json.loads(simplan("predict", "gpt2-124m", *options, "--json").stdout)["links"]
    assert links["inter_node"]["bytes_per_s_per_device"] == 10e9 / 8 / 4
    predicted = json.loads(simplan("predict", "gpt2-124m", "--device", "l4", "--gpus", "4", "--json").stdout)
    assert predicted["inputs"]["cluster"]["devices_per_node"] == 4
    refused(simplan("predict", "gpt2-124m", "--device", "l4", "--gpus", "9"), "cluster.devices_per_node: is missing")


def test_other_commands_take_a_model_and_set(simplan: Simplan) -> None:
    assert "Links\n  intra-node nvlink4" in simplan("explain", "gpt2-124m").stdout
    both = simplan("explain", "gpt2-124m", "gpt2-355m", "--gpus", "2")
    assert both.stdout.startswith("gpt2-124m -> gpt2-355m: a step ")
    assert simplan("draw", "gpt2-124m", "--pp", "2", "--gpus", "2").returncode == 0
    exported = simplan("export", "gpt2-124m", "--to", "slurm", "--set", "cluster.num_nodes=2")
    assert "torchrun --nnodes 2 --nproc-per-node 8" in exported.stdout


def test_init_writes_a_scenario_and_names_the_next_command(simplan: Simplan, tmp_path: Path) -> None:
    refused(simplan("init"), "SCENARIO: is missing; name a model, e.g. simplan init llama3-8b")
    result = simplan("init", "gpt2-124m", "--gpus", "2", "-o", "my plan.yaml")
    assert result.stdout.startswith("wrote my plan.yaml\n")
    command = result.stdout.partition("\nNext\n")[2].split("\n")[0]
    assert command == "  simplan predict 'my plan.yaml'"
    assert simplan(*shlex.split(command)[1:]).returncode == 0
    refused(simplan("init", "gpt2-124m", "-o", "my plan.yaml"), "exists; name another file, or give --force")
    assert "global_batch_size: 2 " in (tmp_path / "my plan.yaml").read_text()
    written = json.loads(simplan("init", "gpt2-124m", "--search", "--force", "--json", "-o", "my plan.yaml").stdout)
    assert written["scenario"]["search"] == {}
    assert simplan("search", "my plan.yaml").returncode == 0


def test_init_asks_on_a_terminal(tmp_path: Path, environment: dict[str, str]) -> None:
    """A wrong answer is asked for once more; an empty one takes the default."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "simplan", "init"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    os.write(ours, b"gpt2-12m\ngpt2-124m\n\n2\n32\nn\n")
    said = b""
    while b"Next" not in said:
        said += os.read(ours, 4096)
    assert process.wait(timeout=600) == 0
    os.close(ours)
    assert b"did you mean gpt2-124m" in said
    written = (tmp_path / "scenario.yaml").read_text()
    for line in ("  preset: gpt2-124m", "  preset: dgx-h100", "  num_nodes: 2", "  global_batch_size: 32"):
        assert f"{line}\n" in written
    assert "\nplan:" in written
