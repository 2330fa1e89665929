"""``simplan capture``."""
