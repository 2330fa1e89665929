"""The loops of the compiled engine, in numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplan.jit import jit

__all__ = ["latest_ends", "node_ends", "node_tails", "topological_order"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@jit
def topological_order(first: Ints, after: Ints, missing: Ints) -> Ints:
    """Nodes in an order in which each comes after all before it; shorter than their number if there is a cycle.

    The node that became ready last goes first (Kahn 1962, with a stack): so an order follows a rank until it has to
    wait, and what a node needs was written not long before it.

    Args:
        first: Where each node's successors begin in ``after``; one more entry for the end.
        after: Successors of all nodes.
        missing: By node, its predecessors; used up.
    """
    num_nodes = len(missing)
    order = np.empty(num_nodes, np.int32)
    ready = np.empty(num_nodes, np.int32)
    num_ready = 0
    for node in range(num_nodes - 1, -1, -1):
        if missing[node] == 0:
            ready[num_ready] = node
            num_ready += 1
    num_done = 0
    while num_ready > 0:
        num_ready -= 1
        node = ready[num_ready]
        order[num_done] = node
        num_done += 1
        for edge in range(first[node], first[node + 1]):
            other = after[edge]
            missing[other] -= 1
            if missing[other] == 0:
                ready[num_ready] = other
                num_ready += 1
    return order[:num_done]


@jit
def node_ends(first: Ints, before: Ints, leader: Ints, durations_s: Floats, start_s: Floats, end_s: Floats) -> None:
    """Start and end of every node.

    Args:
        first: Where each node's predecessors begin in ``before``; nodes are numbered in topological order.
        before: Predecessors of all nodes.
        leader: By node, the operation whose duration it has.
        durations_s: By operation.
        start_s, end_s: By node; written to.
    """
    for node in range(len(leader)):
        ready_s = 0.0
        for edge in range(first[node], first[node + 1]):
            ready_s = max(ready_s, end_s[before[edge]])
        start_s[node] = ready_s
        end_s[node] = ready_s + durations_s[leader[node]]


@jit
def latest_ends(first: Ints, before: Ints, leader: Ints, durations_s: Floats, end_s: Floats, latest_s: Floats) -> None:
    """The end of the last node under several duration vectors at once.

    Args:
        first, before, leader: As for ``node_ends``.
        durations_s: By vector and operation.
        end_s: By node and vector; scratch, its rows contiguous so that the inner loops are vector instructions.
        latest_s: By vector; written to.
    """
    num_vectors = durations_s.shape[0]
    latest_s[:] = 0.0
    for node in range(len(leader)):
        for k in range(num_vectors):
            end_s[node, k] = 0.0
        for edge in range(first[node], first[node + 1]):
            other = before[edge]
            for k in range(num_vectors):
                end_s[node, k] = max(end_s[node, k], end_s[other, k])
        for k in range(num_vectors):
            end_s[node, k] += durations_s[k, leader[node]]
            latest_s[k] = max(latest_s[k], end_s[node, k])


@jit
def node_tails(first: Ints, before: Ints, leader: Ints, durations_s: Floats, tail_s: Floats) -> None:
    """From the start of every node to the end of the step, on the longest path.

    Args:
        first, before, leader, durations_s: As for ``node_ends``.
        tail_s: By node; written to.
    """
    tail_s[:] = 0.0
    for node in range(len(leader) - 1, -1, -1):
        tail_s[node] += durations_s[leader[node]]
        for edge in range(first[node], first[node + 1]):
            tail_s[before[edge]] = max(tail_s[before[edge]], tail_s[node])
