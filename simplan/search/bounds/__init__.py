"""Lower bounds on step time and memory."""
