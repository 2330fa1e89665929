"""Fits of the catalog's constants to published measurements; run by ``make fit``."""
