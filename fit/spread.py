"""How sure step times are: spreads for which 90 % intervals hold as many of the runs that a fit has not seen.

Logarithms of measured over predicted times scatter as Student's t with five degrees of freedom, so that a run which is
far off does not widen the intervals of all others. Their scale has two parts: a share of what is computed, which every
framework has of its own and which is drawn to what they have in common (as if a framework's were within a factor of
``exp(0.5)`` of the common one in two of three cases); and a share of what the step waits for messages between nodes,
common to all: what training shares a network with, and what collectives take beside products, no benchmark of
collectives tells. What no model has makes steps longer, so intervals reach farther up than down, by a common factor.

All are found where their posterior is highest on a grid (Gelman et al., Bayesian Data Analysis, 3rd edition, sections
5.4 and 17.2), which needs no start. The degrees of freedom and what draws frameworks together are those of the best
interval score (Gneiting and Raftery 2007, section 6.2) of widths that had not seen the rows, which hardly depends on
either; scale and deviation here are those of a normal distribution with as wide a 90 % interval.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import gamma, pi
from typing import NamedTuple

import numpy as np

from fit.robust import Floats
from fit.rows import Prices, Row, Values
from simplan.program.program import LayerWork

__all__ = ["Parts", "Spread", "fit_spread", "interval_score", "parts_of", "unseen_std", "within", "within_left_out"]

_INSIDE = 0.9
_NINE_IN_TEN = 1.645  # as of intervals of predictions
_FREEDOM, _T_NINE_IN_TEN = 5, 2.015  # Student's t holds 90 % within so many times its scale
_TOGETHER = 0.5
_SCALES = np.exp(np.arange(np.log(0.005), np.log(1.0), 0.05))
_BETWEEN = np.exp(np.arange(np.log(0.05), np.log(2.5), 0.2))
_BETWEEN_USUAL, _BETWEEN_LOG_STD = 0.3, 1.0
_SKEWS = (1.0, 1.1, 1.2, 1.3, 1.4)


class Parts(NamedTuple):
    """What the step of a run consists of, as shares of the predicted time.

    Attributes:
        software: The profile it is predicted with.
        computing: What computation takes.
        deviation: One standard deviation of messages inside nodes.
        between: What messages between nodes take.
    """

    software: str
    computing: float
    deviation: float
    between: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How sure predictions are.

    Attributes:
        computing: Relative standard deviation of prices of computation by software profile.
        common: The same of a profile that no run is known of, on devices and in the manner of those that are.
        between_nodes: Relative standard deviation of messages between nodes.
        skew: Intervals reach so many times as far up, in logarithms, and as many times less far down.
    """

    computing: Mapping[str, float]
    common: float
    between_nodes: float
    skew: float

    def half_widths(self, parts: Sequence[Parts]) -> Floats:
        """Of 90 % intervals, in logarithms, before they are skewed."""
        own = [self.computing.get(part.software, self.common) for part in parts]
        return np.asarray(_NINE_IN_TEN * _deviations(parts, np.array(own), self.between_nodes))


def parts_of(rows: Sequence[Row], values: Values) -> list[Parts]:
    """What steps consist of.

    Args:
        rows: The runs.
        values: Constants.
    """
    prices, found = Prices(values), []
    for row in rows:
        predicted_s = row.predicted_s(prices)
        computing_s = sum(t.times * prices.seconds(row.job, t) for t in row.terms if isinstance(t.work, LayerWork))
        messages_s = (max(0.0, row.message_deviation_s), max(0.0, row.between_nodes_s))  # some stand in for a wait
        found.append(Parts(row.job.software.id, *(part_s / predicted_s for part_s in (computing_s, *messages_s))))
    return found


