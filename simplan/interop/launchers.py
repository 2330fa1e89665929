"""Launchers that start torchrun on every node: a Slurm batch script, a Kubernetes PyTorchJob.

Sources: Slurm's sbatch and srun manuals (``SLURM_NODEID`` counts the nodes of a job, ``scontrol show hostnames`` lists
them in that order; ``--nodes=MIN-MAX`` takes what is free; ``--no-kill`` keeps a job that has lost a node); torchrun's
documentation; Kubeflow's PyTorchJob v1 (``MASTER_ADDR`` and ``MASTER_PORT`` are set in every pod; with an
``elasticPolicy`` there are workers only, ``PET_RDZV_ENDPOINT`` is a port of worker 0, and the job is done when that one
is).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from simplan.errors import NotModelledError, Problem
from simplan.runs.run_spec import RunSpec
from simplan.units import MIB

_MOUNT = "/job"
_FILE = "job.json"
_POD_OUT = "/tmp/simplan-out"
_LONGEST_NAME = 50  # a pod adds its role and number, and a name has at most 63 characters
_LARGEST_CONFIG_MAP = 1 * MIB

_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # avoids torchrun's warning; ranks set their own number
_CPU_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # caches freed memory, as on a GPU
_NODES_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else ranks look for rank 0, which may have left


@dataclass(frozen=True, slots=True)
class Launch:
    """A job to launch, and its nodes.

    Attributes:
        job: Job that the ranks run.
        num_nodes: Number of nodes, the maximum for an elastic run.
        ranks_per_node: Ranks per node.
        gpus_per_node: GPUs per node; 0 for CPU devices.
        cores_per_node: Cores per node that CPU ranks share; None for GPUs.
        min_nodes: Minimum nodes of an elastic run; None if all nodes are required.
    """

    job: RunSpec
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cores_per_node: int | None
    min_nodes: int | None = None

    def nodes(self, between: str) -> str:
        """Node count, or range with a separator: ``4``, or ``2:4`` for ``:``."""
        return f"{self.num_nodes}" if self.min_nodes is None else f"{self.min_nodes}{between}{self.num_nodes}"

    @property
    def job_text(self) -> str:
        """The job as JSON on one line."""
        return self.job.model_dump_json(exclude_defaults=True, exclude={"software": {"sources"}})

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for every node."""
        of_device = {} if self.gpus_per_node else _CPU_ENVIRONMENT
        return _ENVIRONMENT | of_device | (_NODES_ENVIRONMENT if self.num_nodes > 1 else {})

    def torchrun(self, job_file: str, out_dir: str, endpoint: str, run_id: str) -> list[str]:
        """Shell command of one node, as lines to join.

        Args:
            job_file, out_dir: Paths, quoted for the shell.
            endpoint, run_id: Rendezvous endpoint and id, quoted for the shell.
        """
        kept = self.job.checkpointing
        lines = [f"torchrun --nnodes {self.nodes(':')} --nproc-per-node {self.ranks_per_node}"]
        if kept is not None and kept.max_restarts:
            lines[0] += f" --max-restarts {kept.max_restarts}"
        if self.num_nodes > 1:
            lines.append(f"--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {run_id}")
        else:
            lines[0] = lines[0].replace("--nnodes 1", "--standalone")
        return [*lines, f"-m executor.worker {job_file} {out_dir}"]


def slurm_script(launch: Launch) -> str:
    """Batch script for ``sbatch``, which contains the job."""
    header = [
        f"--job-name={_name(launch.job.name)}",
        f"--nodes={launch.nodes('-')}",
        *(["--no-kill"] if launch.min_nodes else []),
        "--ntasks-per-node=1",
        "--exclusive",
        *([f"--gpus-per-node={launch.gpus_per_node}"] if launch.gpus_per_node else []),
        *([f"--cpus-per-task={launch.cores_per_node}"] if launch.cores_per_node else []),
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in header)]
    lines += [
        "# One task a node: torchrun starts its ranks. Add the partition, account and time limit of your cluster.",
        "set -euo pipefail",
        f'out="$PWD/simplan-out/{_name(launch.job.name)}"  # all nodes must see this folder',
        'mkdir -p "$out"',
        *(f"export {name}={value}" for name, value in launch.environment.items()),
    ]
    if launch.num_nodes > 1:
        lines += [
            'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'endpoint="$first:$((20000 + SLURM_JOB_ID % 10000))"',
        ]
    lines += ["", f"cat >\"$out/{_FILE}\" <<'JOB'", launch.job_text, "JOB", ""]
    command = launch.torchrun(f'"$out/{_FILE}"', '"$out"', '"$endpoint"', '"$SLURM_JOB_ID"')
    if launch.min_nodes is None:
        lines.append(" \\\n  ".join(["srun --kill-on-bad-exit=1 \\\n  " + command[0], *command[1:]]))
    else:
        lines += [
            "# The others go on without a node that ends; the exit code is that of node 0.",
            "one_node() {",
            "  trap : TERM  # bash waits for a node that is told to leave",
            "  " + " \\\n    ".join(command),
            "}",
            "export -f one_node",
            "export out endpoint",
            "srun --kill-on-bad-exit=0 --no-kill --wait=0 \\",
            "  bash -c 'one_node; exit \"$((SLURM_NODEID ? 0 : $?))\"'",
        ]
    lines += [
        'echo "to compare with the prediction: simplan predict SCENARIO --json >prediction.json &&'
        ' simplan compare prediction.json $out/measurement.json"'
    ]
    return "\n".join(lines) + "\n"


