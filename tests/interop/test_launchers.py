"""What starts a plan elsewhere: parsed back, and the Slurm script run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan.interop.launchers import Launch, kubernetes_job, slurm_script
from simplan.program.checkpoint import Checkpointing

ROOT = Path(__file__).resolve().parents[2]
TWO = Launch("Llama 3, 2 nodes", num_nodes=2, gpus_per_node=8, cores_per_node=None)
KEPT = Checkpointing(folder="/kept here", every=7, max_restarts=3)
ELASTIC = Launch("Some", num_nodes=4, gpus_per_node=8, cores_per_node=None, min_nodes=2, checkpointing=KEPT)
ONE = Launch("one", num_nodes=1, gpus_per_node=0, cores_per_node=4)
SCENARIO = """\
name: two nodes
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: this-machine, num_devices: 2, num_nodes: 2, inter_link_gbit_per_device: 10}
training: {global_batch_size: 4, precision: fp32}
plan: {dp_replicate: 2}
"""
STUB_SRUN = """\
#!/bin/bash
# What srun does with one task on each of two nodes, here on one machine.
shift
for node in 0 1; do SLURM_NODEID=$node "$@" >"$STUB_OUT/$node.out" 2>"$STUB_OUT/$node.err" & tasks[node]=$!; done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
STUB_SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames stub-nodes" ] && printf "localhost\\nlocalhost\\n"\n'
STUB_SIMPLAN = """\
#!/bin/bash
# On one machine both nodes would take themselves for that of the endpoint.
where="--rdzv-conf is_host=$((SLURM_NODEID == 0))"
exec {python} -m simplan "$@" $where --json --steps 2 --warmup 1 -o "$STUB_OUT/$SLURM_NODEID"
"""


def job(launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    config, found = yaml.safe_load_all(kubernetes_job(launch, SCENARIO, "image:1"))
    return config, found


@pytest.mark.parametrize("launch", [ONE, TWO, ELASTIC])
def test_the_slurm_script_is_bash(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(launch, "/data/it's a scenario.yaml"))
    subprocess.run(["bash", "-n", str(script)], check=True)
    options = [line.split(maxsplit=1)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert f"--nodes={'2-4' if launch is ELASTIC else launch.num_nodes}" in options
    assert ("--no-kill" in options) == (launch is ELASTIC)
    assert "--ntasks-per-node=1" in options
    assert ("--gpus-per-node=8" in options) == (launch is not ONE)
    assert ("--cpus-per-task=4" in options) == (launch is ONE)
    assert "--job-name=llama-3-2-nodes" in options or launch is not TWO


def test_the_kubernetes_job_has_the_documented_shape() -> None:
    config, found = job(TWO)
    assert config["data"]["scenario.yaml"] == SCENARIO
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = found["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 1}
    for spec in roles.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
        assert container["command"][2].startswith(
            'exec simplan run /scenario/scenario.yaml --nnodes 2 --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --output '
        )


RUN = "--checkpoint-dir '/kept here' --checkpoint-every 7 --max-restarts 3"


def test_a_kubernetes_job_of_some_to_all_nodes_has_workers_only() -> None:
    """As an elasticPolicy wants it: the first one is node 0, and any that fails comes back."""
    config, found = job(ELASTIC)
    assert found["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4}
    assert found["spec"]["runPolicy"] == {"backoffLimit": 12}
    ((role, worker),) = found["spec"]["pytorchReplicaSpecs"].items()
    assert (role, worker["replicas"], worker["restartPolicy"]) == ("Worker", 4, "OnFailure")
    (container,) = worker["template"]["spec"]["containers"]
    run = f'--nnodes 2:4 --rdzv-endpoint "$PET_RDZV_ENDPOINT" {RUN} --output '
    assert run in container["command"][2]
    assert {"name": "checkpoints", "mountPath": "/kept here"} in container["volumeMounts"]
    claim = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "some-checkpoints"}}
    assert claim in worker["template"]["spec"]["volumes"]
    assert config["metadata"]["name"] == "some"


@pytest.mark.parametrize(("node", "code", "expected"), [(0, 0, 0), (0, 4, 4), (1, 0, 0), (1, 4, 0), (1, 143, 0)])
def test_a_slurm_job_of_some_to_all_nodes_ends_as_node_0_does(
    node: int, code: int, expected: int, tmp_path: Path
) -> None:
    """One task is run as srun would, with a run that ends in some way."""
    tools = {
        "scontrol": STUB_SCONTROL,
        "srun": f'#!/bin/bash\nshift 3\nSLURM_NODEID={node} exec "$@"\n',
        "simplan": f'#!/bin/bash\necho "$*"\nexit {code}\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(ELASTIC, "s.yaml"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "stub-nodes"}
    environment["SLURM_JOB_ID"] = "123456"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == expected
    assert done.stdout == f"run s.yaml --nnodes 2:4 --rdzv-endpoint localhost:23456 {RUN.replace(chr(39), '')}\n"


def test_one_node_meets_nobody() -> None:
    _, found = job(ONE)
    assert set(found["spec"]["pytorchReplicaSpecs"]) == {"Master"}
    assert "--rdzv" not in str(found)
    assert "scontrol" not in slurm_script(ONE, "s.yaml")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_slurm_script_runs_on_two_nodes(tmp_path: Path) -> None:
    scenario, script, tools = tmp_path / "s.yaml", tmp_path / "job.sh", tmp_path / "bin"
    scenario.write_text(SCENARIO)
    tools.mkdir()
    stubs = {
        "srun": STUB_SRUN,
        "scontrol": STUB_SCONTROL,
        "simplan": STUB_SIMPLAN.format(python=sys.executable),
    }
    for name, text in stubs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "STUB_OUT": str(tmp_path),
        "SLURM_JOB_NODELIST": "stub-nodes",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    export = [sys.executable, "-m", "simplan", "export", str(scenario), "--to", "slurm", "-o", str(script)]
    subprocess.run(export, check=True, env=environment, capture_output=True)
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "".join((tmp_path / f"{node}.err").read_text() for node in range(2))
    document = json.loads((tmp_path / "0.out").read_text())
    assert len(document["measurement"]["step_times_s"]) == 2
    assert (tmp_path / "1.out").read_text() == ""
