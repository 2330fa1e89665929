"""What a node says of itself when it comes, and whether nodes were asked the same."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from pydantic import ValidationError

from executor.exchange import Host
from simplan.errors import Problem, SpecError
from simplan.program.nodes import Nodes
from simplan.spec.base import Spec

__all__ = ["Introduction", "disagreement", "introduction"]


class Introduction(Spec):
    """What a node says of itself.

    Attributes:
        host: Where it is.
        num_nodes: Nodes it was told of.
        node_rank: Place that it asks for; None for any.
        torch: Its version.
        asked: ``Nodes.asked``.
    """

    host: Host
    num_nodes: int
    node_rank: int | None = None
    torch: str
    asked: dict[str, str]

    def to_json(self) -> str:
        """As it is told through the store."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes, who: str, leader: str) -> Introduction:
        """What ``to_json`` gave.

        Args:
            text: As it was told.
            who: What to call the node that told it.
            leader: The same of node 0.

        Raises:
            SpecError: It is not what nodes of this version say.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            rule = f"{who} has another version of simplan than {leader}; install one version on all nodes"
            raise SpecError(Problem(field="", rule=rule)) from None


def introduction(nodes: Nodes, address: str) -> Introduction:
    """Of this node.

    Args:
        nodes: What it was asked.
        address: Where the others see it.
    """
    return Introduction(
        host=Host(socket.gethostname(), address),
        num_nodes=nodes.num_nodes,
        node_rank=nodes.node_rank,
        torch=str(torch.__version__),
        asked=nodes.asked,
    )


def disagreement(introductions: Sequence[Introduction], names: Sequence[str] = ()) -> str | None:
    """The sentence about nodes that were not asked the same; None when all were.

    Args:
        introductions: By node; node 0 is right.
        names: What to call them; ``node 1 (its-host-name)`` where none are given.
    """
    names = names or [f"node {node} ({met.host.name})" for node, met in enumerate(introductions)]
    first, leader = introductions[0], names[0]
    for other, who in zip(introductions[1:], names[1:], strict=True):
        if other.num_nodes != first.num_nodes:
            return (
                f"--nodes: {other.num_nodes} on {who}, but {first.num_nodes} on {leader}; use one number on all nodes"
            )
        for section in first.asked | other.asked:
            if first.asked.get(section) != other.asked.get(section):
                rule = (
                    f"differs between {leader} and {who}; copy the scenario of one to the other and use equal options"
                )
                return f"{section}: {rule}"
        if other.torch != first.torch:
            return f"torch is {other.torch} on {who}, but {first.torch} on {leader}; install one version on all nodes"
    return None
