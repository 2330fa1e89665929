"""``simplan goodput``."""
