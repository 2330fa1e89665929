"""Predictions compared with published training runs."""
