"""Closed forms for whole runs: what is known without simulation, where its assumptions hold.

All are for failures at a constant rate of the whole job, one of them each ``mtbf_s`` seconds on average. Seconds in,
seconds out.
"""

from __future__ import annotations

from math import expm1, sqrt


def young_s(blocking_s: float, mtbf_s: float) -> float:
    """Best interval of work between checkpoints, first order: sqrt(2 blocking M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974. It holds while the interval is far below ``mtbf_s``.
    """
    return sqrt(2 * blocking_s * mtbf_s)


def daly_s(blocking_s: float, mtbf_s: float) -> float:
    """Best interval of work between checkpoints, higher order; the mean time itself for checkpoints of twice that.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    half = blocking_s / (2 * mtbf_s)
    return young_s(blocking_s, mtbf_s) * (1 + sqrt(half) / 3 + half / 9) - blocking_s


def daly_time_s(work_s: float, interval_s: float, blocking_s: float, restart_s: float, mtbf_s: float) -> float:
    """Mean time of a run with failures in work, checkpoints and restarts.

    Daly 2006 (see ``daly_s``): M exp(R/M) (exp((interval + blocking)/M) - 1) work / interval. It is exact
    where each failure begins a restart of ``restart_s`` that failures repeat, and detection takes no time.
    """
    return mtbf_s * expm1((interval_s + blocking_s) / mtbf_s) * (1 + expm1(restart_s / mtbf_s)) * work_s / interval_s


def repeated_s(work_s: float, mtbf_s: float, repair_s: float) -> float:
    """Mean time of work that each failure begins anew, after a repair in which nothing fails: preempt-repeat.

    (M + R) (exp(work/M) - 1); V. G. Kulkarni, V. F. Nicola and K. S. Trivedi, "The completion time of a job on
    multimode systems", Advances in Applied Probability 19(4), 1987.
    """
    return (mtbf_s + repair_s) * expm1(work_s / mtbf_s)


def availability(mtbf_s: float, repair_s: float) -> float:
    """Fraction of time in which one repairable machine works, M / (M + R), by the renewal-reward theorem."""
    return mtbf_s / (mtbf_s + repair_s)


def ettr(interval_s: float, blocking_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected effective training time ratio, first order in the failures of an interval.

    (1 - (restart + interval / 2) / M) / (1 + blocking / interval); A. Kokolis et al., "Revisiting reliability in
    large-scale machine learning research clusters", arXiv 2410.21680, who found it within 5 % of their Monte Carlo for
    long runs. It holds while restart and interval are far below M.
    """
    return (1 - (restart_s + interval_s / 2) / mtbf_s) / (1 + blocking_s / interval_s)
