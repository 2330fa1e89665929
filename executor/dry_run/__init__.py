"""One rank of a job of any size, alone in its process."""
