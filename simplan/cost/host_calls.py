"""Time of a host that handles the tensors of a list one by one: Python and torch, not a device."""

from __future__ import annotations

from simplan.cost.base import Price, Provenance
from simplan.program.program import HostCalls
from simplan.units import format_time

__all__ = ["host_calls_price"]

_CALL_S = 20e-6
"""One tensor of a list of a collective: Python makes a view of it and asks for its own rank, torch checks it and copies
from or to one buffer for all. Timed on a busy server (AMD EPYC, torch 2.13, tensors on the CPU) the first takes 14 to
22 us and the second 5 to 12 us; on a GPU each copy is a launch besides. Not fitted."""
_RELATIVE_STD = 0.3


def host_calls_price(calls: HostCalls) -> Price:
    """Price on any host."""
    formula = f"{calls.num_calls} x {format_time(_CALL_S)} of the host"
    return Price(calls.num_calls * _CALL_S, Provenance.DATASHEET, _RELATIVE_STD, formula)
