"""How several nodes run one job: what torchrun's c10d rendezvous needs to know."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, NonNegative, Positive, Spec

__all__ = ["Nodes"]


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
