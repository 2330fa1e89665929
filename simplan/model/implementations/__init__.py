"""Framework implementations of layers, where they differ from eager torch modules."""
