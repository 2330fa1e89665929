"""Memory of a rank: tensors of layers, their liveness, and persistent states."""
