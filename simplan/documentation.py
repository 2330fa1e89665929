"""Address of a documentation page, for errors of an installed package."""

from __future__ import annotations

DOCUMENTATION_URL = "https://simplan.readthedocs.io"
"""As under ``Documentation`` in pyproject.toml: a placeholder until the site is hosted."""


def documentation(page: str) -> str:
    """Address of a page, which is given as in the site's navigation: ``how-to/devices``."""
    return f"{DOCUMENTATION_URL}/{page}/"
