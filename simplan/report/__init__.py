"""Predictions, comparisons and checks as words, tables and trace files."""
