"""Captured modules, calibrated and run on two ranks, beside their predictions."""
