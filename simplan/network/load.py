"""Load of the links of a fabric over one step, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from simplan.units import counted, format_bytes, format_percent, format_rate, format_time

_MAX_LISTED = 64
_MAX_NAMED = 2
LEAST_VISIBLE = 1e-4
"""Fraction of the step below which contention costs nothing."""


@dataclass(frozen=True, slots=True)
class LinkShare:
    """One kind of communication on one link.

    Attributes:
        name: Communication and stream, e.g. ``all_gather over 32 ranks (shard)``.
        busy_s: Seconds for which it keeps the link busy in a step.
        lost_s: Seconds that it takes longer because the link is full, summed over groups of ranks.
    """

    name: str
    busy_s: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Load of one link in a step.

    Attributes:
        name: Both ends, e.g. ``leaf0 -> spine``.
        bytes_per_s: Datasheet bandwidth.
        num_bytes: Bytes that cross the link.
        busy_share: Fraction of the step for which the link is busy, at the bandwidth that algorithms achieve on it.
        lost_s: Seconds that communications take longer because this link is full, summed over groups of ranks.
        communications: Communications that cross the link, most delayed first, then busiest.
        series: Busy share in each of the intervals of ``Network.interval_s``; empty for links with little load.
    """

    name: str
    bytes_per_s: float
    num_bytes: float
    busy_share: float
    lost_s: float
    communications: tuple[LinkShare, ...]
    series: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class OtherJob:
    """Steps of a background job.

    Attributes:
        name: Name of the job.
        alone_s: Seconds of its step if no other job used the links.
        step_times_s: Seconds of each of its steps that lies inside the predicted step.
    """

    name: str
    alone_s: float
    step_times_s: tuple[float, ...]

    @property
    def words(self) -> str:
        """Step times in words."""
        alone, number = format_time(self.alone_s), len(self.step_times_s)
        if not number:
            return f"{self.name} takes {alone} a step alone, and no whole step of it is inside this one"
        mean_s = sum(self.step_times_s) / number
        which = "its step" if number == 1 else f"the mean of its {number} steps"
        return f"{self.name} takes {format_time(mean_s)} ({which} inside this one) and {alone} alone"


@dataclass(frozen=True, slots=True)
class Network:
    """Load of the links of a fabric in a step.

    Attributes:
        step_time_s: Seconds of the step.
        contention_s: Seconds of the step that it would not take if no communication waited for a link.
        links: Links with any load, those that delay communications most first, then the busiest.
        num_links: All links of the fabric.
        interval_s: Seconds of each interval of ``LinkLoad.series``, from the start of the simulated step.
        without_background_s: Seconds of the step if no other job used the links; None without other jobs.
        other_jobs: Background jobs; none for constant traffic.
    """

    step_time_s: float
    contention_s: float
    links: tuple[LinkLoad, ...]
    num_links: int
    interval_s: float
    without_background_s: float | None = None
    other_jobs: tuple[OtherJob, ...] = ()

    @property
    def slowest(self) -> LinkLoad | None:
        """Link that delays communications most, else the busiest; None without any load."""
        return self.links[0] if self.links else None

    @property
    def label(self) -> str:
        """Name of ``slowest`` in reports: it delays communications, or is only the busiest."""
        delays = self.slowest is not None and self.slowest.lost_s > LEAST_VISIBLE * self.step_time_s
        return "slowest link" if delays else "busiest link"

    @property
    def has_contention(self) -> bool:
        """True if contention costs time that is visible in the step."""
        return self.contention_s > LEAST_VISIBLE * self.step_time_s

    def slowest_words(self) -> str:
        """Slowest link in words: name, bandwidth, traffic and mean busy share."""
        link = self.slowest
        if link is None:
            return "no link has traffic"
        return (
            f"{link.name} ({format_rate(link.bytes_per_s)}): {format_percent(link.busy_share)} busy, "
            f"{format_bytes(link.num_bytes)} a step"
        )

    def contention_words(self) -> str:
        """Cost of contention in words, with the communications that wait and those that they wait for."""
        link = self.slowest
        if not self.has_contention or link is None:
            return f"costs nothing: no communication of the critical path waits for a link of {self.num_links:,}"
        of = f"costs {format_time(self.contention_s)} of {format_time(self.step_time_s)}"
        where = f"on {link.name} ({format_percent(link.busy_share)} busy)"
        similar = sum(other.lost_s > 0.5 * link.lost_s for other in self.links) - 1
        where += f" and {counted(similar, 'similar link')}" if similar else ""
        delayed = [share.name for share in link.communications if share.lost_s > 0]
        if not delayed:
            return f"{of}, {where}"
        by = sorted((s for s in link.communications if s.busy_s > 0), key=lambda share: -share.busy_s)
        others = [share.name for share in by if share.name not in delayed[:_MAX_NAMED]][:_MAX_NAMED]
        words = f"{of}, {where}: {' and '.join(delayed[:_MAX_NAMED])}"
        return f"{words}, delayed by {' and '.join(others)}" if others else f"{words} fill it"

    def background_words(self) -> str:
        """Cost of other jobs in words, and of this one to background jobs; empty without other jobs."""
        if self.without_background_s is None:
            return ""
        longer = self.step_time_s / self.without_background_s - 1
        cost = f"{format_percent(longer)} longer" if longer > LEAST_VISIBLE else "no longer"
        words = f"the step takes {format_time(self.step_time_s)}, {cost} than {format_time(self.without_background_s)} "
        return "; ".join([f"{words}without them", *(job.words for job in self.other_jobs)])

    def to_json(self) -> dict[str, Any]:
        """As JSON: the links that delay most and the busiest, at most 64."""
        others = {"without_background_s": self.without_background_s, "other_jobs": [*map(asdict, self.other_jobs)]}
        return {
            "contention_s": self.contention_s,
            **({} if self.without_background_s is None else others),
            "num_links": self.num_links,
            "num_loaded_links": len(self.links),
            "interval_s": self.interval_s,
            "links": [asdict(link) for link in self.links[:_MAX_LISTED]],
        }
