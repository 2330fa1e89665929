"""Words of an export about its plan, and about the settings that it leaves to its user."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.calls import Simplan
from tests.support.slow import slow_except

_JOB = """
name: two nodes
model: {{preset: {model}, seq_len: 2048}}
cluster: {{preset: dgx-h100, num_nodes: {nodes}}}
training: {{global_batch_size: 64, precision: bf16}}
software: {software}
plan: {{tp: {tp}, sequence_parallel: true, dp_shard: {shards}, zero_stage: {stage}, microbatch_size: 1}}
"""
_SOFTWARE = {"megatron": ("megatron-core", 1), "torchtitan": ("torchtitan", 3), "bridge": ("megatron-bridge", 1)}


def written(folder: Path, target: str, *, model: str = "llama3-8b", nodes: int = 2, tp: int = 4) -> Path:
    """Scenario for a target."""
    software, stage = _SOFTWARE.get(target, ("torch", 3))
    path = folder / "job.yaml"
    path.write_text(
        _JOB.format(model=model, nodes=nodes, software=software, tp=tp, shards=8 * nodes // tp, stage=stage)
    )
    return path


@pytest.mark.parametrize(
    "target", slow_except(["megatron", "kubernetes"], ["megatron", "torchtitan", "bridge", "slurm", "kubernetes"])
)
def test_export_of_a_plan_that_does_not_fit_says_so(target: str, simplan: Simplan, tmp_path: Path) -> None:
    large = simplan("export", written(tmp_path, target, model="llama3-70b", nodes=1), "--to", target, "-o", "out")
    assert large.returncode == 0, large.stderr
    assert "warning: the plan does not fit: rank 0 needs " in large.stderr
    small = simplan("export", written(tmp_path, target), "--to", target, "-o", "out2")
    assert small.returncode == 0, small.stderr
    assert "fit" not in small.stderr.replace("benefit", "")


@pytest.mark.parametrize("target", slow_except(["megatron"], ["megatron", "torchtitan"]))
def test_script_of_several_nodes_stops_without_their_addresses(target: str, simplan: Simplan, tmp_path: Path) -> None:
    """With a default, every node would be the first one and wait for the others."""
    for nodes, status in ((2, 1), (1, 0)):
        out = tmp_path / f"out{nodes}"
        made = simplan("export", written(tmp_path, target, nodes=nodes), "--to", target, "-o", out)
        assert made.returncode == 0, made.stderr
        script = next(out.glob("*.sh")) if out.is_dir() else out
        text = f"torchrun() {{ :; }}\n{script.read_text()}"
        run = subprocess.run(["bash", "-c", text], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        assert (run.returncode != 0) == bool(status), run.stderr
        assert ("set it to" in run.stderr) == bool(status)


def test_megatron_export_says_what_overlap_would_give(simplan: Simplan, tmp_path: Path) -> None:
    scenario = written(tmp_path, "megatron")
    said = simplan("export", scenario, "--to", "megatron", "-o", "out.sh").stderr
    assert "start it with `bash out.sh`\nnote: start it on every node" in said
    assert "its own has FP32 logits" in said
    (note,) = [line for line in said.splitlines() if "--overlap-grad-reduce" in line]
    sets = note.rpartition("shorter: ")[2].split()
    assert len(sets) == 6  # gradients, parameters and tensor-parallel collectives
    times = [
        float(simplan("predict", scenario, *more, "--json").stdout.partition('"step_time_s": ')[2].split(",")[0])
        for more in ((), sets)
    ]
    assert f"predicted {1 - times[1] / times[0]:.1%} shorter" in note
    overlapped = simplan("export", scenario, *sets, "--to", "megatron", "-o", "out.sh")
    assert "shorter" not in overlapped.stderr


def test_kubernetes_export_says_where_results_are_and_what_pods_lack(simplan: Simplan, tmp_path: Path) -> None:
    said = simplan("export", written(tmp_path, "kubernetes"), "--to", "kubernetes", "-o", "pods.yaml").stderr
    assert "`kubectl logs two-nodes-master-0`" in said
    assert "pods ask for no RDMA devices" in said
    alone = simplan("export", written(tmp_path, "kubernetes", nodes=1), "--to", "kubernetes", "-o", "pods.yaml").stderr
    assert "RDMA" not in alone


def test_bridge_export_names_the_versions_that_read_it(simplan: Simplan, tmp_path: Path) -> None:
    simplan("export", written(tmp_path, "bridge"), "--to", "bridge", "-o", tmp_path / "out")
    (config,) = (tmp_path / "out").glob("*.yaml")
    assert "Megatron Bridge 0.4 or later" in config.read_text()