def fit_spread(parts: Sequence[Parts], errors: Floats) -> Spread:
    """The spread of highest posterior.

    Args:
        parts: Of all runs.
        errors: Logarithms of predicted over measured step times by fits that have not seen the run.
    """
    names = sorted({part.software for part in parts})
    own = np.array([[part.software == name for part in parts] for name in names], dtype=float)
    logs = np.log(_SCALES)
    drawn = (logs[:, None] - logs) ** 2 / 2 / _TOGETHER**2  # by common scale and own
    best, found = -np.inf, Spread({}, 0.0, 0.0, 1.0)
    for between in _BETWEEN:
        deviations = _deviations(parts, _SCALES[:, None], float(between))
        unusual = np.log(between / _BETWEEN_USUAL) ** 2 / 2 / _BETWEEN_LOG_STD**2
        for skew in _SKEWS:
            likely = own @ _log_density(errors, deviations, skew).T  # by profile and own scale
            each = likely[:, None, :] - drawn
            total = each.max(axis=2).sum(axis=0) - unusual
            common = int(total.argmax())
            if total[common] > best:
                best = float(total[common])
                scales = _SCALES[each[:, common].argmax(axis=1)]
                computing = dict(zip(names, map(float, scales), strict=True))
                found = Spread(computing, float(_SCALES[common]), float(between), skew)
    return found


def unseen_std(parts: Sequence[Parts], errors: Floats, sources: Sequence[str], spread: Spread) -> float:
    """Relative standard deviation of computation of a framework that nothing was fitted to.

    Nine in ten runs are within, each source counting alike.

    Args:
        parts: Of all runs.
        errors: By fits that have not seen the source.
        sources: By run.
        spread: Of messages between nodes, and how far intervals reach up and down.
    """
    messages = np.array([part.deviation + spread.between_nodes * part.between for part in parts])
    off = np.abs(errors) / _sides(errors, spread.skew) / _NINE_IN_TEN
    needed = np.sqrt(np.maximum(0.0, off**2 - messages**2)) / np.array([part.computing for part in parts])
    weights = np.array([1 / list(sources).count(source) for source in sources])
    order = np.argsort(needed)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(needed[order][np.searchsorted(reached, _INSIDE)])


def within(parts: Sequence[Parts], errors: Floats, spread: Spread) -> Floats:
    """Whether measured step times are inside of 90 % intervals about predictions with such errors."""
    return np.asarray(np.abs(errors) <= spread.half_widths(parts) * _sides(errors, spread.skew), dtype=float)


def within_left_out(parts: Sequence[Parts], errors: Floats, folds: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """The same with a spread that has not seen the fold of the run either.

    Returns:
        Whether they are inside, and interval scores.
    """
    inside, scores = np.zeros(len(parts)), np.zeros(len(parts))
    for fold in dict.fromkeys(folds):
        held = np.array([other == fold for other in folds])
        seen = [part for part, out in zip(parts, held, strict=True) if not out]
        mine = [part for part, out in zip(parts, held, strict=True) if out]
        spread = fit_spread(seen, errors[~held])
        inside[held] = within(mine, errors[held], spread)
        scores[held] = interval_score(mine, errors[held], spread)
    return inside, scores


def interval_score(parts: Sequence[Parts], errors: Floats, spread: Spread) -> Floats:
    """Width of the interval, and 20 times what is missing where it does not hold the truth; of the prediction."""
    half = spread.half_widths(parts)
    low, high, truth = np.exp(-half / spread.skew), np.exp(half * spread.skew), np.exp(-errors)
    missing = np.maximum(0.0, low - truth) + np.maximum(0.0, truth - high)
    return np.asarray(high - low + 2 / (1 - _INSIDE) * missing)


def _deviations(parts: Sequence[Parts], computing: Floats, between: float) -> Floats:
    """Of step times; computation and messages err independently, messages together."""
    _, shares, deviations, betweens = (np.array(column) for column in zip(*parts, strict=True))
    return np.asarray(np.hypot(computing * shares.astype(float), deviations + between * betweens))


def _sides(errors: Floats, skew: float) -> Floats:
    """How far intervals reach on the side of the truth: up where it is longer than predicted."""
    return np.where(errors < 0, skew, 1 / skew)


def _log_density(errors: Floats, deviations: Floats, skew: float) -> Floats:
    """Of Student's t in two halves of unequal scale (Fernandez and Steel 1998)."""
    scales = deviations * (_NINE_IN_TEN / _T_NINE_IN_TEN) * _sides(errors, skew)
    top = gamma((_FREEDOM + 1) / 2) / gamma(_FREEDOM / 2) / np.sqrt(_FREEDOM * pi)
    power = (_FREEDOM + 1) / 2
    halves = np.log(top * 2 / (skew + 1 / skew))
    return np.asarray(halves - np.log(scales) - power * np.log1p((errors / scales) ** 2 / _FREEDOM))
