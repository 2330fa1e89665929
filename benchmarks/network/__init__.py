"""Predictions of collectives and training steps against real ones, on hosts joined by shaped links."""
