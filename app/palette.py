"""Colours, the same on light and dark paper, told apart without seeing red or green; none tells anything alone."""

from __future__ import annotations

from collections.abc import Mapping

from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory

__all__ = ["ACTIONS", "COMMUNICATION", "GRID", "MEMORY", "MUTED", "PLANS", "SPLIT"]

MEMORY: Mapping[MemoryCategory, str] = {
    MemoryCategory.PARAMETERS: "#4ea5b7",  # these four as the Ultra-Scale Playbook draws them
    MemoryCategory.GRADIENTS: "#e889ab",
    MemoryCategory.OPTIMIZER: "#cec0fa",
    MemoryCategory.ACTIVATIONS: "#e38a42",
    MemoryCategory.GATHERED: "#2f6f86",
    MemoryCategory.BUFFERS: "#a3486c",
    MemoryCategory.LOGITS: "#f2c14e",
    MemoryCategory.WORKSPACE: "#7d8b99",
    MemoryCategory.CONTEXT: "#b7bec7",
}
"""What is on a device, in the order of the stack."""

ACTIONS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "#3b7dd8",
    ActionKind.BACKWARD: "#e5892b",
    ActionKind.BACKWARD_INPUT: "#2aa198",
    ActionKind.BACKWARD_WEIGHT: "#5aa02c",
    ActionKind.UNSHARD: "#a79bc9",
    ActionKind.REDUCE_GRAD: "#a79bc9",
    ActionKind.OPTIM: "#8a8f98",
}
COMMUNICATION = "#8c7aa9"

SPLIT: Mapping[str, str] = {
    "compute": "#3b7dd8",
    "recompute": "#9cc2f0",
    "exposed communication": COMMUNICATION,
    "wait": "#d5d9df",
    "host": "#c8a24a",
    "optimizer": "#8a8f98",
}
"""Parts of a rank's step."""

PLANS = ("#3b7dd8", "#e5892b", "#2aa198", "#c2548a", "#7a68b3", "#8a8f98")
"""One after the other, for things of one kind: plans, sources, schedules."""

MUTED, GRID = "#8a8f98", "rgba(128,136,148,0.25)"
