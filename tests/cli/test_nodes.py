"""What is refused before and while nodes meet: one sentence on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan.cli.execute import RunOptions, refuse_restarts
from simplan.cli.nodes import NodeRendezvous, nodes_of, numbers_of_nodes
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.elastic import RendezvousOptions
from simplan.scenario import load_scenario
from simplan.scenario.elastic import scenarios_on_fewer
from tests.cli.calls import Simplan, refused
from tests.hosts import free_port
from tests.support.problems import refuses, says

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


NOWHERE = "--rdzv-endpoint: must say where the nodes meet; give a name of one of the nodes and a free port there"
TWO, ON = ["--nnodes", "2"], ["--rdzv-endpoint", "a:1"]


@pytest.mark.parametrize(
    ("command", "options", "sentence"),
    [
        ("run", [], "--nnodes = 1: ... scenario's ... 2 ... give --nnodes 2 --rdzv-endpoint HOST:PORT"),
        ("run", ["--nnodes", "3", *ON], "--nnodes = 3: ... divide ... 2"),
        ("run", ["--nnodes", "2"], NOWHERE),
        ("run", [*TWO, "--rdzv-endpoint", "a"], "--rdzv-endpoint = a: must be HOST:PORT; give"),
        ("run", [*TWO, *ON, "--rdzv-conf", "timeout=3"], "--rdzv-conf = timeout=3: must be of join_timeout="),
        ("run", ON, "--nnodes = 1: the scenario's cluster has 2 nodes"),
        ("calibrate", ON, "--rdzv-endpoint = a:1: ... --nnodes is 1; give --nnodes"),
        ("calibrate", TWO, NOWHERE),
        ("calibrate", [*TWO, *ON, "--dtype", "bf16"], "--dtype = bf16: is about kernels, and across nodes only"),
    ],
)
def test_options_that_do_not_fit(command: str, options: list[str], sentence: str, simplan: Simplan, two: Path) -> None:
    result = simplan(command, *([two] if command == "run" else []), *options)
    refused(result, sentence)
    assert result.stderr.count("\n") == 1


def test_scenarios_are_not_timed_across_nodes(simplan: Simplan, two: Path) -> None:
    said = "is not timed across nodes: collectives and P2P sends are, for any scenario; leave it out"
    refused(simplan("calibrate", two, *TWO, *ON), said)


@pytest.mark.slow
def test_nobody_at_the_endpoint(simplan: Simplan, two: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    conf = "join_timeout=1,is_host=0"
    result = simplan("run", two, "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf)
    assert result.returncode == 4
    assert says(result.stderr, "error: no job", endpoint, "1 s", "the same command on 127.0.0.1")


@pytest.mark.slow
def test_nodes_are_asked_the_same_about_checkpoints(two: Path) -> None:
    """What a node keeps and goes on from is part of what all must agree on."""
    scenario, meeting = load_scenario(two), NodeRendezvous((2, 2), "a:1")

    def requested(checkpointing: Checkpointing | None) -> dict[str, str]:
        nodes = nodes_of(scenario, RunOptions(checkpointing=checkpointing), meeting)
        assert nodes is not None
        return nodes.requested

    kept = Checkpointing(folder="/kept")
    changes: dict[str, dict[str, Any]] = {
        "--checkpoint-dir": {"folder": "/elsewhere"},
        "--checkpoint-every": {"every": 3},
        "--max-restarts": {"max_restarts": 2},
        "--resume": {"resume": True},
    }
    for flag, change in changes.items():
        differing = {
            key for key, text in requested(kept.model_copy(update=change)).items() if text != requested(kept)[key]
        }
        assert differing == {flag}
    assert "--checkpoint-dir" not in requested(None)


def test_numbers_of_nodes() -> None:
    assert [numbers_of_nodes(text) for text in ("4", "2:4", "4:4")] == [(4, 4), (2, 4), (4, 4)]
    for wrong in ("0", "3:2", "0:2", "2:", "two", "1:1:2"):
        with refuses("--nnodes", wrong, rule="MIN:MAX"):
            numbers_of_nodes(wrong)


def test_a_run_that_is_to_go_on_without_a_node_must_be_able_to(two: Path) -> None:
    """It needs a checkpoint, a restart, and a plan for fewer nodes."""
    kept = Checkpointing(folder="/kept", max_restarts=1)
    meeting = NodeRendezvous((1, 2), "a:1")

    def requested(file: Path, checkpointing: Checkpointing | None) -> RendezvousOptions:
        nodes = nodes_of(load_scenario(file), RunOptions(checkpointing=checkpointing), meeting)
        assert nodes is not None
        return nodes

    assert (requested(two, kept).min_nodes, requested(two, kept).requested["--nnodes"]) == (1, "1:2")
    with refuses("--nnodes", "1:2", rule="each time counts as a restart", fix="add --checkpoint-dir DIR"):
        requested(two, None)
    with refuses("--nnodes", "1:2", rule="each time counts as a restart", fix="add --max-restarts K"):
        requested(two, kept.model_copy(update={"max_restarts": 0}))
    assert requested(two, kept).last_call_timeout_s == 30, "as torchrun's last_call_timeout"
    split = two.with_name("split.yaml")
    split.write_text(SCENARIO.replace("dp_replicate", "pp"))
    with refuses("--nnodes", rule="1 node cannot go on with this plan: plan: a replica of the model takes 2 devices"):
        requested(split, kept)


def test_torchruns_own_settings_of_the_rendezvous(two: Path) -> None:
    meeting = NodeRendezvous((2, 2), "a:1", "last_call_timeout=5,join_timeout=7.5")
    nodes = nodes_of(load_scenario(two), RunOptions(), meeting)
    assert nodes is not None
    assert (nodes.last_call_timeout_s, nodes.join_timeout_s, nodes.leads) == (5.0, 7.5, False)
    assert (nodes.endpoint, nodes.ranks_per_node) == ("a:1", 1)


def test_numbers_of_nodes_that_the_batch_does_not_divide_are_passed_over(two: Path) -> None:
    four = two.with_name("four.yaml")
    text = SCENARIO.replace("num_devices: 2, num_nodes: 2", "num_devices: 4, num_nodes: 4")
    four.write_text(text.replace("dp_replicate: 2", "dp_replicate: 4"))
    scenarios, sentences = scenarios_on_fewer(load_scenario(four), 1)
    assert {number: scenario.job.plan.dp for number, scenario in scenarios.items()} == {2: 2, 1: 1}
    assert [scenario.job.num_microbatches for scenario in scenarios.values()] == [2, 4]
    (sentence,) = sentences
    assert says(sentence, "3 nodes", "training.global_batch_size = 4: ")


def test_replicas_that_may_leave_need_neither_checkpoints_nor_fewer_nodes(two: Path) -> None:
    """They go on without restart, with as few as the plan says."""
    file = two.with_name("elastic.yaml")
    replication = "dp_replicate: 2, replication: {kind: diloco, inner_steps: 2, min_replicas: 1}"
    file.write_text(SCENARIO.replace("dp_replicate: 2", replication))
    scenario, options = load_scenario(file), RunOptions(replica_restarts=1)
    nodes = nodes_of(scenario, options, NodeRendezvous((2, 2), "a:1"))
    assert nodes is not None
    assert nodes.requested["--max-restarts"] == "1"
    refuse_restarts(scenario, options)
    with refuses("--nnodes", "1:2", rule="restarts with fewer nodes", fix="use --nnodes 2"):
        nodes_of(scenario, options, NodeRendezvous((1, 2), "a:1"))
    with refuses("--max-restarts", rule="needs a folder for checkpoints", fix="add --checkpoint-dir"):
        refuse_restarts(load_scenario(two), options)
