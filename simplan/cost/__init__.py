"""Cost model: estimated time of work, with its uncertainty."""
