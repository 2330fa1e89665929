"""The numbers simplan is held to; ``make bench`` runs them and writes ``benchmarks/RESULTS.md``."""