def kubernetes_job(launch: Launch, image: str) -> str:
    """YAML for ``kubectl apply``: a ConfigMap with the job, and a PyTorchJob (kubeflow.org/v1).

    Args:
        launch: Job and nodes.
        image: Container image with simplan and torch.

    Raises:
        NotModelledError: The job exceeds the size limit of a ConfigMap.
    """
    name, elastic = _name(launch.job.name), launch.min_nodes is not None
    text = launch.job_text
    if len(text) > _LARGEST_CONFIG_MAP:
        rule = f"makes a job of {len(text) / MIB:.1f} MiB, and a ConfigMap holds 1 MiB"
        raise NotModelledError(Problem(field="plan", rule=rule, fix="use fewer microbatches"))
    endpoint = '"$PET_RDZV_ENDPOINT"' if elastic else '"$MASTER_ADDR:$MASTER_PORT"'
    command = launch.torchrun(f"{_MOUNT}/{_FILE}", _POD_OUT, endpoint, name)
    resources = {"nvidia.com/gpu": launch.gpus_per_node, "cpu": launch.cores_per_node}
    mounts = [{"name": "job", "mountPath": _MOUNT}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL between GPUs of a node
    ]
    if (kept := launch.job.checkpointing) is not None:
        mounts.append({"name": "checkpoints", "mountPath": kept.folder})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim_of(launch)}})
    pod = {
        "containers": [
            {
                "name": "pytorch",  # the name that the operator looks for
                "image": image,
                "command": ["sh", "-c", " \\\n  ".join(["exec " + command[0], *command[1:]])],
                "env": [{"name": key, "value": value} for key, value in launch.environment.items()],
                "resources": {"limits": {name: number for name, number in resources.items() if number}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }

    def replicas(number: int) -> dict[str, Any]:
        policy = "OnFailure" if elastic else "Never"
        return {"replicas": number, "restartPolicy": policy, "template": {"spec": pod}}

    spec: dict[str, Any] = {}
    if elastic:
        assert kept is not None
        # a container that fails rejoins the run, or all restart from the last checkpoint
        spec["runPolicy"] = {"backoffLimit": kept.max_restarts * launch.num_nodes}
        limits = {"minReplicas": launch.min_nodes, "maxReplicas": launch.num_nodes}
        spec["elasticPolicy"] = {"rdzvBackend": "c10d", **limits}
        roles = {"Worker": replicas(launch.num_nodes)}
    else:
        roles = {"Master": replicas(1)}
        if launch.num_nodes > 1:
            roles["Worker"] = replicas(launch.num_nodes - 1)
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {_FILE: text}},
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {**spec, "pytorchReplicaSpecs": roles},
        },
    ]
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)


def notes_for_pods(launch: Launch) -> tuple[str, ...]:
    """Sentences on what a Kubernetes job leaves to its user: where results are, and the network of the pods."""
    first = f"{_name(launch.job.name)}-{'worker' if launch.min_nodes is not None else 'master'}-0"
    notes = [
        f"measurement.json is in {_POD_OUT} of the pod {first} and goes with it: step time and peak memory are in "
        f"`kubectl logs {first}` too, and a volume at {_POD_OUT} keeps the file"
    ]
    if launch.num_nodes > 1 and launch.gpus_per_node:
        notes.append(
            "pods ask for no RDMA devices, whose names are those of your device plugin (rdma/...): without them under "
            "resources.limits NCCL uses TCP, which is slower than predicted"
        )
    return tuple(notes)


def claim_of(launch: Launch) -> str:
    """Name of the volume claim for checkpoints of a Kubernetes job."""
    return f"{_name(launch.job.name)}-checkpoints"


class _Plain(yaml.SafeDumper):
    """YAML dumper without anchors; multi-line text becomes a block."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always True: repeat values instead of using anchors."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def _name(name: str) -> str:
    """Convert a name for Kubernetes and Slurm: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-") or "simplan"
