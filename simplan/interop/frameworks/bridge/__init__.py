"""Megatron Bridge: reading its configurations, and writing them."""
