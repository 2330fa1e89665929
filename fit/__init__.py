"""Fits of the catalogue's constants on published measurements; ``make fit`` runs them."""
