"""NeMo: reading configurations of versions 1.x and 2.0."""
