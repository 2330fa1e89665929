"""Engines that simulate whole runs: the reference in SimPy and the compiled one, and the random numbers of both."""
