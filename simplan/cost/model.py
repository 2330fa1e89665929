"""Cost models: estimates in seconds, with their provenance, for every kind of work in a Program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from simplan.program.program import Communication, HostCopy, HostWait, LayerWork
from simplan.units import counted, format_number, format_time


class Provenance(StrEnum):
    """Sources of a cost estimate, most reliable first."""

    CALIBRATED = "calibrated"
    PUBLISHED = "published"
    DATASHEET = "datasheet"
    EXTRAPOLATED = "extrapolated"


class Limit(StrEnum):
    """Bounds of the time of a part of a cost."""

    COMPUTE = "compute"
    """FLOPs at the rate of large matmuls."""
    TILES = "tiles"
    """FLOPs of a result that fills no whole waves of tiles, or of tiles with a short inner dimension."""
    MEMORY = "memory"
    """Bytes at the bandwidth of the device's memory, or of the host's for work there."""
    LAUNCH = "launch"
    """Fixed overhead per kernel."""
    BANDWIDTH = "bandwidth"
    """Bytes at the bandwidth of a link."""
    LATENCY = "latency"
    """Start and steps of communication."""
    HOST = "host"
    """The host, which issues operations slower than the device runs them, or does something itself."""
    SLOWEST = "slowest device"
    """Waiting for the slowest of several devices."""
    TIMING = "timing"
    """A timing of a calibration."""


class CostPart(NamedTuple):
    """A part of a cost: one kernel, transfer or wait.

    Attributes:
        name: Name, e.g. ``q`` or ``q: weight gradient``.
        seconds: Seconds.
        limit: What bounds these seconds.
        words: Writes the formula from ``numbers``.
        numbers: Arguments of ``words``.
    """

    name: str
    seconds: float
    limit: Limit
    words: Callable[..., str]
    numbers: tuple[Any, ...] = ()

    @property
    def formula(self) -> str:
        """The formula with numbers filled in, whose value is ``seconds``."""
        return self.words(*self.numbers)

    def times(self, factor: float, why: str = "") -> CostPart:
        """Returns the part times a factor, with the reason for its formula; unchanged for 1."""
        if factor == 1.0:
            return self
        return self._replace(
            seconds=factor * self.seconds, words=_times_words, numbers=(factor, why, self.words, self.numbers)
        )


def _times_words(factor: float, why: str, words: Callable[..., str], numbers: tuple[Any, ...]) -> str:
    return f"{format_number(factor)}{f' ({why})' if why else ''} x ({words(*numbers)})"


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Cost estimate: the time of one item of work that runs alone.

    Attributes:
        parts: Kernels, transfers and waits whose seconds sum to those of the estimate.
        relative_std: Relative standard deviation of the estimate.
        least_s: Seconds that the bytes of a transfer need at datasheet bandwidth; 0 for other work, or unknown.
        seconds: Seconds of all parts.
    """

    parts: tuple[CostPart, ...] = field(compare=False)
    provenance: Provenance
    relative_std: float
    least_s: float = 0.0
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        """Sums the parts."""
        object.__setattr__(self, "seconds", sum([part.seconds for part in self.parts]))

    def times(self, factor: float, why: str = "") -> CostEstimate:
        """Returns the estimate times a factor, with the reason for its formulas."""
        return self if factor == 1.0 else replace(self, parts=tuple(part.times(factor, why) for part in self.parts))

    @property
    def formula(self) -> str:
        """The formula with numbers filled in; of several parts the seconds by what bounds them."""
        if len(self.parts) == 1:
            return self.parts[0].formula
        by_limit: dict[Limit, list[float]] = {}
        for part in self.parts:
            by_limit.setdefault(part.limit, []).append(part.seconds)
        return " + ".join(
            f"{format_time(sum(seconds), digits=4)} {_LIMIT_WORDS[limit].format(n=counted(len(seconds), 'kernel'))}"
            for limit, seconds in by_limit.items()
            if sum(seconds)
        )

    @classmethod
    def of(cls, part: CostPart, provenance: Provenance, relative_std: float, *, least_s: float = 0.0) -> CostEstimate:
        """Returns the estimate of a single part."""
        return cls((part,), provenance, relative_std, least_s)

    @classmethod
    def nothing(cls, why: str, provenance: Provenance = Provenance.DATASHEET) -> CostEstimate:
        """Returns the estimate of work that takes no time, and why."""
        return cls.of(CostPart(why, 0.0, Limit.LATENCY, "0 s ({})".format, (why,)), provenance, 0.0)


_LIMIT_WORDS = {limit: f"(bound by {limit}: {{n}})" for limit in Limit} | {
    Limit.SLOWEST: "(waiting for the slowest device)",
    Limit.HOST: "(waiting for the host)",
    Limit.TIMING: "(timed: {n})",
}


class CostModel(Protocol):
    """Estimates the time of work that runs alone. Equal work has equal estimates, so callers may cache them."""

    @property
    def overlap_slowdown(self) -> float:
        """Overlap slowdown: fraction of compute throughput lost while communication overlaps, below 1."""

    def compute(self, work: LayerWork) -> CostEstimate:
        """Returns the time of one phase of one layer on one device."""

    def communication(self, communication: Communication) -> CostEstimate:
        """Returns the time of a collective or P2P transfer once all its members are ready."""

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        """Returns the time of a copy between a device and its host."""

    def host_wait(self, wait: HostWait) -> CostEstimate:
        """Returns the time of a wait of the device for its host."""
