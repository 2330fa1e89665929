"""Recordings of users' own training loops, compared with predictions."""
