"""The model: operators, layers, and how ranks split them."""
