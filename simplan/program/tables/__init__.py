"""Action tables: creation, completion, checks and reading from files."""
