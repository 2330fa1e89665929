"""``simplan capture``, and the commands that take its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import Simplan
from tests.support.problems import says

CODE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(4, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number):
    return (torch.zeros(number, 4),)


def loss(output):
    return output.square().mean()


def split(module, mesh):
    from torch.distributed.tensor import parallel

    plan = {"blocks.*.up": parallel.ColwiseParallel(), "blocks.*.down": parallel.RowwiseParallel()}
    parallel.parallelize_module(module, mesh, plan)
"""
REFUSED = {
    ("--software", "megatron-core", "--dp-replicate", "2"): "megatron-core with modules of a user's own is not modeled",
    ("--precision", "fp8"): "--microbatch-size = 4: gives 4 tokens, and the gradients of weights in fp8",
    (
        "--tp",
        "4",
        "--num-devices",
        "4",
    ): "--tp = 4: was not captured: Model has tensor-parallel degrees 1 or 2; use one",
    ("--seq-len", "8"): "cannot go with file, whose sizes are those of its capture",
}
PLAN = ("--cluster", "dgx-h100", "--num-devices", "2", "--global-batch-size", "16", "--microbatch-size", "4")


def test_a_module_of_a_user_is_captured_and_predicted(simplan: Simplan, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    split = "--tensor-parallel", "2", "--tp-plan", "own:split"
    done = simplan("capture", "own:Model", "--inputs", "own:batch", "--loss", "own:loss", *split, "-o", "own.json")
    assert done.returncode == 0, done.stderr
    assert "1-2    blocks.0" in done.stdout
    shown = json.loads(simplan("show", "own.json", "--json").stdout)
    matrices = 4 * 16 + 2 * (2 * 16 * 64) + 16 * 2
    assert shown["num_parameters"] == matrices + 16 + 2 * (64 + 16) + 2
    assert shown["forward_flops"] == 2 * matrices
    assert [layer["module"] for layer in shown["layers"]] == ["", "blocks.0", "blocks.1", ""]
    (rank,) = shown["tensor_parallel"]
    assert (rank["degree"], rank["num_parameters"]) == (2, shown["num_parameters"] - 2 * (16 * 64 + 32))
    plan = json.loads(simplan("predict", "own.json", *PLAN, "--tp", "2", "--json").stdout)["inputs"]["plan"]
    assert (plan["tp"], plan["sequence_parallel"]) == (2, False)
    answer = json.loads(simplan("predict", "own.json", *PLAN, "--json").stdout)
    (tmp_path / "own.yaml").write_text(
        "model: {file: own.json}\ncluster: {preset: dgx-h100, num_devices: 2}\n"
        "training: {global_batch_size: 16}\nplan: {dp_shard: 2, microbatch_size: 4}\n"
    )
    again = json.loads(simplan("predict", "own.yaml", "--json").stdout)
    assert again["step_time_s"] == answer["step_time_s"] > 0
    assert answer["inputs"]["model"]["captured"]["factory"] == "own:Model"
    rehearsed = json.loads(simplan("rehearse", "own.yaml", "--fake", "--json").stdout)["comparison"]
    rows = {row["name"]: row["signed_error"] for row in (*rehearsed["peaks"], *rehearsed["categories"])}
    assert {"allocated", "parameters", "gradients", "optimizer_states", "activations"} <= rows.keys()
    assert abs(rows["allocated"]) < 0.05
    for options, said in REFUSED.items():
        refused = simplan("predict", "own.json", *PLAN, *options)
        assert refused.returncode == 2
        assert said in refused.stderr


CONFIG = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.slow
def test_a_config_without_a_family_is_captured_on_the_way(
    simplan: Simplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the second command has it from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    asked = ("tiny/config.json", "--seq-len", "16", "--cluster", "dgx-h100", "--num-devices", "4")
    first = simplan("predict", *asked, "--json")
    assert says(first.stderr, "note: ", "tiny", "transformers", "smollm3", "16 tokens")
    model = json.loads(first.stdout)["inputs"]["model"]
    assert (model["name"], model["seq_len"], model["num_hidden_layers"]) == ("tiny", 16, 4)
    again = simplan("search", *asked)
    assert again.returncode == 0, again.stderr
    assert "capturing" not in again.stderr


@pytest.mark.slow
def test_a_module_of_a_user_is_run(simplan: Simplan, tmp_path: Path) -> None:
    """Calibrated, run on two ranks, compared; and refused once its code has changed."""
    (tmp_path / "own.py").write_text(CODE)
    simplan("capture", "own:Model", "--inputs", "own:batch", "--loss", "own:loss", "-o", "own.json")
    (tmp_path / "own.yaml").write_text(
        "model: {file: own.json}\ncluster: {preset: this-machine, num_devices: 2}\n"
        "training: {global_batch_size: 16, precision: fp32}\nplan: {dp_replicate: 2, microbatch_size: 4}\n"
    )
    done = simplan("run", "own.yaml", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "note: runs own:Model, own:batch, own:loss" in done.stderr
    assert says(done.stdout, "actions, collectives and P2P sends", "exactly those predicted")
    (tmp_path / "own.py").write_text(f"{CODE}\n# changed\n")
    refused = simplan("run", "own.yaml", "--steps", "3")
    assert "was captured from other code than own:Model has now" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("own", "--inputs", "own:batch"), "SOURCE = own: ... module ... function"),
        (("own:Model",), "--inputs: is missing: forward needs arguments"),
        (("no.json",), "SOURCE = no.json: is no file"),
        (
            ("own:Model", "--inputs", "own:batch", "--tp-plan", "own:split"),
            "--tp-plan = own:split: splits a module over",
        ),
        (
            ("own:Model", "--inputs", "own:batch", "--tensor-parallel", "1"),
            "--tensor-parallel = 1: must be degrees from",
        ),
    ],
)
def test_code_that_cannot_be_captured_is_named(
    arguments: tuple[str, ...], said: str, simplan: Simplan, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(CODE)
    done = simplan("capture", *arguments, "-o", "own.json")
    assert done.returncode == 2
    assert says(done.stderr, said)
    assert not (tmp_path / "own.json").exists()


def test_a_file_of_something_else_is_no_captured_model(simplan: Simplan, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    done = simplan("show", "other.json")
    assert done.returncode == 2
    assert "is no captured model; write one: simplan capture" in done.stderr
