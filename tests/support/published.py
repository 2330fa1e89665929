"""Published runs of the project, read once per process."""

from __future__ import annotations

from functools import cache

from simplan.accuracy.run import ReadFile
from simplan.scenario.published.reading import read_published
from tests.support.sources import ROOT


@cache
def published_files() -> tuple[ReadFile, ...]:
    """Files of all runs: published, held out, and for validation."""
    return tuple(read_published([ROOT / "scenarios" / name for name in ("published", "heldout", "validation")]))
