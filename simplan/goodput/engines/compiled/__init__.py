"""Whole runs in machine code: the twin of ``reference``, equal to it run by run. Importing a module imports numba.

Functions have the names of their twins. Time moves to the next of the things that will happen (``soonest_s``), which
are few; steps and pauses that end before it follow each other in a short loop.
"""
