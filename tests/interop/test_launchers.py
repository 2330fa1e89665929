"""What starts a plan elsewhere: parsed back, and the Slurm script run; targets by the names of profiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import simplan.cli
from simplan import catalog
from simplan.cli.execute import RunOptions, exported_job
from simplan.errors import NotModelledError
from simplan.interop.formats import export_target, export_targets, formats
from simplan.interop.launchers import Launch, kubernetes_job, slurm_script
from simplan.interop.writing import Exported
from simplan.runs.checkpoint import Checkpointing
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.scenario import load_scenario, scenario_from
from tests.support.problems import says

ROOT = Path(__file__).resolve().parents[2]
KEPT = Checkpointing(folder="/kept here", every=7, max_restarts=3)
SCENARIO = """\
name: {name}
model: {{family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}}
cluster: {{preset: dgx-h100, num_devices: {num_devices}, num_nodes: {num_nodes}}}
training: {{global_batch_size: {num_devices}, precision: fp32}}
plan: {{dp_replicate: {num_devices}}}
"""


def job_of(folder: Path, name: str, num_nodes: int, num_devices: int, least: int | None = None) -> RunSpec:
    """What ranks would run, with checkpoints where fewer nodes may."""
    file = folder / "s.yaml"
    file.write_text(SCENARIO.format(name=name, num_devices=num_devices, num_nodes=num_nodes))
    kept = None if least is None else KEPT
    return exported_job(load_scenario(file), None, RunOptions(num_steps=2, checkpointing=kept), least)


@pytest.fixture(scope="module", name="launches")
def make_launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    """Of one node, whose ranks share cores, of two, and of two to four with GPUs."""
    folder = tmp_path_factory.mktemp("scenarios")
    return {
        "one": Launch(job_of(folder, "one", 1, 4), 1, 4, 0, 4),
        "two": Launch(job_of(folder, "Llama 3, 2 nodes", 2, 16), 2, 8, 8, None),
        "elastic": Launch(job_of(folder, "Some", 4, 32, 2), 4, 8, 8, None, 2),
    }


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
STUB_TORCHRUN = """\
#!/bin/bash
# On one machine both nodes would take themselves for that of the endpoint.
exec {python} -m torch.distributed.run --rdzv-conf is_host=$((SLURM_NODEID == 0)) "$@"
"""


def pytorch_job(launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    config, resource = yaml.safe_load_all(kubernetes_job(launch, "image:1"))
    return config, resource


def assert_same(text: str, job: RunSpec) -> None:
    """But for where the numbers of the framework's profile come from."""
    software = job.software.model_copy(update={"sources": {}})
    assert RunSpec.model_validate_json(text) == job.model_copy(update={"software": software})


def words(command: str) -> list[str]:
    """A command in lines, as a shell takes it."""
    return command.replace("\\\n", " ").split()


@pytest.mark.parametrize("name", ["one", "two", "elastic"])
def test_the_slurm_script_is_bash_and_has_the_job(name: str, launches: dict[str, Launch], tmp_path: Path) -> None:
    launch, script = launches[name], tmp_path / "job.sh"
    script.write_text(slurm_script(launch))
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    options = [line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")]
    assert f"--nodes={'2-4' if name == 'elastic' else launch.num_nodes}" in options
    assert ("--no-kill" in options) == (name == "elastic")
    assert "--ntasks-per-node=1" in options
    assert ("--gpus-per-node=8" in options) == (name != "one")
    assert ("--cpus-per-task=4" in options) == (name == "one")
    assert "--job-name=llama-3-2-nodes" in options or name != "two"
    assert_same(lines[lines.index("JOB") - 1], launch.job)


def test_the_kubernetes_job_has_the_documented_shape(launches: dict[str, Launch]) -> None:
    config, job = pytorch_job(launches["two"])
    assert_same(config["data"]["job.json"], launches["two"].job)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 1}
    for spec in roles.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
        assert words(container["command"][2]) == words(
            "exec torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
            '--rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id llama-3-2-nodes '
            "-m executor.worker /job/job.json /tmp/simplan-out"
        )


def test_a_kubernetes_job_of_some_to_all_nodes_has_workers_only(launches: dict[str, Launch]) -> None:
    """As an elasticPolicy wants it: the first one is node 0, and any that fails comes back."""
    config, job = pytorch_job(launches["elastic"])
    assert job["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4}
    assert job["spec"]["runPolicy"] == {"backoffLimit": 12}
    ((role, worker),) = job["spec"]["pytorchReplicaSpecs"].items()
    assert (role, worker["replicas"], worker["restartPolicy"]) == ("Worker", 4, "OnFailure")
    (container,) = worker["template"]["spec"]["containers"]
    run = "torchrun --nnodes 2:4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d"
    assert " ".join(words(container["command"][2])).startswith(f'exec {run} --rdzv-endpoint "$PET_RDZV_ENDPOINT"')
    assert {"name": "checkpoints", "mountPath": "/kept here"} in container["volumeMounts"]
    claim = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "some-checkpoints"}}
    assert claim in worker["template"]["spec"]["volumes"]
    assert config["metadata"]["name"] == "some"
    fewer = RunSpec.model_validate_json(config["data"]["job.json"]).fewer_nodes
    assert [plan.num_nodes for plan in fewer] == [2], "24 ranks do not divide the batch"


