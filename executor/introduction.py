"""What a node says of itself when it comes, and whether nodes were asked the same."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from executor.exchange import Host
from simplan.program.nodes import Nodes

__all__ = ["Introduction", "disagreement", "introduction"]


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a node says of itself.

    Attributes:
        host: Where it is.
        num_nodes: Nodes it was told of.
        torch: Its version.
        asked: ``Nodes.asked``.
    """

    host: Host
    num_nodes: int
    torch: str
    asked: dict[str, str]

    def to_json(self) -> str:
        """As it is told through the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Introduction:
        """What ``to_json`` gave."""
        told = json.loads(text)
        return Introduction(**{**told, "host": Host(**told["host"])})


def introduction(nodes: Nodes, address: str) -> Introduction:
    """Of this node.

    Args:
        nodes: What it was asked.
        address: Where the others see it.
    """
    return Introduction(Host(socket.gethostname(), address), nodes.num_nodes, torch.__version__, nodes.asked)


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
