"""Schedules: each is one function that returns the compute actions of every pipeline rank.

A new schedule is one such function, one line in ``SCHEDULES``, and its name among the modelled ones in
``simplan.spec.rules``, which may not import this package (a test keeps the two equal); from then on it is checked,
simulated, drawn, executed and compared like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simplan.program.schedules.gpipe import gpipe
from simplan.program.schedules.interleaved import interleaved_1f1b
from simplan.program.schedules.naive import naive
from simplan.program.schedules.one_f_one_b import one_f_one_b
from simplan.program.schedules.shape import PipelineShape, Schedule

__all__ = ["SCHEDULES", "PipelineShape", "Schedule", "gpipe", "interleaved_1f1b", "naive", "one_f_one_b"]

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "none": naive,  # one rank: forward and backward of each microbatch in turn, that is, gradient accumulation
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved_1f1b": interleaved_1f1b,
    }
)
