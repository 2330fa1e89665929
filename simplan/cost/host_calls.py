"""Time of a host that handles the tensors of a list one by one: Python and torch, not a device."""

from __future__ import annotations

from simplan.cost.base import Price, Provenance
from simplan.program.program import HostCalls
from simplan.units import format_time

__all__ = ["host_calls_price"]

_VIEW_S = 18e-6
"""Python makes a view of one tensor of a list and asks for its own rank: 14 to 22 us on a busy server (AMD EPYC, torch
2.13, tensors on the CPU). Not fitted."""
_COPY_S = 8.5e-6
"""Torch checks it and copies it from or to one buffer for all: 5 to 12 us there; on a GPU each copy is a launch
besides. Not fitted."""
_RELATIVE_STD = 0.3


def host_calls_price(calls: HostCalls) -> Price:
    """Price on any host."""
    call_s = _COPY_S if calls.copies else _VIEW_S
    formula = f"{calls.num_calls} x {format_time(call_s)} of the host"
    return Price(calls.num_calls * call_s, Provenance.DATASHEET, _RELATIVE_STD, formula)
