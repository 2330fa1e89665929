"""Batch, precision and optimizer of a training."""
