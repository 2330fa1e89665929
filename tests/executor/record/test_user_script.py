"""A user's own script, started as its user does: recorded, and compared with the prediction of its captured model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import says

ROOT = Path(__file__).resolve().parents[3]
MODEL = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(32, 256), nn.Linear(256, 8)
        self.blocks = nn.ModuleList(Block(256) for _ in range(4))

    def forward(self, x, y):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)

def batch(number):
    return {"x": torch.ones(number, 64, 32), "y": torch.ones(number, 64, 8)}
"""
TRAIN = """\
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from executor.record import record
from model import Net, batch

dist.init_process_group("gloo")
torch.set_num_threads(1)
module = Net()
if sys.argv[1] == "fsdp":
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
elif sys.argv[1] != "one":
    module = DistributedDataParallel(module)
optimizer = torch.optim.AdamW(module.parameters())
num_steps = 8 if sys.argv[1] != "uneven" else 8 + dist.get_rank()
with record("measurement.json", samples_per_step=16, module=module, optimizer=optimizer) as run:
    for _ in range(num_steps):
        if num_steps == 8 or run.num_steps < 8:
            module(**batch(16 // dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.step()
dist.destroy_process_group()
"""
SCENARIO = """\
name: net
model: {file: model.json}
cluster: {preset: dgx-h100, num_devices: RANKS}
training: {global_batch_size: 16, precision: fp32, optimizer: adamw}
software: {preset: torch}
plan: {PLAN}
"""
NUM_BYTES = 4 * ((32 + 1) * 256 + (256 + 1) * 8 + 4 * (2 * 256 + (256 + 1) * 1024 + (1024 + 1) * 256))
"""Parameters of the model, counted by hand."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's files, and the capture of the model."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(TRAIN)
    call(folder, "simplan", "capture", "model:Net", "--inputs", "model:batch", "-o", "model.json")
    return folder


def call(folder: Path, *command: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", *command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    return done


def train(folder: Path, way: str, *, fails: bool = False) -> str:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1" if way == "one" else "2")
    return call(folder, *torchrun, "train.py", way, fails=fails).stderr


# Gloo's threads free what they sent when they come to it: FSDP's peak varies by about two units of the model.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "plan", "peak_error"),
    [
        ("ddp", "dp_replicate: 2, microbatch_size: 8", 0.03),
        ("one", "microbatch_size: 16", 0.01),
        ("fsdp", "dp_shard: 2, microbatch_size: 8", 0.15),
    ],
)
def test_recording_of_ranks_is_compared_with_its_prediction(
    way: str, plan: str, peak_error: float, folder: Path
) -> None:
    """States and communication to the byte, as counted by hand; times of another device are left out."""
    num_ranks = 1 if way == "one" else 2
    (folder / "net.yaml").write_text(SCENARIO.replace("PLAN", plan).replace("RANKS", str(num_ranks)))
    assert "median of 5 steps" in train(folder, way)
    recording = json.loads((folder / "measurement.json").read_text())
    assert [len(rank["step_times_s"]) for rank in recording["ranks"]] == [5] * num_ranks
    compared = call(folder, "simplan", "compare", "net.yaml", "measurement.json", "--json")
    comparison: dict[str, Any] = json.loads(compared.stdout)
    rows = {row["name"].split(", rank")[0]: row for row in comparison["rows"]}
    assert abs(rows.pop("peak memory, allocated")["signed_error"]) < peak_error
    held = NUM_BYTES / 2 if way == "fsdp" else NUM_BYTES
    moved: dict[str, dict[str, float | None]] = {
        "one": {},
        "ddp": {"all-reduce of 2 ranks": NUM_BYTES},
        # all but the last block's parameters are gathered again in backward
        "fsdp": {"all-gather of 2 ranks": None, "reduce-scatter of 2 ranks": NUM_BYTES},
    }
    wanted: dict[str, float | None] = {"parameters": held, "optimizer states": 2 * held, **moved[way]}
    assert rows.keys() == wanted.keys()
    for name, row in rows.items():
        assert row["signed_error"] == pytest.approx(0, abs=1e-4), name
        if (num_bytes := wanted[name]) is not None:
            assert row["measured"] * 2**30 == pytest.approx(num_bytes, rel=1e-4), name
    notes = " ".join(comparison["notes"])
    assert says(notes, "step time, throughput and device memory", "not compared", "recorded on ")
    assert " are predicted" not in notes, "as many collectives"


@pytest.mark.slow
def test_ranks_with_different_numbers_of_steps_are_refused(folder: Path) -> None:
    (folder / "measurement.json").unlink(missing_ok=True)
    said = train(folder, "uneven", fails=True)
    rule = "ranks recorded different numbers of steps, 8 on rank 0 and 9 on rank 1; call step() once after every update"
    assert rule in said
    assert not (folder / "measurement.json").exists()
