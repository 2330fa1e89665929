"""Loops of the compiled engine as machine code. Importing this module imports numba, so import it lazily."""

from __future__ import annotations

import numpy as np

from simplan.jit import jit
from simplan.sim import longest_path
from simplan.sim.longest_path import Floats, Ints

_VECTORS = 8  # evaluated together: a node's ends fill one cache line
_write_order = jit(longest_path.write_order)
_node_ends = jit(longest_path.node_ends)
_node_tails = jit(longest_path.node_tails)
_latest_ends = jit(longest_path.latest_ends)


def topological_order(first: Ints, after: Ints, missing: Ints) -> Ints:
    """Returns the nodes in topological order; fewer than all nodes if there is a cycle."""
    ready, order = np.empty((2, len(missing)), np.int32)
    return order[: _write_order(first, after, missing, ready, order)]


def spans(first: Ints, before: Ints, durations_s: Floats) -> tuple[Floats, Floats]:
    """Returns start and end of every node in seconds."""
    start_s, end_s = np.empty((2, len(durations_s)))
    _node_ends(first, before, durations_s, start_s, end_s)
    return start_s, end_s


def tails(first: Ints, before: Ints, durations_s: Floats) -> Floats:
    """Returns the seconds from the start of every node to the end of the step."""
    tail_s = np.zeros(len(durations_s))
    _node_tails(first, before, durations_s, tail_s)
    return tail_s


def latest(first: Ints, before: Ints, leader: Ints, durations_s: Floats) -> Floats:
    """``(num_vectors,)`` Returns the end of the last node for each vector of durations of operations."""
    latest_s = np.empty(len(durations_s))
    for begin in range(0, len(durations_s), _VECTORS):
        part_s = durations_s[begin : begin + _VECTORS]
        end_s = np.empty((len(leader), len(part_s)))
        _latest_ends(first, before, leader, part_s, end_s, latest_s[begin : begin + _VECTORS])
    return latest_s
