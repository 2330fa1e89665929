"""Measured prices of a machine: their format, where they lie, and costs from them."""
