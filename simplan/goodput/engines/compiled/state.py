"""State of a run as records, of which numba knows the types, and tables of the numbers of a setup."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.engines.checkpoints import REPEATED
from simplan.goodput.engines.draws import NUM_PURPOSES
from simplan.goodput.engines.philox import WORDS
from simplan.goodput.setup import WATERFALL, CauseSetup, RunSetup

POLICIES = ("restart", "shrink", "continue")
SHRINK, CONTINUE = 1, 2

# A progress is eight numbers: seconds by part of ``REPEATED``, then three more.
COMPUTE, EVALUATION, CHECKPOINT, SLOW_DEVICE, FEWER_NODES, POSITION, DUE, COMPLETE_AT = range(8)
PROGRESS = 8
EVALUATION_DUE, MEMORY_DUE, STORAGE_DUE = 1, 2, 4  # bits of ``DUE``

WASTED = tuple(part for part in WATERFALL if part not in REPEATED)
LOST_WORK, DETECTION, DIAGNOSIS, WAITING, RESTART, MEMBERSHIP, MAINTENANCE = range(len(WASTED))

WINDOW, GROWTH = -1, -2  # stops that are no interruptions

_DTYPES: dict[Any, type] = {int: np.int64, float: np.float64, bool: np.bool_}


class RunRecord:
    """Numbers of a run that change, a record; ``reference._Job`` has most under the same names.

    Attributes:
        seed, number: Key of the random numbers.
        limit_s, max_stops: Time and stops after which the run is endless.
        policy: Index in ``POLICIES``.
        not_aged_s: Seconds in which units did not grow older: their age is ``now_s - not_aged_s``.
        soonest_s: Time of the next thing that happens.
        next_move_s, next_ready_s: Time at which the next node returns or leaves, and group is ready.
        next_age_s, next_source: Age and source of the next event that comes with age.
        full_step_s, size_step_s, advance: Step of the whole job; step and advance of the size in use.
        larger_nodes: Nodes of the next larger size, for ``shrink``.
        source, num_nodes, is_planned, detection_s, corrupt_since_s: The last stop.
        preemption_left, preemption_nodes, preemption_since_s: Expected preemptions until the next one, left at a time
            since which so many nodes could be preempted.
        trace_row, trace_at_s: Row of the trace, and time of the next one.
        debt: Nodes that the trace takes once they are repaired.
        in_flight_at_s: Time at which the checkpoint that is being written counts; infinity for none.
        oldest: Index of the oldest kept checkpoint.
    """

    seed: int
    number: int
    limit_s: float
    max_stops: int
    policy: int
    num_sources: int
    now_s: float
    not_aged_s: float
    soonest_s: float
    next_move_s: float
    next_ready_s: float
    next_age_s: float
    next_source: int
    aging: bool
    held: int
    in_use: int
    full_step_s: float
    size_step_s: float
    advance: float
    larger_nodes: int
    spares: int
    on_demand: int
    num_slow: int
    source: int
    num_nodes: int
    is_planned: bool
    detection_s: float
    corrupt_since_s: float
    preemption_left: float
    preemption_nodes: int
    preemption_since_s: float
    preemption_at_s: float
    trace_row: int
    trace_at_s: float
    debt: int
    is_stopping: bool
    is_restarting: bool
    cut: bool
    window_at_s: float
    window_end_s: float
    in_flight_at_s: float
    oldest: int
    num_written: int
    num_stops: int
    is_endless: bool
    # arrays in the record
    progress: NDArray[np.float64]
    stored: NDArray[np.float64]  # last checkpoint in storage
    memory: NDArray[np.float64]
    in_flight: NDArray[np.float64]
    wasted_s: NDArray[np.float64]
    node_s: NDArray[np.float64]


ARRAYS = {
    "progress": PROGRESS,
    "stored": PROGRESS,
    "memory": PROGRESS,
    "in_flight": PROGRESS,
    "wasted_s": len(WASTED),
    "node_s": 4,
}


class StopSource(CauseSetup):
    """A source of stops, a record: the numbers of its cause, and these."""

    source: int
    next_age_s: float
    num_interruptions: int
    num_drawn: NDArray[np.int64]
    blocks: NDArray[np.uint64]


SOURCE_STATE: list[Any] = [
    ("source", np.int64),
    ("next_age_s", np.float64),
    ("num_interruptions", np.int64),
    ("num_drawn", np.int64, NUM_PURPOSES),
    ("blocks", np.uint64, (NUM_PURPOSES, WORDS)),
]


class CompiledRun(NamedTuple):
    """A run. Numba counts references to its arrays and lists; functions of the inner loop get the two records alone.

    Attributes:
        setup: Numbers of the setup, a record.
        sizes, sources: Its sizes, and its causes with corruption, slow devices and preemptions, one record for each;
            those of sources have the age of the next event and the random numbers drawn.
        trace: (rows, 2) Times at which the number of spot nodes changes, and how many the job takes; empty for none.
        history: Progress of the checkpoints in storage, oldest first; empty if nothing can corrupt them.
        hidden: Heap of (age at which a fault is found, its source, age since which checkpoints are corrupt).
        moves: Heap of (time, change of the nodes on demand): 0 for a lost node that returns, -1 for one that leaves.
        starting: Times at which groups are ready, in order.
        lost: (source, nodes) that have been lost and not yet released.
        stops: (source, nodes, is planned, seconds to notice it, corrupt since this age) of the stops to come.
    """

    setup: RunSetup
    state: RunRecord
    sizes: NDArray[Any]
    sources: NDArray[Any]
    trace: NDArray[np.float64]
    history: list[tuple[float, ...]]
    hidden: list[tuple[float, int, float]]
    moves: list[tuple[float, int]]
    starting: list[float]
    lost: list[tuple[int, int]]
    stops: list[tuple[int, int, bool, float, float]]


def numbers(kind: type) -> list[tuple[str, type]]:
    """Numbers among the attributes of a class, as fields of a record."""
    return [(name, _DTYPES[hint]) for name, hint in get_type_hints(kind).items() if hint in _DTYPES]


def table(items: Sequence[Any], state: Sequence[Any] = ()) -> NDArray[Any]:
    """One record for each item, with fields for a state that begins at zero."""
    fields = numbers(type(items[0]))
    records = np.zeros(len(items), [*fields, *state])
    for name, _ in fields:
        records[name] = [getattr(item, name) for item in items]
    return records


def causes(setup: RunSetup) -> list[CauseSetup]:
    """Causes; then corruption, slow devices and preemptions, the last of which do not come with age."""
    devices, spot_wait_s = setup.devices_per_node, inf if setup.trace_s else setup.spot_wait_s
    return [
        *setup.causes,
        CauseSetup(name="", units_per_node=devices, mtbf_s=setup.corruption_mtbf_s, repair_s=setup.repair_s),
        CauseSetup(name="", units_per_node=devices, mtbf_s=setup.slow_mtbf_s, repair_s=setup.repair_s),
        CauseSetup(name="", units_per_node=1, mtbf_s=inf, repair_s=spot_wait_s),
    ]
