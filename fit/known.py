"""Fit how much wider intervals are where nothing was fitted, on runs that were left out of the fit.

A left-out run is predicted by constants of runs that lack its source, device, architecture or framework. How many of
those are at its level of each axis (``simplan.cost.known``) is what a prediction knows of new ground. The deviations of
the axes, and the number of runs that halves their square, maximize the posterior of all left-out errors, as
``fit.spread`` does for runs on known ground, whose deviations stay as they are.
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fit.perturbation import MovedParts
from fit.robust import Floats
from fit.spread import SpreadEstimate, deviations, log_density
from simplan import catalog
from simplan.cost.known import AXES, Ground, counts_of
from simplan.predict.simulated import NINE_IN_TEN

KNOWN_FILE = Path(catalog.__file__).parent / "known.yaml"
_STDS = tuple(np.exp(np.arange(np.log(0.01), np.log(1.0), 0.2)).tolist())
_USUAL, _LOG_STD = 0.06, 1.0  # drawn to about the deviation of compute on known ground
_HALF_AT = (2.0, 4.0, 8.0, 16.0)  # not fewer, since runs of one source are alike
_DIVIDED = 0.25  # see ``fit.step_times``
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Runs predicted by fits without their part.

    Attributes:
        errors: ``(runs,)`` Logarithms of predicted over measured step times.
        counts: By axis, ``(runs,)`` runs outside of the part that are at the level of each run.
    """

    errors: Floats
    counts: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class UnknownEstimate:
    """Deviations where nothing was fitted.

    Attributes:
        unknown_std: By axis, without runs.
        half_at: Runs that halve their square.
    """

    unknown_std: Mapping[str, float]
    half_at: float


def counts_without(
    grounds: Sequence[Ground], parts: Sequence[Hashable], others: Sequence[Ground] = ()
) -> dict[str, Floats]:
    """By axis, ``(runs,)`` runs at the level of each run that are not of its part.

    Args:
        grounds, parts: Ground and part of every run.
        others: Grounds of further runs, which are of no part.
    """
    by_part: dict[Hashable, Counter[Ground]] = {}
    for ground, part in zip(grounds, parts, strict=True):
        by_part.setdefault(part, Counter())[ground] += 1
    total = counts_of(Counter([*grounds, *others]))
    counts = {part: counts_of(count) for part, count in by_part.items()}
    return {
        name: np.array(
            [
                total[name][axis.level(ground)] - counts[part][name][axis.level(ground)]
                for ground, part in zip(grounds, parts, strict=True)
            ],
            dtype=float,
        )
        for name, axis in AXES.items()
    }


def half_widths(
    parts: Sequence[MovedParts], counts: Mapping[str, Floats], spread: SpreadEstimate, unknown: UnknownEstimate
) -> tuple[Floats, Floats]:
    """Lower and upper half widths of 90% intervals, in logarithms."""
    down, up = _deviations(parts, counts, spread, unknown.unknown_std, unknown.half_at)
    return NINE_IN_TEN * down, NINE_IN_TEN * up


def fit_unknown(
    parts: Sequence[MovedParts], tables: Sequence[LeftOut], sources: Sequence[str], spread: SpreadEstimate
) -> UnknownEstimate:
    """Deviations with the highest posterior, one after the other on a grid until none changes."""
    sizes = Counter(sources)
    weights = np.array([sizes[source] ** -_DIVIDED for source in sources])

    def posterior(stds: Mapping[str, float], half_at: float) -> float:
        total = -sum(float(np.log(std / _USUAL)) ** 2 / 2 / _LOG_STD**2 for std in stds.values())
        for table in tables:
            down, up = _deviations(parts, table.counts, spread, stds, half_at)
            total += float(weights @ log_density(table.errors, down, up)) / len(tables)
        return total

    best = UnknownEstimate(dict.fromkeys(AXES, _USUAL), 4.0)
    for _ in range(_ROUNDS):
        before = best
        for name in AXES:
            stds = [{**best.unknown_std, name: std} for std in _STDS]
            best = UnknownEstimate(max(stds, key=lambda std: posterior(std, best.half_at)), best.half_at)
        half_at = max(_HALF_AT, key=lambda number: posterior(best.unknown_std, number))
        best = UnknownEstimate(best.unknown_std, half_at)
        if best == before:
            break
    return best


