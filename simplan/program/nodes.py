"""How several nodes meet for one run: the same request on each of them, as far as they must agree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simplan.spec.base import Count, NonNegative, Positive, Spec

__all__ = ["Nodes"]


class Nodes(Spec):
    """What a node knows before it has met the others.

    Attributes:
        num_nodes: Nodes of the run, this one included.
        min_nodes: As few of them begin, and go on when others are lost or leave, and others may come; None when the
            run begins and ends with all.
        ranks_per_node: Ranks that each of them runs.
        host: Name or address of node 0, where all meet.
        port: Port there.
        node_rank: Place of this node; None to be given the next free one. Node 0 is the one at ``host``.
        interface: Network interface that ranks talk over; None for the one on the route to ``host``.
        join_timeout_s: How long to wait for the others.
        last_call_timeout_s: How long to wait for more of them once there are as many as can begin.
        asked: What was asked, by section; must be equal on all nodes.
    """

    schema_version: Literal[1] = 1
    num_nodes: Annotated[int, Field(ge=2, le=10**6)]
    min_nodes: Count | None = None
    ranks_per_node: Count
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    node_rank: Annotated[int, Field(ge=0)] | None = None
    interface: str | None = None
    join_timeout_s: Positive = 300.0
    last_call_timeout_s: NonNegative = 30.0
    asked: dict[str, str] = Field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
