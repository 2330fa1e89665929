"""What node 0 tells the others where it refuses a run before they have met."""

from __future__ import annotations

from typing import Literal

from simplan.program.nodes import Nodes
from simplan.spec.base import Spec

__all__ = ["Refusal"]


class Refusal(Spec):
    """Why nothing is run.

    Attributes:
        nodes: How the nodes meet.
        sentence: For people, the same on all nodes.
        exit_code: What the command returns on all nodes.
    """

    schema_version: Literal[1] = 1
    nodes: Nodes
    sentence: str
    exit_code: int
