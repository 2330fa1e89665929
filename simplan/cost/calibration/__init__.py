"""Calibrations: measured costs of a machine, their file format and location, and estimates from them."""
