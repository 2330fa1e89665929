"""What starts torchrun by ``simplan run`` on every node of a cluster: a Slurm batch script, a Kubernetes PyTorchJob.

Sources: Slurm's sbatch and srun manuals (``SLURM_NODEID`` counts the nodes of a job, ``scontrol show hostnames`` lists
them in that order; ``--nodes=MIN-MAX`` takes what is free; ``--no-kill`` keeps a job that has lost a node); Kubeflow's
PyTorchJob v1 (``MASTER_ADDR`` and ``MASTER_PORT`` are set in every pod; with an ``elasticPolicy`` there are workers
only, ``PET_RDZV_ENDPOINT`` is a port of worker 0, and the job is done when that one is).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from simplan.program.checkpoint import Checkpointing

__all__ = ["Launch", "claim_of", "kubernetes_job", "slurm_script"]

_MOUNT = "/scenario"
_FILE = "scenario.yaml"
_LONGEST_NAME = 50  # a pod's name adds its role and number, and has at most 63 characters


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be started.

    Attributes:
        name: Of the scenario.
        num_nodes: Nodes.
        gpus_per_node: Devices of each, where they are GPUs; else 0.
        cores_per_node: Cores that ranks of each share, where they compute on the CPU; else None.
        min_nodes: As few of them begin or go on without others; None for all.
        checkpointing: How the state of the training is kept; None for not at all.
    """

    name: str
    num_nodes: int
    gpus_per_node: int
    cores_per_node: int | None
    min_nodes: int | None = None
    checkpointing: Checkpointing | None = None

    def nodes(self, between: str) -> str:
        """How many nodes: ``4``, or ``2:4`` with a colon between."""
        return f"{self.num_nodes}" if self.min_nodes is None else f"{self.min_nodes}{between}{self.num_nodes}"

    def command(self, scenario: str, endpoint: str) -> str:
        """The command of one node, for a shell.

        Args:
            scenario: The scenario file, quoted.
            endpoint: Where nodes meet, as of torchrun.
        """
        words = [f"simplan run {scenario}"]
        if self.num_nodes > 1:
            words.append(f"--nnodes {self.nodes(':')} --rdzv-endpoint {endpoint}")
        if (kept := self.checkpointing) is not None:
            words.append(f"--checkpoint-dir {shlex.quote(kept.folder)} --checkpoint-every {kept.every}")
            words += [f"--max-restarts {kept.max_restarts}"] if kept.max_restarts else []
            words += ["--resume"] if kept.resume else []
        return " ".join(words)


def slurm_script(launch: Launch, scenario: str) -> str:
    """A batch script for ``sbatch``.

    Args:
        launch: What to start.
        scenario: Path of the scenario on all nodes.
    """
    header = [
        f"--job-name={_name(launch.name)}",
        f"--nodes={launch.nodes('-')}",
        *(["--no-kill"] if launch.min_nodes else []),
        "--ntasks-per-node=1",
        "--exclusive",
        *([f"--gpus-per-node={launch.gpus_per_node}"] if launch.gpus_per_node else []),
        *([f"--cpus-per-task={launch.cores_per_node}"] if launch.cores_per_node else []),
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in header)]
    lines += [
        "# One task a node: each starts its own ranks. Add the partition, account and time limit of your cluster."
    ]
    lines += ["set -euo pipefail", f"export SIMPLAN_SCENARIO={shlex.quote(scenario)}"]
    command = launch.command('"$SIMPLAN_SCENARIO"', '"$SIMPLAN_RDZV"')
    if launch.num_nodes > 1:
        lines += [
            'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'export SIMPLAN_RDZV="$first:$((20000 + SLURM_JOB_ID % 10000))"',
        ]
    if launch.min_nodes is None:
        lines += [f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {command}')}"]
    else:
        # bash waits for a node that is told to leave (SIGTERM)
        only_first = f'trap : TERM; {command}; exit "$((SLURM_NODEID ? 0 : $?))"'
        lines += ["# The others go on without a node that ends; the exit code is that of node 0."]
        lines += [f"srun --kill-on-bad-exit=0 --no-kill --wait=0 bash -c {shlex.quote(only_first)}"]
    return "\n".join(lines) + "\n"


def kubernetes_job(launch: Launch, scenario_text: str, image: str) -> str:
    """A ConfigMap with the scenario and a PyTorchJob (kubeflow.org/v1), as one YAML file for ``kubectl apply``.

    Args:
        launch: What to start.
        scenario_text: The scenario file's text; it must refer to no other file.
        image: A container image with simplan and torch.
    """
    name, elastic = _name(launch.name), launch.min_nodes is not None
    endpoint = '"$PET_RDZV_ENDPOINT"' if elastic else '"$MASTER_ADDR:$MASTER_PORT"'
    command = launch.command(f"{_MOUNT}/{_FILE}", endpoint)
    resources: dict[str, int] = {}
    if launch.gpus_per_node:
        resources["nvidia.com/gpu"] = launch.gpus_per_node
    if launch.cores_per_node:
        resources["cpu"] = launch.cores_per_node
    mounts = [
        {"name": "scenario", "mountPath": _MOUNT},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "scenario", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL between GPUs of a node
    ]
    if launch.checkpointing is not None:
        mounts.append({"name": "checkpoints", "mountPath": launch.checkpointing.folder})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim_of(launch)}})
    pod = {
        "containers": [
            {
                "name": "pytorch",  # the name that the operator looks for
                "image": image,
                "command": ["sh", "-c", f"exec {command} --output /tmp/simplan-out"],
                "resources": {"limits": resources},
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
        assert launch.checkpointing is not None
        # a container that ends with an error comes back to the run, or all begin again where it was
        spec["runPolicy"] = {"backoffLimit": launch.checkpointing.max_restarts * launch.num_nodes}
        limits = {"minReplicas": launch.min_nodes, "maxReplicas": launch.num_nodes}
        spec["elasticPolicy"] = {"rdzvBackend": "c10d", **limits}
        roles = {"Worker": replicas(launch.num_nodes)}
    else:
        roles = {"Master": replicas(1)}
        if launch.num_nodes > 1:
            roles["Worker"] = replicas(launch.num_nodes - 1)
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {_FILE: scenario_text}},
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {**spec, "pytorchReplicaSpecs": roles},
        },
    ]
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)


def claim_of(launch: Launch) -> str:
    """The volume claim that pods of a Kubernetes job keep checkpoints in."""
    return f"{_name(launch.name)}-checkpoints"


class _Plain(yaml.SafeDumper):
    """Without anchors, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Everything is written out."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def _name(name: str) -> str:
    """The name as Kubernetes and Slurm take it: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-") or "simplan"
