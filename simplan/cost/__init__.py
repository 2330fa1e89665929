"""How long work takes, and how sure that is."""
