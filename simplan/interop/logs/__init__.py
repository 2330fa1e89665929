"""Logs of training frameworks, traces and memory snapshots as a ``LoggedRun``: found by content, read as data."""
