"""Uncertainty of step times: spreads whose 90% intervals cover 90% of held-out runs.

The log of measured over predicted time follows Student's t with five degrees of freedom. So one outlier does not widen
the intervals of all other runs. Its scale has two parts.

- Compute: a fraction of the compute time, specific to each framework and regularized toward a common value. In two of
  three cases it is within a factor of ``exp(0.5)`` of that value.
- Communication between nodes: a fraction common to all. Benchmarks of collectives show neither the sharing of a network
  with other jobs nor the slowdown next to GEMMs.

Hidden communication lengthens a step when it takes longer and never shortens it, so intervals reach farther up than
down (``fit.perturbation``). A further skew of all intervals gains nothing.

All spreads maximize the posterior on a grid (Gelman et al., Bayesian Data Analysis, 3rd edition, sections 5.4 and
17.2), which needs no start value. The degrees of freedom and the regularization are those with the best interval score
(Gneiting and Raftery 2007, section 6.2) of held-out widths; the score hardly depends on either. Scales and deviations
in this module are those of a normal distribution with the same 90% interval.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import gamma, pi

import numpy as np

from fit.perturbation import BETWEEN, MovedParts
from fit.robust import Floats
from simplan.predict.simulated import NINE_IN_TEN

_INSIDE = 0.9
_FREEDOM, _T_NINE_IN_TEN = 5, 2.015  # Student's t has 90% within 2.015 times its scale
_TOGETHER = 0.5
_SCALES = np.exp(np.arange(np.log(0.005), np.log(1.0), 0.05))
_BETWEEN = np.exp(np.arange(np.log(0.05), np.log(2.5), 0.2))
_BETWEEN_USUAL, _BETWEEN_LOG_STD = 0.3, 1.0


@dataclass(frozen=True, slots=True)
class SpreadEstimate:
    """Fitted uncertainty of predictions.

    Attributes:
        computing: Relative standard deviation of compute, by software profile.
        common: Relative standard deviation of compute for a profile without runs, on devices with runs.
        between_nodes: Relative standard deviation of communication between nodes.
    """

    computing: Mapping[str, float]
    common: float
    between_nodes: float

    def half_widths(self, parts: Sequence[MovedParts]) -> tuple[Floats, Floats]:
        """Lower and upper half widths of 90% intervals, in logarithms."""
        scales = [self.computing.get(part.software, self.common) for part in parts]
        down, up = deviations(parts, np.array(scales), self.between_nodes)
        return NINE_IN_TEN * down, NINE_IN_TEN * up


def fit_spread(parts: Sequence[MovedParts], errors: Floats) -> SpreadEstimate:
    """Find the spread with the highest posterior.

    Args:
        parts: Sensitivities of all runs.
        errors: Held-out logarithms of predicted over measured step times.
    """
    names = sorted({part.software for part in parts})
    is_of_software = np.array([[part.software == name for part in parts] for name in names], dtype=float)
    logs = np.log(_SCALES)
    drawn = (logs[:, None] - logs) ** 2 / 2 / _TOGETHER**2  # by common scale and own
    best, spread = -np.inf, SpreadEstimate({}, 0.0, 0.0)
    for between in _BETWEEN:
        down, up = deviations(parts, _SCALES[:, None], float(between))
        unusual = np.log(between / _BETWEEN_USUAL) ** 2 / 2 / _BETWEEN_LOG_STD**2
        likely = is_of_software @ log_density(errors, down, up).T  # by profile and own scale
        log_posterior = likely[:, None, :] - drawn
        total = log_posterior.max(axis=2).sum(axis=0) - unusual
        common = int(total.argmax())
        if total[common] > best:
            best = float(total[common])
            scales = _SCALES[log_posterior[:, common].argmax(axis=1)]
            computing = dict(zip(names, map(float, scales), strict=True))
            spread = SpreadEstimate(computing, float(_SCALES[common]), float(between))
    return spread


def within(parts: Sequence[MovedParts], errors: Floats, spread: SpreadEstimate) -> Floats:
    """``(runs,)`` 1 if the measured step time is inside the 90% interval of the prediction, else 0."""
    down, up = spread.half_widths(parts)
    return np.asarray((errors <= down) & (-errors <= up), dtype=float)


def within_left_out(parts: Sequence[MovedParts], errors: Floats, folds: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """Coverage and interval scores with spreads that are held out by fold too.

    Returns:
        ``(runs,)`` 1 if inside the interval, else 0; and ``(runs,)`` interval scores.
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
    """Interval score relative to the prediction: width plus 20 times the distance of a measurement outside."""
    down, up = spread.half_widths(parts)
    low, high, truth = np.exp(-down), np.exp(up), np.exp(-errors)
    missing = np.maximum(0.0, low - truth) + np.maximum(0.0, truth - high)
    return np.asarray(high - low + 2 / (1 - _INSIDE) * missing)


def deviations(parts: Sequence[MovedParts], computing: Floats, between: float | Floats) -> tuple[Floats, Floats]:
    """Standard deviations of log step times, down and up; compute and communication are independent.

    Args:
        parts: Sensitivities of runs.
        computing: ``(..., runs)`` Relative standard deviations of compute.
        between: Relative standard deviation of communication between nodes, one for all or ``(runs,)``.
    """
    shares = np.array([part.computing for part in parts])
    shorter, longer = _communications(parts, between)
    down, up = -np.log1p(-shares * computing / (1 + computing)), np.log1p(shares * computing)
    return np.hypot(down, shorter), np.hypot(up, longer)


def _communications(parts: Sequence[MovedParts], between: float | Floats) -> tuple[Floats, Floats]:
    """Shortening and lengthening of steps by communication and host work, in logarithms."""
    sides = ([part.shorter for part in parts], [part.longer for part in parts])
    stds = np.broadcast_to(between, len(parts))
    shorter, longer = (
        np.array([np.interp(std, BETWEEN, by_std) for std, by_std in zip(stds, side, strict=True)]) for side in sides
    )
    return shorter, longer


def log_density(errors: Floats, down: Floats, up: Floats) -> Floats:
    """Log density of Student's t in two halves of unequal scale (Fernandez and Steel 1998)."""
    to_scale = NINE_IN_TEN / _T_NINE_IN_TEN
    scales = np.where(errors < 0, up, down) * to_scale
    top = gamma((_FREEDOM + 1) / 2) / gamma(_FREEDOM / 2) / np.sqrt(_FREEDOM * pi)
    power = (_FREEDOM + 1) / 2
    return np.asarray(np.log(2 * top / (to_scale * (down + up))) - power * np.log1p((errors / scales) ** 2 / _FREEDOM))
