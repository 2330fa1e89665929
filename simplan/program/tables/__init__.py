"""Action tables: made, completed, checked and read from files."""
