"""What is refused before and while nodes meet: one sentence on every node."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simplan.cli.execute import RunOptions
from simplan.cli.fewer_nodes import scenarios_on_fewer
from simplan.cli.nodes import Meeting, nodes_of, numbers_of_nodes
from simplan.errors import SpecError
from simplan.program.checkpoint import Checkpointing
from simplan.program.nodes import Nodes
from simplan.scenario import load_scenario

Simplan = Callable[..., "subprocess.CompletedProcess[str]"]

SCENARIO = """\
name: two nodes
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: this-machine, num_devices: 2, num_nodes: 2, inter_link_gbit_per_device: 10}
training: {global_batch_size: 4, precision: fp32}
plan: {dp_replicate: 2}
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    file = tmp_path / "two.yaml"
    file.write_text(SCENARIO)
    return file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--nodes = 1: the scenario's cluster has 2 nodes; give --nodes 2 --rdzv HOST:PORT on each of them"),
        (["--nodes", "3", "--rdzv", "a:1"], "--nodes = 3: must divide the 2 devices of the scenario's cluster"),
        (["--nodes", "2"], "--rdzv: must say where the nodes meet; give a name of node 0 and a free port there"),
        (["--nodes", "2", "--rdzv", "a"], "--rdzv = a: must be HOST:PORT; give a name of node 0 and a free port there"),
        (["--nodes", "2", "--rdzv", "a:1", "--node-rank", "2"], "--node-rank = 2: must be less than --nodes = 2"),
        (["--rdzv", "a:1"], "--nodes = 1: the scenario's cluster has 2 nodes"),
    ],
)
def test_options_that_do_not_fit(options: list[str], sentence: str, simplan: Simplan, two: Path) -> None:
    result = simplan("run", two, *options)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rdzv", "a:1"], "--rdzv = a:1: is about several nodes, and --nodes is 1; give --nodes too"),
        (["--nodes", "2"], "--rdzv: must say where the nodes meet; give a name of node 0 and a free port there"),
        (
            ["--nodes", "2", "--rdzv", "a:1", "--dtype", "bf16"],
            "--dtype = bf16: is about kernels, and across nodes only",
        ),
    ],
)
def test_calibration_options_that_do_not_fit(options: list[str], sentence: str, simplan: Simplan) -> None:
    result = simplan("calibrate", *options)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_scenarios_are_not_timed_across_nodes(simplan: Simplan, two: Path) -> None:
    result = simplan("calibrate", two, "--nodes", "2", "--rdzv", "a:1")
    assert result.returncode == 2
    assert "is not timed across nodes: collectives and messages are, for any scenario; leave it out" in result.stderr


def test_nobody_at_the_endpoint(simplan: Simplan, two: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    result = simplan("run", two, "--nodes", "2", "--rdzv", endpoint, "--node-rank", "1", "--join-timeout", "1")
    assert result.returncode == 4
    assert f"error: node 0 did not answer at {endpoint} within 1 s; start the same command there" in result.stderr


@pytest.mark.slow
def test_a_calibration_that_node_0_refuses_ends_all_nodes(tmp_path: Path, two: Path) -> None:
    """Node 0 alone reads it, before it starts anything; the other one is told and says the same."""
    (tmp_path / "bad.json").write_text("{}")
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "simplan", "run", str(two), "--nodes", "2", "--rdzv", endpoint]
    started = [
        subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        for options in (["--node-rank", "0", "--calibration", str(tmp_path / "bad.json")], ["--node-rank", "1"])
    ]
    first, second = (process.communicate(timeout=120)[1].splitlines() for process in started)
    assert [process.returncode for process in started] == [2, 2]
    assert first[0] == "telling the other nodes that nothing is run"
    assert second[0] == f"joining node 0 at {endpoint}"
    assert first[1:] == second[1:]
    assert "bad.json" in first[1]


