"""Predictions held against training runs that others published."""
