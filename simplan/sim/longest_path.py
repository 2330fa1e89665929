"""Inner loops of the compiled engine, compiled with numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplan.jit import jit

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@jit
def topological_order(first: Ints, after: Ints, missing: Ints) -> Ints:
    """Returns the nodes in topological order; fewer than all nodes if there is a cycle.

    The last node to become ready comes first (Kahn 1962, with a stack). The order therefore follows a rank until the
    rank has to wait, and a node's inputs were written shortly before the node.

    Args:
        first: Offsets into ``after`` at which each node's successors begin; one more entry for the end.
        after: Successors of all nodes.
        missing: Per node, the number of its predecessors; modified.
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
    """Computes start and end of every node.

    Args:
        first: Offsets into ``before`` at which each node's predecessors begin; nodes are in topological order.
        before: Predecessors of all nodes.
        leader: Per node, the operation whose duration it has.
        durations_s: ``(num_ops,)`` Durations in seconds.
        start_s, end_s: ``(num_nodes,)`` Start and end in seconds; written to.
    """
    for node in range(len(leader)):
        ready_s = 0.0
        for edge in range(first[node], first[node + 1]):
            ready_s = max(ready_s, end_s[before[edge]])
        start_s[node] = ready_s
        end_s[node] = ready_s + durations_s[leader[node]]


@jit
def latest_ends(first: Ints, before: Ints, leader: Ints, durations_s: Floats, end_s: Floats, latest_s: Floats) -> None:
    """Computes the end of the last node under several duration vectors together.

    Args:
        first, before, leader: As for ``node_ends``.
        durations_s: ``(num_vectors, num_ops)`` Durations in seconds.
        end_s: ``(num_nodes, num_vectors)`` Scratch; its rows are contiguous so that the inner loops are vectorized.
        latest_s: ``(num_vectors,)`` End of the last node in seconds; written to.
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
    """Computes the time from the start of every node to the end of the step, on the longest path.

    Args:
        first, before, leader, durations_s: As for ``node_ends``.
        tail_s: ``(num_nodes,)`` Time in seconds; written to.
    """
    tail_s[:] = 0.0
    for node in range(len(leader) - 1, -1, -1):
        tail_s[node] += durations_s[leader[node]]
        for edge in range(first[node], first[node + 1]):
            tail_s[before[edge]] = max(tail_s[before[edge]], tail_s[node])
