"""The models as modules of torch, built from a ModelSpec."""
