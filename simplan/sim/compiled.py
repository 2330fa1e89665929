"""The compiled engine: a static Program as arrays, and its longest path under many duration vectors together.

A Program is static if durations do not depend on concurrent operations: the order on every stream is fixed, and a
meeting is one node that starts when all its members are ready. The SimPy engine then computes a longest path. So does
this engine, with the same additions and maxima, and therefore with equal times to the last bit. If ranks share cores
only the SimPy engine applies, and it is the reference in all other cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from simplan.errors import NotModelledError, Problem
from simplan.program.program import STREAMS, Program
from simplan.program.timeline import Times
from simplan.sim.engine import CoreUse

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int32]
Durations = Sequence[float] | _Floats
JITTED, INTERPRETED = "simplan.sim.jitted", "simplan.sim.longest_path"
_RUNS_OF_A_PREDICTION = 10
_FEWEST_RUN = 400_000
"""Operations times runs for which the interpreter (1 microsecond each) needs as long as to load numba."""
_FEWEST_OPERATIONS = 5_000
"""Operations from which a further prediction loads the machine code: that pays after a dozen predictions."""


class Loops(Protocol):
    """Loops over the nodes of a graph: the modules ``simplan.sim.jitted`` and ``simplan.sim.longest_path``."""

    def topological_order(self, first: _Indices, after: _Indices, missing: _Indices, /) -> _Indices:
        """Returns the nodes in topological order; fewer than all nodes if there is a cycle."""
        ...

    def spans(self, first: _Indices, before: _Indices, durations_s: _Floats, /) -> tuple[_Floats, _Floats]:
        """Returns start and end of every node, from the durations of the nodes."""
        ...

    def tails(self, first: _Indices, before: _Indices, durations_s: _Floats, /) -> _Floats:
        """Returns the time from the start of every node to the end of the step, from the durations of the nodes."""
        ...

    def latest(self, first: _Indices, before: _Indices, leader: _Indices, durations_s: _Floats, /) -> _Floats:
        """Returns the end of the last node for each vector of durations of the operations."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CompiledProgram:
    """A Program's operations as nodes of a graph, with the members of a meeting as one node, without durations.

    Attributes:
        node: ``(num_ops,)`` Node of each operation of ``Program.ops``. Nodes are numbered in topological order.
        leader: ``(num_nodes,)`` Operation whose duration the node has: the first operation of a meeting.
        first: ``(num_nodes + 1,)`` Offsets into ``before`` at which the predecessors of each node begin.
        before: ``(num_edges,)`` Predecessors of all nodes, on the streams and through waits.
        loops: Loops over the nodes, compiled or interpreted.
    """

    node: _Indices
    leader: _Indices
    first: _Indices
    before: _Indices
    loops: Loops

    def times(self, durations_s: Durations) -> Times:
        """Returns start and end of every operation, as ``simplan.sim.engine.simulate`` does.

        Args:
            durations_s: ``(num_ops,)`` Seconds of every operation alone.
        """
        return Times(*self.spans(durations_s))

    def spans(self, durations_s: Durations) -> tuple[_Floats, _Floats]:
        """Returns start and end of every operation, in seconds, in the shape of the durations.

        Args:
            durations_s: ``(num_ops,)`` or ``(num_vectors, num_ops)``, in seconds.
        """
        given_s = np.ascontiguousarray(durations_s, np.float64)
        vectors_s = np.atleast_2d(given_s)
        assert vectors_s.shape[1] == len(self.node), vectors_s.shape
        starts_s, ends_s = np.empty_like(vectors_s), np.empty_like(vectors_s)
        for k, vector_s in enumerate(vectors_s):
            start_s, end_s = self.loops.spans(self.first, self.before, vector_s[self.leader])
            starts_s[k], ends_s[k] = start_s[self.node], end_s[self.node]
        return starts_s.reshape(given_s.shape), ends_s.reshape(given_s.shape)

    def tails_s(self, durations_s: Durations) -> _Floats:
        """Returns the seconds from the start of every operation to the end of the step, on the longest path.

        Args:
            durations_s: ``(num_ops,)`` Durations in seconds.
        """
        tail_s = self.loops.tails(self.first, self.before, np.asarray(durations_s, np.float64)[self.leader])
        return np.asarray(tail_s[self.node])

    def step_times_s(self, durations_s: Sequence[Durations] | _Floats) -> list[float]:
        """Returns the end of the last operation for each vector of durations, in seconds.

        Args:
            durations_s: ``(num_vectors, num_ops)`` Durations in seconds.
        """
        vectors_s = np.ascontiguousarray(durations_s, np.float64)
        assert vectors_s.shape == (len(vectors_s), len(self.node)), vectors_s.shape
        latest_s: list[float] = self.loops.latest(self.first, self.before, self.leader, vectors_s).tolist()
        return latest_s


