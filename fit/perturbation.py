"""Change of step times when communication and host work deviate from their cost estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from joblib import Parallel, delayed

from fit.robust import Floats, Values
from fit.rows import FitCosts, FitRow, between_nodes, run_at
from simplan.accuracy.run import PublishedRun
from simplan.cost.program_costs import ProgramCosts
from simplan.predict.simulated import sources_of_error
from simplan.predict.step_summary import summarized_step
from simplan.program.program import Communication, LayerWork, OverlapRemainder, Program, Work

BETWEEN = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 2.5)
"""Relative standard deviations of communication between nodes at which steps are evaluated."""


class MovedParts(NamedTuple):
    """Sensitivity of the step time of a run to errors of cost estimates.

    Attributes:
        computing: Compute time as a fraction of the predicted step time.
        longer, shorter: Change of the log step time when communication and host work are one standard deviation slower,
            or faster. One value per entry of ``BETWEEN`` for communication between nodes; all else has its own
            deviation.
    """

    software: str
    computing: float
    longer: tuple[float, ...]
    shorter: tuple[float, ...]


def parts_of(rows: Sequence[FitRow], values: Values, jobs: int = -1) -> list[MovedParts]:
    """Compute the sensitivities of runs at the given constants, in ``jobs`` processes (-1: one per core)."""
    costs, computing = FitCosts(values), []
    for row in rows:
        computing_s = sum(t.times * costs.seconds(row.job, t) for t in row.terms if isinstance(t.work, LayerWork))
        computing.append(computing_s / row.predicted_s(costs))
    moves = Parallel(n_jobs=jobs)(delayed(_moves)(run_at(row.run, values)) for row in rows)
    named = zip(rows, computing, moves, strict=True)
    return [MovedParts(row.job.software.id, share, longer, shorter) for row, share, (longer, shorter) in named]


def _communications_of(work: Work) -> tuple[Communication, ...]:
    """Communication of work, including overlapped communication of which only the excess over GEMMs remains."""
    if isinstance(work, Communication):
        return (work,)
    return work.communications if isinstance(work, OverlapRemainder) else ()


def _moves(run: PublishedRun) -> tuple[tuple[float, ...], tuple[float, ...]]:
    cluster = run.known_job.cluster

    def crosses(works: tuple[Work, ...]) -> bool:
        return any(
            between_nodes(cluster, communication) for work in works for communication in _communications_of(work)
        )

    def moved(program: Program, program_costs: ProgramCosts) -> list[Floats]:
        durations_s = program_costs.durations_s
        relative_std = np.divide(
            program_costs.deviations_s, durations_s, out=np.zeros_like(durations_s), where=durations_s > 0
        )
        sources = sources_of_error(program)
        are_between = np.array([crosses(works) for works in program.works])[program.columns.work]
        communications = np.where(sources["communication"], relative_std, 0.0)
        factors = [1 + np.where(are_between, std, communications) for std in BETWEEN]
        factors.append(1 + np.where(sources["host"], relative_std, 0.0))
        return [durations_s * factor for factor in factors] + [durations_s / factor for factor in factors]

    plain_s, *moved_s = summarized_step(run.known_job, steps_overlap=run.steps_overlap).seconds(
        moved, steps_overlap=run.steps_overlap
    )
    logs = np.log(np.array(moved_s) / plain_s).reshape(2, -1)
    longer, shorter = (tuple(map(float, np.hypot(side[:-1], side[-1]))) for side in logs)
    return longer, shorter
