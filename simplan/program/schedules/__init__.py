"""Schedules: functions that return the compute actions of every pipeline rank.

A new schedule needs one such function and one line in ``SCHEDULES``. It also needs one line in
``simplan.plan.schedules`` with its requirements, because rules may not import this package (a test compares the two). A
schedule is then checked, simulated, drawn, executed and compared like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simplan.program.schedules.full_backward import gpipe, interleaved_1f1b, naive, one_f_one_b
from simplan.program.schedules.shape import PipelineShape, Schedule, StageTimes
from simplan.program.schedules.v_shaped import dualpipe_v, zb_v
from simplan.program.schedules.zero_bubble_search import zb_1p, zb_2p, zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "PipelineShape",
    "Schedule",
    "StageTimes",
    "dualpipe_v",
    "gpipe",
    "interleaved_1f1b",
    "naive",
    "one_f_one_b",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "none": naive,  # one rank: forward and backward of each microbatch in turn, that is, gradient accumulation
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved_1f1b": interleaved_1f1b,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-1p": zb_1p,
        "zb-2p": zb_2p,
        "zb-v": zb_v,
        "dualpipe-v": dualpipe_v,
    }
)
