"""What is asked of a refusal or a note: field, value, and the words of rule and fix that tell it from others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from simplan.errors import Problem, SpecError


def is_of(problem: Problem, field: str, value: str | None = None, *, rule: str = "", fix: str = "") -> bool:
    """True for a problem of a field, and of a value if one is asked for, whose rule and fix have these words."""
    asked = field == problem.field and (value is None or value == problem.value)
    return asked and rule in problem.rule and fix in problem.fix


def says(text: str, *parts: str) -> bool:
    """True for a text with these parts in this order: fields, values and fixes, whatever the words between them are.

    >>> says("plan.pp = 5: must divide 12; use 4 or 6", "plan.pp = 5: ... 12; use 4", "6")
    True
    """
    start = 0
    for piece in " ... ".join(parts).split(" ... "):
        place = text.find(piece, start)
        if place < 0:
            return False
        start = place + len(piece)
    return True


@contextmanager
def refuses(
    field: str,
    value: str | None = None,
    *,
    rule: str = "",
    fix: str = "",
    file: str | None = None,
    kind: type[SpecError] = SpecError,
) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Expects an error with a problem that ``is_of`` these; yields the error as ``pytest.raises`` does.

    Args:
        field: Empty for a problem of a whole file.
        file: Name of the file that the error begins with; None for any.
    """
    with pytest.raises(kind) as error:
        yield error
    assert any(is_of(problem, field, value, rule=rule, fix=fix) for problem in error.value.problems), error.value
    assert file is None or error.value.file == file
