"""Many plans: the best, and why not the others."""
