"""Benchmarks of simplan's goals; ``make bench`` runs them and writes ``benchmarks/RESULTS.md``."""
