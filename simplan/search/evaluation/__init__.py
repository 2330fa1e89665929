"""Evaluation of plans, in this process or in workers."""
