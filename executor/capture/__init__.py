"""Captures of modules that users bring: one run on fake tensors, without a device and without weights in memory."""
