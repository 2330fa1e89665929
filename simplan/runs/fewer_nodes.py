"""How a job goes on with fewer nodes: the same training on fewer data-parallel ranks with more microbatches each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, NonNegative, Positive, Spec
from simplan.errors import Problem, SpecError
from simplan.plan.plan import ParallelPlan

__all__ = ["FewerNodes", "Nodes", "on_fewer_devices"]


class FewerNodes(Spec):
    """What is other than on all nodes; model, training and data are the same.

    Attributes:
        num_nodes: Nodes that are there.
        plan, boundaries, table, predicted_memory_bytes: As of ``RunSpec``.
    """

    num_nodes: Count
    plan: ParallelPlan
    boundaries: tuple[int, ...]
    table: tuple[tuple[str, ...], ...]
    predicted_memory_bytes: tuple[Annotated[int, Field(ge=0)], ...] = ()


def on_fewer_devices(plan: ParallelPlan, num_devices: int) -> ParallelPlan:
    """The plan with fewer data-parallel ranks, and everything else as it is.

    Groups of shards keep their size where that divides the data-parallel ranks that are left; else states are sharded
    over all of these.

    Args:
        plan: On all devices.
        num_devices: Devices that are left.

    Raises:
        SpecError: They do not hold whole replicas of the model.
    """
    of_replica = plan.tp * plan.cp * plan.pp
    if num_devices % of_replica:
        axes = " x ".join(f"{axis} {size}" for axis in ("tp", "cp", "pp") if (size := getattr(plan, axis)) > 1)
        rule = f"a replica of the model takes {of_replica} devices ({axes}), and {num_devices} are no multiple of that"
        raise SpecError(Problem(field="plan", rule=rule))
    dp = num_devices // of_replica
    shard = plan.dp_shard if dp % plan.dp_shard == 0 else dp
    return plan.model_copy(update={"dp_replicate": dp // shard, "dp_shard": shard})


class Nodes(Spec):
    """The rendezvous, as one node sees it.

    Attributes:
        min_nodes, max_nodes: torchrun's ``--nnodes MIN:MAX``: as many begin and go on when others are lost or leave,
            and as many at most.
        ranks_per_node: torchrun's ``--nproc-per-node``.
        host, port: torchrun's ``--rdzv-endpoint``, where the store is.
        leads: Whether this is the node at ``host``, which has the store and the job.
        join_timeout_s: How long to wait for the others.
        last_call_timeout_s: How long to wait for more of them once there are as many as can begin.
        asked: What was asked, by section or option; must be equal on all nodes.
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
    asked: dict[str, str] = Field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
