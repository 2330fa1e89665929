"""Whole pipelines in machine code: tables, times and memory of many plans at once, without an object per action.

The numbers are those of the Program that ``simplan.program.lower`` writes, simulated by ``simplan.sim.engine`` and
walked by ``simplan.sim.memory``. Importing this package imports numba.
"""
