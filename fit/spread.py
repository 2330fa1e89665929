"""How sure step times are: spreads for which 90 % intervals hold as many of the runs that a fit has not seen.

Logarithms of measured over predicted times scatter as Student's t with five degrees of freedom, so that a run which is
far off does not widen the intervals of all others. Their scale has two parts: a share of what is computed, which every
framework has of its own and which is drawn to what they have in common (as if a framework's were within a factor of
``exp(0.5)`` of the common one in two of three cases); and a share of what messages between nodes take, common to all:
what training shares a network with, and what collectives take beside products, no benchmark of collectives tells. A
message that computation hides lengthens a step where it takes longer and shortens it in no case, so that intervals
reach farther up than down (``fit.moved``); a skew of all of them beyond that gains nothing.

All are found where their posterior is highest on a grid (Gelman et al., Bayesian Data Analysis, 3rd edition, sections
5.4 and 17.2), which needs no start. The degrees of freedom and what draws frameworks together are those of the best
interval score (Gneiting and Raftery 2007, section 6.2) of widths that had not seen the rows, which hardly depends on
either; scale and deviation here are those of a normal distribution with as wide a 90 % interval.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import gamma, pi

import numpy as np

from fit.moved import BETWEEN, MovedParts
from fit.robust import Floats

__all__ = ["SpreadEstimate", "fit_spread", "interval_score", "unseen_std", "within", "within_left_out"]

_INSIDE = 0.9
_NINE_IN_TEN = 1.645  # as of intervals of predictions
_FREEDOM, _T_NINE_IN_TEN = 5, 2.015  # Student's t holds 90 % within so many times its scale
_TOGETHER = 0.5
_SCALES = np.exp(np.arange(np.log(0.005), np.log(1.0), 0.05))
_BETWEEN = np.exp(np.arange(np.log(0.05), np.log(2.5), 0.2))
_BETWEEN_USUAL, _BETWEEN_LOG_STD = 0.3, 1.0


@dataclass(frozen=True, slots=True)
class SpreadEstimate:
    """How sure predictions are.

    Attributes:
        computing: Relative standard deviation of prices of computation by software profile.
        common: The same of a profile that no run is known of, on devices and in the manner of those that are.
        between_nodes: Relative standard deviation of messages between nodes.
    """

    computing: Mapping[str, float]
    common: float
    between_nodes: float

    def half_widths(self, parts: Sequence[MovedParts]) -> tuple[Floats, Floats]:
        """How far 90 % intervals reach down and up, in logarithms."""
        own = [self.computing.get(part.software, self.common) for part in parts]
        down, up = _deviations(parts, np.array(own), self.between_nodes)
        return _NINE_IN_TEN * down, _NINE_IN_TEN * up


def fit_spread(parts: Sequence[MovedParts], errors: Floats) -> SpreadEstimate:
    """The spread of highest posterior.

    Args:
        parts: Of all runs.
        errors: Logarithms of predicted over measured step times by fits that have not seen the run.
    """
    names = sorted({part.software for part in parts})
    own = np.array([[part.software == name for part in parts] for name in names], dtype=float)
    logs = np.log(_SCALES)
    drawn = (logs[:, None] - logs) ** 2 / 2 / _TOGETHER**2  # by common scale and own
    best, found = -np.inf, SpreadEstimate({}, 0.0, 0.0)
    for between in _BETWEEN:
        down, up = _deviations(parts, _SCALES[:, None], float(between))
        unusual = np.log(between / _BETWEEN_USUAL) ** 2 / 2 / _BETWEEN_LOG_STD**2
        likely = own @ _log_density(errors, down, up).T  # by profile and own scale
        each = likely[:, None, :] - drawn
        total = each.max(axis=2).sum(axis=0) - unusual
        common = int(total.argmax())
        if total[common] > best:
            best = float(total[common])
            scales = _SCALES[each[:, common].argmax(axis=1)]
            computing = dict(zip(names, map(float, scales), strict=True))
            found = SpreadEstimate(computing, float(_SCALES[common]), float(between))
    return found


def unseen_std(parts: Sequence[MovedParts], errors: Floats, sources: Sequence[str], spread: SpreadEstimate) -> float:
    """Relative standard deviation of computation of a framework that nothing was fitted to.

    Nine in ten runs are within, each source counting alike.

    Args:
        parts: Of all runs.
        errors: By fits that have not seen the source.
        sources: By run.
        spread: Of messages between nodes.
    """
    late = errors < 0
    shorter, longer = _messages(parts, spread.between_nodes)
    messages = np.where(late, longer, shorter)
    off = np.sqrt(np.maximum(0.0, (errors / _NINE_IN_TEN) ** 2 - messages**2))
    shares = np.array([part.computing for part in parts])
    needed = np.where(late, np.expm1(off) / shares, _slower(-np.expm1(-off) / shares))
    weights = np.array([1 / list(sources).count(source) for source in sources])
    order = np.argsort(needed)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(needed[order][np.searchsorted(reached, _INSIDE)])


def within(parts: Sequence[MovedParts], errors: Floats, spread: SpreadEstimate) -> Floats:
    """Whether measured step times are inside of 90 % intervals about predictions with such errors."""
    down, up = spread.half_widths(parts)
    return np.asarray((errors <= down) & (-errors <= up), dtype=float)


def within_left_out(parts: Sequence[MovedParts], errors: Floats, folds: Sequence[Hashable]) -> tuple[Floats, Floats]:
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


def interval_score(parts: Sequence[MovedParts], errors: Floats, spread: SpreadEstimate) -> Floats:
    """Width of the interval, and 20 times what is missing where it does not hold the truth; of the prediction."""
    down, up = spread.half_widths(parts)
    low, high, truth = np.exp(-down), np.exp(up), np.exp(-errors)
    missing = np.maximum(0.0, low - truth) + np.maximum(0.0, truth - high)
    return np.asarray(high - low + 2 / (1 - _INSIDE) * missing)


def _deviations(parts: Sequence[MovedParts], computing: Floats, between: float) -> tuple[Floats, Floats]:
    """Of step times, down and up; computation and messages err independently, messages together."""
    shares = np.array([part.computing for part in parts])
    shorter, longer = _messages(parts, between)
    down, up = -np.log1p(-shares * computing / (1 + computing)), np.log1p(shares * computing)
    return np.hypot(down, shorter), np.hypot(up, longer)


def _messages(parts: Sequence[MovedParts], between: float) -> tuple[Floats, Floats]:
    """What messages, and hosts, shorten and lengthen steps by."""
    sides = ([part.shorter for part in parts], [part.longer for part in parts])
    shorter, longer = (np.array([np.interp(between, BETWEEN, own) for own in side]) for side in sides)
    return shorter, longer


def _slower(saved: Floats) -> Floats:
    """What one minus its inverse is: of a price that is divided by one and as much."""
    return np.where(saved < 1, saved / np.maximum(1e-9, 1 - saved), np.inf)


def _log_density(errors: Floats, down: Floats, up: Floats) -> Floats:
    """Of Student's t in two halves of unequal scale (Fernandez and Steel 1998)."""
    to_scale = _NINE_IN_TEN / _T_NINE_IN_TEN
    scales = np.where(errors < 0, up, down) * to_scale
    top = gamma((_FREEDOM + 1) / 2) / gamma(_FREEDOM / 2) / np.sqrt(_FREEDOM * pi)
    power = (_FREEDOM + 1) / 2
    return np.asarray(np.log(2 * top / (to_scale * (down + up))) - power * np.log1p((errors / scales) ** 2 / _FREEDOM))
