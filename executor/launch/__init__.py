"""Ranks started with torchrun's elastic agent, watched, and the reasons why they ended."""
