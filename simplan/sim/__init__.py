"""When everything happens, and what memory is held meanwhile."""
