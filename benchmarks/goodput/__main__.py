"""Command ``python -m benchmarks.goodput``: published whole runs beside what simplan says, in ``GOODPUT.md``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from benchmarks.goodput.failures import failure_rows
from benchmarks.goodput.mlperf import mlperf_rows
from benchmarks.goodput.rows import HEADER, PublishedRow

_RESULTS = Path(__file__).resolve().parents[1] / "GOODPUT.md"
_HEAD = """# Published whole runs

Written by `python -m benchmarks.goodput`. Marks: P, read in the source or computed from it; S, in a secondary
collection. "Fitted on it" says which part of the published number went into the preset or the inputs.

- **met**: the number did not go into the preset as a whole, and simplan agrees.
- **missed**: it does not agree; the reason is given.
- **fitted**: the preset was made from the number, so agreement means nothing.
- **implied**: an input that decides the number was not published; simplan says what it must have been.

For Llama 3 the half was drawn by cause with seed 0. That tests that counts scatter as a Poisson process, and that the
simulated job is exposed to failures as the real one was. It does not test the rates on another cluster, size or year.
"""


def page(rows: Sequence[PublishedRow]) -> str:
    """The report."""
    counts = {name: sum(row.outcome == name for row in rows) for name in ("met", "missed", "fitted", "implied")}
    words = ", ".join(f"{number} {name}" for name, number in counts.items())
    return "\n".join([_HEAD, HEADER, *(row.to_markdown() for row in rows), "", f"{len(rows)} numbers: {words}.", ""])


def main() -> int:
    """Prints rows as they are found, and writes the report."""
    print(HEADER, flush=True)
    rows = []
    for row in chain(mlperf_rows(), failure_rows()):
        print(row.to_markdown(), flush=True)
        rows.append(row)
    _RESULTS.write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