def load_compiled() -> None:
    """Loads the machine code of the compiled engine, which then runs small Programs as well."""
    import_module(JITTED)


def load_for_another(programs: Iterable[Program]) -> None:
    """Loads the machine code if this process has simulated before, and the Programs of its next prediction are large.

    So the first prediction of a process does not wait for numba, and the second one is compiled.
    """
    if INTERPRETED in sys.modules and sum(map(len, programs)) >= _FEWEST_OPERATIONS:
        load_compiled()


def compile_program(
    program: Program, sharing: CoreUse | None = None, *, num_runs: int = _RUNS_OF_A_PREDICTION
) -> CompiledProgram:
    """Returns a static Program as arrays.

    Args:
        program: A checked Program.
        sharing: Cores that operations share; None for no sharing.
        num_runs: Expected number of vectors of durations. Few runs of a small Program are interpreted, unless the
            machine code is loaded.

    Raises:
        NotModelledError: Operations share cores.
    """
    if sharing is not None:
        raise NotModelledError(
            Problem(
                field="cluster",
                rule=f"ranks share {sharing.cores_per_node} cores, so operations that run simultaneously slow "
                "each other down; the compiled engine takes static Programs only",
                fix="simulate it with the SimPy engine",
            )
        )
    jits = JITTED in sys.modules or len(program) * num_runs >= _FEWEST_RUN
    loops = cast(Loops, import_module(JITTED if jits else INTERPRETED))
    operation, node = np.unique(leaders_of(program), return_inverse=True)
    source, target = (node[operations] for operations in _edges(program))
    num_nodes = len(operation)
    first, after = _adjacent(source, target, num_nodes)
    order = loops.topological_order(first, after, np.bincount(target, minlength=num_nodes).astype(np.int32))
    assert len(order) == num_nodes, "deadlock in a checked Program"
    number = np.empty(num_nodes, np.int32)
    number[order] = np.arange(num_nodes, dtype=np.int32)
    first, before = _adjacent(number[target], number[source], num_nodes)
    return CompiledProgram(number[node], operation[order].astype(np.int32), first, before, loops)


def leaders_of(program: Program) -> npt.NDArray[np.int64]:
    """``(num_ops,)`` Returns the first operation of each operation's meeting, or itself without a meeting."""
    meeting = program.columns.meeting
    leaders = np.arange(len(program))
    meets = np.flatnonzero(meeting >= 0)
    _, first, which = np.unique(meeting[meets], return_index=True, return_inverse=True)
    leaders[meets] = meets[first][which]
    return leaders


def _edges(program: Program) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns pairs of operations in order of execution: neighbors on the streams, then waits."""
    columns = program.columns
    place = columns.rank.astype(np.int64) * len(STREAMS) + columns.stream
    order = np.argsort(place, kind="stable")
    follows = np.flatnonzero(np.diff(place[order]) == 0)
    waiting = np.repeat(np.arange(len(program)), np.diff(columns.wait_first))
    return (
        np.concatenate([order[follows], columns.wait.astype(np.int64)]),
        np.concatenate([order[follows + 1], waiting]),
    )


def _adjacent(
    ours: npt.NDArray[np.integer], others: npt.NDArray[np.integer], num_nodes: int
) -> tuple[_Indices, _Indices]:
    """Returns the neighbors of every node in compressed sparse rows: offsets and neighbors."""
    first = np.zeros(num_nodes + 1, np.int32)
    np.cumsum(np.bincount(ours, minlength=num_nodes), out=first[1:])
    return first, others[np.argsort(ours, kind="stable")].astype(np.int32)
