"""Colors for light and dark themes, distinguishable with color blindness; color is never the only cue."""

from __future__ import annotations

from collections.abc import Mapping

from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory

__all__ = ["ACTIONS", "COMMUNICATION", "GRID", "MEMORY", "MUTED", "PLANS", "SPLIT"]

MEMORY: Mapping[MemoryCategory, str] = {
    MemoryCategory.PARAMETERS: "#4ea5b7",  # four colors as in the Ultra-Scale Playbook
    MemoryCategory.GRADIENTS: "#e889ab",
    MemoryCategory.OPTIMIZER: "#cec0fa",
    MemoryCategory.ACTIVATIONS: "#e38a42",
    MemoryCategory.GATHERED: "#2f6f86",
    MemoryCategory.BUFFERS: "#7a1f4b",
    MemoryCategory.LOGITS: "#f2c14e",
    MemoryCategory.WORKSPACE: "#565f6a",
    MemoryCategory.CONTEXT: "#d9dde2",
}
"""Memory categories on a device, in the order of the stack."""

ACTIONS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "#3b7dd8",
    ActionKind.BACKWARD: "#e5892b",
    ActionKind.BACKWARD_INPUT: "#1abc9c",
    ActionKind.BACKWARD_WEIGHT: "#3a7d2c",
    ActionKind.UNSHARD: "#a79bc9",
    ActionKind.REDUCE_GRAD: "#a79bc9",
    ActionKind.OPTIM: "#6b7078",
}
COMMUNICATION = "#8c7aa9"

SPLIT: Mapping[str, str] = {
    "compute": "#3b7dd8",
    "recompute": "#9cc2f0",
    "exposed communication": COMMUNICATION,
    "wait": "#d5d9df",
    "host": "#c8a24a",
    "optimizer": "#565d66",
}
"""Parts of a rank's step."""

PLANS = ("#3b7dd8", "#e5892b", "#3fc9b8", "#c2548a", "#a79bc9", "#4a525c")
"""One after the other, for things of one kind: plans, sources, schedules."""

MUTED, GRID = "#8a8f98", "rgba(128,136,148,0.25)"
