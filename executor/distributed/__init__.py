"""Parallelism: one file for each axis, and the collectives along it."""
