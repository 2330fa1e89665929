"""``simplan search``."""
