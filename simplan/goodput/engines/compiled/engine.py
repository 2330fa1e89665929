"""Many runs at once, from the numbers of a setup to those of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.engines.checkpoints import REPEATED
from simplan.goodput.engines.compiled.job import begin, train
from simplan.goodput.engines.compiled.state import (
    ARRAYS,
    POLICIES,
    SOURCE_STATE,
    WASTED,
    CompiledRun,
    RunRecord,
    causes,
    numbers,
    table,
)
from simplan.goodput.setup import WATERFALL, Runs, RunSetup
from simplan.jit import jit


def simulate(setup: RunSetup, seed: int, of_runs: range, *, limit_s: float, max_stops: int) -> Runs | None:
    """Returns the runs with these numbers; None if one of them is endless."""
    num_runs, sources = len(of_runs), table(causes(setup), SOURCE_STATE)
    states = np.zeros(num_runs, [*numbers(RunRecord), *((name, np.float64, size) for name, size in ARRAYS.items())])
    states["seed"], states["number"] = seed, of_runs
    states["limit_s"], states["max_stops"] = limit_s, max_stops
    states["policy"], states["num_sources"] = POLICIES.index(setup.policy), len(sources)
    sources["source"] = range(len(sources))
    runs = Runs(
        time_s=np.empty(num_runs),
        waterfall_s=np.empty((num_runs, len(WATERFALL))),
        interruptions=np.empty((num_runs, len(sources)), np.int64),
        node_s=np.empty((num_runs, 4)),
        checkpoints=np.empty(num_runs, np.int64),
    )
    offered = np.minimum(setup.trace_nodes, setup.num_nodes + setup.spares, dtype=np.float64)
    trace = np.column_stack([setup.trace_s, [*offered, *offered[:1]]])
    if not _simulate(table([setup]), table(setup.sizes), sources, trace, states, runs.interruptions):
        return None
    runs.time_s[:], runs.checkpoints[:], runs.node_s[:] = states["now_s"], states["num_written"], states["node_s"]
    parts_s = np.hstack([states["progress"][:, : len(REPEATED)], states["wasted_s"]])
    runs.waterfall_s[:] = parts_s[:, [(*REPEATED, *WASTED).index(part) for part in WATERFALL]]
    return runs


@jit
def _simulate(
    setups: NDArray[Any],
    sizes: NDArray[Any],
    sources: NDArray[Any],
    trace: NDArray[np.float64],
    states: NDArray[Any],
    interruptions: NDArray[np.int64],
) -> bool:
    """Carry each state to the end of its run; returns False if a run is endless."""
    for run in range(len(states)):
        job = CompiledRun(
            setup=setups[0],
            state=states[run],
            sizes=sizes,
            sources=sources.copy(),
            trace=trace,
            history=[(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for _ in range(0)],
            hidden=[(0.0, 0, 0.0) for _ in range(0)],
            moves=[(0.0, 0) for _ in range(0)],
            starting=[0.0 for _ in range(0)],
            lost=[(0, 0) for _ in range(0)],
            stops=[(0, 0, False, 0.0, 0.0) for _ in range(0)],
        )
        begin(job)
        train(job)
        if job.state.is_endless:
            return False
        for source in range(len(sources)):
            interruptions[run, source] = job.sources[source].num_interruptions
    return True
