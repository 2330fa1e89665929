"""The Program (the lowered operation list of a training step) and the passes that produce it."""
