"""Choice of the engine for a Program; where both engines apply, their times are equal to the last bit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Program
from simplan.sim.compiled import Durations, compile_program
from simplan.sim.engine import CoreUse, Times, simulate

_FEWEST_OPERATIONS = 20_000
"""Operations from which the eight runs of a truncated prediction in SimPy (20 microseconds per operation together) take
longer than importing numba and loading its machine code (0.4 seconds)."""


class Engine(Protocol):
    """An engine with one Program, ready to run."""

    def times(self, durations_s: Durations) -> Times:
        """Returns start and end of every operation."""
        ...

    def step_times_s(self, durations_s: Sequence[Durations] | NDArray[np.float64]) -> Sequence[float]:
        """Returns the end of the last operation for each vector of durations, in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class _SimPy:
    """The reference engine."""

    program: Program
    sharing: CoreUse | None

    def times(self, durations_s: Durations) -> Times:
        return simulate(self.program, durations_s, self.sharing)

    def step_times_s(self, durations_s: Sequence[Durations] | NDArray[np.float64]) -> Sequence[float]:
        return [self.times(vector_s).step_time_s for vector_s in durations_s]


def load_compiled() -> None:
    """Loads the compiled engine, which then runs small Programs as well; useful before many simulations."""
    importlib.import_module("simplan.sim.longest_path")


def engine_of(program: Program, sharing: CoreUse | None) -> Engine:
    """Returns SimPy for shared cores and for small Programs, and the compiled engine for large static ones.

    Once the compiled engine is loaded, it runs small Programs as well.

    Args:
        sharing: Cores that operations share; None for no sharing.
    """
    loaded = "simplan.sim.longest_path" in sys.modules
    if sharing is None and (loaded or len(program) >= _FEWEST_OPERATIONS):
        return compile_program(program)
    return _SimPy(program, sharing)
