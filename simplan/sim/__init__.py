"""Simulation of a Program: times of all operations, and memory over time."""