@pytest.mark.parametrize(("node", "code", "expected"), [(0, 0, 0), (0, 4, 4), (1, 0, 0), (1, 4, 0), (1, 143, 0)])
def test_a_slurm_job_of_some_to_all_nodes_ends_as_node_0_does(
    node: int, code: int, expected: int, launches: dict[str, Launch], tmp_path: Path
) -> None:
    """One task is run as srun would, with a run that ends in some way."""
    tools = {
        "scontrol": STUB_SCONTROL,
        "srun": f'#!/bin/bash\nshift 3\nSLURM_NODEID={node} exec "$@"\n',
        "torchrun": f'#!/bin/bash\necho "$*"\nexit {code}\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(launches["elastic"]))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "stub-nodes"}
    environment["SLURM_JOB_ID"] = "123456"
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == expected
    out = tmp_path / "simplan-out" / "some"
    assert done.stdout.splitlines()[0] == (
        "--nnodes 2:4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:23456 "
        f"--rdzv-id 123456 -m executor.worker {out}/job.json {out}"
    )


def test_one_node_meets_nobody(launches: dict[str, Launch]) -> None:
    _, job = pytorch_job(launches["one"])
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master"}
    assert "--rdzv" not in str(job)
    assert "torchrun --standalone --nproc-per-node 4" in slurm_script(launches["one"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_slurm_script_runs_on_two_nodes(tmp_path: Path) -> None:
    """Two agents of torchrun with a rank each, of which rank 0 writes the measurement."""
    job = job_of(tmp_path, "two nodes", 1, 2).model_copy(update={"device": "cpu"})
    script, tools = tmp_path / "job.sh", tmp_path / "bin"
    script.write_text(slurm_script(Launch(job, 2, 1, 0, 1)))
    tools.mkdir()
    stubs = {
        "srun": STUB_SRUN,
        "scontrol": STUB_SCONTROL,
        "torchrun": STUB_TORCHRUN.format(python=sys.executable),
    }
    for name, text in stubs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "STUB_OUT": str(tmp_path),
        "SLURM_JOB_NODELIST": "stub-nodes",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, "".join((tmp_path / f"{node}.err").read_text() for node in range(2))
    file = tmp_path / "simplan-out" / "two-nodes" / "measurement.json"
    assert f"wrote {file}" in (tmp_path / "0.out").read_text()
    measurement = Measurement.model_validate_json(file.read_bytes())
    assert [rank.rank for rank in measurement.ranks] == [0, 1]
    assert all(rank.peak_memory.allocated_bytes for rank in measurement.ranks)
    assert len(measurement.step_times_s) >= 2


def exported(target: str) -> Exported:
    """Files of a plan on two nodes, with the first software that the target takes."""
    write = formats()[target].export
    assert write is not None
    for software in ("torchtitan", "megatron-core", "megatron-bridge", "accelerate", "deepspeed"):
        stage = 1 if software.startswith("megatron") else 2
        overrides = {
            "cluster.preset": "dgx-h100",
            "cluster.num_nodes": 2,
            "software": software,
            "plan.zero_stage": stage,
        }
        try:
            return write(scenario_from("llama3-8b", overrides).job, "two")
        except NotModelledError:
            continue
    raise AssertionError(target)


@pytest.mark.parametrize("target", [name for name, target in formats().items() if target.export and name != "chakra"])
def test_exported_script_of_two_nodes_starts_where_nodes_can_meet(target: str, tmp_path: Path) -> None:
    """A node that was not told who and where it is would wait for the others; DeepSpeed tells its nodes itself."""
    files = exported(target)
    for name, content in files.files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else content.decode())
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        stub = tmp_path / launcher
        stub.write_text('#!/bin/bash\necho "$0 $*"\n')
        stub.chmod(0o755)

    def start(**environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}
        return subprocess.run(["bash", "-c", files.start], cwd=tmp_path, env=env, capture_output=True, text=True)

    told = start(MASTER_ADDR="node-a", NODE_RANK="1")
    assert told.returncode == 0, told.stderr
    if "--hostfile" in told.stdout:
        assert (tmp_path / "hostfile").read_text().count("slots=8") == 2
        return
    assert "node-a" in told.stdout
    alone = start()
    assert alone.returncode != 0
    assert not alone.stdout
    assert "set it to" in alone.stderr


def test_step_of_a_million_microbatches_is_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    command = "export gpt2-124m --cluster dgx-h100 --num-devices 8 --global-batch-size 1000000000000 --to slurm"
    assert simplan.cli.main(command.split()) == 2
    assert says(capsys.readouterr().err, "forward passes of stages", "at most 1,000,000")


def writers_of(profile: str) -> set[str]:
    """Targets that write jobs under a profile."""
    job = scenario_from("llama3-8b", {"cluster.num_devices": 8, "software": profile}).job
    names = set()
    for name, target in formats().items():
        if target.export is not None and target.settings is not None:
            try:
                target.settings(job)
            except NotModelledError as error:
                if any(problem.field.startswith("software") for problem in error.problems):
                    continue
            names.add(name)
    return names


def test_profile_is_exported_by_a_target_that_writes_it() -> None:
    assert all(export_target(target) == target for target in export_targets())
    profiles = [profile for profile in catalog.names("software") if profile != "unsloth"]  # it trains adapters alone
    writers = {profile: writers_of(profile) for profile in profiles}
    targets = {profile: export_target(profile) for profile in profiles}
    assert not export_target("unsloth")
    assert sum(map(bool, writers.values())) > 6
    for profile, targets_found in writers.items():
        assert targets[profile] in (targets_found or {""}) or (profile, targets[profile]) == ("nemo", "bridge"), profile
