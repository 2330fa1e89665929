"""Whole runs of scenarios: their sections in a file, the numbers that follow from a prediction, and simulated runs."""
