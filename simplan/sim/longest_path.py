"""Loops of the compiled engine over lists: for processes that simulate little; ``simplan.sim.jitted`` compiles them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


_Ints = Sequence[int] | Ints
_Floats = Sequence[float] | Floats


def write_order(
    first: _Ints, after: _Ints, missing: list[int] | Ints, ready: list[int] | Ints, order: list[int] | Ints
) -> int:
    """Writes the nodes in topological order; returns their number, fewer than all nodes if there is a cycle.

    The last node to become ready comes first (Kahn 1962, with a stack). The order therefore follows a rank until the
    rank has to wait, and a node's inputs were written shortly before the node.

    Args:
        first: Offsets into ``after`` at which each node's successors begin; one more entry for the end.
        after: Successors of all nodes.
        missing: Per node, the number of its predecessors; modified.
        ready, order: ``(num_nodes,)`` Scratch, and the order; written to.
    """
    num_nodes = len(first) - 1
    num_ready = num_done = 0
    for node in range(num_nodes - 1, -1, -1):
        if missing[node] == 0:
            ready[num_ready] = node
            num_ready += 1
    while num_ready > 0:
        num_ready -= 1
        node = ready[num_ready]
        order[num_done] = node
        num_done += 1
        for other in after[first[node] : first[node + 1]]:
            missing[other] -= 1
            if missing[other] == 0:
                ready[num_ready] = other
                num_ready += 1
    return num_done


def node_ends(
    first: _Ints, before: _Ints, durations_s: _Floats, start_s: list[float] | Floats, end_s: list[float] | Floats
) -> None:
    """Computes start and end of every node.

    Args:
        first: Offsets into ``before`` at which each node's predecessors begin; nodes are in topological order.
        before: Predecessors of all nodes.
        durations_s: ``(num_nodes,)`` Durations in seconds.
        start_s, end_s: ``(num_nodes,)`` Start and end in seconds; written to.
    """
    for node in range(len(durations_s)):
        ready_s = 0.0
        for other in before[first[node] : first[node + 1]]:
            if end_s[other] > ready_s:  # max() would take the interpreter three times as long
                ready_s = end_s[other]
        start_s[node] = ready_s
        end_s[node] = ready_s + durations_s[node]


def node_tails(first: _Ints, before: _Ints, durations_s: _Floats, tail_s: list[float] | Floats) -> None:
    """Computes the time from the start of every node to the end of the step, on the longest path.

    Args:
        first, before, durations_s: As for ``node_ends``.
        tail_s: ``(num_nodes,)`` Zeros; time in seconds is written to it.
    """
    for node in range(len(durations_s) - 1, -1, -1):
        tail_s[node] += durations_s[node]
        for other in before[first[node] : first[node + 1]]:
            if tail_s[node] > tail_s[other]:
                tail_s[other] = tail_s[node]


def latest_ends(first: Ints, before: Ints, leader: Ints, durations_s: Floats, end_s: Floats, latest_s: Floats) -> None:
    """Computes the end of the last node under several duration vectors together; for numba only.

    Args:
        first, before: As for ``node_ends``.
        leader: Per node, the operation whose duration it has.
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


def topological_order(first: Ints, after: Ints, missing: Ints) -> Ints:
    """Returns the nodes in topological order; fewer than all nodes if there is a cycle."""
    num_nodes = len(missing)
    ready, order = [0] * num_nodes, [0] * num_nodes
    num_done = write_order(first.tolist(), after.tolist(), missing.tolist(), ready, order)
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