def _deviations(
    parts: Sequence[MovedParts],
    counts: Mapping[str, Floats],
    spread: SpreadEstimate,
    stds: Mapping[str, float],
    half_at: float,
) -> tuple[Floats, Floats]:
    """Standard deviations of log step times, down and up."""
    squares = {"compute": np.zeros(len(parts)), "communication": np.zeros(len(parts))}
    for name, axis in AXES.items():
        squares[axis.source] += stds[name] ** 2 / (1 + counts[name] / half_at)
    known = counts["framework"] > 0
    software_stds = np.array([spread.computing.get(part.software, spread.common) for part in parts])
    computing = np.sqrt(np.where(known, software_stds, spread.common) ** 2 + squares["compute"])
    return deviations(parts, computing, np.sqrt(spread.between_nodes**2 + squares["communication"]))


def coverage_text(
    parts: Sequence[MovedParts], left: Mapping[str, LeftOut], spread: SpreadEstimate, unknown: UnknownEstimate
) -> Iterator[str]:
    """Yield lines on the coverage and width of intervals of left-out runs, as they are and as on known ground."""
    for axis, std in unknown.unknown_std.items():
        yield f"without runs, {axis} adds {100 * std:.0f} % to {AXES[axis].source}"
    yield f"{unknown.half_at:g} runs halve the square"
    for name, table in left.items():
        plain = UnknownEstimate(dict.fromkeys(AXES, 0.0), unknown.half_at)
        cells = []
        for estimate in (plain, unknown):
            down, up = half_widths(parts, table.counts, spread, estimate)
            inside = (table.errors <= down) & (-table.errors <= up)
            cells.append(f"{100 * inside.mean():.0f} % (half width {50 * np.median(np.exp(up) - np.exp(-down)):.1f} %)")
        yield f"inside 90 % intervals: {name} left out {cells[1]}, as on known ground {cells[0]}"


def known_lines(
    grounds: Sequence[Ground],
    sources: Sequence[str],
    errors: Floats,
    spread: SpreadEstimate,
    unknown: UnknownEstimate,
) -> Iterator[str]:
    """Yield the lines of known.yaml.

    Args:
        grounds, sources: Of every run.
        errors: ``(runs,)`` Log errors with the source left out.
        spread, unknown: Deviations on known ground, and without runs.
    """
    yield "# Written by `make fit` (python -m fit.step_times), from scenarios/published. See simplan/cost/known.py."
    yield f"date: {datetime.datetime.now(datetime.UTC).date()}"
    yield "# Relative standard deviations: of compute under a framework without runs, and what axes add without runs."
    yield f"common_std: {spread.common:.3f}"
    yield f"unknown_std: {{{', '.join(f'{axis}: {std:.3f}' for axis, std in unknown.unknown_std.items())}}}"
    yield f"half_at: {unknown.half_at:g}"
    yield f"# {', '.join(Ground._fields)}; runs, their sources, root mean square of log errors with the source left out"
    yield "runs:"
    rows_of_ground: dict[Ground, list[int]] = defaultdict(list)
    for index, ground in enumerate(grounds):
        rows_of_ground[ground].append(index)
    for ground, rows in sorted(rows_of_ground.items()):
        num_sources = len({sources[index] for index in rows})
        off = float(np.sqrt(np.mean(errors[rows] ** 2)))
        yield f"- [{', '.join(map(str, ground))}, {len(rows)}, {num_sources}, {off:.3f}]"


def left_out_lines(
    ids: Sequence[str],
    moved: Floats,
    parts: Sequence[MovedParts],
    left: LeftOut,
    spread: SpreadEstimate,
    unknown: UnknownEstimate,
) -> Iterator[str]:
    """Yield the lines of left_out.yaml.

    Args:
        ids: Names of the runs.
        moved: ``(runs,)`` Logarithm of the predicted time without the source over that with all constants.
        parts, left, spread, unknown: Give the intervals.
    """
    yield "# Written by `make fit` (python -m fit.step_times). Each run predicted without its source: time over that of"
    yield "# all constants, and ends of the 90 % interval over that time."
    yield "runs:"
    down, up = half_widths(parts, left.counts, spread, unknown)
    for name, *logs in sorted(zip(ids, moved, -down, up, strict=True)):
        yield f"  {name}: [{', '.join(f'{np.exp(log_bias):.4f}' for log_bias in logs)}]"
