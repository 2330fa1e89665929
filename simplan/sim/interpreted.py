"""Loops of the compiled engine in the interpreter, for processes that simulate little; see ``simplan.sim.jitted``."""

from __future__ import annotations

import numpy as np

from simplan.sim.longest_path import Floats, Ints, node_ends, node_tails
from simplan.sim.longest_path import topological_order as _topological_order


def topological_order(first: Ints, after: Ints, missing: Ints) -> Ints:
    """Returns the nodes in topological order; fewer than all nodes if there is a cycle."""
    num_nodes = len(missing)
    ready, order = [0] * num_nodes, [0] * num_nodes
    num_done = _topological_order(first.tolist(), after.tolist(), missing.tolist(), ready, order)
    return np.array(order[:num_done], np.int32)


def spans(first: Ints, before: Ints, durations_s: Floats) -> tuple[Floats, Floats]:
    """Returns start and end of every node in seconds."""
    num_nodes = len(durations_s)
    start_s, end_s = [0.0] * num_nodes, [0.0] * num_nodes
    node_ends(first.tolist(), before.tolist(), durations_s.tolist(), start_s, end_s)
    return np.array(start_s), np.array(end_s)


def tails(first: Ints, before: Ints, durations_s: Floats) -> Floats:
    """Returns the seconds from the start of every node to the end of the step."""
    tail_s = [0.0] * len(durations_s)
    node_tails(first.tolist(), before.tolist(), durations_s.tolist(), tail_s)
    return np.array(tail_s)


def latest(first: Ints, before: Ints, leader: Ints, durations_s: Floats) -> Floats:
    """``(num_vectors,)`` Returns the end of the last node for each vector of durations of operations."""
    return np.array([spans(first, before, vector_s)[1].max(initial=0.0) for vector_s in durations_s[:, leader]])
