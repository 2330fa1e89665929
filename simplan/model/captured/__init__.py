"""Models captured from torch modules: what the capture saw, and the layers that follow from it."""
