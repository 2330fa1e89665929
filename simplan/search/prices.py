"""Seconds of work and messages, each priced once for all plans of a job."""

from __future__ import annotations

from simplan.cost.analytic import AnalyticCost
from simplan.program.program import LayerWork, Message

__all__ = ["Prices"]


class Prices:
    """What a cost model says, without its words; ways of splitting and recomputing layers have most work in common.

    Args:
        cost: The model.
    """

    def __init__(self, cost: AnalyticCost) -> None:
        self._cost = cost
        self._of_work: dict[LayerWork, float] = {}
        self._of_message: dict[Message, float] = {}

    @property
    def taken_share(self) -> float:
        """Of a device, by messages, from what is computed beside them."""
        return self._cost.taken_share

    def work_s(self, work: LayerWork) -> float:
        """One phase of one layer."""
        found = self._of_work.get(work)
        if found is None:
            found = self._of_work[work] = self._cost.compute_s(work)
        return found

    def message_s(self, message: Message) -> float:
        """A collective or a send of few ranks."""
        found = self._of_message.get(message)
        if found is None:
            found = self._of_message[message] = self._cost.message_s(message)
        return found

    def mesh_message_s(self, message: Message) -> float:
        """The same of any number of ranks; not kept."""
        return self._cost.message_s(message)
