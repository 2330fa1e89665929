"""What a cost model is: a price, in seconds and with its provenance, for every kind of work in a Program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from simplan.program.program import HostCopy, HostWait, LayerWork, Message

__all__ = ["CostModel", "Price", "Provenance"]


class Provenance(StrEnum):
    """Where a price comes from, surest first."""

    CALIBRATED = "calibrated"
    PUBLISHED = "published"
    DATASHEET = "datasheet"
    EXTRAPOLATED = "extrapolated"


@dataclass(frozen=True, slots=True)
class Price:
    """How long something takes, alone.

    Attributes:
        seconds: The time.
        provenance: Where it comes from.
        relative_std: Relative standard deviation: how sure it is.
        formula: The formula with numbers filled in.
    """

    seconds: float
    provenance: Provenance
    relative_std: float
    formula: str


class CostModel(Protocol):
    """Prices work, alone. Equal work has an equal price, so callers may keep prices."""

    @property
    def taken_share(self) -> float:
        """Part of a device that messages take from what is computed beside them, below 1."""
        ...

    def compute(self, work: LayerWork) -> Price:
        """Time of one phase of one layer on one device."""
        ...

    def message(self, message: Message) -> Price:
        """Time of a collective or a send once all its members are ready."""
        ...

    def host_copy(self, copy: HostCopy) -> Price:
        """Time of a copy between a device and its host."""
        ...

    def host_wait(self, wait: HostWait) -> Price:
        """Time of what the device waits for its host for."""
        ...
