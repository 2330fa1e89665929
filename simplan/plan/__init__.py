"""The parallel plan, its schedules, and the ranks of a mesh."""
