"""Replicas that do not wait for each other in every step: backup workers, and outer steps of those that train alone."""
