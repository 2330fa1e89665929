"""Published whole runs, and what simplan makes of them."""
