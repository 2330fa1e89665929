"""Jitter: the durations of a step vary at random, and at every synchronization all ranks wait for the slowest.

Seeded steps are simulated with durations of their own. With backup workers, each drops the replicas that are slowest in
it. The step nearest to their mean is the one that is shown, so that its timeline and its time splits are those of one
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import Jitter
from simplan.cost.program_costs import ProgramCosts
from simplan.predict.stragglers import BackupWorkers, computing_parts
from simplan.prediction import JitteredStep
from simplan.program.action import ActionKind
from simplan.program.program import Program
from simplan.program.timeline import SpanKind
from simplan.sim.compiled import CompiledProgram, compile_program, leaders_of

_Floats = NDArray[np.float64]
NUM_STEPS = 200
"""Simulated steps: their mean has a standard error of 1/14 of the deviation of a step."""
_BATCH = 8
_MAX_FACTORS = 2**22
"""Factors that are in memory together; of a larger Program, those of one step."""
_COMPUTE, _COMMUNICATION = range(2)


@dataclass(frozen=True, eq=False)
class Factors:
    """Random factors of the operations of a Program.

    The factors of a rank depend on the seed and its own actions, so that jobs with more ranks or more jitter have the
    same luck as those with less.
    """

    program: Program
    jitter: Jitter
    computing: _Floats

    @classmethod
    def of(cls, program: Program, program_costs: ProgramCosts, jitter: Jitter) -> Factors:
        """Factors of a Program with cost estimates."""
        return cls(program, jitter, computing_parts(program, program_costs))

    def parts(self, number: int) -> Iterator[_Floats]:
        """Yield ``(num_steps, num_ops)`` factors of the durations in the steps of a batch, a few steps at a time.

        They are equal for the members of a meeting.

        Args:
            number: Number of the batch of steps, from 0.
        """
        of_compute, of_communication = (
            _with_mean_1(self._drawn(number, what), self.jitter.distribution, relative_std)
            for what, relative_std in (
                (_COMPUTE, self.jitter.compute_relative_std),
                (_COMMUNICATION, self.jitter.communication_relative_std),
            )
        )
        action, communicates = self._actions[2], self.program.of_kind(SpanKind.COMMUNICATION)
        together = max(1, min(_BATCH, _MAX_FACTORS // max(1, len(self.program))))
        for first in range(0, _BATCH, together):
            rows = slice(first, first + together)
            factors = 1.0 + (of_compute[rows, action] - 1.0) * self.computing
            factors[:, communicates] = of_communication[rows, action[communicates]]
            yield np.asarray(factors[:, self._leaders])

    @cached_property
    def _actions(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Ranks and their numbers of actions, and the action of each operation."""
        columns = self.program.columns
        actions, stages = len(ActionKind), int(columns.stage.max(initial=0)) + 1
        microbatches = int(columns.microbatch.max(initial=0)) + 2
        key = (columns.rank.astype(np.int64) * actions + columns.action) * stages + columns.stage
        keys, action = np.unique(key * microbatches + columns.microbatch + 1, return_inverse=True)
        ranks, counts = np.unique(keys // (actions * stages * microbatches), return_counts=True)
        return ranks, counts, action

    @cached_property
    def _leaders(self) -> NDArray[np.int64]:
        return leaders_of(self.program)

    def _drawn(self, number: int, what: int) -> _Floats:
        """``(_BATCH, num_actions)`` Standard samples of all actions of all ranks."""
        parts = []
        for rank, count in zip(*(column.tolist() for column in self._actions[:2]), strict=True):
            random = np.random.default_rng((self.jitter.seed, rank, number, what))
            draw = random.standard_exponential if self.jitter.distribution == "exponential" else random.standard_normal
            parts.append(draw((_BATCH, count)))
        return np.concatenate(parts, axis=1)


def _with_mean_1(drawn: _Floats, distribution: str, relative_std: float) -> _Floats:
    """Factors with mean 1 and a standard deviation, from standard normal or exponential samples."""
    if distribution == "lognormal":
        variance = np.log1p(relative_std**2)
        return np.asarray(np.exp(np.sqrt(variance) * drawn - variance / 2))
    if distribution == "exponential":
        return 1.0 + relative_std * (drawn - 1.0)
    return np.maximum(0.0, 1.0 + relative_std * drawn)


def apply_jitter(
    program: Program, program_costs: ProgramCosts, jitter: Jitter, replicas: BackupWorkers | None = None
) -> tuple[ProgramCosts, JitteredStep, _Floats]:
    """Simulate steps with jitter.

    Contention on links and the overlap slowdown are those of the step without jitter.

    Args:
        program: Program of all ranks: ranks with jitter are not alike.
        program_costs: Its durations without jitter.
        jitter: Distribution of the durations.
        replicas: Replicas of which every step drops the slowest; None to wait for all.

    Returns:
        Costs of the step nearest to the mean, step times of all simulated steps, and the ``(num_ops,)`` factors of the
        durations of the returned step.
    """
    factors = Factors.of(program, program_costs, jitter)
    compiled = compile_program(program, num_runs=NUM_STEPS)

    def steps_s(drawn: _Floats) -> _Floats:
        """``(num_steps, num_ops)`` Durations with these factors; those of dropped replicas are cut."""
        durations_s = drawn * program_costs.durations_s
        return durations_s if replicas is None else _cut(replicas, compiled, durations_s * replicas.slowness)

    times_s = np.concatenate(
        [
            compiled.step_times_s(steps_s(part))
            for number in range(NUM_STEPS // _BATCH)
            for part in factors.parts(number)
        ]
    )
    mean_s = float(times_s.mean())
    number, row = divmod(int(np.abs(times_s - mean_s).argmin()), _BATCH)
    rows = (factor_row for part in factors.parts(number) for factor_row in part)
    chosen, before_s = next(islice(rows, row, None)), program_costs.durations_s
    if replicas is not None:
        chosen = np.divide(steps_s(chosen[None])[0], before_s, out=np.ones_like(before_s), where=before_s > 0)
    uncontended_s, without_s = program_costs.uncontended_s, program_costs.without_background_s
    costs = replace(
        program_costs,
        durations_s=program_costs.durations_s * chosen,
        deviations_s=program_costs.deviations_s * chosen,
        uncontended_s=None if uncontended_s is None else uncontended_s * chosen,
        without_background_s=None if without_s is None else without_s * chosen,
    )
    low_s, median_s, high_s = np.quantile(times_s, (0.05, 0.5, 0.95)).tolist()
    step = JitteredStep(
        num_steps=NUM_STEPS,
        without_s=compiled.step_times_s(steps_s(np.ones((1, len(program)))))[0],
        mean_s=mean_s,
        median_s=median_s,
        range_s=(low_s, high_s),
    )
    return costs, step, chosen


def _cut(replicas: BackupWorkers, compiled: CompiledProgram, durations_s: _Floats) -> _Floats:
    """``(num_steps, num_ops)`` Durations of steps that drop their slowest replicas."""
    ends_s = compiled.spans(durations_s)[1]
    return np.array([own_s[replicas.sources(end_s)] for own_s, end_s in zip(durations_s, ends_s, strict=True)])