def test_nodes_are_asked_the_same_about_checkpoints(two: Path) -> None:
    """What a node keeps and goes on from is part of what all must agree on."""
    scenario, meeting = load_scenario(two), Meeting(num_nodes=2, rdzv="a:1", node_rank=1)

    def asked(checkpointing: Checkpointing | None) -> dict[str, str]:
        nodes = nodes_of(scenario, RunOptions(checkpointing=checkpointing), meeting)
        assert nodes is not None
        return nodes.asked

    kept = Checkpointing(folder="/kept")
    changes: dict[str, dict[str, Any]] = {
        "--checkpoint-dir": {"folder": "/elsewhere"},
        "--checkpoint-every": {"every": 3},
        "--restarts": {"max_restarts": 2},
        "--resume": {"resume": True},
    }
    for flag, change in changes.items():
        differing = {key for key, text in asked(kept.model_copy(update=change)).items() if text != asked(kept)[key]}
        assert differing == {flag}
    assert asked(None)["--checkpoint-dir"] == "None"


def test_numbers_of_nodes() -> None:
    assert [numbers_of_nodes(text) for text in ("4", "2:4", "4:4")] == [(None, 4), (2, 4), (None, 4)]
    for wrong in ("0", "3:2", "0:2", "2:", "two", "1:1:2"):
        with pytest.raises(SpecError, match=f"^--nodes = {wrong}: must be a number of nodes, or MIN:MAX with MIN from"):
            numbers_of_nodes(wrong)


def test_a_run_that_is_to_go_on_without_a_node_must_be_able_to(two: Path) -> None:
    """It needs a checkpoint, a restart, and a plan for fewer nodes."""
    kept = Checkpointing(folder="/kept", max_restarts=1)
    meeting = Meeting(num_nodes=2, rdzv="a:1", node_rank=1, min_nodes=1)

    def asked(file: Path, checkpointing: Checkpointing | None) -> Nodes:
        nodes = nodes_of(load_scenario(file), RunOptions(checkpointing=checkpointing), meeting)
        assert nodes is not None
        return nodes

    assert (asked(two, kept).min_nodes, asked(two, kept).asked["--nodes"]) == (1, "1:2")
    rule = "--nodes = 1:2: goes on without lost nodes from a checkpoint, and each time counts as a restart; add "
    with pytest.raises(SpecError, match=f"^{rule}--checkpoint-dir DIR$"):
        asked(two, None)
    with pytest.raises(SpecError, match=f"^{rule}--restarts K$"):
        asked(two, kept.model_copy(update={"max_restarts": 0}))
    assert asked(two, kept).last_call_timeout_s == 30, "as torchrun's last_call_timeout"
    split = two.with_name("split.yaml")
    split.write_text(SCENARIO.replace("dp_replicate", "pp"))
    cannot = r"1 node cannot go on with this plan: plan: a replica of the model takes 2 devices \(pp 2\), and 1 are no"
    with pytest.raises(SpecError, match=cannot):
        asked(split, kept)


def test_the_last_call_is_about_runs_that_may_begin_with_fewer_nodes(two: Path) -> None:
    """All nodes must be told the same: they wait for as long as node 0 may."""
    scenario = load_scenario(two)
    options = RunOptions(checkpointing=Checkpointing(folder="/kept", max_restarts=1))
    meeting = Meeting(num_nodes=2, rdzv="a:1", node_rank=1, min_nodes=1, last_call_timeout_s=5.0)
    nodes = nodes_of(scenario, options, meeting)
    assert nodes is not None
    assert (nodes.last_call_timeout_s, nodes.asked["--last-call-timeout"]) == (5.0, "5")
    rule = "--last-call-timeout = 5: is about runs that may begin with fewer nodes; give --nodes MIN:MAX"
    for number, least in ((2, None), (1, None)):
        with pytest.raises(SpecError, match=f"^{rule}$"):
            nodes_of(scenario, options, replace(meeting, num_nodes=number, min_nodes=least))


def test_numbers_of_nodes_that_the_batch_does_not_divide_are_passed_over(two: Path) -> None:
    four = two.with_name("four.yaml")
    text = SCENARIO.replace("num_devices: 2, num_nodes: 2", "num_devices: 4, num_nodes: 4")
    four.write_text(text.replace("dp_replicate: 2", "dp_replicate: 4"))
    found, sentences = scenarios_on_fewer(load_scenario(four), 1)
    assert {number: scenario.job.plan.dp for number, scenario in found.items()} == {2: 2, 1: 1}
    assert [scenario.job.num_microbatches for scenario in found.values()] == [2, 4]
    (sentence,) = sentences
    assert sentence.startswith("3 nodes could not go on, but fewer of them: training.global_batch_size = 4: must be a")
