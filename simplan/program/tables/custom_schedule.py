"""Custom schedules: an action table in a CSV file, or a function of an installed package."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from simplan.errors import Problem, ProgramError, SpecError
from simplan.plan.schedules import installed_schedules, is_table_file
from simplan.program.action import Action, Table
from simplan.program.schedules import PipelineShape, Schedule

_MAX_BYTES = 64 * 1024**2
_ACTION = re.compile(r"\b\d+(?:[FBIW]\d+|(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD|OPTIM)\b")


def custom_schedule(name: str) -> Schedule:
    """Returns the custom schedule of a name.

    A file has one line per pipeline rank and one action per cell, in torch's text form (``0F1``); empty cells are
    skipped. It contains the actions F, B, I and W, or all actions except OPTIM. A function takes a ``PipelineShape``
    and returns such a table, of actions or of their text.

    Args:
        name: A CSV file, or an entry point of the group ``simplan.schedules``.

    Raises:
        SpecError: The file cannot be read, or the package cannot be loaded.
        ProgramError: A cell is not an action.
    """
    if is_table_file(name):
        table = _read(Path(name))
        return lambda shape: _of_shape(table, shape, name)
    point = installed_schedules()[name]
    try:
        function = point.load()
    except Exception as error:  # an import of foreign code may raise any exception
        raise SpecError(_wrong(name, f"cannot be loaded from {point.value}: {error}", "repair the package")) from error
    return lambda shape: _of_shape(_called(function, shape, name), shape, name)


@contextmanager
def locating(name: str) -> Iterator[None]:
    """Adds the file to errors about an action table in a CSV file, and line, rank and columns to their actions.

    Args:
        name: Name of the schedule; errors of other schedules are raised as they are.

    Raises:
        ProgramError: The error with locations.
    """
    try:
        yield
    except ProgramError as error:
        if not is_table_file(name) or str(error).startswith(name):
            raise
        cells = _cells(Path(name))
        text = "\n".join(
            f"{name}: {_ACTION.sub(lambda found: found[0] + _location(found[0], cells), line)}"
            for line in str(error).splitlines()
        )
        raise ProgramError(text) from None


def _location(action: str, cells: Sequence[tuple[int, Sequence[str]]]) -> str:
    """Lines, ranks and columns of an action; line and rank of its stage if the file does not have the action."""
    places = [
        f"line {number}, rank {rank}, column {column}"
        for rank, (number, row) in enumerate(cells)
        for column, cell in enumerate(row, 1)
        if cell == action
    ]
    if not places:
        stage = Action.parse(action).stage
        places = [
            f"line {number}, rank {rank}"
            for rank, (number, row) in enumerate(cells)
            if any(cell and Action.parse(cell).stage == stage for cell in row)
        ]
    return f" ({'; '.join(places)})" if places else ""


def _cells(file: Path) -> list[tuple[int, list[str]]]:
    """Line number and cells of every rank.

    Raises:
        SpecError: The file cannot be read.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise SpecError(_wrong(str(file), f"is larger than {_MAX_BYTES // 1024**2} MiB", "use a smaller table"))
        with file.open(newline="", encoding="utf-8-sig") as opened:
            lines = list(csv.reader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "is not a text file with comma-separated values"
        raise SpecError(_wrong(str(file), f"cannot be read: {reason}", "name a CSV file of actions")) from error
    rows = [(number, [cell.strip() for cell in line]) for number, line in enumerate(lines, 1)]
    return [(number, row) for number, row in rows if any(row)]


def _read(file: Path) -> Table:
    table = []
    for rank, (number, row) in enumerate(_cells(file)):
        actions: list[Action] = []
        for column, cell in enumerate(row, 1):
            try:
                actions += _row([cell])
            except ProgramError as error:
                raise ProgramError(f"{file}: line {number} (rank {rank}), column {column}: {error}") from None
        table.append(tuple(actions))
    return tuple(table)


def _row(cells: Sequence[object]) -> tuple[Action, ...]:
    """Returns the actions of cells, which are actions or their text."""
    return tuple(
        cell if isinstance(cell, Action) else Action.parse(str(cell))
        for cell in cells
        if isinstance(cell, Action) or str(cell).strip()
    )


def _called(function: Schedule, shape: PipelineShape, name: str) -> Table:
    try:
        return tuple(_row(row) for row in function(shape))
    except ProgramError as error:
        raise ProgramError(f"schedule {name}: {error}") from None
    except Exception as error:  # foreign code may raise any exception
        rule = f"failed for {shape.num_ranks} ranks and {shape.num_microbatches} microbatches: {error!r}"
        raise SpecError(_wrong(name, rule, "repair the schedule")) from error


def _of_shape(table: Table, shape: PipelineShape, name: str) -> Table:
    """Returns the table if it matches the pipeline."""
    stages = {action.stage for row in table for action in row}
    microbatches = {action.microbatch for row in table for action in row if action.microbatch is not None}
    if len(table) != shape.num_ranks:
        rule = f"has {len(table)} rows, one for each pipeline rank, and pp = {shape.num_ranks}"
        raise SpecError(_wrong(name, rule, f"use plan.pp = {len(table)}, or another table"))
    if stages != set(range(shape.num_stages)):
        rule = f"has {len(stages)} stages and the plan has {shape.num_stages}"
        fix = "use another table"
        if len(stages) % len(table) == 0 and stages == set(range(len(stages))):
            fix = f"use plan.virtual_stages = {len(stages) // len(table)}, or another table"
        raise SpecError(_wrong(name, rule, fix))
    if microbatches != set(range(shape.num_microbatches)):
        rule = f"has {_numbered(sorted(microbatches))}; a step has {_numbered(range(shape.num_microbatches))}"
        raise SpecError(_wrong(name, rule, "change training.global_batch_size or plan.microbatch_size, or the table"))
    return table


def _numbered(microbatches: Sequence[int]) -> str:
    """Numbers of microbatches in words.

    >>> _numbered([1, 2, 3]), _numbered([0]), _numbered([0, 2])
    ('microbatches 1 to 3', 'microbatch 0', 'microbatches 0, 2')
    """
    if len(microbatches) == 1:
        return f"microbatch {microbatches[0]}"
    if microbatches and microbatches[-1] - microbatches[0] == len(microbatches) - 1:
        return f"microbatches {microbatches[0]} to {microbatches[-1]}"
    return f"microbatches {', '.join(map(str, microbatches)) or 'none'}"


def _wrong(name: str, rule: str, fix: str) -> Problem:
    return Problem(field="plan.schedule", value=name, rule=rule, fix=fix)
