"""Choice of the engine for a Program; where both engines apply, their times are equal to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Program
from simplan.sim.compiled import INTERPRETED, JITTED, Durations, compile_program
from simplan.sim.engine import CoreUse, Times, simulate

_FEWEST_OPERATIONS = 5_000
"""Operations from which a further prediction loads the machine code: that pays after a dozen predictions."""


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
    sharing: CoreUse

    def times(self, durations_s: Durations) -> Times:
        return simulate(self.program, durations_s, self.sharing)

    def step_times_s(self, durations_s: Sequence[Durations] | NDArray[np.float64]) -> Sequence[float]:
        return [self.times(vector_s).step_time_s for vector_s in durations_s]


def load_compiled() -> None:
    """Loads the machine code of the compiled engine, which then runs small Programs as well."""
    import_module(JITTED)


def load_for_another(programs: Iterable[Program]) -> None:
    """Loads the machine code if this process has simulated before, and the Programs of its next prediction are large.

    So the first prediction of a process does not wait for numba, and the second one is compiled.
    """
    if INTERPRETED in sys.modules and sum(map(len, programs)) >= _FEWEST_OPERATIONS:
        load_compiled()


def engine_of(program: Program, sharing: CoreUse | None) -> Engine:
    """Returns SimPy for ranks that share cores, and the compiled engine for static Programs.

    Args:
        sharing: Cores that operations share; None for no sharing.
    """
    return compile_program(program) if sharing is None else _SimPy(program, sharing)
