"""Writer of kernels_fitted.yaml."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from fit.rates import ALL, ARCHITECTURE, KERNELS, SOFTWARE
from fit.rows import FitRow, Values
from fit.spread import SpreadEstimate

__all__ = ["fitted_text"]

_DIGITS = 4


def fitted_text(values: Values, rows: Sequence[FitRow], spread: SpreadEstimate, unseen: float) -> str:
    """Text of kernels_fitted.yaml.

    Args:
        values: Fitted constants by name.
        rows: Runs of the fit.
        spread: Uncertainty of step times.
        unseen: Relative standard deviation of compute for a software profile without fitted runs.
    """
    return "\n".join([*_lines(values, rows, spread, unseen), ""])


def _lines(values: Values, rows: Sequence[FitRow], spread: SpreadEstimate, unseen: float) -> Iterator[str]:
    yield "# Written by `make fit` (python -m fit.step_times), from kernels.yaml and scenarios/published."
    yield "all:"
    for field in ALL:
        yield f"  {field}: {_number(values[field])}"
    yield f"  unfitted_std: {unseen:.2f}"
    yield f"  inter_node_std: {spread.between_nodes:.2f}"
    yield "architectures:"
    for owner, own in _by(rows, lambda row: row.architecture):
        yield f"  {owner}:"
        yield from _fields(owner, ARCHITECTURE, values)
        kernels = [f"{name}: {_number(values[f'{owner}.{name}'])}" for name in KERNELS if f"{owner}.{name}" in values]
        if kernels:
            yield f"    attention: {{{', '.join(kernels)}}}"
        yield f'    fitted_on: "{_ids(own)}"'
    yield "software:"
    for owner, own in _by(rows, lambda row: row.question.job.software.id):
        yield f"  {owner}:"
        yield from _fields(owner, SOFTWARE, values)
        yield f"    relative_std: {spread.computing[owner]:.3f}"
        yield f'    fitted_on: "{_ids(own)}"'


def _fields(owner: str, fields: Iterable[str], values: Values) -> Iterator[str]:
    for field in fields:
        if f"{owner}.{field}" in values:
            yield f"    {field}: {_number(values[f'{owner}.{field}'])}"


def _by(rows: Sequence[FitRow], owner_of: Callable[[FitRow], str]) -> list[tuple[str, list[FitRow]]]:
    found: dict[str, list[FitRow]] = defaultdict(list)
    for row in rows:
        found[owner_of(row)].append(row)
    return sorted(found.items())


def _number(value: float) -> str:
    """Format a number as YAML requires, with a decimal point."""
    text = f"{value:.{_DIGITS}g}"
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


def _ids(rows: Sequence[FitRow]) -> str:
    """Number of runs per file; all runs with a step time are used."""
    names = ", ".join(f"{source} ({len(own)})" for source, own in _by(rows, lambda row: row.source))
    return f"{len(rows)} runs of scenarios/published: {names}"
