"""Time of collectives, P2P sends and copies to the host."""
