"""What starts ``simplan run`` on every node of a cluster: a Slurm batch script, a Kubernetes PyTorchJob.

Sources: Slurm's sbatch and srun manuals (``SLURM_NODEID`` counts the nodes of a job, ``scontrol show hostnames`` lists
them in that order); Kubeflow's PyTorchJob v1 (``MASTER_ADDR``, ``MASTER_PORT`` and ``RANK`` are set in every pod, the
master's rank is 0).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["Launch", "kubernetes_job", "slurm_script"]

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
    """

    name: str
    num_nodes: int
    gpus_per_node: int
    cores_per_node: int | None

    def command(self, scenario: str, endpoint: str, node_rank: str) -> str:
        """The command of one node, for a shell.

        Args:
            scenario: The scenario file, quoted.
            endpoint: Where nodes meet.
            node_rank: Place of the node.
        """
        run = f"simplan run {scenario}"
        return (
            run if self.num_nodes == 1 else f"{run} --nodes {self.num_nodes} --rdzv {endpoint} --node-rank {node_rank}"
        )


def slurm_script(launch: Launch, scenario: str) -> str:
    """A batch script for ``sbatch``.

    Args:
        launch: What to start.
        scenario: Path of the scenario on all nodes.
    """
    header = [
        f"--job-name={_name(launch.name)}",
        f"--nodes={launch.num_nodes}",
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
    command = launch.command('"$SIMPLAN_SCENARIO"', '"$SIMPLAN_RDZV"', '"$SLURM_NODEID"')
    if launch.num_nodes > 1:
        lines += [
            'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'export SIMPLAN_RDZV="$first:$((20000 + SLURM_JOB_ID % 10000))"',
        ]
    lines += [f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {command}')}"]
    return "\n".join(lines) + "\n"


def kubernetes_job(launch: Launch, scenario_text: str, image: str) -> str:
    """A ConfigMap with the scenario and a PyTorchJob (kubeflow.org/v1), as one YAML file for ``kubectl apply``.

    Args:
        launch: What to start.
        scenario_text: The scenario file's text; it must refer to no other file.
        image: A container image with simplan and torch.
    """
    name = _name(launch.name)
    command = launch.command(f"{_MOUNT}/{_FILE}", '"$MASTER_ADDR:$MASTER_PORT"', '"$RANK"')
    resources: dict[str, int] = {}
    if launch.gpus_per_node:
        resources["nvidia.com/gpu"] = launch.gpus_per_node
    if launch.cores_per_node:
        resources["cpu"] = launch.cores_per_node
    pod = {
        "containers": [
            {
                "name": "pytorch",  # the name that the operator looks for
                "image": image,
                "command": ["sh", "-c", f"exec {command} --output /tmp/simplan-out"],
                "resources": {"limits": resources},
                "volumeMounts": [
                    {"name": "scenario", "mountPath": _MOUNT},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "scenario", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL between GPUs of a node
        ],
    }

    def replicas(number: int) -> dict[str, Any]:
        return {"replicas": number, "restartPolicy": "Never", "template": {"spec": pod}}

    roles = {"Master": replicas(1)}
    if launch.num_nodes > 1:
        roles["Worker"] = replicas(launch.num_nodes - 1)
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {_FILE: scenario_text}},
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {"pytorchReplicaSpecs": roles},
        },
    ]
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)


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
