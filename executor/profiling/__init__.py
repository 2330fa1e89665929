"""Measurements of a run: spans, collectives, memory, and the results computed from them."""
