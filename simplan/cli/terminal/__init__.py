"""The terminal: output, progress, child processes, common options."""
