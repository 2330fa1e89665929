"""Goodput of a run and where its time went, beside what was predicted before it started."""

from __future__ import annotations

from dataclasses import dataclass

from simplan.runs.faults import ExpectedRun, RunTimes
from simplan.runs.measurement import Measurement

_SAME = {"diagnosis": "waiting", "lost_work": "lost work", "slow_device": "slow device", "fewer_nodes": "fewer nodes"}
"""Parts by the word for the reader; a run cannot tell the diagnosis of a failure from the wait for ranks to start."""


@dataclass(frozen=True, slots=True)
class GoodputComparison:
    """Goodput of a run with restarts.

    Attributes:
        predicted: P5, P50 and P95; None without a prediction.
        measured: Time of steps that count over the time of the run.
        holds: True if the measured goodput is between P5 and P95; None without a prediction.
        predicted_s, measured_s: Seconds by part, the predicted ones means; they sum to the times of the run.
        predicted_interruptions: Mean number; None without a prediction.
        interruptions: Number by kind.
        num_runs: Simulated runs.
    """

    predicted: tuple[float, float, float] | None
    measured: float
    holds: bool | None
    predicted_s: dict[str, float]
    measured_s: dict[str, float]
    predicted_interruptions: float | None
    interruptions: dict[str, int]
    num_runs: int = 0

    @classmethod
    def of(cls, measurement: Measurement) -> GoodputComparison | None:
        """The comparison; None for a run whose time was not split, and for one that nothing interrupted."""
        times, expected = measurement.times, measurement.job.expected
        if times is None or not (times.stops or measurement.job.faults):
            return None
        return cls(
            predicted=None if expected is None else expected.goodput,
            measured=times.goodput,
            holds=None if expected is None else expected.goodput[0] <= times.goodput <= expected.goodput[2],
            predicted_s={} if expected is None else _by_part(expected),
            measured_s=_by_part(times),
            predicted_interruptions=None if expected is None else expected.interruptions,
            interruptions=times.interruptions,
            num_runs=0 if expected is None else expected.num_runs,
        )


def _by_part(times: ExpectedRun | RunTimes) -> dict[str, float]:
    parts_s: dict[str, float] = {}
    for name, seconds in times.waterfall_s.items():
        if seconds:
            part = _SAME.get(name, name)
            parts_s[part] = parts_s.get(part, 0.0) + seconds
    return parts_s
