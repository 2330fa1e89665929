"""What is refused before and while nodes meet: one sentence on every node."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simplan.cli.execute import RunOptions
from simplan.cli.nodes import Meeting, nodes_of
from simplan.program.checkpoint import Checkpointing
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
