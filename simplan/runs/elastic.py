"""Continuation of a job on fewer nodes: the same training with fewer data-parallel ranks and more microbatches each."""

from __future__ import annotations

import os
import socket
from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, Natural, NonNegative, Positive, Spec
from simplan.errors import Problem, SpecError
from simplan.plan.plan import ParallelPlan


class FewerNodes(Spec):
    """Plan of a job on fewer nodes; model, training and data are unchanged.

    Attributes:
        plan, boundaries, table, predicted_memory_bytes: See ``RunSpec``.
    """

    num_nodes: Count
    plan: ParallelPlan
    boundaries: tuple[Natural, ...]
    table: tuple[tuple[str, ...], ...]
    predicted_memory_bytes: tuple[Natural, ...] = ()


def on_fewer_devices(plan: ParallelPlan, num_devices: int) -> ParallelPlan:
    """Returns the plan with fewer data-parallel ranks; all other degrees are unchanged.

    Shard groups keep their size if it divides the remaining data-parallel ranks; otherwise states are sharded over all
    of these ranks.

    Raises:
        SpecError: The remaining devices are no whole number of model replicas.
    """
    of_replica = plan.tp * plan.cp * plan.pp
    if num_devices % of_replica:
        axes = " x ".join(f"{axis} {size}" for axis in ("tp", "cp", "pp") if (size := getattr(plan, axis)) > 1)
        rule = f"a replica of the model takes {of_replica} devices ({axes}), and {num_devices} are no multiple of that"
        raise SpecError(Problem(field="plan", rule=rule))
    dp = num_devices // of_replica
    shard = plan.dp_shard if dp % plan.dp_shard == 0 else dp
    return plan.model_copy(update={"dp_replicate": dp // shard, "dp_shard": shard})


class RendezvousOptions(Spec):
    """Rendezvous options of one node.

    Attributes:
        min_nodes, max_nodes: torchrun's ``--nnodes MIN:MAX``: minimum nodes to start, and to continue after nodes are
            lost or leave, and maximum nodes.
        ranks_per_node: torchrun's ``--nproc-per-node``.
        host, port: torchrun's ``--rdzv-endpoint``, the address of the store.
        leads: True on the node at ``host``, which has the store and the job.
        join_timeout_s: Seconds to wait for the other nodes.
        last_call_timeout_s: Seconds to wait for further nodes once ``min_nodes`` have joined.
        requested: Requested settings, by section or option; must be equal on all nodes.
    """

    schema_version: Literal[1] = 1
    min_nodes: Count
    max_nodes: Annotated[int, Field(ge=2, le=10**6)]
    ranks_per_node: Count
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    leads: bool
    join_timeout_s: Positive = 300.0
    last_call_timeout_s: NonNegative = 30.0
    requested: dict[str, str] = Field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """The address as ``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def refuse_busy_port(nodes: RendezvousOptions) -> None:
    """Checks that the leading node can listen at the endpoint.

    Raises:
        SpecError: The port is in use, or may not be used.
    """
    if not nodes.leads:
        return
    try:
        socket.create_server(
            (nodes.host, nodes.port), family=socket.AF_INET6 if ":" in nodes.host else socket.AF_INET
        ).close()
    except OSError as error:
        rule = f"cannot be listened on: {os.strerror(error.errno or 0)}"  # strerror has the address once more
        raise SpecError(
            Problem(field="--rdzv-endpoint", value=nodes.endpoint, rule=rule, fix="use another port")
        ) from None
